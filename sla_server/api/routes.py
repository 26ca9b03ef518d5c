"""The table of routes. URL map, rights and OpenAPI document are made from it, so they cannot differ.

``changes`` marks routes that need token or session, ``role`` who may use them. ``operation`` names the
handler, a function of that name in a module of ``handlers``. Routes of accounts are in ``access_routes``, of
events and notifications in ``event_routes``, of reports in ``report_routes``, of what is only listed in
``record_routes``.
"""

from __future__ import annotations

from typing import Final

from sla_server.api.access_routes import ACCESS_ROUTES
from sla_server.api.event_routes import EVENT_ROUTES
from sla_server.api.record_routes import BEFORE, RECORD_ROUTES
from sla_server.api.report_routes import REPORT_ROUTES
from sla_server.api.route import ANY, LIMIT, LIMIT_MAX, ApiRoute, Query

LONG_LIMIT_MAX: Final = 5000
MAX_US: Final = 1 << 62
POOL_DAYS_MAX: Final = 400
CREDITS_MAX: Final = 14
"""Slices are kept 13 months."""

PERIODS_MAX: Final = 60  # five years of months; slices are kept for 13 months by default
BASED_ON = Query(
    "based_on",
    "string",
    "NAME:VERSION that the text was made from, KIND/NAME:VERSION of what is no agreement; else 409.",
)
GOING_ON = Query(
    "since_us", "integer", "Only what had not ended before then, microseconds UTC.", least=0, most=MAX_US
)
FROM = Query(
    "from_us",
    "integer",
    "Start, microseconds UTC; default: one hour (slices: one day) before to_us. Slices: or a page's `next`.",
    least=0,
    most=MAX_US,
)
TO = Query("to_us", "integer", "End, microseconds UTC; default: now.", least=0, most=MAX_US)
LONG = Query("limit", "integer", "Rows a page; default 2000.", least=1, most=LONG_LIMIT_MAX)
AFTER = Query("after", "string", "The `next` of the page before.")
MATCH = Query("match", "string", "Only those whose name has this in it, whatever the case.")
OFFSET = Query("offset", "integer", "Rows before the page; default 0.", least=0, most=(1 << 31) - 1)
PAGE = Query("limit", "integer", "Rows a page; default 50.", least=1, most=LIMIT_MAX)
SOME = Query("limit", "integer", "Rows a page; default: all.", least=1, most=LIMIT_MAX)
OBJECTIVE = Query("objective", "string", "Which objective of the agreement; default: its first.")
VOLUME = Query("volume", "string", "Name of the volume.", required=True)

ROUTES: Final = (
    ApiRoute(
        "GET",
        "/health",
        "health",
        "How the server is: 200 ok or degraded, 503 down; since when and why.",
        schema="Health",
        also=(503,),
    ),
    ApiRoute(
        "GET",
        "/alive",
        "alive",
        "200: the application server answers; asks no other part.",
        schema="Alive",
        public=True,
        scope="free",
    ),
    ApiRoute(
        "GET",
        "/ready",
        "ready",
        "Whether the server does its work: 200, or 503 and what it waits for.",
        schema="Ready",
        also=(503,),
        public=True,
        scope="free",
    ),
    ApiRoute(
        "GET",
        "/gateways",
        "gateways",
        "Gateways ever seen, with their state.",
        (
            MATCH,
            Query("state", "string", "Only those in this state; several with commas between."),
            Query(
                "sort",
                "string",
                "name (default), trouble, oldest (cuts), waited (for I/O) or lost (cuts).",
            ),
            OFFSET,
            SOME,
        ),
        items="gateways",
    ),
    ApiRoute(
        "GET",
        "/gateway-list",
        "gateway_list",
        "Gateways that the PMDaemon dials, and how it goes.",
        items=ANY,
    ),
    ApiRoute(
        "PUT",
        "/gateway-list/{address}",
        "list_gateway",
        "Dial the gateway at this address (IP:PORT) from now on.",
        body="ListedGateway",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "DELETE",
        "/gateway-list/{address}",
        "unlist_gateway",
        "Dial this address no more.",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "GET",
        "/volume-owners",
        "volume_owners",
        "Which gateways volumes belong to, and which wait for approval.",
        (
            Query("state", "string", "approved, pending (also on another backend than approved) or revoked."),
            LONG,
            AFTER,
        ),
        items="volume_owners",
    ),
    ApiRoute(
        "POST",
        "/volume-owners/approve",
        "approve_volumes",
        "Let volumes belong to gateways that show them.",
        body="VolumesDecision",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "POST",
        "/volume-owners/revoke",
        "revoke_volumes",
        "Let volumes belong to gateways no more.",
        body="VolumesDecision",
        changes=True,
        role="admin",
    ),
    ApiRoute(
        "GET",
        "/volumes",
        "volumes",
        "Volumes: exact lifetime counts from SQL, and the live view.",
        (
            MATCH,
            Query("backend", "string", "Only those on this backend."),
            Query("labels", "string", "Only those with these labels: KEY=VALUE, KEY in (A,B), KEY or !KEY."),
            Query("sort", "string", "name (default), backend, busiest, throughput, slowest or queue."),
            OFFSET,
            SOME,
        ),
        items="volumes",
        scope="volumes",
    ),
    ApiRoute(
        "GET",
        "/volumes/{volume}",
        "volume",
        "One volume with its streams.",
        (Query("streams", "integer", "At most so many of them; default: all.", least=1, most=LIMIT_MAX),),
        scope="volume",
    ),
    ApiRoute(
        "GET",
        "/volumes/{volume}/history",
        "history",
        "One row a rollup slot, or an hour (`length_us`); rates of the one that goes on are null. `note`: of "
        "a volume that is seen now and of which nothing is stored yet, that it is so.",
        (FROM, TO, Query("client", "string", "Only I/O of this client of the volume.")),
        items=ANY,
        scope="volume",
    ),
    ApiRoute(
        "GET",
        "/volumes/{volume}/clients",
        "clients",
        "Clients of a volume in a span, the busiest first: rates on average, percentiles. `count`: how many "
        "there are; `read_every`: of very many one slot or hour in so many was read.",
        (FROM, TO, PAGE),
        items=ANY,
        scope="volume",
    ),
    ApiRoute(
        "GET",
        "/why/{name}",
        "why",
        "Why a volume is throttled or an agreement at risk, now or then, in words and with the facts.",
        (
            Query("kind", "string", "volume or sla, if both are called so."),
            Query("objective", "string", "Of an agreement: only this objective."),
            Query("at_us", "integer", "When, microseconds UTC; default: now.", least=0, most=MAX_US),
            Query("tz", "string", "Time zone of the texts (IANA name); default: UTC."),
        ),
        schema="Explanation",
    ),
    ApiRoute(
        "GET",
        "/pools",
        "pools",
        "Pools of storage: how full they are, and when they will be full.",
        (
            MATCH,
            Query("level", "string", "Only those at it: ok, warn, critical, or stale, which are not read."),
            Query("sort", "string", "name (default), fullest or soonest (to be full)."),
            OFFSET,
            SOME,
        ),
        items=ANY,
    ),
    ApiRoute(
        "GET",
        "/pools/{owner}/{pool}",
        "pool",
        "One pool of a gateway (name or id; `server`): volumes, history by day, what was done.",
        (Query("days", "integer", "History of so many days; default 90.", least=1, most=POOL_DAYS_MAX),),
    ),
    ApiRoute("GET", "/totals", "totals", "Exact lifetime counts over everything."),
    ApiRoute(
        "GET", "/sizes", "sizes", "How large the database is: bytes and rows of each table.", schema="Sizes"
    ),
    ApiRoute(
        "GET",
        "/backends",
        "backends",
        "Backends: capacity by the newest policy, and the live view.",
        (
            MATCH,
            Query("sort", "string", "name (default), trouble, busiest, fullest or held (lowest first)."),
            OFFSET,
            SOME,
        ),
        items="backends",
    ),
    ApiRoute(
        "GET",
        "/backends/{backend}",
        "backend",
        "One backend: its load now, its volumes, and the loads it bears by the newest policy.",
    ),
    ApiRoute(
        "GET",
        "/backends/{backend}/history",
        "backend_history",
        "Its load over time in cost units a second, and the parts (`by_volume`) of those `volumes` that used "
        "most; of long ranges one slot or hour in `read_every`. `note`: as of a volume.",
        (FROM, TO),
        items=ANY,
    ),
    ApiRoute(
        "GET",
        "/slas",
        "slas",
        "Agreements in force, and their live state.",
        (
            Query(
                "labels",
                "string",
                "Only those with these labels: K=V, K!=V, K in (A,B), K notin (A,B), K or !K, with commas.",
            ),
            Query("match", "string", "Only those whose name has this in it."),
            Query("documents", "boolean", "1: with the documents' texts."),
            Query("limit", "integer", "Agreements a page; default all.", least=1, most=LIMIT_MAX),
            AFTER,
        ),
        items="agreements",
        scope="slas",
    ),
    ApiRoute(
        "GET",
        "/promises",
        "promises",
        "Objectives of the agreements in force with state, figures, customer and since when: a page of them.",
        (
            MATCH,
            Query("state", "string", "Only those in this state; several with commas between."),
            Query("sort", "string", "trouble (default: worst first), name, budget, compliance or burn."),
            OFFSET,
            PAGE,
        ),
        items=ANY,
        scope="slas",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}",
        "sla",
        "One agreement: document, version, live state.",
        (Query("version", "integer", "Which version; default: the newest.", least=1, most=(1 << 31) - 1),),
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}/versions",
        "sla_versions",
        "Versions of one agreement, newest first: what changed.",
        items=ANY,
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}/credits",
        "sla_credits",
        "Compliance and credit of the current and past periods, newest first.",
        (Query("periods", "integer", "At most so many; default 3.", least=1, most=CREDITS_MAX),),
        items=ANY,
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}/slices",
        "slices",
        "Judged slices of one objective.",
        (
            OBJECTIVE,
            Query("episode", "string", "Only those that this episode touches (its id, or its beginning)."),
            FROM,
            TO,
            LONG,
        ),
        items="slices",
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}/hours",
        "slice_hours",
        "Judged slices of one objective by the hour, in the period now or at a time, with its error budget.",
        (
            OBJECTIVE,
            Query(
                "at_us",
                "integer",
                "A time in the period, microseconds UTC; default: now.",
                least=0,
                most=MAX_US,
            ),
        ),
        items=ANY,
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/slas/{name}/periods",
        "periods",
        "What became of one objective in this period and those before it, newest first.",
        (
            OBJECTIVE,
            Query("limit", "integer", "How many periods; default 12.", least=1, most=PERIODS_MAX),
        ),
        items=ANY,
        scope="sla",
    ),
    ApiRoute(
        "GET",
        "/episodes",
        "episodes",
        "Violation episodes, newest first: from the moment a promise is broken until it is kept again.",
        (
            Query("name", "string", "Only those of this agreement."),
            Query("objective", "string", "Only those of this objective."),
            Query("open", "boolean", "1: only those that go on."),
            GOING_ON,
            LIMIT,
            BEFORE,
        ),
        items="episodes",
        scope="episodes",
    ),
    ApiRoute(
        "POST",
        "/slas",
        "apply_slas",
        "Apply agreement documents (YAML, one or several).",
        (Query("dry_run", "boolean", "1: check and compare only."), BASED_ON),
        body="Documents",
        changes=True,
    ),
    ApiRoute("DELETE", "/slas/{name}", "delete_sla", "End an agreement.", changes=True),
    ApiRoute(
        "GET",
        "/maintenance",
        "maintenance",
        "Maintenance: what runs and what is planned; applied as documents.",
        (
            Query("past", "boolean", "1: also what has passed."),
            Query("agreement", "string", "Only what excuses this agreement."),
        ),
        items=ANY,
    ),
    ApiRoute(
        "DELETE", "/maintenance/{name}", "end_maintenance", "End maintenance now, all of it.", changes=True
    ),
    ApiRoute(
        "GET",
        "/documents/{kind}/{name}/versions",
        "document_versions",
        "Versions of a document that is no agreement, newest first: what changed.",
        items=ANY,
    ),
    ApiRoute("GET", "/calendars", "calendars", "Calendars that service hours may name.", items="documents"),
    ApiRoute("DELETE", "/calendars/{name}", "end_calendar", "End a calendar that is not used.", changes=True),
    ApiRoute("GET", "/volume-labels", "volume_labels", "Documents that label volumes.", items="documents"),
    ApiRoute("DELETE", "/volume-labels/{name}", "end_volume_labels", "End such a document.", changes=True),
    ApiRoute(
        "POST",
        "/admission",
        "admission",
        "Whether agreement documents could be kept beside those in force; changes nothing.",
        body="Documents",
        role="viewer",
        changes=True,  # it costs the server a second of a processor
    ),
    ApiRoute(
        "GET",
        "/schema",
        "schema",
        "JSON Schema of all kinds of documents.",
        scope="free",
    ),
    ApiRoute(
        "GET",
        "/throttles",
        "throttles",
        "Throttles, newest first.",
        (Query("in_force", "boolean", "1: only those that hold I/O back now."), GOING_ON, LIMIT, BEFORE),
        items="throttles",
        scope="throttles",
    ),
    ApiRoute(
        "GET",
        "/decisions",
        "decisions",
        "What control decided, newest first, with the figures it rested on; of a volume, backend or promise.",
        (
            Query("volume", "string", "Only of this volume."),
            Query("backend", "string", "Only of this backend."),
            Query("victim", "string", "Only to keep this promise: AGREEMENT/OBJECTIVE."),
            Query("kind", "string", "Only these kinds; several with commas between."),
            FROM,
            TO,
            LIMIT,
            BEFORE,
        ),
        items="decisions",
    ),
    ApiRoute(
        "POST", "/throttles", "set_throttle", "Set a manual throttle.", body="ThrottleSet", changes=True
    ),
    ApiRoute(
        "DELETE",
        "/throttles",
        "release_volume",
        "Release a volume's throttles set by hand, or that of a group, or of a whole client.",
        (
            Query("volume", "string", "Name of the volume."),
            Query(
                "client", "string", "Only those of this client of the volume; without one: over all volumes."
            ),
            Query("group", "string", "Instead of a volume: the throttle of this group."),
        ),
        changes=True,
    ),
    ApiRoute(
        "DELETE",
        "/throttles/{throttle_id}",
        "release_throttle",
        "Release one throttle set by hand.",
        changes=True,
    ),
    *EVENT_ROUTES,
    ApiRoute(
        "GET",
        "/policies/{version}/caps",
        "policy_caps",
        "Caps of one policy version.",
        (
            Query(
                "hour", "integer", "Hour of the week, 0 = Monday 00 UTC; default: all 168.", least=0, most=167
            ),
            LONG,
            AFTER,
        ),
        items="policy_caps",
    ),
    ApiRoute(
        "GET", "/policies/{version}", "policy", "One policy version: its report, and how it was computed."
    ),
    ApiRoute(
        "GET",
        "/policies/{version}/volumes",
        "policy_volumes",
        "Volumes of one policy version: in how many hours of the week each has a cap, and the lowest.",
        (MATCH, LIMIT, AFTER),
        items=ANY,
    ),
    ApiRoute(
        "GET",
        "/policies/{version}/volumes/{volume}",
        "policy_volume",
        "What one policy version means for one volume: caps and demands by hour, what they rest on.",
    ),
    ApiRoute(
        "GET",
        "/policies/{version}/harms",
        "policy_harms",
        "Who hurt whom by one policy version: volumes, the promises they hurt, when and how much, and "
        "whether that is a likely cause or a correlation.",
        (LIMIT,),
        items=ANY,
    ),
    ApiRoute(
        "GET",
        "/policies/{version}/diff/{other}",
        "policy_diff",
        "Volumes whose caps differ from one version to another.",
        (LONG, AFTER),
        items=ANY,
    ),
    ApiRoute(
        "PUT",
        "/policies/pin",
        "pin_policy",
        "Keep a policy version in force, whatever is published.",
        body="PolicyPin",
        changes=True,
    ),
    ApiRoute(
        "DELETE", "/policies/pin", "unpin_policy", "The newest version is in force again.", changes=True
    ),
    ApiRoute(
        "POST",
        "/policies/rollback",
        "roll_back_policy",
        "Put the version before the one in force in force.",
        body="PolicyRollback",
        changes=True,
    ),
    ApiRoute("POST", "/policies/announce", "announce_policies", "Look for a new version now.", changes=True),
    ApiRoute("GET", "/mode", "mode", "Whether decisions are enforced or only observed."),
    ApiRoute("PUT", "/mode", "set_mode", "Switch between observe and enforce.", body="Mode", changes=True),
    ApiRoute(
        "GET",
        "/live",
        "live",
        "The newest snapshot; 204 when none is newer than `since`.",
        (Query("since", "integer", "The at_us of the snapshot you have.", least=-1, most=MAX_US),),
        empty=True,
        scope="live",
    ),
    ApiRoute("GET", "/live/trend", "trend", "Latency against promise, the last 15 minutes."),
    ApiRoute(
        "GET",
        "/live/stream",
        "stream",
        "Snapshots as server-sent events; 503 with Retry-After when all places are taken.",
        answer="text/event-stream",
        scope="stream",
    ),
    ApiRoute("GET", "/operations/{operation_id}", "operation", "How a change that was answered 202 went."),
    ApiRoute("GET", "/nodes", "nodes", "Nodes of the cluster: which server acts, and for how many gateways."),
    ApiRoute("GET", "/processes", "processes", "The server's own processes.", items="processes"),
    ApiRoute("GET", "/metrics", "metrics", "Metrics of this part, for Prometheus.", answer="text/plain"),
    ApiRoute("GET", "/openapi.json", "openapi", "This document.", scope="free"),
    *RECORD_ROUTES,
    *REPORT_ROUTES,
    *ACCESS_ROUTES,
)

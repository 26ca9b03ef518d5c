"""Handlers that read: SQL for what is stored, the live view for what is now.

Counts of I/Os come from SQL only (exact sums over everything ingested); rates and percentiles from the live
view only. Each handler has the form ``(context, request, **path parameters) -> Response``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar
from urllib.parse import quote

from flask import Request, Response, g
from pydantic import ValidationError

from sla_server.agreements.calendars import CalendarDocument, CalendarInForce
from sla_server.agreements.compliance import (
    Terms,
    agreed_objectives,
    agreed_periods,
    past_period,
    sums_of_rows,
    terms_by_version,
)
from sla_server.agreements.document import Agreement
from sla_server.agreements.fields import parse_duration_s
from sla_server.agreements.periods import ServiceHours
from sla_server.agreements.promise import MEGABYTE
from sla_server.agreements.selectors import LabelSelector, parse_labels, selects
from sla_server.agreements.volume_labels import label_book
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound, near_first
from sla_server.api.filters import DECISION_KINDS, chosen
from sla_server.api.handlers.documents import last_agreed_us, windows_of
from sla_server.api.handlers.live import feed_state
from sla_server.api.live_view import EMPTY
from sla_server.api.route import LIMIT_MAX, PREFIX
from sla_server.api.routes import PERIODS_MAX
from sla_server.api.scope_volumes import read_book
from sla_server.db.queries.explanations import cursor_of
from sla_server.db.queries.reader import STREAM_SUMS
from sla_server.rows import Row

Item = TypeVar("Item")
HOUR_US: Final = 3_600_000_000
LATE_US: Final = 5_000_000
"""Statistics of a slot have come by then after its end."""
DAY_US: Final = 24 * HOUR_US
SPAN_MAX_US: Final = 31 * DAY_US
PERIODS_DEFAULT: Final = 12
PAGE_DEFAULT: Final = 50
ONE_BY_ONE_MAX: Final = 2000
"""Volumes that SQL is asked about by name; for more it sums all streams at once."""
VOLUME_ORDERS: Final = {
    "busiest": "iops",
    "slowest": "p95_us",
    "queue": "inflight",
    "throughput": "bytes_per_s",
}
SLICES_DEFAULT: Final = 21
"""The default span holds so many slices, however long they are: one more than ``sla get slices`` lists."""
NOTHING_YET: Final = (
    "Nothing is stored of it yet: it was seen for the first time just now, or the database lags behind."
)
"""What an empty history says of a thing that is seen now and has no row in SQL."""


def page_of(request: Request, default: int = PAGE_DEFAULT) -> tuple[int, int]:
    """(offset, limit) of the query."""
    limit = responses.number(request, "limit", default, least=1, most=LIMIT_MAX)
    return responses.number(request, "offset", 0), limit


def paged(
    context: AppContext, request: Request, rows: list[Item], complete: Callable[[list[Item]], list[Row]]
) -> Response:
    """The rows that the query wants, all without a limit; only they are completed."""
    offset, limit = page_of(request, LIMIT_MAX)
    end = offset + limit if request.args.get("limit") else len(rows)
    following = str(end) if end < len(rows) else None
    return live_list(context, complete(rows[offset:end]), following, count=len(rows), before=offset)


def volumes(context: AppContext, request: Request) -> Response:
    """Exact counts with the live view; volumes of which nothing is stored yet have counts of 0.

    A page is sorted by what the live view says of each volume; without a limit all of them come.
    """
    part, backend = request.args.get("match", "").lower(), request.args.get("backend", "")
    live = {str(row.get("volume")): row for row in snapshot_now(context)["volumes"]}
    if request.args.get("limit"):
        known = dict(context.source.pages.volume_names())
    else:  # those of now: it is what programs ask for
        known = {row["volume"]: row["backend"] for row in context.source.volumes()}
    known |= {name: str(row.get("backend")) for name, row in live.items() if name not in known}
    names = [
        name
        for name, its_backend in known.items()
        if part in name.lower()
        and backend in ("", its_backend)
        and (g.scope is None or g.scope.has_volume(name))  # here: `next` must not count those of others
    ]
    if wanted := _wanted_labels(request):
        book = read_book(context.source)
        names = [name for name in names if selects(wanted, book.of(name))]
    names = _sorted_volumes(request.args.get("sort", ""), names, known, live)

    def complete(page: list[str]) -> list[Row]:
        return _complete_volumes(context, [{"volume": name, "backend": known[name]} for name in page])

    return paged(context, request, names, complete)


def _sorted_volumes(
    order: str, names: list[str], backends: Mapping[str, str], live: Mapping[str, Row]
) -> list[str]:
    """Names in the order asked for: by the figures of now the largest first, then all others by name."""
    if order in ("", "name"):
        return names
    if order == "backend":
        return sorted(names, key=lambda name: (backends[name], name))
    column = VOLUME_ORDERS.get(order)
    if column is None:
        fix = f"Use {', '.join((*VOLUME_ORDERS, 'name', 'backend'))}"
        raise BadInput("sort", f"{order[:40]!r} is no order", fix)
    first = [name for name in names if live.get(name, {}).get(column)]
    first.sort(key=lambda name: (-live[name][column], name))
    done = set(first)
    return first + [name for name in names if name not in done]


def _complete_volumes(context: AppContext, page: list[Row]) -> list[Row]:
    """Rows of some volumes with sums, owners and live values, in the order given."""
    names = {str(row["volume"]) for row in page}
    source = context.source
    found = source.volumes() if len(names) > ONE_BY_ONE_MAX else source.pages.volumes_named(names)
    stored = {row["volume"]: row for row in found}
    stored_nothing = dict.fromkeys((*STREAM_SUMS, "streams"), 0) | {"last_us": None}
    rows = [stored.get(row["volume"], {**row, **stored_nothing}) for row in page]
    owners = source.volume_owner_names(None if len(names) > ONE_BY_ONE_MAX else names)
    by_hand = {
        row.get("volume") for row in snapshot_now(context)["throttles"] if row.get("source") == "manual"
    }
    book = label_book(rows, source.pages.label_documents())
    return [
        {
            **row,
            "labels": book.of(row["volume"]),
            "owners": owners.get(str(row["volume"]), []),
            "throttled_by_hand": row["volume"] in by_hand,
        }
        for row in with_live(context, rows, "volumes", "volume")
    ]


def volume_owners(context: AppContext, request: Request) -> Response:
    """A page of claims, by volume and gateway; ``owners`` are the gateways that the volume belongs to."""
    state, limit = request.args.get("state") or None, responses.long_limit(request)
    if state not in (None, "approved", "pending", "revoked"):
        raise BadInput("state", f"{state!r} is no state", "Give approved, pending or revoked")
    after = request.args.get("after", "").partition("/")
    rows = context.source.volume_owners(
        state=state, after=(after[0], after[2]) if after[0] else (), limit=limit + 1
    )
    page = rows[:limit]
    owners = context.source.volume_owner_names({row["volume"] for row in page})
    following = f"{page[-1]['volume']}/{page[-1]['gateway_id']}" if len(rows) > limit else None
    return responses.as_list([{**row, "owners": owners.get(row["volume"], [])} for row in page], following)


def volume(context: AppContext, request: Request, volume: str) -> Response:
    """One volume with its streams; stream ids as text, since they exceed what JSON readers hold exactly.

    ``streams`` says how many there are, whatever is in ``by_stream``.
    """
    most = responses.number(request, "streams", 0, least=1, most=LIMIT_MAX) or None
    named = [
        {"volume": row.get("volume"), "backend": row.get("backend")}
        for row in (*context.source.pages.volumes_named([volume]), *snapshot_now(context)["volumes"])
        if row.get("volume") == volume
    ]
    row = row_of(_complete_volumes(context, named[:1]), "volume", volume)
    streams = context.source.streams(volume, most)
    named_streams = [{**stream, "stream_id": str(stream["stream_id"])} for stream in streams]
    return responses.as_json({**row, "by_stream": named_streams, "server": feed_state(context)})


def history(context: AppContext, request: Request, volume: str) -> Response:
    """Rollups of one volume, or of one client of it; long or old ones by the hour.

    Rates of what goes on are not known: its counts over its whole length would look like a drop.
    """
    from_us, to_us = span_of(context, request, HOUR_US)
    rows = context.source.rollup_history(volume, from_us, to_us, request.args.get("client"))
    whole_us = context.clock.unix_us() - LATE_US
    for row in rows[-2:]:
        if row["slot_us"] + row["length_us"] > whole_us:  # its counts are those of a part of it
            row["iops"] = row["bytes_per_s"] = None
    return responses.as_list(rows, from_us=from_us, to_us=to_us, note=_unstored(context, volume, rows))


def clients(context: AppContext, request: Request, volume: str) -> Response:
    """Clients of one volume in a span, the busiest first; rates are averages over what is stored of it."""
    from_us, to_us = span_of(context, request, HOUR_US)
    limit = responses.number(request, "limit", PAGE_DEFAULT, least=1, most=LIMIT_MAX)
    use = context.source.loads.of_clients(volume, from_us, to_us, context.clock.unix_us(), limit)
    return responses.as_list(
        use.items,
        from_us=from_us,
        to_us=to_us,
        count=use.count,
        read_every=use.read_every,
        note=_unstored(context, volume, use.items),
    )


def _unstored(context: AppContext, volume: str, rows: list[Row]) -> str | None:
    """What to say of a volume that is seen now and of which nothing is stored yet.

    Raises:
        NotFound: there is no such volume.
    """
    if rows or context.source.backend_of(volume) is not None:
        return None
    if not is_live(context, "volumes", "volume", volume):
        raise NotFound(f"no volume {volume!r} was ever seen", "'sla get volumes' lists them")
    return NOTHING_YET


def totals(context: AppContext, _request: Request) -> Response:
    """Lifetime sums over everything."""
    return responses.as_json(context.source.totals())


def sizes(context: AppContext, _request: Request) -> Response:
    """Of the database."""
    return responses.as_json(context.source.sizes())


def slas(context: AppContext, request: Request) -> Response:
    """Agreements in force, with their documents if asked for.

    ``objectives`` is what was agreed ({name, metric}, may be empty), ``live`` those that are judged now. Of a
    page ``count`` says how many there are on all pages, ``before`` how many on those before it.
    """
    wanted, part = _wanted_labels(request), request.args.get("match", "")
    after, limit = (
        request.args.get("after", ""),
        responses.number(request, "limit", 0, least=1, most=LIMIT_MAX),
    )
    left_out = ("spec",) if responses.flag(request, "documents") else ("document", "spec")
    found = []
    count = 0
    for row in context.source.agreements(True):
        labels = ((row.get("spec") or {}).get("metadata") or {}).get("labels") or {}
        is_theirs = g.scope is None or g.scope.has_agreement(row["name"])
        if is_theirs and selects(wanted, labels) and part in row["name"]:
            count += 1
            if row["name"] > after:
                found.append((row, labels))
    page = found[:limit] if limit else found
    live = LiveObjectives(context)
    rows = []
    for row, labels in page:
        plain = {key: value for key, value in row.items() if key not in left_out} | {"labels": labels}
        agreed = [
            {"name": one.get("name"), "metric": (one.get("indicator") or {}).get("metric")}
            for one in agreed_objectives(row)
        ]
        rows.append({**plain, "objectives": agreed, "live": live.of(row)})
    following = page[-1][0]["name"] if len(page) < len(found) else None
    return live_list(context, rows, following, count=count, before=count - len(found))


def _wanted_labels(request: Request) -> LabelSelector:
    text = request.args.get("labels")
    try:
        return parse_labels(text) if text else ()
    except ValueError as exc:
        raise BadInput("labels", str(exc)) from exc


def sla(context: AppContext, request: Request, name: str) -> Response:
    """One agreement with its document, the newest version unless one is named."""
    version = responses.number(request, "version", 0, least=1, most=(1 << 31) - 1)
    row = agreement_of(context, name, version)
    live = LiveObjectives(context).of(row)
    return responses.as_json({**row, "live": live, "server": feed_state(context)})


def slices(context: AppContext, request: Request, name: str) -> Response:
    """A page of judged slices, and the counts by state of the span."""
    limit = responses.long_limit(request)
    if episode_id := request.args.get("episode"):
        objective, from_us, to_us = _episode_span(context, request, name, episode_id)
    else:
        objective, terms = asked_objective(context, request, agreement_of(context, name))
        length_us = max((each.length_us for each in terms.values()), default=0)
        from_us, to_us = span_of(context, request, min(max(DAY_US, SLICES_DEFAULT * length_us), SPAN_MAX_US))
    rows = context.source.slices(name, objective, from_us, to_us, limit + 1)
    return responses.as_list(
        rows[:limit],
        str(rows[limit]["start_us"]) if len(rows) > limit else None,
        objective=objective,
        counts=context.source.slice_counts(name, objective, from_us, to_us),
        from_us=from_us,
        to_us=to_us,
    )


def _episode_span(context: AppContext, request: Request, name: str, episode_id: str) -> tuple[str, int, int]:
    """(objective, from_us, to_us) of the slices that an episode touches; a page may begin later."""
    episode = context.source.episode(episode_id)
    if episode is None or episode["name"] != name:
        raise NotFound(f"{name} has no episode {episode_id!r}", "GET /api/v1/episodes lists them")
    objective, opened_us = episode["objective"], episode["opened_us"]
    to_us = episode["closed_us"] or context.clock.unix_us()
    # The slice in which it opened began before; no slice is longer than a day.
    before = context.source.slices(name, objective, opened_us - 24 * HOUR_US, opened_us + 1)
    first_us = before[-1]["start_us"] if before else opened_us
    if before and first_us + before[-1]["length_us"] <= opened_us:
        first_us = opened_us
    from_us = max(first_us, responses.number(request, "from_us", first_us))
    return objective, from_us, max(to_us, from_us + 1)


def asked_objective(context: AppContext, request: Request, row: Row) -> tuple[str, dict[int, Terms]]:
    """The objective that is asked for, the first unless one is named, and its terms by version.

    Raises:
        NotFound: no version of the agreement has it; says which it has.
    """
    agreed = [str(one.get("name")) for one in agreed_objectives(row)]
    wanted = request.args.get("objective") or (agreed[0] if agreed else "latency")
    terms = terms_by_version([*context.source.agreement_versions(row["name"]), row], wanted)
    if agreed and wanted not in agreed and not terms:
        raise NotFound(
            f"agreement {row['name']!r} has no objective {wanted[:128]!r}", f"It has {', '.join(agreed)}"
        )
    return wanted, terms


def periods(context: AppContext, request: Request, name: str) -> Response:
    """Compliance by period, from the stored slices: each counts as the version said that judged it.

    Of an agreement that has ended, from the period in which it did.
    """
    most = responses.number(request, "limit", PERIODS_DEFAULT, least=1, most=PERIODS_MAX)
    row = agreement_of(context, name)
    wanted, terms = asked_objective(context, request, row)
    try:
        newest = Agreement.from_spec(row["spec"])
    except ValidationError as exc:
        problem = f"agreement {name!r} was stored by another release and cannot be read"
        raise NotFound(problem, "Apply it again: sla apply -f FILE") from exc
    if not terms:
        raise NotFound(f"agreement {name!r} has no objective", "Nothing of it is judged")
    last = terms[max(terms)]
    now_us = context.clock.unix_us()
    first = context.source.agreement(name, 1) or row
    calendar = calendar_of(context, newest.spec.service_hours)
    windows = windows_of(context.source.agreement_versions(name) or [row], newest)
    items = []
    for bounds in agreed_periods(windows, last_agreed_us(row, now_us), most, most):
        if bounds[1] > first["applied_us"]:
            window = next((one for from_us, one in reversed(windows) if from_us < bounds[1]), windows[-1][1])
            spec = newest.spec.model_copy(update={"window": window})
            sums = sums_of_rows(context.source.slice_sums(name, wanted, *bounds), terms, last)
            items.append(past_period(spec, last, bounds, sums, now_us, calendar).as_dict())
    # What is left of the period that goes on depends on now: the live view has it.
    live = {one.get("objective"): one for one in LiveObjectives(context).of(row)}.get(wanted, {})
    for item in items:
        if not item["is_over"] and item["budget_remaining"] is None:
            item["budget_remaining"] = live.get("budget_remaining")
    return responses.as_list(items, objective=wanted)


def calendar_of(context: AppContext, hours: ServiceHours | None) -> list[CalendarInForce]:
    """Versions of the calendar that service hours name; those of another release are left out."""
    found = []
    for row in context.source.documents("Calendar") if hours is not None and hours.is_named else ():
        if hours is not None and row["name"] == hours.calendar:
            try:
                document = CalendarDocument.from_json(row["spec"])
            except ValidationError:
                continue
            found.append(CalendarInForce(document, row["version"], row["applied_us"], row["ended_us"]))
    return found


def episodes(context: AppContext, request: Request) -> Response:
    """A page of episodes, each with the address of its slices."""
    if name := request.args.get("name"):
        row = agreement_of(context, name)  # or say that there never was one
        if request.args.get("objective"):
            asked_objective(context, request, row)
    open_only, objective = responses.flag(request, "open"), request.args.get("objective") or None
    since_us = responses.number(request, "since_us", 0) or None

    def read(limit: int, before: str | None) -> list[Row]:
        return context.source.episodes(
            open_only, limit, name=name or None, objective=objective, before=before, since_us=since_us
        )

    rows, last = _page_of(read, request, "episodes")
    for row in rows:
        place = quote(row["name"], safe="")
        row["slices"] = f"{PREFIX}/slas/{place}/slices?episode={quote(row['episode_id'], safe='')}"
    return responses.as_list(rows, last)


def throttles(context: AppContext, request: Request) -> Response:
    """A page of throttles as recorded, with the live view of those in force."""
    in_force = responses.flag(request, "in_force")
    since_us = responses.number(request, "since_us", 0) or None

    def read(limit: int, before: str | None) -> list[Row]:
        rows: list[Row] = context.source.throttles(in_force, limit, before, since_us)
        return rows

    rows, last = _page_of(read, request, "throttles")
    return live_list(context, with_live(context, rows, "throttles", "throttle_id"), last)


def decisions(context: AppContext, request: Request) -> Response:
    """A page of the decisions of a span, a day unless one is named."""
    from_us, to_us = span_of(context, request, DAY_US)
    args, limit = request.args, responses.limit(request)
    rows = context.source.decisions(
        volume=args.get("volume"),
        victims=[args["victim"]] if args.get("victim") else (),
        backend=args.get("backend"),
        kinds=chosen(request, "kind", DECISION_KINDS),
        from_us=from_us,
        until_us=to_us,
        before=responses.cursor(request),
        limit=limit,
    )
    following = cursor_of(rows[-1]) if len(rows) == limit else None
    return responses.as_list(rows, following, from_us=from_us, to_us=to_us)


def events(context: AppContext, request: Request) -> Response:
    """A page of events."""
    return responses.as_list(*_page_of(context.source.events, request, "events"))


def processes(context: AppContext, _request: Request) -> Response:
    """The server's own processes."""
    return responses.as_list(context.source.processes())


def _page_of(
    read: Callable[[int, str | None], list[Row]], request: Request, scope: str
) -> tuple[list[Row], str | None]:
    """The page that is asked for, and the cursor of the next one; for accounts with labels only of theirs."""
    limit, before = responses.limit(request), responses.cursor(request)
    if g.scope is not None:
        page: tuple[list[Row], str | None] = g.scope.page(scope, read, limit, before)
        return page
    rows = read(limit, before)
    return rows, rows[-1]["cursor"] if len(rows) == limit else None


def snapshot_now(context: AppContext) -> Row:
    """The newest live view; an empty one when it is old: what was so then is not shown as what is so now."""
    return EMPTY if context.live.is_stale() else context.live.newest().snapshot


def live_list(context: AppContext, rows: list[Row], next_cursor: str | None = None, **more: Any) -> Response:
    """A list whose rows have live values, and whether those are to be had."""
    return responses.as_list(rows, next_cursor, server=feed_state(context), **more)


def is_live(context: AppContext, table: str, key: str, name: str) -> bool:
    """Whether the live view has an entry of this name: what is seen now may not be stored yet."""
    return any(entry.get(key) == name for entry in snapshot_now(context)[table])


def sorted_as_asked(
    request: Request, rows: list[tuple[Row, Row]], orders: Mapping[str, Callable[[Row], Any] | None]
) -> list[Row]:
    """Rows that come by name, in the order of ``sort``; each is given with what it is sorted by.

    Raises:
        BadInput: an order that there is not.
    """
    order = request.args.get("sort") or next(iter(orders))
    if order not in orders:
        raise BadInput("sort", f"{order[:40]!r} is no order", f"Use {', '.join(orders)}")
    if (key := orders[order]) is not None:
        rows = sorted(rows, key=lambda pair: key(pair[1]))
    return [row for row, _now in rows]


def with_live(context: AppContext, rows: list[Row], table: str, key: str) -> list[Row]:
    """Each row with ``live``: the entry of the snapshot with the same key, or null."""
    now = {entry.get(key): entry for entry in snapshot_now(context)[table]}
    return [{**row, "live": now.get(row[key])} for row in rows]


class LiveObjectives:
    """Live entries of agreements; of promises beyond ``services.live_rows`` those that say only the state."""

    def __init__(self, context: AppContext, others: Mapping[tuple[str, str], Row] | None = None) -> None:
        if others is None:
            others = {} if context.live.is_stale() else context.live.others()
        self._others = others
        self._rows: dict[str, list[Row]] = {}
        for entry in snapshot_now(context)["slas"]:
            self._rows.setdefault(str(entry.get("name")), []).append(entry)

    def of(self, agreement: Row) -> list[Row]:
        """The entries of one agreement; ``brief`` are those without what is measured now."""
        rows = self._rows.get(agreement["name"], [])
        known = {entry.get("objective") for entry in rows}
        agreed = (one for one in agreed_objectives(agreement) if one.get("name") not in known)
        brief = ((one, self._others.get((agreement["name"], one.get("name", "")))) for one in agreed)
        return rows + [{**other, **promised_of(one), "brief": True} for one, other in brief if other]


def promised_of(objective: Row) -> Row:
    """What a live entry says of the promise itself: metric, and percentile, threshold or rate."""
    indicator = objective.get("indicator") or {}
    found = {"metric": indicator.get("metric"), "percentile": indicator.get("percentile")}
    match found["metric"]:
        case "iops":
            return {**found, "threshold_us": None, "promised": objective.get("promised_iops")}
        case "throughput":
            return {**found, "threshold_us": None, "promised": objective["promised_mbps"] * MEGABYTE}
        case "availability":
            return {**found, "threshold_us": parse_duration_s(objective["outage"]) * 1_000_000}
    return {**found, "threshold_us": round(objective["demand_curve"][0]["value_ms"] * 1000)}


def agreement_of(context: AppContext, name: str, version: int = 0) -> Row:
    row = context.source.agreement(name, version or None)
    if row is None and version and context.source.agreement(name) is not None:
        raise NotFound(f"agreement {name!r} has no version {version}", f"'sla history {name}' lists them")
    if row is None:
        names = context.source.pages.agreement_names() if g.scope is None else ()  # not those of others
        raise NotFound(
            f"no agreement {name!r}", near_first(name, names, "'sla get slas' lists those in force")
        )
    return row


def row_of(rows: list[Row], key: str, value: str) -> Row:
    for row in rows:
        if row[key] == value:
            return row
    names = [str(row[key]) for row in rows]
    raise NotFound(f"no {key} {value!r}", near_first(value, names, f"GET /api/v1/{key}s lists them"))


def span_of(context: AppContext, request: Request, default_us: int) -> tuple[int, int]:
    """(from_us, to_us) of the query.

    Raises:
        BadInput: empty, backwards or longer than 31 days.
    """
    to_us = responses.number(request, "to_us", context.clock.unix_us())
    from_us = responses.number(request, "from_us", max(0, to_us - default_us))
    if not 0 < to_us - from_us <= SPAN_MAX_US:
        fix = "Ask for it in parts: each from_us is the to_us of the part before"
        if to_us <= from_us:
            raise BadInput("from_us", "must lie before to_us", "Exchange them")
        raise BadInput("from_us", "lies more than 31 days before to_us; an answer has 31 days at most", fix)
    return from_us, to_us

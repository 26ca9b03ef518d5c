"""``GET /why/NAME``: the facts about one volume or agreement, now or then, and their explanation.

Now: states and rates come from the live snapshot while it is fresh, everything else from SQL. Then: from SQL
alone. What is not known is left out of the facts, and the text says so (``sla_server.explanation``).
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from zoneinfo import ZoneInfo

from flask import Request, Response, g

from sla_server.agreements.selectors import matches
from sla_server.agreements.slices import REASONS
from sla_server.agreements.unexcused import asks_for_notice, unexcused_work
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import BadInput, NotFound
from sla_server.api.scope_volumes import ScopeVolumes, read_book
from sla_server.explanation import Times, explain
from sla_server.rows import Row

NEAR: Final = 5
NEAR_RATIO: Final = 0.5  # "erp-gld" and "gold-erp" are found, "batch" is not
DECISIONS: Final = 30  # some minutes of a busy loop; the newest five are shown
OWN_MOST: Final = 5  # agreements with a mode of their own that are looked at
NOTICE_MOST: Final = 20  # agreements of a volume whose maintenance is looked at
COVERED_MOST: Final = 500  # volumes of one agreement that are looked at
YEAR_9999_US: Final = 253_370_764_800_000_000  # no calendar goes on much longer
STEPS: Final = ("start", "pre-position", "decrease", "increase", "release")
BEGINS: Final = ("start", "pre-position")
ENDS: Final = ("release", "unattributed")
STEPS_BACK: Final = (
    30  # of a loop; each lists whom it helps, so that the newest is enough but for rows of before
)
CUTS: Final = ("start", "pre-position", "decrease")
FINDINGS: Final = ("unattributed", "infeasible", "control-oscillation")
LIMITS: Final = ("promised_iops", "promised_mbps", "outage")  # of an objective, by its metric


def why(context: AppContext, request: Request, name: str) -> Response:
    """Why a volume is throttled or an agreement at risk, now or at ``at_us``."""
    now_us, zone = context.clock.unix_us(), _zone(request.args.get("tz", "UTC"))
    at_us = responses.number(request, "at_us", now_us)
    if at_us > now_us:
        times = Times(now_us, zone)
        wanted = times.full(at_us) if at_us < YEAR_9999_US else "the year 9999"
        raise BadInput(
            "time asked for (at_us)",
            f"{wanted} lies ahead of the server's clock, which says {times.full(now_us)}",
            "Give a time that has passed, or none for now",
        )
    facts: Row = {
        "name": name,
        "at_us": at_us,
        "now_us": now_us,
        "is_now": not request.args.get("at_us"),
        "decisions_from_us": context.source.decisions_from_us(),
    }
    if g.scope is None and (server := context.acting.described()) is not None:
        facts["server"] = server
    facts["live_is_stale"] = facts["is_now"] and context.live.is_stale()
    is_live = facts["is_now"] and not facts["live_is_stale"]
    live: Row = context.live.newest().snapshot if is_live else {}
    modes = Modes.at(context, at_us, live)
    facts["mode"] = modes.server
    kind = _kind_of(context, name, request.args.get("kind"), live)
    if kind == "volume":
        facts |= _about_volume(context, name, facts, live, modes)
    else:
        facts |= _about_agreement(context, name, request.args.get("objective"), facts, live, modes)
    facts["kind"] = kind
    head = {"kind": kind, "name": name, "at_us": at_us, "is_now": facts["is_now"]}
    return responses.as_json({**head, **explain(facts, zone).as_dict(), "facts": facts})


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as exc:  # also a name that is a folder, or too long
        raise BadInput(
            "tz", f"{name[:40]!r} is no time zone", "Give an IANA name such as Europe/Berlin"
        ) from exc


def _kind_of(context: AppContext, name: str, wanted: str | None, live: Row) -> str:
    """What the name is of.

    Raises:
        NotFound: of nothing; says which names are near.
        BadInput: of both, or ``wanted`` is neither "volume" nor "sla".
    """
    if wanted not in (None, "volume", "sla"):
        raise BadInput("kind", f"{str(wanted)[:40]!r} is neither volume nor sla")
    fresh = [str(row["volume"]) for row in live.get("volumes", ()) if row.get("volume")]
    kinds = context.source.kinds_of(name) | ({"volume"} if name in fresh else set())
    if wanted is not None:
        kinds &= {wanted}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        raise BadInput(
            "kind", f"a volume and an agreement are called {name!r}", "Say which: kind=volume or kind=sla"
        )
    known = context.source.known_names() + [(each, "volume") for each in fresh]
    near = _near(name, sorted({known_name for known_name, kind in known if wanted in (None, kind)}))
    what = {"volume": "no volume", "sla": "no agreement"}.get(str(wanted), "no volume or agreement")
    fix = f"Near it: {', '.join(near)}" if near else "'sla get volumes' and 'sla get slas' list what there is"
    raise NotFound(f"{what} {name[:200]!r} is known", fix)


def _near(name: str, names: Sequence[str]) -> list[str]:
    """Names like this one, the nearest first; letters' case does not count."""
    by_lower = {each.lower(): each for each in names}
    found = difflib.get_close_matches(name.lower(), list(by_lower), NEAR, NEAR_RATIO)
    return [by_lower[each] for each in found]


@dataclass(frozen=True, slots=True)
class Modes:
    """Modes at a time: of the server, None if it is not stored, and of the backends with one of their own."""

    server: str | None
    backends: Mapping[str, str]

    @classmethod
    def at(cls, context: AppContext, at_us: int, live: Row) -> Modes:
        """Of now from the live snapshot, else as they were switched last."""
        if live.get("mode"):
            return cls(live["mode"], live.get("backend_modes") or {})
        source = context.source
        mode = source.mode_at(at_us)
        if mode is None:  # never switched: decisions of that time say what was configured
            newest = source.decisions(until_us=at_us, limit=1)
            mode = newest[0]["mode"] if newest else None
        return cls(mode or None, source.backend_modes_at(at_us))

    def of(self, backend: str | None, agreement: Row | None = None) -> Row:
        """What holds for an agreement on a backend: {mode, of: agreement | backend | server, name}."""
        own = _spec(agreement).get("control") if agreement is not None else None
        if own:
            return {"mode": own, "of": "agreement", "name": agreement["name"] if agreement else ""}
        if backend is not None and backend in self.backends:
            return {"mode": self.backends[backend], "of": "backend", "name": backend}
        return {"mode": self.server, "of": "server", "name": ""}


# -- A volume.


def _about_volume(context: AppContext, name: str, facts: Row, live: Row, modes: Modes) -> Row:
    source, at_us = context.source, facts["at_us"]
    throttles = sorted(_throttles_on(context, [name], at_us, live), key=_tightness)
    decisions = source.decisions(volume=name, until_us=at_us, limit=DECISIONS)
    backend = source.backend_of(name) or next(
        (row.get("backend") for row in live.get("volumes", ()) if row.get("volume") == name), None
    )
    agreements, scopes = list(source.agreements_at(at_us)), _scopes(context, facts)
    found: Row = {
        "backend": backend,
        "mode_here": modes.of(backend),
        "own_modes": [] if throttles else _own_modes(context, scopes, agreements, backend, live),
        "throttles": throttles,
        "decisions": decisions,
        "promises": [
            promise
            for agreement in agreements
            if scopes.has(agreement, name)
            for promise in _promises(context, agreement, facts, live)
        ],
        "measured": _measured(context, name, facts, live),
        "unexcused": _unexcused(context, scopes, [row for row in agreements if scopes.has(row, name)], at_us),
        **_later(context, facts, volume=name),
    }
    helped = next((row for row in throttles if row["source"] == "control"), None)
    if helped is None and decisions and decisions[0]["kind"] == "observed":
        helped = {**decisions[0], "requested_us": decisions[0]["at_us"]}
    if helped is None:
        return found
    # The step that set it, or moved it since; both have the time of one tick.
    since_us, backend = helped["requested_us"] - 1, helped["backend"]
    span = {"backend": backend, "from_us": since_us, "until_us": at_us, "limit": 1}
    found["loop"] = _first(source.decisions(kinds=STEPS, **span))
    found["cut"] = _first(source.decisions(kinds=CUTS, **span))
    found["finding"] = _first(source.decisions(kinds=FINDINGS, **span))
    victim = str(helped.get("victim") or "")
    agreement = next((row for row in agreements if row["name"] == victim.partition("/")[0]), None)
    found["mode_for"] = modes.of(backend, agreement)
    found["protected"] = _promise_named(context, agreement, victim.partition("/")[2], facts, live)
    if helped.get("source") == "control":
        found["protects"] = sorted(_helped_on(context, backend, at_us) - {victim})
    return found


def _throttles_on(context: AppContext, volumes: Sequence[str], at_us: int, live: Row) -> list[Row]:
    """Throttles of volumes, in force then; those of now with the rates that a floor lifted them to.

    One that was set just now is in the live view before it is in SQL.
    """
    if not volumes:
        return []
    known = {row["throttle_id"]: row for row in context.source.throttles_at(at_us, volumes=volumes)}
    for now in live.get("throttles", ()):
        about = {now.get("volume"), *(now.get("members") or ())}
        if (row := known.get(now["throttle_id"])) is not None:
            known[now["throttle_id"]] = {**row, "lifted_to": now.get("lifted_to")}
        elif now.get("state") != "observed" and not about.isdisjoint(volumes):
            known[now["throttle_id"]] = {**now, "requested_us": now.get("since_us") or at_us}
    return list(known.values())


def _own_modes(
    context: AppContext, scopes: ScopeVolumes, agreements: Sequence[Row], backend: str | None, live: Row
) -> list[Row]:
    """Some of the agreements on a backend that have a mode of their own: {name, mode}."""
    own = [(row, mode) for row in agreements if (mode := _spec(row).get("control"))][:OWN_MOST]
    return [
        {"name": row["name"], "mode": mode}
        for row, mode in own
        if backend in _backends_of(context, _volumes_of(context, scopes, row)[:COVERED_MOST], live)
    ]


def _helped_on(context: AppContext, backend: str, at_us: int) -> set[str]:
    """Promises, as AGREEMENT/OBJECTIVE, that the loop of a backend was helping at that time.

    Its throttles have the name of one of them, and help all. Each step lists them; a row of before has those
    before it and, as its victim, the one that asked.
    """
    kinds, helped = (*STEPS, *ENDS), set[str]()
    for row in context.source.decisions(kinds=kinds, backend=backend, until_us=at_us, limit=STEPS_BACK):
        if row["mode"] == "observe":
            continue
        if row["kind"] in ENDS:
            break
        helped |= {row["victim"], *((row.get("figures") or {}).get("victims") or ())}
        if row["kind"] in BEGINS:
            break
    return helped - {""}


def _tightness(throttle: Row) -> float:
    """The lowest rate first; rates of different kinds are compared as numbers, an I/O costs little over 1."""
    rates = (throttle.get("cost_per_s"), throttle.get("ops_per_s"))
    return min((rate for rate in rates if rate is not None), default=float("inf"))


def _measured(context: AppContext, name: str, facts: Row, live: Row) -> Row | None:
    if facts["is_now"]:
        found = next((row for row in live.get("volumes", ()) if row.get("volume") == name), None)
        return None if found is None else {key: found.get(key) for key in ("iops", "p95_us", "delay_us")}
    at_us = facts["at_us"]
    row = _first(context.source.rollup_history(name, at_us, at_us + 1))
    if row is None:
        return None
    done = (row.get("reads") or 0) + (row.get("writes") or 0)
    delay_us = (row.get("delay_sum_us") or 0) / done if done else 0
    return {**{key: row.get(key) for key in ("slot_us", "length_us", "iops", "p95_us")}, "delay_us": delay_us}


# -- An agreement.


def _about_agreement(
    context: AppContext, name: str, objective: str | None, facts: Row, live: Row, modes: Modes
) -> Row:
    source, at_us = context.source, facts["at_us"]
    agreement = next(source.agreements_at(at_us, name), None)
    described = agreement or source.agreement(name) or {"name": name, "spec": {}}
    names = [str(item.get("name")) for item in _objectives(described)]
    if objective is not None and objective not in names:
        known = f"It has {', '.join(names)}" if names else "It has none"
        raise NotFound(f"agreement {name!r} has no objective {objective[:200]!r}", known)
    promises = [
        promise
        for promise in _promises(context, described, facts, live)
        if objective in (None, promise["objective"])
    ]
    victims = [f"{name}/{promise['objective']}" for promise in promises]
    scopes = _scopes(context, facts)
    volumes = _volumes_of(context, scopes, described)[:COVERED_MOST]
    backends = _backends_of(context, volumes, live)
    throttles = _throttles_for(context, victims, backends, at_us, modes, described) if victims else []
    found: Row = {
        "version": described.get("version"),
        "in_force": agreement is not None,
        "modes": [{"backend": each, **modes.of(each, described)} for each in backends or [""]],
        "promises": promises,
        "throttles": throttles,
        "own_throttles": [
            row
            for row in _throttles_on(context, volumes, at_us, live)
            if _covers_client(described, row.get("client"))
        ],
        "volumes": volumes,
        "unexcused": _unexcused(context, scopes, [described], at_us),
        "decisions": source.decisions(victims=victims, until_us=at_us, limit=DECISIONS) if victims else [],
        **(_later(context, facts, victims=victims) if victims else {}),
    }
    if not victims:
        return found
    about = {"victims": victims, "until_us": at_us, "limit": 1}
    if throttles or any(promise.get("state") in ("at-risk", "violating", "bad") for promise in promises):
        loop = _first(source.decisions(kinds=STEPS, **about))
        since_us = min((row["requested_us"] for row in throttles), default=at_us)
        if loop is not None and (loop["mode"] == "observe" or loop["at_us"] >= since_us - 1):
            found["loop"] = loop  # else of an earlier time of trouble
        found["cut"] = _first(source.decisions(kinds=CUTS, **about))
    found["finding"] = _first(source.decisions(kinds=FINDINGS, **about))
    return found


def _backends_of(context: AppContext, volumes: Sequence[str], live: Row) -> list[str]:
    """Backends that these volumes are on, as stored and as the live snapshot has them."""
    wanted = set(volumes)
    known = {str(row["backend"]) for row in live.get("volumes", ()) if row.get("volume") in wanted}
    return sorted((known | context.source.backends_of(volumes)) - {""})


def _throttles_for(
    context: AppContext,
    victims: Sequence[str],
    backends: Sequence[str],
    at_us: int,
    modes: Modes,
    agreement: Row,
) -> list[Row]:
    """Throttles that help these promises: set for one of them, or by a loop that helps them, too."""
    source = context.source
    found = source.throttles_at(at_us, victims=victims)
    enforced = [name for name in backends if modes.of(name, agreement)["mode"] != "observe"]
    shared = source.throttles_at(at_us, backends=enforced) if enforced else []
    known = {row["throttle_id"] for row in found}
    shared = [row for row in shared if row["throttle_id"] not in known]
    helping = {
        backend: not _helped_on(context, backend, at_us).isdisjoint(victims)
        for backend in {row["backend"] for row in shared}
    }
    return [*found, *(row for row in shared if helping[row["backend"]])]


# -- Both.


def _promise_named(
    context: AppContext, agreement: Row | None, objective: str, facts: Row, live: Row
) -> Row | None:
    """A promise of an agreement as it was in force then; None if there was none."""
    if agreement is None:
        return None
    return next(
        (row for row in _promises(context, agreement, facts, live) if row["objective"] == objective), None
    )


def _promises(context: AppContext, agreement: Row, facts: Row, live: Row) -> list[Row]:
    """Each objective of an agreement, with its state at the time asked for."""
    rows = []
    for item in _objectives(agreement):
        indicator = item.get("indicator") or {}
        row: Row = {
            "sla": agreement["name"],
            "objective": str(item.get("name")),
            "priority": agreement.get("priority"),
            "metric": indicator.get("metric"),
            "percentile": indicator.get("percentile"),
            "curve": item.get("demand_curve") or [],
        }
        row |= {name: item[name] for name in LIMITS if item.get(name) is not None}
        rows.append(row | _state(context, row, facts, live))
    return rows


def _state(context: AppContext, promise: Row, facts: Row, live: Row) -> Row:
    source, at_us = context.source, facts["at_us"]
    key = promise["sla"], promise["objective"]
    now = next((row for row in live.get("slas", ()) if (row.get("name"), row.get("objective")) == key), None)
    judged = source.slice_at(*key, at_us) if now is None else None
    if judged is not None and not facts["is_now"] and judged["start_us"] + judged["length_us"] <= at_us:
        judged = None  # one that had ended by then does not say how it was
    if judged is not None:
        reason = str(judged.get("reason") or "")  # of an excluded slice what excuses it, in words
        judged = {**judged, "why": REASONS.get(reason, reason)}
    episodes = source.episodes_until(*key, at_us)
    is_open = bool(episodes) and (episodes[0]["closed_us"] is None or episodes[0]["closed_us"] > at_us)
    closed = episodes[1:] if is_open else episodes
    episode = episodes[0] if is_open else None
    state = now["state"] if now is not None else None
    if judged is not None and not facts["live_is_stale"]:  # of now the newest slice says nothing
        state = judged["state"]
    if now is None and facts["is_now"] and live:  # not one of the rows that the snapshot has room for
        state = context.live.others().get(key, {}).get("state") or state
    return {
        "state": state or ("violating" if episode is not None else None),
        "live": now,
        "slice": judged,
        "episode": episode,
        "last_episode": _first(closed),
    }


def _later(context: AppContext, facts: Row, **about: Any) -> Row:
    """The newest decision after the time asked for, and how many there are besides."""
    if facts["is_now"]:
        return {"later": [], "later_more": 0}
    source, at_us = context.source, facts["at_us"]
    newest = source.decisions(from_us=at_us, limit=1, **about)
    count = source.decision_count(from_us=at_us, **about) if newest else 0
    return {"later": newest, "later_more": max(count - 1, 0)}


def _objectives(agreement: Row) -> list[Row]:
    objectives: list[Row] = _spec(agreement).get("objectives") or []
    return objectives


def _spec(agreement: Row) -> Row:
    """The ``spec`` of an agreement's document; {} if it has none."""
    found: Row = (agreement.get("spec") or {}).get("spec") or {}
    return found


def _scopes(context: AppContext, facts: Row) -> ScopeVolumes:
    """Volumes of agreements, by the labels that volumes have, or had at the time asked for."""
    at_us = None if facts["is_now"] else facts["at_us"]
    return ScopeVolumes(lambda: read_book(context.source, at_us))


def _unexcused(context: AppContext, scopes: ScopeVolumes, agreements: Sequence[Row], at_us: int) -> list[Row]:
    """Maintenance that some of these agreements do not excuse, for want of notice."""
    asking = [row for row in agreements if asks_for_notice(row)][:NOTICE_MOST]
    if not asking:
        return []
    documents = context.source.documents("Maintenance")
    found = (unexcused_work(row, documents, _volumes_of(context, scopes, row), at_us) for row in asking)
    return [row for rows in found for row in rows]


def _covers_client(agreement: Row, client: str | None) -> bool:
    """Whether a throttle of this client (none: of the whole volume) holds clients of the agreement."""
    scope = _spec(agreement).get("scope") or {}
    return not client or matches(client, scope.get("clients") or ("*",))


def _volumes_of(context: AppContext, scopes: ScopeVolumes, agreement: Row) -> list[str]:
    """Volumes in an agreement's scope: those named, and those that its patterns match."""
    named = [str(each) for each in scopes.of(agreement)]
    if not any(character in each for each in named for character in "*?["):
        return named
    known = context.source.known_names()
    return [each for each, kind in known if kind == "volume" and scopes.has(agreement, each)]


def _first(rows: Sequence[Row]) -> Row | None:
    return rows[0] if rows else None

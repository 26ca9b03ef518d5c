"""What the tables of ``sla get`` show: a ``TableKind`` of each kind, and the words of its cells.

Other commands show some of the same cells. Pure, but for the zone of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from rich.text import Text

from sla_server.cli import formatting, notifications, system_tables
from sla_server.cli.formatting import Column, TableKind
from sla_server.cli.system_tables import ZONE, at, counted, live, live_count, plain, spec_of
from sla_server.explanation.words import AGREED
from sla_server.rows import Row


def _slices(state: str) -> Callable[[Row, int], str]:
    return lambda row, _now_us: formatting.count((row.get("slices") or {}).get(state))


def slice_state(row: Row) -> Text:
    """State of a judged slice, in words and colour."""
    text, style = formatting.SLICE_STATES.get(
        str(row.get("state")), (str(row.get("state") or formatting.DASH), "")
    )
    return Text(text, style)


def why_of(row: Row) -> str:
    """Why a slice is not good, and what else is to be known of its judgement."""
    notes = [str(row.get("reason") or ""), "inexact" if row.get("inexact") else ""]
    notes.append(f"revised {row['revision']}x" if row.get("revision") else "")
    return ", ".join(filter(None, notes)) or formatting.DASH


def lasted_of(row: Row, now_us: int) -> str:
    """How long an episode lasted, or that it goes on."""
    if not row.get("opened_us"):
        return formatting.DASH
    lasted = formatting.span(((row.get("closed_us") or now_us) - row["opened_us"]) / 1e6)
    return lasted if row.get("closed_us") else f"{lasted}, open"


def worst_of(row: Row) -> str:
    """The largest u of an episode: 1 is exactly the promise."""
    return formatting.DASH if row.get("worst_u") is None else f"{row['worst_u']:.1f}x"


def _bad_time(row: Row) -> str:
    return formatting.DASH if row.get("bad_s") is None else formatting.span(row["bad_s"])


def _volumes_of(row: Row) -> str:
    """Volumes in scope, the first of many."""
    shown = list(row.get("volumes") or ())
    more = int(row.get("volume_count") or 0) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more > 0 else [])]) or formatting.DASH


def period_end(row: Row) -> str:
    """The last day of a period, or that it goes on."""
    if not row.get("to_us"):
        return formatting.DASH
    return formatting.day(row["to_us"] - 1, row.get(ZONE)) if row.get("is_over") else "now"


def now_of(row: Row) -> str:
    """What is measured now; an upper bound says so."""
    metric = row.get("metric") or "latency"
    value = row.get("latency_us") if metric == "latency" else row.get("measured")
    if metric == "availability" and value is None:
        value = row.get("stall_us")
    text = formatting.indicator(metric, value)
    return f"\u2264{text}" if row.get("inexact") and value is not None else text


def state_of(state: Any) -> Text:
    """State of an objective, in words and colour."""
    text, style = formatting.STATES.get(str(state), (str(state or "unknown"), ""))
    return Text(text, style)


def minutes_left(row: Row) -> str:
    """How long the objective may still be missed in this period."""
    left = row.get("budget_minutes_left")
    return formatting.DASH if left is None else formatting.span(left * 60) if left > 0 else "0s"


def burn_of(row: Row) -> str:
    """How fast the error budget burns: 1 uses up exactly all of it."""
    return formatting.DASH if row.get("burn_1h") is None else f"{row['burn_1h']:.1f}x"


def labels_of(row: Row) -> str:
    """Labels as a selector takes them; one that a document takes away as ``sla volumes label`` does: KEY-."""
    labels = (row.get("labels") or {}).items()
    found = ",".join(f"{key}-" if value is None else f"{key}={value}" for key, value in labels)
    return found or formatting.DASH


def total_of(row: Row) -> str:
    """I/Os of a volume since it was first seen, exact."""
    counts = [row.get("reads"), row.get("writes")]
    return formatting.DASH if None in counts else formatting.count(sum(counts))


def severity_of(row: Row) -> Text:
    """Severity of an event."""
    return Text(str(row.get("severity", "")), formatting.SEVERITIES.get(str(row.get("severity")), ""))


def rollups_of(row: Row) -> str:
    """How many rollups a policy was computed from."""
    return formatting.count((row.get("job") or {}).get("rollups"))


def took_of(row: Row) -> str:
    """How long a run of a job took; nothing while it goes on."""
    if row.get("ended_us") is None:
        return formatting.DASH
    return formatting.span((row["ended_us"] - row["started_us"]) / 1e6)


def what_of(row: Row) -> str:
    """Text of an event, with its subject before it where the text does not name it."""
    subject, text = str(row.get("subject") or ""), str(row.get("text") or "")
    if not text:
        return subject or formatting.DASH
    return text if not subject or subject in text else f"{subject}: {text}"


def gateway_state(row: Row) -> Text:
    """State of a gateway."""
    style = {
        "up": formatting.GOOD,
        "recovered": formatting.GOOD,
        "stalled": formatting.WARN,
        "detached": formatting.WARN,
    }.get(str(row.get("state")), formatting.BAD)
    return Text(str(row.get("state") or formatting.DASH), style)


def hold_of(row: Row) -> str:
    """How long a throttle held an I/O in the last cuts: the mean, and the longest."""
    worst_us = live(row, "worst_hold_us")
    if not worst_us:
        return formatting.DASH
    mean = formatting.latency(live(row, "mean_hold_us"))
    return f"{mean} \u2264{formatting.latency(worst_us)}"


def late_ios_of(row: Row) -> Text:
    """I/Os that a throttle held for longer than the gateway's ``max_hold_s``, and the longest delay."""
    longest_us = live(row, "longest_hold_us")
    if not longest_us:
        return Text(formatting.DASH)
    return Text(
        f"{formatting.count(live(row, 'late_ios'))} (\u2264 {formatting.latency(longest_us)})",
        formatting.WARN,
    )


def asked_by(row: Row) -> str:
    """Who or what set a throttle; a cap that an agreement has, no policy computed."""
    if row.get("reason") == AGREED:
        return "agreement"
    return str(row.get("who") or row.get("source") or formatting.DASH)


def clock_of(row: Row) -> str:
    """How far a gateway's clock is off; nothing before its first cut, when nothing is known."""
    return formatting.skew(row.get("clock_offset_us")) if row.get("last_cut_us") else formatting.DASH


def holidays_of(row: Row) -> str:
    """How many holidays a calendar has."""
    spec = spec_of(row)
    return formatting.count(len(spec["holidays"]) if "holidays" in spec else None)


def reason_of(row: Row) -> str:
    """Why maintenance is done, and who announced it."""
    author = row.get("author") or row.get("applied_by")
    return str(row.get("reason") or formatting.DASH) + (f" ({author})" if author else "")


LEVELS: Final = {
    "ok": ("ok", formatting.GOOD),
    "warn": ("filling up", formatting.WARN),
    "critical": ("nearly full", formatting.BAD),
}
BAR_CELLS: Final = 8


def pool_level(row: Row) -> Text:
    """How full a pool is, in words and colour; figures that were not read for long say so."""
    if row.get("is_stale"):
        return Text("not read", formatting.WARN)
    text, style = LEVELS.get(str(row.get("level")), (str(row.get("level") or formatting.DASH), ""))
    return Text(text, style)


def bar_of(ratio: float | None) -> str:
    """A bar of a share of 1."""
    if ratio is None:
        return formatting.DASH
    cells = round(min(max(ratio, 0.0), 1.0) * BAR_CELLS)
    return "\u2588" * cells + "\u2591" * (BAR_CELLS - cells)


def full_on(row: Row) -> str:
    """The day on which a pool is expected to be full."""
    forecast = row.get("forecast") or {}
    return formatting.day(forecast["full_us"], row.get(ZONE)) if forecast.get("full_us") else formatting.DASH


def _share(title: str, key: str, digits: int = 1, *, wide: bool = False) -> Column:
    """A column of ratios in percent."""
    return Column(
        title, lambda row, _now_us: formatting.percent(row.get(key), digits), number=True, wide=wide
    )


OF_PERIOD: Final = ("compliance", "budget", "burn")
"""Orders of promises that are by figures of the period: its columns are shown then, and none of now."""
_PROMISED: Final = Column("PROMISED", lambda row, _now_us: promise(row), number=True)
_COMPLIANCE: Final = _share("COMPLIANCE", "compliance", 2)
_BUDGET: Final = (
    _share("BUDGET", "budget_remaining", 0),
    Column("BURN 1H", lambda row, _now_us: burn_of(row), number=True),
    Column("LEFT", lambda row, _now_us: minutes_left(row), number=True, wide=True),
)
_WHICH: Final = (
    Column("PROMISE", lambda row, _now_us: objective_of(row)),
    Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
)
_WHAT: Final = (
    Column("VOLUMES", lambda row, _now_us: _volumes_of(row), wide=True),
    Column("EPISODE", plain("episode_id"), wide=True),
)

KINDS: Final = {
    "gateways": TableKind(
        "/gateways",
        (
            Column("NAME", plain("name")),
            Column("STATE", lambda row, _now_us: gateway_state(row)),
            Column(
                "LAST CUT", lambda row, now_us: formatting.ago(row.get("last_cut_us"), now_us), number=True
            ),
            Column("CLOCK", lambda row, _now_us: clock_of(row), number=True),
            Column("STREAMS", lambda row, _now_us: formatting.count(live(row, "streams")), number=True),
            Column(
                "I/O WAIT",
                lambda row, _now_us: formatting.percent(live(row, "io_waited_ratio"), 0),
                number=True,
                optional=True,
            ),
            Column("LOST CUTS", lambda row, _now_us: formatting.count(row.get("dropped_cuts")), number=True),
            Column("ADDRESS", plain("address")),
            live_count("VOLUMES", "exports", wide=True),
            Column("ID", plain("gateway_id"), wide=True),
        ),
        "No gateway has connected. Start an agent beside the storage: gateway-agent run --config FILE",
    ),
    "volumes": TableKind(
        "/volumes",
        (
            Column("VOLUME", plain("volume")),
            Column("BACKEND", plain("backend")),
            Column("IOPS", lambda row, _now_us: formatting.count(live(row, "iops")), number=True),
            Column("P95", lambda row, _now_us: formatting.latency(live(row, "p95_us")), number=True),
            Column("P99", lambda row, _now_us: formatting.latency(live(row, "p99_us")), number=True),
            Column("CAP", lambda row, _now_us: formatting.volume_cap(row.get("live") or {}), number=True),
            Column("TOTAL I/Os", lambda row, _now_us: total_of(row), number=True),
            Column(
                "RATE", lambda row, _now_us: formatting.rate(live(row, "bytes_per_s")), number=True, wide=True
            ),
            Column(
                "P50", lambda row, _now_us: formatting.latency(live(row, "p50_us")), number=True, wide=True
            ),
            Column(
                "STORAGE P95",
                lambda row, _now_us: formatting.latency(live(row, "service_p95_us")),
                number=True,
                wide=True,
            ),
            Column(
                "DELAY",
                lambda row, _now_us: formatting.latency(live(row, "delay_us")),
                number=True,
                wide=True,
            ),
            live_count("HELD", "held", wide=True),
            live_count("IN FLIGHT", "inflight", wide=True),
            counted("TOTAL READS", "reads", wide=True),
            counted("TOTAL WRITES", "writes", wide=True),
            counted("TOTAL ERRORS", "errors", wide=True),
            Column("LABELS", lambda row, _now_us: labels_of(row), wide=True),
            counted("STREAMS", "streams", wide=True),
            Column(
                "SIZE", lambda row, _now_us: formatting.size(row.get("size_bytes")), number=True, wide=True
            ),
            Column(
                "GATEWAYS",
                lambda row, _now_us: ", ".join(row.get("owners") or ()) or formatting.DASH,
                wide=True,
            ),
        ),
        "No volume is known yet. Start an agent beside the storage: gateway-agent run --config FILE",
        key="volume",
    ),
    "pools": TableKind(
        "/pools",
        (
            Column("POOL", plain("name")),
            Column("LEVEL", lambda row, _now_us: pool_level(row)),
            Column("", lambda row, _now_us: bar_of(row.get("full_ratio"))),
            Column("FULL", lambda row, _now_us: formatting.percent(row.get("full_ratio")), number=True),
            Column("SIZE", lambda row, _now_us: formatting.size(row.get("size_bytes")), number=True),
            Column("FULL ON", lambda row, _now_us: full_on(row), number=True),
            Column("READ", lambda row, now_us: formatting.ago(row.get("read_us"), now_us), number=True),
            Column(
                "USED", lambda row, _now_us: formatting.size(row.get("used_bytes")), number=True, wide=True
            ),
            counted("VOLUMES", "volume_count", wide=True),
            Column("KIND", plain("kind"), wide=True),
            Column("BACKEND", plain("backend"), wide=True),
        ),
        "No pool of storage is read. Name some in the agent's file: [[space.source]]",
    ),
    "slas": TableKind(
        "/slas",
        (
            Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
            Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
            _PROMISED,
            _COMPLIANCE,
            *_BUDGET,
            _share("COVER", "coverage", wide=True),
            _share("TARGET", "target", 2, wide=True),
            Column(
                "ALERTS",
                lambda row, _now_us: ", ".join(row.get("alerts") or ()) or formatting.DASH,
                wide=True,
            ),
            Column("PRIORITY", plain("priority"), wide=True),
            Column("VERSION", plain("version"), number=True, wide=True),
            Column("SINCE", at("applied_us"), number=True, wide=True),
            Column("LABELS", lambda row, _now_us: labels_of(row), wide=True),
        ),
        "No agreement is in force. Write one and apply it: sla apply -f agreement.yaml",
    ),
    "promises": TableKind(
        "/promises",
        (
            *_WHICH,
            Column("SINCE", at("since_us"), number=True),
            Column("CUSTOMER", plain("customer")),
            Column("NOW", lambda row, _now_us: now_of(row), number=True),
            _PROMISED,
            *_WHAT,
        ),
        "No agreement is in force. Write one and apply it: sla apply -f agreement.yaml",
        sorted_columns=dict.fromkeys(
            OF_PERIOD,
            (*_WHICH, Column("CUSTOMER", plain("customer")), _PROMISED, _COMPLIANCE, *_BUDGET, *_WHAT),
        ),
    ),
    "maintenance": TableKind(
        "/maintenance",
        (
            Column("NAME", plain("name")),
            Column("STATE", plain("state")),
            Column("FROM", at("from_us"), number=True),
            Column("TO", at("to_us"), number=True),
            Column("SCOPE", plain("scope")),
            Column("REASON", lambda row, _now_us: reason_of(row)),
            Column("BY", plain("applied_by"), wide=True),
            Column("VERSION", plain("version"), number=True, wide=True),
        ),
        "No maintenance runs or is planned. To begin some: sla maintenance start --help",
    ),
    "calendars": TableKind(
        "/calendars",
        (
            Column("NAME", plain("name")),
            Column("VERSION", plain("version"), number=True),
            Column("ZONE", lambda row, _now_us: str(spec_of(row).get("tz") or formatting.DASH)),
            Column("HOLIDAYS", lambda row, _now_us: holidays_of(row), number=True),
            Column("SINCE", at("applied_us")),
            Column("BY", plain("applied_by")),
        ),
        "No calendar is in force; always and business are built in. Apply one: sla apply -f calendar.yaml",
    ),
    "volumelabels": TableKind(
        "/volume-labels",
        (
            Column("NAME", plain("name")),
            Column("VERSION", plain("version"), number=True),
            Column("VOLUMES", lambda row, _now_us: ", ".join(spec_of(row).get("volumes") or ())),
            Column("LABELS", lambda row, _now_us: labels_of(spec_of(row))),
            Column("SINCE", at("applied_us")),
            Column("BY", plain("applied_by")),
        ),
        "No document labels volumes. Label one: sla volumes label VOLUME KEY=VALUE",
    ),
    **notifications.KINDS,
    **system_tables.KINDS,
    "episodes": TableKind(
        "/episodes",
        (
            Column("OPENED", at("opened_us")),
            Column("LASTED", lasted_of, number=True),
            Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
            Column("WORST", lambda row, _now_us: worst_of(row), number=True),
            Column("BAD SLICES", lambda row, _now_us: formatting.count(row.get("slices_bad")), number=True),
            Column("EPISODE", lambda row, _now_us: formatting.short_id(row.get("episode_id"))),
            Column("CLOSED", at("closed_us"), number=True, wide=True),
        ),
        "No promise was ever broken.",
        key="episode_id",
        time="opened_us",
        is_paged=True,
    ),
    "slices": TableKind(
        "/slas/{name}/slices",
        (
            Column("START", at("start_us")),
            Column("STATE", lambda row, _now_us: slice_state(row)),
            Column("I/Os", lambda row, _now_us: formatting.count(row.get("n")), number=True),
            Column("MISSED", lambda row, _now_us: formatting.count(row.get("missed")), number=True),
            Column("IOPS", lambda row, _now_us: formatting.count(row.get("offered_iops")), number=True),
            Column("LIMIT", lambda row, _now_us: formatting.latency(row.get("threshold_us")), number=True),
            Column("COVER", lambda row, _now_us: formatting.percent(row.get("coverage_ratio")), number=True),
            Column("WHY", lambda row, _now_us: why_of(row)),
            Column(
                "FAILED", lambda row, _now_us: formatting.count(row.get("failed")), number=True, wide=True
            ),
            Column("VERSION", plain("version"), number=True, wide=True),
        ),
        "No slice of it was judged in this time: sla get slas says how it is.",
        of="AGREEMENT",
        key="start_us",
        time="start_us",
    ),
    "hours": TableKind(
        "/slas/{name}/hours",
        (
            Column("HOUR", at("hour_us"), number=True),
            *(
                counted(title, key)
                for title, key in (
                    ("GOOD", "good"),
                    ("BAD", "bad"),
                    ("NO DATA", "no_data"),
                    ("NOT DUE", "not_applicable"),
                    ("EXCLUDED", "excluded"),
                )
            ),
            Column("BAD TIME", lambda row, _now_us: _bad_time(row), number=True),
        ),
        "No slice of it was judged in this period: sla get slas says how it is.",
        of="AGREEMENT",
        key="hour_us",
        time="hour_us",
    ),
    "periods": TableKind(
        "/slas/{name}/periods",
        (
            Column("FROM", lambda row, _now_us: formatting.day(row.get("from_us"), row.get(ZONE))),
            Column("TO", lambda row, _now_us: period_end(row)),
            _COMPLIANCE,
            _share("COVER", "coverage"),
            _share("BUDGET", "budget_remaining", 0),
            Column("GOOD", _slices("good"), number=True),
            Column("BAD", _slices("bad"), number=True),
            Column("NO DATA", _slices("no_data"), number=True),
            Column("INEXACT", lambda row, _now_us: formatting.count(row.get("inexact")), number=True),
            Column("NOT DUE", _slices("not_applicable"), number=True, wide=True),
            Column("EXCLUDED", _slices("excluded"), number=True, wide=True),
        ),
        "No period of it has begun.",
        of="AGREEMENT",
        key="from_us",
        time="to_us",
    ),
    "throttles": TableKind(
        "/throttles",
        (
            Column("THROTTLED", lambda row, _now_us: formatting.throttled(row).replace("/", " /"), most=13),
            Column("AT MOST", lambda row, _now_us: formatting.enforced(row), most=9),
            Column("STATE", plain("state")),
            Column("HELD", lambda row, _now_us: hold_of(row), optional=True, most=8),
            Column("TOO LATE", lambda row, _now_us: late_ios_of(row), number=True, optional=True),
            Column("BY", lambda row, _now_us: asked_by(row)),
            Column("SINCE", at("requested_us"), most=8),
            Column("REASON", lambda row, _now_us: formatting.why_enforced(row)),
            Column("FOR", plain("victim"), wide=True),
            Column("BACKEND", plain("backend"), wide=True),
            Column("RELEASED", at("released_us"), number=True, wide=True),
            Column("ENDS", at("expires_us"), number=True, wide=True),
            Column("ID", plain("throttle_id"), wide=True),
        ),
        "No throttle was ever set.",
        key="volume",
        time="requested_us",
        is_paged=True,
    ),
    "events": TableKind(
        "/events",
        (
            Column("TIME", at("at_us")),
            Column("ID", lambda row, _now_us: formatting.short_id(row.get("event_id"))),
            Column("SEVERITY", lambda row, _now_us: severity_of(row)),
            Column("KIND", plain("kind")),
            Column("WHAT", lambda row, _now_us: what_of(row)),
            Column("ABOUT", plain("element"), wide=True),
            Column("SUBJECT", plain("subject"), wide=True),
            Column("WHOLE ID", plain("event_id"), wide=True),
        ),
        "Nothing has happened yet.",
        key="event_id",
        time="at_us",
        is_paged=True,
    ),
    "policies": TableKind(
        "/policies",
        (
            Column("VERSION", plain("version"), number=True),
            Column("STATE", plain("state")),
            Column("CREATED", at("created_us")),
            Column("ROLLUPS", lambda row, _now_us: rollups_of(row), number=True),
            Column("BY", plain("published_by")),
        ),
        "No policy was computed yet: sla policy run",
        key="version",
        time="created_us",
        is_paged=True,
    ),
    "jobs": TableKind(
        "/jobs",
        (
            Column("JOB", plain("kind")),
            Column("STATE", plain("state")),
            Column("STARTED", at("started_us")),
            Column("TOOK", lambda row, _now_us: took_of(row), number=True),
            Column("ROWS", lambda row, _now_us: formatting.count(row.get("rows")), number=True),
            Column("STATUS", plain("exit_status"), number=True),
            Column("VERSION", plain("version"), number=True),
            Column("BY", plain("who")),
            Column("TEXT", plain("text")),
        ),
        "No job has run yet: sla policy run",
        key="kind",
        time="started_us",
        is_paged=True,
    ),
}


def objective_of(row: Row) -> str:
    """agreement/objective, or the agreement alone if it has none."""
    return "/".join(str(row[key]) for key in ("name", "objective") if row.get(key)) or formatting.DASH


_NAMES: Final = {"mean_latency": "mean", "availability": "stall"}


def promise(row: Row) -> str:
    """Percentile and threshold; of other indicators their value."""
    if row.get("promised") is not None:
        return f"\u2265 {formatting.indicator(row.get('metric'), row['promised'])}"
    if row.get("threshold_us") is None:
        return formatting.DASH
    name = _NAMES.get(str(row.get("metric"))) or f"p{row.get('percentile') or 0:g}"
    return f"{name} {formatting.latency(row['threshold_us'])}"


def by_objective(rows: Sequence[Row]) -> list[Row]:
    """Agreements as the API lists them -> one row an objective.

    An objective that services say nothing of yet, and an agreement without any, have a row that says so.
    """
    objectives: list[Row] = []
    for row in rows:
        plain = {key: value for key, value in row.items() if key not in ("live", "objectives")}
        live = row.get("live") or []
        known = {entry.get("objective") for entry in live}
        unknown = [one["name"] for one in row.get("objectives") or [] if one["name"] not in known]
        objectives += [{**plain, **entry} for entry in live]
        objectives += [{**plain, "objective": name, "state": None} for name in unknown]
        if not live and not unknown:
            objectives.append({**plain, "state": "no-objective" if row.get("objectives") == [] else None})
    return objectives

"""Lines of text from single rows: a promise, the windows of a decision, who used what, one decision, a proof.

Shared by the explanations of volumes and of agreements. Pure. Rows are those of docs/formats/sql.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sla_server.explanation import words
from sla_server.explanation.words import Row, Times

MOST_USERS = 5
MOST_WORKS = 5
MAY_LACK = 0.02
"""Of a rate that is promised (``agreements.verdicts.DELIVERED_RATIO``, which rows do not have)."""


def promise_line(promise: Row) -> str:
    """What was promised.

    Args:
        promise: {sla, objective, priority, metric, percentile, curve: [{up_to_iops, value_ms}],
            promised_iops, promised_mbps, outage}; those that its metric has.
    """
    name = f"{promise['sla']}/{promise['objective']} ({promise.get('priority') or 'no priority'})"
    return f"{name}: {_promised(promise)}."


def _promised(promise: Row) -> str:
    metric = promise.get("metric")
    if metric == "iops":
        return f"{_or_unknown(promise.get('promised_iops'))} IOPS, or as many as are asked for"
    if metric == "throughput":
        return f"{_or_unknown(promise.get('promised_mbps'))} MB/s, or as much as is asked for"
    if metric == "availability":
        outage = promise.get("outage") or "the time that is allowed"
        return f"some I/O completes within {outage} while any is outstanding, and at most 1 % fail"
    if metric not in ("latency", "mean_latency"):
        return f"{metric or 'of a kind that is not stored'}"
    steps = [
        f"{words.latency(step['value_ms'] * 1000)}"
        + (f" up to {words.number(step['up_to_iops'])} IOPS" if step.get("up_to_iops") else " at any demand")
        for step in promise.get("curve") or ()
    ]
    within = ", ".join(steps) or "a limit that is not stored"
    return f"{'mean latency' if metric == 'mean_latency' else _percentile(promise)} within {within}"


def _or_unknown(value: float | None) -> str:
    return "an unknown number of" if value is None else words.number(value)


def _percentile(row: Row) -> str:
    found = row.get("percentile")
    return "latency" if found is None else f"p{found:g} of latency"


def unexcused_lines(facts: Row, times: Times) -> list[str]:
    """Maintenance with less notice than was agreed: what counts nevertheless."""
    lines = []
    for row in as_rows(facts.get("unexcused"))[:MOST_WORKS]:
        when = f"from {times.when(row['from_us'])} to {times.when(row['to_us'])}"
        what = words.sentence(f"Maintenance {row['maintenance']}, {when}, {row['reason']}").removesuffix(".")
        since_us = row["excused_from_us"]
        excused = "nothing" if since_us >= row["to_us"] else f"nothing before {times.when(since_us)}"
        lines.append(
            f"{what}: {row['sla']} excuses {excused} of it. It was announced at "
            f"{times.when(row['announced_us'])}, and {words.span(row['notice_s'])} of notice are agreed."
        )
    return lines


def slice_line(promise: Row, found: Row, times: Times) -> str:
    """How a slice was judged, and on which figures.

    Args:
        promise: as of ``promise_line``.
        found: the row, and in ``why`` its reason in words.
        times: for text.
    """
    start, end = found["start_us"], found["start_us"] + (found.get("length_us") or 0)
    state = str(found.get("state")).replace("_", " ")
    figures = words.joined(
        (
            _slice_figures(promise, found),
            f"{words.number(found['offered_iops'])} IOPS offered"
            if found.get("offered_iops") is not None
            else "",
        ),
        ", ",
    )
    why = f" ({found['why']})" if found.get("why") else ""
    line = f"{promise['objective']}: the slice {times.when(start)} to {times.when(end)} is {state}{why}"
    return f"{line}: {figures}." if figures else f"{line}."


def _slice_figures(promise: Row, found: Row) -> str:
    metric, measured, limit_us = promise.get("metric"), found.get("measured"), found.get("threshold_us")
    count, missed = found.get("n") or 0, found.get("missed") or 0
    failures = found.get("failed") or 0
    if metric == "latency":
        if failures:  # which of them were too slow as well is not known
            limit = f" {words.latency(limit_us)}" if limit_us else " the limit"
            return f"{missed:,} of {words.plural(count, 'I/O')} missed{limit}, and {failures:,} failed"
        limit = f" for {words.latency(limit_us)}" if limit_us else ""
        return f"{missed:,} of {words.plural(count, 'I/O')} were too slow{limit}"
    failures = failures or missed  # rows of a release before have the latter alone
    failed = f"{failures:,} of {words.plural(max(count, failures), 'I/O')} failed" if failures else ""
    if measured is None:
        return failed
    if metric == "mean_latency":
        limit = f" of {words.latency(limit_us)} allowed" if limit_us else ""
        return words.joined((f"mean latency {words.latency(measured)}{limit}", failed), ", ")
    if metric == "iops":
        return words.joined((f"{words.number(measured)} IOPS delivered", failed), ", ")
    if metric == "throughput":
        return words.joined((f"{words.number(measured / 1e6)} MB/s delivered", failed), ", ")
    return words.joined((f"the longest time without completion was {words.latency(measured)}", failed), ", ")


def windows_line(figures: Row, at_us: int, times: Times) -> str:
    """What the windows of a promise said when a decision was taken; "" without figures."""
    seen: Row = figures.get("promise") or {}
    if not seen.get("windows"):
        return ""
    counted = f"{seen.get('over', 0)} of {words.plural(seen['windows'], 'window')} over the promise"
    busy = seen.get("excused_ratio") or 0
    return words.sentence(
        words.joined(
            (
                f"{times.when(at_us)}: {measured_of(seen, '; ')}",
                counted,
                f"{words.number(seen.get('offered_iops') or 0)} IOPS offered",
                f"{words.percent(busy)} of the I/Os left out, as the gateway's own host was busy"
                if busy
                else "",
            )
        )
    )


def measured_of(seen: Row, between: str = ", ") -> str:
    """What some windows have of what was promised, in words that fit the indicator.

    Args:
        seen: the promise's figures of a decision, or its row of the live snapshot. Decisions of a release
            before have no ``metric``: the promise is taken for one of a percentile.
        between: the two parts that a percentile has.
    """
    metric, limit, u = seen.get("metric") or "latency", seen.get("threshold_us"), seen.get("u") or 0
    if metric in ("iops", "throughput"):
        short = f"{min(u * MAY_LACK, 1) * 100:.1f} % of what was asked for, as far as it was promised"
        return f"{short}, was not delivered, {words.percent(MAY_LACK)} allowed"
    allowed = f" of {words.latency(limit)} allowed" if limit else ", and demand above the curve"
    if metric == "availability":
        stall = seen.get("stall_us")
        outage = f"no I/O completed for {words.latency(stall)}{allowed}" if stall else "no outage"
        return f"{outage}, {words.percent(seen.get('failed_ratio') or 0)} of the I/Os failed"
    what = "mean latency" if metric == "mean_latency" else _percentile(seen)
    measured = f"{what} {words.latency(seen.get('latency_us'))}{allowed}"
    return measured if metric == "mean_latency" else f"{measured}{between}{u:.2f} times the misses allowed"


def live_line(live: Row, objective: str) -> str:
    """What the newest windows of a promise say, from the live snapshot."""
    offered = live.get("offered_iops")
    rate = f", {words.number(offered)} IOPS offered" if offered is not None else ""
    if live.get("reason"):
        return f"{objective}: {live['reason']}."
    if live.get("state") == "out-of-curve":
        asked = f"{words.number(offered)} IOPS offered are" if offered is not None else "the demand is"
        return f"{objective}: {asked} more than its curve covers."
    metric = live.get("metric")
    is_latency = metric in (None, "latency", "mean_latency")
    if live.get("state") == "idle" or (is_latency and live.get("latency_us") is None):
        return f"{objective}: there is no I/O to measure."
    said = "the last windows have" if is_latency else "in the last windows"
    return f"{objective}: {said} {measured_of(live)}{rate}."


def use_lines(decision: Row) -> list[str]:
    """Who used what of the backend when it was decided; [] without figures."""
    figures: Row = decision.get("figures") or {}
    rows: Sequence[Row] = figures.get("use") or ()
    if not rows:
        return []
    total, volumes = words.cost(figures.get("backend_cost_per_s")), figures.get("volumes", len(rows))
    backend = decision.get("backend") or "The backend"
    users = "volumes and clients" if any("/" in row["volume"] for row in rows) else ""
    counted = f"{volumes} {users}" if users else words.plural(volumes, "volume")
    lines = [f"{backend} did {total} for {counted}:"]
    for row in rows[:MOST_USERS]:
        marks = [str(row.get("priority") or "")]
        if row.get("throttled"):
            cap = row.get("cap_cost_per_s")
            verb = "would be throttled" if decision.get("mode") == "observe" else "throttled"
            marks.append(f"{verb} to {words.cost(cap)}" if cap else verb)
        if row.get("queueing"):
            marks.append("I/Os held back")
        share = words.percent(row.get("share_ratio") or 0)
        lines.append(
            f"- {row['volume']}: {share}, {words.cost(row['cost_per_s'])} ({words.joined(marks, ', ')})"
        )
    if volumes > MOST_USERS:
        lines.append(f"- {words.plural(volumes - MOST_USERS, 'other volume')}: the rest")
    return lines


def decision_line(row: Row, times: Times) -> str:
    """One decision with its time, and which of several servers decided it."""
    server = (row.get("figures") or {}).get("server")
    whose = f" Server {server} decided it." if server else ""
    return f"{times.when(row['at_us'])} {decided(row)}{whose}"


def decided(row: Row) -> str:
    """One decision as a sentence without its time; ends with a full stop."""
    figures: Row = row.get("figures") or {}
    kind, why = str(row.get("kind")), words.reason_of(row)
    observed = "would have " if row.get("mode") == "observe" else ""
    before, after = words.cost(figures.get("c_before")), words.cost(figures.get("c_after"))
    named = words.listed(figures.get("throttled") or ["its neighbours"])
    new, old = words.rates(figures.get("after")), words.rates(figures.get("before"))
    together = " together" if len(figures.get("throttled") or ()) > 1 else ""
    text = {
        "start": f"{observed}throttled {named} from {before} to {after}{together}, because {why}",
        "pre-position": f"{observed}throttled {named} to {after}{together} ahead of time, because {why}",
        "decrease": f"{observed}cut {named} from {before} to {after}{together}, because {why}",
        "increase": f"{observed}gave back: {named} from {before} to {after}{together}, because {why}",
        "release": f"released {named}, because {why}",
        "ahead-off": f"set no caps ahead of bursts any more, because {why}: {row.get('text')}",
        "unattributed": f"found no cause among the neighbours: {row.get('text')}",
        "infeasible": f"found no way to help: {row.get('text')}",
        "control-oscillation": f"oscillated, so that steps were halved: {row.get('text')}",
        "cap-set": f"set the cap of {words.capped(row)} to {new} ({why})",
        "cap-changed": f"changed the cap of {words.capped(row)} from {old} to {new} ({why})",
        "cap-released": f"released {words.capped(row)} from {old or 'its cap'} ({why})",
        "observed": f"would have set the cap of {words.capped(row)} to {new} ({why})",
        "not-effective": f"the cap of {words.capped(row)} is not effective: {row.get('text')}",
    }.get(kind, str(row.get("text") or kind))
    left_out = figures.get("left_out")
    more = (
        f" ({words.plural(left_out, 'decision')} before it made no row: too many at once)" if left_out else ""
    )
    return f"{text.rstrip('.')}{more}."


def proof_line(proof: Row, figures: Row, at_us: int, times: Times, *, is_now: bool) -> str:
    """What gateways confirmed of a cap by ``at_us``, and which were never sent it.

    Args:
        proof: confirmed_us and seen_us, and a throttle's ``state`` if it is the newest.
        figures: of the cap's decision: ``gateways``, names of those it was sent to; ``without_cap``, of those
            that carry the volume, too.
        at_us: what was known then.
        times: for text.
        is_now: whether it speaks of now.
    """
    without = [str(name) for name in figures.get("without_cap") or ()]
    be = "was" if len(without) == 1 else "were"
    more = f" {words.listed(without)} {be} never sent it." if without else ""
    return _confirmed(proof, figures, at_us, times, is_now=is_now) + more


def _confirmed(proof: Row, figures: Row, at_us: int, times: Times, *, is_now: bool) -> str:
    gateways = [str(name) for name in figures.get("gateways") or ()]
    who = f"by {words.listed(gateways)} " if gateways else "by its gateways "
    confirmed, seen = (
        at if at and at <= at_us else None for at in (proof.get("confirmed_us"), proof.get("seen_us"))
    )
    if is_now and proof.get("state") == "refused":
        return "Refused by a gateway: the cap is not in force there ('sla get events' has the reason)."
    if seen:
        first = f"Confirmed {who}at {times.when(confirmed)}" if confirmed else f"Confirmed {who.strip()}"
        return f"{first}; the measured rate was within it at {times.when(seen)}."
    if confirmed:
        return f"Confirmed {who}at {times.when(confirmed)}; not yet seen in the measured rate."
    return (
        "Not confirmed by a gateway yet." if is_now else "No confirmation by a gateway is stored from before."
    )


def floor_text(figures: Row) -> str:
    """The floor of a volume as a sentence's part; "" if not known."""
    parts = []
    if figures.get("floor_iops"):
        parts.append(f"{words.number(figures['floor_iops'])} IOPS")
    if figures.get("floor_bytes_per_s"):
        parts.append(f"{words.number(figures['floor_bytes_per_s'] / 1e6)} MB/s")
    in_cost = figures.get("floor_cost_per_s")
    floor = " and ".join(parts)
    return (
        f"{floor} ({words.cost(in_cost)})"
        if floor and in_cost
        else floor or (words.cost(in_cost) if in_cost else "")
    )


def lifted(throttle: Row) -> Row:
    """The rates that hold of a throttle: a floor's where it lies above those asked for."""
    found: Row = throttle.get("lifted_to") or throttle
    return found


def by_hand(facts: Row, status: str) -> str:
    """Throttles set by hand on volumes of a promise in trouble, as sentences; "" for none."""
    rows = [row for row in as_rows(facts.get("own_throttles")) if row.get("source") == "manual"]
    if not rows or status not in ("violated", "at-risk"):
        return ""
    be = "is" if facts["is_now"] else "was"
    first, *others = [(words.capped(row), words.rates(lifted(row)) or "an unknown rate") for row in rows]
    named = [
        f"{first[0]} {be} throttled by hand to {first[1]}",
        *(f"{what} to {rate}" for what, rate in others),
    ]
    return f" Its own {words.listed(named)}: what waits for that counts against this promise."


def measured_line(measured: Row | None, times: Times) -> str:
    """What one volume did, from the live view or a stored slot; "" if nothing is known."""
    if not measured:
        return ""
    if measured.get("slot_us") is None and measured.get("iops") is None:
        return "What it does now is not known: no client has used it, or no gateway of it sends statistics."
    figures = [f"{words.number(measured.get('iops') or 0)} IOPS"]
    if measured.get("p95_us") is not None:
        figures.append(f"p95 {words.latency(measured['p95_us'])}")
    if measured.get("delay_us"):
        figures.append(f"held back by its cap for {words.latency(measured['delay_us'])} on average")
    if measured.get("slot_us") is None:
        return f"The last seconds: {', '.join(figures)}."
    start, length_us = measured["slot_us"], measured.get("length_us") or 0
    note = (
        " (means over the whole hour: single minutes are no longer stored)"
        if length_us >= 3_600_000_000
        else ""
    )
    return f"{times.when(start)} to {times.when(start + length_us)}: {', '.join(figures)}{note}."


def changes_line(rows: Sequence[Row], more: int, times: Times) -> str:
    """How many decisions came after a time, with the last of them; "" for none."""
    if not rows:
        return ""
    count = len(rows) + more
    return f"{words.plural(count, 'decision')} since; the last: {decision_line(rows[-1], times)}"


def as_rows(value: Any) -> list[Row]:
    """A list of rows out of facts; [] if there is none."""
    return list(value or ())

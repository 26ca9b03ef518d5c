"""What happened in a period: violations and their causes, maintenance, throttles, versions. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from sla_server.agreements.difference import bounded, differences
from sla_server.agreements.periods import SECOND_US, Span, unannounced_spans
from sla_server.agreements.promise import InForce
from sla_server.agreements.slices import REASONS
from sla_server.explanation.explain import MANUAL
from sla_server.explanation.words import listed
from sla_server.reports.accounts import OUTSIDE, ObjectiveSlices, end_us_of, runs
from sla_server.reports.document import (
    ReportedChange,
    ReportedEpisode,
    ReportedMaintenance,
    ReportedThrottling,
    ReportedVersion,
    VolumeThrottling,
)
from sla_server.reports.inputs import BEFORE_US, ReportInputs, throttled_name, throttled_spans
from sla_server.rows import Row

Cause = Literal["neighbours", "storage", "overcommitted", "elsewhere", "unknown"]
STORAGE_REASONS: Final = ("hung", "failed")


# -- Violations


def episodes_of(inputs: ReportInputs, slices: Mapping[str, ObjectiveSlices]) -> list[ReportedEpisode]:
    """Violations that lasted in some of the period, oldest first."""
    found = []
    bad = {name: _BadSlices(each.by_state.get("bad", ())) for name, each in slices.items()}
    for row in inputs.episodes:
        end_us = row["closed_us"] or inputs.end_us
        inside_us = min(end_us, inputs.end_us) - max(row["opened_us"], inputs.period.from_us)
        judged = bad.get(row["objective"])
        mine = judged.within(row["opened_us"], end_us) if judged is not None else []
        cause, text, volumes = _cause(row, end_us, inputs, mine)
        found.append(
            ReportedEpisode(
                episode_id=row["episode_id"],
                objective=row["objective"],
                opened_us=row["opened_us"],
                closed_us=row["closed_us"],
                in_period_s=max(inside_us, 0) // SECOND_US,
                worst_ratio=row["worst_u"],
                slices_bad=len(mine),
                cause=cause,
                cause_text=text,
                volumes=volumes,
            )
        )
    return found


class _BadSlices:
    """Bad slices of an objective, in order, so that each violation looks at its own alone."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = list(rows)
        self._longest_us = max((row["length_us"] for row in self._rows), default=0)

    def within(self, from_us: int, to_us: int) -> list[Row]:
        """Those that reach into [from_us, to_us)."""
        first, end = (
            bisect_left(self._rows, us, key=lambda row: row["start_us"])
            for us in (from_us - self._longest_us, to_us)
        )
        return [row for row in self._rows[first:end] if row["start_us"] + row["length_us"] > from_us]


def _cause(row: Row, end_us: int, inputs: ReportInputs, bad: Sequence[Row]) -> tuple[Cause, str, list[str]]:
    """Why a promise was broken, as far as what is stored says so.

    What the controller found comes first: it saw the backend. Then whom it slowed down for this promise, then
    what the slices themselves say.
    """
    victim = f"{inputs.name}/{row['objective']}"
    from_us = row["opened_us"] - BEFORE_US
    decided = [
        each for each in inputs.decisions if each["victim"] == victim and from_us <= each["at_us"] <= end_us
    ]
    kinds = {each["kind"] for each in decided}
    reasons = {each["reason"] for each in decided}
    slowed = _slowed(victim, row["opened_us"], end_us, inputs.throttles)
    if "storage-fault" in reasons or _hung(bad):
        return "storage", "the storage hung or failed: I/Os did not complete", slowed
    if "infeasible" in kinds:
        return (
            "overcommitted",
            "floors and promises on the backend together ask for more than it gives",
            slowed,
        )
    if "unattributed" in kinds:
        if by_hand := _by_hand(from_us, end_us, inputs.own_throttles):
            what = f"its own storage was throttled by hand then ({listed(by_hand)})"
            return "elsewhere", f"{what}: what waited for that counts against the promise", slowed
        tried = (
            "slowing down its neighbours did not help" if slowed else "no neighbour was found to be the cause"
        )
        return "elsewhere", f"{tried}: the cause was elsewhere", slowed
    if slowed:
        return "neighbours", f"others used the same storage; slowed down for it: {listed(slowed)}", slowed
    if decided:
        users = _users(decided, inputs.name)
        if users:
            return "neighbours", f"others used the same storage most: {listed(users)}", users
    since_us = inputs.decisions_from_us
    if since_us is None or row["opened_us"] < since_us:
        return "unknown", "what the server found then is no longer stored", []
    return "unknown", "nothing that is stored says why", []


def _slowed(victim: str, opened_us: int, end_us: int, throttles: Iterable[Row]) -> list[str]:
    found: dict[str, None] = {}
    for row in throttles:
        if row["victim"] == victim and throttled_spans(row, opened_us, end_us) is not None:
            found[throttled_name(row)] = None
    return sorted(found)


def _by_hand(from_us: int, to_us: int, own_throttles: Iterable[Row]) -> list[str]:
    """The promise's own volumes that an operator held back."""
    return sorted(
        {
            throttled_name(row)
            for row in own_throttles
            if row["source"] == MANUAL and throttled_spans(row, from_us, to_us) is not None
        }
    )


def _hung(bad: Sequence[Row]) -> bool:
    """Whether most of a violation's bad slices are hangs or failures."""
    reasons = [each["reason"] for each in bad]
    return sum(reason in STORAGE_REASONS for reason in reasons) * 2 > len(reasons)


def _users(decided: Iterable[Row], name: str) -> list[str]:
    """Volumes with the most use of the backend that a step would have slowed down, as observed."""
    for each in decided:
        figures: Mapping[str, Any] = each["figures"] or {}
        throttled = figures.get("throttled")
        if isinstance(throttled, list) and throttled:
            return sorted(str(volume) for volume in throttled)
    return []


# -- Maintenance


def maintenance_of(inputs: ReportInputs, slices: Iterable[ObjectiveSlices]) -> list[ReportedMaintenance]:
    """Work that excused slices, once for all objectives with slices of the same spans."""
    spans: dict[tuple[int, int, str], int] = {}
    for each in slices:
        excused = (row for row in each.by_state.get("excluded", ()) if row["reason"] != OUTSIDE)
        for run in runs(excused):
            key = run[0]["start_us"], end_us_of(run[-1]), run[0]["reason"]
            spans.setdefault(key, sum(row["slices"] for row in run))
    found = [
        _maintenance(inputs.versions, from_us, to_us, reason, count)
        for (from_us, to_us, reason), count in sorted(spans.items())
    ]
    return sorted([*found, *_unannounced(inputs)], key=lambda each: (each.from_us, each.to_us))


def _unannounced(inputs: ReportInputs) -> Iterator[ReportedMaintenance]:
    """Work, or its part, that excused no slice: it was announced later than agreed."""
    for item in inputs.held_versions:
        from_us = max(item.applied_us, inputs.period.from_us)
        to_us = min(inputs.end_us, inputs.end_us if item.ended_us is None else item.ended_us)
        for work, span in unannounced_spans(item.agreement, item.work, from_us, max(from_us, to_us)):
            yield ReportedMaintenance(
                from_us=span[0],
                to_us=span[1],
                slices=0,
                reason=work.reason,
                author=work.author or None,
                announced_us=work.announced_us(item.work),
                had_notice=False,
            )


def _maintenance(
    versions: Sequence[InForce], from_us: int, to_us: int, reason: str, count: int
) -> ReportedMaintenance:
    author, announced_us = None, None
    item = next((one for one in reversed(versions) if one.applied_us < to_us), versions[-1])
    works = [work for work in item.work if work.reason == reason]
    if works:
        first = min(works, key=lambda work: work.applied_us)
        author, announced_us = first.author or None, first.announced_us(item.work)
    else:
        own = item.agreement.spec.maintenance.windows
        author = next((one.author for one in own if f"maintenance: {one.reason}" == reason), None)
    notice_s = item.agreement.spec.maintenance.notice
    had_notice = None
    if notice_s is not None and announced_us is not None:
        had_notice = announced_us + notice_s * SECOND_US <= from_us
    return ReportedMaintenance(
        from_us=from_us,
        to_us=to_us,
        slices=count,
        reason=reason,
        author=author,
        announced_us=announced_us,
        had_notice=had_notice,
    )


# -- Throttles


def throttling_of(inputs: ReportInputs) -> ReportedThrottling:
    """What keeping the promise cost others, and what others cost its own volumes."""
    own_victims = f"{inputs.name}/"
    others, others_s = _throttled(inputs, inputs.throttles, inputs.held)
    suffered = [row for row in inputs.own_throttles if not row["victim"].startswith(own_victims)]
    own, own_s = _throttled(inputs, suffered, {})
    delays = [each.delayed_s for each in others if each.delayed_s is not None]
    return ReportedThrottling(
        others=others,
        others_throttled_s=others_s,
        others_delayed_s=round(sum(delays), 3) if delays or not others else None,
        own=own,
        own_throttled_s=own_s,
    )


def _throttled(
    inputs: ReportInputs, rows: Iterable[Row], held: Mapping[str, Row]
) -> tuple[list[VolumeThrottling], int]:
    """By volume, the longest first; and the sum of their times, which may run side by side."""
    spans: dict[str, list[Span]] = {}
    least: dict[str, float] = {}
    for row in rows:
        span = throttled_spans(row, inputs.period.from_us, inputs.end_us)
        if span is None:
            continue
        volume = throttled_name(row)
        spans.setdefault(volume, []).append(span)
        if row["cost_per_s"] is not None:
            least[volume] = min(row["cost_per_s"], least.get(volume, row["cost_per_s"]))
    found = []
    for volume, of in spans.items():
        use = held.get(volume)
        found.append(
            VolumeThrottling(
                volume=volume,
                throttles=len(of),
                throttled_s=union_us(of) // SECOND_US,
                least_cost_per_s=least.get(volume),
                ios=use["ios"] if use is not None else None,
                delayed_s=round(use["delay_us"] / SECOND_US, 3) if use is not None else None,
            )
        )
    found.sort(key=lambda each: (-each.throttled_s, each.volume))
    return found, sum(each.throttled_s for each in found)


def union_us(spans: Iterable[Span]) -> int:
    """How long at least one of them lasts."""
    total, reached = 0, 0
    for begin_us, end_us in sorted(spans):
        total += max(0, end_us - max(begin_us, reached))
        reached = max(reached, end_us)
    return total


# -- Versions


def versions_in(inputs: ReportInputs) -> list[ReportedVersion]:
    """Versions that held in some of the period, oldest first, each with what it changed."""
    found = []
    rows = {row["version"]: row for row in inputs.rows}
    for item in inputs.held_versions:
        row = rows[item.version]
        before = rows.get(item.version - 1)
        changes = bounded(differences(before["spec"], row["spec"])) if before is not None else []
        found.append(
            ReportedVersion(
                version=item.version,
                from_us=item.applied_us,
                to_us=item.ended_us,
                applied_by=row["applied_by"],
                changes=[ReportedChange.model_validate(change) for change in changes],
            )
        )
    return found


def reason_text(reason: str) -> str:
    """For people."""
    return REASONS.get(reason, reason)

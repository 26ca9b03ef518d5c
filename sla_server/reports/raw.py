"""Stored slices judged again from the raw counters, as far as these are still in SQL.

The counters of a slot leave SQL for Parquet files after two days, so this is a check of what was issued soon
after its period, and of the days before now in any report. It takes what the judge takes: rollups, counts
against limits, coverage, streams, and the ownership of volumes. A slice is left alone where the answer would
rest on something that is not stored: a gateway that had left the scope, or data that came after it was judged
and that the judge has yet to look at.

Only slices of which every slot is still there are compared; ``compared`` counts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from sla_server.agreements.document import Objective
from sla_server.agreements.promise import InForce, promise_of
from sla_server.agreements.rules import Rule, rule_of, thresholds_us
from sla_server.agreements.slices import SliceVerdict, verdicts_of
from sla_server.agreements.verdicts import DueSlices, judge_slices
from sla_server.ownership import APPROVED
from sla_server.reports.inputs import ReportInputs
from sla_server.rows import Row
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.track import NEVER_US, JudgedStream, Track

if TYPE_CHECKING:
    from sla_server.db.queries.reader import SqlReader

HOUR_US: Final = 3_600_000_000
COMPARED: Final = ("state", "n", "missed", "threshold_us")
MOST_STREAMS: Final = 2000
"""Of one agreement: the rollups of an hour of so many are some 50 MB."""


@dataclass(frozen=True, slots=True)
class RawDifference:
    """A stored slice that the raw counters give otherwise."""

    objective: str
    start_us: int
    stored: Mapping[str, object]
    raw: Mapping[str, object]


@dataclass(slots=True)
class RawCheck:
    """What was compared.

    Attributes:
        compared: slices judged again.
        gone: slices whose counters are no longer in SQL.
    """

    compared: int = 0
    gone: int = 0


def raw_differences(reader: SqlReader, inputs: ReportInputs, check: RawCheck) -> Iterator[RawDifference]:
    """Slices of the period that the counters give otherwise, oldest first.

    Raises:
        DatabaseUnavailable: retryable.
    """
    from_us = reader.reports.rollups_from_us()
    streams = reader.streams() if from_us is not None else []
    progress = reader.progress() if from_us is not None else {}
    claims = reader.volume_owners() if from_us is not None else []
    until = {
        (row["volume"], row["gateway_id"]): row["changed_us"] for row in claims if row["state"] != APPROVED
    }
    for name, rows in inputs.slices.items():
        inside = [row for row in rows if inputs.period.from_us <= row["start_us"] < inputs.period.to_us]
        for version, of_version in _by_version(inside):
            agreed = _agreed(inputs.versions, version, name)
            if agreed is None:
                check.gone += len(of_version)
                continue
            item, objective = agreed
            track = Track(item, objective)
            before_us = track.length_us if track.has_steps else 0
            kept = [
                row
                for row in of_version
                if from_us is not None
                and row["start_us"] - before_us >= from_us
                and row["state"] != "excluded"
            ]
            check.gone += sum(row["state"] != "excluded" for row in of_version) - len(kept)
            scope = _scope(track, streams, until)
            if len(scope) <= MOST_STREAMS:
                yield from _judged(reader, track, objective, item, scope, kept, progress, check)
            else:
                check.gone += len(kept)


def _by_version(rows: Iterable[Row]) -> Iterator[tuple[int, list[Row]]]:
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(row["version"], []).append(row)
    yield from sorted(found.items())


def _agreed(versions: Sequence[InForce], version: int, name: str) -> tuple[InForce, Objective] | None:
    for item in versions:
        if item.version == version:
            return next(((item, one) for one in item.agreement.judged if one.name == name), None)
    return None


def _scope(track: Track, streams: Iterable[Row], until: Mapping[tuple[str, str], int]) -> list[JudgedStream]:
    """Streams in scope; of a volume that is not its gateway's own until that was decided."""
    return [
        JudgedStream(
            row["stream_id"],
            row["gateway_id"],
            row["first_seen_us"],
            row["volume"],
            until.get((row["volume"], row["gateway_id"]), NEVER_US),
        )
        for row in streams
        if track.promise.covers(row["volume"], row["client"])
    ]


def _judged(
    reader: SqlReader,
    track: Track,
    objective: Objective,
    item: InForce,
    scope: Sequence[JudgedStream],
    rows: Sequence[Row],
    progress: Mapping[str, int],
    check: RawCheck,
) -> Iterator[RawDifference]:
    rule = rule_of(promise_of(item, objective), objective.applicability)
    gateways = sorted({stream.gateway_id for stream in scope})
    ids = [stream.stream_id for stream in scope]
    hours: dict[int, list[Row]] = {}
    for row in rows:
        hours.setdefault(row["start_us"] // HOUR_US, []).append(row)
    for some in hours.values():
        start_us = some[0]["start_us"] - track.length_us
        end_us = some[-1]["start_us"] + track.length_us
        found = SliceRows(
            reader.slice_inputs(ids, gateways, start_us, end_us), reader.outages(start_us, end_us)
        )
        verdicts = _verdicts(found, track, rule, scope, some, progress, item)
        for row, verdict in zip(some, verdicts, strict=True):
            check.compared += 1
            raw = {"state": verdict.state, "n": verdict.n, "missed": verdict.missed,
                   "threshold_us": verdict.threshold_us}  # fmt: skip
            stored = {name: row[name] for name in COMPARED}
            if raw != stored:
                yield RawDifference(objective.name, row["start_us"], stored, raw)


def _verdicts(
    found: SliceRows,
    track: Track,
    rule: Rule,
    scope: Sequence[JudgedStream],
    rows: Sequence[Row],
    progress: Mapping[str, int],
    item: InForce,
) -> list[SliceVerdict]:
    """As ``judging.judge`` does it, of slices of one objective."""
    start_us = np.array([row["start_us"] for row in rows])
    length_us = np.full(len(rows), track.length_us)
    end_us = start_us + length_us
    scopes = [[each for each in scope if until_us <= each.until_us] for until_us in end_us.tolist()]
    observed = []
    for begin_us, counting in zip(start_us.tolist(), scopes, strict=True):
        until_us = begin_us + track.length_us
        needed = track.gateways(counting, progress, begin_us, until_us)
        observed.append([us for _, us in found.sources(counting, needed, begin_us, until_us)])
    pairs = found.pairs(scopes, start_us, end_us)
    steps = np.full(len(rows), -1, dtype=np.int64)
    before = (steps[:0], steps[:0], steps[:0])
    chosen = np.flatnonzero(track.has_steps & (start_us - track.length_us >= item.applied_us))
    if len(chosen):
        of, at, stream = found.pairs(
            [scopes[index] for index in chosen], (start_us - length_us)[chosen], start_us[chosen]
        )
        steps[chosen] = thresholds_us(found.table, [rule] * len(chosen), length_us[chosen], of, at)
        before = chosen[of], at, stream
    due = DueSlices(
        rules=[rule] * len(rows),
        length_us=length_us,
        is_excluded=np.zeros(len(rows), dtype=np.bool_),
        covered_us=np.array([min(each, default=0) for each in observed]),
        most_covered_us=np.array([max(each, default=0) for each in observed]),
        before_us=steps,
        pair_slice=pairs[0],
        pair_row=pairs[1],
        pair_stream=pairs[2],
        before=before,
        pair_is_beside=found.is_beside(pairs[2], scopes),
    )
    return verdicts_of(judge_slices(found.table, due))

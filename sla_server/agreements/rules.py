"""Promises and their clauses as numbers, and what was asked for in a slice: which step of a curve holds.

``verdicts`` judges many slices at once by them. What was offered are the I/Os that arrived, held back or
not. Of an agreement with ``errors: exclude`` an I/O that failed is in no figure, so it is no demand either:
clients that try again and again what fails at once lift no rate above the end of the curve, where nothing is
promised.

Shapes: (n,) of slices; pairs of a slice and a row of the ``SlotTable`` as in ``verdicts``. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.document import Applicability
from sla_server.agreements.promise import Promise
from sla_server.agreements.slot_table import SLOT_COLUMNS, Bools, Floats, Ints, SlotTable, float_sums, of_kind

HUNG_US: Final = 5_000_000
"""No storage that works takes so long for every single I/O; the default ``outage`` of availability, too."""
KIB: Final = 1024
METRICS: Final = ("latency", "mean_latency", "iops", "throughput", "availability")
LATENCY, MEAN, IOPS, THROUGHPUT, AVAILABILITY = range(len(METRICS))
MOST_STEPS: Final = 8


class Rule(NamedTuple):
    """A promise and its clauses as numbers; made once a promise.

    Attributes:
        allowed_parts: millionths of the I/Os that may be missed, a whole number.
        hung_us: no completion, or one I/O outstanding, for so long is a hang; a step of the curve may be
            longer.
        steps: (up_to_iops, threshold_us) padded to MOST_STEPS with (inf, -1).
    """

    io: int
    metric: int
    allowed_parts: int
    counts_errors: bool
    promised: float
    hung_us: int
    min_ios: int
    min_read_ratio: float
    max_mean_bytes: float
    has_curve: bool
    up_to: tuple[float, ...]
    steps: tuple[int, ...]


def rule_of(promise: Promise, clauses: Applicability) -> Rule:
    """See ``Rule``."""
    pad = MOST_STEPS - len(promise.curve)
    last_us = promise.curve[-1].threshold_us if promise.curve else 0
    is_outage = promise.metric == "availability"
    return Rule(
        io=IO_KINDS[promise.io],
        metric=METRICS.index(promise.metric),
        allowed_parts=1_000_000 - round(promise.percentile * 10_000),
        counts_errors=promise.counts_errors,
        promised=promise.promised,
        hung_us=promise.outage_us if is_outage else max(HUNG_US, last_us),
        min_ios=clauses.min_ios_per_slice,
        min_read_ratio=clauses.min_read_fraction if clauses.min_read_fraction is not None else -1.0,
        max_mean_bytes=clauses.max_mean_io_kib * KIB if clauses.max_mean_io_kib is not None else math.inf,
        has_curve=bool(promise.curve),
        up_to=(*(step.up_to_iops for step in promise.curve), *(math.inf,) * pad),
        steps=(*(step.threshold_us for step in promise.curve), *(-1,) * pad),
    )


def thresholds_us(
    table: SlotTable, rules: Sequence[Rule], length_us: Ints, pair_slice: Ints, pair_row: Ints
) -> Ints:
    """Steps of the demand curve in force in some slices, -1 above the curve; shapes as in ``DueSlices``."""
    params = Params(rules)
    failed = np.zeros_like(pair_row)
    if not params.counts_errors.all():
        columns = {name: table.columns[name][pair_row] for name in SLOT_COLUMNS}
        failed = Failures(columns, params.io[pair_slice]).of_done
    arrived = offered(table, params, pair_slice, pair_row, failed)
    return params.threshold_us(arrived * 1e6 / length_us)


class Params:
    """Rules as columns of shape (n,)."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        columns = list(zip(*rules, strict=True)) or [()] * len(Rule._fields)
        ints = [np.array(columns[index], dtype=np.int64) for index in (0, 1, 2, 5, 6)]
        self.io, self.metric, self.allowed_parts, self.hung_us, self.min_ios = ints
        self.counts_errors = np.array(columns[3], dtype=np.bool_)
        self.promised, self.min_read_ratio, self.max_mean_bytes = (
            np.array(columns[index], dtype=np.float64) for index in (4, 7, 8)
        )
        self.has_curve = np.array(columns[9], dtype=np.bool_)
        self.up_to = np.array(columns[10], dtype=np.float64).reshape(-1, MOST_STEPS)
        self.steps = np.array(columns[11], dtype=np.int64).reshape(-1, MOST_STEPS)

    def threshold_us(self, offered_iops: Floats) -> Ints:
        """Steps at these rates, -1 above the curve or without one."""
        step = (offered_iops[:, None] > self.up_to).sum(axis=1)
        found: Ints = self.steps[np.arange(len(step)), np.minimum(step, MOST_STEPS - 1)]
        return np.where(step < MOST_STEPS, found, -1)


class Failures:
    """What failed of the promised kind, by pair.

    Attributes:
        both: reads and writes that completed; done: of the promised kind.
        is_told: the agent tells failures by kind: it counts its clients' own mistakes in ``errors`` alone.
        unknown: failures of a kind that is not known.
        every: all failures; where nothing completed, of other kinds, too: above all refused clients.
        of_done: those of them that are completions.
    """

    def __init__(self, c: Mapping[str, Ints], io: Ints) -> None:
        """``c``: SLOT_COLUMNS of the pairs; ``io``: the kind promised."""
        self.both: Ints = c["reads"] + c["writes"]
        self.done = of_kind(io, c["reads"], c["writes"])
        self.is_told: Bools = (c["told_us"] | c["failed"] | c["oldest_ms"] | c["stalled_ms"]) > 0
        self.unknown = np.where(self.is_told, 0, c["errors"])
        failed = np.where(self.both > 0, of_kind(io, c["failed_reads"], c["failed_writes"]), c["failed"])
        self.every: Ints = failed + np.minimum(self.unknown, np.maximum(self.done - failed, 0))
        self.of_done = np.minimum(self.every, self.done)


def offered(table: SlotTable, params: Params, pair_slice: Ints, row: Ints, failed: Ints) -> Floats:
    """I/Os of the promised kind that were asked for, by slice; ``failed``: completions with an error."""
    arrived = table.arrivals(row, params.io[pair_slice])
    if not params.counts_errors.all():
        arrived = arrived - np.where(params.counts_errors[pair_slice], 0, failed)
    found: Floats = np.maximum(float_sums(pair_slice, arrived, len(params.io)), 0.0)
    return found

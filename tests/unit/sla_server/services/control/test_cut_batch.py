"""A batch of cuts against each of them alone."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pmdaemon.wire.cut import (
    COL,
    COLUMNS,
    FAILED,
    HIST_DTYPE,
    IO_KINDS,
    MISSED_DTYPE,
    OUTSTANDING,
    OVERDUE,
    Cut,
)
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.names import stream_id
from sla_server.agreements.promise import CurveStep, Promise
from sla_server.services.control.cut_batch import CutBatch, Taken, sums_by
from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US
from sla_server.services.control.usage import GatewayTable, KnownStream, UsageTable
from tests.support.worlds import piece_at, piece_of, promise

VOLUMES = ("gold-1", "gold-2", "plain", "both")


def random_cut(rng: random.Random, gateway: str, names: list[str]) -> Cut:
    new_agent = rng.random() < 0.5
    counters = np.zeros((len(COLUMNS), len(names)), dtype=np.int64)
    hist, missed = [], []
    for row, name in enumerate(names):
        counters[:, row] = [rng.randrange(60) for _ in COLUMNS]
        counters[COL["stream_id"], row] = stream_id(gateway, name, "client")
        for bucket in sorted(rng.sample(range(WIRE_BUCKETS), 12)):
            hist.append((row, bucket, rng.randrange(1, 9)))
        reads, writes = (int(counters[COL[key], row]) for key in ("reads", "writes"))
        for io, done in (("any", reads + writes), ("read", reads), ("write", writes)):
            for threshold_us in (5_000, 12_000):
                if rng.random() < 0.8:  # else nobody counted
                    missed.append((row, IO_KINDS[io], threshold_us, done, rng.randrange(done + 1)))
                if rng.random() < 0.4:
                    missed.append(
                        (row, OVERDUE + IO_KINDS[io], threshold_us, rng.randrange(5), rng.randrange(3))
                    )
        for io in ((), (0,), (0, 1), (0, 2), (0, 1, 2))[rng.randrange(5 if new_agent else 2)]:
            missed.append((row, OUTSTANDING + io, 0, rng.randrange(3000), rng.randrange(3000)))
        if rng.random() < 0.5:  # else an agent that says no more than ``errors``
            for io in IO_KINDS.values():
                failed = rng.randrange(9)
                missed.append((row, FAILED + io, 0, failed, 0))
                missed += [(row, FAILED + io, t, failed, rng.randrange(failed + 1)) for t in (5_000, 12_000)]
    return Cut(
        gateway,
        1,
        1,
        UNIX_0_US,
        rng.randrange(500_000, 1_500_000),
        0,
        1,
        counters,
        np.array(hist, dtype=HIST_DTYPE),
        np.array(missed, dtype=MISSED_DTYPE),
    )


def many_promises() -> list[Promise]:
    steps = (CurveStep(30, 5_000), CurveStep(900, 12_000))
    return [
        promise("gold", volumes=("gold-*",)),
        promise("gold-1", 5),
        promise("writes", volumes=("both",), io="write", curve=steps),
        promise("reads", volumes=("both", "gold-2"), io="read", percentile=99.0, counts_errors=False),
    ]


@pytest.mark.parametrize("seed", range(12))
def test_pieces_are_those_of_each_cut_alone(seed):
    rng = random.Random(seed)
    scopes, usage_table, tables = PromiseScopes(ControlSettings()), UsageTable(), {}
    for gateway in ("g1", "g2", "g3")[: 1 + seed % 3]:
        table = tables[gateway] = GatewayTable(gateway, usage_table)
        table.add_streams(
            [KnownStream(stream_id(gateway, v, "client"), v, "client", "disk") for v in VOLUMES]
        )
    scopes.set_promises(many_promises(), tables.values())
    taken = []
    for gateway, table in tables.items():
        names = [*rng.sample(VOLUMES, rng.randrange(1, 5)), *(["stranger"] * (seed % 2))]
        made = random_cut(rng, gateway, names)
        taken.append(Taken(made, table, scopes.plan(table, made.column("stream_id")), seed + 5))
    batch = CutBatch(taken)
    pieces = batch.pieces()
    assert pieces is not None
    first = 0
    for each, lines in zip(taken, batch.lines, strict=True):
        by_key = {}
        for scope in scopes.at(each.table.gateway_id):
            by_key.setdefault(scope.promise.key, scope)
        assert len(by_key) == lines  # one backend: whole and part are one line
        for line, scope in enumerate(by_key.values()):
            mask = scope.parts[each.table.gateway_id].mask
            rows = each.plan.rows
            alone = piece_of(each.cut, np.array([row >= 0 and mask[row] for row in rows]), scope.promise)
            found = piece_at(pieces, first + line, scope.promise)
            assert found.hist.tolist() == alone.hist.tolist()
            found.hist = alone.hist = np.zeros(1, dtype=np.int64)
            assert found == alone
        first += lines


def test_use_is_that_of_each_volume():
    usage_table = UsageTable()
    table = GatewayTable("g1", usage_table)
    other = GatewayTable("g2", usage_table)
    for made, volumes in ((table, ("a", "b")), (other, ("a",))):
        found = [
            KnownStream(stream_id(made.gateway_id, v, c), v, c, "disk") for v in volumes for c in ("x", "y")
        ]
        made.add_streams(found)
    scopes, taken = PromiseScopes(ControlSettings()), []
    for made, count in ((other, 7), (table, 5)):
        counters = np.zeros((len(COLUMNS), len(made.streams)), dtype=np.int64)
        counters[COL["stream_id"]] = [s.stream_id for s in made.streams]
        counters[COL["reads"]] = counters[COL["held"]] = count
        counters[COL["cost_milli"]] = count * 2000
        empty = np.zeros(0, dtype=HIST_DTYPE), np.zeros(0, dtype=MISSED_DTYPE)
        each = Cut(made.gateway_id, 1, 1, 0, 500_000, 0, 1, counters, *empty)
        taken.append(Taken(each, made, scopes.plan(made, each.column("stream_id")), 1))
    CutBatch(taken).measure(usage_table)
    assert CutBatch(taken).pieces() is None
    assert [table.use[v].last_ops_per_s for v in "ab"] == [20.0, 20.0]
    assert (other.use["a"].last_ops_per_s, other.use["a"].held) == (28.0, 14)
    assert other.use["a"].cost_per_s == 28.0  # half of 56
    assert other.use["a"].peak_cost_per_s == 56.0


@pytest.mark.parametrize(
    "index", [range(6), np.repeat(range(6), 3), [0, 0, 1, 2, 3, 4, 5, 5], [5, 4, 3, 2, 1, 0]]
)
def test_sums_by_number_are_those_one_by_one_however_many_there_are_of_each(index) -> None:
    numbers = np.array(index)
    parts = [np.arange(len(numbers)) * 7, np.linspace(0.1, 0.9, len(numbers)), numbers % 2 == 0]
    wanted = np.zeros((3, 6))
    for into, part in zip(wanted, parts, strict=True):
        for at, value in zip(numbers.tolist(), part.tolist(), strict=True):
            into[at] += value
    assert sums_by(parts, numbers, 6).tolist() == wanted.tolist()
    assert sums_by([np.zeros(0)], np.zeros(0, np.int64), 0).shape == (1, 0)

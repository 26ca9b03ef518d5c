"""Cuts and messages for the database tests, and a plain model of what they must sum to."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sqlalchemy import select

from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame, histogram, names
from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, MISSED_DTYPE, Cut
from pmdaemon.wire.kinds import Kind
from sla_server.db import schema
from sla_server.db.queries.reader import SqlReader

T0 = 1_800_000_000_000_000  # a whole minute, 2027-01-15 08:00 UTC
MINUTE_US = 60_000_000
EPOCH = 0xF123_4567_89AB_CDEF  # above 2**63, as half of all epochs are


def gateway(number: int) -> str:
    return str(uuid.UUID(int=0xA000 + number))


def stream(number: int, gateway_id: str | None = None) -> int:
    return names.stream_id(gateway_id or gateway(1), f"vol-{number}", "host-a")


def make_cut(
    seq: int,
    *,
    gw: str | None = None,
    epoch: int = EPOCH,
    start_us: int | None = None,
    duration_us: int = 1_000_000,
    streams: Sequence[int] = (1, 2),
    seed: int = 0,
    gap: int = 0,
    tg: int = 0,
    thresholds: Sequence[int] = (5_000, 12_000),
    hidden: bool = False,
) -> Cut:
    """A cut with contents that follow from (seq, seed).

    ``hidden``: also OVERDUE, FAILED and OUTSTANDING, and what is sequential.
    """
    gateway_id = gw or gateway(1)
    rng = np.random.default_rng((seq, seed, uuid.UUID(gateway_id).int & 0xFFFF))
    rows, hist, missed = [], [], []
    for row, number in enumerate(streams):
        values = dict.fromkeys(COLUMNS, 0)
        latencies_us = rng.integers(100, 30_000, size=int(rng.integers(1, 30)))
        is_write = rng.random(len(latencies_us)) < 0.4
        values |= {
            "stream_id": stream(number, gateway_id),
            "arrived": len(latencies_us) + int(rng.integers(0, 3)),
            "reads": int((~is_write).sum()),
            "writes": int(is_write.sum()),
            "read_bytes": int((~is_write).sum()) * 4096,
            "write_bytes": int(is_write.sum()) * 8192,
            "others": int(rng.integers(0, 2)),
            "errors": int(rng.integers(0, 2)),
            "lat_sum_us": int(latencies_us.sum()),
            "svc_sum_us": int(latencies_us.sum()) // 2,
            "delay_sum_us": int(rng.integers(0, 2)) * 700,
            "cost_milli": len(latencies_us) * 1062,
            "inflight": int(rng.integers(0, 9)),
            "held": int(rng.integers(0, 5)),
            "cum_reads": seq * 1000,
        }
        rows.append([values[name] for name in COLUMNS])
        for base, chosen in ((histogram.TOTAL_READ, ~is_write), (histogram.TOTAL_WRITE, is_write)):
            buckets = [histogram.bucket_of_ns(int(us) * 1000) for us in latencies_us[chosen]]
            for bucket in sorted(set(buckets)):
                hist.append((row, base + bucket, buckets.count(bucket)))
        hist.append((row, histogram.SERVICE + 3, len(latencies_us)))
        for threshold in thresholds:
            missed.append(
                (row, cuts.IO_ANY, threshold, len(latencies_us), int((latencies_us > threshold).sum()))
            )
        if hidden:
            missed += _hidden(rng, row, thresholds)
    counters = cuts.rows_array(rows)
    known = np.where(np.arange(len(rows)) % 3 == 2, -1, counters[COL["arrived"]] // 2)
    return Cut(
        gateway_id=gateway_id,
        epoch=epoch,
        seq=seq,
        start_unix_us=T0 + (seq - 1) * 1_000_000 if start_us is None else start_us,
        duration_us=duration_us,
        throttle_gen=tg,
        threshold_version=1,
        counters=counters,
        hist=np.array(hist, dtype=HIST_DTYPE),
        missed=np.array(missed, dtype=MISSED_DTYPE),
        gap=gap,
        extra={cuts.SEQUENTIAL: cuts.sequential_bytes(known)} if hidden else {},
    )


def _hidden(rng: np.random.Generator, row: int, thresholds: Sequence[int]) -> list[tuple[int, ...]]:
    """Entries of what completions alone hide."""
    low, high = (int(value) for value in sorted(rng.integers(0, 9, size=2)))
    found: list[tuple[int, ...]] = [(row, cuts.OUTSTANDING, 0, *(int(v) for v in rng.integers(0, 9_999, 2)))]
    found += [(row, cuts.FAILED + io, 0, high, 0) for io in range(3)]
    for threshold in thresholds:
        found.append((row, cuts.OVERDUE + cuts.IO_ANY, threshold, low, high))
        found.append((row, cuts.FAILED + cuts.IO_READ, threshold, high, low))
    if high % 2:  # an agent that tells reads from writes
        ages = rng.integers(1, 9_999, size=(2, 2)).tolist()
        found += [(row, cuts.OUTSTANDING + io, 0, *ages[io - 1]) for io in (cuts.IO_READ, cuts.IO_WRITE)]
    if thresholds:
        found.append((row, cuts.FAILED + cuts.IO_ANY, thresholds[0], high, low))
    return found


def cuts_message(
    items: Iterable[Cut], offset_us: int = 0, live: bool = False, recv_us: int | None = None
) -> bytes:
    """Cuts as a pair posts them; received at once unless said otherwise."""
    items = list(items)
    header = {
        "pair": 0,
        "n": len(items),
        "recv_us": [recv_us or item.start_unix_us + item.duration_us + 5_000 for item in items],
        "offset_us": [offset_us] * len(items),
        "live": [live] * len(items),
    }
    return frame.encode(Kind.CUTS, header, b"".join(cuts.encode(item) for item in items))


def gateway_message(state: str = "up", gw: str | None = None, **header: Any) -> bytes:
    gateway_id = gw or gateway(1)
    full = {
        "gw": gateway_id,
        "name": "gw-1",
        "state": state,
        "reason": "",
        "address": "127.0.0.1:4711",
        "software": "agent 0.1",
        "ep": EPOCH,
        "at_us": T0,
        "offset_us": 0,
        "dropped": 0,
        **header,
    }
    if state == "up":
        export = {"backend": "disk-1", "size_bytes": 1 << 30, "read_only": False, "source": "nbd"}
        full.setdefault("exports", [{"volume": f"vol-{number}", **export} for number in (1, 2)])
    return frame.encode(Kind.GATEWAY, full)


def streams_message(numbers: Sequence[int] = (1, 2), gw: str | None = None) -> bytes:
    gateway_id = gw or gateway(1)
    streams = [
        {"id": stream(number, gateway_id), "volume": f"vol-{number}", "client": "host-a", "backend": "disk-1"}
        for number in numbers
    ]
    return frame.encode(Kind.STREAMS_SEEN, {"gw": gateway_id, "streams": streams})


def record_message(rows: Sequence[tuple[str, dict[str, Any]]], req: str | None = None) -> bytes:
    return frame.encode(Kind.RECORD, {"rows": [list(row) for row in rows], "req": req, "from": "services"})


@dataclass
class Model:
    """The sums of some cuts, computed one number at a time."""

    slots: dict[tuple[int, int], dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(int))
    )
    hists: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0] * 198))
    missed: dict[tuple[int, int, int, int], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0] * len(schema.LATE_SUMS))
    )
    coverage: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    marks: dict[tuple[str, int], int] = field(default_factory=dict)

    @classmethod
    def of(cls, items: Iterable[Cut], offset_us: int = 0, slot_us: int = MINUTE_US) -> Model:
        model = cls()
        for item in items:
            slot = (item.start_unix_us + offset_us) // slot_us * slot_us
            start_us, end_us = (
                item.start_unix_us + offset_us,
                item.start_unix_us + offset_us + item.duration_us,
            )
            for each in range(slot, max(end_us, slot + 1), slot_us):
                within_us = min(each + slot_us, end_us) - max(each, start_us)
                model.coverage[each, item.gateway_id][0] += within_us
            cover = model.coverage[slot, item.gateway_id]
            cover[1] += 1
            cover[2] += item.gap
            mark = (item.gateway_id, item.epoch)
            model.marks[mark] = max(item.seq, model.marks.get(mark, 0))
            ids = item.column("stream_id").tolist()
            telling = {row for row, io, *_ in item.missed.tolist() if io >= cuts.OVERDUE}
            for row, stream_id in enumerate(ids):
                sums = model.slots[slot, stream_id]
                for name in schema.COUNTERS:
                    sums[name] += int(item.counters[COL[name]][row])
                sums["covered_us"] += item.duration_us
                for name in (*schema.FAILED, *cuts.OUTSTANDING_COLUMNS, "spread_us"):
                    sums[name] += 0
                held = item.counters[COL["held"]][row] or item.counters[COL["delay_sum_us"]][row]
                sums["caps_us"] += item.duration_us if held else 0
                known = cuts.sequential_counts(item.sequential)[row] if item.sequential else -1
                sums["sequential"] += max(int(known), 0)
                sums["placed"] += int(item.counters[COL["arrived"]][row]) if known >= 0 else 0
                sums["told_us"] += item.duration_us if row in telling else 0
                sums["held_max"] = max(sums["held_max"], int(item.counters[COL["held"]][row]))
                sums["inflight_max"] = max(sums["inflight_max"], int(item.counters[COL["inflight"]][row]))
            for row, bucket, count in item.hist.tolist():
                if bucket < 198:
                    model.hists[slot, ids[row]][bucket] += count
            for row, io, threshold, first, second in item.missed.tolist():
                sums = model.slots[slot, ids[row]]
                if io >= cuts.OUTSTANDING:
                    kinds = ["", "read_", "write_"][io - cuts.OUTSTANDING : io - cuts.OUTSTANDING + 1]
                    tells = any(
                        each[0] == row and each[1] > cuts.OUTSTANDING for each in item.missed.tolist()
                    )
                    for kind in kinds if tells else ["", "kindless_"]:
                        for name, age in (("oldest", first), ("stalled", second)):
                            key = f"{kind}{name}_ms" if kind == "kindless_" else f"{name}_{kind}ms"
                            sums[key] = max(sums[key], age)
                elif io >= cuts.FAILED and threshold == 0:
                    sums[schema.FAILED[io - cuts.FAILED]] += first
                else:
                    entry = model.missed[slot, ids[row], io % 4, threshold]
                    entry[io // 4 * 2] += first
                    entry[io // 4 * 2 + 1] += second
            model._add_settled_failed(slot, ids, item)
        return model

    def _add_settled_failed(self, slot: int, ids: list[int], item: Cut) -> None:
        """Settled completions that failed: at most and at least, of each cut, row and limit by itself."""
        second = {(row, io, threshold): value for row, io, threshold, _, value in item.missed.tolist()}
        for (row, io, threshold), settled in second.items():
            failed = second.get((row, io + 4, threshold), 0)
            if cuts.OVERDUE <= io < cuts.FAILED and settled and failed:
                entry = self.missed[slot, ids[row], io % 4, threshold]
                missed = max(second.get((row, io % 4, threshold), 0), settled, failed)
                entry[6] += min(settled, failed)
                entry[7] += max(settled + failed - missed, 0)

    def total(self, name: str) -> int:
        return sum(sums[name] for sums in self.slots.values())


def assert_database_holds(reader: SqlReader, items: Sequence[Cut], offset_us: int = 0) -> None:
    """Every sum in SQL equals the model's, computed from exactly these cuts."""
    model = Model.of(items, offset_us)
    ids = {stream_id for _, stream_id in model.slots}
    gateways = {gateway_id for _, gateway_id in model.coverage}
    inputs = reader.slice_inputs(ids, gateways, 0, 1 << 62)
    got = {(row["slot_us"], row["stream_id"]): row for row in inputs.rows}
    assert set(got) == set(model.slots)
    # What is judged from is not all that is stored.
    table = schema.rollups
    stored = reader._rows(select(table).where(table.c.stream_id.in_(ids)))
    whole = {(row["slot_us"], row["stream_id"]): row for row in stored}
    for key, sums in model.slots.items():
        assert {name: whole[key][name] for name in sums} == dict(sums)
        assert all(got[key][name] == whole[key][name] for name in got[key] if not name.startswith("hist"))
        assert [*got[key]["hist_read"].tolist(), *got[key]["hist_write"].tolist()] == model.hists[key]
    missed = {
        (row["slot_us"], row["stream_id"], row["io"], row["threshold_us"]): [
            row[name] for name in schema.LATE_SUMS
        ]
        for row in inputs.missed
    }
    assert missed == dict(model.missed)
    coverage = {
        (row["slot_us"], row["gateway_id"]): [row["covered_us"], row["cuts"], row["gap_cuts"]]
        for row in inputs.coverage
    }
    assert coverage == dict(model.coverage)
    assert {(gw, ep): seq for gw, ep, seq in reader.watermarks()} == model.marks
    totals = reader.totals()
    for name in ("reads", "writes", "read_bytes", "write_bytes", "errors"):
        assert totals[name] == model.total(name)
    hours = reader.hours(0, 1 << 62)
    assert sum(row["reads"] for row in hours) == model.total("reads")
    assert sum(int(row["hist"].sum()) for row in hours) == sum(map(sum, model.hists.values()))

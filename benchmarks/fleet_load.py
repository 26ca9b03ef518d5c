"""The simulated fleet of ``benchmarks.fleet``: names, cuts (the SPEC of ``fleet_swarm``), agreements.

Contents are those of ``ingest_load``: some 410 bytes a stream, latencies and rates log-normal over the
streams. ``GROUPS`` gateways differ, ``VARIANTS`` cuts of each follow one another, and gateways of one group
are at different variants; lifetime counters rise by what each cut says. Every stream is promised
p95 <= 20 ms, which all keep: the load is that of a quiet day (``bench-control`` has the others).
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from sqlalchemy import Engine, insert

from benchmarks import ingest_load
from benchmarks.ingest_load import VARIANTS
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame, histogram, names
from pmdaemon.wire.cut import COL, IO_ANY, MISSED_DTYPE, Cut
from pmdaemon.wire.kinds import Kind
from sla_server.agreements.load import load_documents
from sla_server.db import schema

GROUPS: Final = 500
EPOCH: Final = 7
LIMIT_US: Final = 20_000
ON_BACKEND: Final = 10  # gateways
CLIENT: Final = "host-a"
_CUM: Final = [COL[name] for name in ("cum_reads", "cum_writes", "cum_read_bytes", "cum_write_bytes")]
_RATES: Final = [COL[name] for name in ("reads", "writes", "read_bytes", "write_bytes")]
_MARK: Final = 0x7EADBEEF00000000  # stands for a number that the swarm patches
_GATEWAY_MARK: Final = uuid.UUID(int=_MARK << 64 | _MARK)
AGREEMENT: Final = f"""\
apiVersion: storage-sla/v1
kind: SLA
metadata: {{name: NAME}}
spec:
  parties: {{provider: storage-team, customer: fleet}}
  scope: {{clients: ["*"], volumes: [NAME], io: any}}
  priority: gold
  objectives:
  - name: latency
    indicator: {{metric: latency, percentile: 95}}
    demand_curve:
    - {{value_ms: {LIMIT_US / 1000:g}}}
    budgeting: {{method: timeslices, slice: 1m, target: 0.995}}
  window: {{type: calendar, period: month, tz: UTC}}
"""


def gateway_id(number: int) -> str:
    """The UUID of a gateway."""
    return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"fleet-{number}"))


def volumes(number: int, streams: int) -> list[str]:
    """The volumes of a gateway, a stream each."""
    return [f"vol-{number:05}-{row:02}" for row in range(streams)]


def store_agreements(engine: Engine, gateways: int, streams: int, now_us: int) -> None:
    """Put an agreement for every stream into SQL, as ``sla apply`` leaves it there."""
    (loaded,) = load_documents(AGREEMENT, 60)
    spec = json.dumps(loaded.agreement.spec_json())
    rows = [
        {
            "name": volume,
            "version": 1,
            "document": loaded.text.replace("NAME", volume),
            "spec": spec.replace("NAME", volume),
            "priority": "gold",
            "applied_us": now_us,
            "applied_by": "bench-fleet",
            "ended_us": None,
        }
        for number in range(gateways)
        for volume in volumes(number, streams)
    ]
    with engine.begin() as connection:
        connection.execute(insert(schema.agreements), rows)


def write_spec(path: Path, gateways: int, streams: int) -> float:
    """Write the swarm's SPEC; returns the mean bytes of a cut."""
    groups = min(GROUPS, gateways)
    load = ingest_load.fleet(groups, streams)
    made = [_chained(variants) for variants in load.templates]
    frames = [_frame(item) for variants, _ in made for item in variants]
    closings = _closings()
    numbers = (gateways, groups, VARIANTS, streams, EPOCH, Kind.CAPS, Kind.THRESHOLDS, *_CUM)
    with path.open("wb") as file:
        file.write(struct.pack(f"<{len(numbers)}I", *numbers))
        for closing, offsets in closings:
            file.write(struct.pack(f"<{1 + len(offsets)}I", len(closing), *offsets))
        file.writelines(closing for closing, _ in closings)
        file.writelines(cycle for _, cycle in made)
        file.writelines(part for item in frames for part in item)
        for number in range(gateways):
            file.writelines(_gateway(number, streams))
    return sum(len(raw) for _, raw in frames) / len(frames)


def _chained(variants: list[Cut]) -> tuple[list[Cut], bytes]:
    """Cuts whose lifetime counters go on from one to the next, and what a whole turn adds to them."""
    total = np.zeros((len(_CUM), variants[0].rows), np.int64)
    chained = []
    for item in variants:
        counters = item.counters.copy()
        total += counters[_RATES]
        counters[_CUM] = total
        chained.append(replace(item, counters=counters, missed=_missed(item)))
    return chained, total.astype("<i8").tobytes()


def _missed(item: Cut) -> Any:
    """One entry a stream: exact, as the limit is an edge of a bucket or far above all of them."""
    edge = int(np.searchsorted(histogram.EDGES_NS, LIMIT_US * 1000))
    bucket, count, row = item.hist["bucket"], item.hist["count"].astype(np.int64), item.hist["row"]
    over = (bucket < histogram.SERVICE) & (bucket % histogram.BUCKETS >= edge)
    late = np.bincount(row[over], count[over], item.rows)
    done = item.counters[COL["reads"]] + item.counters[COL["writes"]]
    found = [(n, IO_ANY, LIMIT_US, int(done[n]), int(late[n])) for n in range(item.rows)]
    return np.array(found, MISSED_DTYPE)


def _frame(item: Cut) -> tuple[bytes, bytes]:
    """The ``struct cut`` of ``fleet_swarm``, and the frame."""
    marked = replace(item, gateway_id=str(_GATEWAY_MARK), epoch=EPOCH, seq=_MARK, start_unix_us=_MARK + 1)
    raw = cuts.encode(marked)
    blob_at = len(raw) - item.counters.nbytes - item.hist.nbytes - item.missed.nbytes
    blob_at -= blob_at % 8  # the frame ends with padding
    offsets = (raw.index(_GATEWAY_MARK.bytes), _offset(raw, _MARK), _offset(raw, _MARK + 1), blob_at)
    return struct.pack("<5I", len(raw), *offsets), raw


def _closings() -> list[tuple[bytes, tuple[int, ...]]]:
    """REPLY with and without cuts, CAPS_ACK, THRESHOLDS_ACK, and where to patch them."""
    head = {"poll": _MARK, "sent_ns": _MARK + 1, "wall_us": _MARK + 2}
    some = {"cuts": 0x5A, "first": [EPOCH, _MARK + 3], "last": [EPOCH, _MARK + 4], "dropped": 0}
    reply = frame.encode(Kind.REPLY, head | some)
    none = frame.encode(Kind.REPLY, head | {"cuts": 0, "first": None, "last": None, "dropped": 0})
    caps = frame.encode(Kind.CAPS_ACK, {"gen": _MARK, "ok": True, "reason": ""})
    thresholds = frame.encode(Kind.THRESHOLDS_ACK, {"version": _MARK})
    numbers = [_offset(reply, _MARK + n) for n in range(5)]
    return [
        (reply, (*numbers[:3], reply.index(b"cuts") + 4, *numbers[3:])),
        (none, tuple(_offset(none, _MARK + n) for n in range(3))),
        (caps, (_offset(caps, _MARK),)),
        (thresholds, (_offset(thresholds, _MARK),)),
    ]


def _offset(raw: bytes, mark: int) -> int:
    return raw.index(b"\xcf" + struct.pack(">Q", mark)) + 1


def _gateway(number: int, streams: int) -> Iterator[bytes]:
    """What the swarm knows of one gateway: length, id, stream ids, everything it says to register."""
    own, backend = gateway_id(number), f"backend-{number // ON_BACKEND:03}"
    hello = {"proto_min": 1, "proto_max": 1, "features": [], "software": "fleet simulator 1"}
    hello |= {"gw": own, "name": f"sim-{number:05}", "ep": EPOCH}
    known = volumes(number, streams)
    ids = [names.stream_id(own, volume, CLIENT) for volume in known]
    rest = {"backend": backend, "size_bytes": 1 << 40, "read_only": False, "source": "simulated"}
    exports = [{"volume": volume, **rest} for volume in known]
    rows = [
        {"id": stream, "volume": volume, "client": CLIENT, "backend": backend}
        for stream, volume in zip(ids, known, strict=True)
    ]
    said = b"".join(
        (
            frame.encode(Kind.HELLO, hello),
            frame.encode(Kind.SCHEMA, cuts.schema_header()),
            frame.encode(Kind.REGISTER, {"exports": exports, "spool": []}),
            frame.encode(Kind.STREAMS, {"streams": rows}),
        )
    )
    yield struct.pack("<I", len(said))
    yield uuid.UUID(own).bytes
    yield struct.pack(f"<{streams}q", *ids)
    yield said

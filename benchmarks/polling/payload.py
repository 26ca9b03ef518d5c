"""The bytes of the benchmark: what a real agent says, and a real cut of 16 streams.

A cut as the product makes it: 18 counters a stream, about 50 histogram entries a stream (sparse), one missed
entry a stream. Numbers that change with each answer are packed as msgpack's uint 64 and patched in place.
"""

from __future__ import annotations

import random
import struct
import uuid
from pathlib import Path

import numpy as np

from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.histogram import WIRE_BUCKETS
from pmdaemon.wire.kinds import Kind

STREAMS = 16
ENTRIES_PER_STREAM = 50
EPOCH = 7
_MARK = 0x7EADBEEF00000000


def gateway_id(index: int) -> str:
    """A UUID for gateway ``index``, evenly spread like real ones."""
    return str(uuid.UUID(int=random.Random(index).getrandbits(128), version=4))


def registration(index: int) -> bytes:
    """HELLO, SCHEMA, REGISTER and STREAMS of one gateway; equally long for all."""
    own = gateway_id(index)
    hello = {
        "proto_min": 1,
        "proto_max": 1,
        "features": [],
        "software": "swarm 1",
        "gw": own,
        "name": f"gw-{index:05d}",
        "ep": EPOCH,
    }
    exports = [
        {
            "volume": f"vol-{row}",
            "backend": "disk",
            "size_bytes": 1 << 30,
            "read_only": False,
            "source": "simulated",
        }
        for row in range(STREAMS)
    ]
    streams = [
        {
            "id": names.stream_id(own, f"vol-{row}", "host-a"),
            "volume": f"vol-{row}",
            "client": "host-a",
            "backend": "disk",
        }
        for row in range(STREAMS)
    ]
    return b"".join(
        (
            frame.encode(Kind.HELLO, hello),
            frame.encode(Kind.SCHEMA, cut.schema_header()),
            frame.encode(Kind.REGISTER, {"exports": exports, "spool": []}),
            frame.encode(Kind.STREAMS, {"streams": streams}),
        )
    )


def cut_template(streams: int = STREAMS) -> bytes:
    """A CUT of ``streams`` streams; gateway and seq are to be patched."""
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 1 << 30, (len(cut.COLUMNS), streams), dtype=np.int64)
    hist = np.zeros(streams * ENTRIES_PER_STREAM, dtype=cut.HIST_DTYPE)
    hist["row"] = np.repeat(np.arange(streams), ENTRIES_PER_STREAM)
    hist["bucket"] = rng.integers(0, WIRE_BUCKETS, len(hist))
    hist["count"] = rng.integers(1, 1000, len(hist))
    missed = np.zeros(streams, dtype=cut.MISSED_DTYPE)
    missed["row"], missed["threshold_us"], missed["counted"] = np.arange(streams), 2000, 1000
    return cut.encode(
        cut.Cut(
            gateway_id=str(uuid.UUID(int=_MARK << 64 | _MARK)),
            epoch=EPOCH,
            seq=_MARK,
            start_unix_us=1_800_000_000_000_000,
            duration_us=1_000_000,
            throttle_gen=0,
            threshold_version=1,
            counters=counters,
            hist=hist,
            missed=missed,
        )
    )


def _reply_template() -> bytes:
    header = {
        "poll": _MARK,
        "sent_ns": _MARK + 1,
        "wall_us": 1_800_000_000_000_000,
        "cuts": 1,
        "first": [EPOCH, 1],
        "last": [EPOCH, 1],
        "dropped": 0,
    }
    return frame.encode(Kind.REPLY, header)


def _offset(template: bytes, mark: int) -> int:
    return template.index(b"\xcf" + struct.pack(">Q", mark)) + 1


def write_spec(path: Path, gateways: int, *, registers: bool, streams: int = STREAMS) -> int:
    """The swarm's SPEC file; returns the bytes of one whole answer."""
    made, reply = cut_template(streams), _reply_template()
    blocks = []
    for index in range(gateways):
        raw = uuid.UUID(gateway_id(index)).bytes
        blocks.append(raw + (registration(index) if registers else b""))
    size = len(blocks[0])
    assert all(len(block) == size for block in blocks)
    gw_at = made.index(uuid.UUID(int=_MARK << 64 | _MARK).bytes)
    numbers = (
        *(size, 0, size - 16, len(made), gw_at, _offset(made, _MARK)),
        *(len(reply), _offset(reply, _MARK), _offset(reply, _MARK + 1)),
    )
    path.write_bytes(struct.pack("<9I", *numbers) + b"".join(blocks) + made + reply)
    return len(made) + len(reply)


def answer_bytes() -> int:
    """Of one whole answer of the default size."""
    return len(cut_template()) + len(_reply_template())


def request() -> bytes:
    """A POLL as the product sends it; its number is small, so the swarm parses it like any other."""
    header = {"poll": 1, "sent_ns": 1 << 40, "ack": [[EPOCH, 1]], "from": [EPOCH, 2], "lease": True}
    return frame.encode(Kind.POLL, header)


def exporter_text() -> str:
    """The same for Prometheus: a sample a counter, a histogram entry, a missed count."""
    lines = []
    for row in range(STREAMS):
        where = f'volume="vol-{row}",client="host-a",backend="disk"'
        lines += [f"io_{name}{{{where}}} {row * 1000 + 17}" for name in cut.COLUMNS[1:]]
        lines += [
            f'io_latency_us_bucket{{{where},kind="total_read",le="{2**entry / 100:g}"}} {entry * 37}'
            for entry in range(ENTRIES_PER_STREAM)
        ]
        lines.append(f'io_missed{{{where},threshold_us="2000"}} 3')
    return "\n".join(lines) + "\n"

"""Frames of protocol version 1 as bytes on disk: what this release writes, and must be able to read for ever.

A failure here means that the wire format changed. Then do not regenerate these files: raise the protocol
version and add files for it beside them.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.session import Session, Side
from tests.support.paths import FIXTURES

GOLDEN = FIXTURES / "golden" / "v1"
GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
EPOCH = 0xFEDCBA9876543210


def golden_cut() -> cut.Cut:
    rows = [
        [names.stream_id(GATEWAY, "vol-17", "host-a"), *range(101, 100 + len(cut.COLUMNS))],
        [names.stream_id(GATEWAY, "vol-18", "host-b"), *range(201, 200 + len(cut.COLUMNS))],
    ]
    return cut.Cut(
        gateway_id=GATEWAY,
        epoch=EPOCH,
        seq=42,
        start_unix_us=1_800_000_000_123_456,
        duration_us=1_000_321,
        throttle_gen=-1,
        threshold_version=3,
        counters=cut.rows_array(rows),
        hist=np.array([(0, 34, 5), (1, 133, 4_000_000_000), (1, 297, 1)], dtype=cut.HIST_DTYPE),
        missed=np.array([(0, 0, 12_000, 100, 7), (1, 2, 5_000, 10, 0)], dtype=cut.MISSED_DTYPE),
        gap=2,
        extra={"dp": {"nbd-0": 9}},
    )


HEADERS: dict[Kind, dict[str, Any]] = {
    Kind.HELLO: {
        "proto_min": 1,
        "proto_max": 1,
        "features": [],
        "software": "gateway-agent 0.1",
        "gw": GATEWAY,
        "name": "gw-a",
        "ep": EPOCH,
    },
    Kind.WELCOME: {
        "proto": 1,
        "features": [],
        "software": "storage-sla-server 0.1",
        "interval_us": 1_000_000,
        "server_us": 1_800_000_000_000_000,
    },
    Kind.REGISTER: {
        "exports": [
            {
                "volume": "vol-17",
                "backend": "disk-1",
                "size_bytes": 1 << 40,
                "read_only": False,
                "source": "nbd",
            }
        ],
        "spool": [[5, 10, 20], [EPOCH, 1, 41]],
    },
    Kind.REGISTERED: {"ok": True},
    Kind.STREAMS: {
        "streams": [
            {
                "id": names.stream_id(GATEWAY, "vol-17", "host-a"),
                "volume": "vol-17",
                "client": "host-a",
                "backend": "disk-1",
            }
        ]
    },
    Kind.POLL: {
        "poll": 7,
        "sent_ns": 123_456_789_000,
        "ack": [[5, 20], [EPOCH, 40]],
        "from": [EPOCH, 42],
        "lease": True,
    },
    Kind.REPLY: {
        "poll": 7,
        "sent_ns": 123_456_789_000,
        "wall_us": 1_800_000_001_000_000,
        "cuts": 1,
        "first": [EPOCH, 42],
        "last": [EPOCH, 42],
        "dropped": 2,
    },
    Kind.CAPS: {
        "gen": 3,
        "lease_us": 30_000_000,
        "caps": [{"volume": "vol-18", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 123.5}],
    },
    Kind.CAPS_ACK: {"gen": 3, "ok": True, "reason": ""},
    Kind.THRESHOLDS: {
        "version": 3,
        "entries": [{"volume": "vol-17", "client": "host-*", "io": "any", "threshold_us": 12_000}],
    },
    Kind.THRESHOLDS_ACK: {"version": 3},
    Kind.ALERT: {
        "kind": "plane-died",
        "severity": "warning",
        "text": "nbd-0 was restarted",
        "at_us": 1_800_000_000_000_000,
        "details": {"plane": "nbd-0"},
    },
    Kind.UNSUPPORTED: {"kind": 60},
    Kind.ERROR: {"code": "violation", "text": "REPLY is not allowed while connected"},
    Kind.BYE: {"reason": "the agent stops"},
}


@pytest.mark.parametrize("kind", HEADERS)
def test_header_frames(kind: Kind) -> None:
    golden = (GOLDEN / f"{kind.name.lower()}.bin").read_bytes()
    assert frame.encode(kind, HEADERS[kind]) == golden
    decoded = frame.decode(golden)
    assert (decoded.kind, decoded.header, decoded.flags, len(decoded.blob)) == (kind, HEADERS[kind], 0, 0)


def test_schema_frame() -> None:
    # through JSON, because numpy's description of a dtype holds tuples, which a frame turns into lists
    header = json.loads(json.dumps(cut.schema_header()))
    golden = (GOLDEN / "schema.bin").read_bytes()
    assert frame.encode(Kind.SCHEMA, header) == golden
    assert frame.decode(golden).header == header


def test_cut_frame() -> None:
    golden = (GOLDEN / "cut.bin").read_bytes()
    made = golden_cut()
    assert cut.encode(made) == golden
    got = cut.decode(golden)
    assert (got.gateway_id, got.epoch, got.seq, got.gap) == (GATEWAY, EPOCH, 42, 2)
    assert (got.start_unix_us, got.duration_us) == (1_800_000_000_123_456, 1_000_321)
    assert (got.throttle_gen, got.threshold_version, got.extra) == (-1, 3, {"dp": {"nbd-0": 9}})
    assert (got.counters == made.counters).all()
    assert (got.hist == made.hist).all()
    assert (got.missed == made.missed).all()


def test_golden_session() -> None:
    """A whole session of both sides, played against the table of this release."""
    sessions = {Side.AGENT: Session(Side.AGENT), Side.DAEMON: Session(Side.DAEMON)}
    script = (
        (Side.AGENT, Kind.HELLO),
        (Side.DAEMON, Kind.WELCOME),
        (Side.AGENT, Kind.SCHEMA),
        (Side.AGENT, Kind.REGISTER),
        (Side.DAEMON, Kind.REGISTERED),
        (Side.AGENT, Kind.STREAMS),
        (Side.DAEMON, Kind.THRESHOLDS),
        (Side.DAEMON, Kind.CAPS),
        (Side.AGENT, Kind.CAPS_ACK),
        (Side.AGENT, Kind.THRESHOLDS_ACK),
        (Side.DAEMON, Kind.POLL),
        (Side.AGENT, Kind.CUT),
        (Side.AGENT, Kind.REPLY),
        (Side.AGENT, Kind.ALERT),
        (Side.DAEMON, Kind.UNSUPPORTED),
        (Side.AGENT, Kind.BYE),
    )
    for speaker, kind in script:
        data = (GOLDEN / f"{kind.name.lower()}.bin").read_bytes()
        listener = Side.DAEMON if speaker is Side.AGENT else Side.AGENT
        sessions[speaker].sending(kind)
        assert [item.kind for item in sessions[listener].feed(data)] == [kind]


def test_stream_id_is_stable() -> None:
    assert names.stream_id(GATEWAY, "vol-17", "host-a") == int((GOLDEN / "stream_id.txt").read_text())


@pytest.mark.parametrize(("text", "valid"), [("vol-17", True), ("a" * 128, True), ("a" * 129, False)])
def test_names(text: str, valid: bool) -> None:
    assert names.is_name(text) is valid
    for bad in ("", "-x", "a b", "a/b", "a\n", "ä"):
        assert not names.is_name(bad)

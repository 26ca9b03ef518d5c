"""What the simulated fleet says is what an agent would say; what its C program takes for granted holds."""

from __future__ import annotations

import struct
import uuid
from pathlib import Path

import numpy as np

from benchmarks import fleet_load, fleet_watch, ingest_load
from benchmarks.ingest_load import VARIANTS
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame, names
from pmdaemon.wire.cut import COL
from pmdaemon.wire.frame_template import encode_poll
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.orders import ThresholdsOrder
from sla_server.agreements.load import load_documents

GATEWAYS, STREAMS = 3, 2


class Spec:
    """Reads a SPEC from front to back, as the program does."""

    def __init__(self, path: Path) -> None:
        self.raw, self.at = path.read_bytes(), 0

    def numbers(self, count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}I", self.bytes(4 * count))

    def bytes(self, size: int) -> bytes:
        self.at += size
        return self.raw[self.at - size : self.at]


def test_a_spec_holds_registrations_and_cuts_that_can_be_patched(tmp_path: Path) -> None:
    fleet_load.write_spec(tmp_path / "spec", GATEWAYS, STREAMS)
    spec = Spec(tmp_path / "spec")
    head = spec.numbers(11)
    assert head[:7] == (GATEWAYS, GATEWAYS, VARIANTS, STREAMS, fleet_load.EPOCH, Kind.CAPS, Kind.THRESHOLDS)
    assert [cuts.COLUMNS[column][:4] for column in head[7:]] == ["cum_"] * 4
    closings = [spec.numbers(count) for count in (7, 4, 2, 2)]
    reply, none, caps, thresholds = (bytearray(spec.bytes(closing[0])) for closing in closings)
    reply[closings[0][4]] = 3
    for offset in (*closings[0][1:4], *closings[0][5:]):
        struct.pack_into(">Q", reply, offset, offset)
    answered = frame.decode(bytes(reply)).header
    assert (answered["poll"], answered["cuts"]) == (closings[0][1], 3)
    assert (answered["first"], answered["last"]) == ([7, closings[0][5]], [7, closings[0][6]])
    assert frame.decode(bytes(none)).header["first"] is None
    assert [frame.decode(bytes(ack)).kind for ack in (caps, thresholds)] == [
        Kind.CAPS_ACK,
        Kind.THRESHOLDS_ACK,
    ]

    cycles = np.frombuffer(spec.bytes(8 * 4 * STREAMS * GATEWAYS), "<i8").reshape(GATEWAYS, 4, STREAMS)
    lifetime = np.zeros((4, STREAMS), np.int64)
    for turn in range(GATEWAYS * VARIANTS):
        size, gw_at, seq_at, t_at, blob_at = spec.numbers(5)
        raw = bytearray(spec.bytes(size))
        raw[gw_at : gw_at + 16] = uuid.UUID(fleet_load.gateway_id(1)).bytes
        struct.pack_into(">Q", raw, seq_at, 9)
        struct.pack_into(">Q", raw, t_at, 1_800_000_000_000_000)
        struct.pack_into(f"<{STREAMS}q", raw, blob_at, *range(70, 70 + STREAMS))
        made = cuts.decode(bytes(raw))
        assert (made.gateway_id, made.seq, made.start_unix_us) == (
            fleet_load.gateway_id(1), 9, 1_800_000_000_000_000,
        )  # fmt: skip
        assert made.counters[COL["stream_id"]].tolist() == [70, 71]
        if turn % VARIANTS == 0:
            lifetime[:] = 0
        lifetime += made.counters[[COL[n] for n in ("reads", "writes", "read_bytes", "write_bytes")]]
        assert (made.counters[list(head[7:])] == lifetime).all()
        done = made.counters[COL["reads"]] + made.counters[COL["writes"]]
        assert made.missed["counted"].tolist() == done.tolist()
        assert set(made.missed["threshold_us"].tolist()) == {fleet_load.LIMIT_US}
        if turn % VARIANTS == VARIANTS - 1:
            assert (cycles[turn // VARIANTS] == lifetime).all()

    for number in range(GATEWAYS):
        (size,) = spec.numbers(1)
        assert uuid.UUID(bytes=spec.bytes(16)) == uuid.UUID(fleet_load.gateway_id(number))
        ids = list(struct.unpack(f"<{STREAMS}q", spec.bytes(8 * STREAMS)))
        said = [frame.decode(part) for part in frame.split(spec.bytes(size))]
        assert [item.kind for item in said] == [Kind.HELLO, Kind.SCHEMA, Kind.REGISTER, Kind.STREAMS]
        known = fleet_load.volumes(number, STREAMS)
        assert [export["volume"] for export in said[2].header["exports"]] == known
        assert {export["source"] for export in said[2].header["exports"]} == {"simulated"}
        expected = [names.stream_id(fleet_load.gateway_id(number), v, fleet_load.CLIENT) for v in known]
        assert [row["id"] for row in said[3].header["streams"]] == ids == expected
    assert spec.at == len(spec.raw)


def test_what_the_program_reads_by_position_stands_there() -> None:
    for ack in ([], [[7, 3]], [[6, 9], [7, 3]]):
        header = frame.decode(encode_poll(5, 1 << 40, ack, [7, 4], True)).header
        assert list(header) == ["poll", "sent_ns", "ack", "from", "lease"]
    order = ThresholdsOrder.parse({"gw": "a", "version": 1 << 62, "entries": []})
    encoded = order.thresholds_frame()
    assert next(iter(frame.decode(encoded).header)) == "version"


def test_the_agreement_of_a_stream_can_be_read() -> None:
    (loaded,) = load_documents(fleet_load.AGREEMENT.replace("NAME", "vol-00001-02"), 60)
    (objective,) = loaded.agreement.judged
    assert [step.threshold_us for step in objective.demand_curve] == [fleet_load.LIMIT_US]


def test_figures_of_the_pairs_are_added(tmp_path: Path) -> None:
    path = tmp_path / "pmdaemon.prom"
    assert fleet_watch.daemon_figures(path) == {}
    lines = ["# HELP x y", 'sla_pmdaemon_polls_total{pair="0"} 3', 'sla_pmdaemon_polls_total{pair="1"} 4']
    path.write_text("\n".join([*lines, "sla_pmdaemon_pairs 2"]) + "\n")
    assert fleet_watch.daemon_figures(path) == {"polls_total": 7.0, "pairs": 2.0}


def test_every_stream_goes_on() -> None:
    """Else a quiet fleet has violations: where nothing completes, nothing waits."""
    for variants in ingest_load.fleet(1, 16, seed=1567).templates:  # one stream has an I/O in two seconds
        for each in variants:
            idle = each.column("reads") + each.column("writes") == 0
            assert not each.column("inflight")[idle].any()

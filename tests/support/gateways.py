"""An agent that speaks the daemon's protocol, and the frames it sends.

The agent keeps its cuts like a real one: in a list per epoch, forgotten only when acknowledged. It reads
with a deadline and never sleeps.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.frame import Frame, FrameReader
from pmdaemon.wire.kinds import Kind

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
DEADLINE_S = 120.0


def make_cut(
    gateway_id: str = GATEWAY,
    epoch: int = 7,
    seq: int = 1,
    rows: int = 1,
    flags: int = 0,
    start_us: int | None = None,
) -> bytes:
    """A CUT frame whose counters say which seq it is."""
    counters = np.full((len(cut.COLUMNS), rows), seq, dtype=np.int64)
    for row in range(rows):
        counters[0, row] = names.stream_id(gateway_id, f"vol-{row}", "host-a")
    encoded = bytearray(
        cut.encode(
            cut.Cut(
                gateway_id=gateway_id,
                epoch=epoch,
                seq=seq,
                start_unix_us=1_800_000_000_000_000 + seq * 1_000_000 if start_us is None else start_us,
                duration_us=1_000_000,
                throttle_gen=0,
                threshold_version=1,
                counters=counters,
                hist=np.zeros(0, dtype=cut.HIST_DTYPE),
                missed=np.zeros(0, dtype=cut.MISSED_DTYPE),
            )
        )
    )
    encoded[7] = flags
    return bytes(encoded)


def hello(gateway_id: str = GATEWAY, epoch: int = 7, **over: Any) -> bytes:
    header = {
        "proto_min": 1,
        "proto_max": 1,
        "features": [],
        "software": "test-agent 1",
        "gw": gateway_id,
        "name": "gw-" + gateway_id[-4:],
        "ep": epoch,
    }
    return frame.encode(Kind.HELLO, header | over)


def schema() -> bytes:
    return frame.encode(Kind.SCHEMA, cut.schema_header())


def register(
    spool: Sequence[Sequence[int]] = (),
    volumes: Sequence[str] = ("vol-0",),
    labels: Mapping[str, str] | None = None,
) -> bytes:
    exports = [
        {
            "volume": name,
            "backend": "disk-1",
            "size_bytes": 1 << 30,
            "read_only": False,
            "source": "simulated",
            **({"labels": dict(labels)} if labels else {}),
        }
        for name in volumes
    ]
    return frame.encode(Kind.REGISTER, {"exports": exports, "spool": [list(row) for row in spool]})


def streams(gateway_id: str = GATEWAY, volumes: Sequence[str] = ("vol-0",)) -> bytes:
    rows = [
        {
            "id": names.stream_id(gateway_id, name, "host-a"),
            "volume": name,
            "client": "host-a",
            "backend": "disk-1",
        }
        for name in volumes
    ]
    return frame.encode(Kind.STREAMS, {"streams": rows})


class Agent:
    """A gateway agent in a test's own thread."""

    def __init__(self, sock: socket.socket, gateway_id: str = GATEWAY, epoch: int = 7) -> None:
        self.sock = sock
        self.gateway_id = gateway_id
        self.epoch = epoch
        self.cuts: dict[tuple[int, int], bytes] = {}
        self.next_seq = 1
        self._reader = FrameReader()
        self._inbox: list[Frame] = []
        sock.settimeout(DEADLINE_S)

    @classmethod
    def dial(cls, port: int, gateway_id: str | None = None, epoch: int = 7) -> Agent:
        return cls(
            socket.create_connection(("127.0.0.1", port), DEADLINE_S), gateway_id or str(uuid.uuid4()), epoch
        )

    def send(self, *frames: bytes) -> None:
        self.sock.sendall(b"".join(frames))

    def read(self) -> Frame:
        """The next frame; EOFError at the end of the stream, TimeoutError after the deadline."""
        while not self._inbox:
            data = self.sock.recv(65536)
            if not data:
                raise EOFError
            self._inbox += list(self._reader.feed(data))
        return self._inbox.pop(0)

    def expect(self, kind: Kind) -> Frame:
        """The next frame of this kind; others before it are skipped, an ERROR is a failure."""
        while True:
            received = self.read()
            if received.kind == kind:
                return received
            assert received.kind != Kind.ERROR, received.header

    def register(self, **over: Any) -> None:
        """The whole handshake in one write. ``over``: keys of HELLO."""
        spool = self.spool()
        self.send(
            hello(self.gateway_id, self.epoch, **over), schema(), register(spool), streams(self.gateway_id)
        )
        self.expect(Kind.WELCOME)
        self.expect(Kind.REGISTERED)

    def spool(self) -> list[list[int]]:
        epochs: dict[int, list[int]] = {}
        for epoch, seq in sorted(self.cuts, key=lambda item: (item[0] == self.epoch, item)):
            row = epochs.setdefault(epoch, [epoch, seq, seq])
            row[2] = seq
        return list(epochs.values())

    def make(self) -> int:
        seq = self.next_seq
        self.cuts[self.epoch, seq] = make_cut(self.gateway_id, self.epoch, seq)
        self.next_seq += 1
        return seq

    def answer(
        self, poll: Frame, *, cuts: bool = True, wall_us: int = 1_800_000_000_000_000
    ) -> dict[str, Any]:
        """Make a cut, forget what is acknowledged, answer from where the poll asks. Returns the header."""
        header = poll.header
        self.make()
        for epoch, seq in header["ack"]:
            self.cuts = {key: item for key, item in self.cuts.items() if key[0] != epoch or key[1] > seq}
        start_epoch, start_seq = header["from"]
        order = [row[0] for row in self.spool()]
        start_at = order.index(start_epoch) if start_epoch in order else 0
        chosen = [
            item
            for key, item in sorted(self.cuts.items(), key=lambda pair: (order.index(pair[0][0]), pair[0][1]))
            if order.index(key[0]) > start_at or (key[0] == start_epoch and key[1] >= start_seq)
        ]
        reply = {
            "poll": header["poll"],
            "sent_ns": header["sent_ns"],
            "wall_us": wall_us,
            "cuts": len(chosen),
            "first": None,
            "last": None,
            "dropped": 0,
        }
        if not chosen and self.next_seq - 1 < start_seq - 1:  # asked from behind all: for the newest alone
            newest = bytearray(self.cuts[self.epoch, self.next_seq - 1])
            newest[7] = frame.FLAG_LIVE
            chosen = [bytes(newest)]
        self.send(*(chosen if cuts else ()), frame.encode(Kind.REPLY, reply))
        return header

    def close(self) -> None:
        self.sock.close()

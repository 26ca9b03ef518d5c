"""Test doubles of the daemon's neighbours: an agent that speaks the protocol, and an in-memory mailbox.

The agent keeps its cuts like a real one: in a list per epoch, forgotten only when acknowledged. It reads
with a deadline and never sleeps.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np

from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.frame import Frame, FrameReader
from pmdaemon.wire.kinds import Kind

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
DEADLINE_S = 60.0


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


def register(spool: Sequence[Sequence[int]] = (), volumes: Sequence[str] = ("vol-0",)) -> bytes:
    exports = [
        {
            "volume": name,
            "backend": "disk-1",
            "size_bytes": 1 << 30,
            "read_only": False,
            "source": "simulated",
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


class FakeMailbox:
    """Posts are kept, takes are given; ``full`` names recipients without room."""

    def __init__(self) -> None:
        self.posts: list[tuple[tuple[str, ...], bytes]] = []
        self.inbox: list[Any] = []
        self.full: set[str] = set()
        self.refusals = 0
        self._fd = os.eventfd(0, os.EFD_NONBLOCK)

    def post(self, recipients: str | Sequence[str], payload: bytes) -> None:
        wanted = (recipients,) if isinstance(recipients, str) else tuple(recipients)
        served = tuple(name for name in wanted if name not in self.full)
        if served:
            self.posts.append((served, bytes(payload)))
        if refused := tuple(name for name in wanted if name in self.full):
            self.refusals += 1
            raise MailboxFull("pair-0", refused)

    def post_many(self, recipient: str, payloads: Sequence[bytes]) -> None:
        for number, payload in enumerate(payloads):
            try:
                self.post(recipient, payload)
            except MailboxFull:
                raise MailboxFull("pair-0", (recipient,), posted=number) from None

    def deliver(self, sender: str, kind: Kind, header: dict[str, Any]) -> None:
        self.inbox.append(Taken(sender, frame.encode(kind, header)))
        os.eventfd_write(self._fd, 1)

    def take(self, max_messages: int = 64, max_bytes: int = 262_144) -> list[Any]:
        taken, self.inbox = self.inbox[:max_messages], self.inbox[max_messages:]
        return taken

    def fileno(self) -> int:
        return self._fd

    def prepare_sleep(self) -> bool:
        return not self.inbox

    def awake(self) -> None:
        pass

    def to(self, recipient: str, kind: Kind | None = None) -> list[Frame]:
        """Frames posted to a recipient so far, of one kind."""
        decoded = [frame.decode(payload) for names, payload in self.posts if recipient in names]
        return [item for item in decoded if kind is None or item.kind == kind]

    def cuts_to(self, recipient: str) -> list[tuple[int, bool]]:
        """(seq, live) of all cuts posted to a recipient."""
        found = []
        for batch in self.to(recipient, Kind.CUTS):
            raws = list(frame.split(batch.blob))
            assert len(raws) == batch.header["n"] == len(batch.header["recv_us"])
            for raw, live in zip(raws, batch.header["live"], strict=True):
                found.append((frame.decode(raw).header["seq"], live))
        return found

    def states(self, recipient: str = "services") -> list[tuple[str, str]]:
        """(gateway_id, state) of the GATEWAY announcements."""
        return [(item.header["gw"], item.header["state"]) for item in self.to(recipient, Kind.GATEWAY)]

    def close(self) -> None:
        os.close(self._fd)


class Taken:
    def __init__(self, sender: str, payload: bytes) -> None:
        self.sender = sender
        self.payload = payload
        self.sequence = 0

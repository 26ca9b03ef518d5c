"""A fake data plane, a fake PMDaemon, and a bench that puts a core between them.

The fakes keep the contract of docs/formats/messages.md and are pure: bytes in, bytes out. ``Bench`` carries
bytes between them and turns the clock.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from gateway_agent.link.caps import CostStore, KeptCaps, ThresholdStore
from gateway_agent.link.collection import StreamNames
from gateway_agent.link.core import AgentFacts, LinkCore
from gateway_agent.link.plane_client import PlaneClient
from gateway_agent.link.spool import Spool
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut, frame
from pmdaemon.wire.histogram import TOTAL_READ
from pmdaemon.wire.kinds import PROTO_MAX, Kind
from pmdaemon.wire.messages.agent import PLANE_FEATURES, CapSet

GATEWAY = "11111111-2222-3333-4444-555555555555"
EPOCH = 42


def counters(reads: int = 0, cum_reads: int = 0, **values: int) -> list[int]:
    values = {"reads": reads, "arrived": reads, "cum_reads": cum_reads, **values}
    return [values.get(name, 0) for name in cut.COLUMNS]


class FakePlane:
    """Counts reads of its streams; repeats its last cut until the link says that it has it."""

    def __init__(
        self, name: str = "nbd-0", clock: FakeClock | None = None, volumes: tuple[str, ...] = ("vol-1",)
    ):
        self.name = name
        self.clock = clock or FakeClock()
        self.volumes = volumes
        self.answers = True
        self.sizes: dict[str, int] = {}  # of volumes that have another one, 0: it is not known
        self.cap_gen = 0
        self.refuses_caps = False
        self.late: dict[str, list[int]] = {}
        self.features: tuple[str, ...] | None = PLANE_FEATURES  # None: a plane of before
        self.is_stopping = self.is_emptied = self.has_handed_over = False
        self.commands: list[tuple[Kind, dict]] = []
        self.reads: Counter[str] = Counter()
        self.lifetime: Counter[str] = Counter()
        self.questions = 0
        self._version = 0
        self._next_id = 1000
        self._kept: list[tuple[int, bytes]] = []
        self._begin()
        self.reconnect()

    def _begin(self) -> None:
        self._start_ns, self._start_us = self.clock.monotonic_ns(), self.clock.unix_us()
        self._held_gen, self._cut_version = self.cap_gen, self._version

    def reconnect(self) -> None:
        self._reader = frame.FrameReader()
        self._owed: list[bytes] = []

    def io(self, volume: str = "vol-1", reads: int = 1) -> None:
        self.reads[volume] += reads
        self.lifetime[volume] += reads

    def hello(self) -> bytes:
        exports = [
            {
                "volume": v,
                "backend": "b0",
                "size_bytes": self.sizes.get(v, 4096),
                "read_only": False,
                "source": "nbd",
                "extra": 1,
            }
            for v in (() if self.has_handed_over else self.volumes)
        ]
        header = {
            "plane": self.name,
            "pid": 7,
            "exports": exports,
            "listening": ["tcp:127.0.0.1:1"],
            "stopping": self.is_stopping,
        }
        said = {} if self.features is None else {"features": list(self.features)}
        return frame.encode(Kind.DP_HELLO, header | said)

    def receive(self, data: bytes) -> bytes:
        for received in map(frame.unfold, self._reader.feed(data)):
            kind = Kind(received.kind)
            self.commands.append((kind, received.header))
            if kind is Kind.DP_COLLECT:
                self.questions += 1
                answer = self._collect(received.header["got"])
                self.is_emptied = not answer
                self._owed.append(answer)
            elif kind is Kind.DP_CAPS and not self.refuses_caps:
                if received.header["gen"] != self.cap_gen:
                    self.cap_gen, self._held_gen = received.header["gen"], -1
            elif kind is Kind.DP_THRESHOLDS and received.header["version"] != self._version:
                self._close(more=True)
                self._version = self._cut_version = received.header["version"]
        if not self.answers:
            return b""
        owed, self._owed = self._owed, []
        return b"".join(owed)

    def _collect(self, got: int) -> bytes:
        if self._kept and self._kept[0][0] == got:
            self._kept.pop(0)
        if not self._kept and self.is_stopping:
            return b""
        if not self._kept:
            self._close(more=False)
        return self._kept[0][1]

    def stop(self) -> bytes:
        """Like a plane at SIGTERM: its last cut is closed. Returns what it says."""
        self._close(more=True)
        self.is_stopping = True
        return self.hello()

    def _close(self, more: bool) -> None:
        self._next_id += 1
        rows = [counters(self.reads[v], self.lifetime[v]) for v in self.volumes]
        hist = np.array(
            [(i, TOTAL_READ + 3, self.reads[v]) for i, v in enumerate(self.volumes) if self.reads[v]],
            dtype=cut.HIST_DTYPE,
        )
        header = {
            "id": self._next_id,
            "start_ns": self._start_ns,
            "end_ns": self.clock.monotonic_ns(),
            "start_us": self._start_us,
            "tg": self._held_gen,
            "ts": self._cut_version,
            "more": more,
            "n": len(rows),
            "h": len(hist),
            "m": 0,
            "streams": [
                {"index": i, "volume": v, "client": "c", "backend": "b0"} for i, v in enumerate(self.volumes)
            ],
        }
        if self.late:
            header["late"], self.late = self.late, {}
        blob = cut.rows_array(rows).tobytes() + hist.tobytes()
        self._kept.append((self._next_id, frame.encode(Kind.DP_CUT, header, blob)))
        self.reads.clear()
        self._begin()


class FakeServer:
    """Speaks the daemon's side; remembers what it received. Cuts are counted once per identity."""

    def __init__(self) -> None:
        self.kinds: list[Kind] = []
        self.headers: dict[Kind, list[dict]] = {}
        self.cuts: dict[tuple[int, int], cut.Cut] = {}
        self.live: list[tuple[int, int]] = []
        self.order: list[tuple[int, int]] = []
        self.polls = 0
        self.auto = True
        self.features: tuple[str, ...] = ()
        self.reconnect()

    def reconnect(self) -> None:
        self._reader = frame.FrameReader()

    def receive(self, data: bytes) -> bytes:
        out = b""
        for received in self._reader.feed(data):
            kind = Kind(received.kind)
            self.kinds.append(kind)
            self.headers.setdefault(kind, []).append(received.header)
            if kind is Kind.CUT:
                one = cut.decode(bytes(received.raw))
                key = (one.epoch, one.seq)
                if received.flags & frame.FLAG_LIVE:
                    self.live.append(key)
                else:
                    self.order.append(key)
                    self.cuts[key] = one
            elif kind is Kind.HELLO and self.auto:
                out += welcome(features=self.features)
            elif kind is Kind.REGISTER and self.auto:
                out += frame.encode(Kind.REGISTERED, {"ok": True})
        return out

    def poll(self, ack=(), start=None, lease=False) -> bytes:
        self.polls += 1
        return poll(self.polls, ack, start, lease)

    def last(self, kind: Kind) -> dict:
        return self.headers[kind][-1]

    def reads(self) -> int:
        return sum(int(one.column("reads").sum()) for one in self.cuts.values())


def welcome(interval_us: int = 1_000_000, features: tuple[str, ...] = ()) -> bytes:
    return frame.encode(
        Kind.WELCOME,
        {
            "proto": PROTO_MAX,
            "features": features,
            "software": "test",
            "interval_us": interval_us,
            "server_us": 1,
        },
    )


def poll(number: int = 1, ack=(), start=None, lease=False) -> bytes:
    header = {"poll": number, "sent_ns": 5, "ack": [list(a) for a in ack], "lease": lease}
    return frame.encode(Kind.POLL, {**header, "from": list(start) if start else None})


def caps(gen: int, lease_us: int = 30_000_000, volume: str = "vol-1") -> bytes:
    entry = {"volume": volume, "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 50.0}
    return frame.encode(Kind.CAPS, {"gen": gen, "lease_us": lease_us, "caps": [entry]})


def thresholds(version: int) -> bytes:
    entry = {"volume": "vol-1", "client": "*", "io": "any", "threshold_us": 5000}
    return frame.encode(Kind.THRESHOLDS, {"version": version, "entries": [entry]})


def abandon(spool: Spool) -> None:
    """What kill -9 leaves: the files as they are, the lock gone."""
    spool._queue._close_files()


class Bench:
    """One core between fake planes and a fake server; a second one in a directory finds the first dead."""

    _spools: ClassVar[dict[Path, Spool]] = {}

    def __init__(
        self,
        tmp_path: Path,
        *planes: FakePlane,
        clock: FakeClock | None = None,
        sources=(),
        epoch=EPOCH,
        identity=None,
        qemu=(),
        enforcers=(),
        boot_ns=None,
        spool_bytes=1 << 20,
    ):
        self.clock = clock or (planes[0].clock if planes else FakeClock())
        self.fakes = {plane.name: plane for plane in planes}
        former = self._spools.pop(tmp_path, None)
        if former is not None:  # the former link of this directory is dead
            abandon(former)
        self.spool = self._spools[tmp_path] = Spool(tmp_path / "spool", spool_bytes)
        self.core = LinkCore(
            AgentFacts(GATEWAY, "gw-a", epoch, "test"),
            self.spool,
            StreamNames(GATEWAY, tmp_path / "streams.json"),
            ThresholdStore(tmp_path / "thresholds.json"),
            self.clock,
            [PlaneClient(plane.name, self.spool.marks.get(plane.name, 0)) for plane in planes],
            sources,
            identity,
            enforcers,
            qemu,
            kept_caps=KeptCaps(tmp_path / "caps.json", boot_ns or self.clock.monotonic_ns, lambda: "boot-1"),
            costs=CostStore(tmp_path / "costs.json"),
            conditions=tmp_path / "conditions.json",
        )
        self.server = FakeServer()
        for plane in planes:
            self.connect_plane(plane)

    def connect_plane(self, plane: FakePlane) -> None:
        plane.reconnect()
        self.core.plane_connected(plane.name)
        self.core.plane_data(plane.name, plane.hello())
        self.carry()

    def connect_server(self) -> None:
        self.server.reconnect()
        self.core.server_connected()
        self.carry()

    def carry(self) -> None:
        """Deliver bytes until no side has more to send."""
        moved = True
        while moved:
            moved = False
            for name, plane in self.fakes.items():
                peer = self.core.planes[name]
                sent = bytes(peer.outgoing)
                del peer.outgoing[:]
                answer = plane.receive(sent) if peer.enforcer.reachable else b""
                if answer:
                    self.core.plane_data(name, answer)
                moved = moved or bool(sent or answer)
            sent = bytes(self.core.session.outgoing)
            del self.core.session.outgoing[:]
            answer = self.server.receive(sent) if sent else b""
            if answer:
                self.core.server_data(answer)
            moved = moved or bool(sent)

    def say(self, *frames: bytes) -> None:
        """The server says something."""
        self.core.server_data(b"".join(frames))
        self.carry()

    def poll(self, ack=(), start=None, lease=False) -> dict:
        """One poll and its whole answer; returns the REPLY's header."""
        self.say(self.server.poll(ack, start, lease))
        return self.server.last(Kind.REPLY)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.core.tick()
        self.carry()


@dataclass
class FakeEnforcer:
    """An enforcer that takes each set at once."""

    volumes: frozenset[str]
    name: str = "nbd-0"
    reachable: bool = True
    tells_clients: bool = True
    took: int | None = None
    refused: int | None = None
    sets: list[CapSet] = field(default_factory=list)
    leases_us: list[int] = field(default_factory=list)
    lapses: int = 0

    def apply(self, caps: CapSet, lease_us: int) -> None:
        self.sets.append(caps)
        self.leases_us.append(lease_us)
        self.took = caps.gen

    def renew_lease(self) -> None:
        pass

    def lapsed(self) -> None:
        self.lapses += 1

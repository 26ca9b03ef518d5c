"""A loop, a socket and a session without descriptors, for tests of the data plane's parts."""

from __future__ import annotations

import socket
import uuid
from collections import deque
from typing import Any

from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import StreamAccount
from gateway_agent.nbd.buffers import MemoryBudget
from gateway_agent.nbd.cuts import CutMaker, StreamTable
from gateway_agent.nbd.limits import KIND_WRITE
from gateway_agent.nbd.loop import IN, OUT
from gateway_agent.nbd.volume import PlaneContext, Volume
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.rates import Rates, RateSet

HOLD_NS = 5 * 10**9
MIB = 1 << 20
NOT_OFFERED = p.TX_READ_ONLY | p.TX_SEND_FAST_ZERO | p.TX_SEND_DF | p.TX_SEND_CACHE
ALL_FLAGS = p.TX_PASSED_ON & ~NOT_OFFERED


def plane_config(*exports: dict[str, Any]) -> PlaneConfig:
    return PlaneConfig("nbd-0", ["unix:x"], "c", [ExportConfig.model_validate(each) for each in exports])


class FakeLoop:
    """What ``Loop`` offers; tests call the handlers."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.warnings = LimitedLog("test")
        self.masks: dict[int, int] = {}
        self.handlers: dict[int, Any] = {}
        self.failures: dict[int, Any] = {}
        self.timers: dict[object, tuple[int, Any]] = {}
        self.buffered: set[int] = set()

    def watch(self, fd, mask, handler, on_failure):
        assert fd not in self.masks
        self.masks[fd], self.handlers[fd], self.failures[fd] = mask, handler, on_failure

    def want(self, fd, mask):
        assert fd in self.masks
        self.masks[fd] = mask

    def pause_input(self, fd, for_ns):
        self.want(fd, 0)
        self.at(("pause", fd), self.clock.monotonic_ns() + for_ns, lambda _now_ns: self.want(fd, IN))

    def is_watched_for(self, fd, mask):
        return self.masks[fd] & mask == mask

    def forget(self, fd):
        self.cancel(("pause", fd))
        self.masks.pop(fd, None)

    def set_buffered(self, fd, has_input):
        (self.buffered.add if has_input else self.buffered.discard)(fd)

    def at(self, key, when_ns, handler, on_failure=None):
        def fired(now_ns):
            try:
                handler(now_ns)
            except Exception as exc:  # noqa: BLE001 - as the loop does
                self.report(exc, on_failure)

        self.timers[key] = (when_ns, handler if on_failure is None else fired)

    def report(self, exc, on_failure):
        on_failure(exc)

    def cancel(self, key):
        self.timers.pop(key, None)

    def turn(self) -> bool:
        """Call what is due now, once; returns whether there was something."""
        now_ns = self.clock.monotonic_ns()
        due = [key for key, (when_ns, _) in self.timers.items() if when_ns <= now_ns]
        for key in due:
            if key in self.timers:
                self.timers.pop(key)[1](now_ns)
        return bool(due)

    def fire(self, seconds: float) -> None:
        """Let time pass and call what is due, in order of time, each at its own time."""
        end_ns = self.clock.monotonic_ns() + round(seconds * 1e9)
        while self.timers:
            key, (when_ns, handler) = min(self.timers.items(), key=lambda item: item[1][0])
            if when_ns > end_ns:
                break
            del self.timers[key]
            self.clock.advance(max(0, when_ns - self.clock.monotonic_ns()) / 1e9)
            handler(self.clock.monotonic_ns())
        self.clock.advance(max(0, end_ns - self.clock.monotonic_ns()) / 1e9)


class FakeSocket:
    """Non-blocking: gives out ``incoming`` piece by piece, takes at most ``window`` bytes in all."""

    _next_fd = 100
    family = socket.AF_INET

    def __init__(self, window: int = 1 << 40) -> None:
        FakeSocket._next_fd += 1
        self._fd = FakeSocket._next_fd
        self.incoming: deque[bytes] = deque()
        self.sent = bytearray()
        self.window = window
        self.is_closed = False
        self.is_ended = False
        self.is_shut = False

    def fileno(self):
        return self._fd

    def recv_into(self, view):
        assert len(view), "an empty buffer would look like the peer's end"
        if not self.incoming:
            if self.is_ended:
                return 0
            raise BlockingIOError
        data = self.incoming.popleft()
        taken = min(len(data), len(view))
        view[:taken] = data[:taken]
        if taken < len(data):
            self.incoming.appendleft(data[taken:])
        return taken

    def recv(self, count):
        view = memoryview(bytearray(count))
        return bytes(view[: self.recv_into(view)])

    def setblocking(self, flag):
        assert not flag

    def setsockopt(self, *_what):
        pass

    def getsockopt(self, _level, _name, size):
        return bytes(size)  # as struct tcp_info: nothing is waited for

    def getpeername(self):
        return ("10.0.0.7", 4711)

    def send(self, data):
        if self.is_closed or self.is_shut:
            raise OSError(9, "Bad file descriptor")
        taken = min(len(data), self.window)
        if not taken and len(data):
            raise BlockingIOError
        self.window -= taken
        self.sent += bytes(data[:taken])
        return taken

    def shutdown(self, how):
        assert how == socket.SHUT_WR
        self.is_shut = True

    def close(self):
        self.is_closed = True


class Rig:
    """One volume, its loop and clock, and sessions made on demand."""

    def __init__(
        self,
        size_bytes: int = MIB,
        flags: int = ALL_FLAGS,
        caps: Rates | None = None,
        blocks: p.BlockSizes | None = None,
    ) -> None:
        self.clock = FakeClock()
        self.loop = FakeLoop(self.clock)
        self.cuts = CutMaker(StreamTable(), self.clock.monotonic_ns(), self.clock.unix_us())
        memory = MemoryBudget(self.loop), MemoryBudget(self.loop)
        scratch = memoryview(bytearray(MIB + 4096))
        self.context = PlaneContext(self.loop, self.clock, self.cuts, scratch, *memory)
        self.export = ExportConfig(volume="vol-1", backend="disk", upstream="nbd://127.0.0.1/x")
        self.rates = RateSet(20_000_000)
        self.volume = Volume(self.export, self.rates, self.context, HOLD_NS)
        self.facts = p.ExportFacts(size_bytes, flags, blocks or p.BlockSizes())
        if caps is not None:
            self.volume.set_caps(caps, self.clock.monotonic_ns())
        self._abandoned: dict[StreamAccount, tuple[int, int]] = {}

    def stream(self, client: str = "host-a") -> StreamAccount:
        return self.cuts.table.get(self.export, client, self.cuts.thresholds)

    def deliver(self, sock: FakeSocket, data: bytes, mask: int = IN) -> None:
        """Let ``data`` arrive at ``sock`` and tell its owner, until it is read or nobody wants it."""
        if data:
            sock.incoming.append(data)
        while sock.incoming and self.loop.masks.get(sock.fileno(), 0) & IN:
            self.loop.handlers[sock.fileno()](mask)
        self.assert_all_counted()

    def open_window(self, sock: FakeSocket, size: int = 1 << 40) -> None:
        """The peer reads: the socket takes bytes again."""
        sock.window = size
        if self.loop.masks.get(sock.fileno(), 0) & OUT:
            self.loop.handlers[sock.fileno()](OUT)
        self.assert_all_counted()

    def assert_all_counted(self) -> None:
        """Each read and write that arrived is complete or outstanding, or its session has closed since."""
        for stream in self.cuts.table.streams:
            stream.fold()
            pending = [
                kind
                for each in stream.sessions
                for _, kind, _ in each.outstanding(self.clock.monotonic_ns())
                if kind <= KIND_WRITE
            ]
            completed = int(stream._counts[: KIND_WRITE + 1].sum())  # a cut would show it, and begin another
            now = len(stream.sessions), stream.arrived - completed - len(pending)
            sessions, abandoned = self._abandoned.get(stream, (len(stream.sessions), 0))
            assert now[1] == abandoned or (now[0] < sessions and now[1] > abandoned)
            self._abandoned[stream] = now


def admit_within(session, now_ns, allowance):
    """``ThrottledSession.admit_within`` of a connection that has only ``admit_head``."""
    while (arrived_ns := session.head_arrived_ns()) is not None and arrived_ns > allowance.oldest_ns:
        charge = session.head_charge()
        is_over = any(one > most for one, most in zip(allowance.passed, allowance.most, strict=True))
        if charge is None or charge[0] > allowance.largest_bytes or is_over:
            return
        ops, size_bytes, cost = allowance.passed
        allowance.passed = ops + 1, size_bytes + charge[0], cost + charge[1]
        session.admit_head(now_ns)


def replies(raw: bytes, lengths: dict[int, int] | None = None) -> list[tuple[int, int, bytes]]:
    """(cookie, error, payload) of the simple replies in ``raw``; ``lengths`` are those of reads."""
    found, at = [], 0
    while at < len(raw):
        magic, error, cookie = p.SIMPLE_REPLY.unpack_from(raw, at)
        assert magic == p.SIMPLE_REPLY_MAGIC
        size = 0 if error else (lengths or {}).get(cookie, 0)
        found.append((cookie, error, bytes(raw[at + 16 : at + 16 + size])))
        at += 16 + size
    return found


def chunks(raw: bytes | memoryview) -> list[tuple[int, int | None, bool, bytes]]:
    """(cookie, type, is_last, payload) of each chunk in ``raw``; of a simple reply no type, and its error."""
    raw, found, at = bytes(raw), [], 0
    while at < len(raw):
        if raw[at : at + 4] == p.SIMPLE_REPLY_MAGIC.to_bytes(4, "big"):
            _, error, cookie = p.SIMPLE_REPLY.unpack_from(raw, at)
            found.append((cookie, None, True, error.to_bytes(4, "big")))
            at += p.SIMPLE_REPLY_BYTES
            continue
        magic, flags, kind, cookie, length = p.CHUNK.unpack_from(raw, at)
        assert magic == p.CHUNK_MAGIC
        assert flags in (0, p.CHUNK_DONE)
        at += p.CHUNK_BYTES + length
        assert at <= len(raw)
        found.append((cookie, kind, bool(flags), raw[at - length : at]))
    return found


def assembled(found: list[tuple[int, int | None, bool, bytes]], offset: int, length: int) -> bytes:
    """What the chunks of one successful read say of its range: each byte exactly once."""
    data, seen = bytearray(length), bytearray(length)
    assert [is_last for _, _, is_last, _ in found] == [False] * (len(found) - 1) + [True]
    for _, kind, _, payload in found:
        at = int.from_bytes(payload[:8], "big") - offset
        if kind == p.Chunk.OFFSET_HOLE:
            size = int.from_bytes(payload[8:], "big")
        else:
            assert kind == p.Chunk.OFFSET_DATA
            size = len(payload) - 8
            data[at : at + size] = payload[8:]
        assert size
        assert 0 <= at <= length - size
        assert seen[at : at + size] == bytes(size)
        seen[at : at + size] = b"\1" * size
    assert seen == b"\1" * length
    return bytes(data)


def as_cut(raw):
    """The same columns as a CUT of the gateway, read by the wire's own decoder."""
    parsed = frame.decode(raw)
    header = {"gw": uuid.UUID(int=1).bytes, "ep": 1, "seq": 1, "t": 1, "d": 1}
    header |= {key: parsed.header[key] for key in ("n", "h", "m", "tg", "ts", "sq") if key in parsed.header}
    return cut.decode(frame.encode(Kind.CUT, header, parsed.blob))

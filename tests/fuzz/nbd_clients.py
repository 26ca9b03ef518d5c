"""Clients that do what ``nbd_choices`` says and compare every answer with ``nbd_model``."""

from __future__ import annotations

import random
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.handshake import HandshakeState
from gateway_agent.nbd.upstream_handshake import Agreed, ClientHandshake
from tests.fuzz.nbd_choices import Chooser, Plan
from tests.fuzz.nbd_model import CHANGES, STUCK_S, Region, Request, describe
from tests.fuzz.nbd_replies import Assembly

QUIET_S = 0.02  # without any event for that long, clients that do not read begin to read again

Connect = Callable[[random.Random], socket.socket]


class Client:
    """One connection at a time with the server under test, driven by ``drive``."""

    def __init__(self, name: str, plan: Plan, connect: Connect, export: str, region: tuple[int, int]) -> None:
        self.name = name
        self.plan = plan
        self._connect = connect
        self._export = export
        self.sock, self.facts = self._open(random.Random(plan.seed))
        self.region = Region(region[0], self._read_apart(*region))
        self._choose = Chooser(plan, self.region, self.facts)
        self.left = plan.operations
        self._cuts_left = plan.cuts
        self._recent: deque[Request] = deque(maxlen=plan.depth)
        self._planned: Request | None = None
        self._reset()

    def _open(self, rng: random.Random) -> tuple[socket.socket, p.ExportFacts]:
        sock = self._connect(rng)
        sock.settimeout(STUCK_S)
        facts, self._agreed = negotiate_as(sock, self._export, self.plan.mode)
        assert self._agreed.structured == self.plan.mode.structured
        assert (self._agreed.context_id is not None) == self.plan.mode.allocation
        sock.setblocking(False)
        return sock, facts

    def _read_apart(self, begin: int, size: int) -> bytes:
        """A range, read by a connection of its own with simple replies."""
        with self._connect(random.Random(self.plan.seed)) as sock:
            negotiate(sock, self._export)
            return read_all(sock, begin, size)

    def _reset(self) -> None:
        self._out = bytearray()
        self._in = bytearray()
        self._unsent: deque[tuple[int, Request | None]] = deque()  # end position in what is to be sent
        self._queued_pos = self._sent_pos = 0
        self._pending: dict[int, deque[Request]] = {}
        self._assemblies: dict[int, Assembly] = {}
        self._changing: list[Request] = []
        self._reading: list[Request] = []
        self.does_read = True
        self._is_leaving = False

    @property
    def outstanding(self) -> int:
        """Requests without an answer."""
        return sum(len(waiting) for waiting in self._pending.values())

    @property
    def is_done(self) -> bool:
        """Whether everything was sent and answered."""
        return not self.left and not self._out and not self._pending and self._planned is None

    def interest(self) -> int:
        """Events it waits for."""
        return (selectors.EVENT_WRITE if self._out else 0) | (selectors.EVENT_READ if self.does_read else 0)

    def _count(self, what: str) -> None:
        self.plan.counts[what] = self.plan.counts.get(what, 0) + 1

    # -- towards the server ---------------------------------------------------------------------------------

    def generate(self) -> None:
        """Queue requests until one must wait."""
        while not self._is_leaving and self.outstanding < self.plan.depth and len(self._out) < 1 << 20:
            if self._planned is not None:
                if any(self._planned.touches(other) for other in (*self._changing, *self._reading)):
                    return
                self._queue(self._planned)
                self._planned = None
            if not self.left:
                return
            self.left -= 1
            self._next()

    def _next(self) -> None:
        kind = self._choose.kind()
        self._count(kind)
        if kind == "refusal":
            self._queue(self._choose.refusal())
        elif kind == "pause":
            self.does_read = False
        elif kind == "cut":
            if self._cuts_left:
                self._cuts_left -= 1
                self._cut_off()
        elif kind == "twin":
            twin = self._choose.request("read")
            if not any(twin.touches(other) for other in self._changing):
                self._queue(twin)
                if self._choose.may_repeat_cookies:
                    self._queue(twin)
        else:
            self._planned = self._choose.request(kind)

    def _queue(self, request: Request) -> None:
        self._send(request.raw, request)
        self._pending.setdefault(request.cookie, deque()).append(request)
        if 0 not in request.errors:
            return
        if request.command in CHANGES:
            self._changing.append(request)
            self._recent.append(request)
        elif request.looks:
            self._reading.append(request)

    def _send(self, raw: bytes, request: Request | None) -> None:
        self._out += raw
        self._queued_pos += len(raw)
        self._unsent.append((self._queued_pos, request))

    def _cut_off(self) -> None:
        """Begin one more request, and go away within it."""
        whole = self._choose.request("write").raw
        self._send(whole[: 1 + self._choose.below(len(whole) - 1)], None)
        self._is_leaving = self.does_read = True

    def on_writable(self) -> None:
        """The socket takes bytes."""
        with memoryview(self._out) as view:
            try:
                taken = self.sock.send(view[: 1 << 20])
            except BlockingIOError:
                return
        del self._out[:taken]
        self._sent_pos += taken
        while self._unsent and self._unsent[0][0] <= self._sent_pos:
            self._unsent.popleft()
        if self._is_leaving and not self._out:
            self._leave()

    def _leave(self) -> None:
        if self._choose.chance(0.5):
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # RST
        self.sock.close()
        for request in self._changing:
            self.region.perhaps_changed(request)
        for request in self._recent:  # more than those, but by the seed alone
            self.region.lose(request)
        self._recent.clear()
        self.sock, _ = self._open(random.Random(self.plan.seed + self.left))
        self._reset()

    # -- from the server ------------------------------------------------------------------------------------

    def on_readable(self) -> None:
        """Answers have come."""
        try:
            data = self.sock.recv(1 << 20)
        except BlockingIOError:
            return
        assert data, f"the server closed the connection; unanswered: {self._unanswered()}"
        self._in += data
        while len(self._in) >= p.SIMPLE_REPLY_BYTES:
            is_chunk = self._in.startswith(p.CHUNK_MAGIC.to_bytes(4, "big"))
            if not (self._take_chunk() if is_chunk else self._take_simple()):
                return

    def _take_simple(self) -> bool:
        """The next reply, if all of it is here."""
        magic, error, cookie = p.SIMPLE_REPLY.unpack_from(self._in)
        assert magic == p.SIMPLE_REPLY_MAGIC, f"no reply: {bytes(self._in[:32]).hex()}"
        assert cookie in self._pending, f"a reply nobody asked for: error {error}, cookie {cookie:#x}"
        request = self._pending[cookie][0]
        has_chunks = request.command == p.Cmd.READ or (request.command == p.Cmd.BLOCK_STATUS and not error)
        assert not (has_chunks and self.plan.mode.structured), f"a simple reply to {describe(request)}"
        size = p.SIMPLE_REPLY_BYTES + (request.length if request.command == p.Cmd.READ and not error else 0)
        if len(self._in) < size:
            return False
        payload = bytes(self._in[p.SIMPLE_REPLY_BYTES : size])
        del self._in[:size]
        self._answered(request, error, payload, [])
        return True

    def _take_chunk(self) -> bool:
        """The next chunk, if all of it is here."""
        if len(self._in) < p.CHUNK.size:
            return False
        _, flags, kind, cookie, length = p.CHUNK.unpack_from(self._in)
        assert self.plan.mode.structured, "a chunk that was not agreed"
        assert cookie in self._pending, f"a chunk nobody asked for: type {kind:#x}, cookie {cookie:#x}"
        end = p.CHUNK.size + length
        if len(self._in) < end:
            return False
        payload = bytes(self._in[p.CHUNK.size : end])
        del self._in[:end]
        request = self._pending[cookie][0]
        assembly = self._assemblies.setdefault(cookie, Assembly(request, self._agreed.context_id))
        if assembly.add(kind, flags, payload):
            del self._assemblies[cookie]
            self._answered(request, assembly.error, bytes(assembly.data), assembly.zeroes())
        return True

    def _answered(self, request: Request, error: int, payload: bytes, zeroes: list[tuple[int, int]]) -> None:
        waiting = self._pending[request.cookie]
        waiting.popleft()
        if not waiting:
            del self._pending[request.cookie]
        assert error in request.errors, f"error {error} for {describe(request)}, not {sorted(request.errors)}"
        if request.command in CHANGES and 0 in request.errors:
            self._changing.remove(request)
        elif request.looks and 0 in request.errors:
            self._reading.remove(request)
        if error:
            return
        if request.command in CHANGES:
            self.region.changed(request)
        found = [(request.offset, payload)] if request.command == p.Cmd.READ else []
        for offset, data in [*found, *((offset, bytes(length)) for offset, length in zeroes)]:
            problem = self.region.check(offset, data)
            assert not problem, f"{describe(request)}: {problem}"

    def _unanswered(self) -> str:
        waiting = [describe(request) for queue in self._pending.values() for request in queue]
        return f"{len(waiting)}: {', '.join(waiting[:5])}; {len(self._out)} bytes unsent"

    def finish(self) -> None:
        """Compare the whole region, and say goodbye."""
        self.sock.setblocking(True)
        self.sock.settimeout(STUCK_S)
        begin, end = self.region.begin, self.region.end
        problem = self.region.check(begin, self._read_apart(begin, end - begin))
        assert not problem, f"at the end: {problem}"
        self.sock.sendall(p.request(p.Cmd.DISC, 0, 0, 0))
        assert not self.sock.recv(1), "bytes behind the last answer"

    def state(self) -> str:
        """For the report of a failure."""
        return f"{self.name} (seed {self.plan.seed}, {self.left} operations left, {self._unanswered()})"


def negotiate(sock: socket.socket, export: str) -> p.ExportFacts:
    """The facts of an export; then the connection is in transmission, with simple replies."""
    return negotiate_as(sock, export, p.SIMPLE_REPLIES)[0]


def negotiate_as(sock: socket.socket, export: str, mode: p.ReplyMode) -> tuple[p.ExportFacts, Agreed]:
    """The same for a client that wants its replies so, and what was agreed."""
    machine = ClientHandshake(export, "server", wants_block_size=True, mode=mode)
    while machine.state is not HandshakeState.READY:
        data = sock.recv(65_536)
        assert data, f"the server closed the connection during negotiation of {export!r}"
        sock.sendall(machine.feed(data))
    assert machine.facts is not None
    return machine.facts, machine.agreed


def read_all(sock: socket.socket, begin: int, size: int) -> bytes:
    """A range of a volume, one request after the other."""
    data, sock_timeout = bytearray(), sock.gettimeout()
    sock.settimeout(STUCK_S)
    while len(data) < size:
        length = min(1 << 20, size - len(data))
        sock.sendall(p.request(p.Cmd.READ, 1, begin + len(data), length))
        raw = exactly(sock, p.SIMPLE_REPLY_BYTES)
        assert raw == p.simple_reply(1), f"a plain read at {begin + len(data)} was answered {raw.hex()}"
        data += exactly(sock, length)
    sock.settimeout(sock_timeout)
    return bytes(data)


def exactly(sock: socket.socket, count: int) -> bytes:
    """So many bytes."""
    data = bytearray()
    while len(data) < count:
        piece = sock.recv(min(count - len(data), 1 << 20))
        assert piece, f"the end after {len(data)} of {count} bytes"
        data += piece
    return bytes(data)


def drive(clients: Iterable[Client]) -> dict[str, int]:
    """Run all clients to their end, side by side.

    Returns:
        How many operations of each kind were done.

    Raises:
        AssertionError: the server did what it must not, or nothing for ``STUCK_S``.
    """
    clients = list(clients)
    try:
        _drive(clients)
        for client in clients:
            client.finish()
    finally:
        for client in clients:
            client.sock.close()
    counts: dict[str, int] = {}
    for client in clients:
        for what, number in client.plan.counts.items():
            counts[what] = counts.get(what, 0) + number
    return counts


def _drive(clients: list[Client]) -> None:
    active = clients
    last_progress_s = time.monotonic()
    while active:
        with selectors.DefaultSelector() as selector:
            for client in active:
                client.generate()
                if interest := client.interest():
                    selector.register(client.sock, interest, client)
            events = selector.select(QUIET_S) if selector.get_map() else []
        for key, mask in events:
            _serve(key.data, mask)
        now_s = time.monotonic()
        if events:
            last_progress_s = now_s
        else:
            for client in active:
                client.does_read = True
        stuck = "; ".join(client.state() for client in active)
        assert now_s - last_progress_s < STUCK_S, f"nothing moves: {stuck}"
        active = [client for client in active if not client.is_done]


def _serve(client: Client, mask: int) -> None:
    try:
        if mask & selectors.EVENT_READ:
            client.on_readable()
        if mask & selectors.EVENT_WRITE:
            client.on_writable()
    except (AssertionError, OSError) as exc:
        raise AssertionError(f"{client.state()}: {exc}") from exc

"""A session of upstream mode with both its sockets, and readers of replies, for tests without descriptors."""

from __future__ import annotations

from typing import Any

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import word_of
from gateway_agent.nbd.buffers import FINISHED_INTS, Finished, InFlight
from gateway_agent.nbd.ledger import CountedConnection
from gateway_agent.nbd.loop import GONE, IN
from gateway_agent.nbd.proxy_session import ProxySession
from gateway_agent.nbd.replies import AskedRequests, Replies
from gateway_agent.nbd.upstream import Upstream, UpstreamPlan
from gateway_agent.nbd.upstream_handshake import Agreed
from pmdaemon.wire.cut import COL
from tests.support.nbd import FakeSocket, Rig

IN_CHUNKS = p.ReplyMode(structured=True, allocation=True)


def read(cookie: int, length: int = 512, offset: int = 0, flags: int = 0) -> bytes:
    return p.request(p.Cmd.READ, cookie, offset, length, flags)


def write(cookie: int, payload: bytes, flags: int = 0) -> bytes:
    return p.request(p.Cmd.WRITE, cookie, 0, len(payload), flags) + payload


class Pair:
    """A proxy session with both its sockets."""

    def __init__(
        self,
        rig: Rig,
        client: str = "host-a",
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
        agreed: Agreed | None = None,
    ) -> None:
        self.rig, self.near, self.far = rig, FakeSocket(), FakeSocket()
        self.stream = rig.stream(client)
        upstream = upstream_of(rig, self.far, agreed, mode=mode)
        self.session = ProxySession(
            rig.context, self.near, rig.volume, self.stream, rig.facts, upstream, mode
        )

    def say(self, *data: bytes) -> None:
        self.rig.deliver(self.near, b"".join(data))

    def answer(self, *data: bytes) -> None:
        self.rig.deliver(self.far, b"".join(data))

    def end(self, sock: FakeSocket) -> None:
        sock.is_ended = True
        self.rig.loop.handlers[sock.fileno()](IN | GONE)

    def taken(self) -> Any:
        return self.stream.take(self.rig.clock.monotonic_ns())

    def row(self) -> dict[str, int]:
        return dict(zip(COL, self.taken().row, strict=True))


def upstream_of(rig: Rig, sock: FakeSocket, agreed: Agreed | None = None, **plan: Any) -> Upstream:
    """A connection of the rig's upstream, in transmission."""
    uri = rig.export.upstream
    assert uri is not None
    return Upstream(sock, agreed or Agreed(), rig.facts, UpstreamPlan(uri, **plan))


def feed_in_pieces(
    reader: Replies, data: bytes, inflight: InFlight, piece: int
) -> tuple[bytes, list[Finished]]:
    """What a client gets for ``data``, and what is complete; the rest of a piece is kept, as sessions do."""
    kept, out, finished = b"", bytearray(), []
    for start in range(0, len(data), piece):
        view = memoryview(bytearray(kept + data[start : start + piece]))
        usable, done = reader.feed(view, 0, inflight, 9)
        passed = reader.passed(view, usable)
        assert reader.boundary is None or reader.boundary <= len(passed)
        out += passed
        kept = bytes(view[usable:])
        finished += done
    assert not kept
    return bytes(out), [finished[at : at + FINISHED_INTS] for at in range(0, len(finished), FINISHED_INTS)]


def asked_for(*requests: bytes, counted: CountedConnection | None = None) -> tuple[AskedRequests, InFlight]:
    """Requests under way, from their headers."""
    asked, inflight = AskedRequests(counted), {}
    for raw in requests:
        _, flags, command, cookie, offset, length = p.REQUEST.unpack_from(raw)
        asked.admitted((1, cookie, command, length, offset, flags, p.REQUEST.size))
        kind = {p.Cmd.READ: 0, p.Cmd.WRITE: 1}.get(p.Cmd(command), 3)
        inflight[cookie] = (1, 2, word_of(kind, length, failed=False), 0 if command else length)
    return asked, inflight

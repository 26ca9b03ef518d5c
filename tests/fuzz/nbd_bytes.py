"""Random and mutated bytes for negotiation and transmission, both ways: parsers alone, and a running plane.

Parsers may raise what their docstrings name, and nothing else. A plane may close the connection, and must
serve the next client as before.
"""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Final

from gateway_agent.errors import NbdProtocolError, UpstreamError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import word_of
from gateway_agent.nbd.buffers import RequestBuffer
from gateway_agent.nbd.handshake import ClientHandshake, HandshakeState, Open, ServerHandshake, StartTls
from gateway_agent.nbd.proxy_session import InFlight, ReplyReader
from tests.fuzz.nbd_clients import negotiate, read_all
from tests.fuzz.nbd_model import STUCK_S
from tests.fuzz.nbd_targets import Target

FACTS: Final = p.ExportFacts(1 << 30, p.TX_PASSED_ON, p.BlockSizes(512, 4096, 1 << 20))
EDGES: Final = (0, 1, 2, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, cut out, doubled or set to what breaks sums; sometimes as it is."""
    raw = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        how = rng.randrange(5)
        if how == 0 and at < len(raw):
            raw[at] = rng.getrandbits(8)
        elif how == 1:
            del raw[at : at + rng.randrange(1, 20)]
        elif how == 2:
            raw[at:at] = raw[at : at + rng.randrange(1, 60)]
        elif how == 3:
            raw[at : at + 4] = rng.choice(EDGES).to_bytes(4, "big")
        else:
            raw[at:at] = rng.randbytes(rng.randrange(1, 30))
    return bytes(raw)


def pieces(rng: random.Random, data: bytes) -> list[bytes]:
    """``data`` as it may arrive."""
    most, found, at = rng.choice((1, 7, 60, 100_000)), [], 0
    while at < len(data):
        size = rng.randrange(1, most + 1)
        found.append(data[at : at + size])
        at += size
    return found


def options(rng: random.Random, exports: tuple[str, ...]) -> bytes:
    """What a client may say in negotiation."""
    said = p.CLIENT_FLAGS.pack(rng.choice((1, 3, 3, 3)))
    for _ in range(rng.randrange(1, 6)):
        name = rng.choice((*exports, "", "nope", "x" * 5000))
        opt = rng.choice((*p.Opt, p.Opt.GO, p.Opt.GO, 9, 10, 77))
        if opt in (p.Opt.GO, p.Opt.INFO):
            said += p.option(opt, p.go_data(name, tuple(rng.choices((0, 1, 2, 3, 999), k=rng.randrange(4)))))
        else:
            said += p.option(opt, name.encode() if rng.random() < 0.5 else b"")
    return said


def requests(rng: random.Random) -> bytes:
    """What a client may say in transmission; mostly of small requests."""
    said = b""
    for _ in range(rng.randrange(1, 12)):
        command = rng.choice((*p.Cmd, 0, 1, 1, 9, 65535))
        length = rng.choice((0, 1, 512, 4096, 65536))
        header = p.request(
            command,
            rng.getrandbits(3),
            rng.choice((0, 512, 1 << 20, 1 << 40)),
            length,
            rng.choice((0, 0, 1, 2, 16)),
        )
        said += header + (rng.randbytes(length) if command == p.Cmd.WRITE else b"")
    return said


def answers(rng: random.Random) -> bytes:
    """What a server may say in negotiation."""
    said, opt = p.greeting(), rng.choice((p.Opt.GO, p.Opt.GO, p.Opt.INFO))
    infos = [p.info_export(FACTS), p.info_block_size(FACTS.blocks), b"\0\1name", b"\0"]
    for info in rng.sample(infos, rng.randrange(len(infos) + 1)):
        said += p.option_reply(opt, p.Rep.INFO, info)
    end = rng.choice((p.Rep.ACK, p.Rep.ACK, *p.Rep))
    said += p.option_reply(opt, end, rng.choice((b"", b"text", b"\xff")))
    return said + rng.choice((b"", p.EXPORT_NAME_REPLY.pack(1 << 20, 1), bytes(134)))


def fuzz_server_handshake(rng: random.Random) -> None:
    """Bytes of a client before ``ServerHandshake``."""
    tls: p.TlsMode = rng.choice(("off", "offer", "require"))
    machine, said = ServerHandshake(["vol-1", "vol-2"], "client", tls), b""
    with contextlib.suppress(NbdProtocolError):
        for piece in pieces(rng, mutated(rng, options(rng, ("vol-1",)))):
            if machine.state in (HandshakeState.TRANSMISSION, HandshakeState.CLOSED):
                break
            actions = machine.feed(piece)
            while actions:
                action = actions.pop(0)
                said += getattr(action, "data", b"")
                if isinstance(action, StartTls):
                    assert not actions, "something is done behind STARTTLS, before TLS"
                    machine.secured()
                elif isinstance(action, Open):
                    assert tls != "require" or machine.is_secure, "an export is opened without TLS"
                    actions += (
                        machine.opened(FACTS)
                        if rng.random() < 0.5
                        else machine.refused(p.Rep.ERR_UNKNOWN, "no")
                    )
    if machine.state is HandshakeState.OPTIONS:
        while said:
            magic, _, _, length = p.OPTION_REPLY.unpack_from(said)
            assert magic == p.OPTION_REPLY_MAGIC, f"an answer that is none: {said[:40].hex()}"
            said = said[p.OPTION_REPLY.size + length :]


def fuzz_client_handshake(rng: random.Random) -> None:
    """Bytes of an upstream before ``ClientHandshake``."""
    machine = ClientHandshake(
        "v", "up", will_transmit=rng.random() < 0.7, wants_block_size=rng.random() < 0.5
    )
    with contextlib.suppress(NbdProtocolError, UpstreamError):
        for piece in pieces(rng, mutated(rng, answers(rng))):
            machine.feed(piece)
    if machine.state is HandshakeState.READY:
        assert machine.facts is not None
        blocks = machine.facts.blocks
        assert 1 <= blocks.minimum <= min(blocks.preferred, blocks.maximum, 65536), blocks
        assert blocks.maximum <= p.MAX_PAYLOAD_BYTES, blocks
        assert not blocks.maximum % blocks.minimum, blocks


def fuzz_intake(rng: random.Random) -> None:
    """Bytes of a client before ``RequestBuffer``."""
    buffer, given = RequestBuffer("client", 1 << 16), 0
    with contextlib.suppress(NbdProtocolError):
        for piece in pieces(rng, mutated(rng, requests(rng))):
            room = buffer.room()[: len(piece)]
            room[:] = piece[: len(room)]
            if room:
                given += len(room)
                buffer.received(len(room), 1)
            while buffer.queue:
                found = buffer.queue.popleft()
                if found[2] == p.Cmd.WRITE:
                    assert found[3] <= p.MAX_PAYLOAD_BYTES, found
                if buffer.is_drained:
                    buffer.skip(found)
    assert buffer.end_pos == given


def fuzz_replies(rng: random.Random) -> None:
    """Bytes of an upstream before ``ReplyReader``; what it lets pass is whole replies to what was asked."""
    inflight: InFlight = {}
    said = b""
    for cookie in range(rng.randrange(1, 9)):
        length = rng.choice((0, 1, 512, 5000))
        inflight[cookie] = (0, 0, word_of(0, length, failed=False), length)
        error = rng.choice((0, 0, 0, p.EIO, 99))
        said += p.simple_reply(cookie, error) + (b"" if error else rng.randbytes(length))
    asked, reader, kept, position, done = len(inflight), ReplyReader("upstream"), b"", 0, 0
    with contextlib.suppress(NbdProtocolError):
        for piece in pieces(rng, mutated(rng, said)):
            view = memoryview(bytearray(kept + piece))
            usable, finished = reader.feed(view, position, inflight, 1)
            assert len(view) - usable < p.SIMPLE_REPLY_BYTES
            assert reader.boundary is None or reader.boundary <= usable
            kept, position, done = bytes(view[usable:]), position + usable, done + len(finished)
    assert done + len(inflight) <= asked


PARSERS: Final = (fuzz_server_handshake, fuzz_client_handshake, fuzz_intake, fuzz_replies)


def fuzz_parsers(rng: random.Random, cases: int) -> None:
    """So many cases of every parser.

    Raises:
        AssertionError: with the case, when a parser raises what it must not.
    """
    for number in range(cases):
        for parser in PARSERS:
            seed = rng.getrandbits(64)
            try:
                parser(random.Random(seed))
            except Exception as exc:
                raise AssertionError(f"{parser.__name__}, case {number}, seed {seed:#x}: {exc!r}") from exc


def fuzz_plane(rng: random.Random, target: Target, connections: int) -> None:
    """So many bad connections to a plane; then a good one must be served as before."""
    for number in range(connections):
        is_good = rng.random() < 0.5  # until it is in transmission
        connect = target.connect if is_good else target.connect_raw
        with connect(rng) as sock, contextlib.suppress(ConnectionError):
            sock.settimeout(STUCK_S)
            try:
                _talk_badly(rng, target, sock, is_good)
            except TimeoutError as exc:
                raise AssertionError(f"bad connection {number} is neither answered nor closed") from exc
    with target.connect(rng) as sock:
        facts = negotiate(sock, target.export)
        read_all(sock, 0, min(facts.size_bytes, 1 << 20))


def _talk_badly(rng: random.Random, target: Target, sock: socket.socket, is_good: bool) -> None:
    if is_good:
        negotiate(sock, target.export)
        sock.sendall(mutated(rng, requests(rng)))
    else:
        for piece in pieces(rng, mutated(rng, options(rng, (target.export,)) + requests(rng)))[:50]:
            sock.sendall(piece)
    if rng.random() < 0.5:
        with contextlib.suppress(OSError):  # the gateway may have closed
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass

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
from gateway_agent.nbd import extended
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.accounting import word_of
from gateway_agent.nbd.buffers import FINISHED_INTS, InFlight, RequestBuffer
from gateway_agent.nbd.chunks import ChunkReader
from gateway_agent.nbd.handshake import HandshakeState, Open, ServerHandshake, StartTls
from gateway_agent.nbd.replies import AskedRequests, Replies, ReplyReader, SimpleReplyTranslator
from gateway_agent.nbd.upstream_handshake import ClientHandshake
from tests.fuzz.nbd_clients import negotiate, negotiate_as, read_all
from tests.fuzz.nbd_model import STUCK_S, Request
from tests.fuzz.nbd_replies import Assembly
from tests.fuzz.nbd_targets import MODES, Target

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
        opt = rng.choice((*p.Opt, p.Opt.GO, p.Opt.GO, p.Opt.STRUCTURED_REPLY, 77))
        if opt in (p.Opt.GO, p.Opt.INFO):
            said += p.option(opt, p.go_data(name, tuple(rng.choices((0, 1, 2, 3, 999), k=rng.randrange(4)))))
        elif opt in (p.Opt.LIST_META_CONTEXT, p.Opt.SET_META_CONTEXT):
            queries = rng.choices((p.ALLOCATION, "base:", "x-y:z", ""), k=rng.randrange(4))
            said += p.option(opt, p.meta_context_data(name, queries))
        else:
            said += p.option(opt, name.encode() * rng.choice((0, 1, 1, 20)) if rng.random() < 0.5 else b"")
    return said


def requests(rng: random.Random, *, is_extended: bool = False) -> bytes:
    """What a client may say in transmission; mostly of small requests."""
    said, say = b"", p.extended_request if is_extended else p.request
    for _ in range(rng.randrange(1, 12)):
        command = rng.choice((*p.Cmd, 0, 1, 1, 9, 65535))
        length = rng.choice((0, 1, 512, 4096, 65536))
        header = say(
            command,
            rng.getrandbits(3),
            rng.choice((0, 512, 1 << 20, 1 << 40)),
            length,
            rng.choice((0, 0, 1, 2, 4, 8, 16, 32)),
        )
        said += header + (rng.randbytes(length) if command == p.Cmd.WRITE else b"")
    return said


def answers(rng: random.Random, mode: p.ReplyMode = p.SIMPLE_REPLIES) -> bytes:
    """What a server may say in negotiation."""
    said, opt = p.greeting(), rng.choice((p.Opt.GO, p.Opt.GO, p.Opt.INFO))
    if mode.structured:
        said += p.option_reply(p.Opt.STRUCTURED_REPLY, rng.choice((p.Rep.ACK, p.Rep.ACK, *p.Rep)))
    if mode.allocation:
        for found in rng.sample(
            (p.meta_context(7, p.ALLOCATION), p.meta_context(0, "x"), b"\0"), rng.randrange(3)
        ):
            said += p.option_reply(p.Opt.SET_META_CONTEXT, p.Rep.META_CONTEXT, found)
        said += p.option_reply(p.Opt.SET_META_CONTEXT, rng.choice((p.Rep.ACK, p.Rep.ACK, *p.Rep)))
    infos = [p.info_export(FACTS), p.info_block_size(FACTS.blocks), b"\0\1name", b"\0"]
    for info in rng.sample(infos, rng.randrange(len(infos) + 1)):
        said += p.option_reply(opt, p.Rep.INFO, info)
    end = rng.choice((p.Rep.ACK, p.Rep.ACK, *p.Rep))
    said += p.option_reply(opt, end, rng.choice((b"", b"text", b"\xff")))
    return said + rng.choice((b"", p.EXPORT_NAME_REPLY.pack(1 << 20, 1), bytes(134)))


def fuzz_server_handshake(rng: random.Random) -> None:
    """Bytes of a client before ``ServerHandshake``."""
    tls: p.TlsMode = rng.choice(("off", "offer", "require"))
    machine, said = ServerHandshake(["vol-1", "vol-2"], "client", tls, lambda: rng.random() < 0.5), b""
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
    mode = rng.choice(MODES)
    machine = ClientHandshake(
        "v", "up", will_transmit=rng.random() < 0.7, wants_block_size=rng.random() < 0.5, mode=mode
    )
    with contextlib.suppress(NbdProtocolError, UpstreamError):
        for piece in pieces(rng, mutated(rng, answers(rng, mode))):
            machine.feed(piece)
    if machine.state is HandshakeState.READY:
        assert machine.facts is not None
        blocks = machine.facts.blocks
        assert 1 <= blocks.minimum <= min(blocks.preferred, blocks.maximum, 65536), blocks
        assert blocks.maximum <= p.MAX_PAYLOAD_BYTES, blocks
        assert not blocks.maximum % blocks.minimum, blocks


def fuzz_intake(rng: random.Random) -> None:
    """Bytes of a client before ``RequestBuffer``."""
    is_extended = rng.random() < 0.5
    buffer, given = RequestBuffer("client", 1 << 16, extended=is_extended), 0
    with contextlib.suppress(NbdProtocolError):
        for piece in pieces(rng, mutated(rng, requests(rng, is_extended=is_extended))):
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
            kept, position = bytes(view[usable:]), position + usable
            done += len(finished) // FINISHED_INTS
    assert done + len(inflight) <= asked


def asked_at_random(rng: random.Random, most: int) -> tuple[AskedRequests, InFlight, list[Request]]:
    """Requests under way, with cookies from 0 on."""
    asked, requests = AskedRequests(), []
    inflight: InFlight = {}
    for cookie in range(rng.randrange(1, most)):
        command = rng.choice(
            (p.Cmd.READ, p.Cmd.READ, p.Cmd.READ, p.Cmd.BLOCK_STATUS, p.Cmd.WRITE, p.Cmd.FLUSH)
        )
        length = 0 if command == p.Cmd.FLUSH else rng.choice((1, 512, 5000))
        flag = {p.Cmd.READ: p.CMD_FLAG_DF, p.Cmd.BLOCK_STATUS: p.CMD_FLAG_REQ_ONE}.get(command, 0)
        request = Request(cookie, command, rng.choice((0, 4096, 1 << 40)), length, rng.choice((0, flag)))
        asked.admitted((0, cookie, command, length, request.offset, request.flags, 0))
        inflight[cookie] = (0, 0, word_of(0, length, failed=False), 0 if command else length)
        requests.append(request)
    return asked, inflight, requests


def chunks_for(rng: random.Random, request: Request, context_id: int) -> bytes:
    """What a server with structured replies may say to a request."""
    cookie, at, left = request.cookie, request.offset, request.length
    if rng.random() < 0.2:
        place = at if left and rng.random() < 0.5 else None
        return p.error_chunk(cookie, rng.choice((p.EIO, p.EINVAL, 99)), "broken", place)
    if request.command == p.Cmd.BLOCK_STATUS:
        extents = [(request.length, 0)] * (1 if request.flags else rng.randrange(1, 4))
        return p.status_chunk(cookie, context_id, extents, True)
    if request.command != p.Cmd.READ:
        return rng.choice((p.simple_reply(cookie), p.none_chunk(cookie)))
    said = b""
    while left:
        size = left if request.flags else rng.randrange(1, left + 1)
        left -= size
        last = not left and rng.random() < 0.5
        is_hole = rng.random() < 0.5
        said += p.hole_chunk(cookie, at, size, last) if is_hole else p.data_chunk_head(cookie, at, size, last)
        said += b"" if is_hole else rng.randbytes(size)
        at += size
        if last:
            return said
    return said + p.none_chunk(cookie)


def fuzz_chunks(rng: random.Random) -> None:
    """Bytes of an upstream before ``ChunkReader``; what it calls a success is one by the protocol's rules."""
    asked, inflight, requests = asked_at_random(rng, 9)
    said = [chunks_for(rng, request, 7) for request in requests]
    rng.shuffle(said)
    reader = ChunkReader("upstream", asked, 7)
    passed, count = fed(rng, reader, mutated(rng, b"".join(said)), inflight)
    assert count + len(inflight) <= len(requests)
    assemblies = {request.cookie: Assembly(request, p.ALLOCATION_ID) for request in requests}
    while len(passed) >= p.CHUNK_BYTES:
        if passed.startswith(p.SIMPLE_REPLY_MAGIC.to_bytes(4, "big")):
            passed = passed[p.SIMPLE_REPLY_BYTES :]
            continue
        magic, flags, kind, cookie, length = p.CHUNK.unpack_from(passed)
        assert magic == p.CHUNK_MAGIC, f"no reply is passed on: {passed[:40].hex()}"
        payload, passed = passed[p.CHUNK_BYTES :][:length], passed[p.CHUNK_BYTES + length :]
        if len(payload) == length and kind in (p.Chunk.NONE, p.Chunk.OFFSET_DATA, p.Chunk.OFFSET_HOLE):
            assemblies[cookie].add(kind, flags, payload)
        elif kind & p.CHUNK_ERROR_BIT:
            assemblies[cookie].error = 1


def _without_payload(request: Request) -> bytes:
    head = (extended.CHUNK_MAGIC, p.CHUNK_DONE, p.Chunk.NONE, request.cookie, request.offset, 0)
    return extended.CHUNK.pack(*head)


def extended_of(chunk: bytes, request: Request) -> bytes:
    """The same with extended headers."""
    if len(chunk) == p.SIMPLE_REPLY_BYTES:
        return _without_payload(request)
    said = b""
    while chunk:
        _, flags, kind, cookie, length = p.CHUNK.unpack_from(chunk)
        payload, chunk = chunk[p.CHUNK_BYTES :][:length], chunk[p.CHUNK_BYTES + length :]
        if kind == p.Chunk.BLOCK_STATUS:
            context_id, extents = int.from_bytes(payload[:4], "big"), list(p.EXTENT.iter_unpack(payload[4:]))
            said += extended.status_chunk(cookie, request.offset, context_id, extents)
        else:
            head = (extended.CHUNK_MAGIC, flags, kind, cookie, request.offset, length)
            said += extended.CHUNK.pack(*head) + payload
    return said


def fuzz_extended_chunks(rng: random.Random) -> None:
    """The same before ``ExtendedChunkReader``."""
    asked, inflight, requests = asked_at_random(rng, 9)
    said = [extended_of(chunks_for(rng, request, 7), request) for request in requests]
    rng.shuffle(said)
    reader = extended.ExtendedChunkReader("upstream", asked, 7)
    passed, count = fed(rng, reader, mutated(rng, b"".join(said)), inflight)
    assert count + len(inflight) <= len(requests)
    offsets = {request.cookie: request.offset for request in requests}
    assemblies = {request.cookie: Assembly(request, p.ALLOCATION_ID) for request in requests}
    while len(passed) >= extended.CHUNK.size:
        magic, flags, kind, cookie, offset, length = extended.CHUNK.unpack_from(passed)
        assert (magic, offset) == (extended.CHUNK_MAGIC, offsets[cookie]), passed[:40].hex()
        payload, passed = passed[extended.CHUNK.size :][:length], passed[extended.CHUNK.size + length :]
        if len(payload) == length and kind in (p.Chunk.NONE, p.Chunk.OFFSET_DATA, p.Chunk.OFFSET_HOLE):
            assemblies[cookie].add(kind, flags, payload)
        elif kind & p.CHUNK_ERROR_BIT:
            assemblies[cookie].error = 1


def fuzz_translation(rng: random.Random) -> None:
    """Bytes of an upstream before ``SimpleReplyTranslator``; the client gets whole chunks."""
    asked, inflight, requests = asked_at_random(rng, 9)
    requests = [request for request in requests if request.command != p.Cmd.BLOCK_STATUS]
    said = b""
    for request in requests:
        error = rng.choice((0, 0, 0, p.EIO, 99))
        said += p.simple_reply(request.cookie, error)
        said += b"" if error or request.command else rng.randbytes(request.length)
    most = len(inflight)
    passed, count = fed(rng, SimpleReplyTranslator("upstream", asked), mutated(rng, said), inflight)
    assert count + len(inflight) <= most
    assert len(passed) <= 2 * len(said) + 100 * len(requests) + 200


def fed(rng: random.Random, reader: Replies, said: bytes, inflight: InFlight) -> tuple[bytes, int]:
    """What is passed on, and how many requests are complete, until the reader refuses."""
    kept, passed, count = b"", bytearray(), 0
    with contextlib.suppress(NbdProtocolError):
        for piece in pieces(rng, said):
            view = memoryview(bytearray(kept + piece))
            usable, finished = reader.feed(view, 0, inflight, 1)
            assert len(view) - usable < extended.MOST_EXTENDED_HEAD_BYTES
            more = reader.passed(view, usable)
            assert reader.boundary is None or reader.boundary <= len(more)
            passed += more
            kept, count = bytes(view[usable:]), count + len(finished) // FINISHED_INTS
    return bytes(passed), count


PARSERS: Final = (
    fuzz_server_handshake, fuzz_client_handshake, fuzz_intake, fuzz_replies, fuzz_chunks,
    fuzz_extended_chunks, fuzz_translation,
)  # fmt: skip


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
        negotiate_as(sock, target.export, rng.choice(MODES))
        sock.sendall(mutated(rng, requests(rng)))
    else:
        for piece in pieces(rng, mutated(rng, options(rng, (target.export,)) + requests(rng)))[:50]:
            sock.sendall(piece)
    if rng.random() < 0.5:
        with contextlib.suppress(OSError):  # the gateway may have closed
            sock.shutdown(socket.SHUT_WR)
        while sock.recv(1 << 16):
            pass

"""Large payloads of an upstream pass by a pipe of the kernel: real sockets, one thread plays all sides."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections import deque
from dataclasses import replace

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.loop import EventLoop
from gateway_agent.nbd.payload_pipe import LARGE_BYTES, PayloadPipe, PipePool
from gateway_agent.nbd.proxy_session import ProxySession
from gateway_agent.nbd.sockets import prepare
from gateway_agent.nbd.upstream import Upstream, UpstreamPlan
from gateway_agent.nbd.upstream_handshake import Agreed
from gateway_agent.nbd.volume import Volume
from tests.support.nbd import HOLD_NS, MIB, Rig

SIZE = 8 * MIB
DISK = random.Random(1).randbytes(SIZE)
TURNS = 20_000
CHUNKED = p.ReplyMode(structured=True, allocation=True)


def unix_pair():
    return socket.socketpair()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class Wire:
    """A session between a client and an upstream, whose sockets the test reads and writes."""

    def __init__(self, pair=unix_pair, mode=p.SIMPLE_REPLIES, agreed=None, flags=0):
        self.rig = Rig(size_bytes=SIZE)
        self.loop = EventLoop(self.rig.clock)
        context = replace(self.rig.context, loop=self.loop)
        volume = Volume(self.rig.export, self.rig.rates, context, HOLD_NS)
        (self.client, near), (far, self.upstream) = pair(), pair()
        for sock in (near, far, self.client, self.upstream):
            prepare(sock)
        self.stream, self.context = self.rig.stream(), context
        facts = self.rig.facts if not flags else replace(self.rig.facts, flags=flags)
        plan = UpstreamPlan("nbd://127.0.0.1/x")
        self.session = ProxySession(
            context, near, volume, self.stream, facts, Upstream(far, agreed or Agreed(), facts, plan), mode
        )
        self.got, self.asked = bytearray(), bytearray()

    def turn(self):
        """Let the loop do what is ready, and never wait."""
        self.loop.at("turn", 0, lambda _now_ns: None)
        self.loop.step()

    def say(self, data):
        self.client.setblocking(True)
        self.client.sendall(data)
        self.client.setblocking(False)
        self.turn()

    def take(self, most_bytes=1 << 20):
        """Bytes that have come to the client; False at the end."""
        with contextlib.suppress(BlockingIOError):
            data = self.client.recv(most_bytes)
            self.got += data
            return bool(data)
        return True

    def requests(self):
        """What has come to the upstream: (command, cookie, offset, length); payloads are dropped."""
        with contextlib.suppress(BlockingIOError):
            self.asked += self.upstream.recv(1 << 20)
        while len(self.asked) >= p.REQUEST.size:
            _, _, command, cookie, offset, length = p.REQUEST.unpack_from(self.asked)
            size = p.REQUEST.size + (length if command == p.Cmd.WRITE else 0)
            if len(self.asked) < size:
                return
            del self.asked[:size]
            yield command, cookie, offset, length

    def close(self):
        self.session.close("the test ends")
        for farewell in tuple(self.context.farewells):
            farewell.close()
        self.context.pipes.close()
        self.loop.close()
        self.client.close()
        self.upstream.close()


@pytest.fixture
def make():
    made = []

    def new(*args, **more):
        made.append(Wire(*args, **more))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture
def filled(monkeypatch):
    """How many bytes of payloads went by a pipe, one entry a call."""
    seen, fill = [], PayloadPipe.fill

    def counted(self, *args):
        seen.append(fill(self, *args))
        return seen[-1]

    monkeypatch.setattr(PayloadPipe, "fill", counted)
    return seen


def answer(choice, is_chunked, command, cookie, offset, length):
    """An upstream's reply, and what the client is to make of it."""
    if command != p.Cmd.READ:
        return p.simple_reply(cookie), b""
    data = DISK[offset : offset + length]
    if choice.random() < 0.05:
        return p.error_chunk(cookie, p.EIO, "no") if is_chunked else p.simple_reply(cookie, p.EIO), p.EIO
    if not is_chunked:
        return p.simple_reply(cookie) + data, data
    cut = choice.choice([0, 0, length // 2])
    parts = [(0, cut), (cut, length)] if cut else [(0, length)]
    if choice.random() < 0.3:
        parts.reverse()
    chunks = [
        p.data_chunk_head(cookie, offset + begin, end - begin, number == len(parts) - 1) + data[begin:end]
        for number, (begin, end) in enumerate(parts)
    ]
    return b"".join(chunks), data


def answers(raw, lengths, is_chunked):
    """cookie -> error, or the data of a read, from what the client got."""
    found, at = {}, 0
    while at < len(raw):
        magic = int.from_bytes(raw[at : at + 4], "big")
        if magic == p.SIMPLE_REPLY_MAGIC:
            _, error, cookie = p.SIMPLE_REPLY.unpack_from(raw, at)
            at += p.SIMPLE_REPLY_BYTES
            size = lengths.get(cookie, (0, 0))[1] if not error and not is_chunked else 0
            assert cookie not in found
            found[cookie] = error or bytes(raw[at : at + size])
            at += size
            continue
        assert magic == p.CHUNK_MAGIC, f"at {at} of {len(raw)}"
        _, _, kind, cookie, size = p.CHUNK.unpack_from(raw, at)
        payload = raw[at + p.CHUNK_BYTES : at + p.CHUNK_BYTES + size]
        at += p.CHUNK_BYTES + size
        if kind & p.CHUNK_ERROR_BIT:
            found[cookie] = int.from_bytes(payload[:4], "big")
            continue
        offset, length = lengths[cookie]
        data = found.setdefault(cookie, bytearray(length))
        begin = int.from_bytes(payload[:8], "big") - offset
        data[begin : begin + len(payload) - 8] = payload[8:]
    assert at == len(raw)
    return found


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
@pytest.mark.parametrize(
    ("mode", "agreed"),
    [
        (p.SIMPLE_REPLIES, Agreed()),
        (CHUNKED, Agreed(structured=True, context_id=5)),
        (CHUNKED, Agreed()),
    ],
    ids=["simple", "chunks", "translated"],
)
@pytest.mark.parametrize("seed", range(4))
def test_every_client_gets_its_own_bytes_whatever_their_size_and_order(
    make, filled, pair, mode, agreed, seed
):
    wire, choice = make(pair, mode, agreed), random.Random(seed)
    pending, lengths, said, expected = deque(), {}, bytearray(), {}
    for cookie in range(1, 61):
        length = choice.choice([512, 4096, 128 << 10, LARGE_BYTES, LARGE_BYTES + 512, 300 << 10, MIB])
        offset = choice.randrange((SIZE - length) // 512) * 512
        kind = choice.random()
        if kind < 0.1:
            said += p.request(p.Cmd.READ, cookie, SIZE, 512)
            expected[cookie] = p.EINVAL
        elif kind < 0.2:
            said += p.request(p.Cmd.WRITE, cookie, 0, 4096) + bytes(4096)
            expected[cookie] = b""
        else:
            said += p.request(p.Cmd.READ, cookie, offset, length)
            lengths[cookie] = offset, length
    out = deque()
    for _ in range(TURNS):
        with contextlib.suppress(BlockingIOError):
            del said[: wire.client.send(said[: choice.choice([28, 1000, 100_000])])]
        pending.extend(wire.requests())
        if pending and choice.random() < 0.6:
            index = choice.randrange(len(pending))
            command, cookie, offset, length = pending[index]
            del pending[index]
            reply, expected[cookie] = answer(choice, agreed.structured, command, cookie, offset, length)
            out.append(memoryview(reply))
        if out and choice.random() < 0.8:
            with contextlib.suppress(BlockingIOError):
                sent = wire.upstream.send(out[0][: choice.choice([1, 20, 5000, 70_000, 1 << 20])])
                out[0] = out[0][sent:]
                if not out[0]:
                    out.popleft()
        wire.turn()
        if choice.random() < 0.5:
            wire.take(choice.choice([1, 100, 50_000, 1 << 20]))
        if len(expected) == 60 and not (said or pending or out or wire.session.inflight):
            break
    while wire.session._out.unsent_bytes or wire.session._replying is not None:
        wire.take()
        wire.turn()
    assert not wire.session.is_closed
    wire.session.close("all is answered")
    wire.client.setblocking(True)  # what was sent may still be on its way
    while wire.take():
        pass
    found = answers(wire.got, lengths, mode.structured)
    assert found == expected
    assert sum(filled) > 2 * MIB, "much of it went by a pipe"
    wire.stream.fold()
    counted = wire.stream._lifetime()
    writes = sum(each == b"" for each in expected.values())
    assert (counted["reads"], counted["writes"], counted["arrived"]) == (60 - writes, writes, 60)
    assert counted["errors"] == sum(each in (p.EIO, p.EINVAL) for each in expected.values())


@pytest.mark.parametrize("pair", [unix_pair, tcp_pair])
def test_a_large_read_in_small_chunks_is_copied(make, filled, pair):
    """Each chunk by a pipe of its own took five times the processor time."""
    wire = make(pair, CHUNKED, Agreed(structured=True, context_id=5))
    for cookie, size in ((1, MIB), (2, MIB), (3, 4096), (4, 4096)):
        wire.got.clear()
        wire.say(p.request(p.Cmd.READ, cookie, 0, MIB))
        parts = [
            p.data_chunk_head(cookie, at, size, at + size == MIB) + DISK[at : at + size]
            for at in range(0, MIB, size)
        ]
        reply = b"".join(parts)
        left = memoryview(reply)
        while len(wire.got) < len(reply):
            with contextlib.suppress(BlockingIOError):
                left = left[wire.upstream.send(left) if left else 0 :]
            wire.turn()
            wire.take()
        assert wire.got == reply
        piped = sum(each > 0 for each in filled)
        filled.clear()
        assert cookie == 1 or (piped > 0 if size == MIB else piped <= 1)


def test_without_pipes_payloads_are_copied(make, monkeypatch):
    def none_left(_self):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(PayloadPipe, "__init__", none_left)
    wire = make()
    for cookie in range(4):
        wire.say(p.request(p.Cmd.READ, cookie, 0, LARGE_BYTES))
        [(_, _, offset, length)] = wire.requests()
        for data in (p.simple_reply(cookie), DISK[offset : offset + length]):
            wire.upstream.sendall(data)
            wire.turn()
        while len(wire.got) < (cookie + 1) * (16 + (LARGE_BYTES)):
            wire.take()
            wire.turn()
    assert wire.got == b"".join(p.simple_reply(cookie) + DISK[:LARGE_BYTES] for cookie in range(4))


def begun(wire):
    """A session that knows its payloads to be large, with one of a MiB on its way."""
    wire.say(p.request(p.Cmd.READ, 1, 0, LARGE_BYTES))
    wire.upstream.sendall(p.simple_reply(1) + DISK[:LARGE_BYTES])
    for _ in range(20):
        wire.turn()
        wire.take()
    assert len(wire.got) == 16 + (LARGE_BYTES)
    wire.say(p.request(p.Cmd.READ, 2, 0, MIB) + p.request(p.Cmd.READ, 3, 0, 512))
    wire.got.clear()
    wire.upstream.send(p.simple_reply(2) + DISK[:100_000])
    for _ in range(10):
        wire.turn()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_an_upstream_that_ends_within_a_payload_ends_the_client_behind_what_had_come(make, filled):
    wire = make()
    begun(wire)
    assert sum(filled) >= 50_000
    wire.upstream.close()
    while wire.take():
        wire.turn()
    assert wire.got == p.simple_reply(2) + DISK[:100_000], "nothing else, and no answer to the third"
    for _ in range(5):
        wire.turn()
    assert wire.session.is_closed or wire.session._ending
    wire.stream.fold()
    assert wire.stream._lifetime()["errors"] == 2


def test_an_answer_of_our_own_comes_behind_the_payload_and_never_within(make, filled):
    wire = make()
    begun(wire)
    wire.say(p.request(p.Cmd.READ, 4, SIZE, 512))
    wire.take()
    assert wire.got == p.simple_reply(2) + DISK[: len(wire.got) - 16]
    wire.upstream.sendall(DISK[100_000:MIB])
    for _ in range(TURNS):
        wire.turn()
        wire.take()
        if len(wire.got) >= 16 + MIB + 16:
            break
    assert wire.got == p.simple_reply(2) + DISK[:MIB] + p.simple_reply(4, p.EINVAL)
    assert sum(filled[1:]) > 900_000


def test_a_client_that_leaves_its_answers_in_the_pipe_leaves_nothing_behind(make, filled):
    before = open_files()
    wire = make()
    wire.client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    begun(wire)
    wire.say(b"".join(p.request(p.Cmd.READ, cookie, 0, MIB) for cookie in range(4, 10)))
    others = (p.simple_reply(cookie) + DISK[:MIB] for cookie in range(4, 10))
    left = memoryview(DISK[100_000:MIB] + b"".join(others))
    for _ in range(200):
        with contextlib.suppress(BlockingIOError):
            left = left[wire.upstream.send(left) if left else 0 :]
        wire.turn()
    assert wire.session._out._pipe is not None  # nothing outside shows where it is kept
    assert sum(filled) > 100_000
    wire.client.close()
    for _ in range(10):
        wire.turn()
    assert wire.session.is_closed
    wire.close()
    assert open_files() == before


def test_a_pipe_takes_what_a_socket_has_and_says_when_it_has_ended():
    one, other = socket.socketpair()
    one.setblocking(False)
    pool = PipePool()
    pipe = pool.take()
    assert pipe.fill(b"head", one.fileno(), 100) == 0
    assert pipe.held_bytes == 4
    with pytest.raises(BlockingIOError):
        one.recv(1)
    assert pipe.give(one.fileno())
    assert other.recv(100) == b"head"
    other.send(b"x" * 300)
    assert pipe.fill(b"", one.fileno(), 100) == 100
    pool.put_back(pipe)  # with something in it: it is not used again
    again = pool.take()
    assert again is not pipe
    other.close()
    assert again.fill(b"", one.fileno(), 1000) == 200
    again.held_bytes = 0
    with pytest.raises(OSError, match="it closed the connection"):
        again.fill(b"", one.fileno(), 1000)
    again.close()
    one.close()

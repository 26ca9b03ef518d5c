import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.buffers import (
    BATCH_BYTES,
    COOKIE,
    END,
    GRACE_S,
    LEAST_BYTES_PER_S,
    LIMIT_BYTES,
    MemoryBudget,
    ReplyBuffer,
    RequestBuffer,
)
from gateway_agent.nbd.payload_pipe import PipePool
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import MIB, FakeLoop, FakeSocket
from tests.unit.gateway_agent.nbd.test_file_session import Client, read, write


def put(buffer, data, now_ns=0):
    """Give bytes to the buffer as far as there is room; returns (bytes taken, reads and writes)."""
    room = buffer.room()
    count = min(len(data), len(room))
    room[:count] = data[:count]
    return count, buffer.received(count, now_ns)


def write_request(cookie, payload):
    return p.request(p.Cmd.WRITE, cookie, 0, len(payload)) + payload


def admit(buffer):
    request = buffer.queue.popleft()
    buffer.admit_pos = request[END]
    return request


def test_a_payload_that_ends_exactly_at_the_end_of_the_buffer_with_an_empty_queue_goes_out():
    buffer = RequestBuffer("client", 4096)
    data = write_request(7, bytes(range(256)) * 15 + bytes(4096 - 28 - 3840))
    assert len(data) == 4096
    assert put(buffer, data[:28])[0] == 28
    admit(buffer)
    assert put(buffer, data[28:])[0] == 4068
    assert not buffer.queue
    assert bytes(buffer.outgoing()) == data
    buffer.sent(4096)
    assert buffer.is_drained
    assert len(buffer.room()) == 4096


def test_a_payload_larger_than_the_buffer_streams_through():
    buffer, data, out = RequestBuffer("client", 1024), write_request(1, bytes(range(250)) * 40), bytearray()
    left = data
    while left:
        count, _ = put(buffer, left)
        assert count, "a full buffer that nobody empties"
        left = left[count:]
        if buffer.queue:
            admit(buffer)
        view = buffer.outgoing()
        out += view
        buffer.sent(len(view))
    assert bytes(out) == data
    assert buffer.is_drained


def test_held_requests_stay_and_a_full_buffer_stops_reading():
    buffer = RequestBuffer("client", 280)
    taken, transfers = put(buffer, b"".join(p.request(p.Cmd.READ, n, 0, 512) for n in range(20)))
    assert (taken, transfers) == (280, 10)
    assert not buffer.wants_input
    assert not buffer.room()
    assert not buffer.outgoing()
    assert admit(buffer)[COOKIE] == 0
    assert len(buffer.outgoing()) == 28
    buffer.sent(28)
    assert buffer.wants_input
    assert len(buffer.room()) == 28


def test_a_skipped_write_drops_the_payload_that_is_here_and_the_rest_on_its_way():
    buffer = RequestBuffer("client", 256)
    data = write_request(1, bytes(1000)) + p.request(p.Cmd.READ, 2, 0, 4)
    count, _ = put(buffer, data)
    buffer.skip(buffer.queue.popleft())
    while count < len(data):
        taken, _ = put(buffer, data[count:])
        assert taken
        count += taken
        if not buffer.queue:
            assert not buffer.outgoing()
    assert admit(buffer)[COOKIE] == 2
    assert bytes(buffer.outgoing()) == data[-28:]


def test_a_refused_request_may_not_overtake_an_admitted_one():
    buffer = RequestBuffer("client")
    put(buffer, p.request(0, 1, 0, 4) + p.request(0, 2, 0, 4))
    admit(buffer)
    with pytest.raises(AssertionError):
        buffer.skip(buffer.queue[0])


def test_nothing_behind_disc_is_looked_at():
    buffer = RequestBuffer("client")
    put(buffer, p.request(p.Cmd.READ, 1, 0, 4) + p.request(p.Cmd.DISC, 0, 0, 0) + b"rubbish" * 9)
    assert buffer.disconnecting
    assert len(buffer.queue) == 1
    assert not buffer.wants_input


def test_arrival_is_stamped_and_transfers_are_counted():
    buffer = RequestBuffer("client")
    _, transfers = put(
        buffer, p.request(0, 1, 0, 4) + p.request(p.Cmd.FLUSH, 2, 0, 0) + write_request(3, b"abcd"), 99
    )
    assert transfers == 2
    assert [request[0] for request in buffer.queue] == [99, 99, 99]


@pytest.mark.parametrize("is_extended", [False, True])
@pytest.mark.parametrize("length", [0, (32 << 20) + 1])
def test_what_is_no_request_is_refused_with_what_came_with_it(is_extended, length):
    say = p.extended_request if is_extended else p.request
    buffer = RequestBuffer("client", extended=is_extended)
    put(buffer, say(p.Cmd.READ, 1, 0, 4))
    with pytest.raises(NbdProtocolError):
        put(buffer, say(p.Cmd.READ, 2, 0, 4) + (say(p.Cmd.WRITE, 3, 0, length) if length else bytes(40)))
    assert [request[COOKIE] for request in buffer.queue] == [1]


ops = st.lists(st.one_of(st.none(), st.binary(max_size=700)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(ops=ops, seed=st.integers(0, 1 << 32))
def test_whatever_the_sizes_of_receives_and_sends_the_bytes_come_out_as_they_went_in(ops, seed):
    dice = random.Random(seed)
    data = b"".join(
        p.request(p.Cmd.READ, n, 0, 512) if payload is None else write_request(n, payload)
        for n, payload in enumerate(ops)
    )
    buffer, out, left, cookies = RequestBuffer("client", 256), bytearray(), data, []
    for _ in range(20_000):
        if len(out) == len(data):
            break
        count, _ = put(buffer, left[: dice.randint(1, 300)]) if left else (0, 0)
        left = left[count:]
        while buffer.queue and dice.random() < 0.7:
            cookies.append(admit(buffer)[COOKIE])
        view = buffer.outgoing()
        sent = dice.randint(0, len(view))
        out += view[:sent]
        buffer.sent(sent)
    assert bytes(out) == data
    assert cookies == list(range(len(ops)))


def test_what_the_socket_does_not_take_is_kept_until_it_does():
    sock = FakeSocket(window=15)
    flow = ReplyBuffer(sock, PipePool())
    assert not flow.send(b"a" * 20)
    sock.window = 4
    assert not flow.flush()
    assert (flow.unsent_bytes, flow.is_empty) == (1, False)
    sock.window = 1
    assert flow.flush()
    assert (flow.unsent_bytes, flow.is_empty) == (0, True)


@given(
    pieces=st.lists(st.binary(min_size=1, max_size=50), max_size=20),
    windows=st.lists(st.integers(0, 60), max_size=40),
)
def test_bytes_leave_in_order_whatever_the_socket_takes(pieces, windows):
    sock = FakeSocket(window=0)
    flow, given_windows = ReplyBuffer(sock, PipePool()), iter(windows)
    for piece in pieces:
        scratch = bytearray(piece)
        sock.window = next(given_windows, 0)
        flow.send(memoryview(scratch))
        scratch[:] = bytes(len(scratch))  # the buffer is used again at once
    assert len(b"".join(pieces)) - flow.unsent_bytes == len(sock.sent)
    for window in (*given_windows, 1 << 20):
        sock.window = window
        flow.flush()
    assert bytes(sock.sent) == b"".join(pieces)
    assert flow.is_empty


SIZE = 64 * MIB
LARGEST = 32 * MIB
LARGEST_S = GRACE_S + LARGEST / LEAST_BYTES_PER_S


class Owner:
    def __init__(self, memory, stream):
        self.memory, self.stream = memory, stream
        self.calls, self.stalls, self.wants, self.takes = 0, 0, 0, True

    def on_memory_free(self):
        self.calls += 1
        if self.takes and self.memory.take(self, self.wants):
            self.wants = 0

    def on_too_slow(self):
        self.stalls += 1

    def take(self, size):
        taken = self.memory.take(self, size)
        self.wants = 0 if taken else size
        return taken


@pytest.fixture
def loop():
    return FakeLoop(FakeClock())


@pytest.fixture
def memory(loop):
    return MemoryBudget(loop)


def owners(memory, *streams):
    return [Owner(memory, stream) for stream in streams]


def test_memory_is_given_in_the_order_of_asking(loop, memory):
    one, two, three, four, five = owners(memory, *"abcde")
    assert all(owner.take(LARGEST) for owner in (one, two))
    assert three.take(20 * MIB)
    assert not four.take(LARGEST)
    assert not five.take(8 * MIB), "there is room, but another one came first"
    loop.turn()
    memory.release(three, 20 * MIB)
    loop.turn()
    assert (four.wants, five.wants) == (0, 8 * MIB)
    memory.release(two, LARGEST)
    loop.turn()
    assert five.wants == 0
    assert memory.used_bytes == 72 * MIB
    assert not loop.turn()


def test_a_stream_that_waits_for_its_own_share_is_passed_by(loop, memory):
    one, two, other = owners(memory, "a", "a", "b")
    assert one.take(LARGEST)
    assert not two.take(LARGEST)
    other.take(LARGEST)
    loop.turn()
    assert (two.wants, other.wants) == (LARGEST, 0)
    memory.release(one, LARGEST)
    loop.turn()
    assert two.wants == 0


def test_quick_requests_have_a_reserve_that_large_ones_never_use(loop, memory):
    streams = "abcdefgh"
    large = owners(memory, *streams)
    for owner in large:
        owner.take(LARGEST)
    loop.turn()
    assert memory.used_bytes == LIMIT_BYTES * 3 // 4
    for stream in streams[:4]:
        quick = owners(memory, *stream * 5)
        for owner in quick:
            owner.take(2 * MIB)
        loop.turn()
        assert [owner.wants for owner in quick] == [0] * 4 + [2 * MIB], "a quarter of the reserve"
    assert memory.used_bytes == LIMIT_BYTES


def test_who_is_called_and_does_not_take_holds_up_no_other(loop, memory):
    one, two, unable, other = owners(memory, *"abcd")
    assert one.take(LARGEST)
    assert two.take(LARGEST)
    assert owners(memory, "e")[0].take(LARGEST)
    for owner in (unable, other):
        assert not owner.take(LARGEST)
    unable.takes = False
    memory.release(one, LARGEST)
    loop.turn()
    assert (unable.calls, other.wants) == (1, 0)
    memory.release(two, LARGEST)
    loop.turn()
    assert unable.calls == 1, "it asks again when it can"
    assert unable.take(LARGEST)


def test_who_is_late_is_named_only_while_another_waits(loop, memory):
    slow, waiting = owners(memory, "a", "a")
    assert slow.take(LARGEST)
    memory.expect(slow, LARGEST)
    loop.fire(2 * LARGEST_S)
    assert slow.stalls == 0
    assert not waiting.take(LARGEST)
    loop.fire(3)
    assert slow.stalls == 3
    memory.stop_waiting(waiting)
    loop.fire(LARGEST_S)
    assert slow.stalls == 3
    assert not loop.timers


def test_the_time_of_a_request_depends_on_its_size_and_early_is_no_credit(loop, memory):
    one, waiting = owners(memory, "a", "a")
    assert one.take(LARGEST)
    assert not waiting.take(LARGEST)
    for _ in range(100):
        memory.expect(one, LARGEST)
        memory.moved(one, LARGEST)
    for _ in range(8):
        memory.expect(one, LARGEST // 8)
    for part in range(7):
        loop.fire(2)  # at the least rate
        memory.moved(one, LARGEST // 8)
        memory.expect(one, LARGEST // 8)
        assert one.stalls == 0, part
    loop.fire(LARGEST_S - 1)
    assert one.stalls == 0
    loop.fire(1)
    assert one.stalls == 1


def stalled_writer(first, stream=None):
    """One more connection, which announces the largest write and sends all but a MiB of it."""
    sock = FakeSocket()
    first.stream = stream or first.stream
    session = first.another(sock)
    first.rig.deliver(sock, write(1, 0, b"S" * LARGEST)[:-MIB])
    return sock, session


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "disk.img"
    with open(path, "wb") as file:
        file.truncate(SIZE)
    return path


@pytest.mark.parametrize("kind", ["loop", "workers"])
@pytest.mark.parametrize("are_others", [False, True])
def test_stalled_writers_do_not_hold_up_a_write_of_2_mib(path, kind, are_others):
    client = Client(path, kind)
    own = client.stream
    for number in range(8):
        stalled_writer(client, client.rig.stream(f"host-{number}") if are_others else None)
    client.stream = own
    client.say(write(1, 0, b"N" * 2 * MIB), read(2, 0, 2 * MIB))
    assert len(client.sock.sent) == 16 + 2 * MIB + 16
    assert client.rig.clock.monotonic_ns() == FakeClock().monotonic_ns(), "it was done at once"


@pytest.mark.parametrize("kind", ["loop", "workers"])
def test_a_drip_renews_nothing(path, kind):
    client = Client(path, kind)
    slow, session = stalled_writer(client)
    client.rig.deliver(client.sock, write(1, 0, b"N" * LARGEST))
    for _ in range(round(LARGEST_S) - 1):
        client.rig.deliver(slow, b"x")
        client.rig.loop.fire(1)
    assert (session.is_closed, bytes(client.sock.sent)) == (False, b"")
    client.rig.loop.fire(2)
    assert session.is_closed
    client.say()
    assert len(client.sock.sent) == 16
    assert client.rig.context.payload_memory.used_bytes == 0


def test_a_reader_that_takes_its_reply_by_drips_makes_room(path):
    client, sock = Client(path, "workers"), FakeSocket()
    client.sock.window = 0
    client.say(read(1, 0, LARGEST))
    client.another(sock)
    client.rig.deliver(sock, read(1, 0, LARGEST))
    client.say()
    for _ in range(round(LARGEST_S) - 1):
        client.rig.open_window(client.sock, 1000)
        client.rig.loop.fire(1)
    assert (client.session.is_closed, bytes(sock.sent)) == (False, b"")
    client.rig.loop.fire(2)
    client.say()
    assert client.session.is_closed
    assert len(sock.sent) == LARGEST + 16


def test_requests_that_begin_where_the_last_one_of_their_kind_ended_are_sequential():
    """Reads and writes each have their own place, whatever comes between; also over several receives."""
    buffer, K = RequestBuffer("client"), 1024

    def received(*requests):
        put(buffer, b"".join(p.request(p.Cmd.READ, 1, at, size) for at, size in requests))
        return buffer.sequential

    assert received((0, 4 * K), (4 * K, 4 * K), (8 * K, K)) == 2, "the first one follows none"
    assert put(buffer, p.request(p.Cmd.WRITE, 2, 9 * K, 16) + bytes(16))[1] == 1
    assert buffer.sequential == 0, "what a read has ended at is no place of writes"
    assert received((9 * K, K), (99 * K, K), (9 * K, K), (10 * K, K)) == 2
    assert put(buffer, p.request(p.Cmd.WRITE, 3, 9 * K + 16, 16) + bytes(16))[1] == 1
    assert buffer.sequential == 1
    assert put(buffer, p.request(p.Cmd.FLUSH, 4, 0, 0))[1] == 0
    assert buffer.sequential == 0


def test_what_is_received_at_once_is_bounded_but_for_a_payload_that_is_due():
    buffer = RequestBuffer("client")
    assert len(buffer.room()) == BATCH_BYTES
    payload = bytes(BATCH_BYTES + 1000)
    put(buffer, write_request(1, payload)[:1028])
    assert len(buffer.room()) == len(payload) - 1000 + BATCH_BYTES


def test_small_replies_that_waited_leave_together():
    sends = []

    class Sock(FakeSocket):
        def send(self, data):
            sends.append(len(data))
            return super().send(data)

    sock = Sock(window=0)
    flow = ReplyBuffer(sock, PipePool())
    pieces = [bytes([n % 251]) * (1 + n % 40) for n in range(10_000)]
    for piece in pieces:
        flow.send(piece)
    sock.window, sends[:] = 1 << 40, []
    assert flow.flush()
    assert bytes(sock.sent) == b"".join(pieces)
    assert len(sends) < 10

"""Memory for large requests: shares, a reserve for quick ones, the order of asking, the least rate."""

import pytest

from gateway_agent.nbd.buffers import GRACE_S, LEAST_BYTES_PER_S, LIMIT_BYTES, Buffers
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import MIB, FakeLoop, FakeSocket
from tests.unit.gateway_agent.nbd.test_file_session import Client, read, write

SIZE = 64 * MIB
LARGEST = 32 * MIB
LARGEST_S = GRACE_S + LARGEST / LEAST_BYTES_PER_S


class Owner:
    def __init__(self, memory, stream):
        self.memory, self.stream = memory, stream
        self.calls, self.stalls, self.wants, self.takes = 0, 0, 0, True

    def memory_is_free(self):
        self.calls += 1
        if self.takes and self.memory.take(self, self.wants):
            self.wants = 0

    def has_stalled(self):
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
    return Buffers(loop)


def owners(memory, *streams):
    return [Owner(memory, stream) for stream in streams]


def test_memory_is_given_in_the_order_of_asking(loop, memory):
    one, two, three, four, five = owners(memory, *"abcde")
    assert all(owner.take(LARGEST) for owner in (one, two))
    assert three.take(20 * MIB)
    assert not four.take(LARGEST)
    assert not five.take(8 * MIB), "there is room, but another one came first"
    loop.turn()
    memory.give_back(three, 20 * MIB)
    loop.turn()
    assert (four.wants, five.wants) == (0, 8 * MIB)
    memory.give_back(two, LARGEST)
    loop.turn()
    assert five.wants == 0
    assert memory.held_bytes == 72 * MIB
    assert not loop.turn()


def test_a_stream_that_waits_for_its_own_share_is_passed_by(loop, memory):
    one, two, other = owners(memory, "a", "a", "b")
    assert one.take(LARGEST)
    assert not two.take(LARGEST)
    other.take(LARGEST)
    loop.turn()
    assert (two.wants, other.wants) == (LARGEST, 0)
    memory.give_back(one, LARGEST)
    loop.turn()
    assert two.wants == 0


def test_quick_requests_have_a_reserve_that_large_ones_never_use(loop, memory):
    streams = "abcdefgh"
    large = owners(memory, *streams)
    for owner in large:
        owner.take(LARGEST)
    loop.turn()
    assert memory.held_bytes == LIMIT_BYTES * 3 // 4
    for stream in streams[:4]:
        quick = owners(memory, *stream * 5)
        for owner in quick:
            owner.take(2 * MIB)
        loop.turn()
        assert [owner.wants for owner in quick] == [0] * 4 + [2 * MIB], "a quarter of the reserve"
    assert memory.held_bytes == LIMIT_BYTES


def test_who_is_called_and_does_not_take_holds_up_no_other(loop, memory):
    one, two, unable, other = owners(memory, *"abcd")
    assert one.take(LARGEST)
    assert two.take(LARGEST)
    assert owners(memory, "e")[0].take(LARGEST)
    for owner in (unable, other):
        assert not owner.take(LARGEST)
    unable.takes = False
    memory.give_back(one, LARGEST)
    loop.turn()
    assert (unable.calls, other.wants) == (1, 0)
    memory.give_back(two, LARGEST)
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
    memory.leave(waiting)
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
    assert client.rig.context.payloads.held_bytes == 0


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

import os
import socket

import pytest
from structlog.testing import capture_logs

from gateway_agent.errors import NbdProtocolError
from gateway_agent.nbd.loop import IN, EventLoop
from pmdaemon.runtime.clock import FakeClock, SystemClock
from pmdaemon.runtime.stop import Stop


@pytest.fixture
def pipe():
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK)
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_timers_fire_once_in_their_turn_and_may_be_moved_or_cancelled():
    clock, fired = FakeClock(), []
    loop, now_ns = EventLoop(clock), clock.monotonic_ns()
    loop.at("a", now_ns, lambda _now: fired.append("a"))
    loop.at("b", now_ns, lambda _now: fired.append("b"))
    loop.at("b", now_ns, lambda _now: fired.append("b, moved"))
    loop.at("c", now_ns, lambda _now: fired.append("c"))
    loop.cancel("c")
    loop.at("bug", now_ns, lambda _now: 1 // 0)
    loop.step()
    assert fired == ["a", "b, moved"]
    loop.close()


def test_the_owner_of_a_timer_that_raises_is_told_and_the_others_fire():
    loop, told = EventLoop(FakeClock()), []
    now_ns = loop.clock.monotonic_ns()
    loop.at("bug", now_ns, lambda _now: 1 // 0, told.append)
    loop.at("next", now_ns, lambda _now: told.append("next"))
    loop.step()
    assert [type(each) for each in told] == [ZeroDivisionError, str]
    loop.close()


def test_a_handler_that_cancels_another_due_timer_is_obeyed():
    clock, fired = FakeClock(), []
    loop = EventLoop(clock)
    loop.at("a", clock.monotonic_ns(), lambda _now: loop.cancel("b"))
    loop.at("b", clock.monotonic_ns(), lambda _now: fired.append("b"))
    loop.step()
    assert fired == []
    loop.close()


def test_a_due_timer_that_a_handler_moves_fires_at_its_new_time_and_those_due_in_order_of_time():
    clock, fired = FakeClock(), []
    loop, now_ns = EventLoop(clock), clock.monotonic_ns()
    loop.at("moved", now_ns, lambda _now: fired.append("too early"))
    loop.at("late", now_ns - 1, lambda _now: fired.append("late"))
    loop.at("later", now_ns - 2, lambda _now: loop.at("moved", now_ns + 10**9, fired.append))
    loop.at(
        "again", now_ns - 3, lambda _now: loop.at("again", now_ns - 3, lambda _now: fired.append("twice"))
    )
    loop.step()
    assert fired == ["late"]
    loop.at("turn", now_ns, lambda _now: None)
    loop.step()
    assert fired == ["late", "twice"]
    clock.advance(1)
    loop.step()
    assert fired == ["late", "twice", now_ns + 10**9]
    assert (loop._timers, loop._keys, loop._heap) == ({}, {}, [])
    loop.close()


class CountedTime(int):
    """A moment that counts how often one is compared."""

    compared = 0

    def _counted(name):
        def compare(self, other):
            CountedTime.compared += 1
            return getattr(int, name)(self, other)

        return compare

    __lt__, __le__, __gt__ = _counted("__lt__"), _counted("__le__"), _counted("__gt__")
    __ge__, __eq__ = _counted("__ge__"), _counted("__eq__")
    __hash__ = int.__hash__


def compared_in(turns, timers):
    """How many times moments are compared while one timer of many is due in each turn."""
    clock = FakeClock()
    loop, now_ns = EventLoop(clock), clock.monotonic_ns()
    for number in range(timers):
        loop.at(number, CountedTime(now_ns + 30 * 10**9 + number), print)
    CountedTime.compared = 0
    for _ in range(turns):
        loop.at("due", CountedTime(now_ns), lambda _now: None)
        loop.step()
    loop.close()
    return CountedTime.compared


def test_a_turn_looks_at_what_is_due_and_not_at_every_timer():
    assert 0 < compared_in(50, timers=100) <= 50 * 40
    assert compared_in(50, timers=10_000) <= 50 * 60, "the height of the heap"


def test_timers_that_are_moved_at_each_io_leave_no_heap_behind():
    clock = FakeClock()
    loop, now_ns = EventLoop(clock), clock.monotonic_ns()
    most = 0
    for number in range(10_000):
        loop.at(number % 100, now_ns + 10**9 + number, print)
        most = max(most, len(loop._heap))
    assert most <= 2 * 100 + 64
    for number in range(100):
        loop.cancel(number)
    assert loop._timeout_s() == 60.0
    assert loop._heap == []
    loop.close()


@pytest.mark.parametrize("error", [NbdProtocolError("client", "magic"), ZeroDivisionError("a bug")])
def test_a_handler_that_raises_costs_its_own_connection_only(pipe, error):
    read_fd, write_fd = pipe
    loop, failures = EventLoop(FakeClock()), []

    def handler(_events):
        raise error

    loop.watch(read_fd, IN, handler, failures.append)
    os.write(write_fd, b"x")
    loop.step()
    assert failures == [error]
    loop.forget(read_fd)
    loop.forget(read_fd)
    loop.close()


def test_a_crowd_of_bad_connections_writes_few_lines_and_they_are_counted(pipe):
    read_fd, write_fd = pipe
    clock = FakeClock()
    loop = EventLoop(clock)

    def handler(_events):
        raise NbdProtocolError("client", "magic")

    loop.watch(read_fd, IN, handler, lambda _exc: None)
    os.write(write_fd, b"x")
    with capture_logs() as lines:
        for _ in range(1000):
            loop.step()
        clock.advance(1)
        loop.step()
    assert [line["event"] for line in lines] == ["connection-failed"] * 10 + [
        "log-suppressed",
        "connection-failed",
    ]
    assert lines[10]["left_out"] == 990
    loop.close()


def test_an_event_for_a_descriptor_that_was_just_forgotten_is_dropped():
    loop, called = EventLoop(FakeClock()), []
    pipes = [os.pipe2(os.O_NONBLOCK) for _ in range(2)]

    def forget_the_other(mine, other):
        called.append(mine)
        loop.forget(other)

    for (mine, write_fd), (other, _) in (pipes, pipes[::-1]):
        loop.watch(
            mine, IN, lambda _e, mine=mine, other=other: forget_the_other(mine, other), lambda _exc: None
        )
        os.write(write_fd, b"x")
    loop.step()
    assert len(called) == 1
    loop.close()
    for fds in pipes:
        for fd in fds:
            os.close(fd)


def test_a_stop_ends_the_loop():
    loop, stop = EventLoop(SystemClock()), Stop()
    loop.at("stop", 0, lambda _now: stop.set("test"))
    loop.run(stop)
    assert stop.is_set()
    loop.close()


def test_input_that_epoll_does_not_see_counts_while_the_descriptor_is_watched_for_it(pipe):
    read_fd, _ = pipe
    loop, seen = EventLoop(FakeClock()), []

    def handler(events):
        seen.append(events)
        loop.set_buffered(read_fd, len(seen) < 2)

    loop.set_buffered(read_fd, True)
    loop.watch(read_fd, 0, handler, lambda _exc: None)
    assert loop._timeout_s() > 0
    loop.want(read_fd, IN)
    loop.step()
    loop.step()
    assert seen == [IN, IN]
    assert loop._timeout_s() > 0, "it was withdrawn"
    loop.set_buffered(read_fd, True)
    loop.forget(read_fd)
    assert loop._timeout_s() > 0
    loop.close()


def test_a_pause_ends_in_its_time_and_with_the_descriptor(pipe):
    read_fd, write_fd = pipe
    clock, seen = FakeClock(), []
    loop = EventLoop(clock)

    def handler(_events):
        seen.append(clock.monotonic_ns())
        loop.pause_input(read_fd, 10**9)

    loop.watch(read_fd, IN, handler, lambda _exc: None)
    os.write(write_fd, b"x")
    for _ in range(3):
        loop.at("turn", clock.monotonic_ns(), lambda _now: None)  # the step does not wait
        loop.step()
    assert len(seen) == 1
    clock.advance(1.0)
    loop.step()  # the pause ends
    loop.step()
    assert len(seen) == 2
    loop.forget(read_fd)
    clock.advance(1.0)
    assert loop._timeout_s() > 1.0, "no timer is left"
    loop.close()


def test_what_was_said_of_a_descriptor_is_not_said_of_the_next_one_with_its_number() -> None:
    loop = EventLoop(FakeClock())
    pairs = [socket.socketpair() for _ in range(2)]
    heard: list[str] = []
    made: list[socket.socket] = []

    def replaces(other: int) -> None:
        """Close the other connection, whose end is in the same batch; the next one gets its number."""
        number = pairs[other][0].fileno()
        loop.forget(number)
        pairs[other][0].close()
        made.extend(socket.socketpair())
        for each in made:
            if each.fileno() == number:
                loop.watch(number, IN, lambda _events: heard.append("new"), pytest.fail)
        loop.forget(pairs[1 - other][0].fileno())

    for index in range(2):
        loop.watch(pairs[index][0].fileno(), IN, lambda _e, other=1 - index: replaces(other), pytest.fail)
        pairs[index][1].close()  # both have ended
    loop.step()
    assert made, "one of them was served"
    assert heard == []
    for each in [*made, *(pair[0] for pair in pairs)]:
        each.close()

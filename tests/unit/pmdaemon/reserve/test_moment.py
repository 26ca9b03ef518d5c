"""Moments: the order in which events were raised, whatever the clocks of the machine said."""

from __future__ import annotations

import pytest

from pmdaemon.reserve.moment import MomentOrder, Moments
from pmdaemon.runtime.clock import FakeClock


class Boot:
    """A machine between two starts of it."""

    def __init__(self, name: str = "this-boot-of-the-machine") -> None:
        self.name = name
        self.since_ns = 5_000_000_000

    def moments(self) -> Moments:
        return Moments(lambda: self.name, lambda: self.since_ns)

    def order(self, clock: FakeClock) -> MomentOrder:
        return MomentOrder(clock, lambda: self.name, lambda: self.since_ns)


def test_moments_of_two_processes_are_in_the_order_in_which_they_were_made() -> None:
    boot, clock = Boot(), FakeClock()
    one, other = boot.moments(), boot.moments()
    first = one.now()
    boot.since_ns += 1
    second = other.now()
    order = boot.order(clock)
    assert order.place(first, 9_000) < order.place(second, 1)


def test_what_has_only_a_time_is_compared_by_the_clock_as_it_is_set_now() -> None:
    boot, clock = Boot(), FakeClock()
    moment, at_us = boot.moments().now(), clock.unix_us()
    clock.step_wall(-100)
    boot.since_ns += 10_000_000_000
    clock.advance(10)
    order = boot.order(clock)
    raised_us = at_us - 100_000_000
    assert order.place_of(raised_us - 1) < order.place(moment, at_us) < order.place_of(raised_us + 1)


def test_a_former_boot_comes_first() -> None:
    former, boot, clock = Boot("another-boot"), Boot(), FakeClock()
    former.since_ns *= 1000
    order = boot.order(clock)
    assert order.place(former.moments().now(), 1 << 60) < order.place(boot.moments().now(), 1)


@pytest.mark.parametrize("moment", [None, "", 7, "x", "/5", "boot/", "boot/x", "boot/-1", ["boot/1"]])
def test_what_is_no_moment_counts_by_its_time(moment: object) -> None:
    order = Boot().order(FakeClock())
    assert order.place(moment, 7) == order.place_of(7)


def test_a_machine_that_does_not_tell_its_boots_apart_makes_no_moments() -> None:
    assert Moments(lambda: "").now() == ""

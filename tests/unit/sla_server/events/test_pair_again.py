"""When a pair that has failed is opened again."""

from __future__ import annotations

from pmdaemon.runtime.clock import FakeClock
from sla_server.events.pair import RETRY_FIRST_S, RETRY_MAX_S, PairRetry


def waited_s(retry: PairRetry, clock: FakeClock) -> int:
    """Seconds from a failure that is seen now until the pair is opened again."""
    for seconds in range(round(RETRY_MAX_S) + 2):
        if retry.is_due(is_well=False):
            return seconds
        clock.advance(1.0)
    raise AssertionError("it is never opened again")


def test_waits_double_up_to_the_longest_while_it_fails_at_once() -> None:
    clock = FakeClock()
    retry = PairRetry(clock)
    assert [waited_s(retry, clock) for _ in range(8)] == [30, 60, 120, 240, 480, 960, 1800, 1800]


def test_a_pair_that_was_well_for_long_begins_with_the_shortest_wait() -> None:
    clock = FakeClock()
    retry = PairRetry(clock)
    waits_s = [waited_s(retry, clock) for _ in range(2)]
    clock.advance(RETRY_MAX_S - 1)
    assert not retry.is_due(is_well=True)
    assert waited_s(retry, clock) == 2 * waits_s[1]  # it was not well for long enough
    clock.advance(RETRY_MAX_S)
    assert not retry.is_due(is_well=True)
    assert waited_s(retry, clock) == RETRY_FIRST_S

"""Since when a database is reached, or not: checks that end well, fail, hang and are slow."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.reach import SLOW_S, DatabaseFound, DatabaseReach, ReachState

FOUND = DatabaseFound("c1")
INTERVAL_S = 5.0


class Database:
    """What the next checks find; ``meanwhile`` is called within one."""

    def __init__(self, clock: FakeClock) -> None:
        self.is_away = False
        self.takes_s = 0.0
        self.meanwhile: Callable[[], None] = lambda: None
        self._clock = clock

    def check(self) -> DatabaseFound:
        self._clock.advance(self.takes_s)
        self.meanwhile()
        if self.is_away:
            raise DatabaseUnavailable("sla at db", "connection refused")
        return FOUND


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(clock: FakeClock) -> Database:
    return Database(clock)


@pytest.fixture
def reach(database: Database, clock: FakeClock) -> DatabaseReach:
    return DatabaseReach(database.check, clock.monotonic_ns)


def _checks(reach: DatabaseReach, clock: FakeClock, count: int) -> None:
    for _ in range(count):
        reach.probe()
        clock.advance(INTERVAL_S)


def test_before_the_first_check_nothing_is_known(reach: DatabaseReach) -> None:
    assert reach.state() == ReachState()


def test_it_is_reached_since_the_first_check_that_ended_well(reach: DatabaseReach, clock: FakeClock) -> None:
    _checks(reach, clock, 6)
    assert reach.state() == ReachState(0.0, 6 * INTERVAL_S, "", FOUND)


def test_it_is_away_since_the_first_check_that_failed_began(
    reach: DatabaseReach, database: Database, clock: FakeClock
) -> None:
    _checks(reach, clock, 2)
    database.is_away, database.takes_s = True, 1.0
    _checks(reach, clock, 3)
    state = reach.state()
    assert (state.away_s, state.reached_s) == (3 * (INTERVAL_S + 1), 0.0)
    assert state.problem == "connection refused"
    assert state.found == FOUND  # of before
    database.is_away, database.takes_s = False, 0.0
    reach.probe()
    assert reach.state() == ReachState(0.0, 0.0, "", FOUND)
    clock.advance(INTERVAL_S)
    assert reach.state().reached_s == INTERVAL_S  # from the beginning


def test_a_check_that_hangs_is_seen_while_it_does(
    reach: DatabaseReach, database: Database, clock: FakeClock
) -> None:
    _checks(reach, clock, 4)
    seen = []
    database.takes_s = 40.0
    database.meanwhile = lambda: seen.append(reach.state())
    reach.probe()
    assert [(state.away_s, state.reached_s, state.problem) for state in seen] == [(40.0, 0.0, "")]
    state = reach.state()
    assert (state.away_s, state.reached_s) == (0.0, 0.0)  # it answered in the end: steady from now on


def test_the_check_that_runs_does_not_count_against_it_at_once(
    reach: DatabaseReach, database: Database, clock: FakeClock
) -> None:
    _checks(reach, clock, 2)
    seen = []
    database.takes_s = SLOW_S - 0.1
    database.meanwhile = lambda: seen.append(reach.state())
    reach.probe()
    assert [(state.away_s, state.reached_s > 2 * INTERVAL_S) for state in seen] == [(0.0, True)]
    assert reach.state().reached_s > 2 * INTERVAL_S

"""When the acting server gives its lease up by itself: states in, decision out; the clock is a number."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Final

import pytest

from sla_server.cluster.giving_up import (
    END_S,
    MEMORY_S,
    MOST_PATIENCE_S,
    PART_REST_S,
    GivingUp,
    Offer,
    Situation,
)

LIMIT_S: Final = 30.0
WELL: Final = Situation(is_held=True, reached_s=500.0)
AWAY: Final = Situation(is_held=True, away_s=LIMIT_S, problem="connection refused")
FAILING: Final = replace(WELL, failing_s=LIMIT_S, failing="services ended 5 times: exit status 1")
STANDS_BY: Final = Situation(reached_s=500.0)
ABLE: Final = Offer("n2", LIMIT_S)


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def given_back(giving_up: GivingUp, now: Situation, at_s: float) -> float:
    """It is decided at ``at_s``, the parts end within a second, and the lease is handed back; when."""
    assert giving_up.decide(now, [ABLE], ns(at_s))
    giving_up.follow(now, ns(at_s + 0.5))
    assert not giving_up.is_due
    giving_up.follow(replace(now, has_ended=True), ns(at_s + 1))
    assert giving_up.is_due
    giving_up.handed_back(ns(at_s + 1))
    return at_s + 1


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (AWAY, "has not reached the database for 30 s (limit 30 s): connection refused"),
        (replace(AWAY, problem=""), "has not reached the database for 30 s (limit 30 s): it does not answer"),
        (
            FAILING,
            "cannot keep a part running, for 30 s (limit 30 s): services ended 5 times: exit status 1",
        ),
    ],
)
def test_it_is_given_up_to_a_server_that_could_act_and_says_why(now: Situation, said: str) -> None:
    giving_up = GivingUp(LIMIT_S)
    offers = [Offer("n3", 0.0, "it does not reach the database"), ABLE, Offer("n4", LIMIT_S - 1)]
    assert giving_up.decide(now, offers, 0)
    assert (giving_up.reason, giving_up.successor) == (said, "n2")
    assert not giving_up.decide(now, offers, 1)  # once
    assert giving_up.may_take is False


@pytest.mark.parametrize(
    "now",
    [
        WELL,
        replace(AWAY, away_s=LIMIT_S - 0.1),
        replace(FAILING, failing_s=LIMIT_S - 0.1),
        replace(AWAY, is_held=False),
        replace(FAILING, is_held=False),
    ],
)
def test_without_trouble_that_lasts_or_without_the_lease_nothing_is_given_up(now: Situation) -> None:
    giving_up = GivingUp(LIMIT_S)
    assert giving_up.trouble(now, 0) == ""
    assert not giving_up.decide(now, [ABLE], 0)
    assert giving_up.may_take
    assert giving_up.why_not() == ""


@pytest.mark.parametrize(
    "offers",
    [
        [],
        [Offer("n2", 0.0, "it does not reach the database: connection refused")],  # it is away for both
        [Offer("n2", LIMIT_S, "the schema is newer")],
        [Offer("n2", LIMIT_S - 0.1)],  # its own link comes and goes
    ],
)
def test_while_no_other_could_act_it_stays_however_long(offers: list[Offer]) -> None:
    giving_up = GivingUp(LIMIT_S)
    for second in range(0, 100_000, 5):
        assert not giving_up.decide(replace(AWAY, away_s=LIMIT_S + second), offers, ns(second))
    assert giving_up.reason == ""
    assert giving_up.may_take
    assert giving_up.decide(replace(AWAY, away_s=1e5), [ABLE], ns(1e5))  # then one can


def test_0_is_never() -> None:
    giving_up = GivingUp(0)
    assert not giving_up.decide(replace(AWAY, away_s=1e9, failing_s=1e9), [ABLE], 0)
    assert giving_up.may_take


def test_of_several_the_one_that_was_well_for_longest_is_given_it() -> None:
    giving_up = GivingUp(LIMIT_S)
    assert giving_up.decide(AWAY, [Offer("n2", 40), Offer("n3", 400), Offer("n4", 4000, "it acts")], 0)
    assert giving_up.successor == "n3"


def test_the_lease_is_handed_back_once_the_parts_have_ended_or_after_a_minute() -> None:
    giving_up = GivingUp(LIMIT_S)
    given_back(giving_up, AWAY, 0)
    assert (giving_up.reason, giving_up.is_due) == ("", False)
    hung = GivingUp(LIMIT_S)
    assert hung.decide(AWAY, [ABLE], 0)
    hung.follow(AWAY, ns(END_S - 0.1))
    assert not hung.is_due
    hung.follow(AWAY, ns(END_S))
    assert hung.is_due


def test_it_takes_none_before_it_has_reached_the_database_without_a_break() -> None:
    giving_up = GivingUp(LIMIT_S)
    at_s = given_back(giving_up, AWAY, 0)
    for reached_s in (0.0, LIMIT_S - 0.1, 0.0, 5.0):  # it comes and goes
        at_s += LIMIT_S
        giving_up.follow(replace(STANDS_BY, reached_s=reached_s), ns(at_s))
        assert not giving_up.may_take
        assert "has not reached the database for 30 s since" in giving_up.why_not()
    giving_up.follow(replace(STANDS_BY, reached_s=LIMIT_S), ns(at_s + LIMIT_S))
    assert giving_up.may_take
    assert giving_up.why_not() == ""


def test_after_trouble_with_a_part_it_takes_a_free_lease_soon_and_is_given_none_for_an_hour() -> None:
    giving_up = GivingUp(LIMIT_S)
    at_s = given_back(giving_up, FAILING, 0)
    giving_up.follow(STANDS_BY, ns(at_s + LIMIT_S - 0.1))  # it reached the database all the time
    assert not giving_up.may_take
    giving_up.follow(STANDS_BY, ns(at_s + LIMIT_S))
    assert giving_up.may_take
    assert "a part of it did not stay up" in giving_up.why_not()
    giving_up.follow(STANDS_BY, ns(at_s + PART_REST_S))
    assert giving_up.why_not() == ""


def test_each_time_it_waits_twice_as_long_to_an_hour_and_as_before_after_a_day() -> None:
    giving_up, at_s, waited = GivingUp(LIMIT_S), 0.0, []
    for _ in range(9):
        waited.append(giving_up.patience_s(ns(at_s)))
        at_s = given_back(giving_up, replace(AWAY, away_s=waited[-1]), at_s + waited[-1])
        at_s += LIMIT_S
        giving_up.follow(replace(STANDS_BY, reached_s=LIMIT_S), ns(at_s))
        assert not giving_up.decide(replace(AWAY, away_s=waited[-1] - 1), [ABLE], ns(at_s))
    assert waited == [30, 60, 120, 240, 480, 960, 1920, MOST_PATIENCE_S, MOST_PATIENCE_S]
    assert giving_up.patience_s(ns(at_s + MEMORY_S)) == LIMIT_S


def test_two_servers_with_bad_links_change_rarely_and_one_of_them_always_may_act() -> None:
    """Each loses the database whenever it acts, and reaches it while it stands by: the worst there is."""
    servers = {"n1": GivingUp(LIMIT_S), "n2": GivingUp(LIMIT_S)}
    acting, since_s, changes = "n1", 0.0, []
    for second in range(24 * 3600):
        other = "n2" if acting == "n1" else "n1"
        lasted_s = second - since_s
        away = Situation(is_held=True, away_s=lasted_s, problem="reset")
        steady = Situation(reached_s=lasted_s)
        servers[other].follow(steady, ns(second))
        offer = Offer(other, lasted_s, servers[other].why_not())
        if servers[acting].decide(away, [offer], ns(second)):
            servers[acting].follow(replace(away, has_ended=True), ns(second))
            servers[acting].handed_back(ns(second))
            assert servers[other].may_take
            acting, since_s = other, float(second)
            changes.append(second)
    assert len([second for second in changes if second < 3600]) < 12
    later = [second for second in changes if second > 3 * 3600]
    assert all(next_one - one >= 3600 for one, next_one in itertools.pairwise(later))
    assert later

"""Recurrence rules: the same occurrences as dateutil's, from a short walk."""

from __future__ import annotations

import random
from datetime import datetime, timedelta

import pytest
from dateutil.rrule import rrulestr

from sla_server.agreements.recurrence import Occurrences

START = datetime(2024, 1, 31, 2, 30)
RULES = (
    "FREQ=HOURLY;INTERVAL=7",
    "FREQ=HOURLY;INTERVAL=5;BYHOUR=1,4,20;BYDAY=MO,FR",
    "FREQ=HOURLY;BYMONTH=2;BYMONTHDAY=29",
    "FREQ=DAILY;INTERVAL=3",
    "FREQ=DAILY;INTERVAL=2;COUNT=200",
    "FREQ=DAILY;BYDAY=SU;COUNT=70",
    "FREQ=DAILY;UNTIL=20250401T023000",
    "FREQ=WEEKLY;INTERVAL=3;BYDAY=MO,SU;WKST=SU",
    "FREQ=WEEKLY;INTERVAL=2;BYDAY=TU,SA;BYSETPOS=-1",
    "FREQ=WEEKLY;COUNT=100",
    "freq=weekly;byhour=1,9",
    "FREQ=MONTHLY",
    "FREQ=MONTHLY;INTERVAL=5;COUNT=9",
    "FREQ=MONTHLY;INTERVAL=2;BYDAY=1SU;BYHOUR=0,23",
    "FREQ=MONTHLY;BYMONTHDAY=-1",
    "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-1,1",
    "FREQ=YEARLY",
    "FREQ=YEARLY;BYMONTH=2,7",
    "FREQ=YEARLY;INTERVAL=2;BYYEARDAY=1,-1",
    "FREQ=YEARLY;BYWEEKNO=1,53;BYDAY=MO",
    "FREQ=YEARLY;BYEASTER=1",
)


@pytest.mark.parametrize("rrule", RULES)
def test_occurrences_are_those_of_the_whole_rule(rrule):
    whole = list(rrulestr(rrule, dtstart=START).between(START, START + timedelta(days=3000), inc=True))
    assert whole, "a rule that never happens is refused, see check_rule"
    draw, rule = random.Random(7), Occurrences(rrule, START)
    for _ in range(60):
        first = START + timedelta(hours=draw.randrange(-500, 60_000))
        last = first + timedelta(hours=draw.choice((0, 5, 800, 9000)))
        expected = [at for at in whole if first <= at <= last]
        assert rule.between(first, last) == expected
        assert Occurrences(rrule, START).between(first, last) == expected


@pytest.mark.parametrize(
    "rrule", ["FREQ=HOURLY", "FREQ=DAILY", "FREQ=HOURLY;COUNT=1000000", "FREQ=MONTHLY;BYDAY=1SU"]
)
def test_few_occurrences_are_walked_of_a_rule_that_began_long_ago(rrule):
    rule, now = Occurrences(rrule, datetime(2000, 1, 1, 2)), datetime(2026, 11, 10, 11)
    for minute in range(3 * 24 * 60):  # three days of passes, each of which looks two days around itself
        rule.between(now + timedelta(minutes=minute, days=-1), now + timedelta(minutes=minute, days=1))
    assert rule.walked < 24 * 7


def test_a_rule_with_a_count_is_walked_once():
    rule, now = Occurrences("FREQ=DAILY;BYDAY=MO,TU;COUNT=5000", datetime(2020, 1, 1)), datetime(2026, 11, 10)
    first = rule.between(now, now + timedelta(days=7))
    walked = rule.walked
    assert rule.between(now, now + timedelta(days=7)) == first != []
    assert rule.walked == walked

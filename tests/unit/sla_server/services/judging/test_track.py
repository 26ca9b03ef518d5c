from __future__ import annotations

from dataclasses import replace
from typing import Any

from sla_server.services.judging.track import NEVER_US, RECHECK_SLICES, JudgedStream, Track
from tests.support.agreements import in_force, simple
from tests.support.services import GATEWAY, MINUTE_US, START_US

SCOPE = [JudgedStream(1, GATEWAY, 0)]
LATE_US = 30_000_000


def at(minutes: float) -> int:
    return START_US + round(minutes * MINUTE_US)


def made() -> Track:
    item = in_force(simple(), applied_us=START_US)
    return Track(item, item.agreement.judged[0])


def verdict(minute: int, state: str = "good") -> dict[str, Any]:
    return {"start_us": at(minute), "state": state, "n": 1, "missed": 0, "threshold_us": 1, "inexact": False,
            "ours": False, "failed": 0}  # fmt: skip


def due(track: Track, progress_minutes: float, now_minutes: float) -> list[int]:
    starts = track.due(SCOPE, {GATEWAY: at(progress_minutes)}, at(now_minutes), LATE_US)
    return [(start - START_US) // MINUTE_US for start in starts]


def rest(track: Track, progress: dict[str, float]) -> tuple[float, dict[str, float]] | None:
    """``waits_for`` in minutes."""
    found = track.waits_for(SCOPE, {name: at(minutes) for name, minutes in progress.items()}, LATE_US)
    if found is None:
        return None
    until_us, waits = found
    return minutes_of(until_us), {name: minutes_of(us) for name, us in waits.items()}


def minutes_of(at_us: int) -> float:
    return (at_us - START_US) / MINUTE_US


def test_the_next_slice_waits_for_its_gateway_or_until_it_is_late() -> None:
    track = made()
    assert rest(track, {GATEWAY: 0.9}) == (1.5, {GATEWAY: 1})
    assert rest(track, {GATEWAY: 1}) == (1, {})  # it is ahead of our clock
    assert due(track, 1, 1) == [0]
    assert track.record(verdict(0), frozenset())
    assert rest(track, {GATEWAY: 1}) == (2.5, {GATEWAY: 2})


def test_a_gateway_leaves_the_scope_when_its_volumes_have_moved() -> None:
    """It is silent for more than a day; another one reports."""
    progress = {"a": at(0), "b": at(2000)}
    slice_us = at(1500), at(1501)
    for at_a, at_b, late, found in (
        ("v", "v", 0, {"b"}),
        ("v w", "v", 0, {"a", "b"}),
        ("v", "w", 0, {"a", "b"}),
        ("v", "v w", 0, {"b"}),
        ("v", "v", 1600, {"a"}),  # it appears there later
    ):
        scope = [JudgedStream(1, "a", 0, volume) for volume in at_a.split()]
        scope += [JudgedStream(2, "b", at(late), volume) for volume in at_b.split()]
        assert Track.gateways(scope, progress, *slice_us) == found
    both = [JudgedStream(1, "a", 0, "v"), JudgedStream(2, "b", 0, "v")]
    assert Track.gateways(both, {}, *slice_us) == {"a", "b"}


def test_of_several_gateways_one_that_lacks_is_waited_for() -> None:
    track, scope = made(), [JudgedStream(1, "a", 0), JudgedStream(2, "b", 0), JudgedStream(3, "c", 0)]
    progress = {"a": at(1), "b": at(0.5), "c": at(1)}
    assert track.waits_for(scope, progress, LATE_US) == (at(1.5), {"b": at(1)})


def test_a_gateway_that_is_gone_for_days_is_waited_for_like_any_other() -> None:
    track = made()
    assert rest(track, {GATEWAY: -1441}) == (1.5, {GATEWAY: 1})
    assert track.waits_for([], {}, LATE_US) == (at(1.5), {})
    new = [JudgedStream(1, GATEWAY, at(3))]
    assert track.waits_for(new, {GATEWAY: at(1)}, LATE_US) == (at(1.5), {})


def test_a_version_that_ended_waits_for_its_open_slices_alone() -> None:
    item = in_force(simple(), applied_us=START_US)
    track = Track(replace(item, ended_us=at(2)), item.agreement.judged[0])
    for minute in range(2):
        track.record(verdict(minute, "no_data"), frozenset((GATEWAY,) if minute else ()))
    assert track.waits_for(SCOPE, {GATEWAY: at(1.5)}, LATE_US) == (NEVER_US, {GATEWAY: at(2)})


def test_only_newest_and_open_slices_are_remembered() -> None:
    track = made()
    for minute in range(20):
        track.record(verdict(minute), frozenset((GATEWAY,) if minute in (3, 4) else ()))
    assert [(start - START_US) // MINUTE_US for start in sorted(track.judged)] == [3, 4, 17, 18, 19]
    assert len(track.judged) == 2 + RECHECK_SLICES


def test_an_open_slice_is_due_when_its_gateway_has_passed_it_and_not_before() -> None:
    track = made()
    for minute in range(5):
        track.record(verdict(minute, "no_data"), frozenset((GATEWAY,)))
    assert due(track, 0.5, 5.2) == []
    assert rest(track, {GATEWAY: 0.5}) == (6.5, {GATEWAY: 1})
    assert due(track, 2.5, 5.3) == [0, 1]
    assert rest(track, {GATEWAY: 2.5}) is None
    assert due(track, 2.5, 5.4) == [0, 1]  # still not settled
    for minute in (0, 1):
        assert track.record(verdict(minute), frozenset())
    assert due(track, 2.5, 5.5) == []
    assert rest(track, {GATEWAY: 2.5}) == (6.5, {GATEWAY: 3})
    assert due(track, 5, 5.6) == [2, 3, 4]


def test_late_cuts_make_a_remembered_slice_due_once() -> None:
    track = made()
    for minute in range(5):
        track.record(verdict(minute), frozenset())
    track.record_late(at(0.5))  # forgotten
    assert rest(track, {GATEWAY: 5.5}) == (6.5, {GATEWAY: 6})
    track.record_late(at(3.5))
    assert rest(track, {GATEWAY: 5.5}) is None
    assert due(track, 5, 5.5) == [3]
    assert due(track, 5, 5.6) == []
    track.postpone(at(3))
    assert due(track, 5, 5.7) == [3]


def test_open_slices_beyond_the_limit_are_forgotten_oldest_first() -> None:
    track = made()
    track.most_open = 4
    for minute in range(30):
        track.record(verdict(minute, "no_data"), frozenset((GATEWAY,)))
    assert min(track.judged) == at(30 - 4 - RECHECK_SLICES)
    assert len(track.judged) == 4 + RECHECK_SLICES


def test_whether_sql_can_hold_slices_of_it() -> None:
    track = made()
    assert not track.may_have_slices(at(0.5))
    assert track.may_have_slices(at(1))

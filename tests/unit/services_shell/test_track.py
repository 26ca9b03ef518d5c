from __future__ import annotations

from typing import Any

from sla_server.services.track import RECHECK_SLICES, Stream, Track
from tests.unit.agreements.documents import in_force, simple
from tests.unit.services_shell.support import GATEWAY, MINUTE_US, START_US

SCOPE = [Stream(1, GATEWAY, 0)]
LATE_US = 30_000_000


def at(minutes: float) -> int:
    return START_US + round(minutes * MINUTE_US)


def made() -> Track:
    item = in_force(simple(), applied_us=START_US)
    return Track(item, item.agreement.judged[0])


def verdict(minute: int, state: str = "good") -> dict[str, Any]:
    return {"start_us": at(minute), "state": state, "n": 1, "missed": 0, "threshold_us": 1, "inexact": False,
            "ours": False}  # fmt: skip


def due(track: Track, progress_minutes: float, now_minutes: float) -> list[int]:
    starts = track.due(SCOPE, {GATEWAY: at(progress_minutes)}, at(now_minutes), LATE_US)
    return [(start - START_US) // MINUTE_US for start in starts]


def test_it_is_quiet_until_a_slice_has_ended_and_when_it_is_judged() -> None:
    track = made()
    assert track.quiet(at(0.9))
    assert not track.quiet(at(1))
    assert due(track, 1, 1) == [0]
    assert track.settle(verdict(0), frozenset())
    assert track.quiet(at(1.9))


def test_only_newest_and_open_slices_are_remembered() -> None:
    track = made()
    for minute in range(20):
        track.settle(verdict(minute), frozenset((GATEWAY,) if minute in (3, 4) else ()))
    assert [(start - START_US) // MINUTE_US for start in sorted(track.judged)] == [3, 4, 17, 18, 19]
    assert len(track.judged) == 2 + RECHECK_SLICES


def test_an_open_slice_is_due_when_its_gateway_has_passed_it_and_not_before() -> None:
    track = made()
    for minute in range(5):
        track.settle(verdict(minute, "no_data"), frozenset((GATEWAY,)))
    assert due(track, 0.5, 5.2) == []
    assert not track.quiet(at(5.2))
    assert due(track, 2.5, 5.3) == [0, 1]
    assert due(track, 2.5, 5.4) == [0, 1]  # still not settled
    for minute in (0, 1):
        assert track.settle(verdict(minute), frozenset())
    assert due(track, 2.5, 5.5) == []
    assert due(track, 5, 5.6) == [2, 3, 4]


def test_late_cuts_make_a_remembered_slice_due_once() -> None:
    track = made()
    for minute in range(5):
        track.settle(verdict(minute), frozenset())
    track.note_late(at(0.5))  # forgotten
    assert track.quiet(at(5.5))
    track.note_late(at(3.5))
    assert not track.quiet(at(5.5))
    assert due(track, 5, 5.5) == [3]
    assert due(track, 5, 5.6) == []
    track.postpone(at(3))
    assert due(track, 5, 5.7) == [3]


def test_open_slices_beyond_the_limit_are_forgotten_oldest_first() -> None:
    track = made()
    track.most_open = 4
    for minute in range(30):
        track.settle(verdict(minute, "no_data"), frozenset((GATEWAY,)))
    assert min(track.judged) == at(30 - 4 - RECHECK_SLICES)
    assert len(track.judged) == 4 + RECHECK_SLICES


def test_whether_sql_can_hold_slices_of_it() -> None:
    track = made()
    assert not track.may_have_slices(at(0.5))
    assert track.may_have_slices(at(1))

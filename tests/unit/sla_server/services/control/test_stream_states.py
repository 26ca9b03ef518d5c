"""What a stream that a cut leaves out says: apart, waiting, or idle."""

from __future__ import annotations

import numpy as np

from sla_server.services.control.stream_states import NO_PLANE, UNKNOWN_PLANE, Span, StreamStates

S = 1_000_000_000
ONE = np.array([0])


def span(start_s: float, end_s: float, now_s: float | None = None) -> Span:
    now_ns = round((end_s if now_s is None else now_s) * S)
    return Span(np.array([start_s * 1e6]), np.array([end_s * 1e6]), np.array([now_ns]))


class OneStream:
    def __init__(self) -> None:
        self.states = StreamStates(3.0)
        assert self.states.allot(1).tolist() == [0]

    def cut(
        self,
        end_s: float,
        arrived: int,
        completed: int,
        gauge: int,
        oldest: tuple[float, float, float] = (0, 0, 0),
        tells: bool = False,
    ) -> tuple[list[float], list[float]]:
        """Outstanding before and after: in all, reads, writes."""
        counts = (np.array([value]) for value in (arrived, completed, gauge))
        ages = np.array(oldest, dtype=float)[:, None]
        found = self.states.follow(ONE, span(end_s - 1, end_s), *counts, ages, np.array([tells]))
        return found.before[:, 0].tolist(), found.after[:, 0].tolist()

    def absent(self, start_s: float, end_s: float) -> tuple[bool, list[float]]:
        found = self.states.absent(ONE, span(start_s, end_s))
        return bool(found.says_nothing[0]), found.rates[:, 0].tolist()


def test_reads_and_writes_are_followed_and_a_flush_in_the_gauge_is_none() -> None:
    made = OneStream()
    assert made.cut(1, 10, 8, 2) == ([0, 0, 0], [2, 2, 2])
    assert made.cut(2, 10, 12, 1) == ([2, 2, 2], [0, 0, 0])  # one flush is left
    assert made.cut(3, 0, 0, 1) == ([0, 0, 0], [0, 0, 0])


def test_an_agent_that_tells_the_kinds_is_believed() -> None:
    made = OneStream()
    assert made.cut(1, 0, 0, 4, (2e6, 0, 2e6), tells=True) == ([4, 0, 1], [4, 0, 1])
    assert made.cut(2, 0, 0, 4, (0, 0, 0), tells=True) == ([4, 0, 1], [0, 0, 0])


def test_of_a_first_cut_what_arrived_in_it_was_not_outstanding_before() -> None:
    for tells, ages in ((False, (0, 0, 0)), (True, (5_000, 5_000, 0))):
        made = OneStream()
        assert made.cut(1, 1, 0, 1, ages, tells)[0] == [0, 0, 0]
        assert made.cut(2, 0, 0, 1, ages, tells)[0][0] == 1
        made.states.resync(ONE)
        assert made.cut(4, 1, 0, 1, ages, tells)[0] == [0, 0, 0]
        made.states.resync(ONE)
        assert made.cut(6, 1, 0, 2, (3e6, 3e6, 0), tells)[0][0] == 1


def test_a_stream_of_a_plane_that_is_missing_says_nothing() -> None:
    made, lacks = OneStream(), np.array([True])
    made.cut(10, 100, 100, 0)
    for plane, is_missing in ((UNKNOWN_PLANE, True), (NO_PLANE, False), (100, False)):
        made.states.plane[0] = plane
        made.states.set_missing(100, False)
        assert made.states.absent(ONE, span(11, 12), lacks).says_nothing[0] == is_missing
    made.states.set_missing(100, True)
    assert made.states.absent(ONE, span(11, 12), lacks).says_nothing[0]
    assert not made.states.absent(ONE, span(11, 12)).says_nothing[0]


def test_a_stream_is_apart_only_while_its_own_cut_reaches_into_the_time() -> None:
    made = OneStream()
    made.cut(10, 100, 80, 0)
    assert made.absent(9.5, 10.5) == (True, [100, 80])
    assert made.absent(9.95, 10.95) == (False, [0, 0])  # planes of one cut are asked within milliseconds
    assert made.absent(10, 11) == (False, [0, 0])
    assert made.absent(2, 3) == (False, [0, 0])  # the clock was put back


def test_what_waits_is_believed_for_three_intervals() -> None:
    made = OneStream()
    made.cut(10, 20, 0, 20)
    assert made.absent(12, 13)[0]
    assert not made.absent(13, 14)[0]
    assert made.cut(15, 0, 0, 20) == ([20, 20, 20], [20, 20, 20])  # forgotten, so the gauge says it again


def test_columns_grow() -> None:
    states = StreamStates(3.0)
    assert states.allot(200).tolist() == list(range(200))
    assert (states.waiting[:, :200] == -1).all()

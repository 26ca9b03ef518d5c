"""Cuts of one gateway that are kept apart: of two planes at one time, or of one that comes late.

A cut that has only another plane's streams, or leaves one out for a reason that is not known, says nothing of
what is outstanding, and lowers no rate.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest

from sla_server.services.control.live_state import LiveState
from tests.support.worlds import KEY, A, B, Feeder, controller, cut, events_of, promise, volume_class

GOOD = {"gold": (100, 2.0)}


class Planes(Feeder):
    """A gateway whose cuts are fed one by one, several a second."""

    def __init__(self, *volumes: str, **over: Any) -> None:
        made = controller((promise(**over),), (volume_class(),), "observe")
        super().__init__(made, (A, volumes or ("gold",)))
        self.seq = 0

    def cut(self, ios: dict[str, tuple[int, float]], end_s: float, duration_s: float, **more: Any) -> None:
        self.seq += 1
        made = cut(A, self.seq, ios, end_s=end_s, duration_s=duration_s, **more)
        self.controller.add_cut(made, self.unix_us, 0, False, self.now_ns)

    def tick(self) -> list[str]:
        events = events_of(self.controller.tick(self.now_ns, self.unix_us))
        return [event.kind for event in events if event.element == "sla"]

    @property
    def live(self) -> LiveState:
        return self.controller.live[KEY]

    def figures(self) -> tuple[float, float, float]:
        """I/Os a second: of the volume in the view, offered to the promise, of control."""
        view = self.controller.snapshot(0)
        smoothed = self.controller.tables[A].use["gold"].ops_per_s
        return view["volumes"][0]["iops"], view["slas"][0]["offered_iops"], smoothed


def hang(made: Planes, second: int, new_agent: bool = True, **times: float) -> None:
    """16 I/Os have been outstanding since second 0."""
    more: dict[str, Any] = {"waiting": {"gold": (16, 1000.0 * second + 500)}, "old_agent": not new_agent}
    if second == 0:
        more |= {"arriving": {"gold": 16}, "overdue": {"gold": (16, 0)}}
    made.cut({"gold": (0, 0.0)}, **{"end_s": made.second, "duration_s": 1.0, **times}, **more)


@pytest.mark.parametrize("new_agent", [False, True])
@pytest.mark.parametrize("left_out", [None, 0, 1, 2, 5])
def test_a_hang_is_seen_though_one_cut_leaves_the_stream_out(left_out: int | None, new_agent: bool) -> None:
    made, states = Planes(), list[str]()
    for _ in range(2):
        made.second += 1
        made.cut(GOOD, made.second, 1.0)
        made.tick()
    for second in range(20):
        made.second += 1
        hang(made, second, new_agent, end_s=made.second - 0.1, duration_s=0.9)
        if second == left_out:
            made.cut({}, made.second, 0.1)
        made.tick()
        states.append(made.live.state)
    assert [state for state, _ in groupby(states)] in (["violating"], ["ok", "violating"])
    assert states.count("violating") >= 17


def test_a_hang_is_seen_though_another_planes_cuts_come_between() -> None:
    made, kinds = Planes(), list[str]()
    for second in range(20):
        made.second += 1
        hang(made, second, end_s=made.second - 0.5, duration_s=0.5)
        made.cut({}, made.second, 0.5)
        kinds += made.tick()
    assert kinds == ["violation-opened"]
    assert made.live.state == "violating"


def test_what_was_outstanding_is_forgotten_after_three_intervals_without_news() -> None:
    made = Planes()
    made.second += 1
    made.cut(GOOD, made.second, 1.0)
    made.tick()
    for second in range(3):
        made.second += 1
        hang(made, second)
        made.tick()
    assert made.live.state == "violating"
    for _ in range(10):  # its client left, or its plane is gone
        made.second += 1
        made.cut({}, made.second, 1.0)
        made.tick()
    assert made.live.state == "idle"


def test_a_hang_of_the_backend_is_seen_though_every_second_cut_is_another_planes() -> None:
    made = Planes()
    for second in range(6):
        made.second += 1
        hang(made, second, end_s=made.second - 0.5, duration_s=0.5)
        made.cut({}, made.second, 0.5)
        made.tick()
    assert made.controller.faults.kind_of("disk") == "hangs"
    made.second += 1
    made.cut(GOOD, made.second, 1.0)
    made.tick()
    assert made.controller.tables[A].use["gold"].inflight == 0


@pytest.mark.parametrize("planes", [1, 2, 5])
@pytest.mark.parametrize("shift_s", [0.2, 0.5, 0.0])
def test_cuts_of_other_planes_lower_no_rate(planes: int, shift_s: float) -> None:
    made = Planes()
    for _ in range(12):
        made.second += 1
        made.cut(GOOD, made.second - shift_s, 1.0)
        for _ in range(planes - 1):
            made.cut({}, made.second, 1.0)
        made.tick()
    assert made.figures() == (100.0, 100.0, pytest.approx(100, rel=0.01))


def test_a_cut_that_comes_late_lowers_no_rate() -> None:
    """A plane is stalled for three seconds, and hands over all of them at once."""
    made = Planes("gold", "other")
    for _ in range(12):
        made.second += 1
        made.cut({**GOOD, "other": (50, 2.0)}, made.second, 1.0)
        made.tick()
    for _ in range(3):
        made.second += 1
        made.cut({"other": (50, 2.0)}, made.second, 1.0)
        made.tick()
    made.cut({"gold": (300, 2.0)}, made.second, 3.0)
    made.tick()
    assert made.figures() == (100.0, 100.0, pytest.approx(100, rel=0.01))


def test_an_idle_volume_is_idle_at_once() -> None:
    made = Planes("gold", "other")
    for _ in range(4):
        made.second += 1
        made.cut({**GOOD, "other": (50, 2.0)}, made.second, 1.0)
        made.tick()
    made.second += 1
    made.cut({"other": (50, 2.0)}, made.second, 1.0)
    assert made.controller.snapshot(0)["volumes"][0]["iops"] == pytest.approx(200 / 3, abs=0.1)
    assert made.controller.tables[A].use["gold"].last_ops_per_s == 0


@pytest.mark.parametrize("shift_s", [0.5, 0.3])
def test_a_promise_over_two_planes_sums_their_rates(shift_s: float) -> None:
    made = Planes("gold", "gold2", volumes=("gold*",))
    for _ in range(6):
        made.second += 1
        made.cut(GOOD, made.second - shift_s, 1.0)
        made.cut({"gold2": (60, 2.0)}, made.second, 1.0)
        made.tick()
    assert made.live.signal.offered_iops == pytest.approx(160)


def test_a_volume_that_hangs_beside_one_that_completes_breaks_their_promise_after_five_seconds() -> None:
    """As if one plane had both: what is overdue counts once; but no stream may hang for so long."""
    made, states = Planes("gold", "gold2", volumes=("gold*",)), list[str]()
    for second in range(9):
        made.second += 1
        hang(made, second, end_s=made.second - 0.3)
        made.cut({"gold2": (500, 2.0)}, made.second, 1.0)
        made.tick()
        states.append(made.live.state)
    assert [(state, len(list(each))) for state, each in groupby(states)] == [("ok", 6), ("violating", 3)]
    signal = made.live.signal
    assert (signal.stalled, signal.is_partial, signal.latency_us < 12_000) == (3, True, True)
    assert "some I/O did not complete for 8.5 s though other I/O did" in made.live._figures_text(
        signal, signal.of_over
    )


def test_a_clock_that_is_put_back_neither_hides_idleness_nor_stops_time() -> None:
    made = Planes()
    made.second = 5000
    for _ in range(3):
        made.second += 1
        made.cut(GOOD, made.second, 1.0)
        made.tick()
    back_s, offset_us = 3600, 3_600_000_000
    for second in range(16):
        made.second += 1
        made.seq += 1
        each = cut(A, made.seq, {"gold": (1, 2.0)} if second < 6 else {}, end_s=made.second - back_s)
        made.controller.add_cut(each, made.unix_us, offset_us, False, made.now_ns)
        made.tick()
    assert made.live.state == "idle"


@pytest.mark.parametrize("io", ["read", "write"])
def test_a_promise_about_one_kind_is_broken_by_a_hang_of_that_kind_alone(io: str) -> None:
    """Reads go on while writes hang: of a promise about reads nothing hangs."""
    made = Planes(io=io)
    for second in range(8):
        made.second += 1
        made.cut(
            GOOD,  # all of them are reads
            made.second,
            1.0,
            waiting={"gold": (8, 0.0)},
            arriving={"gold": 8 if second == 0 else 0},
            kinds={"gold": (0.0, 1000.0 * second + 900)},
        )
        made.tick()
    signal = made.live.signal
    assert (made.live.state, signal.stalled > 0) == (("violating", True) if io == "write" else ("ok", False))


def test_a_trim_is_no_stall_of_an_agent_that_tells_the_kinds() -> None:
    made = Planes()
    made.second += 1
    made.cut(GOOD, made.second, 1.0, waiting={"gold": (1, 0.0)}, kinds={"gold": (5.0, 0.0)})
    made.tick()
    for _ in range(2):  # also when a cut was missed, so that the gauges are all there is
        made.seq += 1
        for _ in range(4):
            made.second += 1
            made.cut({"gold": (0, 0.0)}, made.second, 1.0, waiting={"gold": (1, 0.0)}, kinds={"gold": (0, 0)})
            made.tick()
    assert made.live.signal.stalled == 0
    assert made.controller.faults.kind_of("disk") == ""


def test_io_that_no_threshold_is_compared_with_is_a_miss_and_inexact() -> None:
    """The gateway has not taken the thresholds yet: nothing completes, and no entry says that it is late."""
    made = Planes()
    made.second += 1
    made.cut(GOOD, made.second, 1.0)
    made.second += 1
    waits = {"waiting": {"gold": (30, 900.0)}, "arriving": {"gold": 30}, "thresholds_us": ()}
    made.cut({"gold": (0, 0.0)}, made.second, 1.0, **waits)
    made.tick()
    signal = made.live.signal
    assert (signal.windows, signal.inexact) == (2, True)
    assert signal.u == pytest.approx(30 / 130 / 0.05)


def test_a_source_that_measures_no_latency_makes_no_promise_on_its_backend() -> None:
    """Else what was never measured would keep the neighbours of another promise at their first cut."""
    host = {"volume": "bare", "backend": "disk", "source": "host"}
    made = controller((promise(), promise("bare")), (volume_class(),))
    made.gateway_up(B, "B", [host], 0)
    made.add_streams(B, [{"id": 77, "volume": "bare", "client": "c", "backend": "disk"}])
    world = Feeder(made, (A, ("gold", "greedy")))
    assert [scope.promise.sla for scope in made.scopes.on_backend("disk")] == ["gold"]
    late, gen = {"gold": (100, 30.0), "greedy": (400, 30.0)}, 0
    for second in range(90):
        ios = late if second < 4 else {"gold": (100, 2.0), "greedy": (400, 2.0)}
        for decision in world.step((A, ios, gen)):
            gen = decision.gen if hasattr(decision, "caps") else gen
    control = made.loops.controls["disk"]
    assert not control.active or control.allowed > control.start / 2


def test_windows_do_not_wait_for_a_source_that_measures_no_latency() -> None:
    host = {"volume": "gold", "backend": "disk", "source": "host"}
    made = controller((promise(),), (volume_class(),), "observe")
    made.gateway_up(B, "B", [host], 0)
    world = Feeder(made, (A, ("gold",)))
    made.add_streams(B, [{"id": 77, "volume": "gold", "client": "c", "backend": "disk"}])
    for _ in range(3):
        world.step((A, GOOD, 0), (B, {}, 0))
    assert made.live[KEY].signal.windows == 3

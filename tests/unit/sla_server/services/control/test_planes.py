"""Data planes that stop: their streams have no data, those of the others go on."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from tests.support.worlds import KEY, A, B, Feeder, controller, cut, events_of, exports, promise, volume_class

FAST, SLOW = (100, 2.0), (100, 30.0)
IDLE = (0, 0.0)


class TwoPlanes(Feeder):
    """nbd-0 has gold, nbd-1 has other; the host has none. An agent of before does not say whose rows are."""

    def __init__(self, is_old: bool = False, calm_s: float = 0, **over: Any) -> None:
        made = controller((promise(**over),), (volume_class(),), "observe", episode_calm_s=calm_s)
        super().__init__(made, (A, ("gold", "other")))
        self.seq, self.is_old, self.marks = 0, is_old, {"nbd-0": 1, "nbd-1": 1}
        self.states: list[str] = []

    def second_passes(
        self, gold: tuple[int, float], planes: Sequence[str] = ("nbd-0", "nbd-1"), **more: Any
    ) -> list[str]:
        """A cut of these planes; kinds of events of the promise."""
        self.second, self.seq = self.second + 1, self.seq + 1
        ios = {"gold": gold, "other": FAST}
        of_plane = {"nbd-0": "gold", "nbd-7": "gold", "nbd-1": "other"}
        names = [name for name in ios if name in {of_plane[plane] for plane in planes}]
        names = [name for name in names if ios[name] != IDLE]
        self.marks |= dict.fromkeys(planes, self.seq + 1)
        extra: dict[str, Any] = {"dp": dict(self.marks)}
        if len(planes) > 1 and not self.is_old:
            rows = {plane: [name == of_plane[plane] for name in names] for plane in planes}
            extra["of"] = {p: np.packbits(bits, bitorder="little").tobytes() for p, bits in rows.items()}
        each = cut(A, self.seq, {name: ios[name] for name in names}, end_s=self.second, **more)
        self.controller.add_cut(dataclasses.replace(each, extra=extra), self.unix_us, 0, False, self.now_ns)
        found = events_of(self.controller.tick(self.now_ns, self.unix_us))
        self.states.append(self.controller.live[KEY].state)
        return [event.kind for event in found if event.element == "sla"]

    def reason(self) -> str:
        (row,) = self.controller.snapshot(0)["slas"]
        return str(row["reason"])

    def told(self) -> list[tuple[str, int]]:
        return [(state, len(list(each))) for state, each in groupby(self.states)]


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_promise_whose_plane_has_stopped_has_no_data_and_says_why(is_old: bool, waits: bool) -> None:
    made = TwoPlanes(is_old)
    more: dict[str, Any] = {"waiting": {"gold": (8, 400)}} if waits else {}
    for _ in range(5):
        made.second_passes(FAST, **more)
    for _ in range(15):
        assert made.second_passes(FAST, ("nbd-1",)) == []
    assert made.told() == [("ok", 8), ("no-data", 12)]
    assert (
        made.reason() == f"data plane nbd-0 of gateway {A[:4]} does not answer: no statistics of it for 15 s"
    )
    made.second_passes(FAST)
    made.second_passes(FAST)
    assert (made.states[-1], made.reason()) == ("ok", "")


@pytest.mark.parametrize("is_old", [False, True])
def test_what_cuts_with_all_planes_say_is_believed_until_one_is_missing_again(is_old: bool) -> None:
    """The second of two cuts of all planes is not looked at plane by plane; it counts all the same."""
    made = TwoPlanes(is_old)
    for pause in (1, 2, 3, 6):
        for _ in range(pause):
            made.second_passes(FAST)
        for _ in range(15):
            made.second_passes(FAST, ("nbd-1",))
        assert made.reason().endswith("no statistics of it for 15 s")


def test_an_open_violation_stays_open_while_its_plane_has_stopped() -> None:
    made = TwoPlanes()
    kinds = [kind for _ in range(4) for kind in made.second_passes(SLOW)]
    kinds += [kind for _ in range(30) for kind in made.second_passes(SLOW, ("nbd-1",))]
    assert (kinds, made.states[-1]) == (["violation-opened"], "no-data")
    kinds = [kind for _ in range(5) for kind in made.second_passes(FAST)]
    assert kinds == ["violation-closed"]


@pytest.mark.parametrize("is_old", [False, True])
def test_a_volume_without_io_is_idle_as_long_as_its_plane_is_there(is_old: bool) -> None:
    made = TwoPlanes(is_old)
    for _ in range(3):
        made.second_passes(FAST)
    for _ in range(10):
        made.second_passes(IDLE)
    assert made.told() == [("ok", 7), ("idle", 6)]
    for _ in range(5):
        made.second_passes(IDLE, ("nbd-1",))
    assert made.states[-1] == "no-data"


def test_a_stream_that_is_known_by_its_rows_is_idle_though_another_plane_has_stopped() -> None:
    made = TwoPlanes()
    for _ in range(3):
        made.second_passes(FAST)
    for _ in range(10):
        made.second_passes(IDLE, ("nbd-0",))
    assert made.told() == [("ok", 7), ("idle", 6)]


def test_planes_whose_cuts_are_kept_apart_are_not_missing() -> None:
    made = TwoPlanes()
    for turn in range(20):
        made.second_passes(FAST, (("nbd-0",), ("nbd-1",))[turn % 2])
    assert set(made.states[2:]) == {"ok"}


def test_a_plane_that_is_removed_and_a_volume_that_is_no_longer_exported_are_missed_by_none() -> None:
    for removes in (True, False):
        made = TwoPlanes()
        for _ in range(3):
            made.second_passes(FAST)
        if removes:
            del made.marks["nbd-0"]
        else:
            made.controller.gateway_up(A, "A", exports("other"), made.now_ns)
        for _ in range(10):
            made.second_passes(FAST, ("nbd-1",))
        assert made.states[-1] == "idle"


def test_windows_of_two_gateways_do_not_wait_for_the_one_whose_plane_has_stopped() -> None:
    made = TwoPlanes()
    made.controller.gateway_up(B, "B", exports("gold"), made.now_ns)
    made.controller.add_streams(B, [{"id": 77, "volume": "gold", "client": "c", "backend": "disk"}])
    row, closed = made.controller.live[KEY].row, []
    assert row is not None
    for second in range(20):
        each = cut(B, second + 1, {"gold": FAST})
        counters = each.counters.copy()
        counters[0] = 77
        renamed = dataclasses.replace(each, counters=counters)
        made.controller.add_cut(renamed, made.unix_us + 1_000_000, 0, False, made.now_ns + 1_000_000_000)
        before = made.controller.scopes.table.windows.version[row.row]
        made.second_passes(FAST, ("nbd-0", "nbd-1") if second < 5 else ("nbd-1",))
        closed.append(bool(made.controller.scopes.table.windows.version[row.row] > before))
    assert all(closed[-8:])
    assert made.states[-1] == "no-data"


def test_a_promise_over_two_planes_has_no_data_while_one_of_them_has_stopped() -> None:
    """What the other one measures is no proof; a violation that it measures is one."""
    made = TwoPlanes(volumes=("gold", "other"))
    for _ in range(5):
        made.second_passes(FAST)
    for _ in range(10):
        assert made.second_passes(FAST, ("nbd-1",)) == []
    assert made.told() == [("ok", 8), ("no-data", 7)]
    assert made.reason().startswith("data plane nbd-0 of gateway")
    made.second_passes(FAST)
    assert (made.states[-1], made.reason()) == ("ok", "")


def test_a_violation_of_one_plane_is_not_closed_by_what_the_other_one_measures() -> None:
    made = TwoPlanes(calm_s=5, volumes=("gold", "other"))
    kinds = [kind for _ in range(5) for kind in made.second_passes((900, 30.0))]
    kinds += [kind for _ in range(60) for kind in made.second_passes(FAST, ("nbd-1",))]
    assert kinds == ["violation-opened"]
    assert made.told()[-1][0] == "no-data"
    assert [kind for _ in range(8) for kind in made.second_passes(FAST)] == ["violation-closed"]


@pytest.mark.parametrize("is_old", [False, True])
def test_an_idle_stream_of_a_plane_with_another_name_has_no_data_while_any_has_stopped(is_old: bool) -> None:
    made = TwoPlanes(is_old)
    for _ in range(3):
        made.second_passes(FAST)
    made.second_passes(IDLE)
    made.marks["nbd-7"] = made.marks.pop("nbd-0")
    for _ in range(10):
        made.second_passes(IDLE, ("nbd-1", "nbd-7"))
    assert made.states[-1] == "idle"
    for _ in range(5):
        made.second_passes(IDLE, ("nbd-1",))
    assert made.states[-1] == "no-data"


@pytest.mark.parametrize("dp", [None, 3, {}, {"nbd-0": "x", 7: 1}, {"a b": 1}])
def test_what_an_agent_says_of_planes_and_cannot_be_is_left_out(dp: Any) -> None:
    made = TwoPlanes()
    for second in range(1, 4):
        each = dataclasses.replace(cut(A, second, {"gold": FAST}), extra={"dp": dp, "of": {"x": 3}})
        made.second = second
        made.controller.add_cut(each, made.unix_us, 0, False, made.now_ns)
        made.controller.tick(made.now_ns, made.unix_us)
    assert made.controller.live[KEY].state == "ok"

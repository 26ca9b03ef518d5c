"""The poll schedule: a pure phase, no drift, no burst."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.poller.schedule import Schedule, due_after_ns, phase_ns

SECOND = 10**9


@given(st.uuids().map(str), st.integers(1, 60 * SECOND))
def test_phase_is_pure_and_within_the_interval(gateway_id: str, interval_ns: int) -> None:
    assert 0 <= phase_ns(gateway_id, interval_ns) < interval_ns
    assert phase_ns(gateway_id, interval_ns) == phase_ns(gateway_id, interval_ns)


@given(st.integers(0, 10**15), st.integers(1, 10**11), st.data())
def test_due_is_the_first_time_of_its_phase_behind_now(
    now_ns: int, interval_ns: int, data: st.DataObject
) -> None:
    phase = data.draw(st.integers(0, interval_ns - 1))
    due_ns = due_after_ns(now_ns, phase, interval_ns)
    assert due_ns % interval_ns == phase
    assert now_ns < due_ns <= now_ns + interval_ns


def test_phases_spread() -> None:
    phases = [phase_ns(f"gateway-{index}", SECOND) * 10 // SECOND for index in range(1000)]
    counts = [phases.count(tenth) for tenth in range(10)]
    assert min(counts) > 60
    assert max(counts) < 140


def test_lateness_never_shifts_the_schedule() -> None:
    schedule = Schedule(SECOND)
    schedule.add("a", 0)
    phase = phase_ns("a", SECOND)
    now_ns = 0
    for _ in range(20):
        due_ns = schedule.next_due_ns()
        assert due_ns is not None
        assert due_ns % SECOND == phase
        now_ns = due_ns + SECOND // 3  # noticed late every time
        assert schedule.take_due(now_ns) == ["a"]
    assert schedule.missed_ticks == 0


def test_missed_ticks_are_skipped_and_counted() -> None:
    schedule = Schedule(SECOND)
    schedule.add("a", 0)
    due_ns = schedule.next_due_ns()
    assert due_ns is not None
    assert schedule.take_due(due_ns + 5 * SECOND + 1) == ["a"]
    assert schedule.missed_ticks == 5
    assert schedule.take_due(due_ns + 5 * SECOND + 2) == []


def test_add_is_idempotent_and_remove_final() -> None:
    schedule = Schedule(SECOND)
    schedule.add("a", 0)
    schedule.add("a", 5 * SECOND)
    assert len(schedule) == 1
    assert schedule.take_due(20 * SECOND) == ["a"]
    schedule.remove("a")
    assert schedule.next_due_ns() is None
    schedule.add("a", 20 * SECOND)
    schedule.remove("a")
    schedule.add("a", 30 * SECOND)
    assert schedule.take_due(60 * SECOND) == ["a"]


def test_due_gateways_come_in_order_of_their_times() -> None:
    schedule = Schedule(SECOND)
    names = [f"g{index}" for index in range(50)]
    for name in names:
        schedule.add(name, 0)
    assert schedule.take_due(2 * SECOND) == sorted(
        names, key=lambda name: due_after_ns(0, phase_ns(name, SECOND), SECOND)
    )


def test_interval_must_be_positive() -> None:
    with pytest.raises(ValueError, match="interval"):
        Schedule(0)


class _Model:
    """Each gateway with its next due time, looked at one by one."""

    def __init__(self) -> None:
        self.due_ns: dict[str, int] = {}
        self.missed = 0

    def add(self, name: str, now_ns: int, interval_ns: int) -> None:
        if name not in self.due_ns:
            self.due_ns[name] = due_after_ns(now_ns, phase_ns(name, interval_ns), interval_ns)

    def take(self, now_ns: int, interval_ns: int) -> list[tuple[int, str]]:
        taken = sorted((at_ns, name) for name, at_ns in self.due_ns.items() if at_ns <= now_ns)
        for at_ns, name in taken:
            self.due_ns[name] = due_after_ns(now_ns, at_ns, interval_ns)
            self.missed += (now_ns - at_ns) // interval_ns
        return taken


@given(
    interval_ns=st.sampled_from([4, 10, SECOND]),  # with 4, many have the same phase
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "take", "take"]), st.integers(0, 11), st.integers(0, 40)),
        max_size=60,
    ),
)
def test_ring_does_what_a_look_at_each_gateway_would_do(
    interval_ns: int, steps: list[tuple[str, int, int]]
) -> None:
    schedule, model = Schedule(interval_ns), _Model()
    now_ns = 5
    for what, number, tenths in steps:
        now_ns += tenths * interval_ns // 10
        name = f"g{number}"
        if what == "add":
            schedule.add(name, now_ns)
            model.add(name, now_ns, interval_ns)
        elif what == "remove":
            schedule.remove(name)
            model.due_ns.pop(name, None)
        else:
            expected = model.take(now_ns, interval_ns)
            taken = schedule.take_due(now_ns)
            assert sorted(taken) == sorted(name for _, name in expected)
            times = {name: at_ns for at_ns, name in expected}
            assert [times[name] for name in taken] == sorted(times.values())
        assert schedule.next_due_ns() == min(model.due_ns.values(), default=None)
        assert schedule.missed_ticks == model.missed
        assert len(schedule) == len(model.due_ns)

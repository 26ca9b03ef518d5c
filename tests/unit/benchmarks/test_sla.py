"""What ``bench-sla`` puts into its rows, and what fio's log says."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from benchmarks import harness, sla, sla_simulated
from benchmarks.fio_load import FioLoad, ios_of
from benchmarks.sla_scenarios import PROMISES_MS, SCENARIOS, Client, matrix
from tests.support.load import Load, Timed


def results() -> dict:
    """Each scenario, back after 2 s; of polls of 250 ms after 1 s."""
    found = {}
    for scenario in SCENARIOS:
        back_s = 1.0 if scenario.interval_s < 1 else 2.0
        made = sla.Result(4.0, 100.0, 90.0, 0, [back_s], 0.0, 88.0, 1.0, modest_ratio=1.0, idle_ratio=1.0)
        if scenario.has_fault:
            made.fault = {"shown_after_windows": 2.5, "throttled": False, "slices": ["bad", "bad"]}
        found[scenario.name] = scenario, made
    return found


def test_all_scenarios_together_fill_every_row():
    made = sla.values(results())
    assert {row["key"] for row in harness.rows_for("sla", made) if row["met"] is not True} == set()
    assert (made["restore_median_s"], made["restore_quick_s"]) == (2.0, 1.0)


@pytest.mark.parametrize(("event", "name"), [("hangs", "hang"), ("fails", "fail")])
def test_a_fault_that_is_never_shown_or_throttled_for_is_missed(event, name):
    found = results()
    _, made = next(each for each in found.values() if each[0].event == event)
    made.fault = {"shown_after_windows": None, "throttled": True, "slices": ["good", "bad"]}
    missed = {row["key"] for row in harness.rows_for("sla", sla.values(found)) if not row["met"]}
    assert missed == {f"{name}_windows", f"{name}_throttled", f"{name}_bad_slices_ratio"}


def test_ios_of_a_log_of_fio_are_on_the_monotonic_clock():
    (io,) = ios_of("1700000000250, 50000000, 0, 4096, 8192, 0\n", 1_699_999_000.0)
    assert (io.due_s, io.end_s) == (pytest.approx(1000.2), pytest.approx(1000.25))
    assert ios_of("", 0.0) == []


def test_fio_is_given_the_export_of_one_client(tmp_path):
    command = FioLoad(tmp_path / "a.nbd", "erp-db@batch", 1, 32).command(tmp_path)
    assert f"--uri=nbd+unix:///erp-db%40batch?socket={tmp_path}/a.nbd" in command


@pytest.mark.parametrize(("capped_iops", "ratio"), [(0, 1.0), (90, 0.9)])
def test_neighbours_that_are_left_alone_are_compared_with_the_same_storage_without_control(
    monkeypatch: pytest.MonkeyPatch, capped_iops: int, ratio: float
) -> None:
    """Their free rate beside a victim is lower: a cap that stayed in force would not show against it."""
    clock_s, mode = 1000.0, "enforce"
    load = FioLoad(Path("a.nbd"), "batch", 1, 32)

    async def sleep(seconds: float) -> None:
        nonlocal clock_s
        iops = capped_iops if capped_iops and mode == "enforce" else 100
        load.done += [Timed(clock_s + at / iops, clock_s + at / iops) for at in range(round(seconds * iops))]
        clock_s += seconds

    @contextlib.asynccontextmanager
    async def loads(_clients: object) -> AsyncIterator[list[FioLoad]]:
        yield [load]

    async def command(*words: str) -> None:
        nonlocal mode
        mode = words[1]

    async def no_caps() -> dict[str, None]:
        return {"batch": None}

    run = sla.Run(SCENARIOS[0], None, 40.0)
    run.result.free_iops = 80.0
    for name, made in (("_loads", loads), ("_sla", command), ("_sample", no_caps)):
        monkeypatch.setattr(run, name, made)
    monkeypatch.setattr(sla.asyncio, "sleep", sleep)
    monkeypatch.setattr(sla.time, "monotonic", lambda: clock_s)
    step = run._idle()
    with pytest.raises(StopIteration):
        step.send(None)
    assert (mode, run.result.idle_ratio) == ("observe", pytest.approx(ratio, abs=0.01))


@pytest.mark.parametrize(("capped_iops", "ratio", "caps"), [(None, 1.0, 0), (30.0, 0.5, 20)])
def test_a_cap_on_neighbours_that_ask_for_little_shows(
    monkeypatch: pytest.MonkeyPatch, capped_iops: float | None, ratio: float, caps: int
) -> None:
    clock_s = 1000.0
    load = Load(Path("a.nbd"), "batch", 1, 60.0)

    async def sleep(seconds: float) -> None:
        nonlocal clock_s
        due_s = [clock_s + at / 60 for at in range(round(seconds * 60))]
        takes_s = 0.5 if clock_s > 1006 else 0.01  # more are under way at the end than at the beginning
        load.done += [Timed(at_s, at_s + takes_s) for at_s in due_s]
        if capped_iops:  # every second I/O is held back for longer than the span
            load.done[1::2] = [io._replace(end_s=1100.0) for io in load.done[1::2]]
        clock_s += seconds

    @contextlib.asynccontextmanager
    async def loads(clients: Iterable[Client]) -> AsyncIterator[list[Load]]:
        assert [client.rate_iops for client in clients] == [60.0]
        yield [load]

    async def sample() -> dict[str, float | None]:
        return {"batch": capped_iops}

    run = sla.Run(SCENARIOS[0], None, 40.0)
    monkeypatch.setattr(run, "_loads", loads)
    monkeypatch.setattr(run, "_sample", sample)
    monkeypatch.setattr(sla.asyncio, "sleep", sleep)
    monkeypatch.setattr(sla.time, "monotonic", lambda: clock_s)
    step = run._modest()
    with pytest.raises(StopIteration):
        step.send(None)
    assert run.result.modest_ratio == pytest.approx(ratio, abs=0.02)
    assert run.result.modest_throttles >= caps
    assert bool(run.result.modest_throttles) is bool(caps)


@pytest.mark.parametrize("event", ["hangs", "fails"])
def test_on_the_simulator_a_fault_is_shown_within_three_windows_and_nobody_is_throttled_for_it(event):
    scenario = next(each for each in SCENARIOS if each.event == event)
    found = sla_simulated.fault_of(scenario, 15.0, sla.agreements(scenario))
    assert found["shown_after_windows"] <= 3
    assert not found["throttled"]
    assert found["slices"] in ([{"bad": 2}], [{"bad": 3}])


def test_each_scenario_is_had_on_each_backend_but_where_that_cannot_be():
    found = {scenario.name: (scenario, problem) for scenario, problem in matrix((), list(PROMISES_MS))}
    assert len(found) == len(SCENARIOS) * len(PROMISES_MS)
    left_out = {name for name, (_, problem) in found.items() if problem}
    assert left_out == {
        "nbdkit@modelled", "nbdkit@direct", "direct@modelled", "direct@nbdkit", "slower@nbdkit",
        "slower@direct",
    }  # fmt: skip
    made, _ = found["hangs@nbdkit"]
    assert (made.event, made.backend, made.promise_ms, made.has_goals) == ("hangs", "nbdkit", 20.0, False)
    assert found["hangs"][0].has_goals
    assert [scenario for scenario, _ in matrix((), ())] == list(SCENARIOS)
    assert [scenario.name for scenario, _ in matrix(["many"], ["direct"])] == ["many@direct"]

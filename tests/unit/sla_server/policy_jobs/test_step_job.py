"""Jobs of single steps: the rows of their runs, what they say, which of them are one process."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pyarrow as pa
import pytest

from sla_server.errors import JobRunning
from sla_server.policy_jobs import compute, grouped, step_job
from sla_server.policy_jobs.errors import SparkFailed
from sla_server.schedule import MODULES, STEPS, arguments_of, together


class Notes:
    """Stands in for the store: runs as they are noted."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def alone(self, kind: str) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_job(self, kind: str, who: str) -> str:
        self.said.append(("begin", kind, who))
        return kind

    def report_job(self, job_id: str, **columns: Any) -> None:
        self.said.append(("note", job_id, columns["text"], columns.get("rows")))

    def end_job(self, job_id: str, state: str, exit_status: int, **_columns: Any) -> None:
        self.said.append(("end", job_id, state, exit_status))


def test_a_run_of_several_has_a_row_of_each_one_after_the_other() -> None:
    notes: Any = Notes()
    with step_job.Turns(notes, "ann") as turns:
        turns.begin("capacity")
        turns.reading(7)
        turns.report("found")
        turns.begin("demand")
    assert notes.said == [
        ("begin", "capacity", "ann"), ("note", "capacity", "Spark computes", 0),
        ("note", "capacity", "Spark computes", 7), ("note", "capacity", "found", 7),
        ("end", "capacity", "done", 0),
        ("begin", "demand", "ann"), ("note", "demand", "Spark computes", 7), ("end", "demand", "done", 0),
    ]  # fmt: skip


def test_a_failure_is_that_of_the_step_it_ended(tmp_path: Any) -> None:
    notes: Any = Notes()

    def two_steps() -> None:
        with step_job.Turns(notes, "ann") as turns:
            turns.begin("capacity")
            turns.begin("demand")
            raise SparkFailed("no memory", tmp_path)

    with pytest.raises(SparkFailed):
        two_steps()
    assert [said for said in notes.said if said[0] == "end"] == [
        ("end", "capacity", "done", 0), ("end", "demand", "failed", 70),
    ]  # fmt: skip


def test_steps_are_the_same_for_the_schedule_and_the_job() -> None:
    """The supervisor does not import Spark's modules to know them."""
    assert list(STEPS) == list(compute.STEPS)
    assert set(step_job.WORDS) == set(step_job.DESCRIBE) == set(STEPS)


def test_neighbours_that_are_steps_are_one_process() -> None:
    assert together(["capacity", "demand", "policy", "attribution"]) == [
        ["capacity", "demand"], ["policy"], ["attribution"],
    ]  # fmt: skip
    assert [arguments_of(*some)[2:] for some in together(list(MODULES)) if len(some) > 1] == [list(STEPS)]
    assert arguments_of("policy") == ["-m", "sla_server.policy_jobs.job"]


def test_what_is_found_is_said_in_words() -> None:
    demand = pa.table(
        {
            "backend": ["disk"] * 3, "volume": ["a", "a", "b"], "hour_of_week": [0, 1, 0],
            "p50": [1.0, 5.0, 2.0], "p95": [10.0, 50.0, 20.0],
        }
    )  # fmt: skip
    capacity = pa.Table.from_pylist(
        [
            {
                "backend": "disk", "sla": "gold", "objective": "latency", "step": 1, "cost_per_s": None,
                "points": 9, "highest_load": 7.0, "reason": "kept at every load", "curve": "",
            }
        ],
        schema=grouped.CAPACITY,
    )  # fmt: skip
    rows = {name: step_job.shown(name, table) for name, table in (("demand", demand), ("capacity", capacity))}
    assert step_job.describe(rows).splitlines() == [
        "demand: 2 rows",
        "  demand of a on disk: up to 50 weighted IOPS (p95), 5 (p50)",
        "  demand of b on disk: up to 20 weighted IOPS (p95), 2 (p50)",
        "capacity: 1 rows",
        "  capacity of disk for gold/latency step 2: unknown",
        "    kept at every load, 9 intervals",
    ]
    assert "curve" not in rows["capacity"][0]


def test_a_running_job_is_named(tmp_path: Any) -> None:
    assert "another demand job is running" in str(JobRunning(tmp_path / "lock", "demand"))

"""The policy job's schedule: when it is due, what is made up for. No process is started."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from pmdaemon.runtime.clock import FakeClock
from sla_server.config import PolicyJobConfig, ServerConfig, resolve
from sla_server.schedule import FIRST_AFTER_S, JobSchedule, ScheduledJob
from sla_server.supervisor import Supervisor

HOUR_US = 3_600_000_000
MIDNIGHT_US = 1_795_996_800 * 1_000_000


@pytest.mark.parametrize(
    ("text", "next_us"),
    [
        ("hourly", MIDNIGHT_US + HOUR_US),
        ("daily", MIDNIGHT_US + 24 * HOUR_US),
        ("02:30", MIDNIGHT_US + 2 * HOUR_US + HOUR_US // 2),
        ("00:00", MIDNIGHT_US + 24 * HOUR_US),
        ("every 6h", MIDNIGHT_US + 6 * HOUR_US),
        ("every 15m", MIDNIGHT_US + HOUR_US // 4),
        ("every 10s", MIDNIGHT_US + 10_000_000),
    ],
)
def test_the_next_time(text: str, next_us: int) -> None:
    schedule = JobSchedule.parse(text)
    assert schedule is not None
    assert schedule.next_us(MIDNIGHT_US) == next_us
    assert schedule.next_us(next_us - 1) == next_us


@pytest.mark.parametrize("text", ["weekly", "25:00", "every 9s", "every 0h", "every h", "2:30", "02:30 CET"])
def test_what_is_no_schedule_is_refused_with_what_is(text: str) -> None:
    with pytest.raises(ValidationError, match=f"'{text}' is no schedule; give hourly, daily"):
        PolicyJobConfig(schedule=text)


def test_without_a_schedule_it_never_runs() -> None:
    assert PolicyJobConfig().schedule == ""
    assert JobSchedule.parse("") is None


class FakeChild:
    """Runs until it is given a status."""

    def __init__(self) -> None:
        self.starts = 0
        self.status: int | None = None
        self.is_running = False

    def start(self) -> bool:
        self.starts += 1
        self.is_running = True
        return True

    def wait(self, _limit_s: float) -> int | None:
        status, self.status = self.status, None
        self.is_running = status is None
        return status


class Scene:
    def __init__(self, folder: Path, text: str, clock: FakeClock) -> None:
        schedule = JobSchedule.parse(text)
        assert schedule is not None
        pipe: Any = None  # of children, which are not started here
        self.clock, self.child = clock, FakeChild()
        self.job = ScheduledJob(schedule, folder, None, pipe, clock)
        self.job.child = self.child  # type: ignore[assignment]

    def after(self, seconds: float) -> tuple[int, str] | None:
        self.clock.advance(seconds)
        return self.job.step()


def test_it_runs_when_it_is_due_one_at_a_time(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "hourly", FakeClock(unix_us=MIDNIGHT_US + 1))
    assert scene.after(3000) is None
    assert scene.child.starts == 0
    scene.after(600)
    assert scene.child.starts == 1
    scene.after(7200)
    assert scene.child.starts == 1, "the first one goes on"
    scene.child.status = 81
    ended = scene.after(1)
    assert ended is not None
    assert (ended[0], "not published" in ended[1]) == (81, True)
    scene.after(1)
    assert scene.child.starts == 2, "what was due meanwhile, once"
    scene.child.status = -9
    assert scene.after(1) == (-9, "killed by SIGKILL")
    scene.after(60)
    assert scene.child.starts == 2


def test_a_job_that_is_due_beside_another_waits_for_its_end(tmp_path: Path) -> None:
    scene = Scene(tmp_path, "hourly", FakeClock(unix_us=MIDNIGHT_US + 1))
    scene.clock.advance(3600)
    scene.job.step(may_start=False)
    assert scene.child.starts == 0
    scene.clock.advance(5400)
    scene.job.step(may_start=True)
    assert scene.child.starts == 1, "what was due meanwhile, once"


def test_a_run_missed_while_the_server_was_down_is_made_up_for(tmp_path: Path) -> None:
    clock = FakeClock(unix_us=MIDNIGHT_US)
    before = Scene(tmp_path, "02:30", clock)
    before.after(3 * 3600)
    assert before.child.starts == 1
    short = Scene(tmp_path, "02:30", clock)
    short.after(2 * FIRST_AFTER_S)
    assert short.child.starts == 0, "that of today has run"
    clock.advance(30 * 3600)
    after = Scene(tmp_path, "02:30", clock)
    after.after(FIRST_AFTER_S - 1)
    assert after.child.starts == 0, "the database may have to be made first"
    after.after(2)
    assert after.child.starts == 1


def test_the_report_job_has_its_own_module_and_stamp(tmp_path: Path) -> None:
    clock = FakeClock(unix_us=MIDNIGHT_US)
    schedule = JobSchedule.parse("hourly")
    assert schedule is not None
    pipe: Any = None
    job = ScheduledJob(schedule, tmp_path, None, pipe, clock, name="report")
    assert list(job.child.command)[1:] == ["-m", "sla_server.reports.job", "--scheduled"]
    child = FakeChild()
    job.child = child  # type: ignore[assignment]
    clock.advance(3600)
    job.step()
    assert child.starts == 1
    assert (tmp_path / "report-job" / "scheduled").exists()
    child.status = 0
    assert job.step() == (0, "exit status 0")


def test_a_clock_that_was_a_year_ahead_and_is_set_right_does_not_stop_it(tmp_path: Path) -> None:
    clock = FakeClock(unix_us=MIDNIGHT_US)
    clock.step_wall(365 * 86_400)
    scene = Scene(tmp_path, "hourly", clock)
    clock.step_wall(-365 * 86_400)
    scene.after(1800)
    assert scene.child.starts == 0
    scene.after(1800)
    assert scene.child.starts == 1
    clock.step_wall(-1800)
    scene.child.status = 0
    scene.after(1)
    scene.after(1800)
    assert scene.child.starts == 1, "of a smaller step none is repeated"
    scene.after(3600)
    assert scene.child.starts == 2


@pytest.mark.parametrize("content", ["", "x", "9" * 30, "-5"])
def test_a_stamp_that_cannot_be_read_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "policy-job").mkdir()
    (tmp_path / "policy-job" / "scheduled").write_text(content)
    scene = Scene(tmp_path, "hourly", FakeClock(unix_us=MIDNIGHT_US))
    scene.after(3599)
    assert scene.child.starts == 0
    scene.after(1)
    assert scene.child.starts == 1


def test_jobs_of_single_steps_have_schedules_by_name(tmp_path: Path) -> None:
    of_steps: Any = {"capacity": "every 6h", "space": "", "demand": "daily"}
    policy = PolicyJobConfig(schedule="02:30", job_schedules=of_steps)
    config = resolve(ServerConfig(data_dir=tmp_path, policy=policy))
    clock = FakeClock(unix_us=MIDNIGHT_US)
    supervisor: Any = SimpleNamespace(config=config, config_path=Path("c.toml"), _pipe=None, clock=clock)
    jobs = {job.name: job for job in Supervisor._scheduled(supervisor)}
    assert list(jobs) == ["policy", "capacity", "demand"]
    assert list(jobs["capacity"].child.command)[1:] == [
        "-m", "sla_server.policy_jobs.step_job", "capacity", "--scheduled", "--config", "c.toml",
    ]  # fmt: skip
    with pytest.raises(ValidationError, match="is no schedule"):
        PolicyJobConfig(job_schedules={"capacity": "weekly"})
    with pytest.raises(ValidationError, match="'cost-model', 'capacity'"):
        PolicyJobConfig.model_validate({"job_schedules": {"policy": "daily"}})

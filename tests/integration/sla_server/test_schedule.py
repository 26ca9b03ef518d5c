"""The scheduled job as a process: its end is seen once, it ends with the server, and with its parent."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import ParentPipe
from sla_server.schedule import JobSchedule, ScheduledJob

LIMIT_S = 120.0


@pytest.fixture
def pipe() -> Iterator[ParentPipe]:
    opened = ParentPipe()
    yield opened
    opened.close()


def wait(ready: Callable[[], Any]) -> Any:
    ends_s = time.monotonic() + LIMIT_S
    while not (found := ready()):
        assert time.monotonic() < ends_s, "not within the limit"
        time.sleep(0.02)
    return found


def started(folder: Path, pipe: ParentPipe, script: str) -> ScheduledJob:
    clock = FakeClock()
    job = ScheduledJob(JobSchedule(3600), folder, None, pipe, clock, [sys.executable, "-c", script])
    clock.advance(3600)
    assert job.step() is None
    assert job.child.is_running
    return job


def test_the_end_of_a_run_is_reported_once(tmp_path: Path, pipe: ParentPipe) -> None:
    script = f"import os; assert os.environ['SLA__DATA_DIR'] == {str(tmp_path)!r}; raise SystemExit(81)"
    job = started(tmp_path, pipe, script)
    status, text = wait(job.step)
    assert (status, text) == (81, "what it computed does not help, and was not published")
    assert job.step() is None
    assert not job.child.is_running


def test_a_run_is_ended_with_the_server(tmp_path: Path, pipe: ParentPipe) -> None:
    job = started(tmp_path, pipe, "import time; time.sleep(600)")
    pid = job.child.pid
    job.stop()
    assert not job.child.is_running
    assert not Path(f"/proc/{pid}").exists()
    job.stop()


def test_a_scheduled_run_ends_with_its_parent_however_that_dies(tmp_path: Path) -> None:
    """The job sets this itself: it is started without ``preexec_fn`` by a process with threads."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]])\n"
        "print(child.pid, flush=True); time.sleep(600)"
    )
    job = (
        "import time; from sla_server.policy_jobs import job\n"
        "from pathlib import Path\n"
        f"job.run = lambda *_: (Path({str(tmp_path)!r}, 'runs').touch(), time.sleep(600))\n"
        "job.main(['--scheduled'])"
    )
    environment = {**os.environ, "SLA__DATA_DIR": str(tmp_path), "SLA__RUNTIME_DIR": str(tmp_path / "run")}
    with subprocess.Popen(
        [sys.executable, "-c", script, job], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        wait((tmp_path / "runs").exists)
        parent.kill()
    wait(lambda: not _runs(pid))


def _runs(pid: int) -> bool:
    """Whether a process runs: the child of one that died is reaped by another."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False

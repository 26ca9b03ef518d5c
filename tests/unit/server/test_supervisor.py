"""The supervisor's pure parts and its lock."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pmdaemon.runtime.stop import Stop
from sla_server import config as configuration
from sla_server.errors import ServerRunning
from sla_server.supervisor import (
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    STABLE_S,
    Part,
    Supervisor,
    describe_status,
    lock_data_dir,
    next_backoff,
    running_pid,
)


def test_backoff_doubles_up_to_its_limit_and_starts_again_after_a_stable_life() -> None:
    seen = [BACKOFF_FIRST_S]
    while seen[-1] < BACKOFF_MOST_S:
        seen.append(next_backoff(seen[-1], lived_s=1.0))
    assert seen[1] == 2 * BACKOFF_FIRST_S
    assert next_backoff(BACKOFF_MOST_S, 1.0) == BACKOFF_MOST_S
    assert next_backoff(BACKOFF_MOST_S, STABLE_S) == BACKOFF_FIRST_S


def test_a_status_in_words() -> None:
    assert describe_status(0) == "exit status 0"
    assert describe_status(-9) == "killed by SIGKILL"


def test_a_second_server_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    held = lock_data_dir(tmp_path)
    assert running_pid(tmp_path) == os.getpid()
    with pytest.raises(ServerRunning, match=f"process {os.getpid()}"):
        lock_data_dir(tmp_path)
    os.close(held)
    assert running_pid(tmp_path) is None


def test_no_directory_no_server(tmp_path: Path) -> None:
    assert running_pid(tmp_path / "never") is None


def test_the_restart_event_says_why_the_part_died(tmp_path: Path) -> None:
    config = configuration.resolve(configuration.ServerConfig(data_dir=tmp_path / "d", runtime_dir=tmp_path))
    supervisor = Supervisor(config, None, Stop())
    part = Part("services", [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
    supervisor.parts["services"] = part
    supervisor._start(part)
    assert part.process is not None
    part.process.wait(20)
    supervisor._look()
    assert part.reason == "killed by SIGKILL"
    part.start_at_s = 0.0
    part.command = [sys.executable, "-c", ""]
    supervisor._look()
    assert part.process is not None
    part.process.wait(20)
    supervisor._pipe.close()
    event = next(row for table, row in supervisor._pending if table == "events")
    assert event["text"] == "services was restarted: killed by SIGKILL; restart 1"

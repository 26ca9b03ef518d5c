"""The supervisor's pure parts and its lock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sla_server.errors import ServerRunning
from sla_server.supervisor import (
    BACKOFF_FIRST_S,
    BACKOFF_MOST_S,
    STABLE_S,
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

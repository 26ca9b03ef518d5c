"""The lock of the data directory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from sla_server.cli.server import cli
from sla_server.data_dir import lock_data_dir, running_pid, wait_stopped
from sla_server.errors import ServerRunning


def test_a_second_server_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    held = lock_data_dir(tmp_path)
    assert running_pid(tmp_path) == os.getpid()
    with pytest.raises(ServerRunning, match=f"process {os.getpid()}"):
        lock_data_dir(tmp_path)
    os.close(held)
    assert running_pid(tmp_path) is None


def test_no_directory_no_server(tmp_path: Path) -> None:
    assert running_pid(tmp_path / "never") is None


def test_a_lock_without_a_readable_pid(tmp_path: Path) -> None:
    held = lock_data_dir(tmp_path)
    (tmp_path / "lock").write_text("\u00b2\n")
    assert running_pid(tmp_path) == 0
    assert not wait_stopped(tmp_path, 0.0)
    with pytest.raises(ServerRunning, match="another process"):
        lock_data_dir(tmp_path)
    os.close(held)


def test_a_server_of_another_user_is_not_stopped_but_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    held = lock_data_dir(tmp_path / "data")
    monkeypatch.setattr(os, "kill", refuse)
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    told = CliRunner().invoke(cli, ["stop", "--config", str(path)])
    os.close(held)
    assert told.exit_code == 78
    assert f"process {os.getpid()}, belongs to another user" in told.output

"""The lock of the data directory, and a directory that cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from pmdaemon.errors import ConfigError
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


def test_a_directory_that_cannot_be_made_is_an_error_of_its_setting(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for use in (lock_data_dir, running_pid):
        with pytest.raises(ConfigError, match=r"data_dir: .*file/x cannot be used: Not a directory"):
            use(tmp_path / "file" / "x")


@pytest.mark.parametrize("command", [["start"], ["start", "--background"], ["status"], ["stop"]])
def test_the_commands_say_it_in_a_line(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/file/x"\nruntime_dir = "{tmp_path}/run"\n')
    told = CliRunner().invoke(cli, [*command, "--config", str(path)])
    assert told.exit_code == 78
    assert "sla-server: data_dir: " in told.output
    assert "as the user it belongs to" in told.output

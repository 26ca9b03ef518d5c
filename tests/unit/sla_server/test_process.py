"""One part run alone: its configuration can be checked and shown without starting it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
from click.testing import CliRunner

from pmdaemon.errors import SlaError
from pmdaemon.runtime.failures import failures
from pmdaemon.runtime.stop import Stop
from sla_server import config as configuration
from sla_server import process as part
from sla_server.config import ResolvedConfig
from sla_server.process import MODULES, main


@pytest.mark.parametrize("part", sorted(MODULES))
def test_configuration_is_checked_and_shown(tmp_path: Path, part: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\n[pmdaemon]\ninterval_s = 2.0\n')
    checked = CliRunner().invoke(main, [part, "--config", str(path), "--check-config"])
    assert (checked.exit_code, checked.output) == (0, "configuration is good\n")
    shown = CliRunner().invoke(main, [part, "--config", str(path), "--show-config"])
    assert shown.exit_code == 0
    assert "interval_s = 2.0" in shown.output
    assert not (tmp_path / "data").exists()


def test_what_a_part_makes_is_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def run(_config: ResolvedConfig, stop: Stop) -> int:
        (tmp_path / "made").touch()
        return 0

    def end(status: int) -> NoReturn:
        ended.append(status)
        raise SystemExit(status)

    # What the command sets for the whole process: the test process keeps its own.
    monkeypatch.setattr(importlib, "import_module", lambda _name: SimpleNamespace(run=run))
    monkeypatch.setattr(Stop, "install_signals", lambda _stop: None)
    monkeypatch.setattr(Stop, "watch_parent", lambda _stop: None)
    monkeypatch.setattr(part.logs, "configure", lambda _name: None)
    monkeypatch.setattr(part, "set_os_thread_name", lambda _name: None)
    monkeypatch.setattr(part, "watch", lambda *_: None)
    monkeypatch.setattr(os, "_exit", end)
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}"\n')
    before = os.umask(0)
    try:
        CliRunner().invoke(main, ["services", "--config", str(path)])
    finally:
        os.umask(before)
    assert ended == [0]
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o600


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[pmdaemon]\nintervall_s = 2.0\n")
    done = CliRunner().invoke(main, ["services", "--config", str(path), "--check-config"])
    assert done.exit_code == 78
    assert "pmdaemon.intervall_s: no such key" in done.output


def test_why_a_part_failed_is_left_until_its_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[SlaError | int] = [SlaError("no room"), 0]

    def run(_config: ResolvedConfig, stop: Stop) -> int:
        end = ends.pop(0)
        if isinstance(end, SlaError):
            raise end
        assert not stop.is_set()
        return end

    monkeypatch.setattr(importlib, "import_module", lambda _name: SimpleNamespace(run=run))
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}"\n')
    config = configuration.load(path)
    with pytest.raises(SlaError):
        part._run("dbmanager", config, Stop())  # ``cli`` adds signals and the log, and ends the process
    assert failures(tmp_path) == {"dbmanager": "no room"}
    assert part._run("dbmanager", config, Stop()) == 0
    assert failures(tmp_path) == {}

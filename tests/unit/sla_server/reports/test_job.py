"""The report job as a command: its configuration is checked and shown without a database."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sla_server.reports.job import main


def test_the_configuration_is_checked_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\n[reports]\nperiod = "week"\n')
    checked = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert (checked.exit_code, checked.output) == (0, "configuration is good\n")
    shown = CliRunner().invoke(main, ["--config", str(path), "--show-config"])
    assert 'period = "week"' in shown.output
    assert not (tmp_path / "data").exists()


def test_a_wrong_key_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "server.toml"
    path.write_text('[reports]\nintervall = "week"\n')
    done = CliRunner().invoke(main, ["--config", str(path), "--check-config"])
    assert done.exit_code == 78
    assert "reports.intervall: no such key" in capfd.readouterr().err

"""One part run alone: its configuration can be checked and shown without starting it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from sla_server.part import MODULES, main


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


def test_a_wrong_key_is_named(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("[pmdaemon]\nintervall_s = 2.0\n")
    done = CliRunner().invoke(main, ["services", "--config", str(path), "--check-config"])
    assert done.exit_code == 78
    assert "pmdaemon.intervall_s: no such key" in done.output

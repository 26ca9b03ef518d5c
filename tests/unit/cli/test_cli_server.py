"""``sla-server status`` when the database is away: the server runs, and that is said first."""

from __future__ import annotations

import json
import os
from pathlib import Path

from click.testing import CliRunner

from sla_server.cli.server import cli
from sla_server.supervisor import lock_data_dir


def test_status_without_its_database(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    held = lock_data_dir(tmp_path / "data")  # a server that has not made its database yet
    try:
        told = CliRunner().invoke(cli, ["status", "--config", str(path)])
        as_json = CliRunner().invoke(cli, ["status", "--config", str(path), "-o", "json"])
    finally:
        os.close(held)
    assert told.exit_code == 0, told.output
    first, second = told.output.splitlines()[:2]
    assert first.startswith(f"running, pid {os.getpid()}")
    assert "states of the processes are unknown" in second
    assert json.loads(as_json.output)["trouble"]

"""Starting the whole server on loopback: ready means ready, and what cannot start says so and ends."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

LIMIT_S = 240


class Operator:
    """Runs ``sla-server`` and ``sla`` on one configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "server.toml"
        self.config.write_text(
            f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n'
            '[pmdaemon]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:0"\n'
            "[database]\nqueue_bytes = 16777216\n"
        )

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**os.environ, "SLA_CONFIG": str(self.config)},
        )


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    made = Operator(tmp_path)
    yield made
    made.run("sla_server", "stop")


def test_a_schema_of_a_newer_release_ends_the_start(operator: Operator) -> None:
    started = operator.run("sla_server", "start", "--background")
    assert started.returncode == 0, started.stderr
    assert "/login?code=" in started.stdout
    told = operator.run("sla_server", "status", "-o", "json")
    assert told.returncode == 0, told.stdout
    assert json.loads(told.stdout)["is_well"]
    mode = operator.run("sla_server.cli", "mode", "observe")
    assert (mode.returncode, mode.stdout) == (0, "observe\n"), mode.stderr
    assert operator.run("sla_server", "stop").returncode == 0
    with closing(sqlite3.connect(operator.folder / "data" / "sla.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")

    refused = operator.run("sla_server", "start", "--background")
    assert refused.returncode == 78, refused.stderr
    assert "dbmanager failed at its last start: the schema of" in refused.stderr
    assert "Install the newer release again" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert operator.run("sla_server", "status").returncode == 69
    for path in (operator.folder / "data").iterdir():
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0, f"{path.name} can be read by others"

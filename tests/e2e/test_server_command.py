"""``sla-server`` as an operator uses it: start, status, stop, and what it says when that is not possible."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.stage import free_port
from pmdaemon.runtime.clock import Deadline


class Operator:
    """Runs ``sla-server`` commands on one configuration."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.config = folder / "server.toml"
        self.config.write_text(
            f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n'
            f'[pmdaemon]\nlisten = "127.0.0.1:{free_port()}"\n[api]\nlisten = "127.0.0.1:{self.port}"\n'
        )

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "sla_server", command, "--config", str(self.config), *arguments],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={**os.environ, "COLUMNS": "80"},
        )


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    someone = Operator(tmp_path)
    yield someone
    someone.run("stop")


def test_start_status_stop(operator: Operator) -> None:
    nothing = operator.run("status")
    assert nothing.returncode == 69
    assert "sla-server start" in nothing.stderr

    started = operator.run("start", "--background")
    assert started.returncode == 0, started.stderr
    assert f"127.0.0.1:{operator.port}" in started.stdout
    deadline = Deadline(60)  # 503 until services have spoken
    while httpx.get(f"http://127.0.0.1:{operator.port}/api/v1/health").status_code != 200:
        assert not deadline.passed
        time.sleep(0.1)

    second = operator.run("start")
    assert second.returncode == 75
    assert "is in use by process" in second.stderr + second.stdout

    status = json.loads(operator.run("status", "-o", "json").stdout)
    assert {row["name"]: row["state"] for row in status["processes"]} == dict.fromkeys(
        ("appserver", "dbmanager", "pair-0", "pmdaemon", "services"), "running"
    )
    assert status["problems"] == []
    text = operator.run("status").stdout
    assert max(len(line) for line in text.splitlines()) <= 110
    assert operator.run("stop").returncode == 0
    assert operator.run("stop").returncode == 69


def test_show_config_can_be_read_back(operator: Operator, tmp_path: Path) -> None:
    shown = operator.run("start", "--show-config")
    assert "MiB of shared memory" in shown.stdout
    operator.config.write_text(shown.stdout)
    assert operator.run("start", "--check-config").returncode == 0


def test_an_address_beyond_loopback_is_refused_and_says_why(operator: Operator) -> None:
    operator.config.write_text('[pmdaemon]\nlisten = "0.0.0.0:7411"\n')
    refused = operator.run("start", "--check-config")
    assert refused.returncode == 78
    assert "TLS" in refused.stderr
    assert "pmdaemon.listen" in refused.stderr

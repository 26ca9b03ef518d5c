"""``sla-server`` as an operator uses it: start, status, stop, and what it says when that is not possible."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from pmdaemon.mailbox import Segment, describe
from pmdaemon.mailbox.errors import SegmentMissing
from pmdaemon.mailbox.layout import C_HEAD, H_CREATED_US
from pmdaemon.mailbox.segment import start_ticks
from pmdaemon.runtime.clock import Deadline
from tests.support.stage import free_port


class Operator:
    """Runs ``sla-server`` commands on one configuration."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.config = folder / "server.toml"
        self.data_dir, self.runtime_dir = folder / "data", folder / "run"
        self.config.write_text(
            f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n'
            f'[pmdaemon]\nlisten = "127.0.0.1:{free_port()}"\n[api]\nlisten = "127.0.0.1:{self.port}"\n'
        )

    def kill(self) -> None:
        """Kill the supervisor, and see its parts end."""
        pids = [row["pid"] for row in json.loads(self.run("status", "-o", "json").stdout)["processes"]]
        os.kill(int((self.data_dir / "lock").read_text()), signal.SIGKILL)
        self.until(lambda: not any(start_ticks(pid) for pid in pids if pid), "the parts have ended")

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = Deadline(60)
        while not holds():
            assert not deadline.passed, what
            time.sleep(0.1)

    def created_us(self) -> int | None:
        try:
            return int(describe(self.runtime_dir / "main.mbx")["created_unix_us"])
        except SegmentMissing:
            return None

    def left(self) -> list[str]:
        """What the runtime directory holds; nothing if it is gone, too."""
        return sorted(path.name for path in self.runtime_dir.glob("*"))

    def events(self, kind: str) -> list[str]:
        """Subjects of the events of a kind."""
        with contextlib.closing(sqlite3.connect(self.data_dir / "sla.db", timeout=60)) as database:
            return [row[0] for row in database.execute("SELECT subject FROM events WHERE kind = ?", (kind,))]

    def health(self) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/api/v1/health", timeout=60).status_code
        except httpx.HTTPError:
            return 0

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
    assert operator.left() == []  # no shared memory is kept


@pytest.mark.parametrize("while_running", [True, False])
def test_a_damaged_mailbox_is_cured(operator: Operator, while_running: bool) -> None:
    """A stray store into a lane: the parts that use the segment get a new one; so does the next start."""
    assert operator.run("start", "--background").returncode == 0
    operator.until(lambda: operator.health() == 200, "the server is well")
    segment = Segment(operator.runtime_dir / "main.mbx")
    layout, made_us = segment.layout, segment.words[H_CREATED_US]
    if not while_running:
        operator.kill()
    segment.words[layout.control_word(layout.index("dbmanager")) + C_HEAD] = 777
    segment.close()
    if not while_running:
        assert operator.run("start", "--background").returncode == 0
    operator.until(lambda: operator.created_us() not in (None, made_us), "the segment is made again")
    operator.until(lambda: operator.events("mailbox-damaged") == ["main.mbx"], "an event says so")
    operator.until(lambda: operator.health() == 200, "the server is well again")
    assert operator.run("stop").returncode == 0
    assert operator.left() == []


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

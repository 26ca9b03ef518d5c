"""``sla-server`` as an operator uses it: start, status, stop, and what it says when that is not possible.

One server for all tests: each begins with it running or stopped, whichever it needs.
"""

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
from typing import Any

import httpx
import pytest

from pmdaemon.mailbox import Segment, describe
from pmdaemon.mailbox.errors import SegmentMissing
from pmdaemon.mailbox.layout import C_HEAD, H_CREATED_US
from pmdaemon.mailbox.segment import start_ticks
from pmdaemon.runtime.clock import Deadline
from sla_server.directories import running_pid
from tests.support.ports import free_port

LIMIT_S = 300
LIMIT = ("--limit", str(LIMIT_S))
BACKGROUND = ("--background", *LIMIT)


class Operator:
    """Runs ``sla-server`` commands on one configuration."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.config = folder / "server.toml"
        self.data_dir, self.runtime_dir = folder / "data", folder / "run"
        self.config.write_text(
            f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n'
            f'[pmdaemon]\nlisten = "127.0.0.1:0"\n[api]\nlisten = "127.0.0.1:{self.port}"\n'
            "[database]\nqueue_bytes = 16777216\n"
        )

    def kill(self) -> None:
        """Kill the supervisor, and see its parts end."""
        pids = [row["pid"] for row in self.status()["processes"]]
        os.kill(int((self.data_dir / "lock").read_text()), signal.SIGKILL)
        self.until(lambda: not any(start_ticks(pid) for pid in pids if pid), "the parts have ended")

    def status(self) -> dict[str, Any]:
        """What ``sla-server status`` says."""
        return dict(json.loads(self.run("status", "-o", "json").stdout))

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = Deadline(LIMIT_S)
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

    def schema_becomes(self, version: str) -> str:
        """Set the version of the schema; returns what it was."""
        with contextlib.closing(sqlite3.connect(self.data_dir / "sla.db")) as database, database:
            [[former]] = database.execute("SELECT version_num FROM alembic_version")
            database.execute("UPDATE alembic_version SET version_num = ?", (version,))
            return str(former)

    def health(self) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.port}/api/v1/health", timeout=60).status_code
        except httpx.HTTPError:
            return 0

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``sla-server command``."""
        return self._run("sla_server", command, "--config", str(self.config), *arguments)

    def sla(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``sla arguments``."""
        return self._run("sla_server.cli", *arguments)

    def _run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", module, *arguments],
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
            env={**os.environ, "COLUMNS": "80", "SLA_CONFIG": str(self.config)},
        )

    def be_running(self) -> None:
        if running_pid(self.data_dir) is None:
            started = self.run("start", *BACKGROUND)
            assert started.returncode == 0, started.stderr
        self.until(lambda: self.health() == 200, "the server is well")

    def be_stopped(self) -> None:
        if running_pid(self.data_dir) is not None:
            assert self.run("stop", *LIMIT).returncode == 0
            assert self.left() == []  # no shared memory is kept


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    someone = Operator(tmp_path_factory.mktemp("server"))
    yield someone
    someone.be_stopped()


def test_start_and_status(server: Operator) -> None:
    server.be_stopped()
    nothing = server.run("status")
    assert nothing.returncode == 69
    assert "sla-server start" in nothing.stderr

    started = server.run("start", *BACKGROUND)
    assert started.returncode == 0, started.stderr
    assert f"127.0.0.1:{server.port}" in started.stdout
    assert "/login?code=" in started.stdout
    # A part that was late to report for a moment is a problem for that moment.
    server.until(lambda: server.run("status").returncode == 0, "all is well")
    status = json.loads(server.run("status", "-o", "json").stdout)
    assert {row["name"]: row["state"] for row in status["processes"]} == dict.fromkeys(
        ("appserver", "dbmanager", "delivery", "pair-0", "pmdaemon", "services"), "running"
    )
    server.until(lambda: server.status()["problems"] == [], "nothing is in trouble")
    server.until(lambda: server.health() == 200, "the services have spoken")
    mode = server.sla("mode", "observe")
    assert (mode.returncode, mode.stdout) == (0, "observe\n"), mode.stderr

    second = server.run("start")
    assert second.returncode == 75
    assert "is in use by process" in second.stderr + second.stdout
    text = server.run("status").stdout
    assert max(len(line) for line in text.splitlines()) <= 110


@pytest.mark.parametrize("while_running", [True, False])
def test_a_damaged_mailbox_is_cured(server: Operator, while_running: bool) -> None:
    """A stray store into a lane: the parts that use the segment get a new one; so does the next start."""
    server.be_running()
    told = server.events("mailbox-damaged")
    segment = Segment(server.runtime_dir / "main.mbx")
    layout, made_us = segment.layout, segment.words[H_CREATED_US]
    if not while_running:
        server.kill()
    segment.words[layout.control_word(layout.index("dbmanager")) + C_HEAD] = 777
    segment.close()
    if not while_running:
        assert server.run("start", *BACKGROUND).returncode == 0
    server.until(lambda: server.created_us() not in (None, made_us), "the segment is made again")
    server.until(lambda: server.events("mailbox-damaged") == [*told, "main.mbx"], "an event says so")
    server.until(lambda: server.health() == 200, "the server is well again")


def test_stop(server: Operator) -> None:
    server.be_running()
    assert server.run("stop", *LIMIT).returncode == 0
    assert server.left() == []
    assert server.run("stop").returncode == 69


def test_a_schema_of_a_newer_release_ends_the_start(server: Operator) -> None:
    if not (server.data_dir / "sla.db").exists():
        server.be_running()
    server.be_stopped()
    version = server.schema_becomes("9999")
    try:
        refused = server.run("start", *BACKGROUND)
    finally:
        server.schema_becomes(version)
    assert refused.returncode == 78, refused.stderr
    assert "dbmanager failed at its last start: the schema of" in refused.stderr
    assert "Install the newer release again" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert server.run("status").returncode == 69
    for path in server.data_dir.iterdir():
        assert path.is_dir() or path.stat().st_mode & 0o077 == 0, f"{path.name} can be read by others"


@pytest.fixture
def operator(tmp_path: Path) -> Operator:
    """One without a server."""
    return Operator(tmp_path)


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

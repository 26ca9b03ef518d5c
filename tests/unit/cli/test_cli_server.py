"""``sla-server status`` when the database is away: the server runs, and that is said first."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest
from click.testing import CliRunner

from sla_server.cli.client import Client
from sla_server.cli.errors import Refused
from sla_server.cli.server import cli
from sla_server.data_dir import lock_data_dir
from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine


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


def test_status_says_what_is_in_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "api.port").write_text("8411\n")
    full = {"process": "dbmanager", "what": "database", "since_us": 7_000_000, "reason": "no space left"}
    silent = {"process": "services", "what": "services", "since_us": None, "reason": "silent"}

    def down(client: Client, path: str) -> None:
        assert (client.server, path) == ("http://127.0.0.1:8411", "/health")
        raise Refused(503, {"status": "down", "problems": [full, silent]})

    monkeypatch.setattr(Client, "get", down)
    held = lock_data_dir(tmp_path / "data")
    try:
        told = CliRunner().invoke(cli, ["status", "--config", str(path)])
        as_json = CliRunner().invoke(cli, ["status", "--config", str(path), "-o", "json"])
    finally:
        os.close(held)
    first, second = told.output.splitlines()[-2:]
    assert first.startswith("  in trouble: dbmanager, since ")
    assert first.endswith(": No space left.")
    assert second == "  in trouble: services: Silent."
    assert json.loads(as_json.output)["problems"] == [full, silent]


@pytest.mark.parametrize("table", ["api", "pmdaemon"])
@pytest.mark.parametrize("how", ["--background", ""])
def test_a_taken_port_is_told_at_once_with_its_setting(tmp_path: Path, table: str, how: str) -> None:
    path = tmp_path / "server.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listens = {"api": "127.0.0.1:0", "pmdaemon": "127.0.0.1:0", table: f"127.0.0.1:{port}"}
        path.write_text(
            f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
            + "".join(f'[{name}]\nlisten = "{value}"\n' for name, value in listens.items())
        )
        told = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [how])])
    assert told.exit_code == 78, told.output
    assert f"{table}.listen: cannot listen on 127.0.0.1:{port}" in told.output
    assert not (tmp_path / "data").exists()  # nothing was started


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_runtime_directory_open_to_others_is_told_in_a_line(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    told = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert told.exit_code == 77, told.output
    assert "is open to others (mode 0777)" in told.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_queue_that_does_not_fit_is_told_before_anything_is_started(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        f"[database]\nqueue_bytes = {16 << 20}\n"
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    small = SimpleNamespace(f_bavail=1000, f_bfree=1000, f_frsize=4096)
    monkeypatch.setattr("sla_server.db.ingest_queue.os.statvfs", lambda _path: small)
    told = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert told.exit_code == 74, told.output
    needed_bytes = 8192 + (16 << 20) + 8192 + (8 << 10) * 128
    assert f"{tmp_path}/data/queue/ingest needs {needed_bytes} bytes, and 4096000 are" in told.stderr
    assert not (tmp_path / "data").exists()


def test_status_says_why_the_database_manager_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "dbmanager.failed").write_text("disk queue q: cannot reserve 7 bytes\n")
    held = lock_data_dir(tmp_path / "data")
    try:
        told = CliRunner().invoke(cli, ["status", "--config", str(path)])
        as_json = CliRunner().invoke(cli, ["status", "--config", str(path), "-o", "json"])
    finally:
        os.close(held)
    assert "  dbmanager failed at its last start: disk queue q: cannot reserve 7 bytes\n" in told.output
    assert list(json.loads(as_json.output)["failures"]) == ["dbmanager"]


def test_status_says_why_a_part_does_not_start_while_the_database_works(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "pmdaemon.failed").write_text("pmdaemon.listen: cannot listen on 127.0.0.1:7411\n")
    held = lock_data_dir(tmp_path / "data")
    engine = make_engine(DatabaseConfig(), tmp_path / "data")
    try:
        migrate.upgrade(engine)
        told = CliRunner().invoke(cli, ["status", "--config", str(path)])
    finally:
        engine.dispose()
        os.close(held)
    assert "unknown" not in told.output
    assert "  pmdaemon failed at its last start: pmdaemon.listen: cannot listen on 127" in told.output


@pytest.mark.parametrize("option", ["--check-config", "--background"])
def test_tls_without_an_authority_is_told_at_once(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n[pmdaemon.tls]\nenabled = true\n'
    )
    told = CliRunner().invoke(cli, ["start", "--config", str(path), option])
    assert told.exit_code == 78
    assert "sla ca init" in told.stderr


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_data_directory_that_cannot_be_made_is_told_in_a_line(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    (tmp_path / "file").write_text("in the way")
    path.write_text(
        f'data_dir = "{tmp_path}/file/data"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    told = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert told.exit_code == 74, told.output
    assert told.stderr.startswith(f"sla-server: {tmp_path}/file/data")
    assert "Not a directory" in told.stderr


@pytest.mark.parametrize("command", [[], ["start"], ["status"], ["stop"]])
def test_help_has_its_short_form(command: list[str]) -> None:
    assert CliRunner().invoke(cli, [*command, "-h"]).stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("ended", "status", "words"), [(1, 1, "did not start;"), (None, 75, "goes on trying (pid 77)")]
)
def test_a_start_in_the_background_says_whether_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: int | None, status: int, words: str
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
        "[database]\nqueue_bytes = 16777216\n"
    )

    def launched(*_args: object, stdout: IO[bytes], **_how: object) -> SimpleNamespace:
        stdout.write(b"the newest line of the log\n")
        return SimpleNamespace(pid=77, poll=lambda: ended)

    monkeypatch.setattr("sla_server.cli.server.subprocess.Popen", launched)
    monkeypatch.setattr("sla_server.cli.server.READY_LIMIT_S", 0.0)
    told = CliRunner().invoke(cli, ["start", "--config", str(path), "--background"])
    assert told.exit_code == status, told.output
    assert words in told.stderr
    assert told.stderr.endswith("the newest line of the log\n")

"""``sla-server start`` and ``status``: text and exit status when something is wrong."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from click.testing import CliRunner

from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.stop import ParentPipe
from sla_server import config as configuration
from sla_server import directories
from sla_server.cli.client import Client
from sla_server.cli.errors import RequestRefused, ServerDown
from sla_server.cli.server import cli, is_below
from sla_server.directories import lock_data_dir, prepare_data_dir

ROWS = [
    {"name": name, "state": "running", "pid": os.getpid(), "restarts": 0, "reason": ""}
    for name in ("appserver", "dbmanager", "delivery", "pmdaemon", "services")
]


class Server:
    """A data directory locked by the test, as by a supervisor, with an API whose answers the test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = folder / "server.toml"
        self.path.write_text(f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n')
        self.run = folder / "run"
        self.run.mkdir()
        (self.run / "api.port").write_text("8411\n")
        self.answers: dict[str, Any] = {
            "/health": {"status": "ok", "problems": []},
            "/processes": {"items": ROWS},
        }
        monkeypatch.setattr(Client, "get", self._get)
        monkeypatch.setattr(Client, "change", self._change)
        self.lock = lock_data_dir(folder / "data")

    def _get(self, path: str) -> Any:
        answer = self.answers[path]
        if isinstance(answer, SlaError):
            raise answer
        return answer

    def _change(self, _method: str, path: str) -> Any:
        assert path == "/logins"
        return {"address": "http://127.0.0.1:8411/login?code=fresh"}

    def status(self) -> tuple[int, str, dict[str, Any]]:
        result = CliRunner().invoke(cli, ["status", "--config", str(self.path)])
        as_json = CliRunner().invoke(cli, ["status", "--config", str(self.path), "-o", "json"])
        assert result.exit_code == as_json.exit_code, result.output
        return result.exit_code, result.output, json.loads(as_json.output)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(tmp_path, monkeypatch)
    yield made
    os.close(made.lock)


def test_status_of_a_server_that_is_well(server: Server) -> None:
    status, text, result = server.status()
    assert status == 0
    assert text.startswith(f"running, pid {os.getpid()}, page http://127.0.0.1:8411/login?code=fresh\n")
    assert result["is_well"]
    assert len(text.splitlines()) == 1 + len(ROWS)


def test_status_without_an_answer_of_the_api(server: Server) -> None:
    (server.run / "api.port").unlink()
    status, text, result = server.status()
    assert status == 1
    first, second = text.splitlines()[:2]
    assert first == f"running, pid {os.getpid()}, page (not listening yet)"
    assert "states of the processes are unknown" in second
    assert "application server does not answer" in result["trouble"]


def test_status_says_what_is_in_trouble(server: Server) -> None:
    full = {"process": "dbmanager", "what": "database", "since_us": 7_000_000, "reason": "no space left"}
    silent = {"process": "services", "what": "services", "since_us": None, "reason": "silent"}
    server.answers["/health"] = RequestRefused(503, {"status": "down", "problems": [full, silent]})
    status, text, result = server.status()
    assert status == 1
    first, second = text.splitlines()[-2:]
    assert first.startswith("  in trouble: dbmanager, since ")
    assert first.endswith(": No space left.")
    assert second == "  in trouble: services: Silent."
    assert result["problems"] == [full, silent]


def test_a_process_of_a_former_run_is_not_called_running(server: Server) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    stale = [{**row, "pid": ended.pid} if row["name"] == "dbmanager" else row for row in ROWS]
    elsewhere = [{**row, "pid": 1} if row["name"] == "services" else row for row in stale]
    server.answers["/processes"] = {"items": elsewhere}
    status, text, result = server.status()
    assert status == 1
    assert [row["name"] for row in result["processes"] if row["state"] == "dead"] == ["dbmanager", "services"]
    assert "  dbmanager does not run\n  services does not run\n" in text


def test_a_process_that_was_started_while_nothing_can_be_stored_is_not_called_dead(server: Server) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait(60)
    stale = [{**row, "pid": ended.pid} if row["name"] == "services" else row for row in ROWS]
    waits = {"process": "dbmanager", "what": "dbmanager", "since_us": None, "reason": "waits at its start"}
    server.answers |= {"/processes": {"items": stale}, "/health": {"status": "down", "problems": [waits]}}
    status, text, result = server.status()
    assert status == 1
    assert result["processes"] == []
    assert "dead" not in text
    assert "does not run" not in text
    assert "states of the processes are unknown: they are stored in the database" in text
    assert text.endswith("  in trouble: dbmanager: Waits at its start.\n")


def test_a_process_below_the_supervisor_is_ours() -> None:
    with subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; read x; kill $!"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        grandchild = int(child.stdout.readline())
        assert is_below(grandchild, os.getpid())
        assert is_below(child.pid, os.getpid())
        assert not is_below(child.pid, grandchild)
        child.communicate(b"\n")
    assert not is_below(child.pid, os.getpid())


def test_a_part_whose_template_has_ended_is_ours() -> None:
    """It has another parent then; status called every part dead while all of them ran."""
    pipe = ParentPipe()
    script = "sleep 60 >/dev/null & echo $!"
    with subprocess.Popen(["sh", "-c", script], stdout=-1, pass_fds=(pipe.child_fd,)) as template:
        assert template.stdout is not None
        part = int(template.stdout.readline())
    with subprocess.Popen(["sh", "-c", script], stdout=-1) as strange:
        assert strange.stdout is not None
        stranger = int(strange.stdout.readline())
    try:
        assert is_below(part, os.getpid())
        assert not is_below(stranger, os.getpid())
    finally:
        os.kill(part, signal.SIGKILL)
        os.kill(stranger, signal.SIGKILL)
        pipe.close()


def test_status_says_why_a_part_does_not_start(server: Server) -> None:
    (server.run / "dbmanager.failed").write_text("disk queue q: cannot reserve 7 bytes\n")
    status, text, result = server.status()
    assert status == 1
    assert "  dbmanager failed at its last start: disk queue q: cannot reserve 7 bytes\n" in text
    assert "unknown" not in text
    assert list(result["failures"]) == ["dbmanager"]


@pytest.mark.parametrize("table", ["api", "pmdaemon"])
@pytest.mark.parametrize("how", ["--background", ""])
def test_a_taken_port_is_reported_at_once_with_its_setting(tmp_path: Path, table: str, how: str) -> None:
    path = tmp_path / "server.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        listens = {"api": "127.0.0.1:0", "pmdaemon": "127.0.0.1:0", table: f"127.0.0.1:{port}"}
        path.write_text(
            f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
            + "".join(f'[{name}]\nlisten = "{value}"\n' for name, value in listens.items())
        )
        result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [how])])
    assert result.exit_code == 78, result.output
    assert f"{table}.listen: cannot listen on 127.0.0.1:{port}" in result.output
    assert not (tmp_path / "data").exists()  # nothing was started
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_runtime_directory_open_to_others_is_reported_in_a_line(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o777)
    result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 77, result.output
    assert "is open to others (mode 0777)" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--background", ""])
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_a_start_that_fails_leaves_nothing_of_its_own_in_shared_memory(
    tmp_path: Path, option: str, has_neighbour: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "sla-7"
    for module in (configuration, directories):
        monkeypatch.setattr(module, "default_runtime_dir", lambda: home)
    if has_neighbour:
        (home / "server-of-another").mkdir(parents=True, mode=0o700)
    path = tmp_path / "server.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        path.write_text(f'data_dir = "{tmp_path}/data"\n[api]\nlisten = "127.0.0.1:{port}"\n')
        result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 78, result.output
    assert sorted(home.glob("*")) == [home / "server-of-another"] * has_neighbour
    assert home.exists() == has_neighbour


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_queue_that_does_not_fit_is_reported_before_anything_is_started(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        f"[database]\nqueue_bytes = {16 << 20}\n"
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    small = SimpleNamespace(f_blocks=1000, f_bavail=1000, f_bfree=1000, f_frsize=4096)
    monkeypatch.setattr("sla_server.db.ingest.queue.os.statvfs", lambda _path: small)
    result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 74, result.output
    needed_bytes = 8192 + (16 << 20) + 8192 + (8 << 10) * 128
    assert f"{tmp_path}/data/queue/ingest needs {needed_bytes} bytes, and 4096000 are" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--check-config", "--background"])
def test_tls_without_an_authority_is_reported_at_once(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n[pmdaemon.tls]\nenabled = true\n'
    )
    result = CliRunner().invoke(cli, ["start", "--config", str(path), option])
    assert result.exit_code == 78
    assert "sla ca init" in result.stderr


@pytest.mark.parametrize("option", ["--check-config", "--background"])
def test_a_damaged_key_of_the_authority_is_said_and_stops_no_start(
    tmp_path: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is enrolled goes on; the start goes as far as the disk, which has no room here."""
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n[pmdaemon.tls]\nenabled = true\n'
    )
    Authority(tmp_path / "data" / "ca").init()
    (tmp_path / "data" / "ca" / "ca.key").write_text("")
    small = SimpleNamespace(f_blocks=1000, f_bavail=1000, f_bfree=1000, f_frsize=4096)
    monkeypatch.setattr("sla_server.db.ingest.queue.os.statvfs", lambda _path: small)
    result = CliRunner().invoke(cli, ["start", "--config", str(path), option])
    assert result.exit_code == 74, result.output
    assert "ca.key: is no private key" in result.stderr
    is_only_checked = option == "--check-config"
    assert ("warning: " not in result.stderr) is is_only_checked
    assert ("bytes, and" not in result.stderr) is is_only_checked


@pytest.mark.parametrize("option", ["--check-config", "--background", ""])
def test_a_certificate_that_is_not_there_is_reported_at_once(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        f'[api]\nlisten = "127.0.0.1:0"\n[api.tls]\ncertificate = "{tmp_path}/none.pem"\n'
        '[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 78, result.output
    assert result.stderr.startswith(f"sla-server: api.tls.certificate: {tmp_path}/none.pem cannot be used")
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_data_directory_where_no_file_can_be_is_not_called_full(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "/proc/nowhere"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 74, result.output
    assert result.stderr.startswith("sla-server: /proc/nowhere: ")
    assert "are free" not in result.stderr


@pytest.mark.parametrize("option", ["--background", ""])
def test_a_data_directory_that_cannot_be_made_is_reported_in_a_line(tmp_path: Path, option: str) -> None:
    path = tmp_path / "server.toml"
    (tmp_path / "file").write_text("in the way")
    path.write_text(
        f'data_dir = "{tmp_path}/file/data"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
    )
    result = CliRunner().invoke(cli, ["start", "--config", str(path), *filter(None, [option])])
    assert result.exit_code == 74, result.output
    assert result.stderr.startswith(f"sla-server: {tmp_path}/file/data")
    assert "Not a directory" in result.stderr


@pytest.mark.parametrize("command", [[], ["start"], ["status"], ["stop"]])
def test_help_has_its_short_form(command: list[str]) -> None:
    assert CliRunner().invoke(cli, [*command, "-h"]).stdout.startswith("Usage: ")


@pytest.mark.parametrize(
    ("ended", "status", "words"),
    [(1, 1, "did not start\n"), (78, 78, "did not start\n"), (None, 75, "goes on trying (pid 77)")],
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
        (tmp_path / "run" / "dbmanager.failed").write_text("the schema is too new\n")
        return SimpleNamespace(pid=77, poll=lambda: ended)

    monkeypatch.setattr("sla_server.cli.server.subprocess.Popen", launched)
    result = CliRunner().invoke(cli, ["start", "--config", str(path), "--background", "--limit", "0"])
    assert result.exit_code == status, result.output
    assert words in result.stderr
    assert "  dbmanager failed at its last start: the schema is too new\n" in result.stderr
    assert result.stderr.endswith("the newest line of the log\n")


def test_a_start_that_fails_shows_the_error_though_more_follows_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(
        f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n'
        '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
        "[database]\nqueue_bytes = 16777216\n"
    )
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "server.log").write_text('process=x level=error error="of a former run"\n')

    def launched(*_args: object, stdout: IO[bytes], **_how: object) -> SimpleNamespace:
        stdout.write(b'process=appserver level=error error="no certificate"\n')
        stdout.writelines(b"process=part%d level=info event=stopped\n" % number for number in range(9))
        return SimpleNamespace(pid=77, poll=lambda: 1)

    monkeypatch.setattr("sla_server.cli.server.subprocess.Popen", launched)
    result = CliRunner().invoke(cli, ["start", "--config", str(path), "--background", "--limit", "0"])
    shown = result.stderr.partition("server.log:\n")[2].splitlines()
    assert shown[0] == 'process=appserver level=error error="no certificate"'
    assert shown[1:] == [f"process=part{number} level=info event=stopped" for number in range(4, 9)]


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1", "86401"])
def test_a_wait_without_an_end_is_refused(seconds: str) -> None:
    result = CliRunner().invoke(cli, ["start", "--background", "--limit", seconds])
    assert result.exit_code == 2
    assert f"'--limit': {seconds}" in result.stderr or f"'--limit': '{seconds}'" in result.stderr


def test_a_data_directory_open_to_others(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir(0o755)
    prepare_data_dir(tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700, "nothing of others can be in it"
    known = tmp_path / "known"
    os.close(lock_data_dir(known))
    known.chmod(0o755)
    os.close(lock_data_dir(known))
    assert known.stat().st_mode & 0o777 == 0o700
    home = tmp_path / "home"
    home.mkdir()
    (home / "letters").touch()
    home.chmod(0o750)
    with pytest.raises(ConfigError, match=f"mode 0750.*Run: chmod 700 {home}"):
        prepare_data_dir(home)
    assert home.stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": "ok"}, "of another data directory answers at http://127.0.0.1:8411. Give that one's"),
        (
            RequestRefused(503, {"status": "down"}),
            "of another data directory answers at http://127.0.0.1:8411.",
        ),
        (ServerDown("http://127.0.0.1:8411", "refused"), "Start one with 'sla-server start'"),
    ],
)
def test_status_says_that_another_server_has_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')

    def get(_client: Client, _path: str) -> Any:
        if isinstance(answer, SlaError):
            raise answer
        return answer

    monkeypatch.setattr(Client, "get", get)
    result = CliRunner().invoke(cli, ["status", "--config", str(path)])
    assert result.exit_code == 69
    assert words in result.stderr


PMDAEMON = """
import os, subprocess, sys
parent_pipe, _held = os.pipe()
subprocess.run(["sh", "-c", "sleep 60 >/dev/null & echo $!"], pass_fds=(parent_pipe,))
sys.stdin.read()
"""


def test_a_pair_whose_template_has_ended_is_ours(server: Server) -> None:
    """Its parent is none of ours then, and its pipe is the PMDaemon's, which the supervisor does not hold."""
    command = [sys.executable, "-c", PMDAEMON]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as pmdaemon:
        assert pmdaemon.stdout is not None
        pair = int(pmdaemon.stdout.readline())
        rows = [{**row, "pid": pmdaemon.pid} if row["name"] == "pmdaemon" else row for row in ROWS]
        server.answers["/processes"] = {"items": [{**ROWS[0], "name": "pair-0", "pid": pair}, *rows]}
        try:
            _status, _text, result = server.status()
        finally:
            os.kill(pair, signal.SIGKILL)
    assert [row["name"] for row in result["processes"] if row["state"] != "running"] == []

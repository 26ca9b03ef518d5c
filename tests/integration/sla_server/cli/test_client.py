from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner

from pmdaemon.runtime import sockets
from sla_server.cli.client import DEFAULT_SERVER, Client
from sla_server.cli.errors import NoToken, ServerDown
from sla_server.cli.main import COMMANDS, cli
from tests.support import api
from tests.support.cli import Terminal
from tests.support.site import Site


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sla.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n[api]\nlisten = "127.0.0.1:9999"\n')
    return path


def test_where_the_server_is(config: Path, tmp_path: Path) -> None:
    assert Client.find(None, None, None).server == DEFAULT_SERVER
    assert Client.find("http://127.0.0.1:1/", None, config).server == "http://127.0.0.1:1"
    assert Client.find("127.0.0.1:28411", None, None).server == "http://127.0.0.1:28411"
    assert Client.find("[::1]:8411/", None, None).server == "http://[::1]:8411"
    assert Client.find(None, None, config).server == "http://127.0.0.1:9999"
    config.write_text('[api]\nlisten = "127.0.0.1:0"\n')
    assert Client.find(None, None, config).server == DEFAULT_SERVER


def test_where_the_token_is(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLA_TOKEN", "SLA__DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    client = Client.find(None, None, config)
    with pytest.raises(NoToken, match="--token-file"):
        client.token()
    (tmp_path / "api.token").write_text("from-data-dir\n")
    assert client.token() == "from-data-dir"
    other = tmp_path / "other"
    other.write_text("from-option")
    assert Client.find(None, other, config).token() == "from-option"
    config.write_text(f'[api]\ntoken_file = "{other}"\n')
    assert client.token() == "from-option"
    monkeypatch.setenv("SLA_TOKEN", "from-environment")
    assert client.token() == "from-environment"


@pytest.mark.parametrize(
    ("server", "sent"),
    [
        ("http://127.0.0.1:8411", True),
        ("http://localhost:8411", True),
        ("http://[::1]:8411", True),
        ("https://sla.example", True),
        ("http://sla.example:8411", False),
        ("http://10.0.0.1:8411", False),
        ("nonsense", False),
    ],
)
def test_the_token_is_never_sent_in_clear_over_a_network(
    monkeypatch: pytest.MonkeyPatch, server: str, sent: bool
) -> None:
    monkeypatch.setenv("SLA_TOKEN", "secret")
    client = Client(server)
    if sent:
        assert client.token() == "secret"
    else:
        with pytest.raises(NoToken, match="ssh -L"):
            client.token()


def failing(error: Exception) -> httpx.MockTransport:
    def handler(_request: httpx.Request) -> httpx.Response:
        raise error

    return httpx.MockTransport(handler)


def run(transport: httpx.BaseTransport, *arguments: str) -> tuple[int, str]:
    client = Client(DEFAULT_SERVER, transport=transport)
    done = CliRunner().invoke(cli, list(arguments), obj=client, catch_exceptions=False)
    return done.exit_code, done.stderr


@pytest.mark.parametrize("error", [httpx.ConnectError("refused"), httpx.ReadTimeout("slow")])
def test_a_server_that_is_down_says_how_to_start_it(error: Exception) -> None:
    status, text = run(failing(error), "get", "volumes")
    assert status == 69
    assert "sla-server start --background" in text
    assert "SLA_SERVER" in text
    assert "Traceback" not in text


def test_an_address_of_another_kind_is_no_server_that_is_down() -> None:
    status, text = run(failing(httpx.UnsupportedProtocol("ftp")), "get", "volumes")
    assert (status, "start --background" in text) == (2, False)
    assert "write http://HOST:PORT or https://HOST:PORT" in text


@pytest.mark.parametrize(
    ("kind", "body"),
    [("text/html", b"<html>hello"), ("application/json", b"{"), ("application/json", b"\xff")],
)
def test_something_else_listens_there(kind: str, body: bytes) -> None:
    other = httpx.MockTransport(
        lambda _request: httpx.Response(200, content=body, headers={"Content-Type": kind})
    )
    status, text = run(other, "get", "volumes")
    assert status == 76
    assert "not an SLA server" in text


def test_a_wrong_token(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_TOKEN", "wrong")
    done = sla("mode", "enforce")
    assert done.exit_code == 77
    assert sla.asked == []


def test_a_database_that_is_away(sla: Terminal) -> None:
    sla.source.away = True
    done = sla("get", "volumes")
    assert done.exit_code == 1
    assert "connection refused" in done.stderr


def test_the_author_is_reported(sla: Terminal) -> None:
    sla("mode", "enforce")
    assert sla.mailbox.posted[0]["who"].startswith("local (")


@pytest.mark.parametrize("command", [[], ["get"], ["throttle", "set"], ["policy"], ["top"], ["apply"]])
def test_help_of_every_command(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_a_token_and_a_user_that_no_header_holds(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "j\u00fcrgen")
    assert sla("mode", "observe").exit_code == 0
    monkeypatch.setenv("SLA_TOKEN", "t\u00f6ken")
    result = sla("mode", "observe")
    assert result.exit_code == 77
    assert "SLA_TOKEN holds no token" in result.output


def test_a_configuration_of_another_form_is_left_to_the_server(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("api = 5\n")
    assert Client.find(None, None, path).server == "http://127.0.0.1:8411"


@pytest.mark.parametrize(
    "rate", [("--iops", "inf"), ("--mbps", "nan"), ("--iops", "5", "--for", "9" * 400 + "d")]
)
def test_rates_and_times_that_are_no_numbers(sla: Terminal, rate: tuple[str, ...]) -> None:
    result = sla("throttle", "set", "batch", "--reason", "x", *rate)
    assert result.exit_code == 2
    assert re.search(r"is not a|is too long; give at most 366d", result.output)


class Listener:
    """A process of some user that waits for tokens."""

    def __init__(self, folder: Path) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.server = f"http://127.0.0.1:{self.tcp.getsockname()[1]}"
        self.path = folder / "api.sock"
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(self.path))
        self.unix.listen()

    def close(self) -> None:
        self.tcp.close()
        self.unix.close()


@pytest.fixture
def squatter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    """It belongs to a user that is neither we, root nor the token's owner."""
    monkeypatch.setattr(sockets, "listener_uids", lambda *_: {4242})
    monkeypatch.setattr(sockets, "unix_peer_uid", lambda _connection: 4242)
    made = Listener(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("door", ["tcp", "unix"])
@pytest.mark.parametrize("source", ["SLA_TOKEN", "file"])
def test_another_users_process_is_sent_no_token(
    squatter: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, door: str, source: str
) -> None:
    monkeypatch.delenv("SLA_TOKEN", raising=False)
    if source == "SLA_TOKEN":
        monkeypatch.setenv("SLA_TOKEN", "secret")
    (tmp_path / "api.token").write_text("secret")
    local = squatter.path if door == "unix" else None
    client = Client(squatter.server, token_file=tmp_path / "api.token", local=local)
    with pytest.raises(NoToken, match="user 4242, which is neither you"):
        client.change("PUT", "/mode", json={"mode": "observe"})
    squatter.tcp.setblocking(False)
    with pytest.raises(BlockingIOError):
        squatter.tcp.accept()


def test_the_owner_of_the_tokens_file_may_have_it(
    squatter: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLA_TOKEN", raising=False)
    token = tmp_path / "api.token"
    token.write_text("secret")
    monkeypatch.setattr(sockets, "listener_uids", lambda *_: {token.stat().st_uid})
    Client(squatter.server, token_file=token)._check_peer()
    monkeypatch.setattr(sockets, "listener_uids", lambda *_: set())
    with pytest.raises(ServerDown, match="no process listens"):
        Client(squatter.server, token_file=token)._check_peer()


def both_addresses() -> tuple[socket.socket, socket.socket]:
    """Listeners of one port at 127.0.0.1 and at ::1."""
    for _ in range(100):
        four = socket.create_server(("127.0.0.1", 0))
        try:
            return four, socket.create_server(("::1", four.getsockname()[1]), family=socket.AF_INET6)
        except OSError:  # another process has it
            four.close()
    raise AssertionError("no port is free at both addresses")


def answer_one(listener: socket.socket, got: list[bytes]) -> None:
    connection, _ = listener.accept()
    with connection:
        got.append(connection.recv(65_536))
        connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


@pytest.mark.parametrize("listening", ["both", "::1"])
def test_the_token_goes_to_the_address_whose_listener_was_seen(
    monkeypatch: pytest.MonkeyPatch, listening: str
) -> None:
    monkeypatch.setenv("SLA_TOKEN", "secret")
    seen = []
    look = sockets.listener_uids
    monkeypatch.setattr(sockets, "listener_uids", lambda *at: seen.append(at) or look(*at))
    # A resolver may give either address first; here it is the other one.
    resolve = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *more, **how: resolve("::1" if "localhost" in str(host) else host, *more, **how),
    )
    four, six = both_addresses()
    port = four.getsockname()[1]
    server, stranger = (four, six) if listening == "both" else (six, four)
    if listening != "both":
        four.close()
    got: list[bytes] = []
    thread = threading.Thread(target=answer_one, args=(server, got), daemon=True)
    thread.start()
    client = Client(f"http://localhost:{port}")
    try:
        client.change("PUT", "/mode", json={"mode": "observe"})
        thread.join(60)
        assert b"Bearer secret" in got[0]
        assert f"Host: localhost:{port}\r\n".encode() in got[0]
        assert seen[-1] == server.getsockname()[:2]
        if listening == "both":
            stranger.setblocking(False)
            with pytest.raises(BlockingIOError):
                stranger.accept()
    finally:
        client.close()
        four.close()
        six.close()


def test_the_socket_in_the_data_directory_is_preferred(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLA__DATA_DIR", raising=False)
    assert Client.find(None, None, config).local is None
    listener = Listener(tmp_path)
    try:
        assert Client.find(None, None, config).local == tmp_path / "api.sock"
        assert Client.find("http://127.0.0.1:1", None, config).local is None, "an address was given"
    finally:
        listener.close()
    assert Client.find(None, None, config).local is None, "the server that made it is gone"


HEAVY = (
    "sqlalchemy",
    "numpy",
    "cryptography",
    "pyarrow",
    "flask",
    "alembic",
    "psycopg",
    "pydantic",
    "rich.traceback",
    "rich.progress",
    "pygments",
    "anyio",
    "trio",
)


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["get", "volumes"], {}),
        (["apply", "-f", "-"], {}),
        (["mode"], {}),
        (["top", "--once"], {}),
        (["throttle", "release", "x"], {}),
        (["--help"], {}),
        ([], {"_SLA_COMPLETE": "bash_complete", "COMP_WORDS": "sla ", "COMP_CWORD": "1"}),
        ([], {"_SLA_COMPLETE": "bash_complete", "COMP_WORDS": "sla get ", "COMP_CWORD": "2"}),
    ],
)
def test_everyday_commands_import_nothing_heavy(
    arguments: list[str], environment: dict[str, str], tmp_path: Path
) -> None:
    code = (
        "import sys, atexit\n"
        f"heavy = lambda: [name for name in {HEAVY!r} if name in sys.modules]\n"
        "atexit.register(lambda: print('heavy:', heavy(), file=sys.stderr))\n"
        f"sys.argv = ['sla', *{arguments!r}]\n"
        "from sla_server.cli.__main__ import main\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "SLA_SERVER": "http://127.0.0.1:9", "SLA_TOKEN": "x", **environment},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert "heavy: []" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    if environment or arguments == ["--help"]:
        assert (
            "volumes" in done.stdout if "get " in environment.get("COMP_WORDS", "") else "get" in done.stdout
        )


PACKAGES = """
import atexit, sys
def tell():
    names = {name.partition(".")[0] for name in sys.modules} - sys.stdlib_module_names
    print(*(name for name in names if name[0] != "_"), file=sys.stderr)
atexit.register(tell)
"""
LEAST = "import click, httpcore, httpx, rich.table"
LIGHT_COMMANDS = (
    (("get", "slas"), "erp-gold/latency"),
    (("describe", "volume", "batch"), "batch"),
    (("why", "batch"), "batch"),
    (("top", "--once"), "erp-gold/latency"),
)
"""Commands that are called often, and something that each prints."""
COMMAND = "from sla_server.cli.__main__ import main; main()"


def test_a_table_takes_no_package_beyond_those_of_the_call_and_the_table(tmp_path: Path) -> None:
    """Each import is CPU of every call: pydantic, for one value of a file, was a seventh of it."""
    site = Site(api.data_dir(tmp_path))

    def ran(code: str, *words: str) -> tuple[str, set[str]]:
        done = subprocess.run(
            [sys.executable, "-c", PACKAGES + code, *words],
            env={**os.environ, "SLA_SERVER": site.url},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout, set(done.stderr.split())

    try:
        _, least = ran(LEAST)
        found = [ran(COMMAND, *words) for words, _shown in LIGHT_COMMANDS]
    finally:
        site.close()
        site.mailbox.close()
    for (words, expected), (shown, packages) in zip(LIGHT_COMMANDS, found, strict=True):
        assert expected in shown
        assert packages - least == {"pmdaemon", "sla_server", "structlog"}, words


def test_the_table_of_commands_says_what_they_say_themselves() -> None:
    context = click.Context(cli)
    for name, (_module, about) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert command.name == name
        assert (command.help or "").split("\n")[0] == about

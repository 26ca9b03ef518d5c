from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from sla_server.cli.client import DEFAULT_SERVER, Client
from sla_server.cli.errors import NoToken
from sla_server.cli.main import cli
from tests.unit.cli.conftest import Terminal


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "sla.toml"
    path.write_text(f'data_dir = "{tmp_path}"\n[api]\nlisten = "127.0.0.1:9999"\n')
    return path


def test_where_the_server_is(config: Path, tmp_path: Path) -> None:
    assert Client.find(None, None, None).server == DEFAULT_SERVER
    assert Client.find("http://127.0.0.1:1/", None, config).server == "http://127.0.0.1:1"
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


def test_the_author_is_told(sla: Terminal) -> None:
    sla("mode", "enforce")
    assert sla.box.posted[0]["who"].startswith("token (")


@pytest.mark.parametrize("command", [[], ["get"], ["throttle", "set"], ["policy"], ["top"], ["apply"]])
def test_help_of_every_command(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


def test_a_token_and_a_user_that_no_header_holds(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "j\u00fcrgen")
    assert sla("mode", "observe").exit_code == 0
    monkeypatch.setenv("SLA_TOKEN", "t\u00f6ken")
    told = sla("mode", "observe")
    assert told.exit_code == 77
    assert "SLA_TOKEN holds no token" in told.output


def test_a_configuration_of_another_form_is_left_to_the_server(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text("api = 5\n")
    assert Client.find(None, None, path).server == "http://127.0.0.1:8411"


@pytest.mark.parametrize(
    "rate", [("--iops", "inf"), ("--mbps", "nan"), ("--iops", "5", "--for", "9" * 400 + "d")]
)
def test_rates_and_times_that_are_no_numbers(sla: Terminal, rate: tuple[str, ...]) -> None:
    told = sla("throttle", "set", "batch", "--reason", "x", *rate)
    assert told.exit_code == 2
    assert "is not a" in told.output

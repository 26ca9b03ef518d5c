"""Completion: scripts of the shells, kinds, and names from the server."""

from __future__ import annotations

import click
import pytest
from click.shell_completion import ShellComplete

from sla_server.cli.client import Client
from sla_server.cli.completion import SHELLS, TIMEOUT_S
from sla_server.cli.errors import ServerDown
from sla_server.cli.main import cli
from tests.support.cli import SERVER, Terminal


class Bash(ShellComplete):
    """Completion without a shell."""

    name = "test"
    source_template = ""


@pytest.fixture
def client(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> Client:
    """The client that completion finds."""
    found = Client(SERVER, transport=sla.transport)
    monkeypatch.setattr(Client, "find", lambda *_given: found)
    return found


def completed(*words: str) -> list[str]:
    return [
        item.value
        for item in Bash(cli, {}, "sla", "_SLA_COMPLETE").get_completions(list(words[:-1]), words[-1])
    ]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("expl",), ["explain"]),
        (("get", "sl"), ["slas", "slices"]),
        (("get", "slas", ""), ["erp-gold"]),
        (("get", "volume", "b"), ["batch"]),
        (("get", "volume/e"), ["volume/erp-db"]),
        (("get", "slices", "e"), ["erp-gold"]),
        (("describe", "volume", ""), ["erp-db", "batch"]),
        (("delete", "route", ""), ["all"]),
        (("why", ""), ["erp-db", "batch", "erp-gold"]),
        (("explain", "SLA.spec.obj"), ["SLA.spec.objectives"]),
        (("explain", "ro"), ["Route"]),
        (("get", "slas", "--sev"), ["--severity"]),
        (("get", "slas", "zzz"), []),
    ],
)
def test_words_and_names(client: Client, words: tuple[str, ...], found: list[str]) -> None:
    assert completed(*words) == found


def test_a_server_that_does_not_answer_offers_nothing_and_soon(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_asked: object, **_query: object) -> None:
        raise ServerDown(SERVER, "refused")

    monkeypatch.setattr(client, "get", away)
    assert completed("get", "slas", "") == []
    assert client.timeout_s == TIMEOUT_S <= 1


@pytest.mark.parametrize("shell", list(SHELLS))
def test_scripts_of_the_shells(sla: Terminal, shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # click asks bash for its version, which is a process.
    monkeypatch.setattr(click.shell_completion.BashComplete, "_check_version", staticmethod(lambda: None))
    text = sla("completion", shell).output
    assert f"_SLA_COMPLETE={shell}_complete" in text

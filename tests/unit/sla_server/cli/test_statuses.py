"""Every command: its help at 80 columns, and an exit status of the table whatever goes wrong."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import click
import httpx
import pytest
from click.testing import CliRunner, Result

import sla_server
from pmdaemon.errors import SlaError
from sla_server.cli.client import Client
from sla_server.cli.main import COMMANDS, cli
from sla_server.cli.server import cli as server
from sla_server.cli.statuses import EXIT_STATUSES

OFFLINE = ("validate", "schema", "explain", "completion", "queue", "mailbox", "import", "simulate")
"""Commands that ask no server."""
LOCAL = ("ca", "storage", "support", "policy run", "policy rollup", "events")
"""Commands that work on the server's files, or start a program: not called here."""


def leaves(
    group: click.Group, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        yield (*words, name), found
        if isinstance(found, click.Group):
            yield from leaves(found, (*words, name))


ALL = dict(leaves(cli))
CALLED = [
    words
    for words, command in ALL.items()
    if not isinstance(command, click.Group) and words[0] not in LOCAL and " ".join(words) not in LOCAL
]


def run(*words: str) -> Result:
    def refuse(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    client = Client("http://127.0.0.1:8411", transport=httpx.MockTransport(refuse))
    return CliRunner().invoke(cli, list(words), obj=client)


def value_for(parameter: click.Parameter) -> str:
    if isinstance(parameter.type, click.Choice):
        return str(next(iter(parameter.type.choices)))
    if isinstance(parameter.type, click.IntRange | click.FloatRange):
        return str(parameter.type.min or 1)
    return "10m" if parameter.name in ("lasting",) else "nothing-there"


def arguments(command: click.Command) -> list[str]:
    """What has to be given, and no more."""
    found: list[str] = []
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and (parameter.required or parameter.nargs == -1):
            found.append(value_for(parameter))
        elif isinstance(parameter, click.Option) and parameter.required:
            found += [parameter.opts[0], value_for(parameter)]
    return found


@pytest.mark.parametrize("words", list(ALL), ids=" ".join)
def test_help_fits_eighty_columns(words: tuple[str, ...]) -> None:
    done = CliRunner().invoke(cli, [*words, "--help"], obj=Client("http://x"), prog_name="sla")
    assert done.exit_code == 0
    assert [line for line in done.output.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", list(ALL), ids=" ".join)
def test_an_option_that_is_not_there(words: tuple[str, ...]) -> None:
    assert run(*words, "--no-such-option").exit_code == 2


@pytest.mark.parametrize("words", CALLED, ids=" ".join)
def test_without_a_server(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLA_TOKEN", "t" * 43)
    monkeypatch.setenv("SLA__RUNTIME_DIR", str(tmp_path))
    done = run(*words, *arguments(ALL[words]))
    if words[0] in OFFLINE or words == ("report", "issue"):
        assert done.exit_code in EXIT_STATUSES
    elif done.exit_code == 2:  # what was given does not do: a file that is not there, a pair of options
        assert "sla: " in done.stderr or "Usage: " in done.stderr
    else:
        assert done.exit_code == 69, done.stderr
        assert "no SLA server answers" in done.stderr
        assert "sla-server start" in done.stderr


def errors(root: type[SlaError]) -> Iterator[type[SlaError]]:
    yield root
    for each in root.__subclasses__():
        yield from errors(each)


def test_every_error_has_a_status_of_the_table() -> None:
    for found in pkgutil.walk_packages(sla_server.__path__, "sla_server."):
        if found.name.endswith(".errors"):
            importlib.import_module(found.name)
    statuses = {error.exit_status for error in errors(SlaError) if error.__module__.startswith("sla_server")}
    assert statuses <= set(EXIT_STATUSES)
    assert len(statuses) > 8
    assert all(said.meaning.endswith(".") for said in EXIT_STATUSES.values())


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("gett", "'gett' is no command. Near it: get"),
        ("list", "Write: sla get"),
        ("rm", "Write: sla delete"),
        ("status", "The server has it: sla-server status"),
        ("slas", "To list them: sla get slas"),
        ("zzz", "sla --help lists them"),
    ],
)
def test_a_word_that_is_no_command_is_answered_with_the_one_that_was_meant(word: str, says: str) -> None:
    done = run(word)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


def test_the_words_of_the_help_are_those_of_the_commands() -> None:
    for name, (_module, about) in COMMANDS.items():
        assert (ALL[name,].help or "").split("\n")[0] == about
    assert {command.name for _words, command in leaves(server)} >= {"start", "stop", "status"}

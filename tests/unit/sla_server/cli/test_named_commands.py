"""Commands that the page and messages tell people to type exist, with the options that they are given."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import dashboard
import sla_server
from sla_server.cli.main import cli
from sla_server.events import catalogue

PLACES = {
    "page": (Path(dashboard.__file__).parent, ("**/*.js", "**/*.html")),
    "server": (Path(sla_server.__file__).parent, ("**/*.py",)),
}
NAMED = re.compile(r"[`'\"(]sla ((?:[a-z-]+ ?)+(?:[^`'\"<>|]*?))[`'\")]")
NOT_COMMANDS = {"and", "is", "not", "uses"}


def named(place: str) -> Iterator[tuple[str, str]]:
    """(where, words after ``sla``) of each command in quotes, backticks or brackets."""
    folder, patterns = PLACES[place]
    for pattern in patterns:
        for path in sorted(folder.glob(pattern)):
            text = path.read_text()
            for match in NAMED.finditer(text):
                words = match[1].split()
                if words[0] not in NOT_COMMANDS:
                    yield f"{path.name}:{text[: match.start()].count(chr(10)) + 1}", match[1]


def problem_of(line: str) -> str:
    """What does not exist of it; "" if all does."""
    words = re.sub(r"\$\{[^}]*\}|\{[^}]*\}", "NAME", line).split()
    command: click.Command | None = cli
    while words and isinstance(command, click.Group) and re.fullmatch(r"[a-z][a-z-]*", words[0]):
        found = command.get_command(click.Context(command), words[0])
        if found is None:
            return "" if command.name == "report" else f" no {words[0]!r}"
        command = found
        words = words[1:]
    if command.name == "report":  # it takes an agreement in a command's place
        return ""
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    used = [word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][a-z-]*(=.*)?", word)]
    return "".join(f" no {option}" for option in used if option not in options)


@pytest.mark.parametrize("place", PLACES)
def test_commands_that_people_are_told_to_type_exist(place: str) -> None:
    found = list(named(place))
    assert len(found) > 10, "commands are found"
    wrong = [f"{where}: sla {line}:{problem}" for where, line in found if (problem := problem_of(line))]
    assert wrong == []


def test_the_runbook_says_what_to_do_and_sets_off_what_is_typed() -> None:
    """Its entries are the runbook: one that sends its reader there leads in a circle."""
    kinds = [each for group in catalogue.GROUPS.values() for each in group.items()]
    said = [(name, text) for name, kind in kinds for text in (kind.meaning, kind.action)]
    assert [name for name, text in said if "runbook" in text.lower()] == []
    assert [name for name, text in said if text.count("`") % 2] == []
    plain = [(name, re.sub(r"`[^`]*`", "", text)) for name, text in said]
    assert [name for name, text in plain if re.search(r"\bsla(-server)? [a-z]|\w/\w+\.md|--\w", text)] == []

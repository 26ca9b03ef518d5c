"""Forms of an answer: every command that has ``-o`` takes them all, and they say the same."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click
import pytest
from ruamel.yaml import YAML

from sla_server.cli.get import DOCUMENTS
from sla_server.cli.main import cli
from sla_server.cli.output import OutputForm, as_yaml, names_of
from sla_server.cli.tables import KINDS
from tests.support.cli import Terminal, name_of

MAKE_FILES = ("ca", "simulate", "report")
"""Their ``-o`` says which file to write, or in which form of a report."""


def commands_of(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, with its words."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands_of(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


def test_every_form_is_taken_wherever_one_is() -> None:
    forms = {
        words: option.type
        for words, command in commands_of(cli)
        for option in command.params
        if "-o" in option.opts and words.partition(" ")[0] not in MAKE_FILES
    }
    assert len(forms) > 30
    assert [words for words, type_ in forms.items() if not isinstance(type_, OutputForm)] == []
    taken = {tuple(type_.choices) for type_ in forms.values() if isinstance(type_, OutputForm)}
    every = ("table", "wide", "json", "yaml", "name")
    assert taken == {every, every[:-1]}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in DOCUMENTS])
def test_yaml_says_what_json_says(sla: Terminal, kind: str) -> None:
    rows = json.loads(sla("get", kind, *name_of(kind), "-o", "json").output)
    assert YAML(typ="safe").load(sla("get", kind, *name_of(kind), "-o", "yaml").output) == rows


def test_yaml_of_what_json_has() -> None:
    value = {"b": None, "a": [1, 2.5, True, "2026-01-01", "yes", "", "ü: #"], "c": {}, "long": "word " * 60}
    shared = [1]
    value["twice"] = [shared, shared]
    text = as_yaml(value)
    assert YAML(typ="safe").load(text) == value
    assert list(YAML(typ="safe").load(text)) == list(value), "keys keep their order"
    assert "&" not in text


def test_names_are_what_commands_take(sla: Terminal) -> None:
    assert sla("get", "slas", "-o", "name").output == "sla/erp-gold\n"
    assert sla("get", "volumes", "-o", "name").output.splitlines() == ["volume/erp-db", "volume/batch"]
    assert sla("get", "events", "--limit", "1", "-o", "name").output == "event/e0000\n"
    assert sla("get", "policies", "-o", "name").output == "policy/3\n"
    sla.mailbox.answer = lambda _header: (True, 200, {"throttle_id": "t-9"})
    set_ = sla("throttle", "set", "batch", "--iops", "9", "--reason", "x", "-o", "name")
    assert set_.output == "throttle/t-9\n"
    assert list(names_of([{"kind": "SLA", "name": "a"}, {"name": "a", "kind": "SLA"}, {}])) == ["sla/a"]


def test_names_of_what_has_no_kind_are_what_the_commands_beside_it_take(sla: Terminal) -> None:
    rows = {words: json.loads(sla(*words, "-o", "json").output) for words in LISTS}
    for words, key in LISTS.items():
        named = sla(*words, "-o", "name").output.splitlines()
        assert rows[words], "an empty list proves nothing"
        assert named == list(dict.fromkeys(row[key] for row in rows[words]))


LISTS = {
    ("user", "list"): "name",
    ("user", "sessions"): "session_id",
    ("approvals", "list"): "approval_id",
    ("report", "list"): "report_id",
}


def test_the_live_picture_has_every_form(sla: Terminal) -> None:
    whole = json.loads(sla("top", "-o", "json").output)
    assert set(whole) == {"at_us", "mode", "policy", "server", "slas", "volumes", "throttles", "events"}
    assert YAML(typ="safe").load(sla("top", "-o", "yaml").output)["slas"] == whole["slas"]
    one = json.loads(sla("top", "--only", "volumes", "--rows", "1", "--sort", "iops", "-o", "json").output)
    assert [row["volume"] for row in one["volumes"]] == [
        max(whole["volumes"], key=lambda row: row["iops"])["volume"]
    ]
    assert "slas" not in one
    named = sla("top", "--only", "slas", "--only", "volumes", "-o", "name").output.splitlines()
    assert set(named) == {f"sla/{row['name']}" for row in whole["slas"]} | {
        f"volume/{row['volume']}" for row in whole["volumes"]
    }
    assert len(set(named)) == len(named)


def test_wide_tables_are_not_folded(sla: Terminal) -> None:
    lines = sla("get", "events", "-o", "wide").output.splitlines()
    assert len(lines) == 2 + 20
    long = sla("get", "throttles", "-o", "wide").output.splitlines()
    assert len(long) == 3

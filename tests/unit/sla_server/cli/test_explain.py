"""``sla explain``: every field of every kind of document has a type and a text, at 80 columns."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from sla_server.agreements.load import KINDS
from sla_server.cli.explain import (
    DOCUMENT_KINDS,
    Schema,
    find,
    lines_of,
    properties,
    resolved,
    tree_lines,
    type_of,
)
from sla_server.cli.main import cli
from tests.support.cli import Terminal


def fields(title: str, forms: list[Schema], root: Schema) -> Iterator[tuple[str, Schema]]:
    """Every field of a document, by its place."""
    for form in forms:
        for name, field in properties(form, root).items():
            yield f"{title}.{name}", field
            yield from fields(f"{title}.{name}", [field], root)


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_every_field_has_a_type_and_a_text(kind: str) -> None:
    title, forms, root = find(kind)
    found = dict(fields(title, forms, root))
    assert len(found) >= 8
    assert [place for place, field in found.items() if type_of(field, root) == "any value"] == []
    assert [place for place, field in found.items() if not resolved(field, root).get("description")
            and "anyOf" not in field] == []  # fmt: skip
    for place in found:
        lines = list(lines_of(*find(place)))
        assert lines[0] == place
        assert len(lines) > 1
        assert max(map(len, lines)) <= 80, place
    assert max(map(len, tree_lines(title, forms, root))) <= 80


def test_the_kinds_are_those_of_the_loader() -> None:
    assert set(DOCUMENT_KINDS) == set(KINDS)


def test_a_field_with_its_limits_default_and_forms(sla: Terminal) -> None:
    shown = sla("explain", "SLA.spec.objectives").output
    assert shown.startswith("SLA.spec.objectives\n  list of object, at most 16 entries\n")
    for words in (
        "latency objective: Judged",
        "has promised_iops",
        "no_data: one of good, bad, exclude, bad_if_ours; default bad_if_ours",
        "name: text; required",
    ):
        assert words in shown
    assert "required with iops objective" in " ".join(shown.split())
    assert "default UTC" in sla("explain", "sla.spec.window.tz").output
    assert "duration such as" in sla("explain", "SLA.spec.objectives[0].budgeting.slice").output
    assert "from 50 to 99.99" in sla("explain", "SLA.spec.objectives.indicator.percentile").output
    assert json.loads(sla("explain", "Route.spec.remind", "-o", "json").output)["anyOf"]
    assert "    up_to_iops: number above 0" in sla("explain", "SLA.spec", "--recursive").output


def test_the_list_of_kinds(sla: Terminal) -> None:
    lines = sla("explain").output.splitlines()
    assert [line.split()[0] for line in lines[: len(DOCUMENT_KINDS)]] == list(DOCUMENT_KINDS)
    assert sla("explain", "routes").output == sla("explain", "Route").output


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("SLA.spec.objectivs", "SLA.spec has no field 'objectivs'. Near it: objectives"),
        ("Rout", "'Rout' is no kind of document. Near it: Route"),
        ("SLA.spec.priority.x", "SLA.spec.priority has no field 'x'. It has no fields"),
        ("zzz", "There are SLA, Maintenance"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(sla: Terminal, place: str, says: str) -> None:
    done = sla("explain", place)
    assert (done.exit_code, says in done.stderr) == (2, True), done.stderr


def test_no_client_is_made_which_it_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither are its packages imported, nor does it fail where the server's file is wrong."""
    monkeypatch.setenv("SLA_CONFIG", "/nowhere/server.toml")
    monkeypatch.setitem(sys.modules, "sla_server.cli.client", None)  # to import it is an ImportError
    done = CliRunner().invoke(cli, ["explain", "SLA"])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("SLA\n")

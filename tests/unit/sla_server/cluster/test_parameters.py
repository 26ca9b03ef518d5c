"""Acquirable parameters: read from a command line, refused with what they may be, and kept in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.cluster import parameters
from sla_server.cluster.errors import BadParameter, DocumentDamaged
from sla_server.cluster.shared import NodeDocuments, SharedDocument

NAME = parameters.DOCUMENT


def test_defaults_hold_until_a_value_is_set() -> None:
    found = parameters.values({"max_connections": 100})
    assert found["max_connections"] == 100
    assert found["ping_interval_s"] == 10
    assert found.keys() == parameters.PARAMETERS.keys()


def test_every_default_is_one_that_may_be_set() -> None:
    assert [n for n, p in parameters.PARAMETERS.items() if p.problem(p.default)] == []


def test_what_a_later_release_has_set_is_passed_over() -> None:
    found = parameters.values({"of_later": 1, "log_level": "trace", "max_connections": True})
    assert found == parameters.values({})


def test_assignments_become_values() -> None:
    made = parameters.parse(["max_connections=200", "log_level = warning"])
    assert made == {"max_connections": 200, "log_level": "warning"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_connections", "write NAME=VALUE"),
        ("max_connections=many", "it must be a whole number"),
        ("max_connections=2", "it must be from 16 to 1000000"),
        ("log_level=loud", "it must be one of debug, info, warning, error"),
        ("replicas=5", "acquirable parameters are log_age_s, log_bytes"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_may_be(text: str, why: str) -> None:
    with pytest.raises(BadParameter, match=why):
        parameters.parse([text])


def test_a_node_keeps_the_highest_revision_over_a_restart(tmp_path: Path) -> None:
    held = NodeDocuments(tmp_path)
    assert held.get(NAME) == SharedDocument()
    assert held.take(NAME, SharedDocument(2, {"max_connections": 99}))
    assert not held.take(NAME, SharedDocument(2, {"max_connections": 98}))
    assert not held.take(NAME, SharedDocument(1, {}))
    again = NodeDocuments(tmp_path)
    assert again.get(NAME) == SharedDocument(2, {"max_connections": 99})
    assert (tmp_path / "parameters.json").stat().st_mode & 0o777 == 0o600


def test_a_node_takes_what_is_newest_of_what_others_have(tmp_path: Path) -> None:
    held = NodeDocuments(tmp_path)
    there = [{NAME: SharedDocument(revision, {}).encode()} for revision in (3, 5, 4)]
    held.take_all([*there, {}, {NAME: "damaged"}])
    assert held.get(NAME).revision == 5
    assert held.encoded()[NAME] == SharedDocument(5, {}).encode()


@pytest.mark.parametrize("text", ["", "[]", '{"revision": -1, "body": {}}', '{"revision": 1, "body": []}'])
def test_a_damaged_file_is_named_with_what_to_do(tmp_path: Path, text: str) -> None:
    (tmp_path / "parameters.json").write_text(text)
    with pytest.raises(DocumentDamaged, match="Remove it: this node takes its content from the others"):
        NodeDocuments(tmp_path)

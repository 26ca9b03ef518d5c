"""The published JSON Schema: equal to the models, and true of documents that are accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ruamel.yaml import YAML

from docs import documents_schema
from sla_server.agreements.load import KINDS
from sla_server.agreements.schema import DIALECT, MODELS, document_schema
from tests.support.agreements import FULL, calendar_text, maintenance_text, simple


def fits(value: Any, schema: dict[str, Any], whole: dict[str, Any]) -> bool:
    """As much of JSON Schema as the models make use of."""
    if "$ref" in schema:
        return fits(value, whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "oneOf" in schema and not any(fits(value, one, whole) for one in schema["oneOf"]):
        return False
    if "anyOf" in schema and not any(fits(value, one, whole) for one in schema["anyOf"]):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        other = schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            fits(item, known[name], whole) if name in known else other is not False
            for name, item in value.items()
        )
    if isinstance(value, list):
        return all(fits(item, schema.get("items", {}), whole) for item in value)
    if isinstance(value, str) and schema.get("type") == "string":
        return re.search(schema.get("pattern", ""), value) is not None
    kinds = {"string": str, "number": (int, float), "integer": int, "boolean": bool, "null": type(None)}
    kind = schema.get("type")
    return not isinstance(kind, str) or kind not in kinds or isinstance(value, kinds[kind])


def plain(text: str) -> Any:
    return YAML(typ="safe", pure=True).load(text)


def test_the_published_file_is_made_from_the_models() -> None:
    assert documents_schema.TARGET.read_text() == documents_schema.render(), "run 'make docs'"


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_alone_is_described_by_the_model_that_reads_it(kind: str) -> None:
    expected = KINDS[kind].model_json_schema(by_alias=True)
    assert document_schema(kind) == {"$schema": DIALECT, "title": kind, **expected}


def test_each_kind_named_for_explain_is_one_that_is_read() -> None:
    assert set(MODELS) <= set(KINDS)


@pytest.mark.parametrize("text", [FULL, simple(), calendar_text(holidays='"2026-12-25"'), maintenance_text()])
def test_documents_that_are_accepted_fit(text: str) -> None:
    whole = document_schema()
    assert fits(plain(text), whole, whole)
    alone = document_schema(plain(text)["kind"])
    assert fits(plain(text), alone, alone)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("slice: 1m", "slice: 90"),
        ("slice: 1m", "slice: 1 minute"),
        ("priority: gold", "priority: golden"),
        ("priority: gold", "prio: gold"),
        ("percentile: 95", 'percentile: "95"'),
        ("kind: SLA", "kind: Calendar"),
        ("volumes: [vol-17]", "volumes: ['a b']"),
    ],
)
def test_documents_that_are_refused_do_not(old: str, new: str) -> None:
    whole = document_schema()
    assert old in FULL
    assert not fits(plain(FULL.replace(old, new)), whole, whole)


def test_every_kind_has_a_schema() -> None:
    assert [document_schema(kind)["properties"]["kind"]["const"] for kind in KINDS] == list(KINDS)
    with pytest.raises(KeyError):
        document_schema("Nothing")

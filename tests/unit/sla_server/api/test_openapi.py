"""The OpenAPI document: valid, complete, and what is answered is what it says."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from openapi_schema_validator import OAS31Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from sla_server.api import openapi
from sla_server.api.context import AppContext
from sla_server.api.route import ANY, PREFIX, ApiRoute
from sla_server.api.routes import ROUTES
from sla_server.db.queries.row_schemas import row_schema
from tests.support.api import snapshot

DOCUMENT = openapi.document()
KNOWN = {
    "owner": "gateway-a",
    "pool": "data",
    "volume": "erp-db",
    "backend": "disk-0",
    "name": "erp-gold",
    "version": "3",
    "event_id": "e0001",
    "kind": "Route",
    "report_id": "erp-gold-2026-12",
    "other": "3",
}
"""What the fakes know, by parameter."""
KNOWN_OF = {"policy_volume": {"volume": "batch"}}
"""The same, of a route."""
LISTS = [route for route in ROUTES if route.items]
READS = [
    route
    for route in ROUTES
    if route.method == "GET" and route.answer == "application/json" and route.operation != "operation"
]


def validator(schema: dict[str, Any]) -> OAS31Validator:
    return OAS31Validator({**schema, "components": DOCUMENT["components"]})  # references point into these


def answer_schema(route: ApiRoute) -> dict[str, Any]:
    described = DOCUMENT["paths"][PREFIX + route.path][route.method.lower()]
    found: dict[str, Any] = described["responses"]["200"]["content"][route.answer]["schema"]
    return found


def inner_titles(schema: Any) -> list[str]:
    """Titles of objects that are described within a schema."""
    if isinstance(schema, list):
        return [title for each in schema for title in inner_titles(each)]
    if not isinstance(schema, dict):
        return []
    own = [str(schema["title"])] if "title" in schema and "properties" in schema else []
    return own + [title for each in schema.values() for title in inner_titles(each)]


@pytest.mark.parametrize("name", sorted(DOCUMENT["components"]["schemas"]))
def test_generators_of_clients_find_each_object_once(name: str) -> None:
    """They make a class of each, named after title and component, and leave out a component with two."""
    titles = inner_titles(DOCUMENT["components"]["schemas"][name])
    assert len(set(titles)) == len(titles)


def test_it_is_valid_openapi() -> None:
    assert [error.message for error in OpenAPIV31SpecValidator(DOCUMENT).iter_errors()] == []


def test_each_operation_says_what_it_answers_and_no_schema_is_left_over() -> None:
    used = str(DOCUMENT)
    for route in ROUTES:
        assert answer_schema(route), route.operation
    left = [name for name in DOCUMENT["components"]["schemas"] if f"/{name}'" not in used]
    assert left == []


@pytest.mark.parametrize("route", READS, ids=lambda route: route.operation)
def test_what_is_read_has_the_form_that_is_described(
    web: FlaskClient, context: AppContext, bearer: dict[str, str], route: ApiRoute
) -> None:
    context.live.put(snapshot())
    path = (PREFIX + route.path).format(**{**KNOWN, **KNOWN_OF.get(route.operation, {})})
    answer = web.get(path, headers=bearer)
    if answer.status_code != 200:
        assert (route.operation, answer.status_code) == ("document_versions", 404)
        return
    errors = [error.message for error in validator(answer_schema(route)).iter_errors(answer.json)]
    assert errors == []
    if route.items not in ("", ANY):
        assert answer.json["items"], "an empty list proves nothing"


def test_an_answer_that_differs_is_noticed() -> None:
    route = next(route for route in LISTS if route.operation == "episodes")
    right = {"items": [{"episode_id": "e", "opened_us": 5, "closed_us": None}], "next": None}
    assert validator(answer_schema(route)).is_valid(right)
    for wrong in ({"opened_us": 5}, {"episode_id": "e", "opened_us": "5"}, {"episode_id": 7}):
        assert not validator(answer_schema(route)).is_valid({"items": [wrong], "next": None})


def test_rows_have_the_columns_of_their_table() -> None:
    found = row_schema("slices")
    assert found["required"] == ["name", "objective", "start_us", "revision"]
    assert found["properties"]["inexact"] == {"type": "boolean"}
    assert found["properties"]["measured"] == {"type": ["number", "null"]}
    assert found["properties"]["start_us"] == {"type": "integer"}
    assert row_schema("events")["properties"]["details"] == {}, "decoded"
    with pytest.raises(KeyError):
        row_schema("nonsense")

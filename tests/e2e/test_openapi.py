"""Schemathesis asks a running server whatever its OpenAPI document allows, and what it does not allow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.conftest import whole_product
from tests.support.stage import Stage

EXAMPLES = 6
"""Of each operation and kind: some 1,000 requests."""
KNOWN = {"volume": "erp-db", "name": "erp-gold", "kind": "SLA", "version": "1"}
"""What the server has, for parameters of paths."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with whole_product(tmp_path_factory.mktemp("schemathesis")) as running:
        running.wait(lambda: running.live().get("slas"), "a live view of the agreements")
        yield running


def ask(operation: Any, stage: Stage, mode: GenerationMode, counts: Counter[int], **fixed: Any) -> None:
    """Some requests of one operation."""
    address = f"http://127.0.0.1:{stage.api_port}"
    headers = {"Authorization": stage.client.headers["Authorization"]}

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode, **fixed))
    def run(case: Any) -> None:
        answer = case.call(base_url=address, headers=headers, timeout=300)
        counts[answer.status_code] += 1
        if answer.status_code == 503 and answer.headers.get("retry-after"):
            return  # it says when to come again: of a machine that is busy
        case.validate_response(answer, checks=CHECKS)

    run()


def test_no_request_makes_the_server_fail_and_answers_are_as_described(stage: Stage) -> None:
    document = stage.get("openapi.json")
    del document["paths"]["/api/v1/live/stream"]  # it never ends
    counts, failures = Counter[int](), []
    for found in schemathesis.openapi.from_dict(document).get_all_operations():
        operation = found.ok()
        described = document["paths"][operation.path][operation.method.lower()]
        places = {parameter["in"] for parameter in described["parameters"]}
        runs: list[tuple[GenerationMode, dict[str, Any]]] = [(GenerationMode.POSITIVE, {})]
        if "query" in places or "requestBody" in described:
            runs.append((GenerationMode.NEGATIVE, {}))
        names = [parameter["name"] for parameter in described["parameters"] if parameter["in"] == "path"]
        if operation.method.lower() == "get" and names and KNOWN.keys() >= set(names):
            fixed = {"path_parameters": {name: KNOWN[name] for name in names}}
            runs.append((GenerationMode.POSITIVE, fixed))
        for mode, fixed in runs:
            try:
                ask(operation, stage, mode, counts, **fixed)
            except (AssertionError, ExceptionGroup, httpx.HTTPError) as exc:
                failures.append(f"{operation.label} ({mode.value}): {exc}")
    assert not failures, "\n\n".join(failures)
    assert sum(counts.values()) > 400, counts
    assert counts[200] > 100, counts
    assert counts[400] > 100, counts
    log = (stage.folder / "server.log").read_text() if (stage.folder / "server.log").exists() else ""
    assert "request-failed" not in log

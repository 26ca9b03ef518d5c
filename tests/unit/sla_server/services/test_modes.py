"""Modes of single backends: asked for, recorded, and there again after a restart."""

from __future__ import annotations

import pytest

from sla_server.services.startup import Start, _backend_modes
from tests.support.services import Bench


def answers(bench: Bench) -> list[tuple[int, object]]:
    bench.confirm()
    return [(answer["code"], answer["body"]) for answer in bench.answers()]


def test_a_backend_has_its_own_mode_until_it_inherits_the_servers() -> None:
    bench = Bench(Start(backend_modes={"array-2": "observe"}))
    bench.request("mode", {"mode": "enforce", "backend": "array-1"})
    (record,) = [row for table, row in bench.confirm() if table == "audit"]
    assert (record["action"], record["subject"]) == ("backend-mode", "array-1")
    both = {"array-2": "observe", "array-1": "enforce"}
    assert (record["before"], record["after"]) == ({"backends": {"array-2": "observe"}}, {"backends": both})
    assert bench.controller.last("set_backend_modes") == (both,)
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]) == (200, {"mode": "enforce", "backend": "array-1"})
    bench.request("mode", {"mode": "inherit", "backend": "array-1"})
    bench.confirm()
    assert bench.controller.last("set_backend_modes") == ({"array-2": "observe"},)


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ({"mode": "enforce", "backend": "aray-1"}, 404, "no backend 'aray-1' is known"),
        ({"mode": "inherit"}, 422, "give backend"),
        ({"mode": "enforce", "backend": ""}, 422, "backend"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_do(body: dict[str, str], code: int, says: str) -> None:
    bench = Bench()
    bench.request("mode", body)
    ((found, answer),) = answers(bench)
    assert (found, says in str(answer)) == (code, True)
    if code == 404:
        assert "array-1" in str(answer)


def test_the_newest_audit_row_has_all_of_them() -> None:
    row = {"after": {"backends": {"a": "enforce", "b": "sideways"}}}
    assert _backend_modes(row) == {"a": "enforce"}
    assert _backend_modes(None) == {}

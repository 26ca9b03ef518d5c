"""Space of an array: what is asked, what its answer means, and what it must not do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from pmdaemon.space.readers import SpaceUnreadable
from pmdaemon.wire.messages.space import Space
from sla_server.storage_resources.config import RestSource
from sla_server.storage_resources.rest import MOST_BYTES, rest_reader

ANSWER = {"records": [{"space": {"size": "2000", "used": 1500.0, "name": "x", "many": [1, 2]}}]}
SOURCE = {
    "name": "array-1",
    "url": "https://array-1.example/api/space",
    "size": "$.records[0].space.size",
    "used": "$.records[0].space.used",
}


def asked(answer: Callable[[httpx.Request], httpx.Response], **source: Any) -> Space:
    transport = httpx.MockTransport(answer)
    return rest_reader(RestSource.model_validate({**SOURCE, **source}), 60, transport)(7)


def says(content: Any = ANSWER, status: int = 200) -> Callable[[httpx.Request], httpx.Response]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda _request: httpx.Response(status, content=text)


def test_figures_are_found_by_their_paths() -> None:
    pytest.importorskip("jsonpath")
    found = asked(says(), unit_bytes=1024, backend="disk-1")
    assert found == Space("array-1", "rest", "disk-1", 2_048_000, 1_536_000, None, 0, 0, (), 7)


def test_the_secret_goes_into_the_header_and_to_no_other_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("Bearer abc\n")
    secret.chmod(0o600)
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((str(request.url), request.headers.get("Authorization")))
        return httpx.Response(302, headers={"Location": "https://evil.example/"})

    with pytest.raises(SpaceUnreadable, match="status 302"):
        asked(answer, authorization_file=str(secret))
    assert seen == [(SOURCE["url"], "Bearer abc")]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"used": "$.nothing"}, r"\$.nothing finds 0 values"),
        ({"used": "$.records[0].space.many[*]"}, "finds 2 values"),
        ({"used": "$.records[0].space.name"}, "is 'x', expected a number"),
        ({"used": "$.["}, "is no JSONPath"),
    ],
)
def test_a_path_that_does_not_find_one_number_says_so(changed: Any, problem: str) -> None:
    pytest.importorskip("jsonpath")
    with pytest.raises(SpaceUnreadable, match=problem):
        asked(says(), **changed)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (says(b"<html>"), "answered no JSON"),
        (says(status=503), "status 503"),
        (says(b"x" * (MOST_BYTES + 1)), "more than 4 MiB"),
    ],
)
def test_an_answer_of_no_use_says_why(answer: Any, problem: str) -> None:
    with pytest.raises(SpaceUnreadable, match=problem):
        asked(answer)


def test_an_array_that_is_away_and_a_missing_secret_are_problems_of_the_source(tmp_path: Path) -> None:
    def away(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused", request=request)

    with pytest.raises(SpaceUnreadable, match="refused"):
        asked(away)
    with pytest.raises(SpaceUnreadable, match="no such file"):
        asked(says(), authorization_file=str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"url": "http://array-1.example/"}, "must be https"),
        ({"url": "https://u:p@array-1.example/"}, "authorization_file"),
        ({"size": "records"}, "no JSONPath"),
    ],
)
def test_a_wrong_source_is_refused(changed: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RestSource.model_validate({**SOURCE, **changed})
    assert RestSource.model_validate({**SOURCE, "url": "http://127.0.0.1:8080/x"}).unit_bytes == 1

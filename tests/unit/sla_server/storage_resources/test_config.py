"""Which sources of space of other hosts are refused, and why."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.storage_resources.config import RestSource

SOURCE = {
    "name": "array-1",
    "url": "https://array-1.example/api/space",
    "size": "$.records[0].space.size",
    "used": "$.records[0].space.used",
}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"url": "http://array-1.example/"}, "must be https"),
        ({"url": "https://u:p@array-1.example/"}, "authorization_file"),
        ({"url": "http://u:p@array-1.example/"}, "authorization_file"),
        ({"url": f"https://{'a' * 64}.example/"}, "too long"),
        ({"url": "https://array-\u00fc.example/"}, "ASCII"),
        ({"url": "https:///space"}, "with a host"),
        ({"url": "https://array-1:99999/"}, "out of range"),
        ({"size": "records"}, "no JSONPath"),
    ],
)
def test_a_wrong_source_is_refused(changed: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RestSource.model_validate({**SOURCE, **changed})
    assert RestSource.model_validate({**SOURCE, "url": "http://127.0.0.1:8080/x"}).unit_bytes == 1

"""What a backup's head may say: it may come from another machine, and its names become paths."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sla_server.db.backup import read_head
from sla_server.db.errors import DbError

GOOD: dict[str, Any] = {
    "format": 1,
    "made_us": 1,
    "software": "0.1.0",
    "revision": "0001",
    "database": "sqlite",
    "files": 0,
    "bytes": 0,
    "sql_sha256": "0" * 64,
    "state": ["api.token", "identity.json"],
}


def test_a_good_head(tmp_path: Path) -> None:
    (tmp_path / "backup.json").write_text(json.dumps(GOOD))
    assert read_head(tmp_path).state == GOOD["state"]


@pytest.mark.parametrize(
    "changed",
    [
        {"state": ["../OWNED"]},
        {"state": ["/etc/OWNED"]},
        {"state": ["a/b"]},
        {"state": [".."]},
        {"state": [""]},
        {"state": ["a\0b"]},
        {"state": ["lock"]},
        {"state": [7]},
        {"state": "api.token"},
        {"database": ["sqlite"]},
        {"sql_sha256": None},
        {"made_us": "now"},
        {"format": {}},
        {"more": 1},
    ],
)
def test_a_forged_head_is_refused_with_the_way_out(tmp_path: Path, changed: dict[str, Any]) -> None:
    (tmp_path / "backup.json").write_text(json.dumps({**GOOD, **changed}))
    with pytest.raises(DbError, match=r"another one|Install that release"):
        read_head(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "7", "{", '{"format": 1}', "[" * 100_000, '"\\ud800"'])
def test_what_is_no_head_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "backup.json").write_text(text)
    with pytest.raises(DbError, match="another one"):
        read_head(tmp_path)

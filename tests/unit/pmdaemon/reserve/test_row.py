"""One function makes the row of every event."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pmdaemon.reserve import event_row
from sla_server.db import schema

ROOT = Path(__file__).parents[4]
MAKER = "pmdaemon/reserve/row.py"
CODEC = "sla_server/events/event.py"  # reads and writes all of an event's members, and no raiser of any


def dict_keys(path: Path, needed: set[str]) -> Iterator[set[str]]:
    text = path.read_text()
    if not all(key in text for key in needed):  # nine of ten modules: parsed for nothing
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Dict):
            yield {
                key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }


def test_a_row_has_the_columns_of_the_table() -> None:
    row = event_row("clock-skew", "warning", "gateway", "g", "text", 5, {"by": 2}, "e1")
    assert set(row) <= set(schema.events.columns.keys())
    assert row == {
        "event_id": "e1", "at_us": 5, "kind": "clock-skew", "severity": "warning", "element": "gateway",
        "subject": "g", "text": "text", "details": {"by": 2},
    }  # fmt: skip


def test_an_event_without_an_identity_gets_one_of_its_own() -> None:
    first, second = (event_row("clock-skew", "warning", "gateway", "g", "text", 5) for _ in range(2))
    assert first["event_id"] != second["event_id"]
    assert first["details"] == {}


def test_no_other_module_builds_the_row_by_hand() -> None:
    needed = {"event_id", "at_us", "severity", "element"}
    builders = {
        str(path.relative_to(ROOT))
        for package in ("pmdaemon", "gateway_agent", "sla_server")
        for path in (ROOT / package).rglob("*.py")
        if any(needed <= keys for keys in dict_keys(path, needed))
    }
    assert builders == {MAKER, CODEC}

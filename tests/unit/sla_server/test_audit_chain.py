"""The chain of the audit log: every change, gap and cut is found."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sla_server.audit_chain import KEEPER, PRUNED, ChainCheck, digest_of
from tests.support.api import audit_rows

Rows = list[dict[str, Any]]


def problems(rows: Rows, head: tuple[int, str] | None = None) -> list[str]:
    check = ChainCheck()
    for row in rows:
        check.add(row)
    found = {row["seq"]: row["digest"] for row in rows}
    return check.end(head, head_found=found.get(head[0]) if head else None)


def test_a_whole_chain() -> None:
    rows = audit_rows(8)
    assert problems(rows) == []
    assert problems(rows, (5, rows[4]["digest"])) == []
    assert problems([]) == []


@pytest.mark.parametrize(
    ("column", "value"),
    [("who", "bob"), ("at_us", 1), ("after", "{}"), ("subject", ""), ("audit_id", "x"), ("digest", "0" * 64)],
)
def test_a_changed_row_is_found(column: str, value: Any) -> None:
    rows = audit_rows(8)
    rows[3][column] = value
    assert any("row 4" in text or "row 5" in text for text in problems(rows))


def test_a_missing_row_is_found() -> None:
    for missing in range(7):
        rows = audit_rows(8)
        del rows[missing]
        assert any("missing" in text for text in problems(rows)), missing


def test_a_cut_end_and_a_chain_made_again_are_found_by_the_head() -> None:
    rows = audit_rows(8)
    head = rows[-1]["seq"], rows[-1]["digest"]
    assert "the log ends at row 6" in problems(rows[:6], head)[0]
    again: Rows = []
    for row in rows:
        changed = {**row, "who": "bob"}
        digest = digest_of(again[-1]["digest"] if again else "", changed)
        again.append({**changed, "digest": digest})
    assert problems(again) == [], "by itself it is whole"
    assert "another digest" in problems(again, head)[0]


def pruned(through: int, kept: tuple[int, ...] = ()) -> Rows:
    """Rows of which those up to ``through`` have left, but for some."""
    rows = audit_rows(8)
    pairs = {str(seq): [rows[seq - 2]["digest"] if seq > 1 else "", rows[seq - 1]["digest"]] for seq in kept}
    after = {"through": through, "digest": rows[through - 1]["digest"], "kept": pairs}
    row = {
        **rows[-1],
        "seq": 9,
        "who": KEEPER,
        "action": PRUNED,
        "subject": str(through),
        "after": json.dumps(after),
    }
    rows.append({**row, "digest": digest_of(rows[-1]["digest"], row)})
    return [row for row in rows if row["seq"] > through or row["seq"] in kept]


def test_that_rows_have_left_is_for_the_keeper_of_the_log_to_say() -> None:
    rows = audit_rows(8)
    after = {"through": 5, "digest": rows[4]["digest"], "kept": {}}
    said = {**rows[-1], "seq": 9, "action": PRUNED, "subject": "5", "after": json.dumps(after)}
    rows.append({**said, "digest": digest_of(rows[-1]["digest"], said)})
    assert problems(rows)[0] == "row 9 says that rows have left, and is by ann"
    assert "missing" in problems(rows[5:])[-1]


def test_rows_that_left_by_age_are_no_gap() -> None:
    assert problems(pruned(5)) == []
    assert problems(pruned(5, (1, 3))) == []
    rows = pruned(5, (3,))
    rows[0]["who"] = "bob"
    assert "row 3" in problems(rows)[0]
    more = pruned(5)
    del more[0]
    assert "missing" in problems(more)[0]
    rows = pruned(5)
    rows[0]["who"] = "bob"
    assert "row 6" in problems(rows)[0]


def test_a_noted_head_whose_row_has_left_proves_nothing_unless_its_digest_was_kept() -> None:
    rows, all_rows = pruned(5), audit_rows(8)
    assert problems(rows, (5, all_rows[4]["digest"])) == []
    assert "another digest" in problems(rows, (5, "0" * 64))[0]
    assert "not there any more" in problems(rows, (4, all_rows[3]["digest"]))[0], "it said: nothing changed"

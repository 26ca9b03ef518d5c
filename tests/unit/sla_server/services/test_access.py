"""Accounts, tokens and sessions on their way to SQL: one row each, with an entry of the audit log."""

from __future__ import annotations

import pytest

from tests.support import api
from tests.support.services import Bench


def test_a_change_is_recorded_with_its_entry_and_answered_when_it_is_durable() -> None:
    bench = Bench()
    row = api.account()
    body = {
        "table": "accounts",
        "row": row,
        "action": "user-add",
        "subject": "ann",
        "after": {"role": "viewer"},
    }
    bench.request("access", body)
    rows = dict(bench.confirm())
    assert rows["accounts"] == row
    entry = rows["audit"]
    assert (entry["action"], entry["subject"], entry["after"]) == ("user-add", "ann", {"role": "viewer"})
    assert [answer["code"] for answer in bench.answers()] == [200]


def test_an_entry_alone() -> None:
    bench = Bench()
    bench.request("access", {"action": "login-failed", "subject": "ann"})
    assert [table for table, _row in bench.confirm()] == ["audit"]


@pytest.mark.parametrize(
    "body",
    [
        {"action": "user-add", "subject": "ann", "table": "policies", "row": {}},
        {"action": "Drop table", "subject": "ann"},
        {"subject": "ann"},
        {"action": "audit-pruned", "subject": "5", "after": {"through": 5}},
    ],
)
def test_other_tables_and_actions_are_refused(body: dict[str, object]) -> None:
    bench = Bench()
    bench.request("access", body)
    assert bench.confirm() == []
    assert [answer["code"] for answer in bench.answers()] == [422]

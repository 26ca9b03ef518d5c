"""The audit log in SQL: chained as it is stored; the database itself refuses changes and deletions."""

from __future__ import annotations

import json

import pytest
from sqlalchemy import create_engine, insert, select, text

from sla_server.audit_chain import ChainCheck
from sla_server.db import audit, schema
from sla_server.db.engine import begin
from sla_server.db.errors import DbError
from sla_server.db.schema import DAY_US
from sla_server.services.approvals import digest_of
from tests.support import api
from tests.support.database import Rig
from tests.support.samples import T0, record_message


def entry(name: str, **more: object) -> tuple[str, dict[str, object]]:
    row = {"audit_id": name, "at_us": T0, "who": "ann", "action": "throttle-set", "after": {"iops": 5}}
    return "audit", {**row, **more}


def checked(rig: Rig) -> list[str]:
    check = ChainCheck()
    for row in rig.reader.access.audit_chain(0, 1000):
        check.add(row)
    return check.end()


def test_rows_are_chained_and_a_repeat_changes_nothing(rig: Rig) -> None:
    rig.feed(record_message([entry("a"), entry("b")]))
    rig.feed(record_message([entry("c"), entry("a", who="the-boss")]))
    rows = rig.reader.access.audit_chain(0, 1000)
    assert [(row["seq"], row["audit_id"], row["who"]) for row in rows] == [
        (1, "a", "ann"),
        (2, "b", "ann"),
        (3, "c", "ann"),
    ]
    assert json.loads(rows[0]["after"]) == {"iops": 5}
    assert checked(rig) == []


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE audit SET who = 'nobody' WHERE audit_id = 'b'",
        "UPDATE audit SET seq = NULL",
        "DELETE FROM audit WHERE audit_id = 'b'",
        "DELETE FROM audit",
    ],
)
def test_the_database_refuses_changes(rig: Rig, statement: str) -> None:
    """Review, finding 13: a writer could change and delete entries, and nobody would have seen it."""
    rig.feed(record_message([entry("a"), entry("b"), entry("c")]))
    with pytest.raises(DbError, match="takes no"), begin(rig.engine) as connection:
        connection.execute(text(statement))
    assert len(rig.reader.access.audit_chain(0, 1000)) == 3
    assert checked(rig) == []


def test_rows_of_an_older_release_are_chained_with_the_next_ones(rig: Rig) -> None:
    with begin(rig.engine) as connection:
        for name in ("old-1", "old-2"):
            connection.execute(text(f"INSERT INTO audit (audit_id, at_us) VALUES ('{name}', {T0 - 1})"))
    rig.feed(record_message([entry("new")]))
    rows = rig.reader.access.audit_chain(0, 1000)
    assert [row["audit_id"] for row in rows] == ["old-1", "old-2", "new"]
    assert checked(rig) == []


def test_accounts_tokens_and_sessions_are_stored_and_read(rig: Rig) -> None:
    now_us = rig.clock.unix_us()
    rows = [("accounts", api.account()), ("api_tokens", api.api_token()), ("sessions", api.session())]
    rig.feed(record_message([*rows, ("sessions", api.session(session_id="old", expires_us=5))]))
    access = rig.reader.access
    assert access.accounts() == [api.account()]
    assert access.tokens(now_us) == [api.api_token()]
    assert access.sessions(now_us) == [api.session()]
    ended = api.session(ended_us=now_us, changed_us=now_us)
    rig.feed(record_message([("sessions", ended)]))
    assert access.sessions(now_us) == [ended]


def test_the_newest_sign_in_of_each_account_of_a_provider_is_read(rig: Rig) -> None:
    now_us = rig.clock.unix_us()
    provided = api.account(name="bea", identity="https://id.example.org 5f3")
    sessions = [
        api.session(session_id=f"s{age}", account=name, created_us=now_us - age, expires_us=now_us - 1)
        for age, name in ((30, "bea"), (20, "bea"), (10, "ann"))
    ]
    tables = [("accounts", provided), ("accounts", api.account())]
    rig.feed(record_message([*tables, *(("sessions", row) for row in sessions)]))
    assert rig.reader.access.sign_ins() == [{"account": "bea", "begun_us": now_us - 20}], "it has ended, too"


def test_changes_that_wait_are_stored_and_read_until_they_are_decided(rig: Rig) -> None:
    now_us = rig.clock.unix_us()
    waits, old = api.approval(), api.approval(approval_id="0ld", expires_us=now_us, requested_us=3)
    rig.feed(record_message([("approvals", waits), ("approvals", old)]))
    access = rig.reader.access
    assert access.approvals(now_us) == [waits]
    assert access.approvals_newest(10) == [waits, old]
    assert digest_of(access.approvals(now_us)[0]) == waits["digest"], "as it was asked for"
    done = {**waits, "state": "approved", "decided_by": "bob", "decided_us": now_us, "changed_us": now_us}
    rig.feed(record_message([("approvals", done)]))
    assert access.approvals(now_us) == []
    assert access.approvals_newest(1) == [done]


def test_a_row_that_stays_behind_the_last_one_that_left_is_still_checked() -> None:
    """The digest before it is in the former ``audit-pruned`` alone: ``verify`` said that it was changed."""
    engine = create_engine("sqlite://")
    schema.audit.create(engine)
    with engine.begin() as connection:
        for day, action in ((1, "apply"), (2, "apply"), (5, "mode"), (6, "apply"), (20, "apply")):
            row = {"audit_id": f"{day:02}", "at_us": day * DAY_US, "action": action}
            connection.execute(insert(schema.audit), {**row, "before": "null", "after": "null"})
            audit.chain(connection)
        for limit_day in (4, 10, 30):
            audit.prune(connection, limit_day * DAY_US, (limit_day + 30) * DAY_US)
            check = ChainCheck()
            for found in connection.execute(select(schema.audit).order_by(schema.audit.c.seq)).mappings():
                check.add(found)
            assert check.end() == []
            assert check.rows > 1

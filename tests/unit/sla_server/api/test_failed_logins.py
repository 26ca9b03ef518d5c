"""Failed logins in the audit log: however many there are, a few rows an hour."""

from __future__ import annotations

from typing import Any

from flask.testing import FlaskClient

from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from sla_server.api.failed_logins import MOST_KEYS, FailedLogins
from sla_server.api.passwords import ADDRESS_TRIES, PAIR_TRIES
from tests.support import api


def sign_in(web: FlaskClient, name: str, password: str = api.PASSWORD) -> int:
    return web.post("/login", data={"name": name, "password": password}).status_code


def failures(mailbox: api.AnsweringMailbox) -> list[tuple[str, Any]]:
    entries = [item["body"] for item in mailbox.recorded if item["body"]["action"] == "login-failed"]
    return [(entry["subject"], entry["after"].get("count", 1)) for entry in entries]


def test_wrong_passwords_for_a_day_make_two_rows_an_hour(
    web: FlaskClient, context: AppContext, mailbox: api.AnsweringMailbox, clock: FakeClock
) -> None:
    tried = 0
    for _try in range(200):
        tried += sign_in(web, "ann", "wrong") == 403
        clock.advance(PAIR_TRIES[1])
        context.access.record_failed_logins()
    context.access.record_failed_logins(all_of_them=True)
    assert tried == 200
    assert failures(mailbox) == [("ann", 1), ("ann", 119), ("ann", 1), ("ann", 79)]
    last = mailbox.recorded[-1]["body"]["after"]
    assert (last["to_us"] - last["from_us"], last["address"]) == (78 * 30_000_000, "127.0.0.1")


def test_names_that_are_no_account_make_no_row_each(
    web: FlaskClient, context: AppContext, mailbox: api.AnsweringMailbox, clock: FakeClock
) -> None:
    for number in range(40):
        assert sign_in(web, f"guess-{number}", "wrong") == 403
        clock.advance(ADDRESS_TRIES[1])
    context.access.record_failed_logins(all_of_them=True)
    assert failures(mailbox) == [("no such account", 1), ("no such account", 39)]
    assert mailbox.recorded[-1]["body"]["after"]["names"][:2] == ["guess-39", "guess-38"]


def test_failures_from_everywhere_are_counted_together_in_the_end() -> None:
    failed = FailedLogins(FakeClock())
    entries = [
        entry for number in range(5000) for entry in failed.add("ann", f"10.{number // 256}.{number % 256}.1")
    ]
    assert len(entries) == MOST_KEYS + 1
    (rest,) = failed.rest()
    assert (rest[0], rest[1]["count"]) == ("many accounts", 5000 - MOST_KEYS - 1)

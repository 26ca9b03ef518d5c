"""Violation episodes survive restarts: neither lost nor told twice."""

from __future__ import annotations

from sla_server.rows import Rows
from sla_server.services.episodes import SETTLE_US, Episodes
from tests.support.services import START_US

KEY = ("gold", "latency")
S = 1_000_000


def opened(book: Episodes, at_us: int = START_US) -> Rows:
    return book.opened("gold/latency", "gold is violated", "critical", {"u": 3.0}, at_us)


def test_an_episode_opens_once_and_closes_once() -> None:
    book = Episodes([], START_US)
    rows = opened(book)
    assert [table for table, _ in rows] == ["episodes", "events"]
    assert opened(book, START_US + S) == []
    closed = book.closed("gold/latency", "kept again", "info", {}, START_US + 9 * S)
    assert closed[0][1] == {**rows[0][1], "closed_us": START_US + 9 * S}
    assert closed[1][1]["details"]["lasted_s"] == 9
    assert book.closed("gold/latency", "kept again", "info", {}, START_US + 10 * S) == []


def test_a_restart_during_a_violation_goes_on_with_the_same_episode() -> None:
    (_, row), _ = opened(Episodes([], START_US))
    book = Episodes([row], START_US + 60 * S)
    assert opened(book, START_US + 61 * S) == []
    (_, closed), _ = book.closed("gold/latency", "kept", "info", {}, START_US + 70 * S)
    assert (closed["episode_id"], closed["opened_us"]) == (row["episode_id"], START_US)


def test_a_violation_that_ended_during_a_restart_is_closed() -> None:
    (_, row), _ = opened(Episodes([], START_US))
    book = Episodes([row], START_US)
    states = {KEY: {"state": "ok", "u": 0.1}}
    assert book.update(states, START_US + SETTLE_US - 1) == []
    rows = book.update(states, START_US + SETTLE_US)
    assert [row["kind"] for table, row in rows if table == "events"] == ["violation-closed"]
    assert book.open_keys() == frozenset()


def test_no_data_neither_ends_nor_continues_it_and_violating_resets_the_wait() -> None:
    (_, row), _ = opened(Episodes([], START_US))
    book = Episodes([row], START_US)
    assert book.update({KEY: {"state": "no-data"}}, START_US + 100 * SETTLE_US) == []
    book.update({KEY: {"state": "violating", "u": 9.0}}, START_US)
    assert book.update({KEY: {"state": "ok"}}, START_US + SETTLE_US) == []
    rows = book.update({KEY: {"state": "ok"}}, START_US + 2 * SETTLE_US)
    assert rows[0][1]["worst_u"] == 9.0


def test_the_worst_value_is_recorded_while_the_episode_is_open() -> None:
    book = Episodes([], START_US)
    opened(book)
    assert book.update({KEY: {"state": "violating", "u": 3.1}}, START_US + S) == []
    ((table, row),) = book.update({KEY: {"state": "violating", "u": 8.0}}, START_US + 2 * S)
    assert (table, row["worst_u"]) == ("episodes", 8.0)


def test_an_agreement_that_is_gone_closes_its_episode() -> None:
    (_, row), _ = opened(Episodes([], START_US))
    rows = Episodes([row], START_US).update({}, START_US + SETTLE_US)
    assert "no longer in force" in rows[1][1]["text"]


def test_an_episode_that_the_controller_holds_open_is_not_closed_here() -> None:
    book = Episodes([], START_US)
    opened(book)
    states = {KEY: {"state": "ok", "u": 0.1, "is_open": True}}
    assert book.update(states, START_US + 100 * SETTLE_US) == []
    assert book.update(states, START_US + 200 * SETTLE_US) == []
    assert book.open_keys() == {KEY}

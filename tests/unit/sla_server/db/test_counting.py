"""Counting in slices: the same number, and no statement over more rows than it may."""

from __future__ import annotations

import pytest
from sqlalchemy import BigInteger, Column, Engine, MetaData, Table, create_engine, event, insert

from sla_server.db import counting
from sla_server.db.counting import CountedRows, count_rows

MINUTE_US = 60_000_000
TABLE = Table(
    "slots", MetaData(), *(Column(name, BigInteger, primary_key=True) for name in ("slot_us", "id"))
)


def filled(rows_a_slot: list[int]) -> tuple[Engine, list[str]]:
    """A table with so many rows a minute, and the statements that are run on it from now on."""
    engine = create_engine("sqlite://")
    TABLE.create(engine)
    rows = [
        {"slot_us": slot * MINUTE_US, "id": number}
        for slot, count in enumerate(rows_a_slot, 1)
        for number in range(count)
    ]
    with engine.begin() as connection:
        connection.execute(insert(TABLE), rows)
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: said.append(args[2]))
    return engine, said


def counts(said: list[str]) -> int:
    return sum("count(" in each for each in said)


def test_a_dense_table_is_counted_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "FIRST_US", MINUTE_US)
    monkeypatch.setattr(counting, "FEW_ROWS", 5)
    monkeypatch.setattr(counting, "MANY_ROWS", 50)
    engine, said = filled([10] * 30 + [1] * 30)
    with engine.connect() as connection:
        found = count_rows(connection, TABLE, MINUTE_US, 50 * MINUTE_US)
    assert found == CountedRows(MINUTE_US, 49 * MINUTE_US, 30 * 10 + 19)
    assert counts(said) > 30, "a minute each while they are dense"
    said.clear()
    with engine.connect() as connection:
        assert count_rows(connection, TABLE, 0, 1 << 60, most=45).rows == 50
    assert counts(said) == 5, "it is known to be too many"


def test_a_small_table_takes_a_few_statements_whatever_its_time() -> None:
    engine, said = filled([3] * 40)
    with engine.connect() as connection:
        assert count_rows(connection, TABLE, 0, 1 << 60) == CountedRows(MINUTE_US, 40 * MINUTE_US, 120)
        assert counts(said) == 1
        assert count_rows(connection, TABLE, 1 << 50, 1 << 60) == CountedRows(0, 0, 0)


def test_a_time_without_rows_is_passed_at_once() -> None:
    engine, said = filled([1])
    with engine.begin() as connection:
        connection.execute(insert(TABLE), [{"slot_us": 1 << 50, "id": 1}])
    said.clear()
    with engine.connect() as connection:
        assert count_rows(connection, TABLE, 0, 1 << 60) == CountedRows(MINUTE_US, 1 << 50, 2)
    assert counts(said) <= 3

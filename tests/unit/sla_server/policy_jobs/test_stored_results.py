"""Whether the policy job takes what the job of a step has stored."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from importlib.metadata import version
from typing import Any

import pyarrow as pa
import pytest

from sla_server.config import PolicyJobConfig
from sla_server.db.queries.job_results import table_of
from sla_server.policy_jobs import inputs, stored_results
from sla_server.policy_jobs.compute import STEPS
from tests.support.histories import known_history, utc_hours
from tests.support.job_results import ResultsInMemory

READ = known_history().inputs
SETTINGS = PolicyJobConfig(results_max_age_s=60)
TABLE = pa.table({"backend": ["disk", "disk"], "cost_per_s": [400.0, None]})
END_US = 1_000_000_000


def stored(kind: str = "capacity", read: Any = READ, settings: PolicyJobConfig = SETTINGS) -> ResultsInMemory:
    results = ResultsInMemory()
    results.replace(kind, END_US, stored_results.basis_of(read, settings), stored_results.encoded(TABLE))
    return results


def taken(results: Any, read: Any = READ, settings: PolicyJobConfig = SETTINGS, end_us: int = END_US) -> Any:
    return stored_results.fresh(results, STEPS, read, settings, end_us)


def test_what_is_fresh_is_taken_as_it_was_stored() -> None:
    found = taken(stored())
    assert list(found) == ["capacity"]
    assert found["capacity"].equals(TABLE)


@pytest.mark.parametrize(("age_s", "is_taken"), [(0, True), (60, True), (61, False), (-1, False)])
def test_what_is_older_or_of_the_future_is_computed(age_s: int, is_taken: bool) -> None:
    assert bool(taken(stored(), end_us=END_US + age_s * 1_000_000)) is is_taken


def test_nothing_is_taken_where_the_settings_say_never() -> None:
    never = PolicyJobConfig(results_max_age_s=0)
    assert taken(stored(settings=never), settings=never, end_us=END_US + 1) == {}


@pytest.mark.parametrize(
    "read",
    [
        replace(READ, volumes=pa.table({"volume": ["erp", "batch"], "backend": ["disk", "ssd"]})),
        replace(READ, hours=utc_hours("disk", "ssd")),
        replace(READ, hours=replace(READ.hours, holidays=(date(2026, 12, 25),))),
        replace(READ, slots_an_hour=360),
        replace(READ, scope=replace(READ.scope, clients=READ.scope.volumes)),
    ],
)
def test_of_other_promises_volumes_zones_or_holidays_it_is_computed(read: Any) -> None:
    assert taken(stored(), read) == {}


def test_of_another_window_it_is_computed() -> None:
    assert taken(stored(), settings=PolicyJobConfig(results_max_age_s=60, window_days=7)) == {}


@pytest.mark.parametrize("package", ["storage-sla-server", "pyspark"])
def test_of_another_release_it_is_computed(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its columns may be others, and what the models make of the same rows."""
    before = stored()
    monkeypatch.setattr(stored_results, "version", lambda name: "0" if name == package else version(name))
    assert taken(before) == {}


def test_what_is_replaced_while_it_is_looked_at_is_not_taken() -> None:
    results = stored()
    head = results.head

    def replaced(kind: str) -> Any:
        found = head(kind)
        results.replace("capacity", END_US, "of other promises", stored_results.encoded(TABLE))
        return found

    results.head = replaced  # type: ignore[method-assign]
    assert taken(results) == {}


def test_the_order_of_names_does_not_matter() -> None:
    """They come out of sets, whose order is another in each process."""
    scope = replace(READ.scope, classes=READ.scope.classes.take([1, 0]))
    assert taken(stored(), replace(READ, scope=scope))


def test_a_large_result_is_left_to_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_results, "MOST_ROWS", 1)
    assert taken(stored()) == {}


def test_a_large_table_comes_in_parts_and_an_empty_one_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_results, "ROWS_A_PART", 1)
    parts = stored_results.encoded(TABLE)
    assert [rows for _, rows in parts] == [1, 1]
    assert table_of([body for body, _ in parts]).equals(TABLE)
    (only,) = stored_results.encoded(TABLE.slice(0, 0))
    assert table_of([only[0]]).schema == TABLE.schema


def test_the_last_valid_capacities_are_those_of_whichever_is_newer() -> None:
    """Of the policy, or of the capacity job, which had the policy's before it."""
    results = stored()

    class Store:
        reader: Any = None

        def __init__(self, policies: list[dict[str, Any]]) -> None:
            self.reader = self
            self.results = results
            self.policies = lambda limit: policies

    def policy(created_us: int) -> dict[str, Any]:
        return {"created_us": created_us, "report": {"capacity": [{"backend": "disk", "cost_per_s": 300.0}]}}

    def former(policies: list[dict[str, Any]]) -> dict[str, float]:
        store: Any = Store(policies)
        return inputs.lowest_known(inputs.former_rows(store)[0])

    assert former([policy(2)]) == {"disk": 300.0}
    assert former([policy(0)]) == {"disk": 400.0}
    assert former([]) == {"disk": 400.0}

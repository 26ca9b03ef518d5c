"""One day of 1,000 streams on PostgreSQL: no page reads a time-series table from end to end.

Every statement of a page is explained with its own parameters right before it runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from benchmarks import query, query_data
from sla_server.db.config import DatabaseConfig
from sla_server.db.queries.reader import open_reader

pytestmark = pytest.mark.db
WORLD = query_data.World(days=1, fine_hours=24)
LARGE = (
    "rollups",
    "rollup_missed",
    "rollup_hours",
    "coverage",
    "slices",
    "events",
    "audit",
    "policy_caps",
)
"""Tables that grow with time (and ``policy_caps``, which grows with the volumes); their partitions, too."""


@pytest.fixture(scope="module")
def loaded(postgres: Any, migrated_template: str) -> str:
    url: str = postgres.create("plans", migrated_template)
    query_data.prepare(url, WORLD)
    query_data.load(f"host={postgres.directory} user=postgres dbname=plans", WORLD)
    return url


class Explained:
    """A reader whose statements are explained before they run; ``plans`` by page."""

    def __init__(self, url: str) -> None:
        self.reader = open_reader(DatabaseConfig(url=url), Path())
        self.plans: list[dict[str, Any]] = []
        event.listen(self.reader._engine, "before_cursor_execute", self._explain)

    def _explain(self, _conn: Any, cursor: Any, statement: str, parameters: Any, *_rest: Any) -> None:
        if statement.startswith("SELECT"):
            cursor.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters)
            [[plan]] = cursor.fetchall()
            self.plans.append((plan if isinstance(plan, list) else json.loads(plan))[0]["Plan"])


@pytest.fixture
def explained(loaded: str) -> Iterator[Explained]:
    made = Explained(loaded)
    yield made
    made.reader.close()


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def is_large(relation: str) -> bool:
    """Whether this is a large table or a partition of one."""
    return any(re.fullmatch(rf"{name}(_p?\d.*|_default)?", relation) for name in LARGE)


def scans(plans: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (node["Node Type"], node["Relation Name"])
        for plan in plans
        for node in nodes(plan)
        if "Relation Name" in node and is_large(node["Relation Name"])
    ]


WHOLE = {"policy_diff"}  # it compares all rows of two policies, which are two of five here
WHOLE |= {"load_48h", "load_30d"}  # an eighth of the one day of hours here; of 30 days every third hour alone


@pytest.mark.parametrize("name", [name for name in query.pages(WORLD) if name not in WHOLE])
def test_no_page_reads_a_large_table_from_end_to_end(explained: Explained, name: str) -> None:
    query.ask(query.client(explained.reader), query.pages(WORLD)[name])
    assert explained.plans, "the page asks SQL"
    assert [scan for scan in scans(explained.plans) if scan[0] == "Seq Scan"] == []


@pytest.mark.parametrize("name", ["history_hour", "history_30d", "slices_day", "events_deep", "caps_hour"])
def test_the_large_pages_do_touch_large_tables(explained: Explained, name: str) -> None:
    """Else the test above could not fail."""
    query.ask(query.client(explained.reader), query.pages(WORLD)[name])
    assert scans(explained.plans)


def test_history_looks_up_its_rows_by_the_whole_key(explained: Explained) -> None:
    """A range of slots alone would read the rows of all streams in it."""
    explained.reader.rollup_history(WORLD.volume(7), query_data.END_US - query_data.DAY_US, query_data.END_US)
    conditions = [
        node["Index Cond"]
        for plan in explained.plans
        for node in nodes(plan)
        if "Index Cond" in node and "= ANY" in node["Index Cond"]
    ]
    assert conditions
    assert all(text.count("= ANY") == 2 for text in conditions)


@pytest.mark.parametrize("name", ["slices_day", "slices_30d"])
def test_slices_are_read_by_agreement_not_by_time(explained: Explained, name: str) -> None:
    query.ask(query.client(explained.reader), query.pages(WORLD)[name])
    used = [
        node["Index Name"]
        for plan in explained.plans
        for node in nodes(plan)
        if node.get("Index Name", "").startswith("slices")
    ]
    assert used
    assert set(used) == {"slices_pkey"}


def test_bad_slices_of_episodes_are_counted_from_the_first_that_may_overlap(explained: Explained) -> None:
    """Not from a day before, nor to the objective's last slice; and without compiling the statement."""
    rows = explained.reader.episodes(name="sla-007")
    assert rows, "an empty page proves nothing"
    (plan,) = explained.plans
    assert plan["Total Cost"] < 100_000, "jit_above_cost"
    found = [node for node in nodes(plan) if node.get("Relation Name") == "slices"]
    assert {node.get("Index Name") for node in found if "Index Name" in node} <= {"slices_pkey"}
    conditions = [
        condition
        for node in nodes(plan)
        if node.get("Index Name") == "slices_pkey" and "start_us <" in (condition := node["Index Cond"])
    ]
    assert len(conditions) >= 3
    for condition in conditions:
        assert "name = episodes.name" in condition
        assert "start_us >" in condition


def test_every_page_is_measured() -> None:
    query.check_complete(query.pages(WORLD))
    fewer = {name: page for name, page in query.pages(WORLD).items() if page[0] != "slices"}
    with pytest.raises(SystemExit, match="slices"):
        query.check_complete(fewer)


def test_what_services_judge_from_is_read_by_index(explained: Explained) -> None:
    ids = WORLD.stream_ids().tolist()[:100]
    gateways = [WORLD.gateway(n) for n in range(WORLD.gateways)]
    end_us = query_data.END_US
    inputs = explained.reader.slice_inputs(ids, gateways, end_us - query_data.MINUTE_US, end_us)
    assert len(inputs.rows) == len(ids)
    touched = scans(explained.plans)
    for table in ("rollups", "rollup_missed", "coverage"):
        assert any(relation.startswith(table) for _, relation in touched), table
    assert [scan for scan in touched if scan[0] == "Seq Scan"] == []


def test_the_end_of_an_old_event_is_looked_up_by_what_it_is_about(explained: Explained) -> None:
    """By time alone every event since then would be read."""
    since_us = query_data.END_US - query_data.DAY_US
    explained.reader.inbox(100, kinds={"gateway-recovered"}, subjects={WORLD.gateway(7)}, since_us=since_us)
    used = {node.get("Index Name") for plan in explained.plans for node in nodes(plan)} - {None}
    assert used == {"events_subject"}

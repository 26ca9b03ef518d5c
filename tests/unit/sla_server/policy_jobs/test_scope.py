"""Patterns of agreements against the names that there are."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from sla_server.agreements.promise import CurveStep, Priority, VolumeClass
from sla_server.agreements.selectors import matches
from sla_server.policy_jobs.scope import KnownNames, scope_of
from tests.support.histories import promise


def row_of(volume: str, weight: float, floor_iops: float, promised_iops: float = 0.0) -> dict[str, Any]:
    return {
        "volume": volume,
        "weight": weight,
        "floor_iops": floor_iops,
        "floor_bytes_per_s": 0.0,
        "promised_iops": promised_iops,
    }


TEXT = st.text("ab*?[]!-", min_size=1, max_size=5)


@given(st.lists(TEXT, max_size=6), st.lists(st.lists(TEXT, max_size=3), max_size=4))
def test_names_mean_what_selectors_say(names: list[str], selectors: list[list[str]]) -> None:
    known = KnownNames(names)
    for each in selectors:
        assert known.meant(each) == {name for name in names if matches(name, each)}


def test_a_promise_for_any_client_needs_no_list_of_them() -> None:
    found = scope_of([promise(), promise("v?", ("host-a",))], [], ["erp", "v1", "v2"], ["host-a", "host-b"])
    assert found.promises["any_client"].to_pylist() == [True, False]
    assert found.promises["threshold_us"].to_pylist() == [12_000, 12_000]
    assert found.volumes.to_pylist() == [
        {"promise": 0, "volume": "erp"},
        {"promise": 1, "volume": "v1"},
        {"promise": 1, "volume": "v2"},
    ]
    assert found.clients.to_pylist() == [{"promise": 1, "client": "host-a"}]


def test_a_volume_has_the_class_of_its_agreement_with_the_highest_priority() -> None:
    classes = [
        VolumeClass("all", Priority.BRONZE, ("*",), floor_iops=10),
        VolumeClass("gold", Priority.GOLD, ("erp*",), floor_iops=20),
        VolumeClass("gold-too", Priority.GOLD, ("erp-1",), floor_iops=30),
    ]
    for order in itertools.permutations(classes[:2]):
        found = scope_of([], [*order, classes[2]], ["erp-1", "batch"], [])
        assert found.classes.to_pylist() == [
            row_of("batch", 2.0, 10.0),
            row_of("erp-1", 8.0, 20.0),
        ]
    (row,) = scope_of([], [], ["erp"], []).classes.to_pylist()
    assert row == row_of("erp", 1.0, 50.0)


def test_a_volume_has_at_least_the_priority_of_its_promises_and_the_end_of_their_curves() -> None:
    found = scope_of([promise("erp")], [], ["erp", "batch"], ["host-a"])
    assert found.classes.to_pylist() == [row_of("batch", 1.0, 50.0), row_of("erp", 8.0, 50.0, 150.0)]


def test_each_step_of_a_curve_is_a_row() -> None:
    steps = (CurveStep(100, 5_000), CurveStep(200, 9_000))
    found = scope_of([promise(), dataclasses.replace(promise(), curve=steps)], [], ["erp"], [])
    rows = [(row["promise"], row["step"], row["threshold_us"]) for row in found.promises.to_pylist()]
    assert rows == [(0, 0, 12_000), (1, 0, 5_000), (1, 1, 9_000)]


def test_no_agreement_is_no_rows_of_the_same_kind() -> None:
    found = scope_of([], [], [], [])
    assert [table.num_rows for table in (found.promises, found.volumes, found.clients, found.classes)] == [
        0
    ] * 4
    assert found.promises.schema.field("io").type == pa.int32()

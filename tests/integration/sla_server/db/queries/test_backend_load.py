"""The load of a backend over time on both databases: exact sums, whose it was, and never too many rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from sqlalchemy import event

from sla_server.db.archive.manifest import MOVED_KEY, raise_boundary
from sla_server.db.queries import backend_load
from sla_server.db.queries.history import HOUR_US
from tests.support.samples import (
    MINUTE_US,
    T0,
    Model,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    stream,
    streams_message,
)

LATER = T0 + 365 * 24 * HOUR_US
VOLUMES = (1, 2)


@pytest.fixture
def shared(rig: Any) -> Any:
    """Two volumes of one backend; two gateways serve the first of them, over three hours."""
    items = [make_cut(n + 1, start_us=T0 + n * 11 * MINUTE_US) for n in range(15)]
    other = [
        make_cut(n + 1, gw=gateway(2), start_us=T0 + n * 13 * MINUTE_US, streams=(1,)) for n in range(12)
    ]
    rig.feed(gateway_message(), streams_message(), streams_message((1,), gateway(2)))
    rig.feed(*(cuts_message([item]) for item in items + other))
    rig.items = items + other
    (rig.backend,) = {row["backend"] for row in rig.reader.streams()}
    return rig


def costs(items: Iterable[Any], step_us: int) -> dict[int, dict[str, int]]:
    """Time to the cost of each volume."""
    volumes = {stream(1): "vol-1", stream(1, gateway(2)): "vol-1", stream(2): "vol-2"}
    found: dict[int, dict[str, int]] = {}
    for (slot_us, stream_id), row in Model.of(items).slots.items():
        at = found.setdefault(slot_us // step_us * step_us, dict.fromkeys(("vol-1", "vol-2"), 0))
        at[volumes[stream_id]] += row["cost_milli"]
    return found


def assert_load(found: backend_load.BackendLoad, items: Iterable[Any], step_us: int) -> None:
    expected = costs(items, step_us)
    assert [item["slot_us"] for item in found.items] == sorted(expected)
    assert sorted(found.volumes) == ["vol-1", "vol-2"]
    for item in found.items:
        of = expected[item["slot_us"]]
        seconds = step_us / 1e6
        assert item["length_us"] == step_us
        assert item["cost_per_s"] == pytest.approx(sum(of.values()) / 1000 / seconds, abs=0.06)
        assert item["by_volume"] == pytest.approx(
            {name: cost / 1000 / seconds for name, cost in of.items()}, abs=0.06
        )


def test_a_backends_load_is_that_of_its_volumes_slot_by_slot(shared: Any) -> None:
    found = shared.reader.loads.of_backend(shared.backend, T0, T0 + 4 * HOUR_US, LATER)
    assert_load(found, shared.items, MINUTE_US)
    assert (found.others, found.read_every) == (0, 1)
    totals = {name: sum(of[name] for of in costs(shared.items, MINUTE_US).values()) for name in found.volumes}
    assert found.volumes == sorted(totals, key=lambda name: -totals[name]), "who used most comes first"


def test_where_slots_have_moved_to_files_it_comes_by_the_hour(shared: Any) -> None:
    with shared.engine.begin() as connection:
        raise_boundary(connection, MOVED_KEY, T0 + 3 * HOUR_US)
    found = shared.reader.loads.of_backend(shared.backend, T0, T0 + 4 * HOUR_US, LATER)
    assert_load(found, shared.items, HOUR_US)


def test_the_hour_that_goes_on_counts_as_far_as_it_has_gone(shared: Any) -> None:
    with shared.engine.begin() as connection:
        raise_boundary(connection, MOVED_KEY, T0 + 3 * HOUR_US)
    newest_us = max(costs(shared.items, HOUR_US))
    ended = shared.reader.loads.of_backend(shared.backend, T0, T0 + 4 * HOUR_US, LATER).items[-1]
    half = shared.reader.loads.of_backend(
        shared.backend, T0, T0 + 4 * HOUR_US, newest_us + HOUR_US // 2
    ).items[-1]
    assert half["cost_per_s"] == pytest.approx(2 * ended["cost_per_s"], abs=0.2)


def test_a_slot_that_has_not_ended_does_not_come(shared: Any) -> None:
    last_us = max(costs(shared.items, MINUTE_US))
    found = shared.reader.loads.of_backend(shared.backend, T0, last_us + MINUTE_US, last_us + 30_000_000)
    assert found.items[-1]["slot_us"] < last_us


def test_a_long_range_of_many_streams_reads_some_of_its_slots(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is on rows, whatever the range and however many the streams."""
    monkeypatch.setattr(backend_load, "ROWS_MAX", 6)
    monkeypatch.setattr(backend_load, "POINTS_MIN", 1)
    read: list[int] = []

    def count(_connection: Any, cursor: Any, statement: str, *_rest: Any) -> None:
        if "cost_milli" in statement:
            read.append(statement.count("rollup"))

    event.listen(shared.reader.loads._engine, "after_cursor_execute", count)
    found = shared.reader.loads.of_backend(shared.backend, T0, T0 + 4 * HOUR_US, LATER)
    assert found.read_every == 2, "three hours of three streams are nine rows, and six may be read"
    exact = costs(shared.items, HOUR_US)
    assert [item["slot_us"] for item in found.items] == [T0, T0 + 2 * HOUR_US]
    assert [item["cost_per_s"] for item in found.items] == [
        pytest.approx(sum(exact[item["slot_us"]].values()) / 3_600_000, abs=0.06) for item in found.items
    ]
    assert len(read) == 1, "one statement of one partition"


@pytest.mark.parametrize("streams", [180, 1_000, 4_000, 64_000])
@pytest.mark.parametrize("days", [7, 30])
def test_hours_that_are_read_of_many_are_not_always_the_same_of_the_day(streams: int, days: int) -> None:
    """A backup at three at night would be the load of every day, or of none."""
    hours = days * 24
    every = backend_load.one_hour_in(hours, streams)
    read = range(0, hours, every)
    most = max(backend_load.ROWS_MAX, backend_load.POINTS_MIN * streams)
    assert (len(read) - 1) * streams <= most, "the bound on rows holds"
    of_the_day = {hour % 24 for hour in read}
    assert len(of_the_day) == min(24, len(read)), "each hour of the day is read before one is read again"


def test_many_slots_become_few_points_and_many_volumes_a_rest(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend_load, "POINTS_MAX", 4)
    monkeypatch.setattr(backend_load, "NAMED", 1)
    found = shared.reader.loads.of_backend(shared.backend, T0, T0 + 4 * HOUR_US, LATER)
    assert 1 < len(found.items) <= 4
    assert (len(found.volumes), found.others) == (1, 1)
    every = costs(shared.items, MINUTE_US)
    total = sum(sum(of.values()) for of in every.values()) / 1000
    shown = sum(item["cost_per_s"] * item["length_us"] / 1e6 for item in found.items)
    assert shown == pytest.approx(total, rel=0.05), "nothing is lost between points"
    own = sum(item["by_volume"][found.volumes[0]] * item["length_us"] / 1e6 for item in found.items)
    assert own == pytest.approx(sum(of[found.volumes[0]] for of in every.values()) / 1000, rel=0.05)


def test_the_load_of_nothing_is_empty(shared: Any) -> None:
    loads = shared.reader.loads
    assert loads.of_backend(shared.backend, T0 - HOUR_US, T0, LATER).items == []
    assert loads.of_backend("no-such", T0, T0 + HOUR_US, LATER).items == []

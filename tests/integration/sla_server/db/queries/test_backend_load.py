"""The load of a backend over time on both databases: exact sums, whose it was, and never too many rows."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from sqlalchemy import event

from pmdaemon.wire.histogram import percentile_upper_us
from sla_server.db import schema
from sla_server.db.archive.manifest import MOVED_KEY, raise_boundary
from sla_server.db.queries import backend_load
from sla_server.db.queries.history import HOUR_US
from sla_server.db.queries.volume_clients import VolumeClients
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


CLIENTS = {"host-a": stream(1), "host-b": stream(1, gateway(2))}


@pytest.fixture
def two_clients(shared: Any) -> Any:
    """The first volume has a client at each of its gateways."""
    table = schema.streams
    with shared.engine.begin() as connection:
        renamed = table.update().where(table.c.stream_id == CLIENTS["host-b"]).values(client="host-b")
        assert connection.execute(renamed).rowcount == 1
    return shared


def assert_clients(found: VolumeClients, shared: Any, step_us: int, *, hours: int = 0) -> None:
    """Rates over all that is stored; of ``hours`` every other hour from the first on."""
    model = Model.of(shared.items)
    slots = sorted({slot for slot, _stream in model.slots})
    first_us, end_us = slots[0] // step_us * step_us, slots[-1] // step_us * step_us + step_us
    seconds = hours * 3600 or (end_us - first_us) / 1e6
    assert {row["client"] for row in found.items} == set(CLIENTS)
    for row in found.items:
        mine = [
            (at, sums)
            for at, sums in model.slots.items()
            if at[1] == CLIENTS[row["client"]] and (not hours or (at[0] - first_us) // HOUR_US % 2 == 0)
        ]
        total = {name: sum(sums[name] for _at, sums in mine) for name in ("reads", "writes", "cost_milli")}
        assert row["read_iops"] == pytest.approx(total["reads"] / seconds, abs=0.001)
        assert row["iops"] == pytest.approx((total["reads"] + total["writes"]) / seconds, abs=0.001)
        assert row["cost_per_s"] == pytest.approx(total["cost_milli"] / 1000 / seconds, abs=0.001)
        assert row["last_us"] == max(at[0] for at, _sums in mine) // step_us * step_us + step_us
        counts = np.sum([model.hists[at] for at, _sums in mine], axis=0)
        for percentile in (50, 95, 99):
            exact = percentile_upper_us(counts[:99] + counts[99:], percentile)
            if step_us == MINUTE_US:
                assert row[f"p{percentile}_us"] == exact
            else:
                assert row[f"p{percentile}_us"] >= exact, "hours have wider buckets"
    costs_of = [row["cost_per_s"] for row in found.items]
    assert costs_of == sorted(costs_of, reverse=True), "the busiest comes first"


def test_clients_of_a_volume_have_rates_and_latencies_of_their_own(two_clients: Any) -> None:
    found = two_clients.reader.loads.of_clients("vol-1", T0, T0 + 4 * HOUR_US, LATER, 50)
    assert (found.count, found.read_every) == (2, 1)
    assert_clients(found, two_clients, MINUTE_US)
    first = two_clients.reader.loads.of_clients("vol-1", T0, T0 + 4 * HOUR_US, LATER, 1)
    assert (first.items, first.count) == (found.items[:1], 2), "as many as are wanted"
    with two_clients.engine.begin() as connection:
        raise_boundary(connection, MOVED_KEY, T0 + 3 * HOUR_US)
    found = two_clients.reader.loads.of_clients("vol-1", T0, T0 + 4 * HOUR_US, LATER, 50)
    assert_clients(found, two_clients, HOUR_US)


def test_a_client_at_two_gateways_is_one(shared: Any) -> None:
    both = shared.reader.loads.of_clients("vol-1", T0, T0 + 4 * HOUR_US, LATER, 50)
    assert ([row["client"] for row in both.items], both.count) == (["host-a"], 1)
    model = Model.of(shared.items)
    reads = sum(sums["reads"] for at, sums in model.slots.items() if at[1] in CLIENTS.values())
    slots = sorted({slot for slot, _stream in model.slots})
    seconds = (slots[-1] - slots[0] + MINUTE_US) / 1e6
    assert len(shared.reader.streams("vol-1")) == 2
    assert shared.reader.streams("vol-1", 1) == shared.reader.streams("vol-1")[:1]
    assert both.items[0]["read_iops"] == pytest.approx(reads / seconds, abs=0.001)


def test_of_very_many_clients_some_hours_are_read(two_clients: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_load, "ROWS_MAX", 4)
    monkeypatch.setattr(backend_load, "POINTS_MIN", 1)
    found = two_clients.reader.loads.of_clients("vol-1", T0, T0 + 4 * HOUR_US, LATER, 50)
    assert found.read_every == 2, "three hours of two streams are six rows, and four may be read"
    assert_clients(found, two_clients, HOUR_US, hours=2)


def test_no_clients_where_nothing_is_stored(shared: Any) -> None:
    loads = shared.reader.loads
    assert loads.of_clients("vol-1", T0 - HOUR_US, T0, LATER, 50) == VolumeClients([])
    assert loads.of_clients("no-such", T0, T0 + HOUR_US, LATER, 50) == VolumeClients([])

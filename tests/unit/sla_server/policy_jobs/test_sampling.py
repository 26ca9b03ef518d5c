"""Which volumes of a large fleet are replayed: bounded, the same each time, and all of a small one."""

from __future__ import annotations

from typing import Any

from sla_server.db.queries.replay import StreamSample
from sla_server.policy_jobs.sampling import (
    DRAWN,
    MOST_PROMISED,
    MOST_VOLUMES,
    BackendSample,
    sample_streams,
    seed_of,
)

LARGE = 4_000
SEED = seed_of([{"volume": "v1", "hour_of_week": 3, "cost_per_s": 5.0}])


def fleet(volumes: int, clients: int = 2, backend: str = "disk") -> dict[int, dict[str, Any]]:
    names = [(f"v{number}", f"c{client}") for number in range(volumes) for client in range(clients)]
    return {
        number: {"volume": volume, "client": client, "backend": backend, "gateway": "gw"}
        for number, (volume, client) in enumerate(names, 1)
    }


def sampled(
    streams: dict[int, dict[str, Any]], promised: set[str], seed: bytes = SEED, backends: Any = ("disk",)
) -> tuple[StreamSample, list[BackendSample]]:
    """The demand of a volume is its number."""
    demands = {stream["volume"]: float(stream["volume"][1:]) for stream in streams.values()}
    covers = lambda volume, client: volume in promised and client == "c0"  # noqa: E731
    return sample_streams(streams, backends, covers, {"v0", f"v{LARGE - 1}"}, demands, seed)


def replayed(streams: dict[int, dict[str, Any]], sample: StreamSample) -> set[str]:
    own = {n for n, instead in sample.instead.items() if n == instead}
    volumes = {streams[n]["volume"] for n in own}
    assert own == {n for n, s in streams.items() if s["volume"] in volumes}, "all clients of a volume or none"
    return volumes


def test_a_backend_with_few_volumes_is_replayed_whole() -> None:
    streams = fleet(MOST_VOLUMES)
    sample, (found,) = sampled(streams, {"v1"})
    assert sample == StreamSample({number: number for number in streams}, {})
    assert (found.volumes, found.replayed, found.promised, found.capped_left) == (64, 64, 1, 0)


def test_of_a_large_one_those_under_promises_and_the_largest_are_and_the_rest_is_one_neighbour() -> None:
    streams, promised = fleet(LARGE), {"v7", "v8", "v9"}
    sample, (found,) = sampled(streams, promised)
    chosen = replayed(streams, sample)
    assert len(chosen) == MOST_VOLUMES
    assert promised <= chosen
    largest = MOST_VOLUMES - DRAWN - len(promised)
    assert {f"v{LARGE - 1 - number}" for number in range(largest)} <= chosen
    assert set(sample.instead) == set(streams)
    assert {instead for number, instead in sample.instead.items() if instead != number} == {-1}
    assert sample.added_up[-1]["backend"] == "disk"
    assert found == BackendSample("disk", LARGE, MOST_VOLUMES, 3, 1)
    assert "has 4000 volumes: 64 are replayed by themselves (3 under promises" in found.words
    assert "1 of those have caps" in found.words


def test_it_is_the_same_each_time_and_the_seed_decides_who_is_drawn() -> None:
    streams = fleet(LARGE)
    first, _ = sampled(streams, set())
    assert sampled(dict(reversed(streams.items())), set())[0].instead == first.instead
    other, _ = sampled(streams, set(), seed_of([]))
    assert len(replayed(streams, other) - replayed(streams, first)) <= DRAWN
    assert replayed(streams, other) != replayed(streams, first)


def test_of_a_fleet_that_is_promised_all_over_some_are_drawn() -> None:
    streams = fleet(LARGE)
    sample, (found,) = sampled(streams, {stream["volume"] for stream in streams.values()})
    assert len(replayed(streams, sample)) == MOST_VOLUMES
    assert found.promised >= MOST_PROMISED


def test_a_seed_is_of_the_caps_and_not_of_their_order() -> None:
    rows = [{"volume": f"v{n}", "hour_of_week": n, "cost_per_s": float(n)} for n in range(1, 9)]
    assert seed_of(iter(rows)) == seed_of(rows[::-1])
    others = (rows[1:], [*rows, rows[0]], [{**rows[0], "cost_per_s": 1.5}, *rows[1:]])
    assert len({seed_of(each) for each in (rows, *others)}) == 4


def test_other_backends_are_left_out() -> None:
    streams = {**fleet(LARGE), **{90_000 + n: s for n, s in fleet(3, backend="tape").items()}}
    sample, found = sampled(streams, set(), backends=("tape", "gone"))
    assert set(sample.instead) == {90_000 + n for n in range(1, 7)}
    assert [each.volumes for each in found] == [0, 3]

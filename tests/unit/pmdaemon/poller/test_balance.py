"""Number of pairs, shards of each, whose turn: formula, hysteresis, bounded waits, hung pairs."""

from __future__ import annotations

import itertools
import random
import uuid
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.poller import balance
from pmdaemon.poller.balance import (
    HALF_LIFE_NS,
    SHARDS,
    SHARE,
    T_PTMAX_US,
    Balance,
    DecayingMax,
    Decision,
    HangDetector,
    PairLoad,
    decide,
    evacuate,
    interleave,
    level,
    pairs_by_formula,
    pairs_needed,
    shard_of,
)

S = 10**9
ALL_ON_0 = (0,) * SHARDS


def load(pair: int, owners: balance.Map, fleet: Counter[int], busy: float = 0.1) -> PairLoad:
    return PairLoad(pair, busy, {shard: count for shard, count in fleet.items() if owners[shard] == pair})


def fleet(count: int) -> Counter[int]:
    rng = random.Random(5)
    return Counter(shard_of(str(uuid.UUID(int=rng.getrandbits(128)))) for _ in range(count))


class Life:
    """Reviews a second apart, with loads that follow the map at once."""

    def __init__(self, running: int, gateways: Counter[int]) -> None:
        self.owners: balance.Map = ALL_ON_0
        self.running = running
        self.gateways = gateways
        self.balance = Balance()
        self.now_s = 1000

    def check(self, wanted: int, busy: dict[int, float] | None = None) -> Decision:
        loads = [
            load(pair, self.owners, self.gateways, (busy or {}).get(pair, 0.1))
            for pair in range(self.running)
        ]
        self.balance, decision = decide(
            self.balance, self.owners, self.running, wanted, loads, self.now_s * S
        )
        self.owners = decision.owners
        self.now_s += 1
        return decision

    def sums(self) -> list[int]:
        return [sum(load(pair, self.owners, self.gateways).gateways.values()) for pair in range(self.running)]


def test_shards_are_spread_and_stable() -> None:
    assert shard_of("6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001") == shard_of(
        "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
    )
    counts = fleet(25_600)
    assert len(counts) == SHARDS
    assert max(counts.values()) < 160
    assert min(counts.values()) > 50


def test_a_second_pair_gets_half_in_bounded_steps_with_pauses() -> None:
    life = Life(2, fleet(1000))
    moves = [life.check(2).moves for _ in range(120)]
    assert max(moves) <= balance.MOVES_AT_ONCE
    assert moves[:10] == [0] * 10
    busy = [index for index, count in enumerate(moves) if count]
    assert all(later - earlier >= 15 for earlier, later in itertools.pairwise(busy))
    assert max(life.sums()) <= balance.OVERLOADED * 500
    assert moves[-10:] == [0] * 10


def test_an_empty_fleet_is_spread_at_once() -> None:
    life = Life(2, Counter())
    life.check(2)
    assert 110 < life.owners.count(1) < 146
    assert not any(life.check(2).moves for _ in range(40))


def test_small_unevenness_moves_nothing() -> None:
    life = Life(2, Counter(dict.fromkeys(range(SHARDS), 4)))
    life.owners = tuple(shard % 2 for shard in range(SHARDS))
    life.gateways[0] += 100
    assert sum(life.check(2).moves for _ in range(30)) == 0


def test_a_short_peak_moves_nothing() -> None:
    life = Life(2, Counter(dict.fromkeys(range(SHARDS), 4)))
    life.owners = tuple(shard % 2 for shard in range(SHARDS))
    for second in range(600):
        peak = second % 20 in (10, 11)
        assert life.check(2, {0: 1.0 if peak else 0.5, 1: 0.5}).moves == 0


def test_a_busy_pair_gives_shards_away_though_numbers_are_even() -> None:
    life = Life(2, Counter(dict.fromkeys(range(SHARDS), 4)))
    life.owners = tuple(shard % 2 for shard in range(SHARDS))
    for _ in range(15):
        life.check(2, {0: 0.9, 1: 0.2})
    assert life.owners.count(1) > 130


def twenty_minutes(pairs: int, noise: float, costs: dict[int, int]) -> tuple[int, list[float]]:
    """Sessions that end, and the load of each pair at the end.

    Args:
        noise: standard deviation of the CPU time that a pair reports, by the CPU time its gateways need.
        costs: what a gateway costs, by shard.
    """
    rng = random.Random(pairs)
    gateways = fleet(4000)
    owners = tuple(shard % pairs for shard in range(SHARDS))
    scale = 0.6 * pairs / sum(count * costs[shard] for shard, count in gateways.items())
    remembered, ended = Balance(), 0

    def needed(pair: int) -> float:
        return scale * sum(n * costs[shard] for shard, n in gateways.items() if owners[shard] == pair)

    def even_loads() -> list[tuple[float, PairLoad]]:
        return [(needed(pair), load(pair, owners, gateways)) for pair in range(pairs)]

    without_noise = even_loads()
    for second in range(20 * 60):
        loads = [
            loaded._replace(busy_ratio=min(1.0, need * max(0.0, rng.gauss(1, noise))))
            for need, loaded in without_noise
        ]
        remembered, decision = decide(remembered, owners, pairs, pairs, loads, second * S)
        if owners != decision.owners:
            ended += sum(
                gateways[shard] for shard in range(SHARDS) if owners[shard] != decision.owners[shard]
            )
            owners = decision.owners
            without_noise = even_loads()
    return ended, [needed(pair) for pair in range(pairs)]


@pytest.mark.parametrize("pairs", [2, 4, 8])
def test_noise_in_the_load_of_even_pairs_ends_no_session(pairs: int) -> None:
    """Found by a reviewer: 12 % of noise ended 24,000 sessions of 4,000 gateways in 20 minutes."""
    ended, _loads = twenty_minutes(pairs, 0.12, dict.fromkeys(range(SHARDS), 1))
    assert ended == 0


@pytest.mark.parametrize("pairs", [2, 4, 8])
def test_a_pair_of_costly_gateways_gives_some_away_once_in_spite_of_noise(pairs: int) -> None:
    costs = {shard: 1 if shard % pairs else 4 for shard in range(SHARDS)}
    ended, loads = twenty_minutes(pairs, 0.12, costs)
    assert 0 < ended < 4000 / 2
    assert max(loads) < 1.3 * 0.6


def test_pairs_grow_after_5_s_and_shrink_after_60() -> None:
    life = Life(1, fleet(100))
    assert [life.check(3).pairs for _ in range(7)] == [1, 1, 1, 1, 1, 3, 1]
    assert [life.check(1).pairs for _ in range(3)] == [1, 1, 1]
    life.running = 3
    for _ in range(40):
        life.check(3)
    decisions = [life.check(2) for _ in range(61)]
    assert {item.pairs for item in decisions[:60]} == {3}
    assert decisions[60].pairs == 2
    assert 2 not in decisions[60].owners


def test_a_need_that_swings_changes_nothing() -> None:
    life = Life(2, fleet(100))
    assert {life.check(2 + index % 2).pairs for index in range(200)} == {2}
    assert {life.check(2 - index % 2).pairs for index in range(200)} == {2}


# Drawn as bytes: lists of 256 numbers exceed what hypothesis is ready to draw, at times too often for it.
weights = st.binary(min_size=2 * SHARDS, max_size=2 * SHARDS).map(
    lambda drawn: [0.05 + value * 99.95 / 0xFFFF for value in memoryview(drawn).cast("H")]
)
maps = st.binary(min_size=SHARDS, max_size=SHARDS).map(lambda drawn: tuple(value % 4 for value in drawn))


@settings(deadline=None)
@given(maps, weights, st.sets(st.integers(0, 3), min_size=1))
def test_evacuation_leaves_nobody_behind_and_moves_no_other(
    owners: balance.Map, heavy: list[float], pairs: set[int]
) -> None:
    after = evacuate(owners, sorted(pairs), heavy)
    assert set(after) <= pairs
    assert all(b == a for b, a in zip(owners, after, strict=True) if b in pairs)


@settings(deadline=None)
@given(maps, weights)
def test_levelling_never_makes_the_fullest_fuller(owners: balance.Map, heavy: list[float]) -> None:
    before = balance.loads_of(owners, range(4), heavy)
    after = balance.loads_of(level(owners, range(4), heavy), range(4), heavy)
    assert max(after.values()) <= max(before.values()) + 1e-6


def test_a_thread_without_progress_is_named_after_ten_looks() -> None:
    watch = HangDetector()
    found = [watch.check({"inbound thread": 7, "outbound thread": tick}) for tick in range(11)]
    assert found[:10] == [""] * 10
    assert "inbound thread" in found[10]
    assert "outbound thread" not in found[10]


def test_progress_now_and_then_is_enough() -> None:
    watch = HangDetector()
    assert not any(watch.check({"inbound thread": tick // 9}) for tick in range(200))


@pytest.mark.parametrize(
    ("n", "t_thr_ms", "t_ptmax_us", "pairs"),
    [
        (0, 10, 200, 0),
        (1, 10, 200, 1),
        (50, 10, 200, 1),
        (51, 10, 200, 2),
        (150, 10, 200, 3),
        (1000, 10, 200, 20),
        (4000, 10, 20, 8),
        (30, 10, 300, 1),
        (34, 10, 300, 2),
        (7, 1, 2000, 14),
    ],
)
def test_stated_cases(n: int, t_thr_ms: float, t_ptmax_us: float, pairs: int) -> None:
    assert pairs_by_formula(n, t_thr_ms, t_ptmax_us) == pairs


@given(st.integers(0, 10**6), st.integers(1, 100), st.integers(20, 2000))
def test_enough_and_not_one_too_many(n: int, t_thr_ms: int, t_ptmax_us: int) -> None:
    pairs = pairs_by_formula(n, t_thr_ms, t_ptmax_us)
    assert pairs * t_thr_ms * 1000 >= n * t_ptmax_us
    assert pairs == 0 or (pairs - 1) * t_thr_ms * 1000 < n * t_ptmax_us


def test_clamp_and_fixed() -> None:
    assert pairs_needed(0, 10, 200, 8) == 1
    assert pairs_needed(10_000, 10, 200, 8) == 8
    assert pairs_needed(120, 10, 200, 8) == 3
    assert pairs_needed(10_000, 10, 200, 8, fixed=5) == 5
    assert pairs_needed(1, 10, 200, 0) == 1


@pytest.mark.parametrize("bad", [(-1, 10, 200), (1, 0, 200), (1, 10, 0)])
def test_nonsense_is_refused(bad: tuple[int, float, float]) -> None:
    with pytest.raises(ValueError):
        pairs_by_formula(*bad)


def test_decaying_maximum() -> None:
    peak = DecayingMax()
    assert peak.value_us == T_PTMAX_US
    peak.add(800, 0)
    peak.add(100, 0)
    assert peak.value_us == 800
    peak.add(100, HALF_LIFE_NS)
    assert peak.value_us == pytest.approx(400)
    peak.add(100, 3 * HALF_LIFE_NS)
    assert peak.value_us == 100
    peak.add(1, 20 * HALF_LIFE_NS)
    assert peak.value_us == 20
    peak.add(9e9, 20 * HALF_LIFE_NS)
    assert peak.value_us == 2000


def shard(name: str) -> int:
    return int(name.split("-")[0])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 10))
def test_everybody_once_and_in_order_within_a_shard(shards: list[int], share: int) -> None:
    names = [f"{number}-{index}" for index, number in enumerate(shards)]
    served = list(interleave(names, shard, share))
    assert sorted(served) == sorted(names)
    for number in set(shards):
        mine = [name for name in names if shard(name) == number]
        assert [name for name in served if shard(name) == number] == mine


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(1, 10))
def test_wait_is_bounded_by_shares_not_by_the_others_numbers(shards: list[int], share: int) -> None:
    names = [f"{number}-{index}" for index, number in enumerate(shards)]
    served = list(interleave(names, shard, share))
    others = len(set(shards)) - 1
    for number in set(shards):
        for place, name in enumerate(name for name in names if shard(name) == number):
            turns = place // share + 1
            assert served.index(name) <= place + turns * others * share


def test_a_huge_shard_does_not_starve_a_small_one() -> None:
    names = [f"0-{index}" for index in range(10_000)] + ["1-last"]
    assert list(interleave(names, shard)).index("1-last") == SHARE

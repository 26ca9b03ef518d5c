"""Shards in turn: everybody once, and a bound on the wait behind the others."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.poller.interleave import SHARE, in_turn


def shard(name: str) -> int:
    return int(name.split("-")[0])


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=300), st.integers(1, 10))
def test_everybody_once_and_in_order_within_a_shard(shards: list[int], share: int) -> None:
    names = [f"{number}-{index}" for index, number in enumerate(shards)]
    served = list(in_turn(names, shard, share))
    assert sorted(served) == sorted(names)
    for number in set(shards):
        mine = [name for name in names if shard(name) == number]
        assert [name for name in served if shard(name) == number] == mine


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=300), st.integers(1, 10))
def test_wait_is_bounded_by_shares_not_by_the_others_numbers(shards: list[int], share: int) -> None:
    names = [f"{number}-{index}" for index, number in enumerate(shards)]
    served = list(in_turn(names, shard, share))
    others = len(set(shards)) - 1
    for number in set(shards):
        for place, name in enumerate(name for name in names if shard(name) == number):
            turns = place // share + 1
            assert served.index(name) <= place + turns * others * share


def test_a_huge_shard_does_not_starve_a_small_one() -> None:
    names = [f"0-{index}" for index in range(10_000)] + ["1-last"]
    assert list(in_turn(names, shard)).index("1-last") == SHARE

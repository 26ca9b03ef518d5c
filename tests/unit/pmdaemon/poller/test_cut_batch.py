"""Cuts judged ahead of their turn: none is forgotten before its turn, and they never become many."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.poller.cut_batch import RANGES, LiveCuts


def test_cuts_that_follow_each_other_are_one_range() -> None:
    live = LiveCuts()
    for seq in range(100, 100_000):
        live.add(7, seq)
    assert len(live) == 1
    assert (7, 100) in live
    assert (7, 99_999) in live
    assert (7, 100_000) not in live
    assert (7, 99) not in live
    assert (8, 100) not in live


def test_what_had_its_turn_is_forgotten() -> None:
    live = LiveCuts()
    for cut in ((7, 3), (7, 4), (7, 5), (7, 9), (8, 4)):
        live.add(*cut)
    live.pass_by(7, 5)
    assert len(live) == 2
    assert (7, 5) not in live
    assert (7, 9) in live
    assert (8, 4) in live
    live.pass_by(7, 9)
    live.keep_epochs({7})
    assert not live


def test_an_agent_that_skips_about_gets_bounded_memory() -> None:
    live = LiveCuts()
    for seq in range(0, 100 * RANGES, 10):
        live.add(7, seq)
    assert len(live) == RANGES
    assert all((7, seq) in live for seq in range(0, 100 * RANGES, 10))


STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "pass"]), st.integers(1, 3), st.integers(1, 400)), max_size=300
)


@given(STEPS)
def test_none_is_forgotten_before_its_turn(steps: list[tuple[str, int, int]]) -> None:
    live = LiveCuts()
    held: set[tuple[int, int]] = set()
    for what, epoch, seq in steps:
        if what == "add":
            live.add(epoch, seq)
            held.add((epoch, seq))
        else:
            live.pass_by(epoch, seq)
            held = {item for item in held if item[0] != epoch or item[1] > seq}
        assert all(item in live for item in held)
        assert len(live) <= 3 * RANGES
    for epoch in (1, 2, 3):
        live.pass_by(epoch, 400)
    assert not live

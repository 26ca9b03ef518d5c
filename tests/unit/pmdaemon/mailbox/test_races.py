"""Interleavings, one by one: the sender changes its list between two loads of a recipient that searches.

Each scenario is run once for every load of the search: every window is tried, nothing is left to chance.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox import reader as taking
from tests.support.mailbox import abandon, drain, make_mesh

Boxes = dict[str, Mailbox]
NEVER = 1 << 60


class HookedLoads:
    """Words whose k-th load is preceded by a call, and so is every ``again``-th after it."""

    def __init__(self, words: memoryview, load: int, hook: Callable[[], None], again: int) -> None:
        self._words = words
        self._load = load
        self._hook = hook
        self._again = again
        self.loads = 0

    def __getitem__(self, index: int) -> Any:
        if self.loads == self._load:
            self._hook()
            self._load += self._again
        self.loads += 1
        return self._words[index]

    def __setitem__(self, index: int, value: int) -> None:
        self._words[index] = value


def hooked_unpack(hooked: HookedLoads, mine: Any) -> Callable[[Any, int], tuple[Any, ...]]:
    """The load of a whole slot: for the hooked reader (known by its memory) word by word."""

    def unpack(memory: Any, at_bytes: int) -> tuple[Any, ...]:
        if memory is not mine:
            return tuple(struct.unpack_from("=8x7Q", memory, at_bytes))
        return tuple(hooked[at_bytes // 8 + word] for word in range(1, 8))

    return unpack


def reclaim_everything(boxes: Boxes) -> None:
    drain(boxes["c"])
    for outlet in boxes["a"]._writer._outlets:
        boxes["a"]._writer._reclaim(outlet)


def reclaim_and_post(boxes: Boxes) -> None:
    reclaim_everything(boxes)
    boxes["a"].post("c", b"later for c")
    boxes["a"].post(("b", "c"), b"later")


def post_urgent(boxes: Boxes) -> None:
    boxes["a"].post(("c", "b"), b"urgent", urgent=True)


def reuse_all_slots(boxes: Boxes) -> None:
    for number in range(12):
        reclaim_everything(boxes)
        boxes["a"].post("c", b"%d" % number)
    boxes["a"].post("b", b"later")


def churn(boxes: Boxes) -> None:
    reclaim_everything(boxes)
    for number in range(4):
        boxes["a"].post("c", b"%d" % number)


def restart_sender(boxes: Boxes) -> None:
    reclaim_everything(boxes)
    dead, boxes["a"] = boxes["a"], attach(boxes["a"]._segment.path, "a")
    abandon(dead)
    boxes["a"].post("b", b"later")


class Race:
    """Searches with ``action`` before one of their loads, one after the other in one mesh.

    To make a mesh and to attach to it costs five times what a search does, so only b, whose search it is,
    is attached again each time: a look-ahead that has inspected nothing. After each search all slots are free
    again but the tail.
    """

    def __init__(
        self, path: Path, action: Callable[[Boxes], None], order: str = "ccbcbc", behind: str = ""
    ) -> None:
        make_mesh(path, "a", "b", "c", "z", slots=100, ring_bytes=4096)
        self._path, self._action, self._order, self._behind = path, action, order, behind
        self._boxes = {name: attach(path, name) for name in "abcz"}
        self._boxes["a"].post("z", b"the tail, which stays linked")
        self._free_slots()

    def close(self) -> None:
        abandon(*self._boxes.values())

    def _free_slots(self) -> int:
        """Take what is left, and free all slots but the tail; returns how many messages z got."""
        for_z = len(drain(self._boxes["z"]))
        reclaim_everything(self._boxes)
        assert len(self._boxes["a"]._writer._free) == 99, "the next search begins with the same list"
        return for_z

    def run(self, load: int, again: int = NEVER) -> tuple[int, int]:
        """Search, from the head or ``behind`` a message to that one, with the action before the given load.

        Returns the loads and the resets of the search.
        """
        boxes = self._boxes
        abandon(boxes["b"])
        boxes["b"] = attach(self._path, "b")
        # z takes nothing: what it is sent stands still. Then comes what c takes, then what b is looking for.
        for _ in range(20):
            boxes["a"].post("z", b"stays")
        if self._behind:
            boxes["a"].post(self._behind, b"inspected before")
            drain(boxes["b"])
            drain(boxes["c"])
        for recipient in self._order:
            boxes["a"].post(recipient, recipient.encode())
        reader = boxes["b"]._readers[0]
        hooked = HookedLoads(reader._words, load, lambda: self._action(boxes), again)
        reader._words = hooked
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(taking, "_unpack", hooked_unpack(hooked, reader._memory))
            got = drain(boxes["b"])
        reader._words = boxes["b"]._words
        loads = hooked.loads
        if load >= loads:
            self._action(boxes)
        got += drain(boxes["b"])
        extra = [payload for payload in got if payload != b"b"]
        assert got.count(b"b") == self._order.count("b")
        posted = {reclaim_everything: [], churn: [], post_urgent: [b"urgent"]}
        assert extra == posted.get(self._action, [b"later"])
        assert self._free_slots() == 20
        return loads, reader.resets["invalid"]


@pytest.fixture
def race(tmp_path: Path) -> Iterator[Callable[..., Race]]:
    made: list[Race] = []

    def make(*given: Any) -> Race:
        made.append(Race(tmp_path / "main", *given))
        return made[0]

    yield make
    made[0].close()


def try_each_load(race: Race, least: int) -> None:
    """One search for every load of a search that is left alone."""
    alone = race.run(NEVER)
    loads, _ = alone
    assert loads > least
    for load in range(loads):
        race.run(load)
    assert race.run(NEVER) == alone, "what the searches before left made no difference"


@pytest.mark.parametrize(
    "action", [reclaim_everything, reclaim_and_post, post_urgent, reuse_all_slots, restart_sender]
)
def test_the_list_may_change_between_any_two_loads(
    race: Callable[..., Race], action: Callable[[Boxes], None]
) -> None:
    try_each_load(race(action), 60)


@pytest.mark.parametrize("behind", ["b", "c"])
@pytest.mark.parametrize("order", ["bbcb", "ccbcbc"])
@pytest.mark.parametrize(
    "action", [reclaim_everything, reclaim_and_post, post_urgent, reuse_all_slots, restart_sender]
)
def test_the_look_ahead_may_be_freed_and_used_again_between_any_two_loads(
    race: Callable[..., Race], action: Callable[[Boxes], None], order: str, behind: str
) -> None:
    try_each_load(race(action, order, behind), 20)


def test_a_search_that_is_thrown_back_again_and_again_takes_no_slot_for_a_circle(
    race: Callable[..., Race],
) -> None:
    searches = race(churn, "cccccc")
    resets = [searches.run(load, again)[1] for load in range(80, 110) for again in (85, 90, 95)]
    assert max(resets) >= 3

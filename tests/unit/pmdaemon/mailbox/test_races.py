"""Interleavings, one by one: the sender changes its list between two loads of a recipient that searches.

Each scenario is run once for every load of the search: every window is tried, nothing is left to chance.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
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


def run(
    path: Path,
    action: Callable[[Boxes], None],
    load: int,
    again: int = NEVER,
    order: str = "ccbcbc",
    behind: str = "",
) -> tuple[int, int]:
    """Search, from the head or ``behind`` a message to that one, with ``action`` before the given load.

    Returns the loads and the resets of the search.
    """
    # z takes nothing: what it is sent stands still. Then comes what c takes, then what b is looking for.
    make_mesh(path, "a", "b", "c", "z", slots=100, ring_bytes=4096)
    boxes = {name: attach(path, name) for name in "abcz"}
    for _ in range(20):
        boxes["a"].post("z", b"stays")
    if behind:
        boxes["a"].post(behind, b"inspected before")
        drain(boxes["b"])
        drain(boxes["c"])
    for recipient in order:
        boxes["a"].post(recipient, recipient.encode())
    reader = boxes["b"]._readers[0]
    hooked = HookedLoads(reader._words, load, lambda: action(boxes), again)
    reader._words = hooked
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(taking, "_unpack", hooked_unpack(hooked, reader._memory))
        got = drain(boxes["b"])
    reader._words = boxes["b"]._words
    loads = hooked.loads
    if load >= loads:
        action(boxes)
    got += drain(boxes["b"])
    extra = [payload for payload in got if payload != b"b"]
    assert got.count(b"b") == order.count("b")
    posted = {reclaim_everything: [], churn: [], post_urgent: [b"urgent"]}
    assert extra == posted.get(action, [b"later"])
    assert len(drain(boxes["z"])) == 20
    resets = reader.resets["invalid"]
    abandon(*boxes.values())
    return loads, resets


@pytest.mark.parametrize(
    "action", [reclaim_everything, reclaim_and_post, post_urgent, reuse_all_slots, restart_sender]
)
def test_the_list_may_change_between_any_two_loads(tmp_path: Path, action: Callable[[Boxes], None]) -> None:
    loads, _ = run(tmp_path / "count", action, NEVER)
    assert loads > 60
    for load in range(loads):
        run(tmp_path / f"{load}", action, load)


@pytest.mark.parametrize("behind", ["b", "c"])
@pytest.mark.parametrize("order", ["bbcb", "ccbcbc"])
@pytest.mark.parametrize(
    "action", [reclaim_everything, reclaim_and_post, post_urgent, reuse_all_slots, restart_sender]
)
def test_the_look_ahead_may_be_freed_and_used_again_between_any_two_loads(
    tmp_path: Path, action: Callable[[Boxes], None], order: str, behind: str
) -> None:
    loads, _ = run(tmp_path / "count", action, NEVER, NEVER, order, behind)
    assert loads > 20
    for load in range(loads):
        run(tmp_path / f"{load}", action, load, NEVER, order, behind)


def test_a_search_that_is_thrown_back_again_and_again_takes_no_slot_for_a_circle(tmp_path: Path) -> None:
    thrown_back = 0
    for load in range(80, 110):
        for again in (85, 90, 95):
            _, resets = run(tmp_path / f"{load}-{again}", churn, load, again, "cccccc")
            thrown_back = max(thrown_back, resets)
    assert thrown_back >= 3

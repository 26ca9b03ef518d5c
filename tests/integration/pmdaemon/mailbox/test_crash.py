"""Death at every store of a sender, and of its repair: nothing acknowledged is lost, doubled or leaked.

The death is an exception instead of the k-th store; the object is then abandoned and the name attached again,
as a restarted process does. (Real kills: test_processes and tests/crash.)
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path

import pytest

from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox import reader as taking_module
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.mailbox.writer import LaneWriter
from tests.support.mailbox import (
    Crash,
    FailingStores,
    abandon,
    audit,
    drain,
    fail_stores,
    make_mesh,
    run_mortal,
)

NEVER = 1 << 60
RECIPIENTS = ("b", "c")


class Life:
    """A sender `a` that dies at one of its stores while `b` and `c` live on."""

    def __init__(self, path: Path, fail_at: int) -> None:
        self.path = make_mesh(path, "a", "b", "c", slots=12, ring_bytes=256)
        self.boxes = {name: attach(path, name) for name in "abc"}
        self.acknowledged: dict[str, list[bytes]] = {"b": [], "c": []}
        self.got: dict[str, list[bytes]] = {"b": [], "c": []}
        for number in range(4):
            self._post(b"old %d" % number + b"." * 40, urgent=number == 1)
        self.counter: FailingStores = fail_stores(self.boxes["a"], fail_at)
        self.died = not run_mortal(self._script)

    def _script(self) -> None:
        """Posts into full rings, past a slow recipient, to a sleeper, urgent, around the ring's end."""
        self._take("b", 3)
        self._post(b"1" * 30)
        self._take("c", 1)
        self._post(b"2", urgent=True)
        self._post(b"3" * 120)  # c is full
        self._take("b", 64)
        assert self.boxes["b"].prepare_sleep()
        self._post(b"4" * 90)
        self._take("c", 64)
        for number in range(5):
            self._post(b"5%d" % number * 20, urgent=number % 2 == 0)
            self._take("b", 64)
        self._take("c", 2)
        self._post(b"6" * 200)
        self._post(b"")

    def _post(self, payload: bytes, urgent: bool = False) -> None:
        served = RECIPIENTS
        try:
            self.boxes["a"].post(RECIPIENTS, payload, urgent=urgent)
        except MailboxFull as full:
            served = tuple(name for name in RECIPIENTS if name not in full.recipients)
        for name in served:
            self.acknowledged[name].append(payload)

    def _take(self, name: str, number: int) -> None:
        self.got[name] += [message.payload for message in self.boxes[name].take(number)]

    def restart(self) -> None:
        dead, self.boxes["a"] = self.boxes["a"], attach(self.path, "a")
        abandon(dead)

    def check(self) -> None:
        """The survivors and the new incarnation go on; every acknowledged message comes exactly once."""
        audit(self.boxes["a"])
        extra = []
        for name in RECIPIENTS:
            self.got[name] += drain(self.boxes[name])
            assert len(set(self.got[name])) == len(self.got[name])
            assert set(self.acknowledged[name]) <= set(self.got[name])
            extra.append(set(self.got[name]) - set(self.acknowledged[name]))
        # What was being posted may have arrived, and then at all its recipients that had room.
        assert len(extra[0] | extra[1]) <= 1
        for number in range(30):
            self.boxes["a"].post(RECIPIENTS, b"after %d" % number, urgent=number % 4 == 0)
            assert drain(self.boxes["b"]) == drain(self.boxes["c"]) == [b"after %d" % number]
        audit(self.boxes["a"])
        abandon(*self.boxes.values())


@pytest.fixture(scope="module")
def stores(form: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Number of crash points; the script must reach what matters."""
    life = Life(tmp_path_factory.mktemp(f"count-{form}") / "main", NEVER)
    stats = life.boxes["a"].stats()
    assert not life.died
    assert stats["reclaimed"] >= 8
    assert stats["full"] >= 2
    assert stats["rings"] == 1
    count = life.counter.stores
    life.check()
    return count


def test_a_sender_may_die_at_any_store(tmp_path: Path, stores: int) -> None:
    assert stores > 120
    for fail_at in range(stores):
        life = Life(tmp_path / f"{fail_at}", fail_at)
        assert life.died
        life.restart()
        life.check()


def test_a_repair_may_die_at_any_store_too(tmp_path: Path, stores: int) -> None:
    deaths = 0
    for fail_at in range(0, stores, 2):
        for second in range(4):
            life = Life(tmp_path / f"{fail_at}-{second}", fail_at)
            life.counter.left = second
            deaths += not run_mortal(life.boxes["a"]._writer.adopt)
            life.restart()
            life.check()
    assert deaths > stores // 4


def test_the_acknowledgement_order_of_one_route_is_kept_over_a_death(tmp_path: Path) -> None:
    path = make_mesh(tmp_path / "main", "a", "b", slots=32)
    with attach(path, "b") as b:
        for fail_at in range(11):
            a = attach(path, "a")
            a.post("b", b"%d first" % fail_at)
            fail_stores(a, fail_at)
            run_mortal(functools.partial(a.post, "b", b"%d maybe" % fail_at))
            abandon(a)
            with attach(path, "a") as again:
                again.post("b", b"%d last" % fail_at)
            got = drain(b)
            assert got[0] == b"%d first" % fail_at
            assert got[-1] == b"%d last" % fail_at
            assert got[1:-1] in ([], [b"%d maybe" % fail_at])


def test_a_recipient_that_dies_before_its_mark_gets_the_message_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_mesh(tmp_path / "main", "a", "b")
    a, b = attach(path, "a"), attach(path, "b")
    for number in range(5):
        a.post("b", b"%d" % number)
    assert len(b.take(2)) == 2
    b.release()

    def die(_payload: bytes) -> int:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(taking_module, "crc32", die)
        with pytest.raises(Crash):
            b.take()
    again: Mailbox = attach(path, "b")
    assert drain(again) == [b"2", b"3", b"4"]
    abandon(a, b, again)


@pytest.mark.parametrize("downwards", [False, True])
@pytest.mark.parametrize("stands_at", range(5))
def test_a_look_ahead_within_a_run_that_is_being_freed_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stands_at: int, downwards: bool
) -> None:
    """`d` looks for the first time after the k-th slot that the successor of a dead sender frees."""
    real, slots = LaneWriter._make_free, 16
    for looks_at in range(1, slots):
        path = make_mesh(tmp_path / f"{looks_at}", "a", "b", "d", slots=slots)
        a, b, d = (attach(path, name) for name in ("a", "b", "d"))
        if downwards:  # slots are then used in descending order
            for _ in range(7):
                a.post("b", b"")
            drain(b)
            a._writer._reclaim(a._outlets["b"][0])
        for number in range(6):
            a.post("b", b"%d" % number)
            if number == stands_at:
                assert d.take() == []  # the look-ahead of d: the slot just posted
        drain(b)
        fail_stores(a, 1)  # unlinks the run, and dies before it frees it
        assert not run_mortal(functools.partial(a._writer._reclaim, a._outlets["b"][0]))
        abandon(a)
        freed: list[int] = []

        def die_later(keeper: LaneWriter, slot: int, freed: list[int] = freed, k: int = looks_at) -> int:
            reference = real(keeper, slot)
            freed.append(slot)
            if len(freed) == k:
                raise Crash
            return reference

        with monkeypatch.context() as patch:
            patch.setattr(LaneWriter, "_make_free", die_later)
            with contextlib.suppress(Crash):  # fewer to free than that
                attach(path, "a")
        assert d.take() == []
        a = attach(path, "a")
        a.post("d", b"for d")
        assert drain(d) == [b"for d"]
        audit(a)
        abandon(a, b, d)

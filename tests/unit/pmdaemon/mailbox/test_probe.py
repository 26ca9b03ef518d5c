"""Is a segment in order? What crashes leave is; what stray stores leave is not."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pmdaemon.mailbox import Mailbox, attach, probe
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxFull, MessageDamaged
from tests.support.mailbox import abandon, drain, fail_stores, make_mesh, run_mortal


def test_whatever_a_death_leaves_is_in_order_and_is_only_read(tmp_path: Path) -> None:
    for fail_at in range(40):
        path = make_mesh(tmp_path / f"{fail_at}", "a", "b", "c", slots=12, ring_bytes=256)
        a, b, c = (attach(path, name) for name in "abc")
        for number in range(3):
            a.post(("b", "c"), b"%d" % number * 20)
        drain(b)
        fail_stores(a, fail_at)
        run_mortal(functools.partial(a.post, ("b", "c"), b"x" * 90, urgent=True))
        abandon(a, b, c)
        before = path.read_bytes()
        probe(path)
        assert path.read_bytes() == before


def test_the_log_says_once_which_participant_met_what_damage(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b, capture_logs() as logs:
        a.post("b", b"x")
        word, value = _head(a)
        a._words[word] = value
        for _ in range(2):
            with pytest.raises(MailboxCorrupt):
                b.take()
        assert (b._segment.is_damaged, b._segment.damaged_by) == (True, "b")
    (entry,) = logs
    assert (entry["event"], entry["participant"]) == ("mailbox-damage-met", "b")
    assert "lane of a" in entry["problem"]


def test_a_segment_with_living_participants_is_in_order(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        for _ in range(50):
            a.post("b", b"x")
            probe(path)
            b.take()


def _head(a: Mailbox) -> tuple[int, int]:
    return a._writer._head_word, 777


def _slot(word: int) -> Callable[[Mailbox], tuple[int, int]]:
    return lambda a: (a._segment.layout.slots_word(0) + word, (1 << 64) - 1)


@pytest.mark.parametrize(
    "stray", [_head, _slot(lay.S_STATE), _slot(lay.S_NEXT), _slot(lay.S_ADDRESS), _slot(lay.S_POSITION)]
)
def test_a_stray_store_into_a_lane_is_noticed(
    path: Path, stray: Callable[[Mailbox], tuple[int, int]]
) -> None:
    make_mesh(path, "a", "b")
    a = attach(path, "a")
    a.post("b", b"x")
    word, value = stray(a)
    a._words[word] = value
    a.close()
    with pytest.raises(MailboxCorrupt):
        probe(path)


def test_a_stray_store_into_a_sequence_or_a_room_is_noticed(path: Path) -> None:
    for word in (lay.C_SEQUENCE, lay.C_ROOM):
        made = make_mesh(path.with_name(f"m{word}"), "a", "b")
        with attach(made, "a") as a:
            a._words[a._segment.layout.control_word(0) + word] = (1 << 64) - 1
        with pytest.raises(MailboxCorrupt):
            probe(made)


def _damage(path: Path) -> None:
    with attach(path, "a") as a:
        a.post("b", b"x")
        a._words[a._writer._head_word] = 777


def _take(path: Path) -> None:
    with attach(path, "b") as b:
        b.take()


def _sleep(path: Path) -> None:
    with attach(path, "b") as b:
        b.prepare_sleep()


def _wait(path: Path) -> None:
    with attach(path, "b") as b:
        b.wait(0)


def _attach(path: Path) -> None:
    attach(path, "a")


@pytest.mark.parametrize("meet", [_take, _sleep, _wait, _attach])
def test_who_meets_damage_marks_the_segment(path: Path, meet: Callable[[Path], None]) -> None:
    make_mesh(path, "a", "b", "c")
    _damage(path)
    with attach(path, "c") as c:
        assert not c._segment.is_damaged
        with pytest.raises(MailboxCorrupt):
            meet(path)
        assert c._segment.is_damaged
    with pytest.raises(MailboxCorrupt):
        probe(path)


def test_a_poster_that_meets_damage_marks_the_segment(path: Path) -> None:
    for many in (False, True):
        made = make_mesh(path.with_name(f"{many}"), "a", "b", slots=4)
        with attach(made, "a") as a, attach(made, "b") as b:
            a.post("b", b"x")
            a._words[a._writer._state_word[0]] = 255
            with contextlib.suppress(MailboxFull):
                a.post("b", b"y")
                a.post("b", b"y")
            with pytest.raises(MailboxCorrupt, match="slot 0 turned"):
                _ = a.post_many("b", [b"y"]) if many else a.post("b", b"y")
            assert b._segment.is_damaged


def test_a_damaged_message_is_over_and_no_damage_of_the_segment(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"torn")
        a.post("b", b"whole")
        at_bytes, _ = a._segment.layout.ring_at_bytes("a", "b")
        a._segment.memory[at_bytes : at_bytes + 4] = b"TORN"
        with pytest.raises(MessageDamaged, match="message 1 has a wrong checksum"):
            b.take()
        assert drain(b) == [b"whole"]
        assert not b._segment.is_damaged
        assert b.stats()["discarded"] == 1
    probe(path)

"""The form `shared`: order of arrival, repair by whoever comes next, hostile segments.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import Mailbox, attach
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox import shared_writer as shared_writer_module
from pmdaemon.mailbox.errors import MailboxBusy, MailboxCorrupt
from tests.support import mailbox
from tests.support.mailbox import audit, drain, fail_stores, make_mesh, revive, run_mortal


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "FORM", "shared")


def list_word(box: Mailbox, word: int) -> int:
    return box._segment.layout.list_word + word


def test_messages_of_all_senders_come_in_order_of_arrival(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        for number in range(6):
            (a if number % 2 else b).post("c", b"%d" % number, urgent=number == 4)
        assert drain(c) == [b"4", b"0", b"1", b"2", b"3", b"5"]


def test_the_next_sender_repairs_what_a_dead_one_left_locked(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    a, b, c = (attach(path, name) for name in "abc")
    repairs = 0
    for fail_at in range(30):
        words, memory = a._writer._words, a._writer._memory
        fail_stores(a, fail_at)
        run_mortal(lambda: a.post("c", b"mortal"))
        revive(a, words, memory)
        b.post("c", b"after")
        assert drain(c)[-1] == b"after"
        audit(b)
        repairs = b.stats()["repairs"]
        a.post("c", b"again")
        assert drain(c) == [b"again"]
    assert repairs >= 4
    for box in (a, b, c):
        box.close()


@contextlib.contextmanager
def holding(box: Mailbox) -> Iterator[None]:
    """Another thread holds the lock of the list."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        assert box._writer._mutex.acquire()
        held.set()
        done.wait(60)
        box._writer._mutex.release()

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    try:
        assert held.wait(60)
        yield
    finally:
        done.set()
        thread.join()


def test_a_living_holder_that_does_not_go_on_makes_posts_fail(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_writer_module, "PATIENCE_S", 0.0)
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c, holding(a):
        with pytest.raises(MailboxBusy, match="stopped process") as caught:
            b.post("c", b"x")
        assert caught.value.retryable
        assert c.take() == []  # takers take no lock
        assert b.stats()["busy"] >= 1
    with attach(path, "b") as b, attach(path, "c") as c:
        b.post("c", b"x")
        assert drain(c) == [b"x"]


@pytest.mark.parametrize("at", ["if self._words[self._dirty_word]:", "tail = words[tail_word]"])
def test_an_exception_right_behind_the_lock_does_not_keep_it_for_ever(path: Path, at: str) -> None:
    """A signal handler of the program around us may raise anywhere, also between trylock and ``try``."""
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b, attach(path, "c") as c:
        with mailbox.interrupted_at(at), pytest.raises(KeyboardInterrupt):
            a.post("b", b"perhaps")
        a.post("b", b"a")
        c.post("b", b"c")
        assert drain(b)[-2:] == [b"a", b"c"]
        mailbox.audit(a)


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        (lay.L_MUTEX + 2, 0, "overwritten"),
        (lay.L_MUTEX, 0x3FFFFFFE, "does not exist"),
        (lay.L_TAIL, 9999, "slot 9999"),
    ],
)
def test_a_damaged_list_block_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, word: int, value: int, problem: str
) -> None:
    monkeypatch.setattr(shared_writer_module, "PATIENCE_S", 0.0)
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        before = a._words[list_word(a, word)]
        a._words[list_word(a, word)] = value
        with pytest.raises(MailboxCorrupt, match=problem):
            a.post("b", b"x")
        a._words[list_word(a, word)] = before


def test_a_damaged_chain_is_not_repaired_but_told(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        a.post("b", b"x")
        a._words[list_word(a, lay.L_HEAD)] = 777
        a._words[list_word(a, lay.L_DIRTY)] = 1
        for _ in range(2):
            with pytest.raises(MailboxCorrupt, match="leads outside"):
                a.post("b", b"x")


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pokes=st.lists(st.tuples(st.integers(0, 500), st.one_of(st.integers(0, 40), st.integers(0, 2**64 - 1))))
)
def test_whatever_stands_in_the_segment_the_answer_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, pokes: list[tuple[int, int]]
) -> None:
    path = make_mesh(tmp_path_factory.mktemp("fuzz") / "main", "a", "b", "c", slots=8, ring_bytes=64)
    a, b, c = (attach(path, name) for name in "abc")
    for number in range(3):
        a.post(("b", "c"), b"%d" % number)
    b.take(1)
    first = a._segment.layout.control_word(0)
    mutex = list_word(a, lay.L_MUTEX)
    for offset, value in pokes:
        # All but the mutex's own words: those have a test of their own above.
        if first + offset < len(a._words) and not mutex <= first + offset < mutex + 8:
            a._words[first + offset] = value
    for _ in range(3):
        for action in (lambda: a.post(("b", "c"), b"more"), b.take, c.take, b.prepare_sleep):
            with contextlib.suppress(MailboxError):
                action()
    for box in (a, b, c):
        box.close()
    for name in "abc":
        with contextlib.suppress(MailboxError):
            attach(path, name).close()


def test_a_look_ahead_in_a_slot_that_a_dead_process_unlinked_finds_its_way(tmp_path: Path) -> None:
    deaths = 0
    for fail_at in range(12):
        path = make_mesh(tmp_path / f"{fail_at}", "a", "b", "c", "d")
        boxes = a, b, c, d = tuple(attach(path, name) for name in "abcd")
        a.post("c", b"x")
        assert d.take() == []  # the look-ahead of d is the slot of a
        b.post("c", b"y")
        assert drain(c) == [b"x", b"y"]
        fail_stores(a, fail_at)
        deaths += not run_mortal(functools.partial(a._writer._reclaim, a._outlets["c"][0]))
        for _ in range(3):  # the neighbour of that slot is unlinked, freed and used again by another sender
            b.post("c", b"z")
            assert drain(c) == [b"z"]
            b._writer._reclaim(b._outlets["c"][0])
        b.post("d", b"for d")
        assert drain(d) == [b"for d"]
        mailbox.abandon(*boxes)
    assert deaths >= 5

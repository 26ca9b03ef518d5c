"""The openings of a server's queues: how far two histories are one, whatever was restored in between."""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.wire import frame
from pmdaemon.wire.messages.mirror import (
    MIRROR_PROTO,
    MOST_OPENINGS,
    MOST_QUEUES,
    MOST_SEQ,
    MirroredOpening,
    MirroredQueue,
    MirrorHello,
)
from sla_server.events import pair_history
from sla_server.events.pair_history import (
    FILE,
    Opening,
    begin,
    forget,
    lost_queue_id,
    openings_in,
    shared_through,
)
from sla_server.events.pair_session import STRANGER_BYTES

QUEUE, OTHER = "0123456789abcdef", "fedcba9876543210"


def opened(name: str, newest_seq: int) -> Opening:
    return Opening(name, {QUEUE: newest_seq})


class Origin:
    """A server with one queue, whose events are numbered things that never come twice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[int] = []
        self.given = 0
        self.copies: list[tuple[list[int], bytes]] = []
        self.openings: list[Opening] = []
        self.open()

    def open(self) -> None:
        self.openings = begin(self.folder, {QUEUE: len(self.events)})

    def add(self, count: int) -> None:
        self.events += range(self.given, self.given + count)
        self.given += count

    def copy(self) -> None:
        self.copies.append((list(self.events), (self.folder / FILE).read_bytes()))

    def restore(self, copy: tuple[list[int], bytes], *, with_openings: bool) -> None:
        """All of a copy; or the queue alone, if it is an older state of what is there."""
        is_older = self.events[: len(copy[0])] == copy[0]
        self.events = list(copy[0])
        if with_openings or not is_older:
            (self.folder / FILE).write_bytes(copy[1])
        self.open()


@pytest.mark.parametrize("seed", range(40))
def test_two_histories_are_one_exactly_as_far_as_their_events_are(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    origin = Origin(tmp_path)
    known: list[Opening] = []
    kept: list[int] = []
    for _ in range(60):
        match chance.randrange(6):
            case 0 | 1:
                origin.add(chance.randrange(4))
            case 2:
                origin.open()
            case 3:
                origin.copy()
            case 4 if origin.copies:
                origin.restore(chance.choice(origin.copies), with_openings=chance.random() < 0.7)
            case 5:
                through = shared_through(known, origin.openings, QUEUE, len(origin.events))
                same = [here == there for here, there in zip(kept, origin.events, strict=False)]
                is_one = (same.index(False) if False in same else len(same)) if known else 0
                assert min(through, len(kept)) <= is_one, "some that differ would be taken for the same"
                if len(origin.openings) < MOST_OPENINGS and known:
                    assert min(through, len(kept)) == is_one
                known, kept = origin.openings, origin.events[: chance.randrange(len(origin.events) + 1)]


def test_a_queue_that_was_overtaken_again_is_one_up_to_the_copy() -> None:
    before = [opened("A", 0), opened("B", 50), opened("C", 80)]
    now = [opened("A", 0), opened("B", 50), opened("D", 60)]
    assert shared_through(before, now, QUEUE, 130) == 60
    assert shared_through(before, [*before, opened("E", 110)], QUEUE, 130) == 110
    assert shared_through(before, before, QUEUE, 130) == 130
    assert shared_through(before, before, QUEUE, 70) == 70  # a machine that went on from a snapshot
    assert shared_through(before, [opened("X", 500)], QUEUE, 500) == 0  # its file is gone
    assert shared_through([], now, QUEUE, 130) == shared_through(before, [], QUEUE, 130) == 130


def test_starts_without_events_share_what_they_found(tmp_path: Path) -> None:
    first = begin(tmp_path, {QUEUE: 500})
    for _ in range(3 * MOST_OPENINGS):
        last = begin(tmp_path, {QUEUE: 500})
    assert len(last) == 2
    assert shared_through(first, last, QUEUE, 500) == 500


def test_the_oldest_openings_go(tmp_path: Path) -> None:
    for number in range(3 * MOST_OPENINGS):
        found = begin(tmp_path, {QUEUE: number})
    assert len(found) == MOST_OPENINGS
    assert found[-1].newest == {QUEUE: 3 * MOST_OPENINGS - 1}


@pytest.mark.parametrize("content", [b"", b"{", b'{"openings":7}', b'{"openings":[["x",{"q":-1}]]}', b"\xff"])
def test_a_file_that_cannot_be_read_shares_nothing(tmp_path: Path, content: bytes) -> None:
    first = begin(tmp_path, {QUEUE: 7})
    (tmp_path / FILE).write_bytes(content)
    second = begin(tmp_path, {QUEUE: 9})
    assert len(second) == 1
    assert shared_through(first, second, QUEUE, 9) == 0


def test_a_disk_that_does_not_take_it_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older file would say of the events that follow that they are of its newest opening."""
    first = begin(tmp_path, {QUEUE: 7})

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # a file of its own, on no modelled disk
        patch.setattr(pair_history, "write_whole", full)
        second = begin(tmp_path, {QUEUE: 9})
    assert not (tmp_path / FILE).exists()
    assert shared_through(first, second, QUEUE, 9) == 0
    assert shared_through(second, begin(tmp_path, {QUEUE: 12}), QUEUE, 12) == 0


def test_a_server_without_a_partner_forgets_its_openings(tmp_path: Path) -> None:
    begin(tmp_path, {QUEUE: 7})
    forget(tmp_path)
    forget(tmp_path)
    assert not (tmp_path / FILE).exists()


def test_a_lost_queue_has_the_same_id_until_the_partner_has_named_its_openings() -> None:
    known = [opened("A", 0), opened("B", 50)]
    assert lost_queue_id(known, QUEUE, 60) == lost_queue_id(known, QUEUE, 60)
    others = [(known[:1], QUEUE, 60), (known, OTHER, 60), (known, QUEUE, 61), (known, QUEUE, 60)]
    assert len({lost_queue_id(*each) for each in others}) == 4
    assert lost_queue_id([], QUEUE, 60) != lost_queue_id([], QUEUE, 60)


def test_the_longest_hello_fits_what_is_read_of_a_stranger() -> None:
    queues = tuple(MirroredQueue("x" * 20, f"{number:016x}", MOST_SEQ) for number in range(MOST_QUEUES))
    openings = tuple(
        MirroredOpening(f"{number:016x}", (MOST_SEQ,) * MOST_QUEUES) for number in range(MOST_OPENINGS)
    )
    hello = MirrorHello(MIRROR_PROTO, "n" * 128, "p" * 128, queues, openings)
    raw = hello.encode()
    assert len(raw) < STRANGER_BYTES
    assert MirrorHello.parse(frame.decode(raw).header) == hello
    assert openings_in(hello)[3].newest == dict.fromkeys((queue.queue_id for queue in queues), MOST_SEQ)


def test_a_former_release_says_no_openings() -> None:
    header = {"proto": MIRROR_PROTO, "name": "a", "partner": "b", "queues": [["main", QUEUE, 7]]}
    assert openings_in(MirrorHello.parse(header)) == []


@pytest.mark.parametrize(
    "openings",
    [7, [7], [["x", [1]]], [[QUEUE, 1]], [[QUEUE, [1, 2]]], [[QUEUE, [-1]]], [[QUEUE, [True]]], [[QUEUE]]],
)
def test_openings_of_a_false_form_are_refused(openings: object) -> None:
    header = {"proto": MIRROR_PROTO, "name": "a", "partner": "b", "queues": [["main", QUEUE, 7]]}
    with pytest.raises(MalformedFrame):
        MirrorHello.parse({**header, "openings": openings})


def test_more_openings_than_fit_are_refused() -> None:
    header = {"proto": MIRROR_PROTO, "name": "a", "partner": "b", "queues": [["main", QUEUE, 7]]}
    with pytest.raises(FrameTooLarge):
        MirrorHello.parse({**header, "openings": [[QUEUE, [1]]] * (MOST_OPENINGS + 1)})

"""Bundles: how payloads are divided, and that single messages of one can be taken, released and returned.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

import contextlib
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isal.isal_zlib import crc32

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment, describe
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import MailboxCorrupt
from pmdaemon.mailbox.ring import (
    BUNDLE_BYTES,
    BUNDLE_MESSAGES,
    BUNDLED_BYTES,
    LENGTHS,
    directory_bytes,
    offsets,
    plan,
    shrink,
)
from tests.support import mailbox
from tests.support.mailbox import abandon, audit, drain, make_mesh


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 40_000), st.integers(0, 200_000)), min_size=1),
)
def test_pieces_follow_each_other_and_keep_the_limits(lengths: list[int]) -> None:
    after = 0
    for first, number, span in plan(lengths):
        assert first == after
        mine = lengths[first : first + number]
        assert span == sum(mine) + (directory_bytes(number) if number > 1 else 0)
        assert 1 <= number <= BUNDLE_MESSAGES
        assert sum(mine) <= max(BUNDLE_BYTES, mine[0])
        assert number == 1 or max(mine) <= BUNDLED_BYTES
        after = first + number
    assert after == len(lengths)


def test_a_piece_shrinks_to_what_has_room() -> None:
    (whole,) = plan([10, 20, 30])
    assert whole == (0, 3, 76)
    assert shrink([10, 20, 30], whole, 75) == (0, 2, 38)
    assert shrink([10, 20, 30], whole, 37) == (0, 1, 10)
    assert shrink([10, 20, 30], whole, 9) is None


@given(st.lists(st.integers(0, 50), min_size=1, max_size=64), st.integers(-8, 8))
def test_a_directory_must_add_up(lengths: list[int], wrong: int) -> None:
    data = LENGTHS[len(lengths)].pack(*lengths) + bytes(max(0, sum(lengths) + wrong))
    found = offsets(data, len(lengths))
    if len(data) == directory_bytes(len(lengths)) + sum(lengths):
        assert found is not None
        assert [b - a for a, b in pairwise(found)] == lengths
    else:
        assert found is None
    assert offsets(data, 65) is None
    assert offsets(b"", 1) is None


def payloads(number: int, size: int = 20) -> list[bytes]:
    return [b"%d" % n * (size // len(b"%d" % n)) for n in range(number)]


def linked(box: Mailbox) -> int:
    return len(mailbox.linked_slots(box))


def test_a_bundle_is_one_slot_and_counts_as_its_messages(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=4096)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(50))
        assert linked(a) == 1
        assert describe(path)["routes"][0]["messages"] == 50
        got = b.take()
        assert [(m.payload, m.sequence) for m in got] == [(p, n + 1) for n, p in enumerate(payloads(50))]
        assert b.stats()["in_hand"] == 50
        assert (a.stats()["posts"], b.stats()["takes"], b.stats()["slots_inspected"]) == (50, 50, 1)
        assert a.stats()["bytes_posted"] == b.stats()["bytes_taken"] == sum(map(len, payloads(50)))


def test_many_payloads_become_several_slots_made_visible_together(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1 << 20)
    sizes = [100] * 70 + [20_000, 5, 5, 30_000] + [9_000] * 40
    with attach(path, "a") as a, attach(path, "b") as b:
        sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
        a.post_many("b", sent)
        assert linked(a) == 7
        assert drain(b) == sent


def test_parts_of_a_bundle_are_released_for_good(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a:
        a.post_many("b", payloads(10))
        b = attach(path, "b")
        assert [m.payload for m in b.take(3)] == payloads(10)[:3]
        assert [m.payload for m in b.take(64, 45)] == payloads(10)[3:5]  # releases the first three
        assert describe(path)["routes"][0]["messages"] == 7
        abandon(b)
        with attach(path, "b") as b:
            assert drain(b) == payloads(10)[3:]
        a.post("b", b"next")  # and with it the slot is freed
        assert a._writer.reclaimed == 0
        a._writer._reclaim(a._outlets["b"][0])
        assert a._writer.reclaimed == 1
        audit(a)


@pytest.mark.parametrize("views", [False, True])
def test_some_messages_of_a_bundle_are_returned(path: Path, views: bool) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(8))
        assert len(b.take(2)) == 2
        batch = b.take_views(5) if views else b.take(5)
        b.give_back([batch[0], batch[3], batch[0]])
        assert b.stats()["in_hand"] == 3
        a.post("b", b"later")
        expected = [payloads(8)[number] for number in (2, 5, 7)]
        assert drain(b) == [*expected, b"later"]
        assert drain(b) == []


def test_all_of_a_bundle_may_be_returned(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(8))
        b.give_back(b.take())
        assert b.stats()["in_hand"] == 0
        assert drain(b) == payloads(8)


def test_views_of_a_bundle_are_void_after_their_release(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=8192)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(4, 1000))
        views = b.take_views()
        assert [bytes(view.payload) for view in views] == payloads(4, 1000)
        b.release()
        for view in views:
            with pytest.raises(ValueError, match="released"):
                bytes(view.payload)


def test_a_bundle_leaves_the_rings_end_out_if_it_can(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        outlet = a._outlets["b"][0]
        a.post("b", bytes(800))
        assert len(b.take()) == 1
        b.release()
        a._writer._reclaim(outlet)
        a.post_many("b", payloads(10, 30))
        assert outlet.written == 1024 + 344
        assert drain(b) == payloads(10, 30)
        a.post_many("b", payloads(10, 62))
        a.post_many("b", payloads(8, 40))  # no room to leave anything out: it goes on at the beginning
        assert outlet.written == 1024 + 344 + 664 + 352
        assert [bytes(view.payload) for view in b.take_views()] == payloads(10, 62) + payloads(8, 40)
        b.release()
        a.close()
        with attach(path, "a") as again:
            audit(again)
            again.post_many("b", payloads(5))
            assert drain(b) == payloads(5)


@pytest.mark.parametrize("size", [60, 4000])  # below and above what is written and read in place
def test_a_damaged_bundle_is_discarded(path: Path, size: int) -> None:
    layout = Layout(("a", "b"), (Route("a", "b", 1 << 18),), 8, mailbox.FORM)
    create_segment(path, layout)
    with attach(path, "a") as a, attach(path, "b") as b:
        at_bytes, _ = layout.ring_at_bytes("a", "b")
        a.post_many("b", payloads(40, size))
        a.post("b", b"good")
        a._segment.memory[at_bytes + 4 * 40] ^= 1
        with pytest.raises(MailboxCorrupt, match="message 1 has a wrong checksum"):
            b.take()
        assert drain(b) == [b"good"]
        assert b.stats()["discarded"] == 1


@pytest.mark.parametrize(("word", "value"), [(lay.S_CHECK, 200 << 40), (lay.S_CHECK, 3 << 40)])
def test_a_bundle_that_contradicts_itself_is_discarded(path: Path, word: int, value: int) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(4))
        slot = a._writer._first_word
        a._words[slot + word] = value | a._words[slot + word] & lay.MASK32
        with pytest.raises(MailboxCorrupt):
            b.take()
        assert drain(b) == []


def test_a_bundle_said_to_be_done_is_given_to_nobody_and_freed(path: Path) -> None:
    make_mesh(path, "a", "b")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(4))
        a._words[a._writer._first_word + lay.S_DONE] = (1 << 64) - 1
        assert drain(b) == []
        a.post("b", b"next")
        assert drain(b) == [b"next"]


@pytest.mark.parametrize("views", [False, True])
def test_the_checksum_of_a_bundle_covers_every_payload(path: Path, views: bool) -> None:
    layout = Layout(("a", "b"), (Route("a", "b", 1 << 16),), 8, mailbox.FORM)
    create_segment(path, layout)
    with attach(path, "a") as a, attach(path, "b") as b:
        at_bytes, _ = layout.ring_at_bytes("a", "b")
        begins = [16 + 12_000 * number for number in range(3)]
        places = [begin + offset for begin in begins for offset in (0, 6_000, 11_999)]
        for place in (4, *places):  # 4: in the directory
            a.post_many("b", payloads(3, 12_000))
            assert linked(a) <= 2  # the bundle, and a parked tail
            position = a._writer._starts[a._outlets["b"][0].pending[-1]] % (1 << 16)
            a._segment.memory[at_bytes + position + place] ^= 1
            with pytest.raises(MailboxCorrupt, match="wrong checksum"):
                b.take_views() if views else b.take()
        assert b.stats()["discarded"] == 10


def test_payloads_of_a_bundle_are_aligned_as_long_as_their_lengths_are(path: Path) -> None:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", 1 << 18),), 8, mailbox.FORM))
    with attach(path, "a") as a, attach(path, "b") as b:
        for number in (2, 3):
            a.post_many("b", payloads(number, 12_000))
            for view in b.take_views():
                assert np.frombuffer(view.payload, np.uint64).flags.aligned


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    count=st.integers(0, 70),
    length=st.one_of(st.just(12_016), st.integers(0, 1 << 32)),
    directory=st.binary(max_size=300),
    limits=st.tuples(st.integers(1, 100), st.integers(1, 20_000)),
)
def test_a_hostile_bundle_is_an_error_or_lies_within_its_ring(
    tmp_path_factory: pytest.TempPathFactory,
    count: int,
    length: int,
    directory: bytes,
    limits: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "main"
    layout = Layout(("a", "b"), (Route("a", "b", 1 << 14),), 8, mailbox.FORM)
    create_segment(path, layout)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", payloads(4, 3000))
        at_bytes, _ = layout.ring_at_bytes("a", "b")
        a._segment.memory[at_bytes : at_bytes + len(directory)] = directory
        slot, ring = a._writer._first_word, a._outlets["b"][0].ring
        data = ring.view(0, min(length, 1 << 14))
        check = crc32(data)  # as it should be
        del data
        a._words[slot + lay.S_CHECK] = count << lay.BUNDLE_SHIFT | check
        a._words[slot + lay.S_ADDRESS] = (length & lay.MASK32) << 32 | a._outlets["b"][0].address
        for take in (b.take_views, b.take, b.take_views):
            with contextlib.suppress(MailboxCorrupt):
                taken = take(*limits)
                assert sum(len(message.payload) for message in taken) <= 1 << 14
                assert len(taken) <= limits[0]

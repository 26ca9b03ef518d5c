"""Description, metrics and probe of a segment: what a crash leaves is in order, a stray store is damage.

Words of the segment are stored and read directly: damage, and what a death leaves, have no public way in.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment, describe, probe
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxFull, MessageDamaged
from pmdaemon.mailbox.inspect import METRICS, PUBLISHED
from tests.support.mailbox import abandon, drain, fail_stores, make_mesh, run_mortal


def test_a_segment_is_described_without_touching_it(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post(("b", "c"), b"x" * 256)
        a.post("b", b"x" * 256)
        b.take(1)
        assert b.take() != []
        assert b.prepare_sleep()
        before = path.read_bytes()
        found = describe(path)
        assert path.read_bytes() == before
    assert found["owner"] == {"pid": os.getpid(), "alive": True}
    participants = {entry["name"]: entry for entry in found["participants"]}
    assert participants["a"]["attached"]
    assert participants["a"]["posted_sequence"] == 2
    assert participants["b"]["sleeping"]
    assert (
        participants["b"]["takes"],
        participants["b"]["slots_inspected"],
        participants["b"]["inspected_per_take"],
    ) == (
        2,
        3,
        1.5,
    )
    assert participants["b"]["in_hand"] == 0
    assert participants["a"]["slots"] == {"free": 29, "ready": 1, "taken": 2, "damaged": 0}
    assert not participants["c"]["attached"]
    routes = {(entry["sender"], entry["recipient"]): entry for entry in found["routes"]}
    assert routes["a", "b"]["messages"] == 0
    assert routes["a", "c"] == {
        "sender": "a",
        "recipient": "c",
        "ring_bytes": 1024,
        "messages": 1,
        "bytes": 256,
        "fill_ratio": 0.25,
    }
    assert found["lanes"][0] == {"sender": "a", "linked": 3, "moving": False, "waiting": {"c": [1, 256]}}


def test_a_damaged_lane_is_told_not_followed(path: Path) -> None:
    make_mesh(path, "a", "b", "c")
    with attach(path, "a") as a:
        a.post("b", b"x")
        for reference in (1, 999, 7 << 32 | 1):
            a._words[a._writer._next_word[0]] = reference
            assert describe(path)["lanes"][0]["moving"]


def test_the_shared_list_is_told_by_sender(path: Path) -> None:
    create_segment(path, Layout(("a", "b"), (Route("a", "b", 1024), Route("b", "a", 1024)), 8, "shared"))
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post("b", b"xyz")
        b.post("a", b"12345")
        found = describe(path)
        a._words[a._segment.layout.list_word + 12] = 1
        assert describe(path)["repair_pending"]
    assert found["form"] == "shared"
    assert not found["repair_pending"]
    assert found["lanes"] == [
        {"sender": "a", "linked": 1, "moving": False, "waiting": {"b": [1, 3]}},
        {"sender": "b", "linked": 1, "moving": False, "waiting": {"a": [1, 5]}},
    ]
    assert [route["messages"] for route in found["routes"]] == [1, 1]


def test_each_figure_has_a_name_of_prometheus_and_a_sentence() -> None:
    assert METRICS.keys() == PUBLISHED.keys()
    for name, sentence in METRICS.values():
        assert re.fullmatch(r"sla_mailbox_[a-z_]+", name)
        assert sentence.endswith(".")
    assert len({name for name, _ in METRICS.values()}) == len(METRICS)


def test_a_mailbox_and_its_dump_tell_the_same(path: Path) -> None:
    make_mesh(path, "a", "b", ring_bytes=1024)
    with attach(path, "a") as a, attach(path, "b") as b:
        a.post_many("b", [b"x" * 28] * 8)
        assert len(b.take(3)) == 3
        assert b.prepare_sleep() is False
        assert a.prepare_sleep()
        mine, theirs = a.metrics(), b.metrics()
    found = describe(path)["metrics"]
    assert mine['sla_mailbox_posts_total{participant="a"}'] == 8
    assert mine['sla_mailbox_posted_bytes_total{participant="a"}'] == 8 * 28
    assert mine['sla_mailbox_ring_fill_ratio{participant="a",recipient="b"}'] == 0.25
    assert theirs['sla_mailbox_takes_total{participant="b"}'] == 3
    assert theirs['sla_mailbox_resets_total{participant="b",cause="idle"}'] == 0
    assert found['sla_mailbox_resets_total{participant="b"}'] == 0
    for metrics in (mine, theirs):
        for name, value in metrics.items():
            if "cause=" not in name:
                assert found[name] == value


def test_figures_may_be_asked_for_while_the_batch_in_hand_changes(path: Path) -> None:
    """Another thread asks (of a pair: the main thread, once a second); each load lets the taker go on."""
    make_mesh(path, "a", "b", slots=64, ring_bytes=1 << 12)
    with attach(path, "a") as a, attach(path, "b") as b:
        real = b._batch._words

        class Turns:
            def __getitem__(self, word: int) -> int:
                b._batch._words = real  # the taker's own loads give no turn
                for _ in range(5):
                    a.post("b", b"x")
                b.take(3)
                b._batch._words = self  # type: ignore[assignment]
                return real[word]

        for _ in range(10):
            a.post("b", b"x")
        b.take()
        b._batch._words = Turns()  # type: ignore[assignment]
        assert b.stats()["in_hand"] == 10  # as it was when the question came
        b._batch._words = real


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

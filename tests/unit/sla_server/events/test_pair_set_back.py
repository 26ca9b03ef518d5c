"""A partner whose disk was restored from an older copy, however many events it has given since."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path

import pytest

from pmdaemon.wire import frame
from pmdaemon.wire.messages.mirror import MirrorHello
from sla_server.events import pair_history, pair_store
from sla_server.events.event import Event
from sla_server.events.pair_core import PairCore
from sla_server.events.pair_history import FILE
from sla_server.events.pair_session import MirrorEnded
from sla_server.events.pair_store import PartnerNotes
from sla_server.events.recipients.base import retry
from tests.support.deliveries import event
from tests.support.partners import DiskCopy, Partners


def numbered(server: str, count: int, first: int = 1) -> list[Event]:
    return [event(number, event_id=f"{server}{number}") for number in range(first, first + count)]


def ids(server: str, count: int, first: int = 1) -> list[str]:
    return [f"{server}{number}" for number in range(first, first + count)]


def set_back(pair: Partners, folder: Path, lost: int) -> None:
    """Server a has lost events that b has, and is down; its recipient had answered none of them."""
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    made = DiskCopy(pair.a, folder)
    pair.a.restart()
    pair.run(2)
    pair.a.answers("r", None)
    pair.a.add(*numbered("lost", lost))
    pair.run(2)
    assert len(pair.b.store) == lost
    pair.kill(pair.a)
    made.restore(pair.a)


def alone(pair: Partners, events: list[Event]) -> None:
    """Server a starts and adds events before it reaches the other one."""
    pair.a.restart()
    pair.cut()
    pair.a.add(*events)
    pair.run(3)
    pair.mend()


@pytest.mark.parametrize("new", [0, 1, 4, 5, 30])
def test_what_was_lost_is_delivered_here_however_many_came_since(tmp_path: Path, new: int) -> None:
    pair = Partners(tmp_path)
    set_back(pair, tmp_path / "copy", lost=5)
    alone(pair, numbered("new", new))
    pair.run(2)
    assert pair.b.got["r"] == ids("lost", 5)  # no other server has them
    assert pair.b.events_of("pair-set-back") == [5]
    assert len(pair.b.store) == new
    assert pair.a.core.behind() == 0
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == [*ids("lost", 5), *ids("new", new)]  # under numbers that were given before
    pair.a.answers("r")
    pair.a.restart()
    pair.run(5)
    assert len(pair.b.store) == 0


def test_new_events_under_numbers_that_were_confirmed_are_no_confirmed_ones(tmp_path: Path) -> None:
    """All that was lost was confirmed, so that the keeper's store is empty; its notes know the numbers."""
    pair = Partners(tmp_path)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    made = DiskCopy(pair.a, tmp_path / "copy")
    pair.a.restart()
    pair.run()
    pair.a.add(*numbered("gone", 40))
    pair.run(2)
    assert len(pair.b.store) == 0
    pair.kill(pair.a)
    pair.run()  # its notes are written
    pair.kill(pair.b)
    pair.b.store.close()
    pair.b.restart()
    assert pair.b.store.newest_seq(pair.a.rig.main.queue_id) == 0
    made.restore(pair.a)
    pair.a.restart()
    pair.a.answers("r", None)
    pair.a.add(*numbered("new", 5))
    pair.exchange()  # it dies before its main loop has said what its recipients need
    assert pair.b.store.count(pair.a.rig.main.queue_id) == 3 + 5
    pair.kill(pair.a)
    pair.kill(pair.b)
    pair.b.restart()
    pair.lose()
    assert pair.b.got["r"] == ids("new", 5)


def test_a_number_that_an_opening_leaves_unused_was_that_of_a_lost_event(tmp_path: Path) -> None:
    """After a crash the queue gives no number that a torn record may have had: here a whole one had it."""
    pair = Partners(tmp_path)
    pair.a.add(*numbered("a", 3))
    pair.run()
    made = DiskCopy(pair.a, tmp_path / "copy")  # of a server that runs
    pair.a.answers("r", None)
    pair.a.add(*numbered("lost", 1))
    pair.run()
    pair.kill(pair.a)
    made.restore(pair.a)
    pair.a.restart()
    assert pair.a.rig.main.newest_seq == 4
    pair.run(2)
    assert pair.b.got["r"] == ["lost1"]


def test_a_restart_and_a_long_absence_are_no_set_back(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    for server in (pair.a, pair.b):
        server.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    for turn in range(6):
        pair.kill(pair.a)
        pair.a.restart()
        if turn % 2:
            pair.a.add(*numbered(f"a{turn}-", 2))
        if turn % 3:
            pair.run(2)
    pair.kill(pair.b)
    pair.b.restart()
    pair.run(3)
    assert "pair-set-back" not in [*pair.a.raised, *pair.b.raised]
    assert pair.b.got["r"] == []


def test_a_keeper_that_was_set_back_gets_again_what_it_lost(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.b)
    made = DiskCopy(pair.b, tmp_path / "copy")
    pair.b.restart()
    pair.a.add(*numbered("a", 4, first=4))
    pair.run(2)
    assert len(pair.b.store) == 7
    pair.kill(pair.b)
    made.restore(pair.b)
    pair.b.restart()
    pair.run(2)
    assert len(pair.b.store) == 7
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ids("a", 7)
    assert "pair-set-back" not in pair.b.raised


def test_a_server_whose_openings_are_gone_has_its_events_delivered_here(tmp_path: Path) -> None:
    """Nothing tells that they are the same: they come twice, none is lost."""
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    (pair.a.rig.folder / FILE).unlink()
    pair.a.restart()
    pair.run(2)
    assert pair.b.got["r"] == ids("a", 3)
    assert len(pair.b.store) == 3
    pair.a.answers("r")
    pair.a.rig.senders["r"].back.append(pair.a.rig.senders["r"].reply(retry("no")))
    pair.run(5)
    assert len(pair.b.store) == 0


@pytest.mark.parametrize("dies_before", ["store", "openings"])
def test_a_crash_while_it_is_noticed_repeats_nothing_that_was_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_before: str
) -> None:
    pair = Partners(tmp_path, ("r", "done"))
    set_back(pair, tmp_path / "copy", lost=5)  # "done" has confirmed them at a

    class Death(Exception):
        pass

    def die(queue_id: str, *_: object) -> None:
        if queue_id == pair.a.rig.main.queue_id:
            raise Death

    writes: list[bool] = []
    write = PairCore._write_notes  # it is what a crash comes between

    def second(core: PairCore) -> bool:
        writes.extend([True] * (core is pair.b.core))
        if len(writes) == 2:
            raise Death
        return write(core)

    pair.a.restart()
    pair.a.add(*numbered("new", 2))
    pair.b.core.close()
    with monkeypatch.context() as patch:
        if dies_before == "store":
            patch.setattr(pair.b.store, "set_back", die)
        else:
            patch.setattr(PairCore, "_write_notes", second)
        with pytest.raises(Death):
            pair.run()
    pair.kill(pair.b)
    pair.b.restart()
    pair.run(3)
    pair.kill(pair.a)
    pair.lose()
    assert set(pair.b.got["r"]) == {*ids("lost", 5), *ids("new", 2)}
    assert not set(ids("lost", 5)) & set(pair.b.got["done"])
    assert max(Counter(pair.b.got["r"]).values()) == 1


def test_a_full_disk_of_the_keeper_refuses_until_it_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are too high on disk would make new events confirmed ones after a crash."""
    pair = Partners(tmp_path)
    set_back(pair, tmp_path / "copy", lost=5)
    pair.a.restart()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # the notes are no file of the modelled disk
        patch.setattr(pair_store, "write_whole", full)
        with pytest.raises(MirrorEnded, match="cannot be written"):
            pair.run()
    pair.disconnect()
    assert pair.b.store.count(pair.a.rig.main.queue_id) == 5
    pair.run(2)
    assert pair.b.got["r"] == ids("lost", 5)


def test_what_the_partner_says_of_itself_is_on_disk_before_it_is_welcomed(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.restart()
    origin, keeper = pair.a.core.dialled(), pair.b.core.accepted()
    said = frame.decode(bytes(origin.outgoing))
    keeper.received(bytes(origin.outgoing))
    notes = PartnerNotes.read(pair.b.rig.folder)
    assert [queue_id for _, queue_id in notes.queues] == [
        pair.a.rig.initial.queue_id,
        pair.a.rig.main.queue_id,
        pair.a.rig.later.queue.queue_id,
    ]
    assert [opening_id for opening_id, _ in notes.openings] == [
        each.opening_id for each in pair_history.openings_in(MirrorHello.parse(said.header))
    ]

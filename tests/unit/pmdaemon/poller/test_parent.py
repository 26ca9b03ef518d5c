"""The parent on fake pairs: starts, deaths, retirement, passing on, duplicates; and room for a pair."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.mailbox import attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull, RoomMissing
from pmdaemon.poller import parent as module
from pmdaemon.poller.balance import HUNG_CHECKS, SHARDS, HangDetector
from pmdaemon.poller.channel import ChannelMessage
from pmdaemon.poller.channel_messages import (
    GatewayRegistered,
    Mail,
    MovedConnection,
    PairReport,
    RegisteredElsewhere,
    Sent,
    ShardMap,
    Unreadable,
)
from pmdaemon.poller.config import PmConfig
from pmdaemon.poller.parent import PairManager, PairRooms
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import ParentPipe
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.topology import later_pairs, main_layout


class FakeChannel:
    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def send(self, body: Sent, descriptors: Any = ()) -> None:
        self.sent.append(body)
        for descriptor in descriptors:
            os.close(descriptor)

    def of(self, kind: type[Sent]) -> list[Any]:
        return [body for body in self.sent if isinstance(body, kind)]


class FakeChild:
    def __init__(self, index: int, *_rest: object) -> None:
        self.index = index
        self.control: FakeChannel | None = FakeChannel()
        self.is_running = self.takes_shards = self.keeps_shards = True
        self.is_retiring = False
        self.last = PairReport()
        self.load = 0
        self.stopped = False
        self.killed = ""
        self.offers: list[str] = []
        self.watch = HangDetector()

    def offer(self, _sock: socket.socket, address: str, _is_dialled: bool) -> bool:
        self.offers.append(address)
        return True

    def hangs(self) -> str:
        return self.watch.check(self.last.steps)

    def kill(self, reason: str) -> None:
        self.killed = reason

    def stop(self) -> None:
        self.stopped = True


class Parent:
    def __init__(self, **settings: Any) -> None:
        self.clock = FakeClock()
        config = PmConfig(**({"max_pairs": 4} | settings))
        self.pipe = ParentPipe()
        self.rooms = 99
        self.asked: list[int] = []
        self.pair_manager = PairManager(config, None, self.pipe, self.clock, cpus=8, has_room=self._has_room)

    def _has_room(self, index: int) -> bool:
        self.asked.append(index)
        return index < self.rooms

    @property
    def children(self) -> list[Any]:
        return list(self.pair_manager.children)

    def seconds(self, count: int, gateways: int = 0) -> None:
        """Looks, a second apart; the gateways are where the map says."""
        for _ in range(count):
            for child in self.children:
                mine = [shard for shard, owner in enumerate(self.pair_manager.owners) if owner == child.index]
                rows = [[shard, gateways // SHARDS] for shard in mine]
                total = sum(row[1] for row in rows)
                child.last = PairReport(connections=total, gateways=total, t_ptmax_us=200.0, shards=rows)
                self.pair_manager.started(child)
            self.pair_manager.review()
            self.clock.advance(1)


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Parent:
    monkeypatch.setattr(module, "PairChild", FakeChild)
    return Parent()


def test_one_pair_at_once_and_more_when_the_need_lasts(parent: Parent) -> None:
    parent.seconds(1)
    assert len(parent.children) == 1
    parent.seconds(3, gateways=512)  # 200 us and 10 ms: 50 gateways a pair
    assert len(parent.children) == 1
    parent.seconds(80, gateways=512)
    assert len(parent.children) == 4  # no more than max_pairs
    assert parent.pair_manager.needed == 8
    assert {parent.pair_manager.owners.count(index) for index in range(4)} <= set(range(50, 80))


def test_a_fixed_number_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PairChild", FakeChild)
    made = Parent(pairs=3)
    made.seconds(1)
    assert len(made.children) == 3


def test_a_pair_without_room_is_not_started_and_the_others_have_all_shards(parent: Parent) -> None:
    parent.rooms = 2
    parent.seconds(80, gateways=512)
    assert [child.index for child in parent.children] == [0, 1]
    assert set(parent.pair_manager.owners) == {0, 1}
    assert parent.pair_manager.needed == 8
    parent.seconds(100, gateways=512)
    assert 2 <= parent.asked.count(2) <= 4  # not each second: somebody has to make room first
    parent.rooms = 99
    parent.seconds(100, gateways=512)
    assert len(parent.children) == 4


def test_the_first_pair_is_started_without_asking_twice(parent: Parent) -> None:
    parent.rooms = 0
    parent.seconds(1)
    assert len(parent.children) == 1  # it waits for its room where it is started


def test_a_pair_retires_after_its_shards_have_left(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    last = parent.children[-1]
    parent.seconds(61)
    assert last.is_retiring
    assert last.index not in parent.pair_manager.owners
    last_map = last.control.of(ShardMap)[-1].owners
    assert last.index not in last_map
    parent.seconds(2)
    assert last.stopped
    assert last not in parent.children


def test_a_retiring_pair_is_waited_for_but_not_for_ever(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    last = parent.children[-1]
    parent.seconds(61)
    assert last.is_retiring
    for _ in range(29):
        last.last = PairReport(connections=1)
        parent.pair_manager.review()
        parent.clock.advance(1)
        assert not last.stopped
    for _ in range(3):
        last.last = PairReport(connections=1)
        parent.pair_manager.review()
        parent.clock.advance(1)
    assert last.stopped


def test_new_connections_go_to_the_pair_with_the_fewest(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    parent.children[2].load = -1
    near, far = socket.socketpair()
    with near, far:
        assert parent.pair_manager.new(near, "1.2.3.4:5")
    assert parent.children[2].offers == ["1.2.3.4:5"]


def test_shards_of_a_dead_pair_go_to_the_living(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    dead = parent.children[1]
    dead.is_running, dead.control = False, None
    parent.pair_manager.died(dead)
    assert 1 not in parent.pair_manager.owners
    assert set(parent.pair_manager.owners) == {0, 2, 3}


def test_shards_of_the_only_pair_stay_its_own(parent: Parent) -> None:
    parent.seconds(1)
    only = parent.children[0]
    only.is_running = False
    parent.pair_manager.died(only)
    assert set(parent.pair_manager.owners) == {0}


def test_connections_go_to_the_owner_and_are_remembered_once_registered(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    shard = parent.pair_manager.owners.index(2)
    moved = MovedConnection(shard, "g", 1, "a", dialled=False, opened_ns=0)
    parent.pair_manager.pass_on(parent.children[0], [ChannelMessage(moved, [os.dup(0)])])
    assert parent.children[2].control.of(MovedConnection) == [moved]
    assert parent.pair_manager.passed_on == 1
    parent.pair_manager.pass_on(parent.children[2], [ChannelMessage(GatewayRegistered("g", "a"), [])])
    # The same gateway registers with another pair: the session at its owner is the older one.
    parent.pair_manager.pass_on(parent.children[3], [ChannelMessage(GatewayRegistered("g", "b"), [])])
    assert parent.children[2].control.of(RegisteredElsewhere) == [RegisteredElsewhere("g", "b")]
    assert parent.children[3].control.of(RegisteredElsewhere) == []


def test_without_an_owner_descriptors_are_closed_and_it_is_counted(parent: Parent) -> None:
    parent.seconds(80, gateways=512)
    shard = parent.pair_manager.owners.index(2)
    parent.children[2].control = None
    read_fd, write_fd = os.pipe()
    parent.pair_manager.pass_on(parent.children[0], [ChannelMessage(Mail(shard, "services"), [write_fd])])
    assert parent.pair_manager.lost == 1
    assert os.read(read_fd, 1) == b""  # the last copy of the other end is closed
    os.close(read_fd)


def test_a_pair_whose_thread_makes_no_step_is_killed(parent: Parent) -> None:
    parent.seconds(1)
    child = parent.children[0]
    for tick in range(HUNG_CHECKS + 1):
        assert not child.killed
        child.last = PairReport(steps={"inbound thread": 5, "outbound thread": tick})
        parent.pair_manager.review()
    assert "inbound thread made no progress" in child.killed


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Parent:
    """A fixed number of pairs, two, which have just been made."""
    monkeypatch.setattr(module, "PairChild", FakeChild)
    made = Parent(pairs=2)
    made.pair_manager.review()
    return made


def test_fixed_pairs_have_their_shards_from_the_start_whichever_reports_first(two: Parent) -> None:
    owners = two.pair_manager.owners
    assert owners.count(0) == owners.count(1) == SHARDS // 2
    first = two.children[0]
    first.takes_shards = False  # has not reported
    two.seconds(60, gateways=512)
    first.takes_shards = True
    two.seconds(60, gateways=512)
    assert two.pair_manager.owners == owners
    assert two.pair_manager.moves == 0


def test_shards_of_a_pair_that_cannot_be_started_go_to_the_other(two: Parent) -> None:
    two.children[0].is_running = two.children[0].takes_shards = two.children[0].keeps_shards = False
    two.pair_manager.review()
    assert set(two.pair_manager.owners) == {1}


def test_a_pair_that_died_gets_shards_again_only_when_it_has_lasted(two: Parent) -> None:
    dead = two.children[0]
    dead.is_running = dead.takes_shards = dead.keeps_shards = False
    two.pair_manager.died(dead)
    dead.is_running = dead.keeps_shards = True
    two.seconds(120, gateways=512)
    assert set(two.pair_manager.owners) == {1}
    dead.takes_shards = True
    two.seconds(120, gateways=512)
    assert two.pair_manager.owners.count(0) > SHARDS // 3


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    create_segment(tmp_path / "main.mbx", main_layout(3), later_pairs(3))
    return tmp_path / "main.mbx"


@pytest.fixture
def rooms(segment: Path) -> PairRooms:
    return PairRooms(segment, FakeClock())


@contextmanager
def no_space(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        yield


def test_a_pair_can_attach_once_its_room_is_reserved(segment: Path, rooms: PairRooms) -> None:
    attach(segment, "pair-0").close()
    with pytest.raises(RoomMissing):
        attach(segment, "pair-1")
    assert rooms.reserve(1)
    attach(segment, "pair-1").close()
    with pytest.raises(RoomMissing):
        attach(segment, "pair-2")


def test_without_room_an_event_says_so_once(
    segment: Path, rooms: PairRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_space(monkeypatch):
        assert not rooms.reserve(1)
        assert not rooms.reserve(1)
    with attach(segment, "dbmanager") as keeper:
        (message,) = keeper.take()
    received = frame.decode(message.payload)
    assert received.kind == Kind.RECORD
    ((table, row),) = received.header["rows"]
    assert (table, row["kind"], row["subject"]) == ("events", "no-room-for-pair", "pair-1")
    assert "Enlarge it" in row["text"]


def test_room_that_is_missing_again_is_announced_again(
    segment: Path, rooms: PairRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_space(monkeypatch):
        assert not rooms.reserve(1)
    assert rooms.reserve(1)
    segment.unlink()
    create_segment(segment, main_layout(3), later_pairs(3))
    with no_space(monkeypatch):
        assert not rooms.reserve(1)
    with attach(segment, "dbmanager") as keeper:
        assert len(keeper.take()) == 1


def test_an_announcement_that_finds_no_room_is_posted_later(
    segment: Path, rooms: PairRooms, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attach(segment, "pmdaemon") as sender:
        for size in (60_000, 8):
            with suppress(MailboxFull):
                while True:
                    sender.post("dbmanager", bytes(size))
    with no_space(monkeypatch):
        assert not rooms.reserve(1)
    with attach(segment, "dbmanager") as keeper:
        while found := keeper.take():
            assert not any(b"no-room" in bytes(message.payload) for message in found)
        rooms.post()
        (message,) = keeper.take()
        assert b"no-room-for-pair" in bytes(message.payload)
        rooms.post()
        assert keeper.take() == []


def test_a_pair_that_the_segment_does_not_know_is_not_started(rooms: PairRooms) -> None:
    assert not rooms.reserve(7)


def test_a_segment_that_is_not_made_yet_is_waited_for_by_the_pair(tmp_path: Path) -> None:
    assert PairRooms(tmp_path / "main.mbx", FakeClock()).reserve(1)


def test_what_cannot_be_read_is_dropped_and_the_parent_lives_on(parent: Parent) -> None:
    parent.seconds(1)
    read_fd, write_fd = os.pipe()
    unreadable = ChannelMessage(Unreadable("sing", "it is no message"), [write_fd])
    parent.pair_manager.pass_on(parent.children[0], [unreadable])
    assert os.read(read_fd, 1) == b""
    os.close(read_fd)
    assert parent.pair_manager.passed_on == 0

"""The process with real mailboxes and threads; SQL and dbmanager are played by the test."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment, ensure_private_dir, wait_any
from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.space.config import SpaceConfig
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from sla_server.api.config import ApiConfig
from sla_server.events.recipients.config import NotifyConfig
from sla_server.services import process
from sla_server.services.config import ServicesConfig
from sla_server.services.record_sender import RecordSender
from sla_server.storage_resources.config import StorageConfig
from tests.support.agreements import simple
from tests.support.fake_mailbox import FakeMailbox
from tests.support.services import GATEWAY, START_US, FakeStore

LIMIT_S = 120.0
MIB = 1 << 20


class World:
    """dbmanager, a pair and appserver around one services process."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        main, app = directory / "main.mbx", directory / "app.mbx"
        names = ("services", "dbmanager", "pair-0")
        pairs = [(a, b) for a in names for b in names if "services" in (a, b) and a != b]
        create_segment(main, Layout(names, tuple(Route(a, b, MIB) for a, b in pairs), 256))
        routes = (Route("services", "appserver", MIB), Route("appserver", "services", MIB))
        create_segment(app, Layout(("services", "appserver"), routes, 256))
        self.dbmanager, self.pair = attach(main, "dbmanager"), attach(main, "pair-0")
        self.appserver = attach(app, "appserver")
        self.store = FakeStore()
        monkeypatch.setattr(process, "open_store", lambda *_: self.store)
        self.config = SimpleNamespace(
            volume_ownership="first",
            first_sight_volumes=10_000,
            runtime_dir=directory,
            data_dir=directory,
            database=None,
            services=ServicesConfig(judge_every_s=0.05),
            notify=NotifyConfig(),
            api=ApiConfig(),
            space=SpaceConfig(),
            storage=StorageConfig(),
            cluster=None,
        )
        self.stop = Stop()
        self.status: list[int] = []
        self.thread = threading.Thread(
            target=lambda: self.status.append(process.run(self.config, self.stop)), name="services-test"
        )
        self.thread.start()

    def keep_records(self) -> None:
        for message in self.dbmanager.take():
            header = frame.decode(message.payload).header
            self.store.keep([(table, row) for table, row in header["rows"]])
            answer = {"req": header["req"], "ok": True, "error": ""}
            self.dbmanager.post("services", frame.encode(Kind.RECORDED, answer))

    def until(self, mailbox: Mailbox, wanted: Callable[[frame.Frame], bool]) -> frame.Frame:
        """Play dbmanager until a wanted frame arrives."""
        end = time.monotonic() + LIMIT_S
        while time.monotonic() < end and self.thread.is_alive():
            self.keep_records()
            for message in mailbox.take(max_messages=1):
                found = frame.decode(message.payload)
                if wanted(found):
                    return found
            time.sleep(0.01)
        raise AssertionError("the frame did not come")

    def close(self) -> None:
        self.stop.set("test over")
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        for mailbox in (self.dbmanager, self.pair, self.appserver):
            mailbox.close()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    directory = tmp_path / "run"
    ensure_private_dir(directory)
    made = World(directory, monkeypatch)
    yield made
    made.close()


def test_it_starts_leases_answers_and_stops(world: World) -> None:
    world.until(world.pair, lambda found: found.kind == Kind.LEASE)
    assert any(row["kind"] == "services-started" for row in world.store.tables["events"])
    request = {"req": "r1", "op": "apply", "who": "ann", "body": {"documents": simple()}}
    world.appserver.post("services", frame.encode(Kind.REQUEST, request))
    answer = world.until(world.appserver, lambda found: found.kind == Kind.RESPONSE)
    assert answer.header["code"] == 200
    assert [row["name"] for row in world.store.tables["agreements"]] == ["gold"]
    export = {"volume": "vol-1", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}
    up = {"gw": GATEWAY, "name": "host-1", "state": "up", "exports": [export]}
    world.pair.post("services", frame.encode(Kind.GATEWAY, up))
    told = world.until(world.pair, lambda found: found.kind == Kind.SET_THRESHOLDS)
    assert [entry["volume"] for entry in told.header["entries"]] == ["vol-1"]
    snapshot = world.until(world.appserver, lambda found: found.kind == Kind.SNAPSHOT)
    assert snapshot.header["mode"] == "observe"
    world.close()
    assert world.status == [0]
    assert world.store.closed


def test_it_waits_for_the_database_and_stops_while_waiting(world: World) -> None:
    world.store.away = {"*"}
    world.keep_records()
    world.close()
    assert world.status == [0]


def test_a_thread_that_dies_stops_the_process_with_a_status(world: World) -> None:
    world.until(world.pair, lambda found: found.kind == Kind.LEASE)
    world.store.processes = None  # type: ignore[assignment,method-assign]
    world.thread.join(LIMIT_S)
    assert world.status == [1]
    assert "sv-sql" in world.stop.reason


def test_what_was_taken_and_not_processed_is_left_to_the_successor(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.until(world.pair, lambda found: found.kind == Kind.LEASE)
    ended: list[BaseException | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda told: ended.append(told.exc_value))

    def fail(*_values: object) -> None:
        raise ValueError("by the test")

    monkeypatch.setattr(process.Services, "on_message", fail)
    up = frame.encode(Kind.GATEWAY, {"gw": GATEWAY, "name": "host-1", "state": "lost"})
    world.pair.post("services", up)
    world.thread.join(LIMIT_S)
    assert [str(error) for error in ended] == ["by the test"]
    with attach(world.config.runtime_dir / "main.mbx", "services") as successor:
        assert up in [bytes(message.payload) for message in successor.take()]


def test_it_sleeps_on_both_mailboxes_until_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How long ``wait_any`` lets it sleep at most is that function's own test."""
    slept: list[tuple[list[str], float]] = []

    def recorder(boxes: Sequence[Mailbox], limit_s: float, others: Sequence[Stop]) -> None:
        slept.append(([box.name for box in boxes], limit_s))
        wait_any(boxes, limit_s, others)

    monkeypatch.setattr(process, "wait_any", recorder)
    ensure_private_dir(tmp_path / "run")
    world = World(tmp_path / "run", monkeypatch)
    world.until(world.pair, lambda found: found.kind == Kind.LEASE)
    world.until(world.appserver, lambda found: found.kind == Kind.SNAPSHOT)
    world.close()
    assert slept
    assert all(names == ["services", "services"] and limit_s <= process.TICK_S for names, limit_s in slept)


class TornBox:
    """A mailbox whose first message is damaged."""

    def __init__(self) -> None:
        letters = [SimpleNamespace(sender="a", payload=b"x")]
        self.left: list[Any] = [MessageDamaged("lane of pair-0", 1), letters, []]

    def take(self) -> list[Any]:
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return list(found)


def test_a_damaged_message_is_passed_by() -> None:
    seen: list[bytes] = []
    services = SimpleNamespace(on_message=lambda _sender, payload, *_times: seen.append(payload))
    assert not process._drain(services, TornBox(), FakeClock())  # type: ignore[arg-type]
    assert seen == [b"x"]


class Patience(Stop):
    """Waits by moving the clock; does something at given seconds."""

    def __init__(self, clock: FakeClock, at: dict[float, Callable[[], None]]) -> None:
        super().__init__()
        self.clock, self.at, self.waited_s = clock, at, 0.0

    def wait(self, timeout_s: float | None = None) -> bool:
        self.clock.advance(timeout_s or 0.0)
        self.waited_s += timeout_s or 0.0
        for second in [at for at in self.at if self.waited_s >= at]:
            self.at.pop(second)()
        return self.is_set()


@pytest.mark.parametrize(("back_after_s", "warnings"), [(4.0, 0), (30.0, 1)])
def test_a_schema_in_the_making_is_no_trouble_a_database_that_stays_away_is(
    monkeypatch: pytest.MonkeyPatch, back_after_s: float, warnings: int
) -> None:
    said: list[str] = []
    monkeypatch.setattr(process, "log", SimpleNamespace(warning=lambda event, **_: said.append(event)))
    clock, store, box = FakeClock(unix_us=START_US), FakeStore(), FakeMailbox()
    store.away = {"*"}
    record_sender = RecordSender(box, "t", 1 << 20)

    def come_back() -> None:
        store.away = set()
        for _, header in box.take_posted(Kind.RECORD):
            store.keep([(table, row) for table, row in header["rows"]])

    stop = Patience(clock, {back_after_s: come_back})
    start = process.recover_state(store, record_sender, "tag", "observe", clock, stop)
    assert start is not None
    assert said == ["waiting-for-database"] * warnings


def test_threads_take_short_turns_while_the_loop_runs() -> None:
    before_s = sys.getswitchinterval()
    with process.short_turns():
        assert sys.getswitchinterval() == pytest.approx(process.TURN_S)
    assert sys.getswitchinterval() == before_s

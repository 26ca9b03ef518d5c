"""Rows that are read while a window is committed: they wait for it, in order, and reading goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pmdaemon.wire.cut import Cut
from sla_server.db.errors import DatabaseRefused, DatabaseUnavailable
from sla_server.db.ingest import waiting
from sla_server.db.ingest.batch import decode_batch
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.transaction import CursorMoved
from sla_server.ownership import Ownership
from tests.support.database import Rig, archived, identity, under_way
from tests.support.samples import (
    T0,
    assert_database_holds,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
    streams_message,
)

IDS = ["e0", "e1", "e2"]
ITEMS = [make_cut(seq) for seq in range(1, 31)]


def event(event_id: str) -> bytes:
    row = {"event_id": event_id, "at_us": T0, "kind": "k", "text": event_id}
    # A row that all of them write: the last one counts.
    return record_message([("events", row), ("events", {"event_id": "shared", "text": event_id})])


def payloads() -> Sequence[bytes]:
    """Cuts, and behind the 6th, the 12th and the 18th rows; the first step reads some three."""
    found = []
    for number, item in enumerate(ITEMS, 1):
        found.append(cuts_message([item]))
        if number % 6 == 0 and number <= 18:
            found.append(event(IDS[number // 6 - 1]))
    return found


def read_on(rig: Rig, parts: int) -> None:
    """Step until so many batches of rows wait; the commit is still under way."""
    while len(rig.writer._waiting.parts) < parts:
        assert rig.writer.step()


def assert_complete(rig: Rig, items: Sequence[Cut] = ITEMS, ids: Sequence[str] = IDS) -> None:
    assert_database_holds(rig.reader, items)
    assert archived(rig) == identity(items)
    events = {row["event_id"]: row["text"] for row in rig.reader.events() if row["kind"] in ("k", "")}
    assert events == {**{event_id: event_id for event_id in ids}, "shared": ids[-1]}


def test_reading_goes_on_and_rows_are_stored_between_two_windows(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = under_way(rig, monkeypatch, payloads())
    window = rig.writer._background_commit.window
    assert window is not None
    read_on(rig, 3)
    assert rig.writer._background_commit.window is window
    assert rig.writer._window.last_seq > rig.writer._waiting.last_seq - 1
    assert rig.store.cursors() == (0, 0)
    done: list[tuple[str, int]] = []
    commit, store = gate.commit, rig.store.store_waiting

    def noted_commit(window: Any, oldest_seq: int) -> None:
        commit(window, oldest_seq)
        done.append(("window", window.last_seq))

    def noted_rows(parts: Any, oldest_seq: int) -> None:
        assert rig.writer._background_commit.window is None, "two transactions could lock each other out"
        store(parts, oldest_seq)
        done.append(("rows", parts[-1].last_seq))

    gate.commit = noted_commit
    monkeypatch.setattr(rig.store, "store_waiting", noted_rows)
    gate.go.set()
    rig.drain(final=True)
    assert [what for what, _seq in done[:3]] == ["window", "rows", "window"]
    assert done[0][1] < done[1][1] <= done[2][1]
    assert_complete(rig)
    assert rig.store.cursors() == (rig.queue.synced_seq,) * 2


def test_what_waits_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it the reader waits for the commit."""
    monkeypatch.setattr(waiting, "WAITING_BYTES", 1)
    gate, most = under_way(rig, monkeypatch, payloads()), []
    wait = rig.writer._background_commit.wait

    def released() -> Any:
        most.append(len(rig.writer._waiting.parts))
        gate.go.set()
        return wait()

    monkeypatch.setattr(rig.writer._background_commit, "wait", released)
    while not most:
        assert rig.writer.step()
    assert most == [1]
    rig.drain(final=True)
    assert_complete(rig)


class KilledError(BaseException):
    """kill -9: nothing in memory counts any more."""


@pytest.mark.parametrize("point", ["rows-waiting", "sql-committed", "rows-in-transaction", "rows-committed"])
def test_kill_9_loses_and_doubles_nothing(database: Any, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    dies_at = [""]

    def probe(name: str) -> None:
        if name == dies_at[0]:
            raise KilledError

    def never(*_how: object) -> None:
        raise KilledError

    first = Rig(database.config, database.data_dir, probe)
    gate = under_way(first, monkeypatch, payloads())
    read_on(first, 2)
    dies_at[0] = point
    if point == "rows-waiting":
        gate.commit = never
    else:
        gate.go.set()
    with pytest.raises(KilledError):
        first.drain(final=True)
    gate.go.set()
    first.writer._background_commit._threads.join(60)
    first.die()
    second = Rig(database.config, database.data_dir)
    second.drain(final=True)
    assert_complete(second)
    second.close()


@pytest.mark.parametrize("is_stored", [False, True])
@pytest.mark.parametrize(
    "error", [DatabaseUnavailable("db", "gone"), CursorMoved(0, 1), DatabaseRefused("?")]
)
def test_a_transaction_of_rows_that_fails_loses_and_doubles_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception, is_stored: bool
) -> None:
    """Also one that was committed, and whose answer was lost."""
    gate, store = under_way(rig, monkeypatch, payloads()), rig.store.store_waiting
    read_on(rig, 2)

    def fails(parts: Any, oldest_seq: int) -> None:
        monkeypatch.setattr(rig.store, "store_waiting", store)
        if is_stored:
            store(parts, oldest_seq)
        raise CursorMoved(rig.writer.sql_seq, 0) if isinstance(error, CursorMoved) else error

    monkeypatch.setattr(rig.store, "store_waiting", fails)
    gate.go.set()
    try:
        rig.drain(final=True)
    except DatabaseUnavailable as exc:
        rig.writer._on_outage(exc)
        rig.drain(final=True)
    assert rig.store.store_waiting is store
    assert_complete(rig)


@pytest.mark.parametrize("error", [DatabaseUnavailable("db", "gone"), DatabaseRefused("by the test")])
def test_rows_wait_for_a_window_that_fails(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    gate = under_way(rig, monkeypatch, payloads())
    commit = gate.commit
    read_on(rig, 2)

    def fails(*_how: object) -> None:
        gate.commit = commit
        raise error

    gate.commit = fails
    gate.go.set()
    try:
        rig.drain(final=True)
    except DatabaseUnavailable as exc:
        rig.writer._on_outage(exc)
        rig.drain(final=True)
    assert_complete(rig)


def test_a_row_that_the_database_refuses_is_put_aside_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, store = under_way(rig, monkeypatch, payloads()), rig.store._store_fresh
    read_on(rig, 3)

    def refuses(connection: Any, batch: Any) -> None:
        store(connection, batch)
        if any(row.get("event_id") == IDS[1] for _table, row in batch.rows):
            raise DatabaseRefused("by the test")

    monkeypatch.setattr(rig.store, "_store_fresh", refuses)
    gate.go.set()
    rig.drain(final=True)
    assert_complete(rig, ids=[IDS[0], IDS[2]])
    assert [path.read_bytes() for path in rig.refused_dir.iterdir()] == [event(IDS[1])]


def test_a_batch_that_comes_again_waits_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction that screens its cuts failed after its rows were put with the others."""
    gate, screened = under_way(rig, monkeypatch, payloads()), rig.store.screened
    read_on(rig, 1)

    def fails(_batch: object) -> Any:
        monkeypatch.setattr(rig.store, "screened", screened)
        raise DatabaseUnavailable("db", "gone")

    while len(rig.writer._waiting.parts) < 2:
        rig.writer.step()
        monkeypatch.setattr(rig.store, "screened", fails)
        with pytest.raises(DatabaseUnavailable):
            rig.writer.step()
    seqs = [part.last_seq for part in rig.writer._waiting.parts]
    rig.writer.step()
    assert [part.last_seq for part in rig.writer._waiting.parts][: len(seqs)] == seqs
    gate.go.set()
    rig.drain(final=True)
    assert_complete(rig)


@pytest.mark.parametrize("ownership", ["open", "first"])
def test_what_decides_whose_cuts_count_does_not_wait(database: Any, ownership: Ownership) -> None:
    """Cuts behind it are screened by it. What a gateway says again decides nothing."""
    rig = Rig(database.config, database.data_dir, ownership=ownership)

    def may_wait(*payloads: bytes) -> bool:
        records = [IngestRecord(number, payload) for number, payload in enumerate(payloads, 1)]
        return rig.store.may_wait(decode_batch(records, 0))

    export = {"volume": "vol-1", "size_bytes": 1 << 30, "read_only": False, "source": "nbd"}
    owner = {"volume": "v", "gateway_id": "g", "state": "approved", "decided_by": "ann", "changed_us": T0}
    deciding = [
        gateway_message(gw=gateway(2)),
        gateway_message(name="other"),
        gateway_message(exports=[{**export, "backend": "disk-2"}]),
        gateway_message(exports=[{**export, "volume": "vol-9", "backend": "disk-1"}]),
        gateway_message(volumes=["vol-1"]),
        streams_message((3,)),
        streams_message(gw=gateway(2)),
    ]
    assert may_wait(event("e"))
    assert may_wait(gateway_message("lost"))
    assert not may_wait(record_message([("volume_owners", owner)]))
    assert may_wait(gateway_message()) == may_wait(streams_message()) == (ownership == "open")
    rig.feed(gateway_message(), streams_message())
    rig.close()
    rig = Rig(database.config, database.data_dir, ownership=ownership)
    assert may_wait(gateway_message(), streams_message(), event("e"))
    for payload in deciding:
        assert may_wait(payload) == may_wait(event("e"), payload) == (ownership == "open")
    rig.feed(streams_message((1,), gateway(2)))  # another gateway's volume: it waits to be approved
    assert may_wait(streams_message()), "of the one whose it is"
    assert may_wait(streams_message((), gateway(2))) == (ownership == "open")
    rig.close()


def test_announcements_that_come_again_do_not_stop_the_reader(
    database: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after each restart, with owners of volumes."""
    first = Rig(database.config, database.data_dir, ownership="first")
    announced = [gateway_message(at_us=T0), streams_message()]
    first.feed(*announced)
    first.close()
    rig = Rig(database.config, database.data_dir, ownership="first")
    again = [gateway_message(at_us=T0 + 9, software="agent 0.2"), streams_message()]
    found = list(payloads())
    gate = under_way(rig, monkeypatch, [*found[:8], *again, *found[8:]])
    read_on(rig, 3)
    assert rig.store.cursors()[0] == 2, "the commit is still under way"
    gate.go.set()
    rig.drain(final=True)
    assert_complete(rig)
    assert [row["software"] for row in rig.reader.gateways()] == ["agent 0.2"]
    assert [row["volume"] for row in rig.reader.streams()] == ["vol-1", "vol-2"]
    rig.close()

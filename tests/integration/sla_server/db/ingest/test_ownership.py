"""Claims to volumes in SQL: who owns what in the queue's order, and what of cuts is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow.parquet as parquet
import pytest

from pmdaemon.wire import frame, names
from pmdaemon.wire.kinds import Kind
from sla_server.db.engine import begin
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest import transaction
from sla_server.ownership import Ownership
from tests.support.database import Rig
from tests.support.samples import (
    EPOCH,
    T0,
    assert_database_holds,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
    stream,
    streams_message,
)

TRUE, FALSE = gateway(1), gateway(2)


@pytest.fixture
def open_rig(database: Any) -> Iterator[Any]:
    opened: list[Rig] = []

    def make(ownership: Ownership = "first", **more: Any) -> Rig:
        for rig in opened:
            rig.close()
        opened[:] = [Rig(database.config, database.data_dir, ownership=ownership, **more)]
        return opened[0]

    yield make
    for rig in opened:
        rig.close()


def claims(rig: Rig, **which: Any) -> dict[tuple[str, str], str]:
    return {(row["volume"], row["name"]): row["state"] for row in rig.reader.volume_owners(**which)}


def shown_by(rig: Rig, gateway_id: str, name: str, *numbers: int, **header: Any) -> None:
    export = {"backend": "disk-1", "size_bytes": 1, "read_only": False, "source": "nbd"}
    exports = [{"volume": f"vol-{number}", **export} for number in numbers]
    message = gateway_message(gw=gateway_id, name=name, exports=exports, **header)
    rig.feed(message, streams_message(numbers, gateway_id))


def decided(rig: Rig, volume: str, gateway_id: str, state: str, **columns: Any) -> None:
    row = {
        "volume": volume,
        "gateway_id": gateway_id,
        "state": state,
        "decided_by": "ann",
        "changed_us": T0 + 9,
    }
    rig.feed(record_message([("volume_owners", {**row, **columns})]))


def pending_events(rig: Rig) -> list[dict[str, Any]]:
    return [row for row in rig.reader.events() if row["kind"] == "volume-pending"]


def test_rows_of_a_volume_that_is_anothers_are_stored_nowhere(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "evil-gw", 1, 2)
    own = [make_cut(seq, streams=(1,)) for seq in (1, 2, 3)]
    false = [make_cut(seq, gw=FALSE, streams=(1, 2)) for seq in (1, 2, 3)]
    for one, other in zip(own, false, strict=True):
        rig.feed(cuts_message([one]), cuts_message([other]))
    rig.drain(final=True)
    kept = [make_cut(seq, gw=FALSE, streams=(1, 2)) for seq in (1, 2, 3)]
    assert {row["stream_id"] for row in rig.reader.streams()} == {stream(1), stream(2, FALSE)}
    mine = rig.reader.slice_inputs([stream(1)], [TRUE], 0, 1 << 62)
    assert sum(row["reads"] for row in mine.rows) == sum(int(cut.column("reads")[0]) for cut in own)
    inputs = rig.reader.slice_inputs([stream(1, FALSE), stream(2, FALSE)], [FALSE], 0, 1 << 62)
    assert {row["stream_id"] for row in inputs.rows} == {stream(2, FALSE)}
    assert sum(row["reads"] for row in inputs.rows) == sum(int(cut.column("reads")[1]) for cut in kept)
    assert sum(row["cuts"] for row in inputs.coverage) == 3, "its cuts prove its own volume's time"
    stored = parquet.read_table(rig.parquet_dir).column("stream_id").to_pylist()
    assert set(stored) == {stream(1), stream(2, FALSE)}
    [row] = rig.reader.volume_owners(state="pending")
    assert (row["volume"], row["name"], row["left_out"]) == ("vol-1", "evil-gw", 3)
    [event] = pending_events(rig)
    assert event["text"] == (
        "gateway evil-gw shows volume vol-1, which belongs to host-1. It does not count, until: "
        "sla volumes approve vol-1 --gateway evil-gw"
    )
    assert rig.reader.volume_owner_names() == {"vol-1": ["host-1"], "vol-2": ["evil-gw"]}


def test_from_the_approval_on_it_counts(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "host-2", 1)
    rig.feed(cuts_message([make_cut(1, gw=FALSE, streams=(1,))]))
    decided(rig, "vol-1", FALSE, "approved", backend="disk-1", shown_backend="disk-1")
    later = make_cut(2, gw=FALSE, streams=(1,))
    rig.feed(cuts_message([later]))
    rig.drain(final=True)
    assert {row["stream_id"] for row in rig.reader.streams("vol-1")} == {stream(1), stream(1, FALSE)}
    inputs = rig.reader.slice_inputs([stream(1, FALSE)], [FALSE], 0, 1 << 62)
    assert sum(row["reads"] for row in inputs.rows) == int(later.column("reads")[0])
    assert claims(rig) == {("vol-1", "host-1"): "approved", ("vol-1", "host-2"): "approved"}
    assert len(pending_events(rig)) == 1


def test_from_the_revocation_on_it_does_not_count_also_after_a_restart(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    first = make_cut(1, streams=(1,))
    rig.feed(cuts_message([first]))
    decided(rig, "vol-1", TRUE, "revoked")
    rig.feed(cuts_message([make_cut(2, streams=(1,))]))
    rig.drain(final=True)
    rig = open_rig()
    rig.feed(cuts_message([make_cut(3, streams=(1,))]))
    rig.drain(final=True)
    [row] = rig.reader.streams("vol-1")
    assert (row["cuts"], row["reads"]) == (1, int(first.column("reads")[0]))
    assert claims(rig) == {("vol-1", "host-1"): "revoked"}
    assert rig.reader.volume_owners()[0]["left_out"] == 2


def test_a_stored_stream_is_not_forgotten_when_many_wait(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sla_server.db.ingest import ownership

    monkeypatch.setattr(ownership, "MOST_WAITING", 3)
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    first = make_cut(1, streams=(1,))
    rig.feed(cuts_message([first]))
    decided(rig, "vol-1", TRUE, "revoked")
    clients = [f"c-{number}" for number in range(9)]
    flood = [
        {
            "id": names.stream_id(TRUE, "vol-1", client),
            "volume": "vol-1",
            "client": client,
            "backend": "disk-1",
        }
        for client in clients
    ]
    rig.feed(frame.encode(Kind.STREAMS_SEEN, {"gw": TRUE, "streams": flood}))
    rig.feed(cuts_message([make_cut(2, streams=(1,))]))
    rig.drain(final=True)
    [row] = rig.reader.streams("vol-1")
    assert (row["cuts"], row["reads"]) == (1, int(first.column("reads")[0]))
    decided(rig, "vol-1", TRUE, "approved")
    assert {row["client"] for row in rig.reader.streams("vol-1")} == {row["client"], *clients[-3:]}


def test_approve_mode_stores_nothing_before(open_rig: Any) -> None:
    rig = open_rig("approve")
    shown_by(rig, TRUE, "host-1", 1, 2)
    rig.feed(cuts_message([make_cut(1)]))
    rig.drain(final=True)
    assert rig.reader.streams() == []
    assert rig.reader.volumes() == []
    decided(rig, "vol-2", TRUE, "approved", backend="disk-1", shown_backend="disk-1")
    assert [row["volume"] for row in rig.reader.volumes()] == ["vol-2"]
    assert [row["volume"] for row in rig.reader.streams()] == ["vol-2"]
    assert claims(rig, state="pending") == {("vol-1", "host-1"): "pending"}
    [event] = pending_events(rig)
    assert event["details"]["count"] == 2


def test_the_same_announcement_makes_no_second_event(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    for _ in range(3):
        shown_by(rig, FALSE, "evil-gw", 1)
        rig.feed(cuts_message([make_cut(1, gw=FALSE, streams=(1,))]))
    rig = open_rig()
    shown_by(rig, FALSE, "evil-gw", 1)
    assert len(pending_events(rig)) == 1
    versions = {row["name"]: row["version"] for row in rig.reader.volume_owners()}
    assert versions == {"host-1": 1, "evil-gw": 2}
    assert [row["name"] for row in rig.reader.volume_owners(1)] == ["evil-gw"]


def test_numbers_of_another_gateways_streams_are_left_out(open_rig: Any) -> None:
    """The ids follow from names: whoever knows them could write into the victim's sums."""
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "evil-gw", 2)
    own, false = make_cut(1, streams=(1,)), make_cut(1, gw=FALSE, streams=(1, 2), seed=5)
    false.counters[0, 0] = stream(1)
    for _ in range(2):
        rig.feed(cuts_message([own, false]))
    rig.drain(final=True)
    [row] = rig.reader.streams("vol-1")
    assert row["reads"] == 2 * int(own.column("reads")[0])
    [event] = [row for row in rig.reader.events() if row["kind"] == "streams-foreign"]
    assert event["subject"] == FALSE
    assert event["text"].startswith(f"gateway {FALSE} sends statistics under the numbers of another")


def test_numbers_that_nobody_announced_are_left_out_for_good(open_rig: Any) -> None:
    """Else who knows the names could write what a gateway will have done before it comes."""
    rig = open_rig()
    shown_by(rig, FALSE, "evil-gw", 2)
    early = make_cut(1, gw=FALSE, streams=(1, 2), seed=5)
    early.counters[0, 0] = stream(1)
    rig.feed(cuts_message([early]))
    shown_by(rig, TRUE, "host-1", 1)
    own = make_cut(1, streams=(1,))
    rig.feed(cuts_message([own]))
    rig.drain(final=True)
    counts = {row["volume"]: (row["gateway_id"], row["cuts"], row["reads"]) for row in rig.reader.streams()}
    assert counts == {
        "vol-1": (TRUE, 1, int(own.column("reads")[0])), "vol-2": (FALSE, 1, int(early.column("reads")[1])),
    }  # fmt: skip
    inputs = rig.reader.slice_inputs([stream(1)], [TRUE, FALSE], 0, 1 << 62)
    assert sum(row["reads"] for row in inputs.rows) == int(own.column("reads")[0])
    [event] = [row for row in rig.reader.events() if row["kind"].startswith("streams-")]
    assert (event["kind"], event["subject"]) == ("streams-unannounced", FALSE)
    assert "numbers of streams that were not announced" in event["text"]


def test_a_stream_announced_later_counts_from_then_on(open_rig: Any) -> None:
    rig = open_rig()
    rig.feed(gateway_message(gw=TRUE, name="host-1"))
    rig.feed(cuts_message([make_cut(1, streams=(1,))]))
    rig.feed(streams_message([1], TRUE))
    later = make_cut(2, streams=(1,))
    rig.feed(cuts_message([later]))
    rig.drain(final=True)
    [row] = rig.reader.streams("vol-1")
    assert (row["cuts"], row["reads"]) == (1, int(later.column("reads")[0]))


def test_a_gateway_owns_so_many_at_first_sight(open_rig: Any) -> None:
    rig = open_rig(first_sight_volumes=2)
    shown_by(rig, FALSE, "evil-gw", 1, 2, 3, 4)
    rig = open_rig(first_sight_volumes=2)
    shown_by(rig, FALSE, "evil-gw", 1, 2, 5)
    shown_by(rig, TRUE, "host-1", 6)
    approved = {volume for (volume, _), state in claims(rig).items() if state == "approved"}
    assert approved == {"vol-1", "vol-2", "vol-6"}
    assert {row["volume"] for row in rig.reader.streams()} == approved
    texts = [event["text"] for event in pending_events(rig)]
    assert len(texts) == 2
    assert all("2 that it showed first" in text for text in texts)


def test_a_list_in_the_certificate_decides(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "host-2", 1, 3, volumes=["disk-1/vol-1"])
    assert claims(rig) == {
        ("vol-1", "host-1"): "approved", ("vol-1", "host-2"): "approved", ("vol-3", "host-2"): "pending",
    }  # fmt: skip
    texts = {row["kind"]: row["text"] for row in rig.reader.events()}
    assert texts["volume-shared"] == (
        "gateway host-2 shows vol-1 beside other gateways: its certificate lists it"
    )
    assert "which its certificate does not list" in texts["volume-pending"]


def test_a_list_that_is_narrower_takes_volumes_away(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1, 2)
    first = make_cut(1, streams=(1, 2))
    rig.feed(cuts_message([first]))
    shown_by(rig, TRUE, "host-1", 1, volumes=["vol-1"])
    rig.feed(cuts_message([make_cut(2, streams=(1, 2))]))
    rig.drain(final=True)
    assert claims(rig) == {("vol-1", "host-1"): "approved", ("vol-2", "host-1"): "pending"}
    assert [(row["volume"], row["cuts"]) for row in rig.reader.streams()] == [("vol-1", 2), ("vol-2", 1)]
    assert len(pending_events(rig)) == 1
    decided(rig, "vol-2", TRUE, "approved", backend="disk-1")
    rig.feed(cuts_message([make_cut(3, streams=(1, 2))]))
    rig.drain(final=True)
    assert [row["cuts"] for row in rig.reader.streams()] == [3, 2]


@pytest.mark.parametrize("listed", [None, ["vol-5"]])
def test_after_a_restart_streams_wait_for_the_gateway(open_rig: Any, listed: list[str] | None) -> None:
    said = {} if listed is None else {"volumes": listed}
    rig = open_rig()
    shown_by(rig, FALSE, "host-2", 5, **said)
    rig = open_rig()
    rig.feed(streams_message([7], FALSE))
    assert claims(rig) == {("vol-5", "host-2"): "approved"}
    assert rig.reader.streams("vol-7") == []
    shown_by(rig, FALSE, "host-2", 5, **said)
    assert claims(rig)["vol-7", "host-2"] == ("approved" if listed is None else "pending")
    assert [row["volume"] for row in rig.reader.streams("vol-7")] == (["vol-7"] if listed is None else [])


def test_a_volume_on_another_backend_stays_until_that_is_approved(open_rig: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    export = {"volume": "vol-1", "backend": "disk-2", "size_bytes": 1, "read_only": False}
    rig.feed(gateway_message(name="host-1", exports=[export], ep=EPOCH + 1))
    assert {row["backend"] for row in rig.reader.volumes()} == {"disk-1"}
    [row] = rig.reader.volume_owners(state="pending")
    assert (row["backend"], row["shown_backend"]) == ("disk-1", "disk-2")
    cut = make_cut(1, streams=(1,))
    rig.feed(cuts_message([cut]))
    rig.drain(final=True)
    assert_database_holds(rig.reader, [cut])
    decided(rig, "vol-1", TRUE, "approved", backend="disk-2", shown_backend="disk-2")
    assert {row["backend"] for row in rig.reader.volumes()} == {"disk-2"}
    assert {row["backend"] for row in rig.reader.streams()} == {"disk-2"}
    assert [row["kind"] for row in rig.reader.events() if row["kind"].startswith("volume-m")] == [
        "volume-moved"
    ]


def test_open_records_decisions_and_leaves_nothing_out(open_rig: Any) -> None:
    rig = open_rig("open")
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "host-2", 1)
    assert claims(rig) == {}
    decided(rig, "vol-1", FALSE, "revoked", name="host-2")
    both = [make_cut(1, streams=(1,)), make_cut(1, gw=FALSE, streams=(1,))]
    rig.feed(cuts_message(both))
    rig.drain(final=True)
    assert_database_holds(rig.reader, both)
    assert claims(rig) == {("vol-1", "host-2"): "revoked"}


def test_what_was_stored_while_open_belongs_to_its_gateways_after_it(open_rig: Any) -> None:
    rig = open_rig("open")
    shown_by(rig, TRUE, "host-1", 1)
    decided(rig, "vol-1", gateway(3), "revoked", name="host-3")
    rig.feed(cuts_message([make_cut(1, streams=(1,))]))
    rig.drain(final=True)
    rig = open_rig()
    shown_by(rig, FALSE, "evil-gw", 1)
    shown_by(rig, TRUE, "host-1", 1)
    assert claims(rig) == {
        ("vol-1", "host-1"): "approved", ("vol-1", "host-3"): "revoked", ("vol-1", "evil-gw"): "pending",
    }  # fmt: skip
    [row] = rig.reader.volume_owners(state="approved")
    assert (row["backend"], row["decided_by"], row["gateway_id"]) == ("disk-1", "update", TRUE)
    rig.feed(cuts_message([make_cut(2, streams=(1,)), make_cut(2, gw=FALSE, streams=(1,))]))
    rig.drain(final=True)
    assert [(row["gateway_id"], row["cuts"]) for row in rig.reader.streams("vol-1")] == [(TRUE, 2)]


def test_what_a_failed_transaction_decided_is_forgotten(
    open_rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = open_rig()

    def fails(*_: Any) -> None:
        raise DatabaseUnavailable("here", "gone")

    with monkeypatch.context() as patched:
        # Behind the claims, before the commit: nothing of the transaction lasts.
        patched.setattr(transaction, "store_inventory", fails)
        rig.queue.append_many([gateway_message(gw=FALSE, name="host-2"), streams_message(gw=FALSE)])
        with pytest.raises(DatabaseUnavailable):
            rig.drain()
    assert claims(rig) == {}
    rig.drain()
    shown_by(rig, TRUE, "host-1", 1)
    assert claims(rig)["vol-1", "host-2"] == "approved"
    assert claims(rig)["vol-1", "host-1"] == "pending"


@pytest.fixture
def feed_unanswered(monkeypatch: pytest.MonkeyPatch) -> Any:
    def feed(rig: Rig, *payloads: bytes) -> None:
        """Store these, but the connection breaks before the answer to the commit; then go on."""

        @contextmanager
        def loses_the_answer(engine: Any) -> Iterator[Any]:
            with begin(engine) as connection:
                yield connection
            raise DatabaseUnavailable("here", "connection lost during COMMIT")

        with monkeypatch.context() as patched:
            patched.setattr(transaction, "begin", loses_the_answer)
            rig.queue.append_many(list(payloads))
            with pytest.raises(DatabaseUnavailable):
                rig.drain()
        rig.drain()

    return feed


def test_what_waits_is_not_lost_with_the_answer_to_its_commit(open_rig: Any, feed_unanswered: Any) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    feed_unanswered(rig, gateway_message(gw=FALSE, name="host-2"), streams_message((1,), FALSE))
    rig.feed(cuts_message([make_cut(1, gw=FALSE, streams=(1,))]))
    rig.drain(final=True)
    [row] = rig.reader.volume_owners(state="pending")
    assert (row["name"], row["left_out"]) == ("host-2", 1)
    assert [each for each in rig.reader.events() if each["kind"] == "streams-unannounced"] == []
    decided(rig, "vol-1", FALSE, "approved", backend="disk-1", shown_backend="disk-1")
    assert {row["stream_id"] for row in rig.reader.streams("vol-1")} == {stream(1), stream(1, FALSE)}
    later = make_cut(2, gw=FALSE, streams=(1,))
    rig.feed(cuts_message([later]))
    rig.drain(final=True)
    inputs = rig.reader.slice_inputs([stream(1, FALSE)], [FALSE], 0, 1 << 62)
    assert sum(row["reads"] for row in inputs.rows) == int(later.column("reads")[0])


def test_what_was_approved_counts_though_the_answer_to_its_commit_was_lost(
    open_rig: Any, feed_unanswered: Any
) -> None:
    rig = open_rig()
    shown_by(rig, TRUE, "host-1", 1)
    shown_by(rig, FALSE, "host-2", 1)
    row = {"volume": "vol-1", "gateway_id": FALSE, "state": "approved", "decided_by": "ann",
           "changed_us": T0 + 9, "backend": "disk-1", "shown_backend": "disk-1"}  # fmt: skip
    feed_unanswered(rig, record_message([("volume_owners", row)]))
    rig.feed(cuts_message([make_cut(1, gw=FALSE, streams=(1,))]))
    rig.drain(final=True)
    assert sorted(row["cuts"] for row in rig.reader.streams("vol-1")) == [0, 1]
    assert [row["left_out"] for row in rig.reader.volume_owners()] == [0, 0]


def test_a_certificates_list_is_not_lost_with_the_answer_to_its_commit(
    open_rig: Any, feed_unanswered: Any
) -> None:
    rig = open_rig()
    feed_unanswered(rig, gateway_message(gw=FALSE, name="host-2", volumes=["vol-5"]))
    rig.feed(streams_message([7], FALSE))
    assert claims(rig)["vol-7", "host-2"] == "pending"


def test_ids_are_those_of_the_wire() -> None:
    message = frame.decode(streams_message((1,), FALSE))
    assert message.kind == Kind.STREAMS_SEEN
    assert message.header["streams"][0]["id"] == names.stream_id(FALSE, "vol-1", "host-a")

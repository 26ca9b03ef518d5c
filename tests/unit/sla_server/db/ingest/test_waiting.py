"""What is kept of rows that wait: their order, their bound, and none of the cuts they came with."""

from __future__ import annotations

import pytest

from sla_server.db.ingest import waiting
from sla_server.db.ingest.batch import DecodedBatch, decode_batch
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.waiting import WaitingRows
from tests.support.samples import EPOCH, cuts_message, gateway, gateway_message, make_cut, record_message


def batch(first_seq: int, *payloads: bytes) -> DecodedBatch:
    records = [IngestRecord(number, payload) for number, payload in enumerate(payloads, first_seq)]
    return decode_batch(records, first_seq - 1)


def event(event_id: str) -> bytes:
    return record_message([("events", {"event_id": event_id})])


def test_parts_keep_their_order_and_come_once() -> None:
    rows = WaitingRows()
    assert not rows
    rows.add([batch(1, event("a"))])
    rows.add([batch(2, event("b"), event("c"))])
    rows.add([batch(2, event("b"), event("c"))])
    assert rows
    assert [part.first_seq for part in rows.parts] == [1, 2]
    assert [row["event_id"] for part in rows.parts for _table, row in part.rows] == ["a", "b", "c"]
    assert rows.last_seq == 3
    rows.clear()
    assert not rows
    assert not rows.parts


def test_room_ends_with_the_bytes_of_messages_and_what_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "WAITING_BYTES", len(event("a")) + waiting.REFUSED_BYTES)
    rows = WaitingRows()
    rows.add([batch(1, event("a"), cuts_message([make_cut(1)]))])
    assert rows.has_room, "cuts take none: they are not kept"
    rows.add([batch(3, record_message([("no such table", {})]))])
    assert not rows.has_room
    rows.clear()
    assert rows.has_room


def test_of_cuts_only_those_with_a_wrong_clock_are_kept_one_an_epoch_without_rows() -> None:
    wrong = [make_cut(seq, epoch=epoch) for epoch in (EPOCH, 7) for seq in (2, 3)]
    found = batch(1, gateway_message(), cuts_message([make_cut(1)]), cuts_message(wrong, offset_us=9_000_000))
    rows = WaitingRows()
    rows.add([found])
    [part] = rows.parts
    assert [(item.cut.gateway_id, item.cut.epoch, item.cut.seq, item.offset_us) for item in part.cuts] == [
        (gateway(1), EPOCH, 2, 9_000_000),
        (gateway(1), 7, 2, 9_000_000),
    ]
    for item in part.cuts:
        cut = item.cut
        assert (cut.rows, len(cut.hist), len(cut.missed)) == (0, 0, 0)
        assert all(each.base is None for each in (cut.counters, cut.hist, cut.missed)), "no message is held"
    assert len(found.cuts) == 5
    assert part.gateways == found.gateways

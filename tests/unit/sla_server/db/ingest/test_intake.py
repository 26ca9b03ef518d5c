"""What is kept of messages, what is answered, and in which order."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.mailbox.errors import MailboxCorrupt, MailboxFull, MessageDamaged, no_route
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.server import spool_floors
from sla_server import config as configuration
from sla_server.db.errors import IngestQueuePoisoned
from sla_server.db.ingest import receiver as post_office_module
from sla_server.db.ingest.intake import CutAdmission, HighWater, IngestIntake
from sla_server.db.ingest.queue import IngestRecord
from sla_server.db.ingest.receiver import IngestReceiver
from sla_server.db.ingest.records import check_row
from sla_server.db.process import make_receiver
from tests.support.samples import (
    EPOCH,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
    streams_message,
)


@dataclass
class Message:
    payload: bytes
    sender: str = "pair-0"


def new_intake(*rows):
    return IngestIntake(4711, HighWater(rows))


def seqs(payload):
    return [cuts.decode(raw).seq for raw in frame.split(frame.decode(payload).blob)]


def answers(absorbed, kind=None):
    found = [(n.recipient, frame.decode(n.payload)) for n in absorbed.notices]
    return [(to, f.header) for to, f in found if kind is None or f.kind == kind]


def test_new_cuts_are_stored_as_they_came():
    message = cuts_message([make_cut(1), make_cut(2)])
    absorbed = new_intake().absorb([Message(message)])
    assert absorbed.records == [message]
    assert answers(absorbed) == [("pair-0", {"inc": 4711, "hw": [[gateway(1), EPOCH, 2]]})]
    assert not absorbed.is_urgent


def test_known_cuts_are_left_out_and_their_times_with_them():
    intake = new_intake((gateway(1), EPOCH, 2))
    items = [make_cut(seq) for seq in (1, 2, 3, 4)]
    [record] = intake.absorb([Message(cuts_message(items, offset_us=9))]).records
    assert seqs(record) == [3, 4]
    header = frame.decode(record).header
    assert header["n"] == 2
    assert header["recv_us"] == [item.start_unix_us + 1_005_000 for item in items[2:]]
    assert header["offset_us"] == [9, 9]
    assert intake.counts == {"duplicate": 2, "new": 2}


def test_a_cut_sent_again_is_not_stored_but_answered():
    intake = new_intake((gateway(1), EPOCH, 2))
    absorbed = intake.absorb([Message(cuts_message([make_cut(2)]))])
    assert absorbed.records == []
    assert answers(absorbed) == [("pair-0", {"inc": 4711, "hw": [[gateway(1), EPOCH, 2]]})]


def test_a_hole_is_not_kept_until_it_is_filled():
    intake = new_intake()
    absorbed = intake.absorb([Message(cuts_message([make_cut(2), make_cut(3)]))])
    assert (absorbed.records, absorbed.notices) == ([], [])
    absorbed = intake.absorb([Message(cuts_message([make_cut(seq) for seq in (1, 2, 3)]))])
    assert seqs(absorbed.records[0]) == [1, 2, 3]


def test_a_gap_bridges_what_the_agent_dropped():
    absorbed = new_intake().absorb([Message(cuts_message([make_cut(1), make_cut(9, gap=7)]))])
    assert seqs(absorbed.records[0]) == [1, 9]
    assert answers(absorbed)[0][1]["hw"] == [[gateway(1), EPOCH, 9]]


def test_a_gateway_is_told_its_watermarks_and_its_spool_raises_the_floor():
    intake = new_intake((gateway(1), 5, 77), (gateway(2), 6, 1))
    message = gateway_message(spool=[[EPOCH, 500, 520]])
    absorbed = intake.absorb([Message(message, "pair-3")])
    assert [frame.decode(payload).kind for payload in absorbed.records] == [Kind.GATEWAY, Kind.RECORD]
    [(recipient, header)] = answers(absorbed, Kind.WATERMARKS)
    assert recipient == "pair-3"
    assert sorted(header["hw"]) == [[gateway(1), 5, 77], [gateway(1), EPOCH, 499]]
    assert seqs(intake.absorb([Message(cuts_message([make_cut(500)]))]).records[0]) == [500]


def test_an_unknown_gateway_gets_empty_watermarks_because_the_pair_waits_for_them():
    absorbed = new_intake().absorb([Message(gateway_message())])
    assert answers(absorbed) == [("pair-0", {"inc": 4711, "hw": []})]


def test_a_lost_gateway_is_stored_and_not_answered():
    absorbed = new_intake().absorb([Message(gateway_message("lost"))])
    assert (len(absorbed.records), absorbed.notices) == (1, [])


def test_greetings_are_cut_into_frames_that_fit():
    rows = [(gateway(number), EPOCH, number) for number in range(1, 2001)]
    notices = new_intake(*rows).all_watermarks(["pair-0", "pair-1"])
    got = [row for n in notices if n.recipient == "pair-1" for row in frame.decode(n.payload).header["hw"]]
    assert sorted(got) == sorted([gw, ep, seq] for gw, ep, seq in rows)
    assert [n.recipient for n in new_intake().all_watermarks(["pair-0"])] == ["pair-0"]


def test_records_are_urgent_and_confirmed():
    message = record_message([("events", {"event_id": "e", "kind": "k"})], req="r1")
    absorbed = new_intake().absorb([Message(message, "services")])
    assert absorbed.records == [message]
    assert absorbed.is_urgent
    assert answers(absorbed) == [("services", {"req": "r1", "ok": True, "error": ""})]


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([("streams", {"stream_id": 1})], "RECORD writes only"),
        ([("events", {"kind": "k"})], "key column 'event_id' is missing"),
        ([("events", {"event_id": "e", "colour": 1})], "no such column: colour"),
        ([("events", {"event_id": "e", "at_us": "now"})], "takes int"),
        ([("events", {"event_id": "e", "at_us": 1 << 63})], "whole number"),
        ([("policies", {"version": 1, "state": "in-force", "job": "{}"})], "only `state`"),
        ([("events", {"event_id": b"e"})], "takes str"),
        ([("events",)], "expected [table, row]"),
        ([5], "expected [table, row]"),
        (5, "no list of"),
    ],
)
def test_a_wrong_row_is_answered_and_nothing_of_its_message_is_stored(rows, problem):
    message = frame.encode(Kind.RECORD, {"rows": rows, "req": "r1", "from": "services"})
    absorbed = new_intake().absorb([Message(message, "services")])
    assert absorbed.records == []
    [(_, header)] = answers(absorbed, Kind.RECORDED)
    assert not header["ok"]
    assert problem in header["error"]


GOOD = ("events", {"event_id": "e", "kind": "k"})
BAD = ("events", {"event_id": "f", "at_us": "now"})


def test_a_wrong_row_is_refused_alone():
    intake = new_intake()
    absorbed = intake.absorb([Message(record_message([GOOD, BAD, GOOD], req="r1"), "services")])
    [kept] = absorbed.records
    assert [row for _, row in frame.decode(kept).header["rows"]] == [GOOD[1], GOOD[1]]
    assert absorbed.is_urgent
    [(_, header)] = answers(absorbed, Kind.RECORDED)
    assert (header["ok"], "takes int" in header["error"]) == (False, True)
    assert intake.counts["rows_refused"] == 1


def test_rows_that_belong_together_are_refused_together():
    header = {"rows": [list(GOOD), list(BAD)], "req": "r1", "from": "services", "together": True}
    absorbed = new_intake().absorb([Message(frame.encode(Kind.RECORD, header), "services")])
    assert absorbed.records == []
    assert not answers(absorbed, Kind.RECORDED)[0][1]["ok"]


def test_details_without_a_form_are_stored_in_another():
    details = {b"k": 1, "n": math.nan, "deep": {"b": b"x"}}
    _, row = check_row("events", {"event_id": "e", "details": details})
    assert json.loads(row["details"], parse_constant=pytest.fail) == {
        "b'k'": 1,
        "n": None,
        "deep": {"b": "b'x'"},
    }


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 40,
        frame.encode(Kind.CUTS, {"n": 1}, cuts.encode(make_cut(1))),
        frame.encode(Kind.CUTS, {"recv_us": [1, 2], "offset_us": [0, 0]}, cuts.encode(make_cut(1))),
        frame.encode(Kind.CUTS, {"recv_us": ["x"], "offset_us": [0]}, cuts.encode(make_cut(1))),
        frame.encode(Kind.CUTS, {"recv_us": [1], "offset_us": [0]}, b"\x01" * 24),
        frame.encode(Kind.CUTS, {"recv_us": [1], "offset_us": [0]}, frame.encode(Kind.CUT, {"gw": 5})),
    ],
)
def test_malformed_messages_are_counted_and_the_next_is_served(payload):
    intake = new_intake()
    absorbed = intake.absorb([Message(payload), Message(cuts_message([make_cut(1)]))])
    assert intake.counts["malformed"] == 1
    assert len(absorbed.records) == 1


def test_one_malformed_cut_spoils_its_message_before_any_of_it_is_admitted():
    good, bad = cuts.encode(make_cut(1)), frame.encode(Kind.CUT, {"gw": 5})
    intake = new_intake()
    header = {"recv_us": [1, 1], "offset_us": [0, 0]}
    intake.absorb([Message(frame.encode(Kind.CUTS, header, good + bad))])
    assert intake.counts == {"malformed": 1}
    assert seqs(intake.absorb([Message(cuts_message([make_cut(1)]))]).records[0]) == [1]


def test_recovery_counts_what_lies_in_the_queue():
    intake = new_intake((gateway(1), EPOCH, 1))
    payloads = [
        cuts_message([make_cut(2), make_cut(3)]),
        gateway_message(spool=[[5, 41, 41]]),
        streams_message(),
    ]
    assert intake.recover((IngestRecord(seq, payload) for seq, payload in enumerate(payloads, 1)), 0) == []
    absorbed = intake.absorb([Message(cuts_message([make_cut(3)])), Message(gateway_message())])
    assert sorted(answers(absorbed, Kind.WATERMARKS)[0][1]["hw"]) == [
        [gateway(1), 5, 40],
        [gateway(1), EPOCH, 3],
    ]


@pytest.mark.parametrize("had", [43, 0])
def test_a_watermark_that_was_changed_while_the_server_was_stopped_is_mended(had):
    """Records 1 and 2 are in SQL, which should say 3; record 3 is not."""
    payloads = [cuts_message([make_cut(2)]), cuts_message([make_cut(3)]), cuts_message([make_cut(4)])]
    records = [IngestRecord(seq, payload) for seq, payload in enumerate(payloads, 7)]
    for is_complete in (True, False):
        intake = new_intake((gateway(1), EPOCH, had), (gateway(2), EPOCH, 9))
        corrected = intake.recover(records, 8, is_complete=is_complete)
        absorbed = intake.absorb([Message(cuts_message([make_cut(4), make_cut(5)]))])
        kept = [seq for payload in absorbed.records for seq in seqs(payload)]
        if had == 43 and not is_complete:  # SQL may know more than a damaged queue
            assert (corrected, kept) == ([], [])
        else:
            assert corrected == [(gateway(1), EPOCH, had, 4 if had else 3)]
            assert kept == [5]


def test_watermarks_that_are_right_are_left_alone():
    payloads = [gateway_message(spool=[[EPOCH, 11, 11]]), cuts_message([make_cut(11)])]
    for stored in (10, 11):  # the floor is stored with the inventory, the cut perhaps not yet
        intake = new_intake((gateway(1), EPOCH, stored))
        assert (
            intake.recover([IngestRecord(seq, payload) for seq, payload in enumerate(payloads, 1)], 1) == []
        )


@pytest.mark.parametrize(
    ("dropped", "lost"), [(0, 51), (20, 31), (51, 0)], ids=["none dropped", "some dropped", "all dropped"]
)
def test_cuts_that_neither_side_has_are_an_event_and_counted(dropped, lost):
    intake = IngestIntake(4711, HighWater([(gateway(1), EPOCH, 100)]), {gateway(1): 5})
    message = gateway_message(spool=[[EPOCH, 152, 160]], dropped=5 + dropped)
    first, *events = [frame.decode(payload) for payload in intake.absorb([Message(message)]).records]
    assert first.header.get("lost_cuts", 0) == lost
    rows = [row for event in events for _table, row in event.header["rows"]]
    assert [(row["kind"], row["details"]["cuts"]) for row in rows] == ([("cuts-lost", lost)] if lost else [])
    assert len(intake.absorb([Message(message)]).records) == 1, "said once"


def test_a_gateway_from_another_server_has_lost_nothing():
    absorbed = new_intake().absorb([Message(gateway_message(spool=[[EPOCH, 152, 160]]))])
    assert [frame.decode(payload).kind for payload in absorbed.records] == [Kind.GATEWAY]


# -- the loop around it


class Box:
    expected = ("pair-0", "services")

    def __init__(self, batches=(), log=None):
        self.batches = list(batches)
        self.log = [] if log is None else log
        self.full: set[str] = set()
        self.awoken = 0

    def post(self, recipient, payload):
        if recipient in self.full:
            raise MailboxFull("dbmanager", (recipient,))
        if recipient not in self.expected:
            raise no_route("dbmanager", recipient, self.expected)
        self.log.append((recipient, Kind(frame.decode(payload).kind).name))

    def post_many(self, recipient, payloads):
        for number, payload in enumerate(payloads):
            try:
                self.post(recipient, payload)
            except MailboxFull:
                raise MailboxFull("dbmanager", (recipient,), posted=number) from None

    def take(self, _max_messages, _max_bytes):
        batch = self.batches.pop(0) if self.batches else []
        if isinstance(batch, Exception):
            raise batch
        return batch

    def prepare_sleep(self):
        return not self.batches

    def awake(self):
        self.awoken += 1


class Queue:
    def __init__(self, log):
        self.log = log
        self.waiting_bytes = 0
        self.room = (10 << 20, 1000)
        self.fails = False
        self.synced_seq = 0

    def has_room(self, size_bytes, records):
        return size_bytes <= self.room[0] and records <= self.room[1]

    def append_many(self, payloads):
        if self.fails:
            raise IngestQueuePoisoned("q", "disk")
        self.log.append(("queue", len(payloads)))
        self.synced_seq += len(payloads)
        return 1


def office(batches, **options):
    log: list = []
    box, queue = Box(batches, log), Queue(log)
    woken = lambda: log.append(("woken", "writer"))  # noqa: E731
    post_office = IngestReceiver([box], new_intake(), queue, woken, clock=FakeClock(unix_us=7), **options)
    return post_office, box, queue, log


def test_notices_leave_after_the_append():
    message = record_message([("events", {"event_id": "e"})], req="r")
    post_office, _, _, log = office([[Message(cuts_message([make_cut(1)])), Message(message, "services")]])
    assert post_office.round()
    assert log == [("queue", 2), ("services", "RECORDED"), ("pair-0", "DURABLE"), ("woken", "writer")]
    assert not post_office.round()


def test_one_of_several_servers_confirms_what_sql_has():
    stored = [0]
    batches = [[Message(cuts_message([make_cut(seq)]))] for seq in (1, 2)]
    post_office, _, _, log = office(batches, stored_seq=lambda: stored[0])
    post_office.announce_watermarks()  # of an empty queue: at once
    watermarks = [("pair-0", "WATERMARKS")]
    assert log == watermarks
    assert post_office.round()
    assert post_office.round()
    assert not post_office.round()
    assert log == [*watermarks, ("queue", 1), ("queue", 1)]
    stored[0] = 1
    assert not post_office.round()
    assert log[3:] == [("pair-0", "DURABLE")]
    post_office.announce_watermarks()  # the second cut is in them
    assert log[4:] == []
    stored[0] = 2
    assert not post_office.round()
    assert log[4:] == [("pair-0", "DURABLE"), ("pair-0", "WATERMARKS")]


@pytest.mark.parametrize("takes_over", [False, True])
def test_a_server_by_itself_confirms_what_its_queue_has_and_one_of_several_what_sql_has(takes_over):
    cluster = {"node": "n1", "takeover": {"enabled": takes_over}}
    database = {"url": "postgresql+psycopg:///none", "parquet_dir": "/srv/parquet"}
    values = {"cluster": cluster, "database": database}
    config = configuration.resolve(configuration.ServerConfig.model_validate(values))
    log: list = []
    writer = SimpleNamespace(wake=lambda: None, sql_seq=0)
    manager = SimpleNamespace(intake=new_intake(), queue=Queue(log), writer=writer)
    box = Box([[Message(cuts_message([make_cut(1)]))]], log)
    receiver = make_receiver(config, [box], manager, lambda: None)
    assert receiver.round()
    assert log == [("queue", 1), *([] if takes_over else [("pair-0", "DURABLE")])]
    writer.sql_seq = 1
    assert not receiver.round()
    assert log == [("queue", 1), ("pair-0", "DURABLE")]


def test_nothing_is_confirmed_when_the_queue_cannot_keep_it():
    post_office, _, queue, log = office([[Message(cuts_message([make_cut(1)]))]])
    queue.fails = True
    with pytest.raises(IngestQueuePoisoned):
        post_office.round()
    assert log == []


def test_a_full_recipient_keeps_its_order_and_holds_up_nobody():
    batches = [[Message(cuts_message([make_cut(seq)]))] for seq in (1, 2)]
    batches[1].append(Message(record_message([], req="r"), "services"))
    post_office, box, _, log = office(batches)
    box.full = {"pair-0"}
    post_office.round()
    post_office.round()
    assert [entry for entry in log if entry[0] != "queue"] == [("services", "RECORDED"), ("woken", "writer")]
    box.full = set()
    post_office.round()
    assert [entry[0] for entry in log][-2:] == ["pair-0", "pair-0"]


def test_a_recipient_without_a_route_is_given_up():
    post_office, _, _, log = office([[Message(record_message([], req="r"), "pmdaemon")]])
    assert post_office.round()
    assert log == [("queue", 1), ("woken", "writer")]


@pytest.mark.parametrize("room", [(1 << 20, 1000), (10 << 20, 255)])
def test_nothing_is_taken_while_the_queue_has_no_room_for_a_round(room):
    post_office, box, queue, _ = office([[Message(cuts_message([make_cut(1)]))]])
    queue.room = room
    assert post_office.problems() == []
    assert not post_office.round()
    assert not post_office.round()
    assert len(box.batches) == 1
    [problem] = post_office.problems()
    assert (problem.what, problem.since_us, post_office.pauses) == ("ingest-queue", 7, 1)
    queue.room = (2 << 20, 256)
    assert post_office.round()
    assert post_office.problems() == []


def test_a_damaged_message_is_survived_and_no_trouble():
    post_office, _, _, _ = office([MessageDamaged("lane", 1), [Message(cuts_message([make_cut(1)]))]])
    assert not post_office.round()
    assert post_office.round()
    assert post_office.problems() == []


def test_a_damaged_mailbox_is_said_once_and_shown(monkeypatch):
    said = []
    errors = SimpleNamespace(error=lambda event, **_: said.append(event))
    monkeypatch.setattr(post_office_module, "log", errors)
    post_office, _, _, _ = office(
        [*[MailboxCorrupt("lane", "x")] * 3, [Message(cuts_message([make_cut(1)]))]]
    )
    for _ in range(3):
        assert not post_office.round()
    assert said == ["mailbox-damaged"]
    ((what, since_us, reason),) = [(item.what, item.since_us, item.reason) for item in post_office.problems()]
    assert (what, since_us) == ("mailbox", 7)
    assert "lane is damaged: x" in reason
    assert post_office.round()


def test_run_greets_pairs_only_and_drains_after_the_stop():
    stop = Stop()
    stop.set()
    post_office, _, _, log = office([[Message(cuts_message([make_cut(1)]))]])
    post_office.run(stop)
    assert log == [("pair-0", "WATERMARKS"), ("queue", 1), ("pair-0", "DURABLE")]


def test_gap_of_a_wrong_type_counts_as_none():
    raw = cuts.encode(dataclasses.replace(make_cut(5), extra={"gap": "many"}))
    message = frame.encode(Kind.CUTS, {"n": 1, "recv_us": [1], "offset_us": [0], "live": [False]}, raw)
    intake = new_intake()
    assert intake.absorb([Message(message)]).records == []
    assert intake.counts == {"hole": 1}


NEW, DUPLICATE, HOLE = CutAdmission.NEW, CutAdmission.DUPLICATE, CutAdmission.HOLE


def test_in_order_again_and_beyond():
    high = HighWater([("g", 7, 3)])
    assert high.admit("g", 7, 3) is DUPLICATE
    assert high.admit("g", 7, 5) is HOLE
    assert high.admit("g", 7, 4) is NEW
    assert high.admit("g", 7, 5) is NEW
    assert high.of("g", 7) == 5


def test_an_unknown_epoch_begins_at_one():
    high = HighWater()
    assert high.admit("g", 7, 2) is HOLE, "the first may have been refused by a full mailbox"
    assert high.admit("g", 7, 1) is NEW
    assert high.of("g", 8) == high.of("h", 7) == 0


def test_gap_bridges_exactly_what_was_dropped():
    high = HighWater([("g", 7, 3)])
    assert high.admit("g", 7, 8, gap=3) is HOLE
    assert high.admit("g", 7, 8, gap=4) is NEW
    assert high.of("g", 7) == 8


def test_spool_raises_the_floor_and_never_lowers_it():
    header = {"gw": "g", "state": "up", "spool": [[7, 500, 520], [9, 1, 3]]}
    assert spool_floors(header) == [("g", 7, 499)]
    high = HighWater([("g", 7, 510)])
    assert not high.raise_to("g", 7, 499)
    assert high.of("g", 7) == 510


def test_malformed_spools_are_ignored():
    for spool in (None, 3, [[7]], [["7", 5, 6]], [[7, True, 6]], [[7, 1 << 63, 6]], [[-7, 5, 6]]):
        assert spool_floors({"gw": "g", "state": "up", "spool": spool}) == []
    assert spool_floors({"gw": "g", "state": "lost", "spool": [[7, 500, 520]]}) == []


def test_rows_name_one_gateway_or_all():
    high = HighWater([("g", 7, 3), ("h", 1, 2), ("g", 9, 4)])
    assert sorted(high.rows()) == [["g", 7, 3], ["g", 9, 4], ["h", 1, 2]]
    assert high.rows("g") == [["g", 7, 3], ["g", 9, 4]]
    assert high.rows("unknown") == []


@given(st.lists(st.integers(1, 12), max_size=60))
def test_whatever_the_order_each_cut_is_new_once_and_in_sequence(order):
    high = HighWater()
    admitted = [seq for seq in order if high.admit("g", 1, seq) is NEW]
    assert admitted == list(range(1, len(admitted) + 1))


@pytest.mark.parametrize("changed", [{"gw": 5}, {"state": None}, {"name": ["n"]}, {"exports": "all"}])
def test_a_malformed_gateway_report_is_counted_and_not_stored(changed):
    header = {**frame.decode(gateway_message()).header, **changed}
    intake = new_intake()
    absorbed = intake.absorb([Message(frame.encode(Kind.GATEWAY, header))])
    assert (absorbed.records, absorbed.notices) == ([], [])
    assert intake.counts == {"malformed": 1}


def test_a_report_of_lost_cuts_keeps_all_else_of_what_the_pair_said():
    intake = IngestIntake(4711, HighWater([(gateway(1), EPOCH, 100)]))
    message = gateway_message(spool=[[EPOCH, 152, 160]])
    [kept, _event] = intake.absorb([Message(message)]).records
    assert frame.decode(kept).header == {**frame.decode(message).header, "lost_cuts": 51}

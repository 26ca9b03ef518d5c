"""The ingest transaction on both databases: exact sums, once each, whatever happens."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from sqlalchemy import text

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.stored import StoredGateway
from sla_server.db import upsert as upserts
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.ingest import transaction
from sla_server.db.ingest.intake import CorrectedWatermark
from sla_server.db.ingest.transaction import IngestStore
from sla_server.services.gateway_states import GatewayStates
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


def test_sums_over_many_transactions_slots_and_gateways(rig):
    items = [
        make_cut(
            seq, gw=gateway(1 + seq % 3), epoch=EPOCH + seq % 2, start_us=T0 + seq * 7_000_000, gap=seq % 4
        )
        for seq in range(1, 40)
    ]
    for start in range(0, len(items), 7):
        rig.feed(cuts_message(items[start : start + 7], offset_us=-1_500_000))
    assert_database_holds(rig.reader, items, offset_us=-1_500_000)


def test_histograms_of_one_slot_add_up_over_transactions(rig):
    items = [make_cut(seq) for seq in range(1, 6)]
    for item in items:
        rig.feed(cuts_message([item]))
    assert_database_holds(rig.reader, items)


def test_what_completions_hide_adds_up_over_transactions(rig):
    """OVERDUE, FAILED and OUTSTANDING, also beside cuts of an agent that sends none of them."""
    items = [make_cut(seq, start_us=T0 + seq * 7_000_000, hidden=seq % 3 > 0) for seq in range(1, 24)]
    for start in range(0, len(items), 4):
        rig.feed(cuts_message(items[start : start + 4]))
    assert_database_holds(rig.reader, items)


def test_an_outage_is_found_at_the_next_start(rig):
    at_us = rig.clock.unix_us()
    transaction.mark_alive(rig.engine, at_us)
    rig.clock.advance(transaction.OUTAGE_US / 1e6)
    rig.store.prepare()
    assert rig.reader.outages(0, 1 << 62) == [], "agents keep their cuts for so long"
    rig.clock.advance(300)
    rig.store.prepare()
    from_us = at_us + transaction.OUTAGE_US
    expected = [{"from_us": from_us, "to_us": from_us + 300_000_000}]
    assert rig.reader.outages(from_us + 1, from_us + 2) == rig.reader.outages(0, 1 << 62) == expected
    assert rig.reader.outages(0, from_us) == rig.reader.outages(from_us + 300_000_000, 1 << 62) == []


def test_an_idle_cut_counts_for_coverage_and_progress_only(rig):
    item = make_cut(1, streams=())
    rig.feed(cuts_message([item]))
    assert rig.reader.slice_inputs([], [gateway(1)], 0, 1 << 62).coverage == [
        {
            "slot_us": T0,
            "gateway_id": gateway(1),
            "covered_us": 1_000_000,
            "cuts": 1,
            "gap_cuts": 0,
            "gap_ios": 0,
        }
    ]
    assert rig.reader.progress() == {gateway(1): T0 + 1_000_000}
    assert rig.reader.totals()["streams"] == 0


def test_progress_and_last_cut_never_go_back(rig):
    rig.feed(cuts_message([make_cut(1, start_us=T0 + 50_000_000)]))
    rig.feed(cuts_message([make_cut(2, start_us=T0)]))
    assert rig.reader.progress() == {gateway(1): T0 + 51_000_000}
    assert rig.reader.gateways()[0]["last_cut_us"] == T0 + 51_000_000


def test_names_may_come_after_the_first_cut(rig):
    rig.feed(cuts_message([make_cut(1)]))
    assert {row["volume"] for row in rig.reader.streams()} == {""}
    rig.feed(streams_message(), cuts_message([make_cut(2)]))
    assert [row["volume"] for row in rig.reader.streams()] == ["vol-1", "vol-2"]
    assert rig.reader.streams("vol-1")[0]["cuts"] == 2


def test_a_gateway_has_so_many_streams_without_names(rig, monkeypatch):
    monkeypatch.setattr(transaction, "MAX_NAMELESS", 3)
    rig.feed(cuts_message([make_cut(1)]))
    rig.feed(cuts_message([make_cut(2, streams=(1, 3, 4))]), cuts_message([make_cut(3, streams=(4, 5))]))
    other = make_cut(1, gw=gateway(2))
    rig.feed(cuts_message([other]))
    kept = {stream(1), stream(2), stream(3), stream(1, gateway(2)), stream(2, gateway(2))}
    with rig.engine.connect() as connection:
        for table in ("streams", "rollups", "rollup_hours", "rollup_missed"):
            found = connection.execute(text(f"SELECT DISTINCT stream_id FROM {table}"))
            assert set(found.scalars()) == kept, table
        events = "SELECT count(*) FROM events WHERE kind = 'gateway-over-limit'"
        assert connection.execute(text(events)).scalar_one() == 1
    rig.feed(streams_message((4,)), cuts_message([make_cut(4, streams=(4,))]))
    assert rig.reader.streams("vol-4")[0]["cuts"] == 1, "announced, so it counts from now on"


def test_a_batch_that_comes_again_has_no_effect(rig):
    items = [make_cut(1), make_cut(2)]
    rig.feed(
        cuts_message(items[:1]), record_message([("events", {"event_id": "e"})]), cuts_message(items[1:])
    )
    reader = rig.queue.reader(0)
    records = reader.read(1 << 20)
    reader.close()
    assert [record.queue_seq for record in records] == [1, 2, 3]
    rig.store.apply(records, 0, 1)
    assert_database_holds(rig.reader, items)


def test_a_commit_whose_answer_was_lost_is_not_applied_twice(rig, monkeypatch):
    """The connection breaks after the server has committed: the writer must not believe it failed."""
    commit = rig.store.commit

    def answer_lost(window, oldest):
        commit(window, oldest)
        monkeypatch.setattr(rig.store, "commit", commit)
        raise DatabaseUnavailable("db", "connection lost during COMMIT")

    monkeypatch.setattr(rig.store, "commit", answer_lost)
    with pytest.raises(DatabaseUnavailable):
        rig.feed(cuts_message([make_cut(1)]))
    rig.feed(cuts_message([make_cut(2)]))
    rig.drain()
    assert_database_holds(rig.reader, [make_cut(1), make_cut(2)])


def test_a_failed_transaction_leaves_nothing_and_is_repeated(rig, monkeypatch):
    """Break in the middle: after rollups were written, before the cursor moves."""
    with monkeypatch.context() as patch:
        patch.setattr(rig.store, "_raise", _raise_unavailable)
        with pytest.raises(DatabaseUnavailable):
            rig.feed(cuts_message([make_cut(1)]))
    assert rig.reader.slice_inputs([stream(1)], [], 0, 1 << 62).rows == []
    rig.drain()
    assert_database_holds(rig.reader, [make_cut(1)])


def _raise_unavailable(*_args):
    raise DatabaseUnavailable("db", "gone")


def test_a_database_that_lost_commits_gets_them_again(rig):
    """A standby that lagged takes over: cursor and sums are old, the queue still has the records."""
    items = [make_cut(seq) for seq in range(1, 4)]
    rig.feed(cuts_message(items[:1]))
    snapshot = _dump(rig)
    rig.feed(cuts_message(items[1:2]))
    _restore(rig, snapshot)
    rig.feed(cuts_message(items[2:]))
    rig.drain()
    assert_database_holds(rig.reader, items)


def test_a_database_that_lost_commits_takes_rows_again(rig):
    """The cursor of rows is behind, too: what follows is not read again and again for ever."""
    items = [make_cut(seq) for seq in range(1, 4)]
    rig.feed(cuts_message(items[:1]))
    snapshot = _dump(rig)
    rig.feed(record_message([("events", {"event_id": "a"})]), cuts_message(items[1:2]))
    _restore(rig, snapshot)
    rig.queue.append_many([record_message([("events", {"event_id": "b"})])])
    rig.queue.append_many([cuts_message(items[2:])])
    for _ in range(10):
        rig.writer.step()
    assert rig.store.cursors()[0] == 5
    assert_database_holds(rig.reader, items)
    assert {row["event_id"] for row in rig.reader.events()} == {"a", "b"}


STATISTICS = (
    "rollups",
    "rollup_missed",
    "rollup_hours",
    "coverage",
    "streams",
    "progress",
    "ingest_watermark",
    "consumed",
)


def _dump(rig):
    with rig.engine.begin() as connection:
        return {
            name: [dict(row) for row in connection.execute(text(f"SELECT * FROM {name}")).mappings()]
            for name in STATISTICS
        }


def _restore(rig, snapshot):
    from sla_server.db import schema

    with rig.engine.begin() as connection:
        for name, rows in snapshot.items():
            table = schema.metadata.tables[name]
            connection.execute(table.delete())
            if rows:
                connection.execute(table.insert(), rows)


def test_a_cut_that_cannot_be_true_is_reported_and_the_others_count(rig):
    bad = make_cut(2)
    counters = bad.counters.copy()
    counters[COL["reads"]] = 1 << 60
    good = [make_cut(1), make_cut(3)]
    rig.feed(cuts_message([good[0], dataclasses.replace(bad, counters=counters), good[1]]))
    [event] = [row for row in rig.reader.events() if row["kind"] == "data-refused"]
    assert event["subject"] == gateway(1)
    assert "cut 2" in event["text"]
    assert rig.reader.watermarks() == [(gateway(1), EPOCH, 3)]
    assert rig.reader.totals()["reads"] == sum(int(item.column("reads").sum()) for item in good)


def test_a_record_the_database_refuses_is_put_aside_and_the_others_are_kept(rig, monkeypatch):
    """Something passes our checks and is refused all the same: ingest must go on, and say so."""
    real = upserts.upsert

    def refusing(connection, table, rows, **how):
        if any(row.get("event_id") == "poison" for row in rows):
            connection.execute(text("INSERT INTO meta (key) VALUES (NULL)"))
        return real(connection, table, rows, **how)

    monkeypatch.setattr("sla_server.db.ingest.records.upsert", refusing)
    poison = record_message([("events", {"event_id": "poison"})])
    rig.queue.append_many([cuts_message([make_cut(1)]), poison, cuts_message([make_cut(2)])])
    rig.drain()
    assert_database_holds(rig.reader, [make_cut(1), make_cut(2)])
    [event] = [row for row in rig.reader.events() if row["kind"] == "data-refused"]
    assert (event["severity"], event["subject"]) == ("critical", "ingest")
    assert [path.read_bytes() for path in rig.refused_dir.iterdir()] == [poison]
    assert rig.store.cursors()[0] == 3


def test_another_rollup_interval_is_refused(rig):
    other = IngestStore(rig.engine, rig.queue.queue_id, 30, rig.clock)
    with pytest.raises(ConfigError, match="made with 60"):
        other.prepare()


def test_a_new_queue_starts_at_its_own_cursor(database):
    first = Rig(database.config, database.data_dir)
    first.feed(cuts_message([make_cut(1)]), cuts_message([make_cut(2)]))
    first.close()
    fresh = database.config.model_copy(update={"queue_dir": database.data_dir / "other-queue"})
    second = Rig(fresh, database.data_dir)
    second.feed(cuts_message([make_cut(3)]))
    assert_database_holds(second.reader, [make_cut(seq) for seq in (1, 2, 3)])
    second.close()


def state_events(rig):
    """All events but those of new volumes and clients."""
    return [row for row in rig.reader.events() if not row["kind"].endswith("-new")]


def test_what_services_raise_at_once_of_a_state_is_the_event_that_is_stored(rig):
    up, lost = gateway_message(at_us=T0), gateway_message("lost", at_us=T0 + 3, reason="silent")
    messages = [
        up,
        gateway_message("stalled", at_us=T0 + 1),
        gateway_message("recovered", at_us=T0 + 2),
        lost,
        gateway_message(at_us=T0 + 4, ep=EPOCH + 1),
        gateway_message("lost", at_us=T0 + 5, ep=EPOCH + 1, planned=True),
        gateway_message("detached", at_us=T0 + 6, ep=EPOCH + 1),
    ]
    rig.feed(*messages)
    stored = {row["event_id"]: row for row in state_events(rig)}
    states = GatewayStates()
    raised = [states.event(StoredGateway.read(frame.decode_own(message).header)) for message in messages]
    found = [row for row in raised if row is not None]
    kinds = ["gateway-stalled", "gateway-recovered", "gateway-lost", "gateway-up", "gateway-stopped"]
    assert [row["kind"] for row in found] == kinds
    for row in found:
        assert {key: stored[row["event_id"]][key] for key in row} == row


def test_a_session_that_the_server_ended_itself_is_stored_and_makes_no_event(rig):
    rig.feed(gateway_message(at_us=T0), gateway_message("detached", at_us=T0 + 1, reason="restart"))
    [row] = rig.reader.gateways()
    assert (row["state"], row["reason"]) == ("detached", "restart")
    rig.feed(gateway_message(at_us=T0 + 2))
    assert [row["kind"] for row in state_events(rig)] == ["gateway-up"]
    rig.feed(gateway_message("detached", at_us=T0 + 3), gateway_message(at_us=T0 + 4, ep=EPOCH + 1))
    assert [row["kind"] for row in state_events(rig)] == ["gateway-up"] * 2  # the agent, too, was restarted


@pytest.mark.parametrize("at_once", [True, False])
def test_a_gateway_that_did_not_answer_when_its_pair_stopped_is_back_with_an_event(rig, at_once):
    messages = [
        gateway_message(at_us=T0),
        gateway_message("stalled", at_us=T0 + 1),
        gateway_message("detached", at_us=T0 + 2, reason="restart"),
    ]
    for part in [messages] if at_once else [[message] for message in messages]:
        rig.feed(*part)
    [row] = rig.reader.gateways()
    assert (row["state"], row["reason"]) == ("stalled", "restart")
    rig.feed(gateway_message(at_us=T0 + 3))
    found = sorted((row["at_us"], row["kind"]) for row in state_events(rig))
    assert [kind for _, kind in found] == ["gateway-up", "gateway-stalled", "gateway-up"]


@pytest.mark.parametrize("at_once", [True, False])
def test_the_end_of_a_session_taken_after_its_successor_is_not_stored(rig, at_once):
    ended = [gateway_message(state, at_us=T0 + 1, reason="moved") for state in ("detached", "lost")]
    if at_once:
        rig.feed(gateway_message(at_us=T0), gateway_message(at_us=T0 + 5), *ended)
    else:
        rig.feed(gateway_message(at_us=T0), gateway_message(at_us=T0 + 5))
        rig.feed(*ended)
    [row] = rig.reader.gateways()
    assert (row["state"], row["last_seen_us"]) == ("up", T0 + 5)
    assert [row["kind"] for row in state_events(rig)] == ["gateway-up"]
    rig.feed(gateway_message("lost", at_us=T0 - 3_600_000_000))  # the clock has gone back an hour
    assert rig.reader.gateways()[0]["state"] == "lost"


def test_a_gateway_that_services_missed_is_stored_as_lost_unless_it_was_seen_since(rig: Rig) -> None:
    def missed(last_seen_us: int) -> bytes:
        row = {"gateway_id": gateway(1), "state": "lost", "reason": "away", "last_seen_us": last_seen_us}
        return record_message([("gateways", row)])

    rig.feed(gateway_message(at_us=T0), missed(T0 - 1))
    assert rig.reader.gateways()[0]["state"] == "up"
    rig.feed(missed(T0))
    (row,) = rig.reader.gateways()
    assert (row["name"], row["state"], row["reason"], row["last_seen_us"]) == ("gw-1", "lost", "away", T0)
    rig.feed(gateway_message(at_us=T0 + 1))
    assert rig.reader.gateways()[0]["state"] == "up"
    assert [event["kind"] for event in rig.reader.events()].count("gateway-up") == 2


def test_gateway_events_once_a_change(rig):
    up = gateway_message(at_us=T0)
    rig.feed(
        up, up, gateway_message(at_us=T0 + 5), gateway_message("stalled", at_us=T0 + 10, reason="no reply")
    )
    rig.feed(gateway_message("stalled", at_us=T0 + 11), gateway_message("recovered", at_us=T0 + 20))
    rig.feed(gateway_message("lost", at_us=T0 + 30), gateway_message(at_us=T0 + 40, ep=EPOCH + 1))
    rig.feed(gateway_message(at_us=T0 + 50, ep=EPOCH + 2))
    kinds = [row["kind"].removeprefix("gateway-") for row in reversed(state_events(rig))]
    assert kinds == ["up", "stalled", "recovered", "lost", "up", "up"]
    stalled = state_events(rig)[-2]
    assert stalled["text"] == "gateway gw-1 is stalled: no reply"
    assert stalled["details"]["gateway_id"] == gateway(1)
    [row] = rig.reader.gateways()
    assert (row["state"], row["epoch"], row["first_seen_us"], row["last_seen_us"]) == (
        "up",
        str(EPOCH + 2),
        T0,
        T0 + 50,
    )


def test_a_gateway_whose_agent_said_goodbye_has_stopped_and_is_not_told_as_lost(rig):
    rig.feed(gateway_message(), gateway_message("lost", at_us=T0 + 1, planned=True, reason="SIGTERM"))
    newest = state_events(rig)[0]
    assert (newest["kind"], newest["severity"]) == ("gateway-stopped", "info")
    assert rig.reader.gateways()[0]["state"] == "lost"


def test_a_refused_gateway_makes_an_event_an_hour_and_no_row(rig):
    rig.feed(gateway_message(), gateway_message("refused", reason="bad token", at_us=T0 + 1))
    rig.feed(gateway_message("refused", reason="bad token", at_us=T0 + 2))
    assert [row["kind"] for row in state_events(rig)] == ["gateway-refused", "gateway-up"]
    assert [row["state"] for row in rig.reader.gateways()] == ["up"]


def test_exports_become_volumes_and_backends(rig):
    rig.feed(gateway_message(), streams_message((3,)))
    assert [(row["volume"], row["backend"], row["size_bytes"]) for row in rig.reader.volumes()] == [
        ("vol-1", "disk-1", 1 << 30),
        ("vol-2", "disk-1", 1 << 30),
        ("vol-3", "disk-1", 0),
    ]
    assert [row["backend"] for row in rig.reader.backends()] == ["disk-1"]
    assert rig.reader.backends()[0]["capacity_cost_per_s"] is None


def test_a_wrong_clock_is_told_once_an_epoch_by_the_gateways_name(rig):
    rig.feed(gateway_message())
    for seq, offset_us in ((1, 1_900_000), (2, 2_100_000), (3, 2_200_000)):
        rig.feed(cuts_message([make_cut(seq)], offset_us=offset_us))
    rig.feed(cuts_message([make_cut(1, epoch=7)], offset_us=-3_000_000))
    skews = [row for row in rig.reader.events() if row["kind"] == "clock-skew"]
    assert sorted(row["details"]["offset_us"] for row in skews) == [-3_000_000, 2_100_000]
    assert any("gateway gw-1 is +3.0 s off" in row["text"] for row in skews), (
        "an offset of -3 s means that the clock is ahead"
    )
    assert {(row["subject"], row["details"]["gateway_id"]) for row in skews} == {("gw-1", gateway(1))}


def test_a_wrong_clock_of_a_gateway_not_announced_yet_is_told_by_its_id(rig):
    rig.feed(cuts_message([make_cut(1)], offset_us=2_100_000))
    [row] = [row for row in rig.reader.events() if row["kind"] == "clock-skew"]
    assert row["subject"] == gateway(1)


def test_no_gateway_got_further_than_its_cuts_receipt(rig):
    """An agent's clock that jumps ahead is corrected from the next answer on; this cut came before."""
    item = make_cut(1, start_us=T0 + 180_000_000)
    header = {"pair": 0, "n": 1, "recv_us": [T0 + 1_000_000], "offset_us": [0], "live": [False]}
    rig.feed(frame.encode(Kind.CUTS, header, b"".join([cuts.encode(item)])))
    assert rig.reader.progress() == {gateway(1): T0 + 1_000_000}


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_clock_ahead_wrote_is_taken_back_when_it_is_right_again(database, restarted):
    hour_us = 3600 * 1_000_000
    clock = FakeClock(unix_us=T0 + hour_us)
    rig = Rig(database.config, database.data_dir, clock=clock)
    rig.feed(gateway_message(), streams_message(), cuts_message([make_cut(1, start_us=T0 + hour_us)]))
    assert rig.reader.progress()[gateway(1)] > T0 + hour_us
    clock.step_wall(-3600)
    clock.advance(1)
    if restarted:
        rig.close()
        rig = Rig(database.config, database.data_dir, clock=clock)
        assert rig.reader.progress() == {gateway(1): T0 + 1_000_000 - 24 * hour_us}
    rig.feed(cuts_message([make_cut(2, start_us=T0)]))
    assert rig.reader.progress() == {gateway(1): T0 + 1_000_000}
    assert {row["first_seen_us"] for row in rig.reader.streams()} == {T0 + 1_000_000}
    assert [row["last_cut_us"] for row in rig.reader.gateways()] == [T0 + 1_000_000]
    [event] = [row for row in rig.reader.events() if row["kind"] == "clock-stepped"]
    assert event["text"].startswith("the database has times up to 3600 s after the server's own clock")
    rig.close()


def test_lost_cuts_count_as_dropped_and_mended_watermarks_are_stored(rig):
    rig.feed(gateway_message(dropped=3, lost_cuts=51), cuts_message([make_cut(1)]))
    assert [row["dropped_cuts"] for row in rig.reader.gateways()] == [54]
    rig.store.correct_watermarks([CorrectedWatermark(gateway(1), EPOCH, 1, 7)])
    assert rig.reader.watermarks() == [(gateway(1), EPOCH, 7)]
    [event] = [row for row in rig.reader.events() if row["kind"] == "watermark-mended"]
    assert "had cut 1 as the newest" in event["text"]


def test_the_spools_floor_is_stored(rig):
    rig.feed(gateway_message(spool=[[EPOCH, 500, 520]]))
    assert rig.reader.watermarks() == [(gateway(1), EPOCH, 499)]
    rig.feed(cuts_message([make_cut(500)]), gateway_message(spool=[[EPOCH, 300, 520]]))
    assert rig.reader.watermarks() == [(gateway(1), EPOCH, 500)]


def test_hostile_text_is_stored_clean(rig):
    rig.feed(
        gateway_message(name="a\0b", reason="\0"),
        record_message([("events", {"event_id": "e", "text": "x\0y"})]),
    )
    assert rig.reader.gateways()[0]["name"] == "a\ufffdb"
    assert {row["text"] for row in state_events(rig)} == {"x\ufffdy", "gateway a\ufffdb is up: \ufffd"}


def test_the_largest_values_fit(rig):
    item = make_cut(1, streams=(1,))
    counters = item.counters.copy()
    counters[COL["stream_id"]] = (1 << 63) - 1
    for name in ("reads", "lat_sum_us", "cost_milli"):
        counters[COL[name]] = 1 << 47
    item = dataclasses.replace(item, counters=counters, epoch=(1 << 64) - 1)
    hist = np.array([(0, 5, (1 << 32) - 1)], dtype=item.hist.dtype)
    items = [dataclasses.replace(item, hist=hist, seq=seq) for seq in (1, 2, 3)]
    for each in items:
        rig.feed(cuts_message([each]))
    assert_database_holds(rig.reader, items)


def test_new_volumes_and_clients_are_events_once(rig):
    rig.feed(gateway_message(at_us=T0), gateway_message(at_us=T0 + 5), streams_message((1, 2)))
    rig.feed(streams_message((1, 2)), streams_message((2, 3)), gateway_message(gw=gateway(2), name="gw-2"))
    new = [row for row in rig.reader.events() if row["kind"].endswith("-new")]
    assert {(row["kind"], row["severity"], row["subject"], row["text"]) for row in new} == {
        ("volume-new", "info", "gw-1", "gateway gw-1: new volumes: vol-1, vol-2"),
        ("client-new", "info", "gw-1", "gateway gw-1: new clients: host-a on vol-1, host-a on vol-2"),
        ("client-new", "info", "gw-1", "gateway gw-1: new clients: host-a on vol-3"),
    }
    assert len(new) == 3


def test_many_new_volumes_are_one_event(rig):
    exports = [{"volume": f"v-{number:03}", "backend": "b", "size_bytes": 1} for number in range(300)]
    rig.feed(gateway_message(exports=exports))
    [event] = [row for row in rig.reader.events() if row["kind"] == "volume-new"]
    assert event["text"] == "gateway gw-1: new volumes: v-000, v-001, v-002, v-003, v-004 and 295 more"
    assert event["details"]["count"] == 300
    assert len(event["details"]["new"]) == 100
    assert len(rig.reader.volumes()) == 300


def on(backend, **header):
    export = {"volume": "vol-1", "backend": backend, "size_bytes": 1 << 30, "read_only": False}
    return gateway_message(exports=[export], **header)


def backend_of(rig):
    [row] = [row for row in rig.reader.volumes() if row["volume"] == "vol-1"]
    return row["backend"]


def test_a_second_gateway_does_not_move_a_volume_that_is_used(rig):
    rig.feed(on("disk-1"), streams_message((1,)))
    other = {"gw": gateway(2), "name": "gw-2"}
    for _registered in range(2):
        rig.feed(on("other-pool", **other), on("disk-1"))
        assert backend_of(rig) == "disk-1"
    [event] = [row for row in rig.reader.events() if row["kind"] == "volume-conflict"]
    assert event["severity"] == "warning"
    assert event["text"].startswith(
        "gateway gw-2 exports volume vol-1 on backend other-pool, but gw-1 uses it on disk-1, which is kept"
    )
    assert not [row for row in rig.reader.events() if row["kind"] == "volume-moved"]


def test_a_volume_moves_with_its_gateway_or_when_that_is_lost(rig):
    rig.feed(on("disk-1"), streams_message((1,)))
    rig.feed(on("disk-2", ep=EPOCH + 1))
    assert backend_of(rig) == "disk-2"
    rig.feed(on("disk-1"), gateway_message("lost"), on("disk-3", gw=gateway(2), name="gw-2"))
    assert backend_of(rig) == "disk-3"
    texts = {row["text"] for row in rig.reader.events() if row["kind"] == "volume-moved"}
    assert "volume vol-1 has moved from backend disk-1 to disk-2, says gateway gw-1" in texts
    assert "volume vol-1 has moved from backend disk-1 to disk-3, says gateway gw-2" in texts


def test_labels_of_a_volume_are_those_its_gateway_announced_last(rig):
    for labels in ({"tier": "gold"}, {}, {"tier": "silver", "env": "prod"}):
        export = {"volume": "vol-1", "backend": "b", "size_bytes": 1, "labels": labels}
        rig.feed(gateway_message(exports=[export if labels else {**export, "labels": None}]))
        assert (rig.reader.volumes()[0]["labels"] or {}) == labels
    assert rig.reader.pages.label_rows()[0] == [{"volume": "vol-1", "labels": labels}]

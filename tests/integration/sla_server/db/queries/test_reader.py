"""Reading on both databases: plain values, right rows, pages, and nothing written."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.wire import histogram
from sla_server.db import schema
from sla_server.db.archive.manifest import MOVED_KEY, raise_boundary
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import DatabaseUnavailable
from sla_server.db.policies import open_policies
from sla_server.db.queries import sizes
from sla_server.db.queries.history import HOUR_US, percentiles_upper_us
from sla_server.db.queries.reader import open_reader
from tests.support.samples import (
    EPOCH,
    MINUTE_US,
    T0,
    Model,
    cuts_message,
    gateway,
    gateway_message,
    make_cut,
    record_message,
    stream,
    streams_message,
)


def record(rig, *rows):
    rig.feed(record_message(rows))


def plain(value):
    if isinstance(value, dict):
        return all(plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(plain(item) for item in value)
    return value is None or type(value) in (int, float, str, bool, bytes, np.ndarray)


@pytest.fixture
def filled(rig):
    items = [make_cut(seq, start_us=T0 + seq * 25_000_000) for seq in range(1, 9)]
    rig.feed(gateway_message(), streams_message(), *(cuts_message([item]) for item in items))
    rig.items = items
    return rig


def test_every_answer_is_plain(filled):
    record(filled, ("events", {"event_id": "e", "details": {"a": [1]}}), ("processes", {"name": "p"}))
    reader = filled.reader
    assert reader.stream_count() == len(reader.streams()) > 0
    answers = [
        reader.gateways(),
        reader.backends(),
        reader.streams(),
        reader.volumes(),
        reader.totals(),
        reader.progress(),
        reader.watermarks(),
        reader.processes(),
        reader.manifest(),
        reader.agreements(),
        reader.agreement("x"),
        reader.slices("a", "b", 0, 1),
        reader.slice_counts("a", "b", 0, 1),
        reader.slice_sums("a", "b", 0, 1),
        reader.agreement_versions("a"),
        reader.documents(),
        reader.episodes(),
        reader.throttles(),
        reader.events(),
        reader.audit(),
        reader.policies(),
        reader.policy_caps(1),
        reader.rollup_history("vol-1", 0, 1 << 62),
        reader.hours(0, 1 << 62),
        reader.missed([stream(1)], 0, 1 << 62).values(),
        reader.meta("rollup_s"),
    ]
    for answer in answers:
        assert plain(list(answer) if type(answer).__name__ == "dict_values" else answer), answer


def test_volumes_are_exact_sums_over_their_streams(filled):
    other = [make_cut(seq, gw=gateway(2), streams=(1,)) for seq in (1, 2)]
    filled.feed(streams_message((1,), gateway(2)), cuts_message(other))
    [first, second] = filled.reader.volumes()
    model = Model.of([*filled.items, *other])
    mine = {stream(1), stream(1, gateway(2))}
    for name in ("reads", "writes", "read_bytes", "write_bytes", "errors"):
        assert first[name] == sum(sums[name] for (_, sid), sums in model.slots.items() if sid in mine)
    assert (first["streams"], first["cuts"], second["cuts"]) == (2, 10, 8)
    assert first["last_us"] == T0 + 8 * 25_000_000 + 1_000_000
    totals = filled.reader.totals()
    assert totals["reads"] == first["reads"] + second["reads"] == model.total("reads")
    assert (totals["gateways"], totals["volumes"], totals["streams"]) == (2, 2, 3)


def test_sizes_are_those_of_every_table_and_counting_is_bounded(filled, monkeypatch):
    record(filled, *(("events", {"event_id": f"e{n}"}) for n in range(7)))
    monkeypatch.setattr(sizes, "ROWS_MAX", 5)
    found = filled.reader.sizes()
    tables = {row["table"]: row for row in found["tables"]}
    assert tables.keys() == schema.metadata.tables.keys()
    assert (tables["events"]["rows"], tables["events"]["has_more"]) == (5, True)
    assert (tables["volumes"]["rows"], tables["volumes"]["has_more"]) == (2, False)
    assert found["bytes"] > 0
    assert found["kind"] in ("postgresql", "sqlite")
    in_bytes = {type(row["bytes"]) for row in found["tables"]}
    assert in_bytes == ({int} if found["kind"] == "postgresql" else {type(None)})
    if found["kind"] == "postgresql":
        assert tables["rollups"]["bytes"] > 0, "with its partitions"


def test_a_volume_without_io_is_listed_with_zeros(rig):
    rig.feed(gateway_message())
    assert {(row["volume"], row["reads"], row["last_us"]) for row in rig.reader.volumes()} == {
        ("vol-1", 0, None),
        ("vol-2", 0, None),
    }


def test_slice_inputs_are_limited_to_the_range_and_the_streams(filled):
    inputs = filled.reader.slice_inputs([stream(1)], [gateway(1), gateway(9)], T0, T0 + MINUTE_US)
    assert [(row["slot_us"], row["stream_id"]) for row in inputs.rows] == [(T0, stream(1))]
    assert {row["slot_us"] for row in inputs.missed} == {T0}
    assert [(row["slot_us"], row["cuts"]) for row in inputs.coverage] == [(T0, 2)]


def test_missed_sums_over_slots(filled):
    model = Model.of(filled.items)
    expected: dict = {}
    for (_, sid, io, threshold), (counted, missed, *_) in model.missed.items():
        if sid == stream(1):
            before = expected.get((io, threshold), (0, 0))
            expected[io, threshold] = (before[0] + counted, before[1] + missed)
    assert filled.reader.missed([stream(1)], 0, 1 << 62) == expected


def test_many_streams_do_not_break_the_query(filled):
    many = [stream(1), *range(5_000)]
    assert len(filled.reader.slice_inputs(many, [], T0, T0 + MINUTE_US).rows) == 1


def test_history_of_a_volume(filled):
    rows = filled.reader.rollup_history("vol-1", T0, T0 + 3 * MINUTE_US)
    assert [row["slot_us"] for row in rows] == [T0, T0 + MINUTE_US, T0 + 2 * MINUTE_US]
    model = Model.of(filled.items)
    first = rows[0]
    hist = np.array(model.hists[T0, stream(1)])
    both = hist[:99] + hist[99:]
    assert first["p95_us"] == histogram.percentile_upper_us(both, 95)
    ios = model.slots[T0, stream(1)]["reads"] + model.slots[T0, stream(1)]["writes"]
    assert first["iops"] == pytest.approx(ios / 60)
    assert filled.reader.rollup_history("no-such", 0, 1 << 62) == []
    (client,) = {stream["client"] for stream in filled.reader.streams("vol-1")}
    assert filled.reader.rollup_history("vol-1", T0, T0 + 3 * MINUTE_US, client) == rows
    assert filled.reader.rollup_history("vol-1", T0, T0 + 3 * MINUTE_US, "another") == []


def by_stream(items, hour_us=None):
    """(time, stream) -> sums and 198 counts, by slot or by hour."""
    model = Model.of(items)
    sums: dict = {}
    for (slot, sid), row in model.slots.items():
        key = (slot // hour_us * hour_us if hour_us else slot, sid)
        entry = sums.setdefault(key, (dict.fromkeys(schema.COUNTERS, 0), np.zeros(99, dtype=np.int64)))
        for name in schema.COUNTERS:
            entry[0][name] += row[name]
        hist = np.array(model.hists[slot, sid])
        entry[1][:] += hist[:99] + hist[99:]
    return sums


@pytest.fixture
def shared(rig):
    """A volume that two gateways serve, and cuts of three hours."""
    items = [make_cut(n + 1, start_us=T0 + n * 11 * MINUTE_US) for n in range(15)]
    other = [make_cut(n + 1, gw=gateway(2), start_us=T0 + n * 13 * MINUTE_US) for n in range(12)]
    rig.feed(gateway_message(), streams_message(), streams_message((1,), gateway(2)))
    rig.feed(*(cuts_message([item]) for item in items + other))
    rig.items = items + other
    return rig


def assert_history(rows, items, coarse_us=None):
    mine = {stream(1), stream(1, gateway(2))}
    expected: dict = {}
    for (at, sid), (sums, hist) in by_stream(items, coarse_us).items():
        if sid in mine:
            entry = expected.setdefault(at, (dict.fromkeys(schema.COUNTERS, 0), np.zeros(99, dtype=np.int64)))
            for name in schema.COUNTERS:
                entry[0][name] += sums[name]
            entry[1][:] += hist
    assert [row["slot_us"] for row in rows] == sorted(expected)
    for row in rows:
        sums, hist = expected[row["slot_us"]]
        assert {name: row[name] for name in sums} == sums
        counts = histogram.to_coarse(hist) if coarse_us else hist
        for percentile in (50, 95, 99):
            assert row[f"p{percentile}_us"] == histogram.percentile_upper_us(counts, percentile)


def test_history_adds_up_the_streams_of_a_volume(shared):
    rows = shared.reader.rollup_history("vol-1", T0, T0 + 49 * HOUR_US)
    assert_history(rows, shared.items)
    assert {row["length_us"] for row in rows} == {MINUTE_US}


def test_long_history_comes_by_the_hour(shared):
    rows = shared.reader.rollup_history("vol-1", T0 - 30 * 24 * HOUR_US, T0 + 24 * HOUR_US)
    assert_history(rows, shared.items, HOUR_US)
    assert {row["length_us"] for row in rows} == {HOUR_US}


def test_history_before_the_move_to_files_comes_by_the_hour(shared):
    with shared.engine.begin() as connection:
        raise_boundary(connection, MOVED_KEY, T0 + HOUR_US)
    rows = shared.reader.rollup_history("vol-1", T0 + 30 * MINUTE_US, T0 + 2 * HOUR_US)
    assert [row["slot_us"] for row in rows] == [T0, T0 + HOUR_US], "also the hour in which the range begins"
    rows = shared.reader.rollup_history("vol-1", T0 + HOUR_US, T0 + 2 * HOUR_US)
    assert {row["length_us"] for row in rows} == {MINUTE_US}


def test_history_of_nothing_is_empty(shared):
    assert shared.reader.rollup_history("vol-1", T0 - HOUR_US, T0) == []
    assert shared.reader.rollup_history("vol-9", T0, T0 + HOUR_US) == []


@given(st.lists(st.lists(st.integers(0, 9), min_size=50, max_size=50), min_size=1, max_size=4))
def test_percentiles_of_many_equal_those_of_each(counts):
    table = np.array(counts, dtype=np.int64)
    for percentile in (50, 95, 99, 100):
        one_by_one = [histogram.percentile_upper_us(row, percentile) for row in table]
        assert percentiles_upper_us(table, percentile) == one_by_one


def test_slices_page_by_their_start(rig):
    record(rig, *(slice_row(n, "good", revision) for n in range(9) for revision in range(1 + n % 2)))
    first = rig.reader.slices("erp", "latency", 0, 1 << 62, limit=5)
    second = rig.reader.slices("erp", "latency", first[-1]["start_us"] + 1, 1 << 62, limit=5)
    assert [(row["start_us"] - T0) // MINUTE_US for row in first + second] == list(range(9))
    assert [row["revision"] for row in first + second] == [n % 2 for n in range(9)]
    assert rig.reader.slice_counts("erp", "latency", 0, 1 << 62) == {"good": 9}


def test_caps_page_by_volume_and_hour(database, rig):
    store = open_policies(database.config, database.data_dir)
    names = ("a:b", "c")
    caps = [{"volume": name, "hour_of_week": hour, "cost_per_s": 1.0} for name in names for hour in range(5)]
    version = store.publish(caps, job={}, report={}, published_by="test")
    store.close()
    seen, after = [], None
    while page := rig.reader.policy_caps(version, limit=3, after=after):
        seen += [(row["volume"], row["hour_of_week"]) for row in page]
        after = f"{page[-1]['volume']}:{page[-1]['hour_of_week']}"
    assert seen == [(cap["volume"], cap["hour_of_week"]) for cap in caps]
    with pytest.raises(ValueError, match="no cursor"):
        rig.reader.policy_caps(version, after="nonsense")


def test_hours_name_their_streams(filled):
    rows = filled.reader.hours(0, 1 << 62)
    assert {(row["volume"], row["client"], row["backend"]) for row in rows} == {
        ("vol-1", "host-a", "disk-1"),
        ("vol-2", "host-a", "disk-1"),
    }
    assert all(row["hist"].shape == (50,) for row in rows)
    assert filled.reader.hours(0, T0) == []


def test_agreements_in_force_are_the_newest_versions_that_have_not_ended(rig):
    base = {
        "document": "kind: SLA",
        "spec": {"a": 1},
        "priority": "gold",
        "applied_us": T0,
        "applied_by": "me",
    }
    record(
        rig,
        ("agreements", {"name": "erp", "version": 1, **base}),
        ("agreements", {"name": "erp", "version": 2, **base, "spec": {"a": 2}}),
        ("agreements", {"name": "old", "version": 1, **base, "ended_us": T0}),
    )
    [row] = rig.reader.agreements()
    assert (row["name"], row["version"], row["spec"]) == ("erp", 2, {"a": 2})
    assert len(rig.reader.agreements(in_force=False)) == 3
    for page in (1, 2, 3, 100):
        found = [(row["name"], row["version"], row["spec"]["a"]) for row in rig.reader.all_agreements(page)]
        assert found == [("erp", 1, 1), ("erp", 2, 2), ("old", 1, 1)]
    assert rig.reader.agreement("erp", 1)["spec"] == {"a": 1}
    assert rig.reader.agreement("old")["ended_us"] == T0
    assert rig.reader.agreement("none") is None
    record(rig, ("agreements", {"name": "erp", "version": 2, "ended_us": T0 + 1}))
    assert rig.reader.agreements() == [], "version 1 does not come back when version 2 ends"
    assert rig.reader.agreement("erp")["spec"] == {"a": 2}, "a partial row keeps the other columns"


def test_versions_of_one_agreement_come_without_their_texts(rig):
    rows = [{"name": "erp", "version": n, "spec": {"a": n}, "document": "x"} for n in (1, 2)]
    record(rig, *(("agreements", row) for row in [*rows, {**rows[0], "name": "old"}]))
    found = rig.reader.agreement_versions("erp")
    assert [(row["version"], row["spec"], "document" in row) for row in found] == [
        (1, {"a": 1}, False),
        (2, {"a": 2}, False),
    ]
    assert rig.reader.agreement_versions("none") == []


def test_documents_are_kept_by_kind_name_and_version(rig):
    row = {"kind": "Maintenance", "name": "move", "version": 1, "document": "x", "spec": {"a": 1}}
    rows = [row, {**row, "version": 2}, {**row, "kind": "Calendar"}]
    record(rig, *(("documents", each) for each in rows))
    record(rig, ("documents", {"kind": "Maintenance", "name": "move", "version": 1, "ended_us": T0 + 1}))
    assert [(row["kind"], row["version"]) for row in rig.reader.documents()] == [
        ("Calendar", 1),
        ("Maintenance", 1),
        ("Maintenance", 2),
    ]
    (held,) = rig.reader.documents("Maintenance", in_force=True)
    assert (held["version"], held["spec"], held["document"]) == (2, {"a": 1}, "x")


def slice_row(start, state, revision=1, **more):
    key = {"name": "erp", "objective": "latency", "start_us": T0 + start * MINUTE_US, "revision": revision}
    return ("slices", {**key, "version": 1, "length_us": MINUTE_US, "state": state, "n": 10, **more})


def test_slices_show_the_newest_revision(rig):
    record(
        rig,
        slice_row(0, "good"),
        slice_row(1, "bad"),
        slice_row(2, "no_data"),
        slice_row(1, "good", revision=2),
    )
    record(rig, ("slices", {**slice_row(0, "bad")[1], "objective": "other"}))
    rows = rig.reader.slices("erp", "latency", T0, T0 + 3 * MINUTE_US)
    assert [(row["state"], row["revision"]) for row in rows] == [("good", 1), ("good", 2), ("no_data", 1)]
    assert rig.reader.slice_counts("erp", "latency", T0, T0 + 3 * MINUTE_US) == {"good": 2, "no_data": 1}
    sums = rig.reader.slice_sums("erp", "latency", T0, T0 + 3 * MINUTE_US)
    assert {row["length_us"] for row in sums} == {MINUTE_US}
    assert sum(row["n"] for row in sums) == 3
    assert rig.reader.slice_counts("erp", "latency", T0 + MINUTE_US, T0 + 2 * MINUTE_US) == {"good": 1}
    assert rows[0]["inexact"] is False


def test_throttles_in_force(rig):
    states = ("observed", "requested", "sent", "confirmed", "seen", "released", "expired", "refused")
    record(
        rig,
        *(
            ("throttles", {"throttle_id": state, "state": state, "requested_us": T0 + index, "cost_per_s": 5})
            for index, state in enumerate(states)
        ),
    )
    in_force = [row["throttle_id"] for row in rig.reader.throttles(in_force=True)]
    assert in_force == ["seen", "confirmed", "sent", "requested"]
    assert len(rig.reader.throttles()) == 8
    assert len(rig.reader.throttles(limit=3)) == 3
    assert rig.reader.throttles()[0]["cost_per_s"] == 5.0
    pages, before = [], None
    while page := rig.reader.throttles(in_force=True, limit=3, before=before):
        pages.append([row["throttle_id"] for row in page])
        before = page[-1]["cursor"]
    assert pages == [["seen", "confirmed", "sent"], ["requested"]]


def test_a_throttle_is_written_in_steps(rig):
    record(rig, ("throttles", {"throttle_id": "t", "volume": "v", "state": "requested", "requested_us": T0}))
    record(
        rig,
        ("throttles", {"throttle_id": "t", "state": "sent"}),
        ("throttles", {"throttle_id": "t", "state": "confirmed", "confirmed_us": T0 + 9}),
    )
    [row] = rig.reader.throttles()
    assert (row["volume"], row["state"], row["requested_us"], row["confirmed_us"]) == (
        "v",
        "confirmed",
        T0,
        T0 + 9,
    )


def test_episodes(rig):
    record(
        rig,
        ("episodes", {"episode_id": "a", "opened_us": T0}),
        ("episodes", {"episode_id": "b", "opened_us": T0 + 1, "closed_us": T0 + 2}),
    )
    assert [row["episode_id"] for row in rig.reader.episodes()] == ["b", "a"]
    assert [row["episode_id"] for row in rig.reader.episodes(open_only=True)] == ["a"]
    newest = rig.reader.episodes(limit=1)
    assert [row["episode_id"] for row in rig.reader.episodes(before=newest[0]["cursor"])] == ["a"]


def test_the_state_of_documents_changes_with_each_change_of_one(rig):
    seen = [rig.reader.document_state()]
    agreement = {"name": "erp", "version": 1, "document": "x", "spec": {}, "applied_us": T0}
    document = {"kind": "Recipient", **agreement}
    for change in (
        ("agreements", agreement),
        ("documents", document),
        ("agreements", {**agreement, "version": 2, "applied_us": T0 - 5}),  # by a clock that was set back
        ("agreements", {"name": "erp", "version": 1, "ended_us": T0 + 1}),
        ("documents", {"kind": "Recipient", "name": "erp", "version": 1, "ended_us": T0 + 1}),
        ("documents", {**document, "name": "hr", "applied_us": T0 - 9}),
        ("documents", {"kind": "Recipient", "name": "hr", "version": 1, "ended_us": T0}),
    ):
        record(rig, change)
        seen.append(rig.reader.document_state())
        assert rig.reader.document_state() == seen[-1]
    assert all(seen[place] not in seen[:place] for place in range(len(seen)))


def test_episodes_of_one_agreement_and_one_of_them(rig):
    record(
        rig,
        ("episodes", {"episode_id": "ab1", "opened_us": T0, "name": "gold", "objective": "latency"}),
        ("episodes", {"episode_id": "ab2", "opened_us": T0, "name": "gold", "objective": "iops"}),
        ("episodes", {"episode_id": "b_3", "opened_us": T0, "name": "silver", "objective": "latency"}),
    )
    found = [row["episode_id"] for row in rig.reader.episodes(name="gold")]
    assert sorted(found) == ["ab1", "ab2"]
    assert [row["episode_id"] for row in rig.reader.episodes(name="gold", objective="iops")] == ["ab2"]
    named = {given: rig.reader.episode(given) for given in ("ab1", "ab", "b_", "bx", "b_3")}
    assert {given: row and row["episode_id"] for given, row in named.items()} == {
        "ab1": "ab1", "ab": None, "b_": "b_3", "bx": None, "b_3": "b_3",
    }  # fmt: skip


def test_an_episode_has_the_bad_slices_that_it_reaches_into_as_they_are_judged_now(rig):
    """Also those judged after it closed; a revision counts, and what is before or behind it does not."""

    def judged(minute, state, revision=0, objective="latency"):
        key = {"name": "gold", "objective": objective, "start_us": T0 + minute * MINUTE_US}
        return "slices", {**key, "revision": revision, "length_us": MINUTE_US, "state": state}

    opened_us, closed_us = T0 + MINUTE_US // 2, T0 + 3 * MINUTE_US
    one = {"name": "gold", "objective": "latency", "opened_us": opened_us, "closed_us": closed_us}
    record(
        rig,
        ("episodes", {"episode_id": "a", **one}),
        ("episodes", {"episode_id": "b", **one, "closed_us": None}),
        ("episodes", {"episode_id": "c", **one, "name": "silver"}),
        *(judged(minute, "bad") for minute in (-1, 0, 1, 2, 3)),
        judged(1, "good", 1),
        judged(2, "bad", objective="iops"),
    )
    assert {row["episode_id"]: row["slices_bad"] for row in rig.reader.episodes()} == {"a": 2, "b": 3, "c": 0}


def test_a_long_slice_that_began_before_the_episode_counts_and_one_that_had_ended_does_not(rig):
    """Whatever length slices had before, and where none was judged for a while."""
    hour_us = 60 * MINUTE_US
    rows = [(0, hour_us, "bad"), (hour_us, 2 * hour_us, "bad"), (3 * hour_us, MINUTE_US, "bad")]
    record(
        rig,
        *(
            ("slices", {"name": "gold", "objective": "latency", "start_us": T0 + at, "revision": 0,
                        "length_us": length, "state": state})
            for at, length, state in rows
        ),
        *(
            ("episodes", {"episode_id": name, "name": "gold", "objective": "latency",
                          "opened_us": T0 + opened, "closed_us": T0 + closed})
            for name, opened, closed in (
                ("within", hour_us // 2, hour_us // 2 + 1), ("across", hour_us - 1, hour_us + 1),
                ("last", 3 * hour_us, 4 * hour_us), ("behind", 4 * hour_us, 5 * hour_us),
                ("before", -hour_us, 0),
            )
        ),
    )  # fmt: skip
    found = {row["episode_id"]: row["slices_bad"] for row in rig.reader.episodes()}
    assert found == {"within": 1, "across": 2, "last": 1, "behind": 0, "before": 0}


def test_slices_are_counted_by_what_is_known_of_them(rig):
    def slice_row(minute, revision, **values):
        key = {"name": "gold", "objective": "latency", "start_us": T0 + minute * MINUTE_US}
        return ("slices", {**key, "revision": revision, **values})

    record(
        rig,
        slice_row(0, 0, state="good"),
        slice_row(1, 0, state="no_data"),
        slice_row(1, 1, state="no_data", ours=True, reason="cuts-lost", version=2),
        slice_row(2, 0, state="bad", inexact=True, measured=1.5),
        slice_row(9, 0, state="bad"),
    )
    sums = rig.reader.slice_sums("gold", "latency", T0, T0 + 9 * MINUTE_US)
    found = {(row["version"], row["state"], row["ours"], row["inexact"]): row["n"] for row in sums}
    assert found == {
        (0, "good", False, False): 1,
        (2, "no_data", True, False): 1,
        (0, "bad", False, True): 1,
    }
    newest = rig.reader.slices("gold", "latency", T0, T0 + 9 * MINUTE_US)
    assert [(row["reason"], row["measured"]) for row in newest] == [
        ("", None),
        ("cuts-lost", None),
        ("", 1.5),
    ]


@pytest.mark.parametrize("table", ["events", "audit"])
def test_pages_by_cursor_lose_and_repeat_nothing(rig, table):
    key = {"events": "event_id", "audit": "audit_id"}[table]
    record(rig, *((table, {key: f"id-{number:02}", "at_us": T0 + number // 4}) for number in range(20)))
    ask = getattr(rig.reader, table)
    seen, before = [], None
    while page := ask(limit=7, before=before):
        seen += [row[key] for row in page]
        before = page[-1]["cursor"]
        if len(seen) == 7:
            record(rig, (table, {key: "late", "at_us": T0 + 100}))
    assert seen == [f"id-{number:02}" for number in reversed(range(20))]


@pytest.mark.parametrize("cursor", ["x", "12", "12:", ":a", "-1:a"])
def test_a_wrong_cursor_is_an_error(rig, cursor):
    with pytest.raises(ValueError, match="no cursor"):
        rig.reader.events(before=cursor)


def test_events_since(rig):
    record(rig, *(("events", {"event_id": str(n), "at_us": T0 + n, "details": {"n": n}}) for n in range(4)))
    assert [row["details"] for row in rig.reader.events(since_us=T0 + 2)] == [{"n": 3}, {"n": 2}]


def test_audit_keeps_before_and_after(rig):
    record(rig, ("audit", {"audit_id": "a", "at_us": T0, "before": None, "after": json.dumps({"x": 1})}))
    [row] = rig.reader.audit()
    assert (row["before"], row["after"]) == (None, {"x": 1})


def test_a_reader_cannot_write(database, rig):
    from sqlalchemy import text

    with pytest.raises(DatabaseUnavailable, match=r"readonly|read-only"):
        rig.reader._rows(text("INSERT INTO meta (key, value) VALUES ('a', 'b') RETURNING key"))
    assert rig.reader.meta("a") is None


def test_a_missing_database_is_retryable_and_named(tmp_path):
    reader = open_reader(DatabaseConfig(), tmp_path)
    with pytest.raises(DatabaseUnavailable, match=r"sla\.db"):
        reader.totals()
    assert not (tmp_path / "sla.db").exists(), "reading makes no database"
    reader.close()


@pytest.mark.db
def test_an_unreachable_server_is_retryable(tmp_path):
    config = DatabaseConfig(url=f"postgresql+psycopg://sla:secret@/x?host={tmp_path}")
    reader = open_reader(config, tmp_path)
    with pytest.raises(DatabaseUnavailable) as caught:
        reader.totals()
    assert "secret" not in str(caught.value)
    reader.close()


def test_epochs_survive_as_text(rig):
    rig.feed(cuts_message([make_cut(1, epoch=(1 << 64) - 1)]))
    assert rig.reader.watermarks() == [(gateway(1), (1 << 64) - 1, 1)]
    assert EPOCH > 1 << 63

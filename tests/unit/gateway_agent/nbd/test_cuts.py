"""Cuts of a plane: their contract with the link, and that the largest one fits a frame."""

from collections import Counter

import pytest

from gateway_agent.config import MAX_EXPORTS, ExportConfig
from gateway_agent.errors import ExportRefused
from gateway_agent.nbd import cuts
from gateway_agent.nbd.accounting import word_of
from gateway_agent.nbd.cuts import (
    MAX_COLUMN_BYTES,
    MAX_KEPT_CUTS,
    MAX_STREAMS,
    MIXED,
    SHARED_CLIENT,
    CutMaker,
    RunDelay,
    StreamTable,
)
from gateway_agent.nbd.limits import KIND_READ, KIND_WRITE, KIND_ZEROING
from pmdaemon.wire import cut, frame, histogram
from pmdaemon.wire.histogram import SERVICE
from pmdaemon.wire.messages.plane_sets import PlaneThresholds, ThresholdEntry
from tests.support.nbd import as_cut

EXPORT = ExportConfig(volume="vol-1", backend="disk", file="/dev/null")
START_US = 1_800_000_000_000_000


class Maker:
    """A cut maker whose time goes on by a second a call."""

    def __init__(self):
        self.seconds = 0
        self.made = CutMaker(StreamTable(), 0, START_US)

    def time(self):
        self.seconds += 1
        return self.seconds * 10**9, START_US + self.seconds * 10**6

    def raw(self, got=0):
        return self.made.collect(got, *self.time())

    def header(self, got=0):
        return frame.decode(self.raw(got)).header

    def set_thresholds(self, version):
        entries = (ThresholdEntry("vol-1", "*", cut.IO_ANY, 1000),)
        self.made.set_thresholds(PlaneThresholds(version, entries), *self.time())

    def io(self, client="host-a", latency_ns=2_000_000, count=1, export=EXPORT):
        stream = self.made.table.get(export, client, self.made.thresholds)
        stream.arrived += count
        for _ in range(count):
            done_ns = self.seconds * 10**9 + 10**8
            sent_ns = done_ns - latency_ns
            stream.record([0, word_of(KIND_READ, 4096, failed=False), sent_ns, sent_ns, done_ns], done_ns)


def test_each_cut_says_how_long_the_plane_waited_for_a_processor_within_it():
    total_us = [700]
    made = CutMaker(StreamTable(), 0, START_US, lambda: total_us[0])
    starved_us, got = [], 0
    for waited_us in (0, 250_000, 0, -100):
        total_us[0] += waited_us
        header = frame.decode(made.collect(got, 10**9, START_US + 10**6)).header
        starved_us.append(header["st"])
        got = header["id"]
    assert starved_us == [0, 250_000, 0, 0]


def test_the_kernel_says_how_long_the_main_thread_waited(tmp_path):
    path = tmp_path / "schedstat"
    path.write_text("153559 2132635 2\n")
    delay = RunDelay(str(path))
    assert delay.total_us() == 2132
    path.write_text("\n")
    assert delay.total_us() == 0, "a kernel that says nothing"
    delay.close()
    assert delay.total_us() == 0
    assert RunDelay(str(tmp_path / "nothing")).total_us() == 0, "a kernel without it"
    assert RunDelay().total_us() >= 0


def test_a_cut_is_readable_by_the_wire_and_names_its_rows():
    maker = Maker()
    maker.set_thresholds(1)
    first = maker.header()
    maker.io("host-a", count=3)
    maker.io("host-b", latency_ns=1_000_000)
    maker.made.table.get(EXPORT, "idle", maker.made.thresholds)
    raw = maker.raw(first["id"])
    header, decoded = frame.decode(raw).header, as_cut(raw)
    assert [item["client"] for item in header["streams"]] == ["host-a", "host-b"]
    assert header["streams"][1] == {"index": 1, "volume": "vol-1", "client": "host-b", "backend": "disk"}
    assert decoded.column("reads").tolist() == [3, 1]
    assert decoded.dense_hist(SERVICE, 50).sum(axis=1).tolist() == [3, 1]
    assert [(item["row"], item["counted"], item["missed"]) for item in decoded.missed] == [
        (0, 3, 3),
        (1, 1, 0),
    ]


def test_the_same_bytes_until_got_then_what_came_since():
    maker = Maker()
    maker.io(count=2)
    first = maker.raw()
    maker.io(count=5)
    assert maker.raw() == first
    assert maker.raw(17) == first
    ident = frame.decode(first).header["id"]
    second = maker.raw(ident)
    assert as_cut(second).column("reads").tolist() == [5]
    assert maker.raw(ident) == second  # a link that asks twice with the old id


def test_cuts_are_seamless():
    maker = Maker()
    first = maker.header()
    maker.set_thresholds(1)
    second = maker.header(first["id"])
    third = maker.header(second["id"])
    assert first["end_ns"] == second["start_ns"]
    assert second["end_ns"] == third["start_ns"]
    assert second["start_us"] == START_US + 1_000_000
    assert [first["id"], second["id"], third["id"]] == [START_US + 1, START_US + 2, START_US + 3]


def test_a_cut_without_io_has_no_rows_and_still_covers_its_time():
    header = Maker().header()
    assert (header["n"], header["h"], header["m"], header["streams"]) == (0, 0, 0, [])


def test_ids_of_a_former_life_acknowledge_nothing():
    maker = Maker()
    raw = maker.raw(0)
    assert maker.raw(1) == raw


def test_each_cut_has_one_version_and_says_when_more_wait():
    maker = Maker()
    maker.set_thresholds(1)
    maker.io()
    maker.set_thresholds(2)
    maker.io(count=2)
    seen, got = [], 0
    while not seen or seen[-1]["more"]:
        seen.append(maker.header(got))
        got = seen[-1]["id"]
    assert [header["ts"] for header in seen] == [0, 1, 2]
    assert [header["more"] for header in seen] == [True, True, False]
    assert [header["n"] for header in seen] == [0, 1, 1]


def test_the_same_set_again_makes_no_boundary():
    maker = Maker()
    maker.set_thresholds(1)
    first = maker.header()
    maker.set_thresholds(1)
    assert not maker.header(first["id"])["more"]


def test_a_link_that_never_collects_costs_bounded_memory_and_loses_no_io():
    maker, count = Maker(), MAX_KEPT_CUTS + 10
    for version in range(1, count + 1):
        maker.io()
        maker.set_thresholds(version)
    seen, got = [], 0
    while not seen or seen[-1].header["more"]:
        seen.append(frame.decode(maker.raw(got)))
        got = seen[-1].header["id"]
    assert len(seen) == MAX_KEPT_CUTS + 1
    assert seen[-1].header["ts"] == MIXED
    assert sum(int(as_cut(bytes(item.raw)).column("reads").sum()) for item in seen) == count


def test_tg_is_what_held_during_the_whole_cut():
    maker = Maker()
    first = maker.header()
    maker.made.set_generation(4)
    second = maker.header(first["id"])
    maker.made.set_generation(4)
    third = maker.header(second["id"])
    maker.made.set_generation(5)
    maker.made.set_generation(4)
    fourth = maker.header(third["id"])
    assert [header["tg"] for header in (first, second, third, fourth)] == [0, MIXED, 4, MIXED]


def in_use(table, export, client):
    stream = table.get(export, client, PlaneThresholds())
    stream.sessions.append(Idle())
    return stream


def test_clients_beyond_those_that_a_frame_can_name_share_a_stream_while_all_are_in_use():
    table = StreamTable()
    for number in range(MAX_STREAMS):
        in_use(table, EXPORT, f"host-{number}")
    one, other = in_use(table, EXPORT, "one-more"), in_use(table, EXPORT, "another")
    assert one is other
    assert (one.volume, one.client) == ("vol-1", SHARED_CLIENT)
    assert table.get(EXPORT, "host-0", PlaneThresholds()).index == 0
    table.get(EXPORT, "host-7", PlaneThresholds()).sessions.clear()
    assert table.get(EXPORT, "one-more", PlaneThresholds()).client == "one-more"
    assert [stream for stream in table.streams if stream.client == "host-7"] == []
    assert len(table.streams) == MAX_STREAMS + 1


def exports_of(count):
    return [EXPORT.model_copy(update={"volume": f"vol-{number:03}"}) for number in range(count)]


def test_no_client_of_any_export_is_refused_however_many_there_are():
    maker, exports = Maker(), exports_of(MAX_EXPORTS)
    table = maker.made.table
    table.set_exports(exports)
    for number in range(MAX_STREAMS):  # one volume takes what it can
        in_use(table, exports[0], f"host-{number}")
    for export in exports[1:]:
        for client in ("host-a", "host-b", "host-c"):
            in_use(table, export, client)
            maker.io(client, export=export)
    raw = maker.raw()
    assert int(as_cut(raw).column("reads").sum()) == 3 * (MAX_EXPORTS - 1)
    rows = [row["volume"] for row in frame.decode(raw).header["streams"]]
    assert sorted(rows) == [export.volume for export in exports[1:]]
    assert len(frame.decode(raw).blob) <= MAX_COLUMN_BYTES


def test_a_volume_without_room_for_one_more_stream_counts_its_clients_in_one_that_it_has():
    table, exports = StreamTable(), exports_of(MAX_EXPORTS)
    table.set_exports(exports)
    entries = (ThresholdEntry(export.volume, "*", cut.IO_READ, 1000) for export in exports)
    limits = PlaneThresholds(1, tuple(entries))
    for export in exports:
        assert len(table.get(export, "host-a", limits).limits) == 1
        in_use(table, export, "host-a")
    found = {export.volume: in_use(table, export, "host-b") for export in exports}
    assert {name: stream.volume for name, stream in found.items()} == {name: name for name in found}
    named = [stream for stream in found.values() if stream.client == "host-a"]
    assert named, "these had no room for another"
    assert all("host-b" in stream.members for stream in named)


def test_only_a_volume_that_is_exported_no_more_is_refused_when_there_is_no_room_for_a_first_stream():
    table, refused = StreamTable(), []
    first, *others = exports_of(1000)
    table.set_exports([first])
    for export in others:
        try:
            in_use(table, export, "host-a")
        except ExportRefused as exc:
            refused.append(str(exc))
    assert refused
    assert "Spread the volumes" in refused[0]
    assert in_use(table, first, "host-a").volume == first.volume


def test_short_jobs_with_names_of_their_own_never_fill_the_plane_and_every_io_is_counted():
    maker, got, counted = Maker(), 0, 0
    for number in range(3 * MAX_STREAMS):
        maker.io(f"job-{number}")
        if number % 100 == 99:
            raw = maker.raw(got)
            got, counted = frame.decode(raw).header["id"], counted + int(as_cut(raw).column("reads").sum())
    counted += int(as_cut(maker.raw(got)).column("reads").sum())
    assert counted == 3 * MAX_STREAMS
    assert len(maker.made.table.streams) <= MAX_STREAMS


def test_a_thousand_clients_at_once_are_all_served_and_counted_and_those_without_a_stream_are_named():
    maker, used = Maker(), set()
    for number in range(1000):
        stream = in_use(maker.made.table, EXPORT, f"host-{number}")
        used.add(stream.client)
        maker.io(f"host-{number}")
    raw = maker.raw()
    assert int(as_cut(raw).column("reads").sum()) == 1000
    rows = {row["client"]: row["index"] for row in frame.decode(raw).header["streams"]}
    assert len(rows) == MAX_STREAMS + 1 == len(used)
    (shared,) = [stream for stream in maker.made.table.streams if stream.client == SHARED_CLIENT]
    assert list(shared.members) == [f"host-{number}" for number in range(MAX_STREAMS, 1000)]


def test_the_stream_unused_for_longest_is_forgotten_first_and_none_before_it_must_be():
    maker = Maker()
    for number in range(MAX_STREAMS):
        maker.io(f"job-{number}")
    maker.io("one-more")
    assert SHARED_CLIENT in {stream.client for stream in maker.made.table.streams}
    first = maker.header()
    maker.io("job-0")
    maker.header(first["id"])
    maker.io("one-more")
    kept = {stream.client for stream in maker.made.table.streams}
    assert {"job-0", "one-more"} <= kept
    assert "job-1" not in kept
    assert len(kept - {SHARED_CLIENT}) == MAX_STREAMS


def test_a_stream_without_a_client_is_forgotten_after_a_time_and_not_before_its_counts_are_in_a_cut():
    maker, got = Maker(), 0
    maker.io("gone")
    session = Idle()
    maker.made.table.get(EXPORT, "here", PlaneThresholds()).sessions.append(session)

    def clients():
        return {stream.client for stream in maker.made.table.streams}

    for seconds in (61, 300, 200):
        maker.seconds += seconds
        got = maker.header(got)["id"]
        assert clients() == {"gone", "here"}
    maker.seconds += 200  # ten minutes since it was first seen unused
    got = maker.header(got)["id"]
    assert clients() == {"here"}
    assert maker.header(got)["n"] == 0


def test_counts_go_on_when_an_export_gets_another_backend_and_other_costs():
    maker = Maker()
    maker.io()
    export = EXPORT.model_copy(update={"backend": "array-2", "cost_read": 5.0, "cost_bytes": 8192.0})
    maker.made.table.change(export)
    maker.io(count=2, export=export)
    raw = maker.raw(0)
    found, header = as_cut(raw), frame.decode(raw).header
    assert [stream["backend"] for stream in header["streams"]] == ["array-2"]
    assert found.column("read_bytes")[0] == 3 * 4096
    cost = EXPORT.cost_read + 4096 / 65_536 + 2 * (5 + 4096 / 8192)
    assert found.column("cost_milli")[0] == pytest.approx(cost * 1000, abs=1)
    maker.made.table.change(EXPORT)
    again = as_cut(maker.raw(header["id"]))
    assert again.rows == 0, "a change alone is no activity"


class Idle:
    """A session of a client that does nothing."""

    def gauges(self):
        return 0, 0

    def outstanding(self, now_ns):
        return []

    def cut_ended(self, now_ns):
        pass


class Hanging:
    """A session with a read and a write that arrived at the start and are outstanding for ever."""

    def gauges(self):
        return 2, 0

    def outstanding(self, now_ns):
        return [(0, KIND_READ, 0), (0, KIND_WRITE, 0)]

    def cut_ended(self, now_ns):
        pass


def fill(maker, table, client):
    """All that a stream can say: each bucket; kinds failed, abandoned, waiting; limits missed, overdue."""
    stream = table.get(EXPORT, client, maker.made.thresholds)
    stream.sessions += [Hanging(), Hanging()]
    stream.leave(stream.sessions[0], maker.seconds * 10**9)
    for bucket in range(histogram.BUCKETS):
        for kind in (KIND_READ, KIND_WRITE):
            edge_ns = histogram.edges_for(histogram.BUCKETS)[bucket]
            arrived_ns = maker.seconds * 10**9
            coarse_ns = histogram.edges_for(histogram.COARSE_BUCKETS)[bucket % histogram.COARSE_BUCKETS]
            sent_ns = arrived_ns + int(coarse_ns)
            word = word_of(kind, 1, failed=True)
            finished = (0, word, arrived_ns, sent_ns, sent_ns + int(coarse_ns))
            stream.record([*finished], arrived_ns + int(edge_ns))


@pytest.mark.parametrize("limits", [0, 7, 40])
def test_the_fullest_cut_fits_a_frame(limits):
    maker = Maker()
    entries = tuple(ThresholdEntry("vol-1", "*", cut.IO_READ, 1 + number) for number in range(limits))
    maker.made.set_thresholds(PlaneThresholds(1, entries), *maker.time())
    got = maker.header()["id"]
    for number in range(MAX_STREAMS):
        client = f"{number:03}-" + "x" * 90
        if maker.made.table.get(EXPORT, client, maker.made.thresholds).client != client:
            break
        fill(maker, maker.made.table, client)
    raw = maker.raw(got)
    found = as_cut(raw)
    assert found.rows > 100
    per_row = Counter(found.hist["row"].tolist())
    assert set(per_row.values()) == {histogram.WIRE_BUCKETS}, "every bucket"
    assert len(found.missed) == found.rows * (3 * limits + 9)
    assert len(frame.decode(raw).blob) <= MAX_COLUMN_BYTES


def test_a_cut_that_shared_streams_make_too_large_has_half_as_many_buckets_and_every_io(monkeypatch):
    monkeypatch.setattr(cuts, "MAX_COLUMN_BYTES", 5_000)
    maker = Maker()
    fill(maker, maker.made.table, "host-a")
    fine = as_cut(maker.raw())
    fill(maker, maker.made.table, "host-a")
    fill(maker, maker.made.table, "host-b")
    coarse = as_cut(maker.raw(START_US + 1))
    assert (len(fine.hist), len(coarse.hist)) == (histogram.WIRE_BUCKETS, 2 * 150)
    for first, size in ((0, 99), (99, 99), (198, 50), (248, 50)):
        before, after = fine.dense_hist(first, size)[0], coarse.dense_hist(first, size)[0]
        assert before.sum() == after.sum()
        assert (before.cumsum() >= after.cumsum()).all(), "no latency looks smaller"


def test_as_many_streams_as_allowed_have_room_for_seven_limits_each():
    maker = Maker()
    entries = tuple(ThresholdEntry("vol-1", "*", cut.IO_READ, 1 + number) for number in range(7))
    maker.made.set_thresholds(PlaneThresholds(1, entries), *maker.time())
    got = maker.header()["id"]
    for number in range(MAX_STREAMS):
        fill(maker, maker.made.table, f"{number:03}")
    found = as_cut(maker.raw(got))
    assert (found.rows, len(found.missed)) == (MAX_STREAMS, MAX_STREAMS * 30)
    more = (*entries, *(ThresholdEntry("vol-1", "*", cut.IO_WRITE, 1 + number) for number in range(20)))
    left_out = maker.made.set_thresholds(PlaneThresholds(2, more), *maker.time())
    assert left_out == MAX_STREAMS * 20
    assert maker.made.set_thresholds(PlaneThresholds(3, entries), *maker.time()) == 0


def test_a_volume_put_back_with_another_backend_and_cost_is_counted_there_from_then_on():
    maker = Maker()
    maker.io(count=2)
    first = maker.header()
    fresh = EXPORT.model_copy(update={"backend": "array-new", "cost_read": 9.0})
    stream = maker.made.table.get(fresh, "host-a", maker.made.thresholds)
    assert stream.index == 0, "its lifetime columns go on"
    stream.arrived += 3
    stream.record([0, word_of(KIND_READ, 0, failed=False), 0, 0, 10**6] * 3, 10**6)
    raw = maker.raw(first["id"])
    assert [item["backend"] for item in frame.decode(raw).header["streams"]] == ["array-new"]
    assert as_cut(raw).column("cost_milli").tolist() == [27_000]


class Late:
    """A volume whose caps held I/Os for too long."""

    def __init__(self, found):
        self.export, self._found = EXPORT, found

    def take_late(self, _now_ns):
        return self._found


def test_what_caps_held_of_a_volume_that_leaves_and_of_the_one_in_its_place_is_said_together():
    maker = Maker()
    maker.made.volumes += [Late((5, 9_000_000)), Late((1, 6_000_000)), Late(None)]
    assert maker.header()["late"] == {"vol-1": [6, 9_000_000]}


def test_the_first_cut_of_a_next_process_begins_with_the_cut_of_the_former_one():
    """So both fit in one cut of the gateway; and the orders are those of before, from the first I/O on."""
    former = Maker()
    former.time()
    former.raw()
    maker = Maker()
    maker.seconds = 7
    entries = (ThresholdEntry("vol-1", "*", cut.IO_ANY, 1000),)
    maker.made.succeed(*former.made.start, PlaneThresholds(4, entries), 9)
    maker.made.set_generation(9)
    maker.io(count=2)
    raw = maker.raw()
    header = frame.decode(raw).header
    assert (header["start_ns"], header["start_us"]) == (2 * 10**9, START_US + 2 * 10**6)
    assert (header["tg"], header["ts"]) == (9, 4)
    assert as_cut(raw).entries(cut.IO_ANY)["missed"].tolist() == [2]


def test_a_cut_says_how_many_of_each_row_were_sequential():
    maker = Maker()
    maker.io(count=5)
    maker.io("host-b", count=3)
    one, two = maker.made.table.streams
    one.sequential += 4
    first, second = (as_cut(maker.raw(got)) for got in (0, 0))
    assert cut.sequential_counts(first.sequential).tolist() == [4, 0]
    assert second.sequential == first.sequential, "the same cut again"
    two.sequential += 2
    maker.io("host-b", count=2)
    later = as_cut(maker.raw(frame.decode(maker.raw()).header["id"]))
    assert cut.sequential_counts(later.sequential).tolist() == [2]


def test_requests_of_any_length_keep_the_counters_of_a_cut_within_what_the_server_takes():
    """With extended headers one request zeroes up to the size of the export, 8 EiB, and many fit in a cut."""
    maker = Maker()
    stream = maker.made.table.get(EXPORT, "host-a", maker.made.thresholds)
    zeroes = (0, word_of(KIND_ZEROING, 1 << 63, failed=False), 10**8, 10**8, 10**8)
    got = 0
    for _ in range(3):
        stream.record([*zeroes] * 5000, 2 * 10**8)
        raw = maker.raw(got)
        got, found = frame.decode(raw).header["id"], as_cut(raw)
        assert cut.fault_of(found) is None
        assert found.column("others").tolist() == [5000]
        assert found.column("cost_milli").tolist() == [cut.MAX_COUNTER]
    maker.io(count=2)
    later = as_cut(maker.raw(got)).column("cost_milli").tolist()
    assert 0 < later[0] < 10**9, "what was beyond is in no later cut"

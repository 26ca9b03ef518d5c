"""Samples into cuts, and the names of their streams."""

import numpy as np
import pytest

from gateway_agent.link import collection
from gateway_agent.link.collection import CutIdentity, StreamNames, make_cut, sample_groups
from gateway_agent.sources.sample import Sample, StreamKey, no_hist, no_missed
from pmdaemon.wire import cut
from pmdaemon.wire.names import stream_id
from tests.support.link import GATEWAY, counters

SECOND = 1_000_000_000


def sample(source="nbd-0", start=0, end=SECOND, rows=(), streams=None, tg=5, ts=3, **more):
    streams = streams or tuple(StreamKey(f"{source}-v{i}", "c", "b") for i in range(len(rows)))
    return Sample(
        source, start, end, 1_000 + start // 1000, tg, ts, tuple(streams), cut.rows_array(list(rows)),
        more.pop("hist", no_hist()), more.pop("missed", no_missed()), **more,
    )  # fmt: skip


def merged(*group, marks=None):
    identity = CutIdentity(GATEWAY, 9, 4, marks or {})
    return make_cut(group, StreamNames(GATEWAY, None), identity)


def names(groups):
    return [[item.source for item in group] for group in groups]


def test_planes_collected_together_share_a_cut():
    one, two = sample(), sample("nbd-1", start=3_000_000, end=SECOND + 2_000_000)
    assert names(sample_groups([one, two])) == [["nbd-0", "nbd-1"]]


def test_intervals_that_differ_make_separate_cuts_oldest_first():
    late = sample("nbd-1", start=-2 * SECOND)
    assert names(sample_groups([late, sample()])) == [["nbd-1"], ["nbd-0"]]
    assert names(sample_groups([sample(), late])) == [["nbd-1"], ["nbd-0"]]


def test_threshold_versions_are_never_mixed_but_a_source_without_goes_with_any():
    host = sample("host", tg=None, ts=None)
    assert names(sample_groups([sample(ts=3), sample("nbd-1", ts=4), host])) == [["nbd-0", "host"], ["nbd-1"]]


def test_two_samples_of_one_source_are_never_merged():
    assert len(sample_groups([sample(), sample()])) == 2


@pytest.mark.parametrize(
    ("generations", "expected"),
    [((5, 5), 5), ((5, 6), -1), ((-1, 5), -1), ((None, 5), 5), ((None, None), 0), ((0, 0), 0)],
)
def test_generation_is_the_common_one_or_minus_one(generations, expected):
    group = [sample(f"s{i}", tg=tg) for i, tg in enumerate(generations)]
    assert merged(*group).throttle_gen == expected


def test_interval_runs_from_the_earliest_start_to_the_earliest_end():
    """So that the next cut, which starts where the earliest ended, neither overlaps nor leaves a hole."""
    one = merged(sample(start=5_000_000), sample("nbd-1", start=0, end=SECOND + 7_000_000))
    assert (one.start_unix_us, one.duration_us) == (1_000, 1_000_000)


def test_a_cut_is_as_starved_as_the_most_starved_of_its_planes():
    group = (sample(starved_us=3_000), sample("nbd-1", starved_us=90_000), sample("host"))
    assert cut.decode(cut.encode(merged(*group))).starved_us == 90_000


def test_identity_marks_and_version_are_taken_over():
    one = merged(sample(), marks={"nbd-0": 12, "nbd-1": 3})
    assert (one.gateway_id, one.epoch, one.seq) == (GATEWAY, 9, 4)
    assert (one.threshold_version, one.extra["dp"]) == (3, {"nbd-0": 12, "nbd-1": 3})


def test_rows_keep_their_histograms_and_misses_when_idle_rows_are_left_out():
    idle, busy = counters(0, cum_reads=50), counters(4, cum_reads=9)
    hist = np.array([(1, 30, 4)], dtype=cut.HIST_DTYPE)
    missed = np.array([(1, 0, 5000, 4, 2)], dtype=cut.MISSED_DTYPE)
    first = sample(rows=[idle, busy], hist=hist, missed=missed)
    second = sample("nbd-1", rows=[idle, busy], hist=hist, missed=missed)
    one = cut.decode(cut.encode(merged(first, second)))
    assert one.rows == 2
    expected = sorted(stream_id(GATEWAY, volume, "c") for volume in ("nbd-0-v1", "nbd-1-v1"))
    assert one.column("stream_id").tolist() == expected
    assert sorted(one.hist["row"].tolist()) == sorted(one.missed["row"].tolist()) == [0, 1]
    assert one.column("cum_reads").tolist() == [9, 9]


def test_a_row_that_only_waits_is_kept():
    assert merged(sample(rows=[counters(held=1)])).rows == 1


def test_no_rows_at_all_is_a_cut_that_covers_its_time():
    one = cut.decode(cut.encode(merged(sample(rows=[counters()]))))
    assert (one.rows, one.duration_us) == (0, 1_000_000)


def test_one_stream_in_two_planes_is_one_row_with_the_sums():
    key = (StreamKey("vol", "c", "b"),)
    first = sample(rows=[counters(4, 10)], streams=key, hist=np.array([(0, 30, 4)], dtype=cut.HIST_DTYPE))
    second = sample(
        "nbd-1", rows=[counters(1, 2)], streams=key, hist=np.array([(0, 30, 1)], dtype=cut.HIST_DTYPE)
    )
    one = merged(first, second)
    assert one.rows == 1
    assert (one.column("reads").tolist(), one.column("cum_reads").tolist()) == ([5], [12])
    assert one.dense_hist(0, 99)[0, 30] == 5


def test_a_cut_of_several_sources_says_whose_rows_are_whose():
    both, third = StreamKey("both", "c", "b"), StreamKey("third", "c", "b")
    first = sample(rows=[counters(4)], streams=(both,), mark=7)
    second = sample("nbd-1", rows=[counters(1), counters(2)], streams=(both, third), mark=8)
    beside = sample("host", rows=[counters(3)], tg=None, ts=None)
    one = cut.decode(cut.encode(merged(first, second, beside)))
    rows = {stream: row for row, stream in enumerate(one.column("stream_id").tolist())}
    bits = {plane: int.from_bytes(said, "little") for plane, said in one.extra["of"].items()}
    at_both, at_third = (1 << rows[stream_id(GATEWAY, name, "c")] for name in ("both", "third"))
    assert bits == {"nbd-0": at_both, "nbd-1": at_both | at_third}
    assert "of" not in merged(first).extra


def test_a_cut_says_how_long_a_plane_gave_no_answer():
    one = merged(
        sample(mark=7, silent_us=9_000_000), sample("nbd-1", mark=8), sample("host", tg=None, ts=None)
    )
    assert cut.decode(cut.encode(one)).extra["un"] == {"nbd-0": 9_000_000}
    assert "un" not in merged(sample(mark=7)).extra


def test_a_plane_that_is_no_longer_configured_is_named_no_more(tmp_path):
    class Spooled:
        def __init__(self):
            self.marks = {"nbd-0": 4, "gone": 9}

        def append(self, epoch, seq, raw, marks):
            self.marks = marks
            return 0

    class Source:
        name = "nbd-0"

        def spooled(self):
            """Nothing to forget."""

    spool = Spooled()
    collection.CutSpooler(GATEWAY, 9, spool, StreamNames(GATEWAY, None), [Source()]).spool([sample(mark=5)])
    assert spool.marks == {"nbd-0": 5}


class AskedSource:
    """Answers with a sample that it makes at some time, when it is told to."""

    name, can_be_asked = "nbd-0", True

    def __init__(self):
        self.awaits_answer, self.sample = False, None

    def ask(self):
        self.awaits_answer = self.sample is None

    def answer(self, made_ns):
        self.awaits_answer, self.sample = False, sample(start=0, end=made_ns, mark=1)


@pytest.mark.parametrize(("made_s", "heard_s", "silent_s"), [(70, 70, 69), (1, 70, 0), (5, 5, 0), (6, 6, 5)])
def test_a_plane_is_silent_from_the_question_to_its_answer(made_s, heard_s, silent_s):
    """A link that is late to hear the answer makes no plane silent."""
    source = AskedSource()
    one = collection.CollectionRound([source])
    one.begin(SECOND)
    assert one.gather(2 * SECOND) == []
    one.next_round(2 * SECOND, [])
    one.begin(3 * SECOND)  # it is not asked again
    one.next_round(4 * SECOND, [])
    source.answer(made_s * SECOND)
    one.begin(heard_s * SECOND)
    (found,) = one.gather(heard_s * SECOND)
    assert found.silent_us == silent_s * 1_000_000


@pytest.mark.parametrize(
    ("due_s", "made_s", "silent_s"), [(None, 70, 0), (3, 70, 67), (66, 70, 0), (65, 70, 5), (3, 4, 0)]
)
def test_a_link_that_did_not_run_says_so_for_its_planes(due_s, made_s, silent_s):
    """A paused machine: link and planes stop together. A cut that was made before says nothing."""
    source = AskedSource()
    one = collection.CollectionRound([source])
    one.begin(70 * SECOND, None if due_s is None else due_s * SECOND)
    source.answer(made_s * SECOND)
    (found,) = one.gather(70 * SECOND)
    assert found.silent_us == silent_s * 1_000_000
    one.next_round(71 * SECOND, [found])
    source.sample = None
    one.begin(72 * SECOND, 72 * SECOND)
    source.answer(72 * SECOND)
    assert [each.silent_us for each in one.gather(72 * SECOND)] == [0]


KEY = StreamKey("vol-1", "c", "b0")


def announced(book: StreamNames) -> list[dict]:
    return [entry for message in book.announcements() for entry in message.header()["streams"]]


def test_entries_of_one_stream_in_two_planes_are_summed_and_the_longer_stall_is_kept():
    key = StreamKey("vol-1", "c", "b")
    one = [
        (0, cut.IO_ANY, 5000, 10, 4),
        (0, cut.OVERDUE, 5000, 3, 1),
        (0, cut.FAILED, 0, 2, 0),
        (0, cut.OUTSTANDING, 0, 700, 900),
        (0, cut.OUTSTANDING + cut.IO_READ, 0, 700, 900),
    ]
    two = [
        (0, cut.IO_ANY, 5000, 1, 1),
        (0, cut.OVERDUE, 5000, 1, 0),
        (0, cut.OVERDUE, 9000, 1, 0),
        (0, cut.OUTSTANDING, 0, 800, 200),
        (0, cut.OUTSTANDING + cut.IO_READ, 0, 20, 30),
        (0, cut.OUTSTANDING + cut.IO_WRITE, 0, 800, 200),
    ]
    group = [
        sample(name, rows=[counters(4)], streams=[key], missed=np.array(found, dtype=cut.MISSED_DTYPE))
        for name, found in (("nbd-0", one), ("nbd-1", two))
    ]
    assert merged(*group).missed.tolist() == [
        (0, cut.IO_ANY, 5000, 11, 5),
        (0, cut.OVERDUE, 5000, 4, 1),
        (0, cut.OVERDUE, 9000, 1, 0),
        (0, cut.FAILED, 0, 2, 0),
        (0, cut.OUTSTANDING, 0, 800, 900),
        (0, cut.OUTSTANDING + cut.IO_READ, 0, 700, 900),
        (0, cut.OUTSTANDING + cut.IO_WRITE, 0, 800, 200),
    ]


def test_counts_of_two_planes_that_no_u32_holds_are_not_cut_short():
    key, most = StreamKey("vol-1", "c", "b"), 0xFFFF_FFFF
    group = [
        sample(
            name,
            rows=[counters(4)],
            streams=[key],
            missed=np.array([(0, 0, 5000, most, 4)], cut.MISSED_DTYPE),
        )
        for name in ("nbd-0", "nbd-1")
    ]
    found = merged(*group).missed
    assert [int(found[name].astype(np.int64).sum()) for name in ("counted", "missed")] == [2 * most, 8]


def test_a_row_that_only_has_entries_is_kept_and_its_entries_follow_it():
    idle, keys = counters(0, cum_reads=50), (StreamKey("v1", "c", "b"), StreamKey("v2", "c", "b"))
    found = np.array([(1, cut.OVERDUE, 5000, 1, 0), (1, cut.OUTSTANDING, 0, 0, 30_000)], cut.MISSED_DTYPE)
    one = cut.decode(cut.encode(merged(sample(rows=[idle, idle], streams=keys, missed=found))))
    assert one.column("stream_id").tolist() == [stream_id(GATEWAY, "v2", "c")]
    assert one.missed["row"].tolist() == [0, 0]


def test_new_streams_are_told_once_a_session_and_survive_a_restart(tmp_path):
    book = StreamNames(GATEWAY, tmp_path / "streams.json")
    assert book.add(KEY) == stream_id(GATEWAY, "vol-1", "c")
    book.save()
    assert announced(book) == [{"id": book.add(KEY), "volume": "vol-1", "client": "c", "backend": "b0"}]
    assert announced(book) == []
    book.new_session()
    assert len(announced(book)) == 1
    assert len(announced(StreamNames(GATEWAY, tmp_path / "streams.json"))) == 1


def test_a_stream_that_moves_to_another_backend_is_told_again():
    book = StreamNames(GATEWAY, None)
    book.add(KEY)
    announced(book)
    book.add(KEY._replace(backend="b1"))
    assert [entry["backend"] for entry in announced(book)] == ["b1"]


def test_announcements_fit_their_frames():
    book = StreamNames(GATEWAY, None)
    for number in range(300):
        book.add(KEY._replace(client=f"c{number}"))
    assert [len(message.streams) for message in book.announcements()] == [128, 128, 44]


def test_the_book_is_bounded(monkeypatch):
    monkeypatch.setattr(collection, "MAX_STREAMS", 2)
    book = StreamNames(GATEWAY, None)
    for client in "abc":
        book.add(KEY._replace(client=client))
    assert [entry["client"] for entry in announced(book)] == ["b", "c"]


def test_a_broken_file_of_streams_is_begun_anew(tmp_path):
    (tmp_path / "streams.json").write_text("[")
    assert announced(StreamNames(GATEWAY, tmp_path / "streams.json")) == []


def test_a_cut_says_how_long_its_host_waited_for_io():
    identity = CutIdentity(GATEWAY, 9, 4, {}, 15)
    assert make_cut([sample()], StreamNames(GATEWAY, None), identity).extra["psi"] == 15
    assert "psi" not in merged(sample()).extra


def test_what_is_sequential_is_added_up_and_not_known_where_a_source_does_not_count_it():
    key = StreamKey("vol", "c", "b")
    own, other = StreamKey("own", "c", "b"), StreamKey("host", "c", "b")
    one = sample(rows=[counters(4), counters(3)], streams=(key, own), sequential=np.array([3, 1]))
    two = sample("nbd-1", rows=[counters(5)], streams=(key,), sequential=np.array([2]))
    host = sample("host", rows=[counters(9)], streams=(other,))

    def known(*group):
        made = cut.decode(cut.encode(merged(*group)))
        counts = cut.sequential_counts(made.sequential).tolist()
        return dict(zip(made.column("stream_id").tolist(), counts, strict=True))

    ids = {name: stream_id(GATEWAY, name, "c") for name in ("vol", "own", "host")}
    assert known(one, two, host) == {ids["vol"]: 5, ids["own"]: 1, ids["host"]: -1}
    silent = sample("nbd-1", rows=[counters(5)], streams=(key,))
    assert known(one, silent) == {ids["vol"]: -1, ids["own"]: 1}
    idle = sample(rows=[counters(), counters(3)], streams=(key, own), sequential=np.array([0, 1]))
    assert known(idle) == {ids["own"]: 1}
    assert merged(host).sequential == b""


def test_sums_of_several_samples_stay_within_what_the_server_takes_of_a_cut():
    key = (StreamKey("v", "c", "b"),)
    rows = [counters(4, cum_reads=1 << 50, cost_milli=cut.MAX_COUNTER)]
    made = merged(sample(rows=rows, streams=key), sample("nbd-1", rows=rows, streams=key))
    assert cut.fault_of(made) is None
    assert made.column("cost_milli").tolist() == [cut.MAX_COUNTER]
    assert (made.column("reads").tolist(), made.column("cum_reads").tolist()) == ([8], [1 << 51])

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway_agent.nbd.accounting import (
    REFUSED_BIT,
    StreamAccount,
    word_of,
)
from gateway_agent.nbd.limits import KIND_FLUSH, KIND_READ, KIND_WRITE, KIND_ZEROING
from pmdaemon.errors import BadCaps
from pmdaemon.wire import cut, histogram
from pmdaemon.wire.cut import COL, IO_ANY, IO_READ, IO_WRITE
from pmdaemon.wire.messages.plane_sets import PlaneThresholds


def thresholds(version=1, *entries):
    keys = ("volume", "client", "io", "threshold_us")
    return PlaneThresholds.parse(
        {"version": version, "entries": [dict(zip(keys, entry, strict=True)) for entry in entries]}
    )


def stream(**costs):
    return StreamAccount(0, "vol-1", "host-a", "disk", **costs)


END_NS = 1000 * 10**9


def log(target, kind, length, latency_ns, service_ns=0, delay_ns=0, failed=False, refused=False, done_ns=0):
    done_ns = done_ns or END_NS - 1
    arrived_ns = done_ns - latency_ns
    sent_ns = arrived_ns + delay_ns
    word = word_of(kind, length, failed) | (REFUSED_BIT if refused else 0)
    target.record([0, word, arrived_ns, sent_ns, sent_ns + service_ns], done_ns)


def compared(taken):
    """Entries of completions, without those of other kinds."""
    return [entry for entry in taken.missed if entry[0] < cut.OVERDUE]


def value(taken, name):
    return taken.row[COL[name]]


def test_counters_are_exact():
    target = stream(cost_read=1.0, cost_write=2.0)
    target.arrived = 4
    log(target, KIND_READ, 65_536, 3_000_000, 2_000_000, 900_000)
    log(target, KIND_WRITE, 32_768, 5_000_999, 5_000_000)
    log(target, KIND_WRITE, 4096, 1_000, failed=True)
    log(target, KIND_ZEROING, 1 << 30, 10**9)
    log(target, KIND_FLUSH, 0, 10**9)
    taken = target.take(END_NS)
    expected = {
        "stream_id": 0,
        "arrived": 4,
        "reads": 1,
        "writes": 2,
        "read_bytes": 65_536,
        "write_bytes": 32_768,
        "others": 2,
        "errors": 1,
        "lat_sum_us": 8_001,
        "svc_sum_us": 7_000,
        "delay_sum_us": 900,
        "cost_milli": 1000 * (1 + 2 * 4) + 1500 + 1000 * (1 << 14),
        "inflight": 0,
        "held": 0,
        "cum_reads": 1,
        "cum_writes": 2,
        "cum_read_bytes": 65_536,
        "cum_write_bytes": 32_768,
    }
    assert dict(zip(COL, taken.row, strict=True)) == expected


def test_a_stream_without_activity_has_no_row_but_one_with_a_held_io_has():
    target = stream()
    assert target.take(END_NS) is None

    class Session:
        def gauges(self):
            return 2, 3

        def outstanding(self, now_ns):
            return [(now_ns - 1_500_000, KIND_FLUSH, 0), (now_ns - 1_200_000, KIND_WRITE, 0)] * 2

        def cut_ended(self, now_ns):
            pass

    target.sessions.append(Session())
    taken = target.take(END_NS)
    assert (value(taken, "inflight"), value(taken, "held")) == (2, 3)
    assert taken.missed == [(cut.OUTSTANDING, 0, 1, 1), (cut.OUTSTANDING + IO_WRITE, 0, 1, 1)]


def test_what_the_gateway_refuses_costs_nothing():
    target = stream(cost_read=1.0, cost_write=2.0)
    for kind in (KIND_READ, KIND_WRITE, KIND_ZEROING, KIND_FLUSH):
        log(target, kind, 4096, 1_000, failed=True, refused=True)
    log(target, KIND_READ, 0, 1_000, failed=True)  # by the storage, which had the work
    taken = target.take(END_NS)
    assert (value(taken, "reads"), value(taken, "errors"), value(taken, "cost_milli")) == (2, 5, 1000)


latencies = st.lists(
    st.tuples(
        st.sampled_from([KIND_READ, KIND_WRITE, KIND_ZEROING, KIND_FLUSH]),
        st.integers(0, 1 << 25),
        st.integers(0, 70 * 10**9),
        st.integers(0, 70 * 10**9),
        st.booleans(),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(ios=latencies, splits=st.sets(st.integers(0, 60), max_size=4))
def test_histograms_and_sums_equal_a_count_one_by_one_however_the_cuts_fall(ios, splits):
    target, dense, cost, sums = (
        stream(cost_read=0.3, cost_write=1.7),
        np.zeros(histogram.WIRE_BUCKETS, int),
        0,
        0,
    )
    for index, (kind, length, latency, other, failed) in enumerate(ios):
        log(target, kind, length, latency, other, other, failed)
        if index in splits and (taken := target.take(END_NS)):
            dense, cost, sums = (
                dense + taken.hist,
                cost + value(taken, "cost_milli"),
                sums + value(taken, "lat_sum_us"),
            )
    if taken := target.take(END_NS):
        dense, cost, sums = (
            dense + taken.hist,
            cost + value(taken, "cost_milli"),
            sums + value(taken, "lat_sum_us"),
        )
    expected = np.zeros(histogram.WIRE_BUCKETS, int)
    transfers = [io for io in ios if io[0] in (KIND_READ, KIND_WRITE)]
    for kind, _, latency, other, _ in transfers:
        first = histogram.TOTAL_READ if kind == KIND_READ else histogram.TOTAL_WRITE
        expected[first + histogram.bucket_of_ns(latency)] += 1
        expected[histogram.SERVICE + histogram.coarse_bucket_of_ns(other)] += 1
        expected[histogram.DELAY + histogram.coarse_bucket_of_ns(other)] += 1
    assert dense.tolist() == expected.tolist()
    assert sums == sum(io[2] for io in transfers) // 1000
    exact = sum(0.3 if io[0] == KIND_READ else 1.7 for io in ios if io[0] != KIND_FLUSH or not io[4])
    exact += sum(io[1] for io in ios if not io[4]) / 65_536
    assert cost == pytest.approx(exact * 1000, abs=1.01)


def test_missed_is_strictly_above_in_nanoseconds_and_by_kind():
    target = stream()
    limits = thresholds(
        3,
        ("vol-1", "host-*", "any", 5000),
        ("vol-1", "host-a", "any", 5000),  # the same limit twice counts once
        ("vol-1", "*", "read", 5000),
        ("vol-1", "*", "write", 1),
        ("vol-1", "host-b", "any", 1),
        ("vol-2", "*", "any", 1),
    )
    target.set_limits(limits.limits_for("vol-1", "host-a"), 0)
    log(target, KIND_READ, 512, 5_000_000)
    log(target, KIND_READ, 512, 5_000_001)
    log(target, KIND_WRITE, 512, 9_000_000)
    log(target, KIND_FLUSH, 0, 10**9)
    assert compared(target.take(END_NS)) == [(IO_ANY, 5000, 3, 2), (IO_READ, 5000, 2, 1), (IO_WRITE, 1, 1, 1)]
    log(target, KIND_WRITE, 512, 1_000)
    assert compared(target.take(END_NS)) == [(IO_ANY, 5000, 1, 0), (IO_READ, 5000, 0, 0), (IO_WRITE, 1, 1, 0)]
    log(target, KIND_FLUSH, 0, 10**9)
    assert compared(target.take(END_NS)) == []


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"version": 1},
        {"version": -1, "entries": []},
        {"version": 1, "entries": [5]},
        {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "both", "threshold_us": 1}]},
        {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "any", "threshold_us": 1 << 32}]},
        {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "any", "threshold_us": 1.5}]},
        {"version": 1, "entries": [{"volume": "v", "client": "*", "io": "any", "threshold_us": 0}]},
    ],
)
def test_malformed_thresholds_are_refused(header):
    with pytest.raises(BadCaps):
        PlaneThresholds.parse(header)


def test_an_empty_set_matches_nothing():
    assert PlaneThresholds().limits_for("vol-1", "host-a") == ()

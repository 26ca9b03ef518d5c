"""Which planes a cut is of: what a stopped plane leaves unobserved, and whose streams are whose."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sla_server.db.ingest.accumulator import IngestMemory, IngestWindow
from sla_server.db.ingest.batch import DecodedBatch, IngestedCut
from sla_server.db.ingest.planes import GONE_US, HOST, NOTHING, PlaneMemory, planes_text
from tests.support.samples import EPOCH, MINUTE_US, T0, gateway, make_cut, stream

SECOND_US = 1_000_000


def cut_at(seq, marks, streams=(1, 2), of=None, epoch=EPOCH):
    """A second's cut, with the newest cut of each plane; ``of``: plane to rows."""
    cut = make_cut(seq, epoch=epoch, start_us=T0 + seq * SECOND_US, streams=streams)
    extra = {"dp": marks}
    if of is not None:
        bits = {name: np.isin(np.arange(len(streams)), rows) for name, rows in of.items()}
        extra["of"] = {name: np.packbits(each, bitorder="little").tobytes() for name, each in bits.items()}
    return dataclasses.replace(cut, extra=extra)


def said(*cuts):
    """What each cut of a gateway says: planes that are missing, and what is learned of streams."""
    memory, numbers = PlaneMemory(), {stream(n): n for n in range(9)}
    found = [memory.check(cut, cut.start_unix_us + cut.duration_us) for cut in cuts]
    return [
        (each.missing, {numbers[key]: planes_text(planes) for key, planes in each.streams.items()})
        for each in found
    ]


def test_a_plane_is_missing_from_a_cut_in_which_it_has_none_of_its_own():
    cuts = [cut_at(n, {"a": 10 + n, "b": 20 + min(n, 2)}) for n in range(1, 5)]
    assert [missing for missing, _ in said(*cuts)] == [(), (), ("b",), ("b",)]


def test_a_host_s_cut_proves_the_time_of_no_plane():
    assert said(cut_at(1, {"a": 1}), cut_at(2, {"a": 1}, streams=(3,))) == [((), {}), (("a",), {3: HOST})]


@pytest.mark.parametrize(
    "second", [cut_at(3, {"a": 1}), cut_at(2, {"a": 1}, epoch=EPOCH + 1), cut_at(1, {"a": 1})]
)
def test_a_cut_that_does_not_follow_says_nothing(second):
    assert said(cut_at(1, {"a": 1}), second) == [((), {}), ((), {})]


def test_what_no_agent_can_have_meant_says_nothing():
    memory = PlaneMemory()
    for marks in (None, 7, {1: 2}, {"": 1}, {"a b": 1}, {"a": "x"}, {}):
        assert memory.check(cut_at(1, marks), 0) == NOTHING


def test_an_agent_that_tells_rows_is_believed():
    """Row 0 is of both planes, row 1 of one, row 2 of the host."""
    both = {"a": [0], "b": [0, 1]}
    cuts = [cut_at(n, {"a": n, "b": n}, (1, 2, 3), both) for n in (1, 2, 3)]
    assert said(*cuts) == [((), {}), ((), {1: "a b", 2: "b", 3: HOST}), ((), {})]
    stopped = [cut_at(n, {"a": 3, "b": n}, (1, 2)) for n in (4, 5)]
    assert said(*cuts, *stopped)[3:] == [(("a",), {})] * 2, "what both have is not the other's alone"


def test_of_an_agent_of_before_a_stream_is_of_the_plane_it_was_alone_with():
    together, apart = cut_at(2, {"a": 2, "b": 2}), cut_at(3, {"a": 2, "b": 3}, streams=(2,))
    assert said(cut_at(1, {"a": 1, "b": 1}), together, apart) == [((), {}), ((), {}), (("a",), {2: "b"})]


def learned(memory, *looks):
    """What each look teaches of stream 1; a look: (seq, marks, rows of planes or None, second)."""
    found = []
    for seq, marks, of, second in looks:
        said = memory.check(cut_at(seq, marks, (1,), of), second * SECOND_US)
        found.append({planes_text(planes) for planes in said.streams.values()})
    return found


@pytest.mark.parametrize("of", [None, {"b": [0]}], ids=["an agent of before", "rows are told"])
def test_a_volume_that_moved_leaves_a_plane_that_does_not_come_again(of):
    memory = PlaneMemory()
    memory.restore([(gateway(1), stream(1), "a")])
    looks = [(n, {"a": 1, "b": n}, of, n) for n in range(1, 9)]
    assert learned(memory, *looks) == [set(), {"a b"}, set(), set(), set(), set(), {"b"}, set()]
    memory.restore([(gateway(1), stream(1), "a")])
    assert learned(memory, (9, {"a": 1, "b": 9}, of, 60)) == [{"b"}], "it was away before"


def test_a_stream_of_two_planes_whose_cuts_take_turns_has_both():
    memory = PlaneMemory()
    memory.restore([(gateway(1), stream(1), "a")])
    looks = [(n, {"a": (n + 1) // 2, "b": 1 + n // 2}, None, n) for n in range(1, 30)]
    assert [found for found in learned(memory, *looks) if found] == [{"a b"}]


def test_a_plane_that_is_no_longer_configured_is_nobody_s():
    memory = PlaneMemory()
    memory.restore([(gateway(1), stream(1), "a b")])
    looks = [(n, {"b": n, "c": n}, {"b": [0]}, n) for n in range(1, 4)]
    assert learned(memory, *looks) == [{"b"}, set(), set()]
    assert learned(memory, (4, {"b": 4, "c": 4}, {"b": [0], "c": [0]}, 4)) == [{"b c"}]


def test_a_stream_without_io_of_a_plane_with_another_name_needs_all_planes_until_it_has_io_again():
    both, memory = {"a": [0], "c": [1]}, PlaneMemory()
    for n in (1, 2):
        memory.check(cut_at(n, {"a": n, "c": n}, (1, 2), both), n * SECOND_US)
    renamed = [
        (3, {"b": 1, "c": 3}, {"c": [0]}, (2,)),
        (4, {"b": 2, "c": 4}, {"c": [0]}, (2,)),
        (5, {"b": 3, "c": 5}, {"b": [0], "c": [1]}, (1, 2)),
    ]
    found = []
    for seq, marks, of, rows in renamed:
        cut = cut_at(seq, marks, rows, of)
        streams = memory.check(cut, seq * SECOND_US).streams
        found.append({key == stream(1): planes_text(planes) for key, planes in streams.items()})
    assert found == [{True: ""}, {}, {True: "b"}]


def test_a_plane_that_got_another_name_while_nothing_was_read_is_noticed_with_the_first_cut():
    memory = PlaneMemory()
    memory.restore(
        [(gateway(1), stream(1), "a"), (gateway(2), stream(2), "a"), (gateway(1), stream(3), HOST)]
    )
    streams = memory.check(cut_at(7, {"b": 7}, (4,)), SECOND_US).streams
    assert streams == {stream(1): None}, "planes of two gateways may have one name; the host's are its own"
    state = memory.copy()
    assert memory.check(cut_at(8, {"b": 8}, (4,)), SECOND_US).streams == {}
    memory.go_back(state)


def test_a_stream_leaves_a_plane_that_is_gone_for_a_day():
    memory = PlaneMemory()
    memory.restore([(gateway(1), stream(1), "a b")])
    day = GONE_US // SECOND_US
    looks = [
        (1, {"a": 1, "b": 1}, None, 0),
        (2, {"a": 1, "b": 2}, None, 1),
        (3, {"a": 1, "b": 3}, None, day + 2),
    ]
    assert learned(memory, *looks) == [set(), set(), {"b"}]


# -- A plane that was stopped


def long_cut(seq, marks, start_s, end_s, un=None):
    cut = make_cut(
        seq, start_us=T0 + start_s * SECOND_US, duration_us=(end_s - start_s) * SECOND_US, streams=(1,)
    )
    return dataclasses.replace(cut, extra={"dp": marks} | ({"un": un} if un else {}))


def absorbed(*cuts):
    """(plane gaps in seconds by minute and plane, reads of stream 1 by minute, the window)."""
    window = IngestWindow(MINUTE_US)
    items = [IngestedCut(cut, 0, cut.start_unix_us + cut.duration_us) for cut in cuts]
    window.absorb(DecodedBatch(1, 1, cuts=items))
    gaps = {
        ((slot - T0) // MINUTE_US, plane): us // SECOND_US
        for (slot, _, plane), us in window.plane_gaps.items()
    }
    reads = {(slot - T0) // MINUTE_US: window.slot_columns(slot)[1] for slot in window.slots}
    ios = {minute: int((columns["reads"] + columns["writes"]).sum()) for minute, columns in reads.items()}
    return gaps, {minute: number for minute, number in ios.items() if number}, window


STOPPED = [cut_at(n, {"a": 1, "b": n}, streams=()) for n in range(1, 239)]


def test_a_late_cut_proves_nothing_of_the_time_in_which_its_plane_was_stopped():
    """It has cuts to second 2 and goes on in second 239: meanwhile the other one's cuts come without it."""
    late = long_cut(239, {"a": 2, "b": 238}, 2, 240)
    gaps, ios, window = absorbed(*STOPPED, late)
    covered = {(slot - T0) // MINUTE_US: sums[0] // SECOND_US for (slot, _), sums in window.coverage.items()}
    mine = {minute: covered[minute] - gaps.get((minute, "a"), 0) for minute in range(4)}
    others = {minute: covered[minute] - gaps.get((minute, "b"), 0) for minute in range(4)}
    assert mine == {0: 1, 1: 0, 2: 0, 3: 1}
    assert others == {0: 59, 1: 60, 2: 60, 3: 59}
    assert set(ios) == {3}, "its counts are of the time in which it went on"


def test_an_agent_says_when_a_plane_gave_no_answer():
    """No other source makes cuts meanwhile."""
    gaps, ios, _ = absorbed(cut_at(1, {"a": 1}), long_cut(2, {"a": 2}, 2, 242, {"a": 200 * SECOND_US}))
    assert gaps == {(0, "a"): 18, (1, "a"): 60, (2, "a"): 60, (3, "a"): 60, (4, "a"): 2}
    assert set(ios) == {0}
    for wrong in (7, {"a": -5}, {"a": "x"}, {"b": 9}):
        assert absorbed(cut_at(1, {"a": 1}), long_cut(2, {"a": 2}, 2, 242, wrong))[0] == {}


def test_a_plane_that_is_late_by_a_poll_was_busy():
    late = long_cut(5, {"a": 2, "b": 4}, 2, 6)
    gaps, _, _ = absorbed(*STOPPED[:4], late)
    assert gaps == {(0, "a"): 3, (0, "b"): 4}


def test_a_link_that_was_away_lost_no_time_of_its_planes():
    gaps, ios, _ = absorbed(cut_at(1, {"a": 1, "b": 1}), long_cut(2, {"a": 2, "b": 2}, 2, 240))
    assert (gaps, set(ios)) == ({}, {0, 1, 2, 3})


def test_an_older_cut_before_the_long_one_hides_nothing():
    first = long_cut(239, {"a": 2, "b": 238}, 2, 3)
    gaps, _, _ = absorbed(*STOPPED, first, long_cut(240, {"a": 3, "b": 238}, 3, 240))
    assert (gaps[1, "a"], gaps[2, "a"]) == (120, 120), "of its own cut, and of the others'"


# -- Cuts that are read again


def test_records_that_are_read_again_say_the_same():
    window = IngestWindow(MINUTE_US)
    cuts = [cut_at(n, {"a": 1, "b": n}) for n in range(1, 59)]
    items = [IngestedCut(c, 0, c.start_unix_us + SECOND_US) for c in cuts]
    window.absorb(DecodedBatch(1, 1, cuts=items[:30]))
    second = IngestWindow(MINUTE_US, window._memory)  # the next one of the same store
    second.absorb(DecodedBatch(2, 2, cuts=items[30:]))
    before = dict(window.plane_gaps), dict(second.plane_gaps)
    second.reset()
    second.absorb(DecodedBatch(2, 2, cuts=items[30:]))
    assert second.plane_gaps == before[1]
    second.reset()
    window.reset()
    window.absorb(DecodedBatch(1, 1, cuts=items[:30]))
    second.absorb(DecodedBatch(2, 2, cuts=items[30:]))
    assert (window.plane_gaps, second.plane_gaps) == before


def test_late_slots_are_those_that_may_have_been_judged():
    late = long_cut(239, {"a": 2, "b": 238}, 2, 240)
    _, _, window = absorbed(*STOPPED, late)
    assert {(slot - T0) // MINUTE_US for slot, _ in window.late} == {0, 1, 2}
    assert absorbed(*STOPPED)[2].late == set()


def test_a_gateway_that_was_gone_for_days_fills_slots_that_were_judged_without_it():
    window = IngestWindow(MINUTE_US)
    now_us, hours = T0 + 30 * 60 * MINUTE_US, (0, 10, 23, 25, 29, 29.99)
    cuts = [make_cut(n + 1, start_us=T0 + round(hour * 60 * MINUTE_US)) for n, hour in enumerate(hours)]
    first, *backlog = cuts
    items = [IngestedCut(first, 0, T0 + SECOND_US), *(IngestedCut(cut, 0, now_us) for cut in backlog)]
    window.absorb(DecodedBatch(1, 1, cuts=items))
    assert sorted((slot - T0) // MINUTE_US // 60 for slot, _ in window.late) == [10, 23, 25, 29, 29]


@pytest.mark.parametrize(("behind_us", "wanted"), [(8 * MINUTE_US, [1, 2, 3]), (SECOND_US, [])])
def test_what_a_gateway_sends_that_is_behind_at_a_start_may_have_been_judged_without_it(behind_us, wanted):
    """Before the start it may have been away for more than a day, and have caught up with most of it."""
    memory = IngestMemory(MINUTE_US)
    memory.restore_ends({gateway(1): T0 + MINUTE_US})
    window = IngestWindow(MINUTE_US, memory)
    cuts = [make_cut(n, start_us=T0 + n * MINUTE_US) for n in (1, 2, 3)]
    now_us = [c.start_unix_us + c.duration_us + behind_us for c in cuts]
    window.absorb(
        DecodedBatch(1, 1, cuts=[IngestedCut(c, 0, us) for c, us in zip(cuts, now_us, strict=True)])
    )
    assert sorted((slot - T0) // MINUTE_US for slot, _ in window.late) == wanted


def test_a_window_sums_the_time_without_a_plane_by_slot():
    window = IngestWindow(MINUTE_US)
    cuts = [cut_at(n, {"a": 1, "b": n}) for n in range(58, 63)]
    window.absorb(DecodedBatch(1, 1, cuts=[IngestedCut(c, 0, c.start_unix_us + SECOND_US) for c in cuts]))
    gaps = {(slot - T0) // MINUTE_US: us // SECOND_US for (slot, _, _), us in window.plane_gaps.items()}
    assert gaps == {0: 1, 1: 3}, "of the first cut it is not known"
    assert {(gw, plane) for _, gw, plane in window.plane_gaps} == {(gateway(1), "a")}
    window.reset()
    assert (window.plane_gaps, window.stream_planes) == ({}, {})

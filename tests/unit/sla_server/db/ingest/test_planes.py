"""Which planes a cut is of: what a stopped plane leaves unobserved, and whose streams are whose."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sla_server.db.ingest.accumulator import IngestWindow
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
    found = [memory.look(cut, cut.start_unix_us + cut.duration_us) for cut in cuts]
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
        assert memory.look(cut_at(1, marks), 0) == NOTHING


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


def test_a_stream_that_moved_leaves_a_plane_that_is_gone_for_a_day():
    memory = PlaneMemory()
    memory.restore({stream(1): "a", stream(2): ""})
    looks = [memory.look(cut_at(n, {"a": 1, "b": n}, streams=(1,)), at) for n, at in
             ((1, 0), (2, SECOND_US), (3, GONE_US + 2))]  # fmt: skip
    assert [dict(each.streams) for each in looks] == [{}, {stream(1): frozenset("ab")}, {}]
    memory.restore({stream(1): "a"})
    last = memory.look(cut_at(4, {"a": 1, "b": 4}, streams=(1,)), GONE_US + 3)
    assert dict(last.streams) == {stream(1): frozenset("b")}


def test_a_window_sums_the_time_without_a_plane_by_slot():
    window = IngestWindow(MINUTE_US)
    cuts = [cut_at(n, {"a": 1, "b": n}) for n in range(58, 63)]
    window.absorb(DecodedBatch(1, 1, cuts=[IngestedCut(c, 0, c.start_unix_us + SECOND_US) for c in cuts]))
    gaps = {(slot - T0) // MINUTE_US: us // SECOND_US for (slot, _, _), us in window.plane_gaps.items()}
    assert gaps == {0: 1, 1: 3}, "of the first cut it is not known"
    assert {(gw, plane) for _, gw, plane in window.plane_gaps} == {(gateway(1), "a")}
    window.reset()
    assert (window.plane_gaps, window.stream_planes) == ({}, {})

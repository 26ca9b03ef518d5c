"""What agents counted in a gap: by lifetime counters, within an epoch, of streams on both sides."""

from __future__ import annotations

import dataclasses

import pytest

from pmdaemon.wire.cut import COL
from sla_server.db.ingest.counters import CounterMemory
from tests.support.samples import EPOCH, T0, make_cut

SECOND_US = 1_000_000


def cut_at(seq, second, cum, *, own=10, epoch=EPOCH, streams=(1,)):
    """A cut of a second whose streams have done ``own`` reads in it and ``cum`` in their lives."""
    cut = make_cut(seq, epoch=epoch, start_us=T0 + second * SECOND_US, streams=streams)
    counters = cut.counters.copy()
    counters[COL["reads"]], counters[COL["writes"]] = own, 0
    counters[COL["cum_reads"]], counters[COL["cum_writes"]] = cum, 0
    return dataclasses.replace(cut, counters=counters)


def unseen(*cuts):
    memory = CounterMemory()
    return [memory.unseen_ios(cut, cut.start_unix_us) for cut in cuts]


def test_cuts_that_follow_each_other_prove_nothing():
    assert unseen(cut_at(1, 0, 10), cut_at(2, 1, 20), cut_at(3, 2, 500)) == [0, 0, 0]


@pytest.mark.parametrize("seq", [2, 62], ids=["a gap in time", "cuts are missing"])
def test_what_moved_in_a_gap_is_counted_without_the_cut_s_own(seq):
    assert unseen(cut_at(1, 0, 10), cut_at(seq, 61, 700)) == [0, 680]


def test_a_host_that_was_gone_counted_nothing():
    assert unseen(cut_at(1, 0, 10), cut_at(2, 61, 20)) == [0, 0]


def test_counters_of_another_epoch_are_not_compared():
    assert unseen(cut_at(1, 0, 10), cut_at(9, 61, 700, epoch=5)) == [0, 0]


def test_only_streams_of_both_cuts_are_compared():
    assert unseen(cut_at(1, 0, 10, streams=(1, 2)), cut_at(9, 61, 110, streams=(2, 3))) == [0, 90]


def test_a_cut_read_again_changes_nothing():
    first, second, third = cut_at(1, 0, 10), cut_at(2, 61, 20), cut_at(3, 62, 30)
    assert unseen(first, second, first, second, third) == [0] * 5

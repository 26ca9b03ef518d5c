"""Batches: columns are looked at together, but a bad cut is left out alone."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from pmdaemon.wire import cut as cuts
from pmdaemon.wire.cut import COL, HIST_DTYPE, MISSED_DTYPE
from sla_server.db.ingest.batch import decode_batch, put_aside
from sla_server.db.ingest.queue import IngestRecord
from tests.support.samples import EPOCH, cuts_message, gateway, make_cut


def decoded(*items):
    """A batch of two records: the first cut, and all others."""
    payloads = [cuts_message(items[:1]), cuts_message(items[1:])]
    return decode_batch([IngestRecord(7 + number, payload) for number, payload in enumerate(payloads)], 6)


def with_counter(name, value):
    counters = make_cut(2).counters.copy()
    counters[COL[name], 1] = value
    return {"counters": counters}


def entry(dtype, *values):
    return np.array([values], dtype=dtype)


BAD = {
    # Rows count from the own cut's first one: among all cuts' rows the third exists.
    "histogram entry names a row": {"hist": entry(HIST_DTYPE, 2, 5, 1)},
    "row or bucket": {"hist": entry(HIST_DTYPE, 1, 60_000, 1)},
    "missed entry names a row": {"missed": entry(MISSED_DTYPE, 2, cuts.IO_ANY, 5_000, 4, 1)},
    "misses more than it counted": {"missed": entry(MISSED_DTYPE, 0, cuts.IO_ANY, 5_000, 4, 5)},
    "I/O kind": {"missed": entry(MISSED_DTYPE, 0, 3, 5_000, 4, 1)},
    "negative": with_counter("reads", -1),
    "exceeds 2**47": with_counter("reads", 1 << 60),
    "more than a day": {"duration_us": 86_400_000_001},
}


def test_good_cuts_are_all_there_in_order_and_joined():
    items = [make_cut(seq, streams=range(seq)) for seq in (1, 2, 3)]
    batch = decoded(*items)
    assert [item.cut.seq for item in batch.cuts] == [1, 2, 3]
    assert batch.refused == []
    assert batch.columns.rows.tolist() == [1, 2, 3]
    assert batch.columns.counters.tolist() == np.concatenate([i.counters for i in items], axis=1).tolist()
    assert batch.columns.hist.tolist() == np.concatenate([item.hist for item in items]).tolist()
    assert batch.columns.missed_entries.tolist() == [len(item.missed) for item in items]


@pytest.mark.parametrize("problem", BAD)
def test_a_bad_cut_is_left_out_alone_and_named(problem):
    bad = dataclasses.replace(make_cut(2), **BAD[problem])
    batch = decoded(make_cut(1), bad, make_cut(3))
    assert [item.cut.seq for item in batch.cuts] == [1, 3]
    assert batch.columns.rows.tolist() == [2, 2]
    assert batch.columns.is_sound
    [refused] = batch.refused
    assert (refused.queue_seq, refused.position, refused.element) == (8, 0, gateway(1))
    assert problem in refused.reason
    assert "cut 2 " in refused.reason
    assert batch.marks == {(gateway(1), EPOCH): 3}, "it must not come again"


def test_a_batch_of_bad_cuts_only_is_empty():
    bad = dataclasses.replace(make_cut(1), **BAD["negative"])
    batch = decoded(bad, bad)
    assert (batch.cuts, batch.columns, len(batch.refused)) == ([], None, 2)


def test_cuts_without_rows_have_no_columns_to_fail():
    batch = decoded(make_cut(1, streams=()), make_cut(2), make_cut(3, streams=()))
    assert batch.columns.rows.tolist() == [0, 2, 0]
    assert batch.refused == []


def test_a_record_put_aside_is_on_disk_on_return(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, sync = [], os.fsync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    event = put_aside(tmp_path / "refused", IngestRecord(7, b"payload"), "out of range", 1_000)
    [kept] = (tmp_path / "refused").iterdir()
    assert kept.read_bytes() == b"payload"
    assert kept.name in event["text"]
    assert (event["kind"], event["at_us"]) == ("data-refused", 1_000)
    *parents, directory, content, name = synced
    assert directory == str(tmp_path), "the new directory's name"
    assert parents == [str(tmp_path.parent)], "that of the directory it is made in"
    assert Path(content).parent == tmp_path / "refused"
    assert name == str(tmp_path / "refused"), "content, then its name"

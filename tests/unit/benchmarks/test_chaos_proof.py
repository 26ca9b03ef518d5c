"""The proof of the chaos run finds what it is there to find."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chaos_proof import _broken_counters, _cuts_of, ledger

GW = "00000000-0000-4000-8000-000000000001"
LINE = "timestamp=2026-01-01T00:00:00Z level=debug process=link event={} \n"


def test_the_ledger_is_read_from_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        LINE.format("cut-spooled epoch=7 seq=1")
        + LINE.format("registered epoch=7 spooled_cuts=3")
        + LINE.format("cut-spooled epoch=7 seq=2")
        + LINE.format("dropping-cuts cuts=7:1-2,9:4-4")
    )
    made, dropped = ledger(log, GW)
    assert made == {(GW, 7, 1), (GW, 7, 2)}
    assert dropped == {(GW, 7, 1), (GW, 7, 2), (GW, 9, 4)}


def row(seq: int, reads: int, cum_reads: int, stream_id: int | None = 1, gap: int = 0) -> dict[str, Any]:
    made = dict.fromkeys(("writes", "read_bytes", "write_bytes"), 0)
    cumulative = {f"cum_{name}": 0 for name in made}
    return {
        "gateway_id": GW, "epoch": "7", "seq": seq, "raw_start_us": seq * 1000, "gap": gap,
        "stream_id": stream_id, "reads": reads, "cum_reads": cum_reads, **made, **cumulative,
    }  # fmt: skip


def test_a_cut_stored_twice_is_seen_also_side_by_side() -> None:
    rows = [
        row(1, 1, 1),
        row(1, 1, 1, stream_id=2),
        row(2, 1, 2),
        row(2, 1, 2),
        row(3, 0, 0, None),
        row(1, 1, 1),
    ]
    assert sorted(_cuts_of(rows)) == [(GW, 7, 1), (GW, 7, 1), (GW, 7, 2), (GW, 7, 2), (GW, 7, 3)]


def test_cumulative_counters_go_on_begin_anew_or_are_explained() -> None:
    assert _broken_counters([row(1, 5, 5), row(2, 3, 8), row(3, 2, 2), row(4, 1, 3)]) == []
    assert _broken_counters([row(1, 5, 5), row(5, 3, 20, gap=3)]) == [], "three cuts were dropped between"
    assert _broken_counters([row(1, 5, 5), row(4, 0, 0, None, gap=2), row(5, 3, 20)]) == []


def test_a_cut_that_is_missing_or_twice_breaks_the_counters() -> None:
    assert len(_broken_counters([row(1, 5, 5), row(3, 3, 20)])) == 1
    assert len(_broken_counters([row(1, 5, 5), row(2, 3, 8), row(3, 3, 8)])) == 1

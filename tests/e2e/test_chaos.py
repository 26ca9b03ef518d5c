"""The short form of ``make chaos``: twenty kills among faults on the whole product, then the proofs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import chaos


@pytest.mark.db
def test_no_cut_is_lost_or_doubled(tmp_path: Path) -> None:
    proof, faults = chaos.run(
        tmp_path / "run",
        seed=3,
        duration_s=600,
        most_kills=20,
        pause_s=0.7,
        database="postgresql",
        say=False,
    )
    assert proof.problems == []
    assert sum(count for name, count in faults.items() if name in chaos.VICTIMS) == 20
    assert faults[chaos.BOTH] > 0
    assert proof.events.sent > 0
    assert set(proof.events.arrived) == {"broken", "healthy", "file"}
    assert proof.delivered + proof.held + proof.dropped >= proof.made > 20

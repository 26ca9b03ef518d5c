"""Square bursts on the simulator, with the feed-forward term and without: a table of ``make bench-control``.

World: ``tests.support.bursts``, bursts of 12 s every 40 s for 820 s, each seed once with caps ahead of bursts
that are expected, once left to the loop alone, and once with a disk that is five times as fast from the 13th
burst on. *Bad*: seconds of a burst, and 8 s more, in which more than 5 % of the promised I/Os took too long;
*ahead*: bursts before which C was set; *kept*: I/Os of the neighbour, of those that it has with the loop
alone. Figures of a model, the same on every machine.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tests.support.bursts import PERIOD_S, run, square

SEEDS: Final = range(1, 5)
BURSTS: Final = 20
FASTER_FROM: Final = 12


def over_seeds(*, enabled: bool, faster: bool = False) -> dict[str, float]:
    """Means over the seeds; ``faster``: from burst ``FASTER_FROM`` on the disk is five times as fast."""
    onsets = square(BURSTS)
    faster_at = onsets[FASTER_FROM] - PERIOD_S / 2 if faster else None
    until = onsets[-1] + PERIOD_S
    found = [run(onsets, until, seed=seed, enabled=enabled, faster_at=faster_at) for seed in SEEDS]
    return {
        "bad_s": float(np.mean([np.mean(each.bad) for each in found])),
        "worst_bad_s": float(np.max([np.mean(each.bad) for each in found])),
        "ahead": float(np.mean([sum(each.ahead) for each in found])),
        "ahead_when_faster": float(np.mean([sum(each.ahead[FASTER_FROM:]) for each in found]))
        if faster
        else 0.0,
        "ios": float(np.mean([each.kept for each in found])),
    }


def measure() -> tuple[dict[str, float], dict[str, Any]]:
    """Values of the benchmark and its table; prints the rows."""
    rows = {
        "loop alone": over_seeds(enabled=False),
        "feed-forward": over_seeds(enabled=True),
        "disk faster": over_seeds(enabled=True, faster=True),
    }
    alone = rows["loop alone"]
    print(f"{'square bursts':<14} {'bad s':>7} {'worst':>7} {'ahead':>7} {'kept':>7}   of {BURSTS} bursts")
    for name, row in rows.items():
        kept = f"{row['ios'] / alone['ios']:.0%}" if name != "disk faster" else "-"
        print(f"{name:<14} {row['bad_s']:>7.2f} {row['worst_bad_s']:>7.2f} {row['ahead']:>7.1f} {kept:>7}")
    in_vain = rows["disk faster"]["ahead_when_faster"]
    print(f"of {BURSTS - FASTER_FROM} bursts on the faster disk, with C ahead: {in_vain:.1f}")
    values = {
        "burst_bad_s": rows["feed-forward"]["bad_s"],
        "burst_bad_alone_s": alone["bad_s"],
        "burst_bad_ratio": rows["feed-forward"]["bad_s"] / alone["bad_s"],
        "burst_in_vain": in_vain,
        "burst_kept_ratio": rows["feed-forward"]["ios"] / alone["ios"],
    }
    return values, rows


if __name__ == "__main__":
    measure()

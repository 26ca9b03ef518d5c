"""``make bench-policy``: bad seconds under bursts, with a policy and the loop, and with the loop alone.

World: ``tests.support.policy_world``. A policy is learnt from half an hour of bursts, and tried on half an
hour of others, on the simulator that the back-test uses; five times. *Bad*: seconds in which the promise was
broken; *kept*: answered I/Os, of those with the loop alone: a policy that is there before the burst costs its
neighbour more. Figures of a model, the same on every machine; nothing is timed.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Final

from benchmarks import harness
from tests.support.policy_world import tried

SEEDS: Final = range(1, 6)
MINUTES: Final = 30


def measure() -> harness.Sample:
    """All seeds; prints a row for each."""
    trials = [tried(seed, MINUTES, MINUTES) for seed in SEEDS]
    for seed, each in zip(SEEDS, trials, strict=True):
        print(
            f"seed {seed}: bad {each.alone.bad_s} s alone, {each.both.bad_s} s with a cap of {each.cap:.1f}; "
            f"slices {each.alone.bad} and {each.both.bad} of {each.both.judged}; "
            f"kept {each.both.ios / each.alone.ios:.0%}"
        )
    alone, both = (sum(getattr(each, name).bad_s for each in trials) for name in ("alone", "both"))
    kept, of = (sum(getattr(each, name).ios for each in trials) for name in ("both", "alone"))
    values = {"bad_alone_s": alone, "bad_s": both, "bad_ratio": both / alone, "kept_ratio": kept / of}
    return harness.Sample(values, {"trials": [asdict(each) for each in trials]})


def main() -> None:
    """Measure."""
    harness.main("policy", measure, most_runs=1, is_timed=False)


if __name__ == "__main__":
    main()

"""The gateway's data plane under random use: see ``nbd_model`` for requests, ``nbd_bytes`` for bytes."""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.fuzz import Counts, nbd_targets
from tests.fuzz.nbd_bytes import fuzz_parsers, fuzz_plane
from tests.fuzz.nbd_clients import drive
from tests.support.planes import Processes

OPERATIONS = 400  # of each of four connections, a case
LARGEST_BYTES = 8 << 20
BAD_CONNECTIONS = 200
PARSER_CASES = 500


def run(seconds: float, seed: int) -> Counts:
    """Fuzz for so long, one case at least; a case that has begun is ended.

    Returns:
        How many operations of all kinds and bad connections there were; the latter are the refused ones.

    Raises:
        AssertionError: with seed and case, at the first failure. ``case(seed, number)`` repeats it.
    """
    counts: Counter[str] = Counter()
    end_s, number = time.monotonic() + seconds, 0
    while not number or time.monotonic() < end_s:
        try:
            counts.update(case(seed, number))
        except AssertionError as exc:
            raise AssertionError(f"nbd, seed {seed}, case {number}: {exc}") from exc
        number += 1
    bad = counts["bad connections"]
    return Counts(cases=counts.total(), refused=bad)


def case(seed: int, number: int) -> dict[str, int]:
    """One case: a target under random requests, then, if it is a plane, under bad bytes."""
    rng = random.Random(f"{seed}/{number}")
    kinds = nbd_targets.PLANES + nbd_targets.PEERS
    kind = kinds[number % len(kinds)]
    fuzz_parsers(rng, PARSER_CASES)
    with tempfile.TemporaryDirectory(prefix="sla-fuzz-") as name:
        folder = Path(name)
        processes = Processes(folder)
        try:
            target = nbd_targets.start(processes, folder, kind, rng.getrandbits(32))
            counts = drive(target.clients(rng.getrandbits(32), OPERATIONS, LARGEST_BYTES))
            if kind in nbd_targets.PLANES:
                fuzz_plane(rng, target, BAD_CONNECTIONS)
                counts["bad connections"] = BAD_CONNECTIONS
            for sign in ("handler-failed", "timer-failed", "pump-failed", "Traceback"):
                assert sign not in processes.logs(), f"the plane reports {sign}"
        except AssertionError as exc:
            raise AssertionError(f"{kind}: {exc}\n{processes.logs()[-2000:]}") from exc
        finally:
            processes.stop_all()
    return counts | {"cases": 1}

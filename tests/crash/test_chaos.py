"""Random kills, a hundred of them; ``make crash`` sets SLA_CRASH_S for as many as there are in that time."""

from __future__ import annotations

import os

import pytest

from tests.support import mailbox_chaos

CRASH_S = float(os.environ.get("SLA_CRASH_S", "0"))
SEED = int(os.environ.get("SLA_CRASH_SEED", "1"))
KILLS = 1 << 30 if CRASH_S else 100
LIMIT_S = 600.0  # a hang fails the test; no run comes near it


@pytest.mark.parametrize("form", ["lanes", "shared"])
def test_nothing_acknowledged_is_lost_or_doubled(form: str) -> None:
    outcome = mailbox_chaos.run(form, kills=KILLS, limit_s=CRASH_S or LIMIT_S, seed=SEED)
    assert (outcome.lost, outcome.doubled, outcome.disordered) == (0, 0, 0), outcome
    assert outcome.kills >= min(KILLS, 100)
    assert outcome.posted > 1000
    print(outcome)

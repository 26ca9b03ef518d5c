"""Random kills for a bounded time; ``make crash`` sets SLA_CRASH_S for a longer one."""

from __future__ import annotations

import os

import pytest

from tests.support import mailbox_chaos

LIMIT_S = float(os.environ.get("SLA_CRASH_S", "6"))
SEED = int(os.environ.get("SLA_CRASH_SEED", "1"))


@pytest.mark.parametrize("form", ["lanes", "shared"])
def test_nothing_acknowledged_is_lost_or_doubled(form: str) -> None:
    outcome = mailbox_chaos.run(form, kills=1 << 30, limit_s=LIMIT_S, seed=SEED)
    assert (outcome.lost, outcome.doubled, outcome.disordered) == (0, 0, 0), outcome
    assert outcome.kills >= 20
    assert outcome.posted > 1000
    print(outcome)

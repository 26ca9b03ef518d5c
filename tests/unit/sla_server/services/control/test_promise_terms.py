"""What promises ask, as the windows and slices have it alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep
from sla_server.agreements.rules import rule_of
from sla_server.services.control.promise_terms import PromiseTerms, hung_us
from tests.support.agreements import agreement, simple
from tests.support.worlds import promise

LONG = (CurveStep(100, 2_000_000), CurveStep(1000, 8_000_000))


@pytest.mark.parametrize(
    ("over", "wanted_us"),
    [
        ({}, 5_000_000),
        ({"curve": LONG}, 8_000_000),
        ({"metric": "iops", "curve": (), "promised": 10.0}, 5_000_000),
        ({"metric": "availability", "curve": (CurveStep(1000, 2_000_000),)}, 2_000_000),
    ],
)
def test_a_stream_hangs_live_as_long_as_in_slices(over: dict[str, Any], wanted_us: int) -> None:
    clauses = agreement(simple()).judged[0].applicability
    assert hung_us(promise(**over)) == rule_of(promise(**over), clauses).hung_us == wanted_us


def test_control_is_asked_for_no_hang_of_one_stream_and_remembers_nothing_over_a_pause() -> None:
    terms = PromiseTerms(2)
    for row, is_shown in enumerate((True, False)):
        terms.put(row, promise(), 0.95, 0.7, is_shown)
    assert terms.hung_us.tolist() == [5_000_000, np.inf]
    assert terms.remember_us.tolist() == [60e6, 0]

"""Waits between tries."""

from __future__ import annotations

import random

from pmdaemon.runtime.backoff import Backoff, doubled


def test_waits_double_to_their_limit_and_begin_again() -> None:
    backoff = Backoff(0.2, 1.0, 0.0, random.Random(1))
    assert [backoff.failed() for _ in range(4)] == [0.2, 0.4, 0.8, 1.0]
    backoff.succeeded()
    assert backoff.failed() == 0.2


def test_jitter_only_shortens() -> None:
    backoff = Backoff(1.0, 1.0, 0.3, random.Random(1))
    waits = [backoff.failed() for _ in range(50)]
    assert 0.7 <= min(waits) < max(waits) <= 1.0


def test_doubled_is_a_number_however_often() -> None:
    assert [doubled(0.5, times, 15.0) for times in (-1, 0, 1, 4, 5, 100_000)] == [
        0.5,
        0.5,
        1.0,
        8.0,
        15.0,
        15.0,
    ]
    assert doubled(3, 2, 100) == 12

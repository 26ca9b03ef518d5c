"""Attribution: the fit against a slow one, known culprits, and where it is no more than a correlation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.policy_jobs.attribution import (
    OTHERS,
    SharedIntervals,
    attribute,
    describe,
    inflation,
    non_negative_ridge,
)

Floats = npt.NDArray[np.float64]
MINUTE_US = 60_000_000


def slow_ridge(x: Floats, y: Floats, weight: Floats, ridge: float) -> Floats:
    """Of all sets of columns that are 0, the one with the least error of those with nothing below 0."""
    share = weight / weight.sum()
    centred, target = x - share @ x, y - share @ y
    scale = np.sqrt(share @ centred**2)
    root = np.sqrt(share)[:, None]
    rows = np.vstack([root * centred / scale, np.sqrt(ridge) * np.eye(x.shape[1])])
    right = np.concatenate([np.sqrt(share) * target, np.zeros(x.shape[1])])
    best, least = np.zeros(x.shape[1]), float(right @ right)
    for size in range(1, x.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(x.shape[1]), size)):
            found = np.zeros(x.shape[1])
            found[chosen] = np.linalg.lstsq(rows[:, chosen], right, rcond=None)[0]
            error = float(((rows @ found - right) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = found, error
    return best / scale


@given(st.integers(0, 10_000), st.integers(1, 4), st.sampled_from([0.001, 0.01, 0.5]))
def test_the_fit_is_the_best_of_all_sets_of_columns(seed: int, columns: int, ridge: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(25, columns)) + rng.normal(size=(25, 1))
    y = x @ rng.normal(size=columns) + rng.normal(size=25)
    weight = rng.uniform(1, 10, 25)
    assert non_negative_ridge(x, y, weight, ridge) == pytest.approx(
        slow_ridge(x, y, weight, ridge), rel=1e-5, abs=1e-7
    )


def test_inflation_is_that_of_the_regression_on_the_others() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(200, 3))
    x[:, 2] = x[:, 0] + 0.3 * x[:, 2]
    others = np.column_stack([np.ones(200), x[:, 1], x[:, 2]])
    left = x[:, 0] - others @ np.linalg.lstsq(others, x[:, 0], rcond=None)[0]
    assert inflation(x)[0] == pytest.approx(x[:, 0].var() / left.var(), rel=1e-5)
    assert np.isinf(inflation(np.column_stack([x, np.ones(200)]))[3])


def history(n: int = 400, seed: int = 1, together: bool = False) -> SharedIntervals:
    """The backend misses above a load of 400; batch brings it there, mail is always the same noise."""
    rng = np.random.default_rng(seed)
    erp, mail = rng.uniform(60, 100, n), rng.uniform(50, 90, n)
    batch = np.where(rng.random(n) < 0.2, rng.uniform(280, 400, n), rng.uniform(0, 60, n))
    twin = batch * 0.5 if together else rng.uniform(30, 50, n)
    used = np.column_stack([batch, erp, mail, twin])
    broken = used.sum(axis=1) > 400
    counted = np.full(n, 5000.0)
    missed = rng.binomial(5000, np.where(broken, 0.3, 0.005)).astype(float)
    at_us = np.arange(n, dtype=np.int64) * MINUTE_US
    names = ("batch", "erp", "mail", "twin")
    load, times = used.sum(axis=1), np.ones(n)
    return SharedIntervals(at_us, counted, missed, load, times, used, names, frozenset({"erp"}), 0.05)


def test_the_culprit_is_found_with_its_share_and_what_would_be_without() -> None:
    seen = history()
    (first, *others) = attribute(seen)
    bad = seen.missed > 0.05 * seen.counted
    assert first.volume == "batch"
    assert first.share > 0.9
    assert first.likely_cause, first.reason
    assert first.bad == first.avoided_bad == bad.sum()
    late = seen.missed[bad].sum()
    assert first.avoided_missed == pytest.approx(late * (1 - 0.005 / 0.3), rel=0.02)
    assert (first.first_us, first.last_us) == (seen.at_us[bad].min(), seen.at_us[bad].max())
    assert bad[first.worst_us // MINUTE_US]
    assert all(harm.share < 0.05 or not harm.likely_cause for harm in others)
    assert "erp" not in {harm.volume for harm in others}, "a victim is not blamed"


def test_volumes_that_act_together_are_a_correlation_and_share() -> None:
    found = {harm.volume: harm for harm in attribute(history(together=True))}
    assert not found["batch"].likely_cause
    assert "together with" in found["batch"].reason
    assert found["batch"].share + found["twin"].share > 0.9
    assert min(found["batch"].share, found["twin"].share) > 0.2


def test_few_intervals_are_a_correlation() -> None:
    found = attribute(history(n=29))
    assert found[0].volume == "batch"
    assert not any(harm.likely_cause for harm in found)
    assert found[0].reason == "only 29 intervals, 30 needed"


def test_small_volumes_are_counted_together() -> None:
    seen = history()
    small = np.full((len(seen.at_us), 10), 1.0)
    wide = dataclasses.replace(
        seen,
        load=seen.load + 10,
        used=np.column_stack([seen.used, small]),
        volumes=(*seen.volumes, *(f"small-{i}" for i in range(10))),
    )
    names = [harm.volume for harm in attribute(wide)]
    assert names[0] == "batch"
    assert not [name for name in names if name.startswith("small")]
    assert OTHERS not in names, "they use little and always the same"


def test_what_smaller_volumes_do_together_is_a_correlation() -> None:
    """Batch is many small volumes, of which none is told apart."""
    seen = history()
    parts = dataclasses.replace(seen, used=seen.used[:, 1:], volumes=seen.volumes[1:])
    (first, *_) = attribute(parts)
    assert (first.volume, first.likely_cause) == (OTHERS, False)
    assert first.share > 0.9


def test_an_interval_that_stands_for_several_counts_as_often() -> None:
    seen = history()
    bad = seen.missed > 0.05 * seen.counted
    some = bad | (np.arange(len(bad)) % 4 == 0)
    few = SharedIntervals(
        *(column[some] for column in (seen.at_us, seen.counted, seen.missed, seen.load)),
        np.where(bad, 1.0, (~bad).sum() / (some & ~bad).sum())[some],
        seen.used[some],
        seen.volumes,
        seen.victims,
        seen.allowed_ratio,
    )
    (one, *_), (other, *_) = attribute(seen), attribute(few)
    assert (one.volume, one.bad, one.avoided_bad) == (other.volume, other.bad, other.avoided_bad)
    assert one.avoided_missed == pytest.approx(other.avoided_missed, rel=0.05)


def test_where_nothing_was_bad_none_is_blamed() -> None:
    seen = history()
    assert attribute(dataclasses.replace(seen, missed=seen.missed * 0)) == []


def test_what_is_said_of_a_cause_and_of_a_correlation() -> None:
    row = {"volume": "b", "sla": "gold", "objective": "p95", "backend": "disk", "bad": 4, "avoided_bad": 3}
    told = describe({**row, "share": 0.62, "likely_cause": True, "reason": ""})
    rest = "without it 3 of 4 bad intervals would be good"
    assert told == [f"  b hurt gold/p95 on disk (likely cause): 62% of the harm; {rest}"]
    told = describe({**row, "share": 0.0, "likely_cause": False, "reason": "only 5 intervals"})
    assert told == [f"  b may have hurt gold/p95 on disk (correlation): {rest}", "    only 5 intervals"]

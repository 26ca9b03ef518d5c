"""The cost of an I/O from what is stored: found where the data tell it, and where not, why not."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from sla_server.policy_jobs.cost_model import cost_rows, describe, fit

KIB = 1024


def moments(slots: Iterable[tuple[int, int, float, float]]) -> dict[str, float]:
    """The sums that Spark makes, of slots of (reads, writes, bytes an I/O, us an I/O)."""
    rows = list(slots)
    w = np.array([reads + writes for reads, writes, _, _ in rows], dtype=float)
    x = np.array([(r / (r + n), n / (r + n), size / 65_536) for r, n, size, _ in rows]).reshape(-1, 3)
    y = np.array([us for *_, us in rows], dtype=float)
    found = {"n": len(rows), "w": w.sum(), "y": (w * y).sum(), "yy": (w * y * y).sum()}
    found["x2"] = (w * x[:, 2]).sum()
    for i in range(3):
        found[f"x{i}y"] = (w * x[:, i] * y).sum()
        found |= {f"x{i}x{j}": (w * x[:, i] * x[:, j]).sum() for j in range(i, 3)}
    return {"backend": "disk", **found}


def slots(count=200, read_us=100.0, write_us=180.0, unit_us=50.0, noise=0.05, seed=1, writes=True):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        reads, others = int(rng.integers(20, 2000)), int(rng.integers(1, 2000)) if writes else 0
        size = float(rng.choice([4, 16, 64, 256])) * KIB
        us = (reads * read_us + others * write_us) / (reads + others) + size / 65_536 * unit_us
        yield reads, others, size, us * (1 + noise * rng.standard_normal())


def test_what_made_the_data_is_found_again():
    found = fit(moments(slots()))
    assert found.cost_write == pytest.approx(1.8, rel=0.1)
    assert found.cost_bytes == pytest.approx(2 * 65_536, rel=0.1)
    assert found.read_us == pytest.approx(100, rel=0.1)
    assert found.r2 > 0.9
    assert "in 200 slots" in found.reason


def test_a_backend_that_is_only_read_has_no_cost_of_writes():
    found = fit(moments(slots(writes=False)))
    assert found.cost_write is None
    assert found.cost_bytes == pytest.approx(2 * 65_536, rel=0.1)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (slots(count=29), "only 29 slots"),
        ([(100, 100 + n, 4096.0, 100.0 + n % 3) for n in range(50)], "nearly all of one size"),
        (
            [(100, 100, (n % 4 + 1) * 65_536.0, 100.0 + 50 * (n % 4)) for n in range(50)],
            "always change together",
        ),
        (slots(noise=8.0), "of the time only"),
        (
            [(n % 7 + 20, n % 5 + 1, (n % 4 + 1) * 4096.0, 100.0 - 20 * (n % 4)) for n in range(80)],
            "no longer",
        ),
        ([(0, 20 + n, (n % 4 + 1) * 4096.0, 100.0) for n in range(80)], "no reads"),
    ],
)
def test_where_the_data_do_not_tell_the_reason_is_said(data, why):
    found = fit(moments(data))
    assert (found.cost_write, found.cost_bytes) == (None, None)
    assert why in found.reason


def test_rows_are_for_the_report_and_for_people():
    found = {"b": moments(slots()), "a": moments(slots(count=3))}
    none, good = cost_rows([{**each, "backend": name} for name, each in found.items()])
    assert (good["backend"], none["backend"]) == ("b", "a")
    assert isinstance(good["cost_bytes"], int)
    first, second = describe(good)
    assert first.startswith("  cost of an I/O on b: cost_read = 1, cost_write = 1.")
    assert 'exports with cost = "fitted" have them' in second
    assert "not known, the constants stay" in describe(none)[0]

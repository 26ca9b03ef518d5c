"""The cost of an I/O from what is stored: found where the data tell it, and where not, why not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from sla_server.policy_jobs import cost_model
from sla_server.policy_jobs.cost_model import cost_rows, describe, fit

KIB = 1024


def moments(
    slots: Iterable[tuple[int, int, float, float]], random: Iterable[float] | None = None
) -> dict[str, Any]:
    """The sums of slots of (reads, writes, bytes an I/O, us an I/O), and of their share of random I/Os."""
    reads, writes, size, us = np.array(list(slots), dtype=float).reshape(-1, 4).T
    ios = reads + writes
    share = np.zeros(len(ios)) if random is None else np.array(list(random))
    x = (reads / ios, writes / ios, size / 65_536, share)
    return {"backend": "disk", **cost_model.moments(x, us, ios, is_placed=random is not None)}


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


def jumping(count=300, jump_us=4000.0, seed=3):
    """A disk: large blocks are read in sequence, small ones anywhere; (slot, share of random I/Os)."""
    rng = np.random.default_rng(seed)
    for reads, writes, size, us in slots(count, noise=0.0, seed=seed):
        share = float(rng.beta(1, 4) if size > 32 * KIB else rng.beta(4, 1))
        yield (reads, writes, size, us + share * jump_us), share


def test_what_a_jump_costs_is_told_from_what_bytes_cost():
    data, random = zip(*jumping(), strict=True)
    found, blind = fit(moments(data, random)), fit(moments(data))
    usual = float(np.average(random, weights=[row[0] + row[1] for row in data]))
    assert found.random_us == pytest.approx(4000)
    assert found.sequential == pytest.approx(1 - usual)
    assert found.read_us == pytest.approx(100 + 4000 * usual)
    assert found.cost_write == pytest.approx((180 + 4000 * usual) / found.read_us)
    assert found.cost_bytes == pytest.approx(65_536 * found.read_us / 50)
    assert found.r2 == pytest.approx(1)
    assert blind.cost_bytes is None, "larger I/Os seem to be the faster ones"
    assert (blind.random_us, blind.sequential) == (None, None)


@pytest.mark.parametrize(("share", "sequential"), [(1.0, 0.0), (0.0, 1.0), (0.4, 0.6)])
def test_a_share_of_random_io_that_does_not_vary_is_part_of_the_other_costs(share, sequential):
    data = list(slots())
    found, without = fit(moments(data, [share] * len(data))), fit(moments(data))
    assert (found.random_us, found.sequential) == (None, pytest.approx(sequential))
    assert (found.cost_write, found.cost_bytes, found.read_us) == pytest.approx(
        (without.cost_write, without.cost_bytes, without.read_us)
    )


def test_jumps_that_take_no_time_have_no_cost_below_0():
    data = list(slots())
    random = np.random.default_rng(5).uniform(0, 1, len(data))
    faster = [(r, w, size, us - 30 * jump) for (r, w, size, us), jump in zip(data, random, strict=True)]
    assert fit(moments(faster, random)).random_us == 0


def test_rows_are_for_the_report_and_for_people():
    found = {"b": moments(slots()), "a": moments(slots(count=3))}
    none, good = cost_rows([{**each, "backend": name} for name, each in found.items()])
    assert (good["backend"], none["backend"]) == ("b", "a")
    assert isinstance(good["cost_bytes"], int)
    first, second = describe(good)
    assert first.startswith("  cost of an I/O on b: cost_read = 1, cost_write = 1.")
    assert 'exports with cost = "fitted" have them' in second
    assert "not known, the constants stay" in describe(none)[0]
    (jumps,) = cost_rows([moments(*zip(*jumping(), strict=True))])
    assert describe(jumps)[2].startswith("    a random I/O takes 4000 us more than a sequential one; ")

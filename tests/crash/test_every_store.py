"""Death at every single store, in both forms: of senders, recipients, attach, adoption and repair.

What dies, and what must hold afterwards: tests/support/store_deaths.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.forks import Children
from tests.support.store_deaths import FULL

FULL_LIMIT_S = 4 * 3600


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("tests.support.store_deaths") as made:
        if FULL:
            made.limit_s = FULL_LIMIT_S
        yield made


def sweep(children: Children, *arguments: str | float) -> None:
    code, output = children.run(*arguments)
    assert code == 0, output


@pytest.mark.parametrize("form", ["lanes", "shared"])
def test_three_processes_may_die_at_any_store(children: Children, form: str) -> None:
    sweep(children, "three", form)


@pytest.mark.parametrize("form", ["lanes", "shared"])
def test_the_repair_of_a_death_may_die_at_any_store(children: Children, form: str) -> None:
    sweep(children, "repair", form)


@pytest.mark.parametrize("form", ["lanes", "shared"])
@pytest.mark.parametrize("stands_at", [1, 2])
def test_a_survivor_looks_on_from_within_a_run_whose_repair_has_died(
    children: Children, form: str, stands_at: int
) -> None:
    """Its first look comes when the sender has died freeing the run, and its successor going on with it."""
    sweep(children, "survivor", form, stands_at)

"""Trees of the whole product are parsed once for these tests, and not kept for those after them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from docs import house_lint


@pytest.fixture(scope="package", autouse=True)
def _no_trees_afterwards() -> Iterator[None]:
    """Two hundred megabytes in a million objects, which each later collection of garbage would walk."""
    yield
    house_lint.modules.cache_clear()

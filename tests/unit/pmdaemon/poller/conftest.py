"""The pair most tests of this folder step through."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.pair import PairRig


@pytest.fixture
def rig() -> Iterator[PairRig]:
    made = PairRig()
    yield made
    made.close()

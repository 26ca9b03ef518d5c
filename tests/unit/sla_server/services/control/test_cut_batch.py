from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, HIST_DTYPE, MISSED_DTYPE, Cut
from pmdaemon.wire.kinds import Kind
from sla_server.services.control.cut_batch import read_cuts
from tests.support.services import GATEWAY, START_US

ROWS = [[7] + [1] * 17, [8] + [2] * 17]


def made(seq: int, rows: int = 2) -> Cut:
    hist = np.array([(rows - 1, 3, 5)] if rows else [], HIST_DTYPE)
    missed = np.array([(rows - 1, 0, 5_000, 4, 1)] if rows else [], MISSED_DTYPE)
    counters = cuts.rows_array(ROWS[:rows])
    return Cut(GATEWAY, 5, seq, START_US, 1_000_000, 0, 0, counters, hist, missed)


def message(parts: Sequence[bytes], count: int | None = None) -> frame.Frame:
    header = {"n": len(parts) if count is None else count}
    return frame.decode(frame.encode(Kind.CUTS, header, b"".join(parts)))


def read(parts: Sequence[bytes]) -> tuple[list[tuple[int, int]], list[str]]:
    """(position, seq) of the cuts, and what was said of bad ones."""
    bad: list[str] = []
    found = read_cuts(message(parts), lambda error: bad.append(str(error)))
    return [(at, cut.seq) for at, cut in found], bad


def test_cuts_come_as_they_were_sent_the_empty_and_the_large() -> None:
    sent = [made(1), made(2, 0), made(3, 1)]
    found = read_cuts(message([cuts.encode(item) for item in sent]), _unexpected)
    assert [at for at, _ in found] == [0, 1, 2]
    for (_, got), item in zip(found, sent, strict=True):
        for one, other in ((got.counters, item.counters), (got.hist, item.hist), (got.missed, item.missed)):
            assert np.array_equal(one, other)
    assert read([]) == ([], [])


def _unexpected(error: BadCut) -> None:
    raise AssertionError(error)


def wrong(name: str) -> Cut:
    item = made(9)
    counters = item.counters.copy()
    counters[COL["held"], 1] = -1
    changes: dict[str, Any] = {
        # Row 2 does not exist here; row 1 does, so a mixed-up count of rows would not see it.
        "hist row": {"hist": np.array([(2, 3, 5)], HIST_DTYPE)},
        "hist bucket": {"hist": np.array([(1, 60_000, 5)], HIST_DTYPE)},
        "missed row": {"missed": np.array([(2, 0, 5_000, 4, 1)], MISSED_DTYPE)},
        "missed more": {"missed": np.array([(1, 0, 5_000, 4, 5)], MISSED_DTYPE)},
        "io": {"missed": np.array([(1, 3, 5_000, 4, 1)], MISSED_DTYPE)},
        "negative": {"counters": counters},
        "too large": {"counters": np.where(counters == 2, cuts.MAX_COUNTER + 1, abs(counters))},
    }
    return replace(item, **changes[name])


@pytest.mark.parametrize(
    "name", ["hist row", "hist bucket", "missed row", "missed more", "io", "negative", "too large"]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_with_bad_columns_is_left_out_wherever_it_stands(name: str, place: int) -> None:
    parts = [cuts.encode(made(1)), cuts.encode(made(2, 0))]
    parts.insert(place, cuts.encode(wrong(name)))
    found, bad = read(parts)
    assert [seq for _, seq in found] == [1, 2]
    assert [at for at, _ in found] == [at for at in range(3) if at != place]
    assert len(bad) == 1


def test_one_with_a_bad_header_is_left_out_too() -> None:
    bad_header = frame.encode(Kind.CUT, {"gw": b"short"})
    found, bad = read([cuts.encode(made(1)), bad_header, cuts.encode(made(3))])
    assert found == [(0, 1), (2, 3)]
    assert len(bad) == 1


def test_fewer_cuts_than_announced_are_no_message() -> None:
    with pytest.raises(WireError, match="announces 2"):
        read_cuts(message([cuts.encode(made(1))], 2), _unexpected)

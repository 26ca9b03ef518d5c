"""Rows of the signal table: given, freed, asked about all at once."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalTable
from sla_server.services.control.verdicts import NOTHING
from sla_server.services.control.windows import NEVER
from tests.support.windows import OnePromise, random_pieces
from tests.support.worlds import promise

S = 1_000_000_000
SETTINGS = ControlSettings()
STEPS = (CurveStep(60, 5_000), CurveStep(200, 12_000))


def test_rows_are_used_again_empty_and_arrays_grow():
    table = SignalTable(SETTINGS)
    rows = [table.allot(promise(f"p{i}"), f"g{i}", "", 1.0) for i in range(200)]
    table.windows.join(5, "elsewhere")
    table.windows.add(
        table.windows.member[[5]],
        np.array([0]),
        random_pieces(random.Random(1), [promise()], S, 1.0, steps=1),
    )
    assert rows[5].last_piece_ns == S
    table.free(5)
    again = table.allot(promise("new", curve=(*STEPS, CurveStep(900, 50_000))), "g", "", 1.0)
    assert (again.row, again.last_piece_ns, again.signal()) == (5, None, NOTHING)
    assert table.windows.terms.threshold_us[5].tolist() == [5_000, 12_000, 50_000]
    assert table.windows.terms.threshold_us[6].tolist()[:1] == [12_000]
    assert table.windows.first_ns[5] == NEVER
    table.free(5)
    assert sorted(table.windows.member[[table.allot(promise(), "g", "", 1.0).row for _ in range(2)]]) == [
        5,
        200,
    ]


def test_at_risk_rows_are_found_until_their_windows_go():
    table, made = SignalTable(SETTINGS), promise(ms=5)
    row = table.allot(made, "g", "disk", SETTINGS.r_on)
    for second in (1, 2, 3):
        pieces = random_pieces(random.Random(5), [made], second * S, 1.0, steps=1)
        pieces.missed[:] = pieces.done[:, None]
        table.windows.add(table.windows.member[[row.row]], np.array([0]), pieces)
        table.assess(second * S, 3.0)
    assert table.risky_rows(3 * S, 30.0) == [row.row]
    row.reset()
    assert table.risky_rows(3 * S, 30.0) == []


def test_the_newest_window_changes_and_is_over_or_not():
    made, seen = OnePromise(), []
    for second, ms in enumerate((20, 1, 20), 1):
        made.feed(100, ms, second)
        seen.append(made.signals.newest_over(np.array([made.row.row])))
    assert [over.tolist() for _, over in seen] == [[True], [False], [True]]
    assert len({int(change[0]) for change, _ in seen}) == 3
    made.signals.set_excluded(made.row.row, True)
    assert made.signals.newest_over(np.array([made.row.row]))[1].tolist() == [False]
    made.signals.set_excluded(made.row.row, False)
    made.row.reset()
    assert made.signals.newest_over(np.array([made.row.row]))[1].tolist() == [False]


@pytest.mark.parametrize("seed", range(5))
def test_signals_of_many_rows_at_once_are_those_of_one_after_another(seed):
    """Of a table for curves of one step, too, against one that has room for more."""
    rng = random.Random(seed)
    promises = [promise(f"p{i}", curve=STEPS[i % 2 :][:1], percentile=90.0 + i) for i in range(6)]
    narrow, wide = SignalTable(SETTINGS), SignalTable(SETTINGS)
    found = [[table.allot(each, "g", "", SETTINGS.r_on) for each in promises] for table in (narrow, wide)]
    wide.allot(promise("steps", curve=STEPS), "g", "", SETTINGS.r_on)
    for second in range(1, 20):
        pieces = random_pieces(rng, promises, second * S, 0.7, steps=1)
        twice = replace(pieces, counted=pieces.counted[:, [0, 0]], missed=pieces.missed[:, [0, 0]])
        numbers = np.array([row.row for row in found[0]])
        narrow.windows.add(narrow.windows.member[numbers], slice(None), pieces)
        wide.windows.add(wide.windows.member[numbers], slice(None), twice)
        narrow.work_out(found[0])
        assert all(row.is_known for row in found[0])
        assert [row.signal() for row in found[0]] == [row.signal() for row in found[1]]
        assert narrow.assess(second * S, SETTINGS.silent_s) == wide.assess(second * S, SETTINGS.silent_s)

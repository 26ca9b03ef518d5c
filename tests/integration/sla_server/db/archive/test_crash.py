"""kill -9 between every two steps of housekeeping; afterwards nothing is lost, doubled or left over."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.archive import FilesRig, archived, counted, later
from tests.support.archive_crash_child import LIMITS
from tests.support.database import CHILD_LIMIT_S
from tests.support.paths import SUPPORT
from tests.support.samples import MINUTE_US, T0, Model, cuts_message, make_cut

CHILD = SUPPORT / "archive_crash_child.py"
POINTS = [
    ("export-published", 1),  # two files of rollups without rows
    ("export-committed", 2),  # moved, one hour of three still in SQL
    ("given-up", 1),  # rows marked, files there
    ("merge-published", 1),  # the merged file without its row
    ("merge-committed", 1),  # swapped, parts still there
    ("file-deleted", 1),  # a replaced file gone, its row there
    ("row-deleted", 1),
]
HOURS = 6.5


def filled(database):
    """Six hours of cuts, a file every 20 minutes; returns all cuts."""
    rig = FilesRig(database)
    items = []
    for n in range(18):
        items.append(make_cut(n + 1, start_us=T0 + n * 20 * MINUTE_US))
        rig.feed(cuts_message(items[-1:]))
        rig.clock.advance(20 * 60)
        rig.drain()
    rig.close()
    return items


def run_child(database, point, nth):
    url = database.config.resolved_url(database.data_dir)
    command = [sys.executable, str(CHILD), url, str(database.data_dir), str(HOURS), point, str(nth)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_LIMIT_S, check=False)
    return done.returncode, done.stderr


def assert_whole(database, items):
    """Every cut that is not given up stands in one file; every rollup in SQL or one file; no file is over."""
    rig = FilesRig(database, clock=later(HOURS), **LIMITS)
    for _ in range(2):
        rig.step()
        rig.clock.advance(101)
    rig.step()
    newest_given_up_us = T0 + round((HOURS - LIMITS["cuts_max_age_h"]) * 3600e6)
    expected = [item.seq for item in items if item.start_unix_us + item.duration_us >= newest_given_up_us]
    assert archived(rig) == expected
    model = Model.of(items)
    reads, missed = counted(rig)
    assert reads == {key: sums["reads"] for key, sums in model.slots.items()}
    assert {key: n for key, n in missed.items() if n} == {k: e[1] for k, e in model.missed.items() if e[1]}
    assert rig.parquet_files() == sorted(row.path for row in rig.rows(in_use=False))
    assert all(row.replaced_us is None for row in rig.rows(in_use=False))
    rig.close()


@pytest.mark.parametrize(("point", "nth"), POINTS, ids=[point for point, _ in POINTS])
def test_a_kill_leaves_nothing_lost_and_nothing_over(database, point, nth):
    items = filled(database)
    code, stderr = run_child(database, point, nth)
    assert code == -signal.SIGKILL, stderr
    assert_whole(database, items)


def test_without_a_kill_the_same_is_true(database):
    items = filled(database)
    code, stderr = run_child(database, "never", 1)
    assert code == 0, stderr
    assert_whole(database, items)

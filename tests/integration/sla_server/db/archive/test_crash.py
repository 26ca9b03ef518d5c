"""kill -9 between every two steps of housekeeping; afterwards nothing is lost, doubled or left over."""

from __future__ import annotations

import signal

import pytest

from tests.integration.sla_server.db.conftest import copy_of, new_database
from tests.support.archive import FilesRig, archived, counted, later
from tests.support.archive_crash_child import LIMITS
from tests.support.forks import Children
from tests.support.samples import MINUTE_US, T0, Model, cuts_message, make_cut

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


def fill(database):
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


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.db)])
def original(request, tmp_path_factory):
    """A database that is filled, of which each test has a copy; and the cuts in it."""
    database = new_database(request, request.param, tmp_path_factory.mktemp("original"))
    return database, fill(database)


@pytest.fixture
def filled(request, original, tmp_path):
    database, items = original
    return copy_of(request, database, tmp_path), items


@pytest.fixture(scope="module")
def children():
    with Children("tests.support.archive_crash_child") as made:
        yield made


def run_child(children, database, point, nth):
    url = database.config.resolved_url(database.data_dir)
    return children.run(url, str(database.data_dir), HOURS, point, nth)


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
def test_a_kill_leaves_nothing_lost_and_nothing_over(filled, children, point, nth):
    database, items = filled
    code, output = run_child(children, database, point, nth)
    assert code == -signal.SIGKILL, output
    assert_whole(database, items)


def test_without_a_kill_the_same_is_true(filled, children):
    database, items = filled
    code, output = run_child(children, database, "never", 1)
    assert code == 0, output
    assert_whole(database, items)

"""Which files are merged, given up and deleted: pure decisions on rows of the manifest."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.db.archive import upkeep
from sla_server.db.archive.manifest import CUTS, ROLLUPS, FileRow
from sla_server.db.archive.upkeep import merged_name
from sla_server.db.config import FilesConfig

MIB = 1 << 20
HOUR = upkeep.HOUR_US
DAY = upkeep.DAY_US
D0 = 20_000 * DAY
CONFIG = FilesConfig()
DONE = HOUR + upkeep.COMMIT_LAG_US


def file(first, last, created_us=D0, size=MIB, owner="aa", kind=CUTS, **more):
    path = f"{kind}/2024-10-04/{owner}-{first}-{last}.parquet"
    columns = {"min_us": created_us - 60_000_000, "max_us": created_us, "rows": 10, "cuts": 5, **more}
    return FileRow(path, kind, created_us, bytes=size, sha256="", **columns)


def minutes(count, start_us=D0, **more):
    return [file(n + 1, n + 1, start_us + n * 60_000_000, **more) for n in range(count)]


def test_an_hour_is_merged_when_it_is_over_and_not_before():
    rows = minutes(60)
    assert upkeep.merge_groups(rows, "aa", D0 + DONE - 1, CONFIG) == []
    assert upkeep.merge_groups(rows, "aa", D0 + DONE, CONFIG) == [rows]


def test_hours_stay_apart_until_the_day_is_over():
    rows = minutes(120)
    assert upkeep.merge_groups(rows, "aa", D0 + HOUR + DONE, CONFIG) == [rows[:60], rows[60:]]
    merged = [file(1, 60, D0 + 59 * 60_000_000), file(61, 120, D0 + 119 * 60_000_000)]
    assert upkeep.merge_groups(merged, "aa", D0 + 23 * HOUR, CONFIG) == []
    assert upkeep.merge_groups(merged, "aa", D0 + DAY + upkeep.COMMIT_LAG_US, CONFIG) == [merged]


def test_a_merged_file_stays_alone_in_its_hour():
    assert upkeep.merge_groups([file(1, 60, D0 + 59 * 60_000_000)], "aa", D0 + 5 * HOUR, CONFIG) == []


def test_at_once_does_not_wait():
    rows = minutes(3)
    assert upkeep.merge_groups(rows, "aa", D0, CONFIG, at_once=True) == [rows]


def test_large_files_and_those_of_others_are_left_alone():
    rows = [
        file(1, 1),
        file(2, 2, size=32 * MIB),
        file(3, 3, owner="bb"),
        file(4, 4),
        file(5, 5, kind=ROLLUPS),
    ]
    assert upkeep.merge_groups(rows, "aa", D0 + DAY * 2, CONFIG) == [[rows[0], rows[3]]]


def test_merged_files_fit_the_limit():
    rows = minutes(10, size=20 * MIB)
    groups = upkeep.merge_groups(rows, "aa", D0 + DAY * 2, CONFIG)
    assert [len(group) for group in groups] == [3, 3, 3]
    assert max(sum(row.bytes for row in group) for group in groups) <= CONFIG.merge_to_bytes


def test_names_of_merged_files_span_their_parts():
    name = merged_name([file(1, 5), file(6, 9)])
    assert name.startswith("cuts/2024-10-04/aa-1-9-m")
    assert name == merged_name([file(1, 5), file(6, 9)]), "a repetition makes the same one"
    again = merged_name([replace(file(1, 5), path=name), file(10, 12)])
    assert again.startswith("cuts/2024-10-04/aa-1-12-m")


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 47)), max_size=60), st.integers(0, 72))
def test_no_file_is_in_two_groups_and_names_never_collide(sizes, age_h):
    rows = [
        file(n, n, D0 + hour * HOUR + n, size=size * MIB) for n, (size, hour) in enumerate(sizes, start=1)
    ]
    groups = upkeep.merge_groups(rows, "aa", D0 + age_h * HOUR, CONFIG)
    members = [row.path for group in groups for row in group]
    assert len(members) == len(set(members))
    names = [merged_name(group) for group in groups]
    assert len(set(names)) == len(names)
    assert not set(names) & {row.path for row in rows}


def test_age_counts_from_the_newest_cut():
    old, young = file(1, 1, max_us=D0), file(2, 2, min_us=D0, max_us=D0 + 2)
    assert upkeep.files_to_give_up([old, young], D0 + 48 * HOUR + 1, CONFIG) == [old]
    rollups = replace(old, kind=ROLLUPS)
    assert upkeep.files_to_give_up([rollups], D0 + 48 * HOUR + 1, CONFIG) == []
    assert upkeep.files_to_give_up([rollups], D0 + 35 * DAY + 1, CONFIG) == [rollups]


def test_size_takes_the_oldest_first_and_spares_rollups():
    config = FilesConfig(cuts_max_bytes=3 * MIB)
    rows = minutes(5)
    rollups = [replace(file(9, 9, size=100 * MIB), kind=ROLLUPS)]
    assert upkeep.files_to_give_up([*reversed(rows), *rollups], D0 + HOUR, config) == rows[:2]
    assert upkeep.files_to_give_up(rows[:3], D0 + HOUR, config) == []


def test_replaced_files_wait_for_their_grace_time():
    rows = [file(1, 1, replaced_us=D0), file(2, 2)]
    grace_us = round(CONFIG.grace_s * 1e6)
    assert upkeep.files_to_delete(rows, D0 + grace_us - 1, CONFIG) == []
    assert upkeep.files_to_delete(rows, D0 + grace_us, CONFIG) == rows[:1]


def test_grace_ends_early_where_the_limit_is_exceeded():
    config = FilesConfig(cuts_max_bytes=3 * MIB)
    used = minutes(2)
    replaced = [file(10 + n, 10 + n, replaced_us=D0 + n) for n in range(3)]
    assert upkeep.files_to_delete([*used, *replaced], D0 + 10, config) == replaced[:2]


@pytest.mark.parametrize("url", ["cuts", "/var/lib/cuts"])
def test_a_path_is_no_url(url):
    with pytest.raises(ValueError, match="set \\[database\\] parquet_dir"):
        FilesConfig(url=url)

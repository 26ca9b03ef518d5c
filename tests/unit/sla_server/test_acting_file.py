"""What the supervisor says of the parts that act: which end again and again, and that all have ended."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from sla_server.acting_file import MOST_REASON, NAME, ActingFile, ActingParts, FailingPart, RestartSeries

HEALTHY_S: Final = 60.0


def ns(seconds: float) -> int:
    return round(seconds * 1e9)


def test_a_part_that_ends_three_times_within_short_lives_is_failing_since_the_first_end() -> None:
    series = RestartSeries(HEALTHY_S)
    series.ended("services", 5000.0, "killed by SIGSEGV", ns(10))  # it had run for hours
    series.ended("pmdaemon", 0.5, "exit status 1", ns(10))
    series.ended("services", 0.3, "exit status 1", ns(11))
    assert series.failing(ns(11)) == ()
    series.ended("services", 0.3, "exit status 2", ns(12))
    assert series.failing(ns(12)) == (FailingPart("services", ns(10), 3, "exit status 2"),)
    series.ended("services", HEALTHY_S - 1, "exit status 3", ns(70))
    assert series.failing(ns(71)) == (FailingPart("services", ns(10), 4, "exit status 3"),)


def test_a_life_that_is_long_enough_ends_the_series() -> None:
    series = RestartSeries(HEALTHY_S)
    for at_s in (0, 1, 2):
        series.ended("services", 0.3, "exit status 1", ns(at_s))
    assert len(series.failing(ns(2 + 15))) == 1  # its back-off, and a start
    assert series.failing(ns(2 + HEALTHY_S)) == ()  # it runs
    series.ended("services", HEALTHY_S, "exit status 1", ns(100))
    assert series.failing(ns(100)) == ()
    for at_s in (101, 102):
        series.ended("services", 0.3, "exit status 1", ns(at_s))
    assert [part.since_ns for part in series.failing(ns(102))] == [ns(100)]
    series.clear()
    assert series.failing(ns(102)) == ()


def test_hangs_that_are_far_from_each_other_are_no_series() -> None:
    series = RestartSeries(HEALTHY_S)
    for day in (0, 20, 40):
        series.ended("services", 0.0, "it made no progress for 60 s and was killed", ns(day * 86_400))
    assert series.failing(ns(40 * 86_400 + 1)) == ()


def test_a_part_that_runs_longer_than_ever_in_its_series_does_not_fail_any_more() -> None:
    series = RestartSeries(HEALTHY_S)
    for at_s in (0, 2, 5, 10, 20, 30, 40):
        series.ended("services", 1.0, "exit status 75", ns(at_s))
    assert len(series.failing(ns(60))) == 1  # the next end may be under way
    assert series.failing(ns(70)) == ()
    series.ended("services", 40.0, "exit status 75", ns(85))  # all the same
    assert [part.since_ns for part in series.failing(ns(86))] == [0]


def test_the_file_says_what_was_published_and_nothing_when_it_cannot_be_read(tmp_path: Path) -> None:
    file, other = ActingFile(tmp_path), ActingFile(tmp_path)
    assert other.read() is None
    parts = ActingParts(7, (FailingPart("services", 5, 3, "exit status 1"),))
    file.publish(parts)
    assert other.read() == parts
    file.publish(ActingParts())
    assert other.read() == ActingParts()
    written = (tmp_path / NAME).stat()
    file.publish(ActingParts())
    assert (tmp_path / NAME).stat() == written  # nothing new
    for text in ("", "[]", '{"fence": "x", "failing": []}', '{"fence": null, "failing": [1]}'):
        (tmp_path / NAME).write_text(text)
        assert other.read() is None
    file.remove()
    file.remove()
    assert other.read() is None


def test_a_file_that_cannot_be_written_is_written_with_the_next_call(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    file = ActingFile(folder)
    file.publish(ActingParts(7))
    folder.mkdir()
    file.publish(ActingParts(7))
    assert ActingFile(folder).read() == ActingParts(7)


@pytest.mark.parametrize("length", [MOST_REASON, 10 * MOST_REASON])
def test_a_long_reason_is_cut(length: int) -> None:
    series = RestartSeries(HEALTHY_S)
    for at_s in range(3):
        series.ended("services", 0, "x" * length, ns(at_s))
    assert len(series.failing(ns(2))[0].reason) == MOST_REASON

"""Times on a command line: long ones are asked for in parts, and what is not stored is said."""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace

import pytest

from sla_server.api.handlers import read
from sla_server.cli import moments
from tests.support.api import NOW_US
from tests.support.cli import Terminal

DAY_US = 86_400_000_000
HOUR_US = 3_600_000_000


def ago(seconds: int) -> str:
    """That long before the rig's now, as --since takes it."""
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(NOW_US // 1_000_000 - seconds))


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's time is now."""
    monkeypatch.setattr("sla_server.cli.get.time", SimpleNamespace(time_ns=lambda: NOW_US * 1000))


@pytest.mark.parametrize("hours", [1, 31 * 24 - 2, 31 * 24 - 1, 31 * 24, 40 * 24, 63 * 24 + 1, 400 * 24])
def test_parts_cover_the_time_and_none_is_longer_than_an_answer(hours: int) -> None:
    assert moments.SPAN_MAX_US == read.SPAN_MAX_US
    since_us = NOW_US - hours * HOUR_US + 17
    parts = moments.spans_us(since_us, NOW_US)
    assert (parts[0]["from_us"], "to_us" in parts[-1]) == (since_us, False)
    for one, following in itertools.pairwise(parts):
        assert one["to_us"] == following["from_us"]
        assert one["to_us"] % HOUR_US == 0
    late_us = NOW_US + HOUR_US // 2  # the server's clock is ahead, or it takes a while
    assert all(0 < one.get("to_us", late_us) - one["from_us"] <= read.SPAN_MAX_US for one in parts)


@pytest.mark.parametrize(
    ("kind", "name", "asked_as"),
    [
        ("loads", "disk-0", "backend_load"),
        ("rates", "batch", "rollup_history"),
        ("slices", "erp-gold", "slices"),
    ],
)
def test_a_time_longer_than_an_answer_is_asked_for_in_parts(
    sla: Terminal, kind: str, name: str, asked_as: str
) -> None:
    """Of 100 days nothing is refused, left out or listed twice."""
    done = sla("get", kind, name, "--since", ago(100 * 86_400), "-o", "json")
    assert done.exit_code == 0, done.stderr
    place = 3 if kind == "slices" else 2
    spans = sorted({asked[place : place + 2] for asked in sla.source.asked if asked[0] == asked_as})
    assert (spans[0][0], spans[-1][1], len(spans)) == (NOW_US - 100 * DAY_US, NOW_US, 4)
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
    starts = [row["start_us" if kind == "slices" else "slot_us"] for row in json.loads(done.output)]
    assert starts == sorted(set(starts), reverse=True)


def test_decisions_of_a_long_time_come_newest_first_and_end_at_the_limit(sla: Terminal) -> None:
    def spans() -> list[tuple[int, int]]:
        asked = [one[1] for one in sla.source.asked if one[0] == "decisions"]
        return [(one["from_us"], one["until_us"]) for one in asked]

    assert sla("get", "decisions", "--since", "100d").exit_code == 0
    assert (spans()[0][1], spans()[-1][0], len(spans())) == (NOW_US, NOW_US - 100 * DAY_US, 4)
    sla.source.asked.clear()
    rows = json.loads(sla("get", "decisions", "--since", "100d", "--limit", "1", "-o", "json").output)
    assert (len(rows), len(spans())) == (1, 1)


def test_what_is_not_stored_is_said(sla: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = [{"slot_us": NOW_US - HOUR_US, "length_us": HOUR_US, "iops": 1.0}]
    monkeypatch.setattr(sla.source, "rollup_history", lambda *_: list(newest))
    said = sla("get", "rates", "batch", "--since", "30d", "--tz", "UTC").output
    assert "Nothing is stored of it before " in said
    assert "Nothing" not in sla("get", "rates", "batch", "--since", "70m").output
    monkeypatch.setattr(sla.source, "rollup_history", lambda *_: [])
    assert "Nothing was stored of it in the last hour" in sla("get", "rates", "batch").output
    monkeypatch.setattr(sla.source, "backend_of", lambda _volume: None)
    assert "Nothing is stored of it yet" in sla("get", "rates", "batch").output
    gone = sla("get", "rates", "gone")
    assert (gone.exit_code != 0, "'sla get volumes' lists them" in gone.stderr) == (True, True)

"""``sla why``: times as people write them, lines of 80 columns, and the answer as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from sla_server.cli.errors import BadUsage
from sla_server.cli.moments import moment_us
from sla_server.cli.why import lines_of
from sla_server.explanation import Explanation, Section
from tests.support.api import NOW_US
from tests.support.cli import Terminal

NOW = datetime.fromtimestamp(NOW_US / 1e6, UTC)  # 2027-01-15 08:00:00


@pytest.fixture
def in_berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_berlin")
@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("08:59", "2027-01-15T07:59:00"),
        ("8:59:30", "2027-01-15T07:59:30"),
        ("09:01", "2027-01-14T08:01:00"),  # not yet today: yesterday
        ("2027-01-14 12:00", "2027-01-14T11:00:00"),
        ("2027-01-14", "2027-01-13T23:00:00"),
        ("2027-01-14T12:00:00Z", "2027-01-14T12:00:00"),
        ("2026-07-14T12:00", "2026-07-14T10:00:00"),  # summer time
        ("10m", "2027-01-15T07:50:00"),
        ("1.5h ago", "2027-01-15T06:30:00"),
    ],
)
def test_times(text: str, at: str) -> None:
    assert datetime.fromtimestamp(moment_us(text, NOW_US) / 1e6, UTC).replace(tzinfo=None).isoformat() == at


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("soon", "is no time"),
        ("25:00", "is no time"),
        ("2027-02-30", "is no time"),
        ("2099-01-01", "^--at: '2099-01-01' lies ahead of now, 2027-01-15 .*Give a time that has passed$"),
        ("1969-01-01", "^--at: '1969-01-01' lies before 1970-01-01, where times begin. Give a later one$"),
        ("9" * 400 + "d", "^--at: '9+' is too long; give at most 36600d"),
        ("0001-01-01", "is no time"),
    ],
)
def test_times_that_are_none(text: str, words: str) -> None:
    with pytest.raises(BadUsage, match=words):
        moment_us(text, NOW_US)


def test_the_answer_fits_eighty_columns(sla: Terminal) -> None:
    for name in ("batch", "erp-gold", "erp-gold/latency", "erp-db"):
        done = sla("why", name)
        assert done.exit_code == 0, done.output
        assert max(map(len, done.output.splitlines())) <= 80
    lines = sla("why", "batch").output.splitlines()
    assert lines[0] == "batch is throttled to 290 weighted IOPS, to keep erp-gold/latency."
    assert lines[1] == ""
    assert lines[2].startswith("Why           Since ")
    assert "              - batch: 87 %, 581 weighted IOPS (best-effort, throttled to 290" in lines


def test_long_names_are_broken_not_cut() -> None:
    name = "v" * 128
    lines = lines_of(
        Explanation("free", f"{name} is not throttled.", (Section("Why", (f"- {name}: 87 %",)),))
    )
    assert max(map(len, lines)) <= 80
    assert "".join("".join(lines).split()).count("v") == 2 * 128


def test_json_has_words_and_facts(sla: Terminal) -> None:
    answer = json.loads(sla("why", "batch", "-o", "json").output)
    assert (answer["status"], answer["facts"]["throttles"][0]["throttle_id"]) == ("throttled", "t-1")


def test_the_time_is_sent(sla: Terminal) -> None:
    at_us = json.loads(sla("why", "batch", "--at", "2026-01-01T00:00:00Z", "-o", "json").output)["at_us"]
    assert at_us == 1_767_225_600_000_000


def test_an_unknown_name(sla: Terminal) -> None:
    done = sla("why", "erp-gld")
    assert done.exit_code == 1
    assert "no volume or agreement 'erp-gld' is known\n  Near it: erp-gold, erp-db" in done.output
    assert sla("why", "erp-gold/none").output.strip().endswith("It has latency")
    assert sla("why", "batch", "--at", "soon").exit_code == 2

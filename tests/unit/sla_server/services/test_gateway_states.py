"""A gateway that is lost while the database is away: people are notified at once, not when it is back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.reserve import attach_reserves, initialized, raising
from pmdaemon.reserve.reader import ReserveReader
from pmdaemon.wire.kinds import Kind
from sla_server.events.event import parse
from sla_server.services.health import LIMIT_S
from tests.support.services import GATEWAY, START_US, Bench


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[ReserveReader]:
    attach_reserves("services", tmp_path)
    initialized()
    reader = ReserveReader(tmp_path / "services.normal.reserve")
    yield reader
    reader.close()
    raising.detach_reserves()


def say(bench: Bench, state: str, number: int, sender: str = "pair-0", **keys: Any) -> None:
    header = {
        "gw": GATEWAY, "name": "host-1", "state": state, "reason": "why", "address": "", "software": "",
        "ep": 5, "at_us": START_US + number, "offset_us": 0, "dropped": 0, **keys,
    }  # fmt: skip
    bench.message(Kind.GATEWAY, header, sender=sender)


def raised(reader: ReserveReader) -> list[tuple[str, int]]:
    events = [parse(record.payload) for record in reader.take(99)]
    return [(event.kind, event.at_us - START_US) for event in events]


def test_a_gateway_that_is_lost_and_comes_back_is_told_when_it_is_heard_of(reader: ReserveReader) -> None:
    bench = Bench()
    for number, state in enumerate(("up", "stalled", "recovered", "lost", "lost", "up")):
        say(bench, state, number)
    found = [("gateway-stalled", 1), ("gateway-recovered", 2), ("gateway-lost", 3), ("gateway-up", 5)]
    assert raised(reader) == found


def test_what_only_the_stored_row_can_tell_is_left_to_the_database_manager(reader: ReserveReader) -> None:
    bench = Bench()
    for number, state in enumerate(("up", "detached", "up", "refused", "up")):
        say(bench, state, number)
    assert raised(reader) == []


def test_a_gateway_that_did_not_answer_when_its_pair_stopped_is_told_to_be_back(
    reader: ReserveReader,
) -> None:
    bench = Bench()
    for number, state in enumerate(("up", "stalled", "detached", "up", "detached", "up")):
        say(bench, state, number)
    assert raised(reader) == [("gateway-stalled", 1), ("gateway-up", 3)]


def test_the_end_of_a_session_at_its_former_pair_is_no_loss(reader: ReserveReader) -> None:
    bench = Bench()
    say(bench, "up", 0)
    say(bench, "up", 1, sender="pair-1")
    say(bench, "lost", 2)
    assert raised(reader) == []


def test_the_return_of_a_gateway_that_did_not_come_back_in_time_is_told(reader: ReserveReader) -> None:
    bench = Bench()
    say(bench, "up", 0)
    say(bench, "detached", 1)
    bench.tick(LIMIT_S + 1)
    say(bench, "up", 2)
    assert raised(reader) == [("gateway-up", 2)]  # that it is lost goes the way of a row

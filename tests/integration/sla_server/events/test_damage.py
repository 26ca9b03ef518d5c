"""Records on disk that hold no event any more: delivery goes on, and one event says how many there were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sla_server.events.delivery import INITIAL_BYTES
from sla_server.events.later import LATER_BYTES
from sla_server.events.queue import EventQueue
from tests.support.delivery_process import ALL_TO_A_WEBHOOK, delivering, until
from tests.support.receivers import HttpReceiver


def damage(receiver: HttpReceiver) -> list[dict[str, Any]]:
    """Details of the events about damage that have come."""
    return [each["details"] for each in receiver.events() if each["kind"] == "event-queue-damage"]


@pytest.mark.parametrize(("name", "size"), [("later", LATER_BYTES), ("initial", INITIAL_BYTES)])
def test_damage_of_a_queue_is_one_event(tmp_path: Path, name: str, size: int) -> None:
    events = tmp_path / "data" / "events"
    events.mkdir(parents=True, mode=0o700)
    queue = EventQueue(events, name, size)
    queue._queue.put_many([b"no event", b"{}"])
    queue.close()
    with HttpReceiver() as receiver, delivering(tmp_path, ALL_TO_A_WEBHOOK.format(url=receiver.url)):
        until(lambda: bool(damage(receiver)), "the event has come")
        assert damage(receiver) == [{"events": 2}]

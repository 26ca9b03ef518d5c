"""The process delivery decodes what its queue holds once at a start, whoever wants to know what is in it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events import queue as queues
from sla_server.events.delivery import Delivery
from sla_server.events.later import LATER_BYTES, LaterQueue, moved
from sla_server.events.queue import EventQueue, QueuedEvent
from tests.support.deliveries import event
from tests.support.event_deaths import DeliveryFile

BACKLOG = 3000
"""Of which a reader keeps no more than a part in memory."""


def test_a_backlog_is_decoded_once_at_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, config = tmp_path / "events", DeliveryFile(tmp_path, tmp_path / "run")
    main = EventQueue(directory, "main", config.events.queue_bytes)
    later = LaterQueue(EventQueue(directory, "later", LATER_BYTES))
    later.add(QueuedEvent(event(n), recipient="r", due_us=1, purpose="remind") for n in range(1, 9))
    main.append([QueuedEvent(event(number)) for number in range(100, 100 + BACKLOG)])
    main.append([moved(item) for item in later.due(2, 8)])  # and then it died
    main.close()
    later.close()

    read, decode = Counter[tuple[str, int]](), queues.decode

    def counted(seq: int, data: bytes) -> QueuedEvent:
        found = decode(seq, data)
        read["later" if found.purpose else "main", seq] += 1
        return found

    monkeypatch.setattr(queues, "decode", counted)
    delivery = Delivery(config, directory, ThreadGroup(), ThreadGroup(), SystemClock())
    try:
        assert set(read.values()) == {1}
        assert Counter(name for name, _ in read) == {"main": BACKLOG + 8, "later": 8}
        assert len(delivery.queues[1]) == 0, "what was moved is in one queue alone"
        assert delivery.intake.accept([QueuedEvent(event(number)) for number in (100, 99)]) == 1
    finally:
        delivery.close()

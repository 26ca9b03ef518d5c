"""The queues of events: what is no event is counted once, and passed."""

from __future__ import annotations

from pathlib import Path

from sla_server.events.later import LaterQueue
from sla_server.events.queue import QueuedEvent
from tests.support.deliveries import InlineSender, Rig, ToAll, event


def test_a_record_without_an_event_is_counted_once_and_passed(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.main._queue.put_many([b"{}"])  # as another program, or a release to come, may leave it
    rig.add(event(2))
    rig.run()
    assert (sender.got(), rig.main.damaged) == (["e1", "e2"], 1)
    assert rig.main.fullness_ratio == 0


def test_damage_of_the_queue_of_later_events_is_counted(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [])
    rig.later.add([QueuedEvent(event(1), recipient="r", due_us=1, purpose="held")])
    rig.later._queue._queue.put_many([b"no event"])
    assert (len(rig.later), rig.later.damaged) == (1, 0)
    again = LaterQueue(rig.later._queue)
    assert (len(again), again.damaged) == (1, 1)

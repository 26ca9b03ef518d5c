"""What the process delivery says of itself: a heartbeat is left out when events do not come out."""

from __future__ import annotations

from pathlib import Path

from sla_server.events.delivery import STUCK_NS, makes_progress
from sla_server.events.recipients.base import CONFIRMED, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event


def is_well(rig: Rig, silent_ns: int = 0) -> bool:
    waiting = {name: int(rig.engine.is_behind(name)) for name in rig.senders}
    return makes_progress(rig.engine.lanes, waiting, silent_ns)


def test_delivery_is_well_while_any_recipient_with_events_confirms(tmp_path: Path) -> None:
    senders = [InlineSender("r", retry("no")), InlineSender("s", retry("no"))]
    rig = Rig(tmp_path, ToAll("r", "s"), senders)
    assert is_well(rig)  # nothing waits
    rig.add(event(1), event(2))
    rig.run()
    assert is_well(rig)  # one failure is none yet
    rig.run(30)
    assert not is_well(rig)
    rig.senders["s"].answer = CONFIRMED
    rig.run(30)
    rig.add(event(3))
    assert is_well(rig)  # "s" has an event that it will take
    rig.run()
    assert not is_well(rig)  # only "r" has any
    rig.senders["r"].answer = CONFIRMED
    rig.run(60)
    assert is_well(rig)


def test_delivery_that_does_not_read_the_reserves_is_not_well(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    assert is_well(rig, STUCK_NS)
    assert not is_well(rig, STUCK_NS + 1)

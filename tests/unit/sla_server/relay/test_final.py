"""Final confirmation: after all recipients, not before, and without waiting where nothing waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Held, refused, retry
from sla_server.relay.final import FinalConfirmation
from tests.support.deliveries import InlineSender, Rig, ToAll, event


class Finishing(Rig):
    """An engine with two recipients, and the final confirmation of its queue."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.first, self.second = InlineSender("first"), InlineSender("second", answer=None)
        super().__init__(folder, ToAll("first", "second"), [self.first, self.second], **settings)
        self.final = FinalConfirmation(self.main, self.later, 0.0)

    def go(self, seconds: float = 0.0) -> None:
        self.run(seconds)
        self.final.step()

    def is_final(self, *numbers: int) -> bool:
        return self.final.waits_for([QueuedEvent(event(number)) for number in numbers])


@pytest.fixture
def rig(tmp_path: Path) -> Finishing:
    return Finishing(tmp_path)


def test_an_event_is_final_when_the_last_recipient_has_confirmed(rig: Finishing) -> None:
    rig.add(event(1))
    assert not rig.is_final(1)  # not even looked at
    rig.go()
    assert (rig.first.got(), rig.is_final(1)) == (["e1"], False)
    rig.engine.answered(rig.second.reply(CONFIRMED))
    rig.go()
    assert rig.is_final(1)


def test_what_is_not_in_the_queue_any_more_is_final_also_after_a_restart(rig: Finishing) -> None:
    rig.add(event(1), event(2))
    rig.go()
    rig.engine.answered(rig.second.reply(CONFIRMED))
    rig.go()
    rig.restart()
    rig.final = FinalConfirmation(rig.main, rig.later, 0.0)
    rig.go()
    assert rig.is_final(1, 2)


def test_one_event_of_a_post_that_waits_keeps_all_of_it(rig: Finishing) -> None:
    rig.add(event(1))
    rig.go()
    rig.engine.answered(rig.second.reply(CONFIRMED))
    rig.add(event(2))
    rig.go()
    assert (rig.is_final(1), rig.is_final(1, 2)) == (True, False)


def test_a_recipient_that_fails_leaves_it_open_and_a_dead_letter_ends_it(rig: Finishing) -> None:
    rig.add(event(1))
    rig.go()
    rig.engine.answered(rig.second.reply(retry("HTTP 500")))
    rig.go()
    assert not rig.is_final(1)
    rig.go(2.0)
    rig.engine.answered(rig.second.reply(refused("HTTP 400")))
    rig.go()
    assert rig.is_final(1)
    assert ("delivery-failed", "second") in rig.raised


def test_what_is_held_back_is_not_final_until_it_was_caught_up(rig: Finishing) -> None:
    rig.second.answer = CONFIRMED
    until_us = rig.clock.unix_us() + 5_000_000
    rig.router.holds = lambda _event, name, now_us: (
        Held("quiet", until_us) if name == "second" and now_us < until_us else None
    )
    rig.add(event(1))
    rig.go()
    assert (rig.first.got(), rig.second.got(), rig.is_final(1)) == (["e1"], [], False)
    rig.go(8.0)
    assert (rig.second.got(), rig.is_final(1)) == (["e1"], True)


def test_nothing_waits_after_the_close(tmp_path: Path) -> None:
    rig = Finishing(tmp_path)
    rig.final = FinalConfirmation(rig.main, rig.later, 3600.0)
    rig.add(event(1))
    rig.final.close()
    assert not rig.is_final(1)

"""How many events wait for a recipient, and what is said of one that fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sla_server.events.event import Event
from sla_server.events.recipient_state import CHUNKS, Waiting, WaitingEvents, recipient_row
from sla_server.events.recipients.base import CONFIRMED, Routed, refused, retry
from sla_server.events.stages.confirm import RetryRules
from tests.support.deliveries import InlineSender, Rig, ToAll, event


class BySubject(ToAll):
    """Routes an event to the recipient that its subject names."""

    def route(self, event: Event) -> Sequence[Routed]:
        return [Routed(event.subject, "by subject")]


def of(rig: Rig, counted: WaitingEvents) -> dict[str, Waiting]:
    cursors = {name: lane.cursors for name, lane in rig.engine.lanes.items()}
    return counted.look(cursors, lambda each: [routed.recipient for routed in rig.router.route(each)])


def row(rig: Rig, name: str = "r") -> dict[str, Any]:
    return recipient_row(rig.engine.lanes[name], "webhook", Waiting(), 0, rig.clock)


def test_events_for_others_do_not_wait_for_a_recipient(tmp_path: Path) -> None:
    well, away = InlineSender("well"), InlineSender("away", retry("HTTP 503"))
    rig = Rig(tmp_path, BySubject(), [well, away])
    counted = WaitingEvents((rig.initial, rig.main))
    rig.add(event(1, subject="away"), *(event(number, subject="well") for number in range(2, 9)))
    rig.add(event(9, subject="away"), event(10, subject="away"), queue="initial")
    rig.run()
    assert of(rig, counted) == {"well": Waiting(0), "away": Waiting(3)}
    rig.add(event(11, subject="away"), event(12, subject="well"))
    rig.run()
    assert of(rig, counted) == {"well": Waiting(0), "away": Waiting(4)}
    away.answer = CONFIRMED
    rig.run(600)
    assert len(set(away.got())) == 4
    assert of(rig, counted) == {"well": Waiting(0), "away": Waiting(0)}


def test_events_are_routed_once_for_all_and_again_by_other_routes(tmp_path: Path) -> None:
    one, two = InlineSender("one", None), InlineSender("two", None)
    rig = Rig(tmp_path, ToAll("one", "two"), [one, two])
    counted, asked = WaitingEvents((rig.main,)), list[str]()

    def look(*names: str) -> dict[str, Waiting]:
        def route(each: Event) -> Sequence[str]:
            asked.append(each.event_id)
            return names

        return counted.look({name: lane.cursors for name, lane in rig.engine.lanes.items()}, route)

    rig.add(event(1), event(2))
    rig.run()
    assert look("one", "two") == {"one": Waiting(2), "two": Waiting(2)}
    assert look("one", "two") == {"one": Waiting(2), "two": Waiting(2)}
    assert asked == ["e1", "e2"]
    counted.forget()
    assert look("two") == {"one": Waiting(0), "two": Waiting(2)}
    assert asked == ["e1", "e2"] * 2


def test_a_long_queue_is_looked_at_in_parts(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", None)])
    for number in range(300):
        rig.add(event(number, text="x" * 1900))
    rig.run()
    counted, found = WaitingEvents((rig.main,)), list[Waiting]()
    while not found or found[-1].is_least:
        found.append(of(rig, counted)["r"])
    assert found[-1] == Waiting(300)
    counts = [each.count for each in found]
    assert counts == sorted(counts)
    assert 0 < counts[0] < 300, f"{CHUNKS} chunks are less than the queue"


def test_a_recipient_fails_from_its_first_answer_that_confirms_nothing(tmp_path: Path) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender], rules=RetryRules(first_s=8, max_s=60, jitter_ratio=0.0))
    assert row(rig)["state"] == "ok"
    rig.add(event(1))
    rig.run()
    found = row(rig)
    assert (found["state"], found["attempt"], found["is_trying"]) == ("ok", 1, True)
    rig.clock.advance(3.0)
    rig.engine.answered(sender.reply(retry("HTTP 503")))
    now_us = rig.clock.unix_us()
    found = row(rig)
    assert (found["state"], found["attempt"], found["is_trying"]) == ("failing", 1, False)
    assert (found["failing_since_us"], found["next_try_us"]) == (now_us, now_us + 8_000_000)
    assert found["last_answer"] == "retry: HTTP 503"
    rig.engine.set_router(rig.router)  # the batch is made again, and still waits
    rig.clock.advance(5.0)
    assert row(rig)["failing_since_us"] == now_us
    assert row(rig)["next_try_us"] == now_us + 8_000_000
    rig.run(4)
    assert (row(rig)["state"], row(rig)["attempt"]) == ("failing", 2)
    rig.engine.answered(sender.reply(CONFIRMED))
    found = row(rig)
    assert (found["state"], found["failing_since_us"], found["next_try_us"]) == ("ok", None, None)


def test_what_was_refused_is_no_success(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", refused("HTTP 400"))])
    rig.add(event(1))
    rig.run()
    found = row(rig)
    assert (found["state"], found["dead_letters"], found["next_try_us"]) == ("failing", 1, None)


def test_who_failed_before_a_restart_fails_until_it_confirms(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(60)
    rig.restart()
    assert row(rig)["state"] == "failing"
    sender.answer = CONFIRMED
    rig.run(600)
    assert row(rig)["state"] == "ok"

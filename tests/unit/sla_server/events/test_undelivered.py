"""What is said to wait for a recipient: all of it, and nothing that goes to others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sla_server.events.event import Event
from sla_server.events.recipients.base import CONFIRMED, Held, Routed, refused, retry
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.undelivered import rows_of
from tests.support.deliveries import InlineSender, Rig, ToAll, event


class ByKind(ToAll):
    """Only gateways' clocks go to the recipient ``r``."""

    def route(self, event: Event) -> Sequence[Routed]:
        return self.routed if event.kind == "clock-skew" else []


def shown(rig: Rig) -> tuple[dict[str, Any], list[tuple[str, str, int, str]]]:
    """The row of ``r``, and what is undelivered."""
    (row,), undelivered = rows_of(rig.engine, rig.later, lambda _name: "webhook", rig.clock)
    listed = [(each["event_id"], each["state"], each["attempt"], each["reason"]) for each in undelivered]
    return row, listed


def row_of(rig: Rig) -> dict[str, Any]:
    return shown(rig)[0]


def test_all_that_waits_behind_a_batch_is_listed_and_counted(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("HTTP 503"))
    rig = Rig(tmp_path, ByKind("r"), [sender], most_notices=2)
    rig.add(*(event(n, "clock-skew" if n % 2 else "mode-changed") for n in range(1, 13)))
    assert shown(rig)[0]["waiting"] == 6
    rig.run()
    row, listed = shown(rig)
    assert (row["state"], row["waiting"], row["attempt"]) == ("failing", 6, 1)
    assert (row["waiting_is_at_most"], row["waiting_since_us"]) == (False, rig.clock.unix_us())
    failing = [(name, "failing", 1, "retry: HTTP 503") for name in ("e1", "e3")]
    behind = [(f"e{n}", "waiting", 0, "behind what fails: retry: HTTP 503") for n in (5, 7, 9, 11)]
    assert listed == failing + behind
    sender.answer = CONFIRMED
    rig.run(5)
    row, listed = shown(rig)
    assert (row["state"], row["waiting"], row["waiting_since_us"], listed) == ("ok", 0, 0, [])


def test_the_end_of_what_a_recipient_knows_waits_for_it_without_a_route(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    rig.add(event(1, "storage-fault", severity="critical"))
    rig.run()
    router.routed = []
    sender.answer = None
    rig.add(event(2, "storage-recovered"), event(3))
    rig.run()
    assert shown(rig)[1] == [("e2", "waiting", 1, "")]


def test_what_is_held_back_waits(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 3600_000_000
    router.holds = lambda _found, _name, _now: Held("night", until_us)
    rig.add(event(1))
    rig.run()
    row, listed = shown(rig)
    assert (row["state"], row["waiting"], listed) == ("held", 1, [("e1", "held", 0, "")])


def test_of_a_long_backlog_the_oldest_are_listed_and_the_rest_is_an_upper_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sla_server.events.undelivered.MOST_READ", 10)
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", retry("away"))])
    rig.add(*(event(n, text="x" * 2000) for n in range(1, 201)))
    rig.run()
    row, listed = shown(rig)
    assert (row["waiting"], row["waiting_is_at_most"]) == (200, True)
    assert [name for name, *_ in listed] == [f"e{n}" for n in range(1, len(listed) + 1)]
    assert 10 <= len(listed) < 200


def test_a_recipient_fails_from_its_first_answer_that_confirms_nothing(tmp_path: Path) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender], rules=RetryRules(first_s=8, max_s=60, jitter_ratio=0.0))
    assert row_of(rig)["state"] == "ok"
    rig.add(event(1))
    rig.run()
    found = row_of(rig)
    assert (found["state"], found["attempt"], found["is_trying"]) == ("ok", 1, True)
    rig.clock.advance(3.0)
    rig.engine.answered(sender.reply(retry("HTTP 503")))
    now_us = rig.clock.unix_us()
    found = row_of(rig)
    assert (found["state"], found["attempt"], found["is_trying"]) == ("failing", 1, False)
    assert (found["failing_since_us"], found["next_try_us"]) == (now_us, now_us + 8_000_000)
    assert found["last_answer"] == "retry: HTTP 503"
    rig.engine.set_router(rig.router)  # the batch is made again, and still waits
    rig.clock.advance(5.0)
    assert row_of(rig)["failing_since_us"] == now_us
    assert row_of(rig)["next_try_us"] == now_us + 8_000_000
    rig.run(4)
    assert (row_of(rig)["state"], row_of(rig)["attempt"]) == ("failing", 2)
    rig.engine.answered(sender.reply(CONFIRMED))
    found = row_of(rig)
    assert (found["state"], found["failing_since_us"], found["next_try_us"]) == ("ok", None, None)


def test_what_was_refused_is_no_success(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", refused("HTTP 400"))])
    rig.add(event(1))
    rig.run()
    found = row_of(rig)
    assert (found["state"], found["dead_letters"], found["next_try_us"]) == ("failing", 1, None)


def test_who_failed_before_a_restart_fails_until_it_confirms(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(60)
    rig.restart()
    assert row_of(rig)["state"] == "failing"
    sender.answer = CONFIRMED
    rig.run(600)
    assert row_of(rig)["state"] == "ok"

"""Distribution and confirmation: order, cursors, retries, what is held back, and what a death leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.events.event import Event
from sla_server.events.lane import LaneSettings
from sla_server.events.recipients.base import CONFIRMED, Held, Routed, refused, retry
from sla_server.events.stages.base import StageReason
from sla_server.events.stages.confirm import RetryRules
from sla_server.events.stages.send import SentBatch
from tests.support.deliveries import InlineSender, Rig, ToAll, event
from tests.support.faulty_disk import Crashed, FaultDisk

DAY_US = 86_400_000_000


def numbered(count: int, first: int = 1) -> list[Event]:
    return [event(number) for number in range(first, first + count)]


def ids(count: int, first: int = 1) -> list[str]:
    return [f"e{number}" for number in range(first, first + count)]


def test_each_recipient_gets_all_events_in_order_with_numbers_of_its_own(tmp_path: Path) -> None:
    fast, slow = InlineSender("fast"), InlineSender("slow", None)
    rig = Rig(tmp_path, ToAll("fast", "slow"), [fast, slow], most_notices=2)
    rig.add(*numbered(5))
    rig.run()
    assert fast.got() == ids(5)
    assert [notice.number for batch in fast.batches for notice in batch] == [1, 2, 3, 4, 5]
    assert slow.got() == ids(2)  # one batch under way, and nothing behind it
    rig.engine.answered(slow.reply(CONFIRMED))
    rig.run()
    assert slow.got() == ids(4)


def test_what_all_have_confirmed_leaves_the_queue_and_not_before(tmp_path: Path) -> None:
    first, second = InlineSender("first"), InlineSender("second", None)
    rig = Rig(tmp_path, ToAll("first", "second"), [first, second])
    rig.add(*numbered(3))
    rig.run()
    assert len(rig.main.read(0)[0]) == 3
    rig.engine.answered(second.reply(CONFIRMED))
    rig.run()
    assert rig.main.read(0)[0] == []


def test_the_initialization_period_comes_first(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1), event(2))
    rig.add(event(3), queue="initial")
    rig.run()
    assert sender.got() == ["e3", "e1", "e2"]


def test_a_batch_comes_again_after_pauses_that_double_and_order_holds(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("HTTP 503"))
    rig = Rig(tmp_path, ToAll("r"), [sender], rules=RetryRules(first_s=1, max_s=8, jitter_ratio=0.0))
    rig.add(*numbered(2))
    at = []
    for second in range(40):
        before = len(sender.batches)
        rig.run()
        if len(sender.batches) > before:
            at.append(second)
        rig.add(event(100 + second))
        rig.clock.advance(1.0)
    assert at == [0, 1, 3, 7, 15, 23, 31, 39]
    assert {tuple(notice.delivery_id for notice in batch) for batch in sender.batches} == {("e1", "e2")}
    assert [batch[0].attempt for batch in sender.batches] == list(range(1, 9))
    assert rig.raised == [("recipient-failing", "r")]
    sender.answer = CONFIRMED
    rig.run(10)
    assert sender.got()[-40:] == [f"e{100 + second}" for second in range(40)]
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]


def test_a_recipients_own_wish_to_wait_is_followed(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("HTTP 429", after_s=5))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(4)
    assert len(sender.batches) == 1
    rig.run(2)
    assert len(sender.batches) == 2


def test_a_refused_batch_is_tried_singly_and_what_is_refused_alone_is_a_dead_letter(tmp_path: Path) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(*numbered(3))
    rig.run()
    for answer in (refused("HTTP 400"), CONFIRMED, refused("HTTP 400"), CONFIRMED):
        rig.engine.answered(sender.reply(answer))
        rig.run()
    assert [[notice.delivery_id for notice in batch] for batch in sender.batches] == [
        ["e1", "e2", "e3"],
        ["e1"],
        ["e2"],
        ["e3"],
    ]
    assert rig.raised == [("delivery-failed", "r")]
    assert [(row["event_id"], row["state"]) for row in rig.rows] == [
        ("e1", "confirmed"),
        ("e2", "dead-letter"),
        ("e3", "confirmed"),
    ]
    rig.add(*numbered(2, 4))
    rig.run()
    assert len(sender.batches[-1]) == 2  # whole batches again


def test_what_is_tried_for_too_long_is_a_dead_letter(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rules = RetryRules(first_s=10, max_s=10, give_up_s=60, jitter_ratio=0.0)
    rig = Rig(tmp_path, ToAll("r"), [sender], rules=rules)
    rig.add(event(1))
    rig.run(70)
    assert ("delivery-failed", "r") in rig.raised
    assert rig.engine.lanes["r"].dead_letters == 1


def test_a_clock_that_steps_forward_makes_no_dead_letter(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(2)
    rig.clock.step_wall(25 * 3600.0)
    rig.run(10)
    sender.answer = CONFIRMED
    rig.run(60)
    assert (rig.engine.lanes["r"].dead_letters, rig.engine.lanes["r"].confirmed) == (0, 1)


@pytest.mark.parametrize("is_waiting", [False, True])
def test_a_clock_that_steps_back_makes_no_group_wait_longer(tmp_path: Path, is_waiting: bool) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll(Routed("r", "all", group_key="g", group_wait_s=10.0)), [sender])
    rig.add(event(1))
    if is_waiting:
        rig.run(5)
    rig.clock.step_wall(-3600.0)
    rig.run(2)
    assert sender.got() == []
    rig.run(8)
    assert sender.got() == ["e1"]


def test_a_recipient_that_hangs_is_left_behind_and_the_others_go_on(tmp_path: Path) -> None:
    hung, other = InlineSender("hung", None), InlineSender("other")
    rig = Rig(tmp_path, ToAll("hung", "other"), [hung, other], timeout_s=10.0)
    rig.add(event(1))
    rig.run(5)
    rig.add(event(2))
    rig.run(5)
    assert (hung.got(), hung.abandoned, other.got()) == (["e1"], 0, ["e1", "e2"])
    rig.run(4)  # 10 s and the grace of two
    assert hung.abandoned == 1
    rig.engine.answered(
        SentBatch("hung", hung.tokens[0], CONFIRMED)
    )  # it answers after all: that call means nothing any more
    assert rig.engine.lanes["hung"].confirmed == 0
    rig.run(3)
    assert hung.got() == ["e1", "e1"]


def test_who_confirms_twice_has_confirmed_once(tmp_path: Path) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender], most_notices=1)
    rig.add(event(1), event(2))
    rig.run()
    for _ in range(2):
        rig.engine.answered(SentBatch("r", sender.tokens[0], CONFIRMED))
    rig.run()
    rig.engine.answered(SentBatch("r", sender.tokens[0], CONFIRMED))  # while the next one is under way
    assert (rig.engine.lanes["r"].confirmed, sender.got()) == (1, ["e1", "e2"])


def test_recipients_without_a_route_hold_nothing_back(tmp_path: Path) -> None:
    used, unused = InlineSender("used"), InlineSender("unused")
    rig = Rig(tmp_path, ToAll("used"), [used, unused])
    rig.add(*numbered(3))
    rig.run()
    assert (unused.got(), rig.main.read(0)[0]) == ([], [])
    assert rig.engine.skipped[StageReason.NOT_ROUTED] == 3


def test_a_new_recipient_gets_what_comes_from_now_on(tmp_path: Path) -> None:
    old = InlineSender("old", retry("away"))
    rig = Rig(tmp_path, ToAll("old", "new"), [old])
    rig.add(event(1))
    rig.run()
    rig.senders["new"] = new = InlineSender("new")
    rig.engine.set_recipients([LaneSettings("old", old), LaneSettings("new", new)])
    rig.add(event(2))
    rig.run()
    assert new.got() == ["e2"]


def test_a_new_recipient_gets_what_came_before_the_look_that_found_its_document(tmp_path: Path) -> None:
    """The order in the process: events are shown, documents looked at, and what was shown is read."""
    old = InlineSender("old")
    rig = Rig(tmp_path, ToAll("old", "new"), [old])
    rig.add(event(1))
    rig.main.show()
    rig.run()
    rig.add(event(2))  # after this look at the documents, and after the new one
    assert rig.main.has_more
    rig.run()
    assert (old.got(), rig.main.newest_seq) == (["e1"], 2)
    rig.main.show()
    rig.senders["new"] = new = InlineSender("new")
    rig.engine.set_recipients([LaneSettings("old", old), LaneSettings("new", new)])
    rig.run()
    assert (old.got(), new.got(), rig.main.has_more) == (["e1", "e2"], ["e2"], False)


def test_a_recipient_that_is_gone_is_waited_for_no_longer(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run()
    rig.engine.set_recipients([])
    rig.run()
    assert (rig.main.read(0)[0], sender.is_open) == ([], False)


# Silences and quiet hours.


def test_what_is_silenced_is_skipped_and_what_is_held_comes_later_in_order(tmp_path: Path) -> None:
    sender = InlineSender("r")
    router = ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 30_000_000

    def holds(found: Event, _recipient: str, now_us: int) -> Held | None:
        if found.kind == "mode-changed":
            return Held("silence s1")
        return Held("quiet hours", until_us) if now_us < until_us and found.kind != "burn-rate" else None

    router.holds = holds
    rig.add(event(1), event(2, "mode-changed"), event(3, "burn-rate", severity="critical"), event(4))
    rig.run(20)
    assert sender.got() == ["e3"]
    rig.restart()  # what is held is durable
    rig.run(20)
    assert sender.got() == ["e3", "e1", "e4"]
    assert [notice.is_caught_up for batch in sender.batches for notice in batch] == [False, True, True]
    assert len(rig.later) == 0


def test_the_end_of_a_condition_waits_behind_its_beginning_that_is_held(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 30_000_000
    router.holds = lambda found, _r, now_us: (
        Held("quiet", until_us) if found.event_id == "e1" and now_us < until_us else None
    )
    rig.add(event(1, "storage-fault", severity="critical"), event(2, "storage-recovered"))
    rig.run(20)
    assert sender.got() == []
    rig.run(20)
    assert sender.got() == ["e1", "e2"]


def test_a_silence_that_ends_early_holds_nothing_back_any_more_and_the_order_stays(tmp_path: Path) -> None:
    sender, router = InlineSender("r"), ToAll("r")
    rig = Rig(tmp_path, router, [sender])
    until_us = rig.clock.unix_us() + 3600_000_000
    router.holds = lambda _found, _recipient, _now: Held("quiet", until_us)
    rig.add(event(1), event(2), event(3))
    rig.run(5)
    assert sender.got() == []
    night = ToAll("r")
    night.holds = lambda found, _recipient, _now: Held("night", until_us) if found.event_id == "e2" else None
    rig.engine.set_router(night)
    rig.run(5)
    assert sender.got() == ["e1", "e3"]
    rig.engine.set_router(ToAll("r"))
    rig.run(5)
    assert sender.got() == ["e1", "e3", "e2"]
    assert len(rig.later) == 0


def quiet_until(until_us: int, event_id: str = "") -> ToAll:
    router = ToAll("r")
    router.holds = lambda found, _recipient, now_us: (
        Held("quiet", until_us) if now_us < until_us and event_id in ("", found.event_id) else None
    )
    return router


@pytest.mark.parametrize("is_started_again", [False, True])
def test_a_silence_that_is_made_shorter_holds_until_its_new_end(
    tmp_path: Path, is_started_again: bool
) -> None:
    sender = InlineSender("r")
    clock = FakeClock()
    begun_us = clock.unix_us()
    rig = Rig(tmp_path, quiet_until(begun_us + 3600_000_000), [sender], clock=clock)
    rig.add(event(1), event(2))
    rig.run(5)
    shorter = quiet_until(begun_us + 20_000_000)
    rig.engine.set_router(shorter)
    if is_started_again:
        rig.restart()
        rig.engine.set_router(shorter)
    rig.run(10)
    assert sender.got() == []
    rig.run(10)
    assert (sender.got(), len(rig.later)) == (["e1", "e2"], 0)


def test_an_end_stays_behind_its_beginning_when_a_silence_is_made_shorter(tmp_path: Path) -> None:
    sender = InlineSender("r")
    clock = FakeClock()
    begun_us = clock.unix_us()
    rig = Rig(tmp_path, quiet_until(begun_us + 3600_000_000, "e1"), [sender], clock=clock)
    rig.add(event(1, "storage-fault", severity="critical"), event(2, "storage-recovered"))
    rig.run(5)
    rig.engine.set_router(quiet_until(begun_us + 20_000_000, "e1"))
    rig.run(10)
    assert sender.got() == []
    rig.run(10)
    assert sender.got() == ["e1", "e2"]


# Stages of the engine's own.


def test_a_condition_that_two_processes_noticed_is_sent_once(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1, "gateway-lost", severity="critical"), event(2, "gateway-lost", severity="critical"))
    rig.add(event(3, "gateway-up"), event(4, "gateway-lost", severity="critical"))
    rig.run()
    assert sender.got() == ["e1", "e3", "e4"]
    rig.restart()  # also known after a restart
    rig.add(event(5, "gateway-lost", severity="critical"))
    late = event(6, "gateway-lost", severity="critical")
    rig.add(Event(**{**late.row(), "at_us": late.at_us + 3600_000_000}))
    rig.run()
    assert sender.got() == ["e1", "e3", "e4", "e6"]


def test_two_planes_of_a_gateway_are_two_conditions(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    one, two = ({"details": {"subject": name, "gateway_id": "g"}} for name in ("nbd-0", "nbd-1"))
    rig.add(event(1, "plane-died", severity="critical", **one))
    rig.add(event(2, "plane-died", severity="critical", **two))
    rig.add(event(3, "plane-back", **two), event(4, "plane-died", severity="critical", **one))
    rig.run()
    assert sender.got() == ["e1", "e2", "e3"]  # the first is still known to be gone


def test_throttles_of_two_clients_of_a_volume_are_two_conditions(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    one, two = ({"element": "volume", "details": {"throttle_id": name}} for name in ("t1", "t2"))
    rig.add(event(1, "throttle-set", "vm", severity="warning", **one))
    rig.add(event(2, "throttle-set", "vm", severity="warning", **two))
    rig.add(event(3, "throttle-released", "vm", **one))
    rig.add(event(4, "throttle-set", "vm", severity="warning", **two))
    rig.run()
    assert sender.got() == ["e1", "e2", "e3"]


def test_a_more_severe_beginning_of_a_condition_passes(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1, "gateway-stalled", severity="warning"), event(2, "gateway-lost", severity="critical"))
    rig.run()
    assert sender.got() == ["e1", "e2"]


def test_lesser_events_of_a_gateway_that_is_gone_are_inhibited_where_a_route_says_so(tmp_path: Path) -> None:
    sender, log = InlineSender("r"), InlineSender("log")
    rig = Rig(tmp_path, ToAll(Routed("r", "all", inhibit=True), "log"), [sender, log])
    rig.add(
        event(1, "gateway-lost", severity="critical"),
        event(2, "clock-skew", severity="warning"),
        event(3, "clock-skew", severity="warning", subject="other"),
        event(4, "gateway-up"),
        event(5, "clock-skew", severity="warning"),
    )
    rig.run()
    assert sender.got() == ["e1", "e3", "e4", "e5"]
    assert log.got() == ["e1", "e2", "e3", "e4", "e5"]


def test_what_begins_or_ends_a_condition_is_never_inhibited(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll(Routed("r", "all", inhibit=True)), [sender])
    of_gateway = {"element": "sla", "subject": "erp/latency", "details": {"gateway": "gw"}}
    rig.add(
        event(1, "gateway-lost", severity="critical"),
        event(2, "violation-opened", severity="warning", **of_gateway),
        event(3, "volume-revoked"),
        event(4, "violation-closed", **of_gateway),
        event(5, "gateway-up"),
    )
    rig.run()
    assert sender.got() == ["e1", "e2", "e4", "e5"]


def test_a_recipient_is_not_told_of_its_own_trouble(tmp_path: Path) -> None:
    ill, other = InlineSender("ill"), InlineSender("other")
    rig = Rig(tmp_path, ToAll("ill", "other"), [ill, other])
    rig.add(event(1, "delivery-failed", "ill", severity="critical", element="recipient"))
    rig.run()
    assert (ill.got(), other.got()) == ([], ["e1"])


def test_a_group_waits_for_others_and_a_full_batch_does_not(tmp_path: Path) -> None:
    sender = InlineSender("r")
    router = ToAll(Routed("r", "all", group_key="g", group_wait_s=30.0))
    rig = Rig(tmp_path, router, [sender], most_notices=3)
    rig.add(event(1))
    rig.run(10)
    rig.add(event(2))
    rig.run(10)
    assert sender.batches == []
    rig.run(11)
    assert [len(batch) for batch in sender.batches] == [2]
    rig.add(*numbered(3, 3))
    rig.run()
    assert [len(batch) for batch in sender.batches] == [2, 3]


def test_the_rate_limit_lets_a_minutes_worth_pass_and_then_paces(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender], most_notices=1, per_minute=6.0)
    rig.add(*numbered(20))
    rig.run()
    assert len(sender.batches) == 6
    rig.run(30)
    assert len(sender.batches) == 9


# Reminders and escalation.


def reminding() -> ToAll:
    return ToAll(Routed("r", "all", remind_s=60.0, escalate_s=90.0, escalate_to=("boss",)))


def test_reminders_and_escalation_until_a_person_acknowledges(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, reminding(), [sender, boss])
    rig.add(event(1, "storage-fault", severity="critical"))
    rig.run(130)
    assert sender.got() == ["e1", "e1/1", "e1/2"]
    assert [notice.escalated for batch in boss.batches for notice in batch] == [True]
    assert rig.engine.acknowledge("e1") == 1
    rig.run(200)
    assert (sender.got(), boss.got()) == (["e1", "e1/1", "e1/2"], ["e1/escalated"])


def test_information_is_not_reminded_of(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, reminding(), [sender, boss])
    rig.add(event(1, "mode-changed"), event(2, "clock-skew", severity="warning"))
    rig.run(70)
    assert sender.got() == ["e1", "e2", "e2/1"]


def test_an_acknowledgement_is_an_event_that_ends_reminders(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, reminding(), [sender, boss])
    rig.add(event(1, "storage-fault", severity="critical"))
    rig.run(30)
    rig.add(event(2, "event-acknowledged", element="event", details={"event_id": "e1", "who": "ann"}))
    rig.run(200)
    assert (sender.got(), boss.got()) == (["e1", "e2"], [])


def test_what_is_resolved_is_reminded_of_no_more(tmp_path: Path) -> None:
    sender, boss = InlineSender("r"), InlineSender("boss")
    rig = Rig(tmp_path, reminding(), [sender, boss])
    rig.add(event(1, "storage-fault", severity="critical"))
    rig.run(30)
    rig.add(event(2, "storage-recovered"))
    rig.run(120)
    assert (sender.got(), boss.got(), len(rig.later)) == (["e1", "e2"], [], 0)


# Deaths.


def delivered_after_crashes(tmp_path: Path, crash_at: int, queue: str) -> tuple[list[str], list[str], bool]:
    """Run a day's history with a crash at the n-th operation of the disk; returns what two recipients got."""
    first, second = InlineSender("first"), InlineSender("second")
    router, clock = ToAll("first", Routed("second", "all", remind_s=300.0)), FakeClock()
    until_us = clock.unix_us() + 20_000_000
    router.holds = lambda found, name, now_us: (
        Held("quiet", until_us) if name == "first" and found.event_id == "e3" and now_us < until_us else None
    )
    folder = tmp_path / str(crash_at)
    folder.mkdir()
    rig, died = None, False
    disk = FaultDisk(crash_at=crash_at)
    todo = numbered(6)
    for _attempt in range(3):
        try:
            if rig is None:
                rig = Rig(folder, router, [first, second], disk, clock=clock, most_notices=2)
            else:
                rig.restart()
            while todo:
                rig.add(todo[0], queue=queue)
                todo.pop(0)  # accepted
                rig.run(1)
            rig.run(30)
            return first.got(), second.got(), died
        except Crashed:
            died = True
            disk = disk.after_kill()
            if rig is not None:
                rig.disk.crash_at = 0
    raise AssertionError("it died more than once")


@pytest.mark.parametrize("queue", ["main", "initial"])
def test_a_death_at_every_operation_of_the_disk_loses_nothing_and_keeps_the_order(
    tmp_path: Path, queue: str
) -> None:
    """The held event comes last; repeats are those of a batch under way."""
    whole = delivered_after_crashes(tmp_path, 0, queue)
    assert whole == (["e1", "e2", "e4", "e5", "e6", "e3"], [f"e{n}" for n in range(1, 7)], False)
    deaths = 0
    for crash_at in range(1, 400):
        first, second, died = delivered_after_crashes(tmp_path, crash_at, queue)
        if not died:
            break
        deaths += 1
        assert list(dict.fromkeys(first)) == whole[0], crash_at
        assert list(dict.fromkeys(second)) == whole[1], crash_at
        assert len(first) + len(second) <= 12 + 4
    assert deaths > 20


def test_a_state_file_that_cannot_be_written_deletes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))

    def full(*_args: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(rig.engine._state, "write", full)
    rig.run()
    assert (sender.got(), len(rig.main.read(0)[0])) == (["e1"], 1)
    for _ in range(10):
        rig.run(3)
    assert rig.raised == [("event-state-not-written", "delivery")]
    monkeypatch.undo()
    rig.run(1)
    assert rig.main.read(0)[0] == []
    assert rig.raised[1:] == [("event-state-written", "delivery")]


def test_who_was_told_by_a_process_before_that_the_state_cannot_be_written_is_told_the_end(
    tmp_path: Path,
) -> None:
    """The process died while its disk was full, and the next one finds room."""
    about = {"element": "recipient", "subject": "delivery"}
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    rig.add(event(1, "event-state-not-written", severity="critical", **about))
    rig.run()
    for _ in range(3):
        rig.add(event(2 + len(rig.raised)))
        rig.run(1)
    assert rig.raised == [("event-state-written", "delivery")]


@pytest.mark.parametrize("content", [None, "", '{"lanes": {"r"', "[]"])
def test_without_its_state_file_a_recipient_gets_again_what_the_queue_holds(
    tmp_path: Path, content: str | None
) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(*numbered(3))
    rig.run()
    (tmp_path / "state.json").unlink()  # damage to the file system, or a person
    if content is not None:
        (tmp_path / "state.json").write_text(content)
    sender.answer = CONFIRMED
    rig.restart()
    rig.run()
    assert sender.got() == ids(3) + ids(3)


def test_cursors_of_another_queue_mean_nothing(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(*numbered(5))
    rig.run()
    rig.disk = FaultDisk()  # the queue's files were lost
    rig.initial, rig.main = rig.queue("initial"), rig.queue("main")
    rig.engine = rig.make()
    rig.add(event(7))
    rig.run()
    assert sender.got()[-1] == "e7"


def test_what_was_under_way_at_a_kill_keeps_its_number_also_before_events_of_the_next_start(
    tmp_path: Path,
) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender], most_notices=2)
    rig.add(*numbered(3))
    rig.run()
    rig.restart()
    rig.add(event(4), queue="initial")
    sender.answer = CONFIRMED
    rig.run()
    numbers = [(notice.delivery_id, notice.number) for batch in sender.batches for notice in batch]
    assert numbers == [("e1", 1), ("e2", 2), ("e1", 1), ("e2", 2), ("e4", 3), ("e3", 4)]


def test_what_fails_keeps_its_number_when_documents_change(tmp_path: Path) -> None:
    sender = InlineSender("r", retry("HTTP 503"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run()
    rig.add(event(2), queue="initial")
    rig.engine.set_router(rig.router)
    sender.answer = CONFIRMED
    rig.run(60)  # its pause stays
    numbers = [(notice.delivery_id, notice.number) for batch in sender.batches for notice in batch]
    assert numbers == [("e1", 1), ("e1", 1), ("e2", 2)]


def test_documents_applied_meanwhile_and_a_restart_leave_pauses_and_the_limit_of_tries(
    tmp_path: Path,
) -> None:
    sender = InlineSender("r", retry("away"))
    rules = RetryRules(first_s=1.0, max_s=900.0, give_up_s=100.0, jitter_ratio=0.0)
    rig = Rig(tmp_path, ToAll("r"), [sender], rules=rules)
    rig.add(event(1))
    rig.run(16)  # tries at 0, 1, 3, 7 and 15 s; the next one is at 31 s
    assert len(sender.batches) == 5
    for _ in range(5):  # 10 s
        rig.engine.set_router(ToAll("r"))
        rig.engine.set_recipients([LaneSettings("r", sender)])
        rig.run(1)
    assert len(sender.batches) == 5
    rig.restart()
    rig.run()
    assert [notice.attempt for notice in sender.batches[-1]] == [6]
    assert rig.raised == [("recipient-failing", "r")]  # the state says that it was told
    rig.clock.advance(90.0)  # 15 s before the restart are 105 s; the time in between does not count
    rig.run()
    assert len(sender.batches) == 7
    assert rig.raised[1:] == [("delivery-failed", "r")]


def test_a_recipient_that_is_no_longer_in_force_fails_no_more(tmp_path: Path) -> None:
    """Its document is ended because it fails: nobody confirms then, and nobody is to be alarmed."""
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender, InlineSender("s")])
    rig.add(event(1))
    rig.run(16)
    rig.engine.set_recipients([LaneSettings("s", rig.senders["s"])], unknown=["r"])
    assert rig.raised == [("recipient-failing", "r")], "its document cannot be read"
    rig.engine.set_recipients([LaneSettings("s", rig.senders["s"])])
    rig.engine.set_recipients([LaneSettings("s", rig.senders["s"])])
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]


def test_a_recipient_whose_document_was_ended_while_delivery_was_down_fails_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", retry("away")), InlineSender("s")])
    rig.add(event(1))
    rig.run(16)
    del rig.senders["r"]
    rig.restart()
    rig.run()
    rig.restart()
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]


def test_that_a_recipient_confirms_again_is_told_also_where_its_failing_was_not_written(
    tmp_path: Path,
) -> None:
    """The process died between the event and the next write of its state."""
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(2)  # tries at 0 and 1 s; the next one is at 3 s
    before = (tmp_path / "state.json").read_bytes()
    assert rig.raised == []
    rig.run(3)
    (tmp_path / "state.json").write_bytes(before)
    sender.answer = CONFIRMED
    rig.restart()
    rig.run(20)
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]


def test_one_whose_failing_was_not_written_and_that_is_no_longer_in_force_fails_no_more(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r", retry("away")), InlineSender("s")])
    rig.add(event(1))
    rig.run(2)  # tries at 0 and 1 s; the next one is at 3 s
    before = (tmp_path / "state.json").read_bytes()
    rig.run(3)
    (tmp_path / "state.json").write_bytes(before)
    del rig.senders["r"]
    rig.restart()
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]


def test_a_recipient_whose_document_has_changed_is_tried_at_once(tmp_path: Path) -> None:
    sender, mended = InlineSender("r", retry("away")), InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run(16)
    rig.senders["r"] = mended
    rig.engine.set_recipients([LaneSettings("r", mended)])
    rig.run()
    assert [notice.attempt for notice in mended.batches[-1]] == [6]
    assert rig.raised == [("recipient-failing", "r"), ("recipient-recovered", "r")]
    rig.add(event(2))
    rig.run()
    assert [notice.attempt for notice in mended.batches[-1]] == [1]

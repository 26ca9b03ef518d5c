"""Two servers that keep each other's events: mirrored, confirmed, taken over, handed back."""

from __future__ import annotations

import copy
import errno
import shutil
from collections import Counter
from pathlib import Path

import pytest

from sla_server.events import pair_store
from sla_server.events.event import Event
from sla_server.events.pair_core import SETTLE_S
from sla_server.events.pair_replay import ROOM_RATIO
from sla_server.events.recipients.base import CONFIRMED, Held, Routed, retry
from tests.support.deliveries import event
from tests.support.partners import SILENCE_S, Partners


def numbered(server: str, count: int, first: int = 1) -> list[Event]:
    return [event(number, event_id=f"{server}{number}") for number in range(first, first + count)]


def ids(server: str, count: int, first: int = 1) -> list[str]:
    return [f"{server}{number}" for number in range(first, first + count)]


def test_an_event_is_mirrored_until_all_recipients_have_confirmed_it(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "s"))
    pair.a.answers("s", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    assert len(pair.b.store) == 3
    assert pair.a.core.status()["mirrored"] == 3
    assert pair.a.core.behind() == 0
    pair.a.rig.senders["s"].back.append(pair.a.rig.senders["s"].reply(retry("no")))
    pair.a.answers("s")
    pair.run(3)
    assert len(pair.b.store) == 0
    assert pair.b.got == {"r": [], "s": []}
    assert pair.a.core.status()["state"] == pair.b.core.status()["state"] == "connected"


def test_the_survivor_replays_what_the_other_had_not_finished_after_its_own(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("done", "open"))
    for server in (pair.a, pair.b):
        server.answers("open", None)
    pair.a.add(*numbered("a", 3))
    pair.b.add(*numbered("b", 2))
    pair.run()
    pair.kill(pair.a)
    pair.run(SILENCE_S / 2)
    assert pair.b.raised == []
    pair.lose()
    assert pair.b.raised == ["pair-lost"]
    pair.b.answers("open")
    pair.b.rig.senders["open"].back.append(pair.b.rig.senders["open"].reply(retry("again")))
    pair.run(3)
    # Its own first; what "done" had confirmed at a is not sent again.
    assert list(dict.fromkeys(pair.b.got["open"])) == [*ids("b", 2), *ids("a", 3)]
    assert pair.b.got["done"] == ids("b", 2)
    assert len(pair.b.store) == 3  # until the partner says that it needs them no more


def test_at_the_return_what_was_delivered_meanwhile_is_not_sent_again(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 5))
    pair.run()
    before = list(pair.a.got["r"])
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ids("a", 5)
    pair.a.answers("r")
    pair.a.restart()
    pair.run(2)
    assert pair.a.got["r"] == before
    assert pair.b.raised == ["pair-lost", "pair-back"]
    assert len(pair.b.store) == 0
    pair.a.add(*numbered("a", 1, first=6))
    pair.run(2)
    assert pair.a.got["r"] == [*before, "a6"]


def test_what_was_not_handed_over_before_the_return_is_left_to_the_partner(tmp_path: Path) -> None:
    pair = Partners(tmp_path, most_notices=2)
    for server in (pair.a, pair.b):
        server.answers("r", None)
    pair.a.add(*numbered("a", 6))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ids("a", 2)  # under way, not confirmed
    pair.a.got["r"].clear()
    pair.a.answers("r")
    pair.a.restart()
    pair.run()
    pair.b.answers("r")
    pair.b.rig.senders["r"].back.append(pair.b.rig.senders["r"].reply(retry("no")))
    pair.run(20)
    assert pair.a.got["r"] == ids("a", 6)
    assert pair.b.got["r"] == ids("a", 2)
    assert len(pair.b.store) == 0


def test_a_partition_costs_repeats_and_no_event(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "s"), most_notices=3)
    for server in (pair.a, pair.b):
        server.answers("s", None)
    pair.a.add(*numbered("a", 4))
    pair.b.add(*numbered("b", 4))
    pair.run()
    pair.cut()
    pair.a.add(*numbered("a", 3, first=5))
    for server in (pair.a, pair.b):
        sender = server.rig.senders["s"]
        server.answers("s")
        sender.back.append(sender.reply(retry("no")))
    pair.lose()
    assert pair.a.raised == pair.b.raised == ["pair-lost"]
    pair.mend()
    pair.run(3)
    assert pair.a.raised == pair.b.raised == ["pair-lost", "pair-back"]
    for name in ("r", "s"):
        counts = Counter(pair.of_recipient(name))
        assert set(counts) == {*ids("a", 7), *ids("b", 4)}, name
    # "r" had confirmed all that was mirrored: no repeat; "s" had confirmed nothing: once from each of them,
    # and its first batch of three came again at its own server after the failure.
    assert max(Counter(pair.of_recipient("r")).values()) == 1
    counts = Counter(pair.of_recipient("s"))
    assert all(counts[f"a{number}"] == 1 for number in (5, 6, 7))
    assert len(pair.a.store) == len(pair.b.store) == 0


def test_a_recipient_gets_each_servers_events_in_order(tmp_path: Path) -> None:
    pair = Partners(tmp_path, most_notices=2)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 50))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    pair.a.answers("r")
    pair.a.restart()
    pair.run(5)
    found = list(dict.fromkeys(pair.b.got["r"]))
    assert found == ids("a", 50)


def test_a_partner_without_room_is_an_event_and_local_delivery_goes_on(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "dead"), store_bytes=1 << 16)
    pair.a.answers("dead", None)
    many = [event(number, event_id=f"a{number}", text="x" * 500) for number in range(1, 301)]
    pair.a.add(*many)
    pair.run(3)
    assert pair.a.got["r"] == ids("a", 300)
    assert pair.a.raised == ["pair-mirror-behind"]
    assert 0 < len(pair.b.store) < 300
    assert pair.a.core.behind() == 300 - len(pair.b.store)
    pair.a.answers("dead")
    pair.a.rig.senders["dead"].back.append(pair.a.rig.senders["dead"].reply(retry("no")))
    pair.run(5)
    assert pair.a.raised == ["pair-mirror-behind", "pair-mirror-caught-up"]
    assert len(pair.b.store) == 0


def test_that_the_mirror_has_caught_up_is_told_also_by_the_next_process(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "dead"), store_bytes=1 << 16)
    pair.a.answers("dead", None)
    pair.a.add(*(event(number, event_id=f"a{number}", text="x" * 500) for number in range(1, 301)))
    pair.run(3)
    assert pair.a.raised == ["pair-mirror-behind"]
    pair.kill(pair.a)
    pair.a.answers("dead")
    pair.a.restart()
    pair.run(5)
    assert pair.a.raised == ["pair-mirror-behind", "pair-mirror-caught-up"]


@pytest.mark.parametrize(
    ("begun", "ended"), [("pair-lost", "pair-back"), ("event-state-not-written", "event-state-written")]
)
def test_what_a_process_before_has_raised_and_not_written_ends(
    tmp_path: Path, begun: str, ended: str
) -> None:
    """It died before its notes were on disk, or on a full one."""
    pair = Partners(tmp_path, ("r", "s"))
    known = event(1, kind=begun, severity="critical", element="server", subject="b", event_id="begun")
    pair.a.add(known)
    pair.run(3)
    pair.kill(pair.a)
    pair.a.raised.clear()
    pair.a.restart()
    pair.run(3)
    assert pair.a.raised == [ended], "once, though recipients do not have it yet"
    pair.a.add(event(2, kind=ended, element="server", subject="b", event_id="ended"))
    pair.run(3)
    pair.kill(pair.a)
    pair.a.restart()
    pair.run(3)
    assert pair.a.raised == [ended]


def test_a_partner_of_which_nothing_was_heard_yet_is_not_back(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.add(event(1, kind="pair-lost", severity="critical", element="server", subject="b"))
    pair.run()
    pair.kill(pair.a)
    pair.kill(pair.b)
    pair.a.raised.clear()
    pair.a.restart()
    pair.lose()
    assert pair.a.raised == ["pair-lost"]


def test_a_partner_that_lost_its_disk_has_its_events_delivered_here(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    pair.run()
    pair.a.restart(disk_is_lost=True)
    pair.run(3)
    assert pair.b.got["r"] == ids("a", 3)
    assert "pair-lost" not in pair.b.raised
    assert len(pair.b.store) == 0


def test_what_a_lost_disk_held_back_stays_in_the_store_until_it_is_durable_here(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + 60_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda _event, _recipient, now_us: (
            Held("quiet hours", until_us) if now_us < until_us else None
        )
    pair.a.add(*numbered("a", 2))
    pair.run()
    pair.kill(pair.a)
    pair.run()
    pair.b.is_main_loop_busy = True
    pair.a.restart(disk_is_lost=True)
    pair.run()
    assert len(pair.b.core.later_items) == 2  # handed to the main loop, which has not come to it
    assert len(pair.b.store) == 2
    pair.kill(pair.b)
    pair.b.is_main_loop_busy = False
    pair.b.restart()
    pair.run(3)
    assert len(pair.b.store) == 0
    pair.run(60)
    assert pair.b.got["r"] == ids("a", 2)


def test_the_partners_events_leave_room_in_the_queue(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "dead"))
    for server in (pair.a, pair.b):
        server.answers("dead", None)
    many = [event(number, event_id=f"a{number}", text="x" * 1900) for number in range(1, 301)]
    pair.a.add(*many)
    pair.run(2)
    pair.kill(pair.a)
    pair.lose()
    assert ROOM_RATIO <= pair.b.rig.main.fullness_ratio < 0.8
    assert pair.b.rig.raised == []  # nothing was given up


def test_a_survivor_that_is_killed_goes_on_with_the_replay(tmp_path: Path) -> None:
    pair = Partners(tmp_path, most_notices=2)
    pair.a.answers("r", None)
    pair.b.answers("r", None)
    pair.a.add(*numbered("a", 6))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.core.status()["replaying"]
    pair.kill(pair.b)
    pair.b.answers("r")
    pair.b.restart()
    pair.run(3)
    assert pair.b.ledger.is_lost  # it remembers: no second silence is waited for
    assert list(dict.fromkeys(pair.b.got["r"])) == ids("a", 6)
    assert max(Counter(pair.b.got["r"]).values()) <= 3


def test_reminders_of_what_the_partner_has_delivered_are_ours_again(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    for server in (pair.a, pair.b):
        server.rig.router.routed = [Routed("r", "all", remind_s=60.0)]
    pair.a.answers("r", None)
    pair.a.add(event(1, "violation-opened", event_id="a1"))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ["a1"]
    pair.a.got["r"].clear()
    pair.a.answers("r")
    pair.a.restart()
    pair.run(2)
    pair.a.got["r"].clear()
    pair.run(130)
    assert "a1/1" in pair.a.got["r"]
    assert not [each for each in pair.b.got["r"] if each.startswith("a1/")]


def test_an_end_after_the_return_finds_its_beginning_known(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(event(1, "gateway-lost", event_id="a1"), event(2, "gateway-recovered", event_id="a2"))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ["a1", "a2"]
    pair.a.answers("r")
    pair.a.restart()
    pair.run(2)
    assert pair.a.rig.engine.lanes["r"].firing == {}


def test_a_partner_that_is_back_and_slow_has_its_events_left_to_it(tmp_path: Path) -> None:
    pair = Partners(tmp_path, most_notices=2)
    for server in (pair.a, pair.b):
        server.answers("r", None)
    pair.a.add(*numbered("a", 6))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    pair.a.restart()
    pair.run()
    before = len(pair.b.got["r"])
    pair.b.answers("r")
    pair.b.rig.senders["r"].back.append(pair.b.rig.senders["r"].reply(retry("no")))
    pair.run(5)
    assert len(pair.b.got["r"]) == before  # no recipient of a has confirmed anything yet
    assert len(pair.b.store) == 6


def test_what_was_held_back_at_a_lost_server_comes_from_the_other_when_it_is_due(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + 60_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda _event, _recipient, now_us: (
            Held("quiet hours", until_us) if now_us < until_us else None
        )
    pair.a.add(*numbered("a", 2))
    pair.run()
    assert len(pair.b.store) == 2  # they have left the queue of events, and wait in the one of later ones
    pair.kill(pair.a)
    pair.lose()
    assert pair.of_recipient("r") == []
    pair.run(60)
    assert pair.b.got["r"] == ids("a", 2)
    pair.a.restart()
    pair.run(3)
    assert pair.a.got["r"] == []
    assert len(pair.b.store) == 0


def moved_and_delivered_here(pair: Partners) -> None:
    """The partner has held two events back, died, come back, and moved them behind one that is under way."""
    until_us = pair.clock.unix_us() + 20_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda each, _recipient, now_us: (
            Held("quiet hours", until_us) if now_us < until_us and each.event_id != "a3" else None
        )
    pair.a.add(*numbered("a", 2))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    pair.run(20)
    assert pair.b.got["r"] == ids("a", 2)
    pair.a.restart()
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 1, 3))
    pair.run(5)
    assert pair.a.got["r"] == ["a3"]
    assert len(pair.a.rig.later) == 0
    pair.kill(pair.a)


def test_what_was_held_back_and_delivered_here_is_not_delivered_here_again(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    moved_and_delivered_here(pair)
    pair.lose()
    pair.run(5)
    assert pair.b.got["r"] == ids("a", 3)


def test_what_was_held_back_and_delivered_here_is_not_delivered_by_its_server(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    moved_and_delivered_here(pair)
    pair.a.restart()
    pair.a.answers("r")
    pair.run(5)
    assert pair.a.got["r"] == ["a3", "a3"]
    assert pair.b.got["r"] == ids("a", 2)
    assert len(pair.b.store) == 0


@pytest.mark.parametrize("is_killed", [False, True])
def test_what_both_have_held_back_comes_from_the_survivor(tmp_path: Path, *, is_killed: bool) -> None:
    pair = Partners(tmp_path)
    until_us = pair.clock.unix_us() + 60_000_000
    for server in (pair.a, pair.b):
        server.rig.router.holds = lambda each, _recipient, now_us: (
            Held("quiet hours", until_us) if now_us < until_us and each.event_id != "a0" else None
        )
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 1, 0))
    pair.run()
    opened, closed = (event(n, f"violation-{state}") for n, state in ((1, "opened"), (2, "closed")))
    pair.a.add(opened, closed)  # wait for the answer
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ["a0"]
    assert len(pair.b.rig.later) == 2
    pair.a.restart()
    pair.a.answers("r")
    pair.run(3)
    assert len(pair.a.rig.later) == 2
    pair.kill(pair.a)
    pair.lose()
    if is_killed:
        pair.kill(pair.b)
        pair.b.restart()
    pair.run(60)
    assert pair.b.got["r"] == ["a0", "e1", "e2"]
    pair.a.restart()
    pair.run(3)
    assert pair.of_recipient("r") == ["a0", "a0", "e1", "e2"]
    assert len(pair.b.store) == len(pair.b.rig.later) == 0


def test_a_reminder_of_a_lost_server_comes_once(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    for server in (pair.a, pair.b):
        server.rig.router.routed = [Routed("r", "all", remind_s=60.0)]
    pair.a.add(event(1, "violation-opened", event_id="a1"))
    pair.run()
    assert pair.a.got["r"] == ["a1"]
    assert len(pair.b.store) == 1
    pair.kill(pair.a)
    pair.run(65)
    assert pair.b.got["r"] == ["a1/1"]
    pair.a.restart()
    pair.run(5)
    assert pair.a.got["r"] == ["a1"]
    pair.run(60)
    assert pair.a.got["r"] == ["a1", "a1/2"]
    assert pair.b.got["r"] == ["a1/1"]


def test_later_events_that_the_partner_has_sent_leave_the_store(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.rig.router.routed = [Routed("r", "all", remind_s=30.0)]
    for number in range(1, 4):
        pair.a.add(event(number, "violation-opened", subject=f"s{number}", event_id=f"a{number}"))
    pair.run()
    assert len(pair.b.store) == 3
    pair.a.add(event(9, "violation-closed", subject="s2", event_id="a9"))
    pair.run()
    assert len(pair.b.store) == 2


def test_a_certificate_that_ends_soon_is_an_event_once_a_day(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.certificate_ends_us = pair.clock.unix_us() + 13 * 86_400_000_000
    pair.b.certificate_ends_us = pair.clock.unix_us() + 15 * 86_400_000_000
    pair.run()
    pair.run()
    assert pair.a.raised == ["pair-certificate-ends"]
    assert pair.b.raised == []
    pair.a.core.step()
    assert pair.a.core.status()["certificate_until_us"] == pair.a.certificate_ends_us
    pair.clock.advance(86_400)
    pair.a.core.step()
    assert pair.a.raised.count("pair-certificate-ends") == 2


def test_a_flapping_link_costs_no_repeat_in_a_batch(tmp_path: Path) -> None:
    pair = Partners(tmp_path, most_notices=50)
    for server in (pair.a, pair.b):
        server.answers("r", retry("down"))
    pair.b.add(*numbered("b", 1))
    pair.run()  # under way at b, and fails
    pair.a.add(*numbered("a", 2))
    pair.run()
    for _ in range(3):
        pair.cut()
        pair.lose()
        pair.mend()
        pair.run(2)
    pair.kill(pair.a)
    pair.lose()
    pair.b.got["r"].clear()
    pair.b.answers("r")
    pair.run(200)
    counts = Counter(pair.b.got["r"])
    assert counts["a1"] == counts["a2"] == 1


def test_notes_that_a_full_disk_did_not_take_are_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Partners(tmp_path, most_notices=10)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 30))
    pair.run(2)
    pair.kill(pair.a)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:  # the notes are no file of the modelled disk
        patch.setattr(pair_store, "write_whole", full)
        pair.run(15)
    assert pair.b.got["r"] == ids("a", 30)
    assert pair.b.raised == ["pair-lost", "event-state-not-written"]
    pair.run(5)  # nothing new is confirmed
    assert pair.b.raised == ["pair-lost", "event-state-not-written", "event-state-written"]
    pair.kill(pair.b)
    pair.b.restart()
    pair.run(15)
    assert pair.b.got["r"] == ids("a", 30)


def test_a_partner_whose_disk_was_set_back_loses_no_event(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    disk, notes = copy.deepcopy(pair.a.rig.disk), tmp_path / "copy"
    shutil.copytree(pair.a.rig.folder, notes)
    pair.a.restart()
    pair.run(2)
    pair.a.add(*numbered("a", 30, first=4))
    pair.run(2)
    pair.a.answers("r", None)
    pair.a.add(*numbered("lost", 2))
    pair.run(2)
    assert len(pair.b.store) == 2
    pair.kill(pair.a)
    pair.a.rig.disk = disk
    shutil.copytree(notes, pair.a.rig.folder, dirs_exist_ok=True)
    pair.a.restart()
    pair.run(2)
    assert pair.b.got["r"] == ids("lost", 2)  # no other server has them
    pair.a.add(*numbered("new", 5))  # under numbers that were given before
    pair.run(2)
    assert len(pair.b.store) == 5
    assert pair.a.core.behind() == 0
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == [*ids("lost", 2), *ids("new", 5)]


def test_a_failed_dial_at_the_start_does_not_end_the_wait_for_the_partner(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    before = list(pair.a.got["r"])
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.got["r"] == ids("a", 3)
    pair.a.answers("r")
    pair.a.restart()
    pair.cut()
    pair.run(SETTLE_S / 2)  # dials fail meanwhile
    pair.mend()
    pair.run(2)
    assert pair.a.got["r"] == before
    pair.kill(pair.a)
    pair.a.restart()
    pair.cut()
    pair.run(SETTLE_S + 1)
    assert pair.a.is_settled  # it goes on alone


def test_what_was_taken_over_is_not_mirrored_back_and_not_counted(tmp_path: Path) -> None:
    pair = Partners(tmp_path)
    for server in (pair.a, pair.b):
        server.answers("r", None)
    pair.a.add(*numbered("a", 3))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    assert pair.b.rig.main.newest_seq == 3  # copies, which wait for the recipient
    pair.a.restart()
    pair.run()
    status = pair.b.core.status()
    assert (status["unconfirmed"], status["mirrored"], status["behind"]) == (0, 0, 0)
    pair.b.add(*numbered("b", 2))
    pair.run()
    status = pair.b.core.status()
    assert (status["unconfirmed"], status["mirrored"], status["behind"]) == (2, 2, 0)
    assert len(pair.a.store) == 2
    pair.kill(pair.b)
    pair.lose()
    assert pair.a.events_of("pair-lost") == [2]


def test_each_event_is_taken_over_once_however_often_the_link_breaks(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "dead"))
    for server in (pair.a, pair.b):
        server.answers("dead", None)
    pair.a.answers("r", None)
    pair.a.add(*numbered("a", 5))
    pair.b.add(*numbered("b", 1))  # keeps the lane of "dead" before all that is taken over
    pair.run()
    for _ in range(4):
        pair.cut()
        pair.lose()
        pair.mend()
        pair.run(2)
    assert pair.b.got["r"] == [*ids("b", 1), *ids("a", 5)]
    assert pair.b.rig.main.newest_seq == 1 + 5
    assert pair.b.raised == ["pair-lost", "pair-back"] * 4


def test_what_a_lane_has_left_to_the_partner_is_taken_over_again(tmp_path: Path) -> None:
    pair = Partners(tmp_path, ("r", "dead"), most_notices=2)
    for server in (pair.a, pair.b):
        server.answers("r", None)
        server.answers("dead", None)
    pair.a.add(*numbered("a", 6))
    pair.run()
    pair.kill(pair.a)
    pair.lose()
    pair.a.restart()
    pair.run()
    pair.b.rig.senders["r"].back.append(pair.b.rig.senders["r"].reply(CONFIRMED))
    pair.run()  # b has delivered a1 and a2, and leaves the others to a
    pair.kill(pair.a)
    pair.b.answers("r")
    pair.lose()
    assert pair.b.got["r"] == ids("a", 6)
    assert pair.b.rig.main.newest_seq == 6 + 4
    assert pair.b.rig.raised == []

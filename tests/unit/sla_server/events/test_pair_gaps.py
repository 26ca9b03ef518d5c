"""A keeper whose power was cut while it kept a batch: the disk has any of it, and all of it comes again."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sla_server.events import pair_replay
from sla_server.events.recipients.base import CONFIRMED
from tests.support.deliveries import event
from tests.support.faulty_disk import Crashed
from tests.support.partners import Partners

SYNC_AT = 3
IDS = [f"a{number}" for number in range(1, 6)]


def kept(pair: Partners) -> list[int]:
    """Numbers of the events of server a that b has."""
    store = pair.b.store
    return [seq for queue_id in store.queue_ids for seq, _ in store.read(queue_id, 0, 99)]


def cut_power(pair: Partners, seed: int) -> None:
    """Of five events b has confirmed the first; its power is cut when it has written the others."""
    pair.a.answers("r", None)
    pair.b.answers("r", None)
    pair.a.add(event(1, event_id="a1"))
    pair.run()
    pair.a.add(*(event(number, event_id=f"a{number}", text="x" * 700) for number in range(2, 6)))
    disk = pair.b.rig.disk
    disk.crash_at = disk.operations + SYNC_AT
    with pytest.raises(Crashed):
        pair.run()
    pair.kill(pair.b)
    pair.b.rig.disk = disk.after_crash(random.Random(seed))


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 3, 5, 13, 18, 28, 39])
def test_what_a_power_cut_took_of_a_batch_is_mirrored_again(
    tmp_path: Path, seed: int, *, is_restarted: bool
) -> None:
    pair = Partners(tmp_path)
    cut_power(pair, seed)
    pair.b.restart()
    pair.run(2)
    assert kept(pair) == [1, 2, 3, 4, 5]
    if is_restarted:
        pair.kill(pair.b)
        pair.b.restart()
        assert kept(pair) == [1, 2, 3, 4, 5]
        pair.run(2)
        assert kept(pair) == [1, 2, 3, 4, 5]
    pair.kill(pair.a)
    pair.b.answers("r")
    pair.lose()
    assert pair.b.got["r"] == IDS


def test_what_fills_a_gap_behind_what_was_taken_over_is_taken_over_when_the_partner_is_lost_again(
    tmp_path: Path,
) -> None:
    pair = Partners(tmp_path)
    cut_power(pair, seed=28)
    pair.kill(pair.a)
    pair.b.restart()
    pair.lose()
    assert pair.b.core.status()["taken_over"] == len(kept(pair)) == 4
    pair.a.restart()
    pair.run(2)
    assert kept(pair) == [1, 2, 3, 4, 5]
    pair.kill(pair.a)
    pair.lose()
    pair.b.answers("r")
    sender = pair.b.rig.senders["r"]
    sender.back.append(sender.reply(CONFIRMED))
    pair.run(5)
    assert set(pair.b.got["r"]) == set(IDS)


def test_what_fills_a_gap_before_it_is_taken_over_hides_nothing_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_replay, "TAKE", 1)  # else all is taken over before the lanes know of the loss
    pair = Partners(tmp_path)
    cut_power(pair, seed=28)
    pair.b.restart()
    pair.run(2)
    pair.kill(pair.a)
    pair.b.answers("r")
    pair.lose()
    pair.run(3)
    assert pair.b.got["r"] == IDS

"""Random lives of delivery with power cuts and kills: nothing accepted is lost, no beginning comes last.

The queues lie on the modelled disk. Of the two state files a power cut leaves the one that is synced, and of
the other what it had, nothing, or what it had before.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sla_server.events.event import Event
from sla_server.events.lane import SENT
from sla_server.events.recipients.base import CONFIRMED, Answer, Held, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event
from tests.support.faulty_disk import FaultDisk

STEPS = 60
ANSWERS: list[Answer | None] = [CONFIRMED, CONFIRMED, CONFIRMED, None, retry("busy")]


class Life:
    """Conditions that begin and end once each, recipients that answer or not, silences, cuts and kills."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.folder = chance, folder
        self.senders = [InlineSender("r"), InlineSender("s")]
        self.router = ToAll("r", "s")
        self.rig = Rig(folder, self.router, self.senders, FaultDisk(), most_notices=3)
        self.silent_until_us = 0
        self.router.holds = self.held
        self.accepted: list[Event] = []
        self.open: list[int] = []
        self.sent_before: bytes | None = None

    def held(self, found: Event, _recipient: str, now_us: int) -> Held | None:
        if now_us < self.silent_until_us and int(found.subject) % 3 == 0:
            return Held("quiet", self.silent_until_us)
        return None

    def add(self, number: int) -> None:
        made = event(number, subject=str(number))
        if self.open and self.chance.random() < 0.4:
            begun = self.open.pop(self.chance.randrange(len(self.open)))
            made = event(number, "storage-recovered", subject=str(begun))
        elif self.chance.random() < 0.6:
            made = event(number, "storage-fault", subject=str(number), severity="critical")
            self.open.append(number)
        self.rig.add(made)
        self.accepted.append(made)

    def step(self, number: int) -> None:
        match self.chance.randrange(8):
            case 0 | 1 | 2:
                self.add(number)
            case 3:
                for sender in self.senders:
                    sender.answer = self.chance.choice(ANSWERS)
            case 4:
                self.silent_until_us = self.rig.clock.unix_us() + self.chance.randrange(8) * 1_000_000
            case 5:
                self.rig.run(self.chance.randrange(6))
            case 6:
                self.rig.engine.step()
                self.rig.answers()
            case 7:
                self.die()

    def die(self) -> None:
        if self.chance.random() < 0.7:
            self.rig.disk = self.rig.disk.after_crash(self.chance)
            sent = self.folder / SENT
            now = sent.read_bytes() if sent.exists() else None
            left = self.chance.choice([now, self.sent_before, b"", None])
            self.sent_before = now
            sent.unlink(missing_ok=True)
            if left is not None:
                sent.write_bytes(left)
        for sender in self.senders:
            sender.back.clear()
        self.rig.restart()

    def end(self) -> None:
        for sender in self.senders:
            sender.answer = CONFIRMED
        self.silent_until_us = 0
        self.rig.engine.set_router(self.router)
        self.rig.run(1000)

    def check(self) -> None:
        for sender in self.senders:
            got = sender.got()
            assert {each.event_id for each in self.accepted} <= set(got)
            last = {event_id: place for place, event_id in enumerate(got)}
            begun = {each.subject: each.event_id for each in self.accepted if each.kind == "storage-fault"}
            for each in self.accepted:
                if each.kind == "storage-recovered":
                    assert last[begun[each.subject]] < last[each.event_id], (sender.name, each)
        assert self.rig.main.read(0)[0] == []
        assert len(self.rig.later) == 0


@pytest.mark.parametrize("seed", [*range(30), 138])
def test_lives_with_power_cuts_lose_nothing(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, random.Random(seed))
    for number in range(STEPS):
        life.step(number)
    life.end()
    life.check()
    assert life.accepted

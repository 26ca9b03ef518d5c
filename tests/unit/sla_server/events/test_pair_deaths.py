"""A cooperating server that dies at each operation of its disk, and before each message: nothing is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from sla_server.events.recipients.base import retry
from tests.support.deliveries import event
from tests.support.faulty_disk import Crashed
from tests.support.partners import Partners, PartnerServer

RECIPIENTS = ("r", "s")
MOST_REPEATS = 4


class Story:
    """Events on both sides, one server away for long, and its return; one of the two dies on the way.

    Args:
        dying: "a", which goes away and comes back, or "b", which takes over.
        crash_at: the operation of its disk, or the message, at which it dies.
    """

    def __init__(self, folder: Path, dying: str, crash_at: int) -> None:
        self.pair = Partners(folder, RECIPIENTS, most_notices=2)
        self.dying: PartnerServer = getattr(self.pair, dying)
        self.has_died = False
        self.left = crash_at
        self.arm()

    def arm(self) -> None:
        """Its disk is a new object after each start; the opening itself is the disk queue's own matter."""
        disk = self.dying.rig.disk
        disk.crash_at = 0 if self.has_died else disk.operations + self.left

    def tell(self) -> None:
        for step in (self.begin, self.mirror, self.leave, self.lose, self.come_back, self.go_on, self.end):
            self.live(step)

    def live(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Crashed:
            self.has_died = True
            self.pair.kill(self.dying)
            self.pair.lose()
            self.dying.restart()
            step()

    def begin(self) -> None:
        for server in (self.pair.a, self.pair.b):
            server.answers("s", None)
        self.accepted(self.pair.a, "a", 4)
        self.accepted(self.pair.b, "b", 3)

    def accepted(self, server: PartnerServer, name: str, count: int) -> None:
        """Add what is not there yet: a death before it was accepted makes its process raise it again."""
        known = {item.event.event_id for item in server.rig.main.read(0)[0]}
        known.update(*server.got.values())
        wanted = [event(number, event_id=f"{name}{number}") for number in range(1, count + 1)]
        server.add(*(each for each in wanted if each.event_id not in known))

    def mirror(self) -> None:
        self.pair.run(1)

    def leave(self) -> None:
        disk = self.pair.a.rig.disk
        if disk.crash_at:
            self.left = disk.crash_at - disk.operations
        self.pair.kill(self.pair.a)

    def lose(self) -> None:
        self.mend("s", self.pair.b)
        self.pair.lose()

    def come_back(self) -> None:
        if not self.pair.a.is_up:
            self.pair.a.restart()
            if self.dying is self.pair.a:
                self.arm()
        self.mend("s", self.pair.a)
        self.pair.run(2)

    def go_on(self) -> None:
        self.accepted(self.pair.a, "a", 6)
        self.pair.run(2)

    def end(self) -> None:
        self.pair.run(15)

    @staticmethod
    def mend(name: str, server: PartnerServer) -> None:
        """The recipient answers from now on; what it left unanswered is tried again."""
        sender = server.rig.senders[name]
        if sender.answer is None and sender.tokens:
            sender.back.append(sender.reply(retry("it was away")))
        server.answers(name)


@pytest.mark.parametrize("dying", ["a", "b"])
def test_a_death_at_each_operation_and_message_loses_nothing(tmp_path: Path, dying: str) -> None:
    deaths = 0
    for crash_at in range(1, 2000):
        folder = tmp_path / str(crash_at)
        folder.mkdir()
        story = Story(folder, dying, crash_at)
        story.tell()
        for name in RECIPIENTS:
            found = story.pair.of_recipient(name)
            counts = Counter(found)
            assert set(counts) == {*(f"a{n}" for n in range(1, 7)), "b1", "b2", "b3"}, (crash_at, name)
            assert max(counts.values()) <= MOST_REPEATS, (crash_at, name, found)
            for server in (story.pair.a, story.pair.b):
                for owner in "ab":
                    firsts = [each for each in dict.fromkeys(server.got[name]) if each[0] == owner]
                    assert firsts == sorted(firsts), (crash_at, name, server.names.name)
        assert len(story.pair.a.store) == len(story.pair.b.store) == 0, crash_at
        if not story.has_died:
            break
        deaths += 1
    assert deaths >= 15

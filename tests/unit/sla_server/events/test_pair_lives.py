"""Random lives of two cooperating servers, one of which is put back to older copies: nothing kept is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from sla_server.events.queue import decode
from sla_server.events.recipients.base import CONFIRMED, Answer, retry
from sla_server.events.stages.confirm import RetryRules
from tests.support.deliveries import event
from tests.support.partners import DiskCopy, Partners, PartnerServer

STEPS = 40
RECIPIENTS = ("r", "s")
ANSWERS: list[Answer | None] = [CONFIRMED, CONFIRMED, None, retry("busy")]


class Life:
    """Events on both sides, kills, cuts and slow recipients; server a is restored again and again.

    Attributes:
        owed: events that have to arrive: a server has them, or had them when the other one was restored.
    """

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.chance, self.folder = chance, folder
        rules = RetryRules(max_s=2.0, jitter_ratio=0.0)
        self.pair = Partners(folder, RECIPIENTS, most_notices=3, rules=rules)
        self.servers = {"a": self.pair.a, "b": self.pair.b}
        self.copies: list[tuple[DiskCopy, set[str]]] = []
        self.has: dict[str, set[str]] = {"a": set(), "b": set()}
        self.owed: set[str] = set()
        self.number = self.restored = 0

    def step(self) -> None:
        pair, name = self.pair, self.chance.choice("ab")
        server = self.servers[name]
        match self.chance.randrange(9):
            case 0 | 1 | 2 if server.is_up:
                self.add(name, server, self.chance.randrange(1, 6))
            case 3 if server.is_up:
                for recipient in RECIPIENTS:
                    server.answers(recipient, self.chance.choice(ANSWERS))
            case 4 if server.is_up:
                pair.kill(server)
            case 5:
                pair.mend() if pair.is_cut else pair.cut()
            case 6:
                self.copies.append((DiskCopy(pair.a, self.folder / f"copy{self.number}"), set(self.has["a"])))
                self.number += 1
            case 7 if self.copies:
                self.restore()
            case _:
                pair.run(self.chance.choice((0.3, 1, 3, 12)))
                if self.chance.random() < 0.7:
                    self.start()

    def add(self, name: str, server: PartnerServer, count: int) -> None:
        made = [event(self.number + place, event_id=f"{name}{self.number + place}") for place in range(count)]
        self.number += count
        server.add(*made)
        self.has[name] |= {each.event_id for each in made}

    def restore(self) -> None:
        copy, had = self.chance.choice(self.copies)
        self.owed -= self.has["a"] - had - self.kept_by_b()
        self.owed |= self.has["a"] & self.kept_by_b()
        self.pair.kill(self.pair.a)
        copy.restore(self.pair.a)
        self.pair.a.restart()
        self.has["a"] = set(had)
        self.restored += 1

    def kept_by_b(self) -> set[str]:
        store = self.pair.b.store
        records = [each for queue_id in store.queue_ids for each in store.read(queue_id, 0, 10_000)]
        return {decode(seq, data).event.event_id for seq, data in records}

    def start(self) -> None:
        for server in self.servers.values():
            if not server.is_up:
                server.restart()

    def end(self) -> None:
        self.pair.mend()
        self.start()
        for server in self.servers.values():
            for recipient in RECIPIENTS:
                sender = server.rig.senders[recipient]
                if sender.answer is None and sender.tokens:
                    sender.back.append(sender.reply(retry("it was away")))
                server.answers(recipient)
        self.pair.run(60)

    def check(self) -> None:
        owed = self.owed | self.has["a"] | self.has["b"]
        for recipient in RECIPIENTS:
            assert owed <= set(self.pair.of_recipient(recipient)), recipient
        assert len(self.pair.a.store) == len(self.pair.b.store) == 0


@pytest.mark.parametrize("seed", [*range(12), 26])
def test_lives_with_older_copies_lose_nothing_that_a_server_had(tmp_path: Path, seed: int) -> None:
    life = Life(tmp_path, random.Random(seed))
    for _ in range(STEPS):
        life.step()
    life.end()
    life.check()
    assert life.number

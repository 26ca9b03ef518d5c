"""A relay that is killed at each of its points: between record and confirm, between two confirmations ...

After the first death its stores are looked at as they are (``LeftStores``); its next life, which begins with
the replay of what they hold, is killed, too, and the third one has to bring everything to its end.

RELAY_KILL_EVERY: of how many points one is tried; 1 tries all and takes some minutes (``make crash-events``).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.queue import EventQueue
from sla_server.events.recipients.base import CONFIRMED, Notice
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.relay.config import load
from sla_server.relay.records import IdentityMemory
from tests.support.deliveries import event
from tests.support.forks import Children
from tests.support.relays import SECRET, Chain, documents

EVERY = int(os.environ.get("RELAY_KILL_EVERY", "6"))
REPLAY_POINTS = 17  # of the second life: within its replay, at most
POSTS, BATCH = 3, 2
WANTED = [f"e{number}" for number in range(1, POSTS * BATCH + 1)]
FOR_EVER = 10**9
LIMIT_S = 120.0


@pytest.fixture(scope="module")
def children() -> Iterator[Children]:
    with Children("tests.support.relay_deaths") as found:
        yield found


class Life:
    """One relay in a child."""

    def __init__(self, children: Children, folder: Path, kill_at: int) -> None:
        self.result: tuple[int, str] | None = None
        self._folder = folder
        (folder / "stop").unlink(missing_ok=True)

        def run() -> None:
            self.result = children.run(str(folder), kill_at)

        self._thread = threading.Thread(target=run)
        self._thread.start()

    @property
    def is_dead(self) -> bool:
        return not self._thread.is_alive()

    def stop(self) -> int:
        """Ask it to stop; its exit status."""
        (self._folder / "stop").touch()
        self._thread.join(LIMIT_S)
        assert self.result is not None
        assert self.result[0] in (0, -9), self.result[1]
        return self.result[0]


def sends(folder: Path, url: str, posts: Sequence[Sequence[int]], life: Life) -> list[Sequence[int]]:
    """Post until all is confirmed or the relay has died; what is not confirmed."""
    left = list(posts)
    (folder / "key").write_text(SECRET)
    (folder / "key").chmod(0o600)
    recipient = RecipientBuilder(folder, folder, folder)(
        "relay", {"webhook": {"url": url, "secret_file": "key"}}
    )
    deadline = Deadline(LIMIT_S)
    while left and not life.is_dead:
        notices = [Notice(event(number), "relay", number) for number in left[0]]
        if recipient.deliver(notices, Deadline(LIMIT_S)) == CONFIRMED:
            left.pop(0)
        else:
            time.sleep(0.02)
        assert not deadline.passed
    recipient.close()
    return left


def all_there(sites: Chain, life: Life) -> bool:
    """Wait until both files have all, or the relay has died."""
    deadline = Deadline(LIMIT_S)
    while not life.is_dead:
        if all(set(got(sites, name)) >= set(WANTED) for name in ("first", "second")):
            return True
        assert not deadline.passed
        time.sleep(0.02)
    return False


def got(sites: Chain, name: str) -> list[str]:
    return [each["delivery_id"] for each in sites.notices(name)]


class LeftStores:
    """What a relay that was killed has left on its disk, read from a copy.

    Attributes:
        queued: number of each event that is in the queue, by identity.
        remembered: identities in the memory.
        cursors: up to which number of the queue each recipient needs nothing more.
    """

    def __init__(self, sites: Chain, copy: Path) -> None:
        config = load(sites.site)
        events = sites.data / "events"
        copy.mkdir()
        for path in events.iterdir():
            if path.is_file():
                shutil.copyfile(path, copy / path.name)
        self.queued: dict[str, int] = {}
        self.remembered: set[str] = set()
        self.cursors: dict[str, int] = {}
        if (copy / "main").exists():
            queue = EventQueue(copy, "main", config.events.queue_bytes)
            items, through = queue.read(0)
            while items:
                self.queued |= {item.identity: item.seq for item in items if item.identity in WANTED}
                items, through = queue.read(through)
            queue.close()
        if (copy / "identities").exists():
            memory = IdentityMemory(copy, config.identities)
            self.remembered = set(memory.known) & set(WANTED)
            memory.close()
        if (copy / "state.json").exists():
            lanes: dict[str, Any] = json.loads((copy / "state.json").read_text())["lanes"]
            self.cursors = {name: lane["cursors"]["main"] for name, lane in lanes.items()}
        shutil.rmtree(copy)

    def check(self, sites: Chain, confirmed: set[str], *, is_final: bool) -> None:
        """Each store holds what the ones after it rely on."""
        known = self.queued.keys() | self.remembered
        taken = {name: set(got(sites, name)) for name in ("first", "second")}
        assert confirmed <= known  # record: what was confirmed upstream is on disk
        for name, found in taken.items():
            assert found <= known, name  # forward: a recipient has nothing that was not recorded
            assert self.remembered - self.queued.keys() <= found, name  # delete: only what all have
            passed = {each for each, seq in self.queued.items() if seq <= self.cursors.get(name, 0)}
            assert passed <= found, name  # confirm: no cursor is ahead of its recipient
            assert not is_final or confirmed <= found, name  # confirm upstream: as late as it was asked for


@pytest.mark.parametrize("confirm", ["record", "final"])
def test_a_relay_that_dies_at_any_point_loses_nothing_and_keeps_the_order(
    children: Children, tmp_path: Path, confirm: str
) -> None:
    numbers = list(range(1, POSTS * BATCH + 1))
    posts = [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    deaths = replays = 0
    for kill_at in range(0, 100_000, EVERY):
        folder = tmp_path / f"{confirm}-{kill_at}"
        folder.mkdir()
        sites = Chain(folder)
        sites.configure(
            documents(
                first=("{file: {path: first.jsonl}, batch: 2}", "{elements: [gateway]}"),
                second=("{file: {path: second.jsonl}, batch: 1}", "{elements: [gateway]}"),
            ),
            confirm=confirm, final_wait_s=2.0, identities=1000,
        )  # fmt: skip
        life = Life(children, folder, kill_at)
        left = sends(folder, sites.url, posts, life)
        died = bool(left) or not all_there(sites, life)
        status, lives = life.stop(), 1
        if died or status:
            deaths += 1
            confirmed = {f"e{number}" for post in posts if post not in left for number in post}
            LeftStores(sites, folder / "copy").check(sites, confirmed, is_final=confirm == "final")
            life = Life(children, folder, kill_at % REPLAY_POINTS)
            left = sends(folder, sites.url, left, life)
            all_there(sites, life)
            replays += life.stop() != 0
            life, lives = Life(children, folder, FOR_EVER), 3
            assert sends(folder, sites.url, left, life) == []
            # A server that died before it knew of our answer posts again what was confirmed.
            assert sends(folder, sites.url, posts, life) == []
            assert all_there(sites, life)
            assert life.stop() == 0
        for name, batch in (("first", 2), ("second", 1)):
            found = got(sites, name)
            assert list(dict.fromkeys(found)) == WANTED, (kill_at, name)
            repeats = sum(Counter(found).values()) - len(WANTED)
            assert repeats <= batch * (lives - 1), (kill_at, name, found)
        if not died and not status:
            break
    assert deaths >= 60 // EVERY
    assert replays >= deaths // 2
    said = f"{deaths} deaths, {replays} more in the next life"
    print(f"confirm on {confirm}: {said}, {len(WANTED)} events to two recipients in order")

"""A relay that is killed at each of its points: between record and confirm, between two confirmations ...

RELAY_KILL_EVERY: of how many points one is tried; 1 tries all and takes some minutes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.base import CONFIRMED, Notice
from sla_server.events.recipients.build import RecipientBuilder
from tests.support.deliveries import event
from tests.support.forks import Children
from tests.support.relays import SECRET, Chain, documents

EVERY = int(os.environ.get("RELAY_KILL_EVERY", "4"))
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


@pytest.mark.parametrize("confirm", ["record", "final"])
def test_a_relay_that_dies_at_any_point_loses_nothing_and_keeps_the_order(
    children: Children, tmp_path: Path, confirm: str
) -> None:
    numbers = list(range(1, POSTS * BATCH + 1))
    posts = [numbers[start : start + BATCH] for start in range(0, len(numbers), BATCH)]
    deaths = 0
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
        status = life.stop()
        if died or status:
            deaths += 1
            life = Life(children, folder, FOR_EVER)
            assert sends(folder, sites.url, left, life) == []
            # A server that died before it knew of our answer posts again what was confirmed.
            assert sends(folder, sites.url, posts, life) == []
            assert all_there(sites, life)
            assert life.stop() == 0
        for name, batch in (("first", 2), ("second", 1)):
            found = got(sites, name)
            assert list(dict.fromkeys(found)) == WANTED, (kill_at, name)
            repeats = sum(Counter(found).values()) - len(WANTED)
            assert repeats <= (batch if died or status else 0), (kill_at, name, found)
        if not died and not status:
            break
    assert deaths >= 60 // EVERY
    print(f"confirm on {confirm}: {deaths} deaths, {len(WANTED)} events to two recipients in order")

"""What tests/crash/test_every_store runs: a child dies at a store, and what must hold afterwards.

``a`` and ``c`` (senders) and ``b`` (recipient; ``c`` takes, too) live in one child that is killed at its k-th
store: all three die at once. ``d`` (recipient) and ``s`` (sender) live on and are never restarted. ``d`` also
takes in the middle of the child's life, so that its look-ahead stands in what the dead leave: at a slot that
is posted, in a run that is unlinked and freed, at the tail.

``tests.support.forks`` calls ``main`` in a process that has imported little: each of the two thousand deaths
is a fork, and a fork of pytest itself copies the page tables of all that it has imported.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pmdaemon.mailbox import Layout, Mailbox, Message, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from tests.support.killing import Fate, Journal, child
from tests.support.mailbox import abandon, audit

NEVER = 1 << 60
LAST_POST = 20  # stores of a post that reclaims a run of three, and somewhat more
FULL = os.environ.get("SLA_CRASH_S") is not None  # ``make crash``: every pair of deaths, not one in many
POSTERS = ("a", "c", "s")
TAKERS = ("b", "c", "d")


def layout(form: str) -> Layout:
    routes = tuple(Route(x, y, 256) for x in POSTERS for y in TAKERS if x != y)
    return Layout(("a", "b", "c", "d", "s"), routes, 13, form, first_bytes=64)


class Script:
    """What the child does: everything that stores."""

    def __init__(self, path: Path, journal: Journal) -> None:
        self.journal = journal
        self.boxes = {name: attach(path, name) for name in "abc"}
        self.number = 0

    def post(self, sender: str, recipients: str, size: int, urgent: bool = False) -> None:
        self.number += 1
        payload = b"%d:" % self.number + b"x" * size
        full: tuple[str, ...] = ()
        self.journal.write("begin", recipients, payload.decode())
        try:
            self.boxes[sender].post(tuple(recipients), payload, urgent=urgent)
        except MailboxFull as error:
            full = error.recipients
        self.journal.write("ack", "".join(name for name in recipients if name not in full), payload.decode())

    def post_many(self, sender: str, recipient: str, sizes: list[int]) -> None:
        payloads = []
        for size in sizes:
            self.number += 1
            payloads.append(b"%d:" % self.number + b"x" * size)
            self.journal.write("begin", recipient, payloads[-1].decode())
        try:
            self.boxes[sender].post_many(recipient, payloads)
        except MailboxFull as error:
            payloads = payloads[: error.posted]
        for payload in payloads:
            self.journal.write("ack", recipient, payload.decode())

    def take(self, name: str, count: int, views: bool = False) -> list[Any]:
        box = self.boxes[name]
        messages = box.take_views(count) if views else box.take(count)
        self.journal.write("got", name, [bytes(message.payload).decode() for message in messages])
        return messages

    def unlink_a_run(self, stands_at: int) -> None:
        """Unlink three slots at once; the look-ahead of d is one of the three."""
        for number in range(4):
            if number == stands_at:
                self.journal.turn()
            self.post("a", "b", 10)
        self.take("b", 64)
        self.boxes["b"].release()
        self.post("a", "b", 10)

    def run(self) -> None:
        """Runs of several slots, full rings, urgent ones, wrap-around, batches, views, sleep, reclaim."""
        for stands_at in (1, 3):
            self.unlink_a_run(stands_at)
        self.journal.turn()
        self.post("a", "bcd", 20)
        self.post("c", "b", 5)
        self.post("a", "bd", 30, urgent=True)
        self.take("b", 2)
        self.post_many("a", "b", [10, 0, 40, 20])
        self.take("c", 5)
        assert self.boxes["c"].prepare_sleep()
        self.post("a", "bc", 60)
        self.boxes["c"].awake()
        returned = self.take("b", 3)
        self.journal.write("returned", "b", [message.payload.decode() for message in returned[1:]])
        self.boxes["b"].give_back(returned[1:])
        self.post("a", "bcd", 90)  # b is full
        self.take("b", 64)
        self.post("c", "bd", 50, urgent=True)
        self.journal.turn()
        self.take("b", 64, views=True)
        self.post_many("a", "b", [1, 2, 3, 4, 5])  # a bundle, released in parts
        self.take("b", 2)
        part = self.take("b", 2)
        self.journal.write("returned", "b", [part[0].payload.decode()])
        self.boxes["b"].give_back(part[:1])
        self.take("b", 2)
        self.post("a", "b", 150)
        self.take("c", 64)
        for _ in range(3):
            self.journal.turn()
            self.post("a", "bc", 33)
            self.post("c", "b", 0)
            self.take("b", 64)
            self.take("c", 64)
        self.boxes["b"].release()
        self.boxes["a"].close()


class World:
    """A segment, the two that live, and what must hold after the others died."""

    def __init__(self, path: Path, form: str) -> None:
        create_segment(path, layout(form))
        self.path = path
        self.living = {name: attach(path, name) for name in "ds"}
        for number in range(2):
            self.living["s"].post(("b", "c", "d"), b"s%d" % number)
        self.acknowledged: dict[str, list[str]] = {name: [f"s{n}" for n in range(2)] for name in TAKERS}
        self.begun: dict[str, set[str]] = {name: set() for name in TAKERS}
        self.got: dict[str, list[str]] = {name: [] for name in TAKERS}
        self.in_hand: dict[str, set[str]] = {name: set() for name in TAKERS}

    def live_and_die(self, kill_at: int, script: Callable[[Script], None] = Script.run) -> int:
        """One life of the child; returns its stores, or -1 if it was killed."""

        def action(_fate: Fate, journal: Journal) -> None:
            script(Script(self.path, journal))

        with child(action, kill_at, lambda: self.drain("d", self.living["d"])) as (lines, killed):
            for what, *values in lines:
                getattr(self, "on_" + what.replace("-", "_"))(*values)
        return -1 if killed else lines[-1][1]

    def on_begin(self, recipients: str, payload: str) -> None:
        for name in recipients:
            self.begun[name].add(payload)

    def on_ack(self, recipients: str, payload: str) -> None:
        for name in recipients:
            self.acknowledged[name].append(payload)

    def on_got(self, name: str, payloads: list[str]) -> None:
        assert not set(payloads) & set(self.got[name]), "doubled to a living recipient"
        self.got[name] += payloads
        self.in_hand[name] = set(payloads)

    def on_returned(self, name: str, payloads: list[str]) -> None:
        self.got[name] = [payload for payload in self.got[name] if payload not in payloads]

    def on_stores(self, _stores: int) -> None:
        """The last line."""

    def restart(self, kill_at: int, names: str = "abc") -> bool:
        """A second child attaches them, repairing, and is killed at a store of that."""

        def action(_fate: Fate, _journal: Journal) -> None:
            for name in names:
                attach(self.path, name)

        with child(action, kill_at) as (_, killed):
            return killed

    def check(self) -> None:
        """Survivors first, without any restart; then the new incarnations."""
        self.drain("d", self.living["d"])  # its look-ahead stood in what the dead left
        for name in TAKERS:
            self.living["s"].post(name, b"after")
            self.acknowledged[name].append("after")
        self.drain("d", self.living["d"])
        assert self.got["d"][-1] == "after"
        boxes = dict(self.living)
        for name in "abc":
            boxes[name] = attach(self.path, name)
        for name in TAKERS:  # d, too: of an urgent post it may learn only when its sender is back
            self.drain(name, boxes[name])
        for name in TAKERS:
            missing = set(self.acknowledged[name]) - set(self.got[name])
            assert not missing, f"{name} lost {missing}"
            assert set(self.got[name]) <= set(self.acknowledged[name]) | self.begun[name]
        for name in POSTERS:
            audit(boxes[name])
        for number in range(12):
            for sender in POSTERS:
                recipients = tuple(name for name in TAKERS if name != sender)
                boxes[sender].post(recipients, b"%d" % number, urgent=number % 4 == 0)
            for name in TAKERS:
                senders = sorted(message.sender for message in take_all(boxes[name]))
                assert senders == [sender for sender in POSTERS if sender != name]
        for name in POSTERS:
            audit(boxes[name])
        abandon(*boxes.values())

    def drain(self, name: str, box: Mailbox) -> None:
        came = [message.payload.decode() for message in take_all(box)]
        assert len(set(came)) == len(came), "doubled to a living recipient"
        again = set(came) & set(self.got[name])
        assert again <= self.in_hand[name], "released messages came again"
        assert name != "d" or not again
        self.got[name] += came


def take_all(box: Mailbox) -> list[Message]:
    taken: list[Message] = []
    while messages := box.take():
        taken += messages
    return taken


def three_processes(folder: Path, form: str) -> None:
    world = World(folder / "count", form)
    stores = world.live_and_die(NEVER)
    world.check()
    assert stores > 350
    for kill_at in range(0, stores, 1 if FULL else 3):
        world = World(folder / f"{kill_at}", form)
        assert world.live_and_die(kill_at) == -1
        world.check()
        (folder / f"{kill_at}").unlink()


def repair(folder: Path, form: str) -> None:
    stores = World(folder / "count", form).live_and_die(NEVER)
    deaths = 0
    for first in range(0, stores, 1 if FULL else 43):
        second = 0
        while True:
            world = World(folder / f"{first}-{second}", form)
            assert world.live_and_die(first) == -1
            killed = world.restart(second)
            world.check()
            (folder / f"{first}-{second}").unlink()
            if not killed:
                break
            deaths += 1
            second += 1 if FULL else 2
    assert deaths > (100 if FULL else 40)


def survivor(folder: Path, form: str, stands_at: int) -> None:
    def script(actor: Script) -> None:
        actor.unlink_a_run(stands_at)

    stores = World(folder / "count", form).live_and_die(NEVER, script)
    for first in range(stores - LAST_POST, stores):
        second = 0
        while True:
            world = World(folder / f"{first}-{second}", form)
            assert world.live_and_die(first, script) == -1
            killed = world.restart(second, "a")
            world.check()
            (folder / f"{first}-{second}").unlink()
            if not killed:
                break
            second += 1
    assert second >= 3


SWEEPS: dict[str, Callable[..., None]] = {"three": three_processes, "repair": repair, "survivor": survivor}


def main(sweep: str, *arguments: Any) -> None:
    """One sweep, on a tmpfs if there is one, as the product's segments are."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sla-deaths-", dir=shm if shm.is_dir() else None) as folder:
        SWEEPS[sweep](Path(folder), *arguments)

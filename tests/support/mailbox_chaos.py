"""Chaos: senders and a recipient are killed at random instants, two at a time now and then, and restarted.

Beside them live a recipient and a sender that are never restarted. What was acknowledged stands in memory
that outlives its writer. Used by ``test_chaos`` (bounded), ``make crash`` (longer) and the benchmark.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.runtime.clock import Deadline
from tests.support.mailbox import audit

SENDERS = ("s0", "s1", "s2")
MORTAL, LIVING, CALM = "mortal", "living", "calm"  # two recipients, and a sender that lives
NUMBER = struct.Struct("<IQ")
MOST = 1 << 25  # numbers a sender may use; memory is touched only as far as they get


class Ledger:
    """What outlives its writers: one byte for each number of each sender, and the one each sender began."""

    def __init__(self) -> None:
        names = (*SENDERS, CALM)
        self.number = {name: index for index, name in enumerate(names)}
        self.begun = memoryview(mmap.mmap(-1, 4096)).cast("Q")
        self.acknowledged = [memoryview(mmap.mmap(-1, MOST)) for _ in names]
        self.met = [memoryview(mmap.mmap(-1, MOST)) for _ in names]  # how often, by the mortal recipient
        self.faults = memoryview(mmap.mmap(-1, 4096)).cast("Q")

    def acknowledge(self, sender: int, number: int) -> None:
        self.acknowledged[sender][number] = 1

    def meet(self, sender: int, number: int) -> None:
        self.met[sender][number] = min(255, self.met[sender][number] + 1)


@dataclass
class Outcome:
    """What a run showed. ``lost`` and ``doubled`` must be 0."""

    kills: int = 0
    posted: int = 0
    lost: int = 0
    doubled: int = 0
    disordered: int = 0
    again: int = 0  # given a second time to a restarted recipient: at least once
    repairs: int = 0


def layout(form: str) -> Layout:
    """Small rings, so that full ones, reuse and reclaim happen all the time."""
    names = (*SENDERS, CALM, MORTAL, LIVING)
    routes = tuple(Route(name, to, 8192) for name in (*SENDERS, CALM) for to in (MORTAL, LIVING))
    return Layout(names, routes, 128, form)


def post_to_both(box: Mailbox, sender: int, number: int) -> None:
    """Post until both have it."""
    due: tuple[str, ...] = (MORTAL, LIVING)
    payload = NUMBER.pack(sender, number) + bytes(number % 200)
    while due:
        try:
            box.post(due, payload)
            return
        except MailboxFull as full:
            due = full.recipients
            os.sched_yield()


def post_run(box: Mailbox, sender: int, numbers: range) -> None:
    """Post bundles until both have all of them."""
    for recipient in (MORTAL, LIVING):
        left = [NUMBER.pack(sender, number) + bytes(number % 50) for number in numbers]
        while left:
            try:
                box.post_many(recipient, left)
                left = []
            except MailboxFull as full:
                left = left[full.posted :]
                os.sched_yield()


def send_runs(box: Mailbox, ledger: Ledger, index: int) -> None:
    first = ledger.begun[index] + 1
    while first < MOST - 64:
        numbers = range(first, first + first % 40 + 1)
        first = numbers.stop
        ledger.begun[index] = first - 1
        post_run(box, index, numbers)
        for number in numbers:
            ledger.acknowledge(index, number)


def send(path: Path, ledger: Ledger, name: str) -> None:
    """A sender's life: numbers go on behind those of its former life. One of them sends bundles."""
    box, index = attach(path, name), ledger.number[name]
    if name == SENDERS[-1]:
        send_runs(box, ledger, index)
    # The number being posted at death may have been posted or not; it is not used again.
    for number in range(ledger.begun[index] + 1, MOST):
        ledger.begun[index] = number
        post_to_both(box, index, number)
        ledger.acknowledge(index, number)


def receive(path: Path, ledger: Ledger) -> None:
    """The mortal recipient's life: note each message, then release the batch by the next take."""
    box = attach(path, MORTAL)
    newest: dict[int, int] = {}
    while True:
        messages = box.take(16)
        for message in messages:
            sender, number = NUMBER.unpack_from(message.payload)
            if number <= newest.get(sender, -1):
                ledger.faults[0] += 1
            newest[sender] = number
            ledger.meet(sender, number)
        if not messages:
            box.wait(0.01)


def fork(child: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


class Chaos:
    """One run in a segment of its own."""

    def __init__(self, path: Path, form: str, seed: int) -> None:
        create_segment(path, layout(form))
        self.path = path
        self.ledger = Ledger()
        self.dice = random.Random(seed)
        self.living, self.calm = attach(path, LIVING), attach(path, CALM)
        self.got = [memoryview(mmap.mmap(-1, MOST)) for _ in range(4)]
        self.newest = dict.fromkeys(range(4), -1)
        self.outcome = Outcome()
        self.pids = {name: self.start(name) for name in (*SENDERS, MORTAL)}

    def start(self, name: str) -> int:
        if name == MORTAL:
            return fork(lambda: receive(self.path, self.ledger))
        return fork(lambda: send(self.path, self.ledger, name))

    def take(self) -> int:
        messages = self.living.take(256)
        for message in messages:
            sender, number = NUMBER.unpack_from(message.payload)
            self.outcome.doubled += self.got[sender][number]
            self.got[sender][number] = 1
            self.outcome.disordered += number <= self.newest[sender]
            self.newest[sender] = number
        return len(messages)

    def post_calmly(self) -> None:
        index = self.ledger.number[CALM]
        number = self.ledger.begun[index] + 1
        self.ledger.begun[index] = number
        try:
            self.calm.post((MORTAL, LIVING), NUMBER.pack(index, number))
        except MailboxFull as full:
            waiting = full.recipients
            while waiting:
                self.take()
                try:
                    self.calm.post(waiting, NUMBER.pack(index, number))
                    waiting = ()
                except MailboxFull as again:
                    waiting = again.recipients
        self.ledger.acknowledge(index, number)

    def kill(self) -> None:
        victims = self.dice.sample(sorted(self.pids), self.dice.choice((1, 1, 1, 2)))
        for name in victims:
            os.kill(self.pids[name], signal.SIGKILL)
        for name in victims:
            os.waitpid(self.pids[name], 0)
            self.outcome.kills += 1
        for name in victims:
            self.pids[name] = self.start(name)

    def run(self, kills: int, limit_s: float) -> Outcome:
        """Kill until there were ``kills`` of them or the time is over, then count."""
        deadline = Deadline(limit_s)
        try:
            while self.outcome.kills < kills and not deadline.passed:
                pause = Deadline(self.dice.uniform(0.001, 0.012))
                while not pause.passed:
                    self.take()
                    self.post_calmly()
                self.kill()
        finally:
            for pid in self.pids.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return self.count()

    def count(self) -> Outcome:
        """Empty everything and compare with what was acknowledged; no slot may be lost."""
        ledger, outcome = self.ledger, self.outcome
        while self.take():
            pass
        boxes = {name: attach(self.path, name) for name in (*SENDERS, MORTAL)}
        while messages := boxes[MORTAL].take(256):
            for message in messages:
                ledger.meet(*NUMBER.unpack_from(message.payload))
        for index in ledger.number.values():
            acknowledged = np.frombuffer(ledger.acknowledged[index], np.uint8)
            met = np.frombuffer(ledger.met[index], np.uint8)
            got = np.frombuffer(self.got[index], np.uint8)
            outcome.posted += int(acknowledged.sum())
            outcome.lost += int((acknowledged > got).sum()) + int((acknowledged > met).sum())
            outcome.again += int((met > 1).sum())
        outcome.disordered += ledger.faults[0]
        for box in (self.calm, *(boxes[name] for name in SENDERS)):
            for urgent in (False, True):
                box.post(LIVING, NUMBER.pack(0, 0), urgent=urgent)
            audit(box)
        outcome.repairs = sum(box.stats()["repairs"] for box in (self.calm, *boxes.values()))
        for box in (self.living, self.calm, *boxes.values()):
            box.close()
        return outcome


def run(form: str, kills: int, limit_s: float, seed: int) -> Outcome:
    """One run in a fresh private directory on a tmpfs if there is one."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="sla-chaos-", dir=shm if shm.is_dir() else None) as folder:
        return Chaos(Path(folder) / "main", form, seed).run(kills, limit_s)

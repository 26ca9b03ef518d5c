"""Real processes: two at full speed, a sender killed again and again, a wake-up through a selector."""

from __future__ import annotations

import functools
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment
from pmdaemon.mailbox.errors import MailboxFull
from pmdaemon.runtime.clock import Deadline
from tests.support.mailbox import drain, exit_status, forked, make_mesh

LIMIT_S = 60.0  # a hang fails the test; no run comes near it
NUMBER = struct.Struct("<Q")


def post_patiently(box: Mailbox, recipient: str, payload: bytes) -> None:
    deadline = Deadline(LIMIT_S)
    while not deadline.passed:
        try:
            return box.post(recipient, payload)
        except MailboxFull:
            os.sched_yield()
    raise TimeoutError("the recipient takes nothing")


def test_two_processes_and_full_rings(path: Path) -> None:
    count = 3000
    make_mesh(path, "a", "b", slots=64, ring_bytes=1 << 12)

    def child() -> None:
        box = attach(path, "a")
        for number in range(count):
            post_patiently(box, "b", NUMBER.pack(number) * (number % 97 + 1))

    with attach(path, "b") as b, forked(child) as pid:
        deadline = Deadline(LIMIT_S)
        got: list[bytes] = []
        while len(got) < count and not deadline.passed:
            b.wait(1)
            got.extend(drain(b))
        assert got == [NUMBER.pack(number) * (number % 97 + 1) for number in range(count)]
        assert exit_status(pid) == 0
        assert b.stats()["resets"]["invalid"] < count


def post_numbers(path: Path, next_of: dict[str, int], fd: int) -> None:
    """Post ascending numbers to both until killed; tell each number on ``fd`` when both have it."""
    box = attach(path, "a")
    for number in range(min(next_of.values()), 1 << 40):
        due = tuple(name for name, first in next_of.items() if number >= first)
        while due:
            try:
                box.post(due, NUMBER.pack(number))
                due = ()
            except MailboxFull as full:
                due = full.recipients
        os.write(fd, NUMBER.pack(number))


def test_a_sender_killed_again_and_again_loses_and_doubles_nothing(path: Path) -> None:
    routes = (Route("a", "b", 1 << 12), Route("a", "c", 1 << 12))
    create_segment(path, Layout(("a", "b", "c"), routes, 128))
    boxes = {name: attach(path, name) for name in "bc"}
    got: dict[str, list[int]] = {"b": [], "c": []}

    def take_all() -> None:
        for name, box in boxes.items():
            got[name] += [NUMBER.unpack(payload)[0] for payload in drain(box)]

    acknowledged = -1
    for life in range(12):
        readable, writable = os.pipe()
        next_of = {name: len(numbers) for name, numbers in got.items()}
        with forked(functools.partial(post_numbers, path, next_of, writable)) as pid:
            os.close(writable)
            for _ in range(40 + 7 * life):
                acknowledged = NUMBER.unpack(os.read(readable, 8))[0]
                take_all()
            os.kill(pid, signal.SIGKILL)
            exit_status(pid)
        while rest := os.read(readable, 8):
            acknowledged = NUMBER.unpack(rest)[0]
        os.close(readable)
        take_all()
        for numbers in got.values():
            assert numbers == list(range(len(numbers)))
            assert len(numbers) > acknowledged
    for box in boxes.values():
        box.close()


def test_a_sleeping_process_is_woken_through_its_selector(path: Path) -> None:
    make_mesh(path, "a", "b")

    def child() -> None:
        box = attach(path, "b")
        deadline = Deadline(LIMIT_S)
        for number in range(20):
            while not (got := drain(box)) and not deadline.passed:
                if box.prepare_sleep():
                    # Without the backstop on purpose: only the bell can end this sleep.
                    select.select([box], [], [], LIMIT_S)
                    box.awake()
            assert got == [b"%d" % number]
            box.post("a", b"pong")
        assert box.stats()["posts"] == 20

    with attach(path, "a") as a, forked(child) as pid:
        deadline = Deadline(LIMIT_S)
        for number in range(20):
            a.post("b", b"%d" % number)
            while not (got := drain(a)) and not deadline.passed:
                if a.prepare_sleep():
                    select.select([a], [], [], LIMIT_S)
                    a.awake()
            assert got == [b"pong"]
        assert exit_status(pid) == 0
        assert not deadline.passed


ALLOCATING = """
import ctypes, sys
from pathlib import Path
from pmdaemon.mailbox import attach

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks")]
    _fields_.append(("others", ctypes.c_size_t * 6))

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
box = attach(Path(sys.argv[1]), "a")
before = libc.mallinfo2().hblks
batch = bytes(300_000)
print(libc.mallinfo2().hblks - before)
"""


def test_a_batch_is_not_mapped_and_unmapped_each_time(path: Path) -> None:
    make_mesh(path, "a", "b")
    command = [sys.executable, "-c", ALLOCATING, str(path)]
    assert subprocess.run(command, check=True, capture_output=True).stdout.split() == [b"0"]

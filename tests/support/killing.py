"""Processes that kill themselves at their k-th store into shared memory: SIGKILL, no handler, no cleanup.

Unlike the exceptions of tests/unit/pmdaemon/mailbox, every store counts: attach, adopt and repair, posts,
links, unlinks, TAKEN marks, SLEEP words and figures. A copy of several words counts as several.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pmdaemon.mailbox import mailbox as mailbox_module
from pmdaemon.mailbox import reader as taking_module
from pmdaemon.mailbox import shared_writer as shared_module
from pmdaemon.mailbox.segment import Segment
from pmdaemon.mailbox.shared_writer import RobustMutex


class Fate:
    """How many stores are left to live, and how many were made."""

    def __init__(self, kill_at: int) -> None:
        self.left = kill_at
        self.stores = 0

    def step(self) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1
        self.stores += 1


class Deadly:
    """A view of shared memory whose stores are counted."""

    def __init__(self, fate: Fate, target: Any) -> None:
        self._fate = fate
        self.target = target

    def __getitem__(self, key: Any) -> Any:
        return self.target[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            step = max(8, len(value) // 64 * 8)
            for start in range(key.start, key.stop, step):
                end = min(start + step, key.stop)
                self._fate.step()
                self.target[start:end] = value[start - key.start : end - key.start]
        else:
            self._fate.step()
            self.target[key] = value

    def __len__(self) -> int:
        return len(self.target)

    def madvise(self, *how: int) -> None:
        self.target.madvise(*how)

    def release(self) -> None:
        self.target.release()

    def close(self) -> None:
        self.target.close()


def mortal(fate: Fate) -> None:
    """From here on every segment that this process attaches to is deadly. Call it in a forked child."""

    class DeadlySegment(Segment):
        def __init__(self, path: Path, *, writable: bool = True) -> None:
            super().__init__(path, writable=writable)
            self.words: Any = Deadly(fate, self.words)
            self.memory: Any = Deadly(fate, self.memory)

    def mutex(memory: Any, words: Any, at_bytes: int, where: str) -> RobustMutex:
        return RobustMutex(getattr(memory, "target", memory), words, at_bytes, where)

    def unpack(memory: Any, at_bytes: int) -> tuple[int, ...]:
        return struct.unpack_from("=8x7Q", memory.target, at_bytes)

    taking_module._unpack = unpack  # type: ignore[misc,assignment]
    mailbox_module.Segment = DeadlySegment  # type: ignore[misc]
    shared_module.RobustMutex = mutex  # type: ignore[assignment,misc]


class Journal:
    """Lines from a child, which are in the pipe whatever happens to it afterwards."""

    def __init__(self, fd: int, replies: int) -> None:
        self._fd = fd
        self._replies = replies

    def turn(self) -> None:
        """Let the parent act, and go on when it has."""
        self.write("turn")
        assert os.read(self._replies, 1) == b"."

    def write(self, *values: object) -> None:
        os.write(self._fd, json.dumps(values).encode() + b"\n")


@contextmanager
def child(
    action: Callable[[Fate, Journal], None], kill_at: int, on_turn: Callable[[], None] = lambda: None
) -> Iterator[tuple[list[Any], bool]]:
    """Run ``action`` in a child that dies at store ``kill_at``; yields its journal and whether it died.

    ``on_turn`` is called while the child waits in ``Journal.turn``.
    """
    readable, writable = os.pipe()
    replies, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(readable)
            os.close(answers)
            fate, journal = Fate(kill_at), Journal(writable, replies)
            mortal(fate)
            action(fate, journal)
            journal.write("stores", fate.stores)
            status = 0
        except BaseException:  # noqa: BLE001 - a child must never return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writable)
    os.close(replies)
    lines = []
    with os.fdopen(readable, "rb") as pipe, os.fdopen(answers, "wb", buffering=0) as answering:
        for line in pipe:
            values = json.loads(line)
            if values == ["turn"]:
                on_turn()
                answering.write(b".")
            else:
                lines.append(values)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the child failed ({code}), see its traceback"
    yield lines, code != 0

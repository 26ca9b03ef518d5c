"""What the mailbox tests share: small layouts, a memory that fails at the k-th store, forked children."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from pmdaemon.mailbox import Layout, Mailbox, Route, create_segment
from pmdaemon.mailbox.layout import FIRST_BYTES, MASK32, S_PREVIOUS
from pmdaemon.mailbox.shared_writer import SharedWriter

FORM = "lanes"  # set by the fixture ``form`` (conftest) for the modules that run in both forms


def mesh(*names: str, ring_bytes: int = 1024, slots: int = 32, first_bytes: int = FIRST_BYTES) -> Layout:
    """Everybody may post to everybody else."""
    routes = tuple(Route(a, b, ring_bytes) for a in names for b in names if a != b)
    return Layout(names, routes, slots, FORM, first_bytes)


def make_mesh(
    path: Path, *names: str, ring_bytes: int = 1024, slots: int = 32, first_bytes: int = FIRST_BYTES
) -> Path:
    create_segment(path, mesh(*names, ring_bytes=ring_bytes, slots=slots, first_bytes=first_bytes))
    return path


def drain(box: Mailbox) -> list[bytes]:
    """All payloads waiting for ``box``."""
    payloads: list[bytes] = []
    while messages := box.take():
        payloads.extend(message.payload for message in messages)
    return payloads


class Crash(Exception):
    """The process is thought to die here."""


def run_mortal(action: Callable[[], object]) -> bool:
    """Run ``action`` in a thread that may die by ``Crash``; whether it lived.

    A thread of its own, because the kernel gives a robust mutex up when the thread that holds it ends.
    """
    ended: list[BaseException | None] = []

    def body() -> None:
        try:
            action()
            ended.append(None)
        except BaseException as exc:  # noqa: BLE001 - told to the caller below
            ended.append(exc.with_traceback(None) if isinstance(exc, Crash) else exc)

    thread = threading.Thread(target=body, name="mortal")
    thread.start()
    thread.join()
    if ended[0] is not None and not isinstance(ended[0], Crash):
        raise ended[0]
    return ended[0] is None


class FailingStores:
    """Counts stores of several objects together and raises instead of the k-th (0 is the first)."""

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at
        self.stores = 0

    def wrap(self, target: Any) -> Any:
        return _Failing(self, target)


class _Failing:
    def __init__(self, counter: FailingStores, target: Any) -> None:
        self._counter = counter
        self._target = target

    def __getitem__(self, key: Any) -> Any:
        return self._target[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(key, slice):
            # A copy of many words may end after any of them; the longer ones are cut in eight places.
            step = max(8, len(value) // 64 * 8)
            for start in range(key.start, key.stop, step):
                end = min(start + step, key.stop)
                self._store(slice(start, end), value[start - key.start : end - key.start])
        else:
            self._store(key, value)

    def _store(self, key: Any, value: Any) -> None:
        if self._counter.left == 0:
            raise Crash
        self._counter.left -= 1
        self._counter.stores += 1
        self._target[key] = value

    def release(self) -> None:
        self._target.release()


def fail_stores(box: Mailbox, fail_at: int) -> FailingStores:
    """Let the sending side of ``box`` die at its k-th store, of a word or of a payload."""
    counter = FailingStores(fail_at)
    box._writer._words = counter.wrap(box._writer._words)
    box._writer._memory = counter.wrap(box._writer._memory)
    for outlet in box._writer._outlets:
        outlet.ring._map = counter.wrap(outlet.ring._map)
    return counter


def revive(box: Mailbox, words: Any, memory: Any) -> None:
    """Undo ``fail_stores``: the words and the memory of before."""
    box._writer._words, box._writer._memory = words, memory
    for outlet in box._writer._outlets:
        outlet.ring._map = memory


def audit(box: Mailbox) -> None:
    """No slot of this sender is lost: each is either free or linked, none is both."""
    writer = box._writer
    linked = linked_slots(box)
    assert sorted([*writer._free, *linked]) == list(range(writer._slots))
    pending = [slot for outlet in writer._outlets for slot in outlet.pending]
    assert sorted(pending + writer._parked) == sorted(linked)


def linked_slots(box: Mailbox) -> list[int]:
    """Slots of this sender that stand in the list, in order; the links backward are checked, too."""
    writer = box._writer
    if not isinstance(writer, SharedWriter):
        return writer._walk()
    words, first = writer._words, writer._first_reference
    with writer._locked():
        numbers = [reference & MASK32 for reference in writer._walk_all()]
        previous = [words[writer._all_words + (number - 1) * 8 + S_PREVIOUS] for number in numbers]
        assert previous == [0, *numbers][:-1]
        assert words[writer._list_tail] == (numbers or [0])[-1]
        assert words[writer._dirty_word] == 0
    return [number - first for number in numbers if 0 <= number - first < writer._slots]


@contextlib.contextmanager
def forked(child: Callable[[], None]) -> Iterator[int]:
    """Run ``child`` in a forked process and yield its pid; it is reaped, killed if it still runs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        except BaseException:  # noqa: BLE001 - a child must never return into pytest
            traceback.print_exc()
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, 9)
            os.waitpid(pid, 0)


def exit_status(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def abandon(*boxes: Mailbox) -> None:
    """Let go of what this process holds without touching shared memory, as a death does."""
    for box in boxes:
        box._closed = True
        box._bell.close()
        box._ringer.close()
        box._segment.close()


@contextlib.contextmanager
def interrupted_at(line: str) -> Iterator[None]:
    """Raise KeyboardInterrupt in front of the first line of the mailbox that contains ``line``."""
    from pmdaemon import mailbox

    folder = str(Path(mailbox.__file__).parent)

    def local(frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line" and line in linecache.getline(frame.f_code.co_filename, frame.f_lineno):
            sys.settrace(None)
            raise KeyboardInterrupt
        return local

    def calls(frame: FrameType, _event: str, _argument: object) -> Any:
        return local if frame.f_code.co_filename.startswith(folder) else None

    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield
    finally:
        sys.settrace(before)

"""Progress: a thread that makes none ends its process, a process that makes none is noticed by its parent.

    thread ── beat() at each turn of its loop ──► ``Progress`` ◄── a check a second ── thread ``watchdog``
    process ── the watchdog adds 1 to an eventfd a second ──► ``Pulse`` ◄── a check a second ── parent
    parent ── takes what is in the eventfd a second ──► ``ParentPulse`` ◄── a look before each beat ── process

Being alive is no progress: a thread that waits for a lock for ever is alive. Each thread says itself how long
its next step may take (``LIMIT_S`` unless it says otherwise), and that it has nothing to do (``rest``). Work
that is known to be long declares a longer limit (``within``). A thread beyond its limit does not come
back by waiting, so the process ends with ``HUNG_STATUS`` and a text that names the thread; its parent starts
it again, and all state that counts is on disk.

A parent that takes nothing from the eventfd hangs: its children say so, in their logs and, on a gateway, in
an alert of the link. No child ends its parent: what it does beside (application I/O) goes on. The parent of
all that runs on the server is watched by systemd (``service_manager``).

Checks are counted, not seconds: after a suspension of the process, or of the machine, no check was made and
no thread is blamed.

A data plane of the gateway has no watchdog: it carries application I/O, is watched by its link (collections)
and never ended by any of this.

Thread: ``beat``, ``rest`` and ``within`` speak of the calling thread. Lock ``_lock`` guards ``_all``.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Final

CHECK_S: Final = 1.0
LIMIT_S: Final = 120.0
"""Far above what a turn of any of our loops takes on an overloaded machine with a slow disk: milliseconds to
a few seconds. Statements of SQL, which may take minutes, declare more."""
SLOW_S: Final = 60.0  # reported to people, although it is allowed
START_S: Final = 10.0
"""CPython's ``Thread.start`` waits for ever for a thread that dies of want of memory before it has begun."""
REPORTED_S: Final = 10
"""Ten beats of a process missed: it is reported. An overloaded machine delays a beat by two or three."""
KILLED_S: Final = 60
"""Then it is killed: its restart takes seconds, and whatever keeps a thread that only sleeps from its turn
for a minute (SIGSTOP, a held interpreter) does not end by itself. Long work is no silence: the watchdog
beats on."""
PARENT_REPORTED_S: Final = 120
"""Longer than a parent's longest step, the check of another program at an upgrade, which may take 60 s."""
FIRST_BEAT_S: Final = 180
"""From its start to its first beat a process loads Python's modules: 20 s were seen on a loaded machine."""
HUNG_STATUS: Final = 70  # EX_SOFTWARE of sysexits
PULSE_FD_VARIABLE: Final = "SLA_PULSE_FD"
AT_REST: Final = float("inf")


class Progress:
    """Of one thread, which alone writes it.

    Attributes:
        steps: turns made.
        idle: checks since the newest of them; written by the watchdog.
        limit_s: how long the step it is in may take.
        doing: what is known of that step, for people.
    """

    __slots__ = ("__weakref__", "doing", "idle", "limit_s", "name", "seen", "steps")

    def __init__(self, name: str, limit_s: float) -> None:
        self.name = name
        self.limit_s = limit_s
        self.steps = 0
        self.doing = ""
        self.seen = -1
        self.idle = 0

    def __str__(self) -> str:
        doing = f" while it {self.doing}" if self.doing else ""
        return f"its thread {self.name} has made no progress for {self.idle * CHECK_S:.0f} s{doing}"


_lock = threading.Lock()
_all: weakref.WeakSet[Progress] = weakref.WeakSet()
_local = threading.local()  # holds the only lasting reference: that of a thread of a library ends with it


def register(name: str, limit_s: float) -> Progress:
    """Watch the calling thread from now on, under that name."""
    _local.progress = progress = Progress(name, limit_s)
    with _lock:
        _all.add(progress)
    return progress


def unregister() -> None:
    """The calling thread ends, and may have died before it was watched."""
    progress: Progress | None = getattr(_local, "progress", None)
    if progress is not None:
        with _lock:
            _all.discard(progress)


def _progress() -> Progress:
    try:
        found: Progress = _local.progress
    except AttributeError:
        name = threading.current_thread().name
        found = register("main" if name == "MainThread" else name, AT_REST)
    return found


def beat(limit_s: float = LIMIT_S) -> None:
    """The calling thread has made a step; the next is made within ``limit_s``, or it hangs."""
    progress = _progress()
    progress.steps += 1
    progress.limit_s = limit_s


def rest() -> None:
    """The calling thread has nothing to do, for however long."""
    beat(AT_REST)


@contextlib.contextmanager
def within(limit_s: float, doing: str) -> Iterator[None]:
    """What follows takes at most ``limit_s``; ``doing`` says what it is, after "while it"."""
    progress = _progress()
    before = progress.limit_s, progress.doing
    progress.doing = doing
    beat(limit_s)
    try:
        yield
    finally:
        progress.steps += 1
        progress.limit_s, progress.doing = before


def find_hung() -> str:
    """One check of all threads that have ever reported, a second after the one before.

    Returns the thread that hangs, in words, or nothing. Thread: the watchdog.
    """
    for progress in _watched():
        progress.idle = progress.idle + 1 if progress.seen == progress.steps else 0
        progress.seen = progress.steps
        # Asked last whether it has made a step since: one that wakes now has the idle checks of its rest.
        if progress.idle >= progress.limit_s / CHECK_S and progress.seen == progress.steps:
            return str(progress)
    return ""


def slow() -> list[tuple[str, str]]:
    """Threads whose step has taken longer than ``SLOW_S``: name, and words about it. Thread: any."""
    found = [
        item
        for item in _watched()
        if item.idle * CHECK_S >= SLOW_S and item.limit_s < AT_REST and item.seen == item.steps
    ]
    return sorted((item.name, f"{item}; the limit is {item.limit_s:.0f} s") for item in found)


def _watched() -> list[Progress]:
    with _lock:
        return list(_all)


class Pulse:
    """The progress of a child process, as its parent counts it. Pass ``fd`` and ``env`` to the child.

    Attributes:
        silent_s: checks since the newest beat, which are a second apart.
        has_beaten: whether the child has come so far as to start its watchdog.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.silent_s = 0
        self.has_beaten = False

    def env(self) -> dict[str, str]:
        """What to add to the child's environment."""
        return {PULSE_FD_VARIABLE: str(self.fd)}

    def check(self) -> int:
        """One check, a second after the one before; returns ``silent_s``."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            self.silent_s += 1
        else:
            self.silent_s, self.has_beaten = 0, True
        return self.silent_s

    @property
    def problem(self) -> str:
        """What to say of the child, after its name; nothing while it beats."""
        if self.has_beaten and self.silent_s >= REPORTED_S:
            return f"has made no progress for {self.silent_s} s"
        if not self.has_beaten and self.silent_s >= KILLED_S:
            return f"has not finished its start after {self.silent_s} s"
        return ""

    @property
    def is_hung(self) -> bool:
        """Whether the child must be killed to be started again."""
        return self.silent_s >= (KILLED_S if self.has_beaten else FIRST_BEAT_S)

    def close(self) -> None:
        """The child has ended."""
        os.close(self.fd)


class EachSecond:
    """Says once a second that a second has passed; one that was suspended makes up for nothing."""

    def __init__(self) -> None:
        self._due_s = time.monotonic() + CHECK_S

    def is_due(self) -> bool:
        """Whether it is time for the next check."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return False
        self._due_s = now_s + CHECK_S
        return True


class ParentPulse:
    """In a child: its beats to its parent, and whether the parent still takes them.

    Attributes:
        silent_s: beats in a row that found the one before not taken; a second apart.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.silent_s = 0
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def beat(self) -> str:
        """One beat; returns what is known of the parent, in words, when that changes, else nothing."""
        former_s = self.silent_s
        self.silent_s = former_s + 1 if self._poll.poll(0) else 0
        os.eventfd_write(self._fd, 1)
        if self.silent_s == PARENT_REPORTED_S:
            return (
                f"has made no progress for {self.silent_s} s: what ends is not started again, nothing stops"
            )
        if not self.silent_s and former_s >= PARENT_REPORTED_S:
            return f"makes progress again, after {former_s} s"
        return ""


def pulse_to_parent() -> ParentPulse | None:
    """In a child: what its parent listens to, if it does; taken out of the environment."""
    value = os.environ.pop(PULSE_FD_VARIABLE, "")
    if not value.isdigit():
        return None
    with contextlib.suppress(OSError):
        os.set_inheritable(int(value), False)
        return ParentPulse(int(value))
    return None

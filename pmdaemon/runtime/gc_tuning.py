"""Keeps the pauses of Python's garbage collector short in a process of millions of long-lived objects.

A full collection visits every living object and stops all threads. Python makes one whenever enough new
objects have survived: at 64,000 agreements every second or two, for up to a third of a second. Here it makes
none by itself: every ``EVERY_NS`` the collector searches for cycles among what is new since the last time,
and takes what survived out of its own sight (``gc.freeze``). Objects go by reference count as ever.

Downside: a cycle that becomes garbage later than that stays. Ours are rare and small (tracebacks of logged
errors).

``collector_rests`` is the plain form, for a step that makes very many objects that all stay: the collector
would walk them again and again, for a third of the time that opening a disk queue takes.

Thread: one thread calls it; the collector is the process's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FIRST_NS: Final = 10_000_000_000
"""After a start: what was read from SQL is there by then."""
EVERY_NS: Final = 10_000_000_000
"""Of a fleet's judging some 100,000 objects: at most a tenth of a second."""
YOUNG: Final = 10_000
"""New objects between two collections of the youngest; Python's 700 are a small batch of cuts."""
NEVER: Final = 1 << 30


class GcTuning:
    """See the module."""

    def __init__(self) -> None:
        self._due_ns: int | None = None

    @staticmethod
    @contextmanager
    def in_charge() -> Iterator[None]:
        """Meanwhile nothing but ``tick``, which must be called now and then, makes a full collection."""
        before = gc.get_threshold()
        gc.set_threshold(YOUNG, before[1], NEVER)
        try:
            yield
        finally:
            gc.set_threshold(*before)

    @staticmethod
    @contextmanager
    def held() -> Iterator[None]:
        """For a start: nothing is collected meanwhile, and what was made is out of sight at once.

        Reading 64,000 agreements makes millions of objects, and no garbage in cycles; walking through them
        again and again took most of the time.
        """
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()

    def tick(self, now_ns: int) -> bool:
        """Collect and freeze when it is due; whether it was."""
        if self._due_ns is None:
            self._due_ns = now_ns + FIRST_NS
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + EVERY_NS
        gc.collect()
        gc.freeze()
        return True


@contextmanager
def collector_rests() -> Iterator[None]:
    """As a decorator or in ``with``: no garbage collection meanwhile."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()

"""Keeps the pauses of Python's garbage collector short in a process of millions of long-lived objects.

With 64,000 agreements a full collection looks at everything alive and stops all threads for more than a
second, some times a minute. What has survived a minute lives as long as its agreement or gateway, and goes by
reference count: once a minute the survivors are taken out of the collector's sight (``gc.freeze``), after a
last look for cycles, which then is at one minute's objects only.

Downside: a cycle that becomes garbage later than that stays. Ours are rare and small (tracebacks of logged
errors).

Thread: one thread calls it; the collector is the process's.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FIRST_NS: Final = 10_000_000_000
"""After a start: what was read from SQL is there by then."""
EVERY_NS: Final = 60_000_000_000


class Collector:
    """See the module."""

    def __init__(self) -> None:
        self._due_ns: int | None = None

    @staticmethod
    @contextmanager
    def held() -> Iterator[None]:
        """For a start: nothing is collected meanwhile, and what was made is out of sight at once.

        Reading 64,000 agreements makes millions of objects, and no garbage in cycles; looking through them
        again and again took most of the time.
        """
        gc.disable()
        try:
            yield
        finally:
            gc.freeze()
            gc.enable()

    def tick(self, now_ns: int) -> bool:
        """Look and freeze when it is due; whether it was."""
        if self._due_ns is None:
            self._due_ns = now_ns + FIRST_NS
        if now_ns < self._due_ns:
            return False
        self._due_ns = now_ns + EVERY_NS
        gc.collect()
        gc.freeze()
        return True

"""When an event was raised, on a clock that nobody sets.

Reserves of several processes are merged in the order in which their events were raised. The time that an
event was noticed does not tell it: the clock may have been set back between two of them, and an agent has a
clock of its own. So each record has a *moment* beside the event: the boot, and the time since boot, which is
the same in all processes of a machine.

``MomentOrder`` gives each a place. Those of this boot have theirs by the time since boot; those of a former
boot come before them, by the times they have; a record without a moment, which a former release has written,
has its place by the time it has, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pmdaemon.runtime.clock import Clock, boot_id, boot_ns

MOMENT: Final = "raised"
"""Name of the moment in a record's payload."""
_BOOT_CHARACTERS: Final = 8
Place = tuple[bool, int]


class Moments:
    """Makes moments. Any thread.

    Args:
        boot_id, boot_ns: see ``runtime.clock``.
    """

    def __init__(self, boot_id: Callable[[], str] = boot_id, boot_ns: Callable[[], int] = boot_ns) -> None:
        self._boot = boot_id()[:_BOOT_CHARACTERS]
        self._boot_ns = boot_ns

    def now(self) -> str:
        """The present one; "" where the kernel does not tell boots apart."""
        return f"{self._boot}/{self._boot_ns()}" if self._boot else ""


class MomentOrder:
    """See the module. Thread: one.

    Args:
        clock: for the time by which records without a moment are compared with the others.
        boot_id, boot_ns: see ``runtime.clock``.
    """

    def __init__(
        self,
        clock: Clock,
        boot_id: Callable[[], str] = boot_id,
        boot_ns: Callable[[], int] = boot_ns,
    ) -> None:
        self._clock = clock
        self._boot = boot_id()[:_BOOT_CHARACTERS]
        self._boot_ns = boot_ns
        self._booted_ns = 0
        self.read_clock()

    def read_clock(self) -> None:
        """As it is set now; places that are compared with each other follow one reading."""
        self._booted_ns = self._clock.unix_us() * 1000 - self._boot_ns()

    def place(self, moment: object, at_us: int) -> Place:
        """Where a record belongs: what has a smaller place was raised before it.

        Args:
            moment: of its payload, if it has one.
            at_us: when the event was noticed.
        """
        boot, _, since_ns = moment.partition("/") if isinstance(moment, str) else ("", "", "")
        if not boot or not since_ns.isdecimal():
            return self.place_of(at_us)
        return (True, self._booted_ns + int(since_ns)) if boot == self._boot else (False, at_us * 1000)

    @staticmethod
    def place_of(at_us: int) -> Place:
        """Where something belongs of which only the time is known."""
        return True, at_us * 1000

"""Caps of drives and throttle groups of one QEMU process: its own limits, set and read back by QMP.

QEMU limits reads and writes together, so that a cap needs no division; a cap of cost becomes one of I/Os and
one of bytes (``base.without_cost``). Limits are set in one request that ends with reading them back; its
answer proves the generation. A drive or group that is not there does no I/O; it gets its limits when it
comes. Each collection reads the limits again: what another program has changed is set again.

QEMU knows no lease, and its limits outlive this process. So they are taken away when the lease ends, when a
link starts behind one that was killed and finds no lease that still runs (``link.caps.KeptCaps``), and by the
agent's parent at its stop (``gateway-agent release`` does the same where no agent starts again). Static caps
hold while the agent runs.

What a limit does not hold: reads of holes that an NBD export of qemu-storage-daemon answers from the block
status, without a read.

Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from gateway_agent.enforcers.base import caps_by_volume, without_cost
from gateway_agent.qemu import NO_LIMITS, Command, Drive, DriveCounts, Limits, ThrottleGroup
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.rates import NO_CAPS, Rates

CLIENT: Final = "qemu"
"""The one client of each of its volumes."""
SIZE_AT_FIRST: Final = 4096.0
FULL_RATIO: Final = 0.9  # of a limit: the guest waits for it
CHANGE_RATIO: Final = 0.05  # smaller changes of a limit, as sizes change, are not set
log = structlog.get_logger("qemu")


class LimitedPlace:
    """One volume: a drive, a throttle group, or a drive that is limited by a group.

    Args:
        volume: its name at the server.
        drive: any name of it; "" for none, then nothing is counted.
        group: where it is limited, if not at the drive itself.
        static: the cap of the agent's file.

    Attributes:
        found: limits that were read last; None: it is not there.
        is_unread: whether the newest attempt to read them failed, so that nothing is known of it.
        at: the drive as it was found last.
        is_full: whether the last interval used a limit in full, so that I/Os waited for it.
        refusal: what QEMU said when limits were set last; "" if it took them.
        notes: what is not as it should be, for people: ``drive``, ``group``, ``limits``, ``statistics``.
    """

    def __init__(self, volume: str, drive: str, group: str, static: Rates) -> None:
        self.volume = volume
        self.drive = drive
        self.group = ThrottleGroup(group) if group else None
        self.found: Limits | None = None
        self.is_unread = False
        self.at: Drive | None = None
        self.is_full = False
        self.refusal = ""
        self.notes: dict[str, str] = {}
        self._written: Limits | None = None
        self._static = static
        self._cap = static
        self._mean_bytes = SIZE_AT_FIRST if drive else None

    def set_cap(self, cap: Rates) -> None:
        """Another cap of the server's, beside the static one."""
        self._cap = self._static.tighter(cap)

    @property
    def wanted(self) -> Limits:
        """The limits that keep the cap."""
        return Limits.of(without_cost(self._cap, self._mean_bytes))

    def counted(self, step: DriveCounts, elapsed_s: float) -> None:
        """Learn from what the drive did in an interval under the limits found last."""
        ios, size = step.reads + step.writes, step.read_bytes + step.write_bytes
        limits = self.found or NO_LIMITS
        self.is_full = any(
            limit is not None and limit > 0 and done >= FULL_RATIO * limit * elapsed_s
            for done, limit in zip((ios, size), limits, strict=True)
        )
        if ios:
            self._mean_bytes = size / ios

    def command(self) -> Command | None:
        """Sets the limits of the cap; None while it is not there."""
        where = self.group or self.at
        if where is None or (self.group is not None and self.found is None):
            return None
        self._written = self.wanted
        return where.set_command(self._written)

    @property
    def is_held(self) -> bool:
        """Whether the limits that were set last are those read last; so of one that is not there.

        One that cannot be read, and neither has limits nor is to have any, keeps no cap from the others.
        """
        if self.is_unread:
            return self.wanted == NO_LIMITS and self.found in (None, NO_LIMITS)
        return self.found is None or self.found == self._written

    @property
    def is_due(self) -> bool:
        """Whether limits should be set: none were, others are in force, or the cap means others by now."""
        if self.found is None or self.is_unread:
            return False
        return not self.is_held or not self.found.is_near(self.wanted, CHANGE_RATIO)

    def confirm(self) -> None:
        """Say it, if the limits that were set are not those that were read back."""
        found = "could not be read back" if self.is_unread else f"were set, {self.found} hold"
        held = "" if self.is_held else f"limits {self._written} {found}"
        self.report("limits", self.refusal or held)

    def lost(self) -> None:
        """The connection has ended: what holds there is not known."""
        self.found = self.at = self._written = None
        self.is_full = self.is_unread = False

    def report(self, topic: str, problem: str) -> None:
        """Say it once; "" for none."""
        if problem and problem != self.notes.get(topic):
            log.warning("qemu-place-unusable", volume=self.volume, problem=problem)
        self.notes[topic] = problem

    def record(self) -> dict[str, Any]:
        """For `status`."""
        return {
            "volume": self.volume,
            "drive": self.drive,
            "group": self.group.name if self.group is not None else "",
            "is_there": self.found is not None,
            "limits": self.found._asdict() if self.found is not None else {},
            "problem": "; ".join(filter(None, self.notes.values())),
        }


class QemuEnforcer:
    """See ``Enforcer``. State: the generation wanted, in force and refused.

    Args:
        name: of the monitor.
        places: its volumes.
        enforce: sets the limits of all places, and calls ``confirm`` when they were read back.
    """

    tells_clients = False

    def __init__(self, name: str, places: Sequence[LimitedPlace], enforce: Callable[[int], None]) -> None:
        self.name = name
        self.reachable = False
        self._is_blocked = False
        self.took: int | None = None
        self.refused: int | None = None
        self.gen = -1
        """Of the caps in force; 0: static ones alone; -1: not known now."""
        self._wanted = 0
        self._places = places
        self._enforce = enforce

    @property
    def volumes(self) -> frozenset[str]:
        """See ``Enforcer``: none while a QEMU process may run that cannot be reached: no cap is confirmed."""
        return frozenset() if self._is_blocked else frozenset(place.volume for place in self._places)

    def apply(self, caps: CapSet, lease_us: int) -> None:
        """See ``Enforcer``."""
        rates = caps_by_volume(caps, CLIENT)
        self._want(caps.gen, rates)

    def renew_lease(self) -> None:
        """See ``Enforcer``: the link counts it."""

    def lapsed(self) -> None:
        """See ``Enforcer``."""
        self._want(0, {})

    def _want(self, gen: int, rates: dict[str, Rates]) -> None:
        for place in self._places:
            place.set_cap(rates.get(place.volume, NO_CAPS))
        self.took = self.refused = None
        self._wanted, self.gen = gen, -1
        if self.reachable:
            self._enforce(gen)

    def looked(self) -> None:
        """Limits were read; where they are not those of the caps, the caps did not hold all the time."""
        if not all(place.is_held for place in self._places):
            self.gen = -1

    def keep(self) -> None:
        """Set again the limits that are not what they should be."""
        if any(place.is_due for place in self._places):
            self._enforce(self._wanted)

    def confirm(self, gen: int) -> None:
        """Limits were set for a generation, and read back."""
        if gen != self._wanted:
            return
        for place in self._places:
            place.confirm()
        if all(place.is_held for place in self._places):
            self.took, self.refused, self.gen = gen, None, gen
        else:
            self.took, self.refused, self.gen = None, gen, -1

    def connected(self) -> None:
        """The monitor can be asked, and its drives were found; the limits there are of others."""
        self.reachable = True
        self._is_blocked = False
        self.took = self.refused = None

    def disconnected(self, *, is_off: bool) -> None:
        """The monitor cannot be asked; ``is_off``: no QEMU process is there, and none does I/O."""
        self.reachable = False
        self._is_blocked = not is_off
        self.took = self.refused = None
        self.gen = -1
        for place in self._places:
            place.lost()

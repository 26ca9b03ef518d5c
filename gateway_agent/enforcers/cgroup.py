"""Caps of control groups: the kernel's limits for reads and writes, made of one cap for both.

A cap is a rate of I/Os, bytes or cost; the kernel has limits of its own for reads and for writes. So a cap is
divided by what the group did lately: the two limits add up to the cap, never to more. While both are used in
full nothing says what the group would do, and the shares go towards halves. Cost is 1 an I/O and 1 for each
65,536 bytes: a cap of cost becomes one of I/Os by the mean size, and one of bytes that holds whatever the
size.

Each collection counts and divides again. Limits are read back after they were written: a generation was taken
when every group shows its limits. A group that is not there does no I/O; it gets its limits when it comes.
One that cannot be used for another reason (several have its name, or limits may not be written) took none.

The kernel knows no lease, and its limits outlive this process. So they are taken away when the lease ends,
when a link starts behind one that was killed and finds no lease that still runs (``link.caps.KeptCaps``), and
by the agent's parent at its stop (``gateway-agent release`` does the same where no agent starts again).
Static caps hold while the agent runs.

Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import structlog

from gateway_agent.cgroups import Group, IoCounts, IoLimits
from gateway_agent.enforcers.base import caps_by_volume, without_cost
from gateway_agent.errors import GroupUnusable
from gateway_agent.pressure import read_pressure
from gateway_agent.sources.counted import is_later, minus
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.rates import NO_CAPS, Rates, whole_rate

CLIENT: Final = "cgroup"
"""The one client of each of its volumes."""
SIZE_AT_FIRST: Final = 4096.0
FULL_RATIO: Final = 0.9  # of a limit: the group waits for it
LEAST_SHARE: Final = 0.05  # of reads and of writes, so that a group that turns to the other kind shows it
TOWARDS_HALVES: Final = 0.1
CHANGE_RATIO: Final = 0.05  # smaller changes of a limit are not written
log = structlog.get_logger("cgroup")


class Mix:
    """What a group's I/O is made of lately: shares of reads in I/Os and in bytes, mean size in bytes."""

    def __init__(self) -> None:
        self.read_share = self.read_byte_share = 0.5
        self.mean_bytes = SIZE_AT_FIRST

    def counted(self, step: IoCounts, elapsed_s: float, limits: IoLimits) -> None:
        """Learn from what the group did in an interval under these limits."""
        ios, size = step.reads + step.writes, step.read_bytes + step.write_bytes
        if not ios or elapsed_s <= 0:
            return
        self.mean_bytes = size / ios
        self.read_share = _share(
            self.read_share, (step.reads, step.writes), (limits.read_iops, limits.write_iops), elapsed_s
        )
        if size:
            steps, bounds = (step.read_bytes, step.write_bytes), (limits.read_bps, limits.write_bps)
            self.read_byte_share = _share(self.read_byte_share, steps, bounds, elapsed_s)

    def limits(self, cap: Rates) -> IoLimits:
        """The kernel's limits that keep a cap."""
        found = without_cost(cap, self.mean_bytes)
        return IoLimits(
            *_divided(found.ops_per_s, self.read_share), *_divided(found.bytes_per_s, self.read_byte_share)
        )


def _share(
    before: float, done: tuple[int, int], limits: tuple[int | None, int | None], elapsed_s: float
) -> float:
    is_full = [
        limit is not None and count >= FULL_RATIO * limit * elapsed_s
        for count, limit in zip(done, limits, strict=True)
    ]
    share = before + TOWARDS_HALVES * (0.5 - before) if all(is_full) else done[0] / sum(done)
    return min(max(share, LEAST_SHARE), 1 - LEAST_SHARE)


def _divided(rate: float | None, share: float) -> tuple[int | None, int | None]:
    """For reads and writes: the sum is the rate, but 1 of each at least; the kernel knows nothing below."""
    if rate is None:
        return None, None
    whole = max(2, whole_rate(rate))
    reads = min(max(1, round(whole * share)), whole - 1)
    return reads, whole - reads


class LimitedGroup:
    """One volume: a group that may come and go, and what it is limited to.

    Args:
        volume: its name at the server.
        find: finds the group; GroupUnusable while it is not there.
        static: the cap of the agent's file.
        taken: groups and devices that volumes have found, to these; shared by all volumes.

    Attributes:
        is_full: whether the last interval used a limit in full, so that I/Os waited for it.
    """

    def __init__(
        self,
        volume: str,
        find: Callable[[], Group],
        static: Rates,
        taken: dict[tuple[str, str], str] | None = None,
    ) -> None:
        self.volume = volume
        self.is_full = False
        self._problem = ""
        self._find = find
        self._taken = taken if taken is not None else {}
        self._group: Group | None = None
        self._is_absent = False  # it is not there, and not only unusable
        self._static = static
        self._cap = static
        self._mix = Mix()
        self._limits = IoLimits()
        self._before: IoCounts | None = None

    def set_cap(self, cap: Rates) -> bool:
        """Another cap of the server's, beside the static one; whether it is certainly in force."""
        self._cap = self._static.tighter(cap)
        if self._find_now() is not None and self._enforce(always=True):
            return True
        has_none = cap == NO_CAPS and self._limits == IoLimits()
        return self._group is None and (self._is_absent or has_none)

    def count(self, elapsed_s: float) -> IoCounts | None:
        """What it did so far, since it was made; None while it is not there. Divides the cap again.

        Args:
            elapsed_s: since the last count.
        """
        group = self._find_now()
        if group is None:
            return None
        try:
            now, limits = group.counts(), group.limits()
        except GroupUnusable as exc:
            self._lost(exc)
            return None
        before, self._before = self._before, now
        if limits != self._limits:  # its unit was started again, or another program has written them
            self._limits = limits
            self._report(f"{group.path}: its limits were {tuple(limits)}, not those that were written")
        if before is not None and is_later(before, now):
            step = minus(now, before)
            self.is_full = _any_full(step, self._limits, elapsed_s)
            self._mix.counted(step, elapsed_s, self._limits)
        self._enforce(always=False)
        return now

    def _find_now(self) -> Group | None:
        """The group, if it is there; one that has come gets its limits."""
        if self._group is None:
            try:
                found = self._find()
                other = self._taken.setdefault((str(found.path), found.device), self.volume)
                if other != self.volume:
                    raise GroupUnusable(str(found.path), f"it is {other} already, on the same device")
            except GroupUnusable as exc:
                self._lost(exc)
                return None
            self._group = found
            self._before = None
            self._enforce(always=True)  # also when it has no cap: a killed link may have left limits
        return self._group

    def _enforce(self, *, always: bool) -> bool:
        """Write the limits of the cap, if they are not nearly what is in force; whether they are now."""
        group, wanted = self._group, self._mix.limits(self._cap)
        if group is None:
            return False
        if not always and _nearly(wanted, self._limits):
            return True
        try:
            self._limits = group.limits()
            if wanted != self._limits:
                group.set_limits(wanted)
                self._limits = group.limits()
        except GroupUnusable as exc:
            self._lost(exc)
            return False
        if self._limits != wanted:
            self._report(f"{group.path}: limits {tuple(wanted)} were written, {tuple(self._limits)} hold")
            return False
        self._problem = ""
        return True

    def _lost(self, exc: GroupUnusable) -> None:
        self._group, self._before, self.is_full = None, None, False
        self._is_absent = exc.is_absent
        self._report(str(exc))

    def _report(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("group-unusable", volume=self.volume, problem=problem)
        self._problem = problem

    def record(self) -> dict[str, Any]:
        """What it is, what limits it, and how its processes wait for I/O; for `status`."""
        group = self._group
        pressure = read_pressure(group.path / "io.pressure") if group is not None else None
        return {
            "volume": self.volume,
            "group": str(group.path) if group is not None else "",
            "problem": self._problem,
            "limits": self._limits._asdict(),
            "pressure": pressure.record() if pressure is not None else None,
        }


def _any_full(step: IoCounts, limits: IoLimits, elapsed_s: float) -> bool:
    return any(
        limit is not None and count >= FULL_RATIO * limit * elapsed_s
        for count, limit in zip(step, limits, strict=True)
    )


def _nearly(wanted: IoLimits, former: IoLimits) -> bool:
    for a, b in zip(wanted, former, strict=True):
        if (a is None) != (b is None):
            return False
        if a is not None and b is not None and abs(a - b) > max(1.0, CHANGE_RATIO * b):
            return False
    return True


class CgroupEnforcer:
    """See ``Enforcer``. State: the generation in force, the one refused, and until when the lease runs."""

    name = "cgroup"
    reachable = True
    tells_clients = False

    def __init__(self, groups: Sequence[LimitedGroup]) -> None:
        self._groups = groups
        self.volumes = frozenset(group.volume for group in groups)
        self.took: int | None = None
        self.refused: int | None = None
        self.gen = 0
        """Of the caps in force; 0: static ones alone."""

    def apply(self, caps: CapSet, lease_us: int) -> None:
        """See ``Enforcer``."""
        rates = caps_by_volume(caps, CLIENT)
        in_force = [group.set_cap(rates.get(group.volume, NO_CAPS)) for group in self._groups]
        if all(in_force):
            self.took, self.refused, self.gen = caps.gen, None, caps.gen
        else:
            self.took, self.refused, self.gen = None, caps.gen, -1

    def renew_lease(self) -> None:
        """See ``Enforcer``: the link counts it."""

    def lapsed(self) -> None:
        """See ``Enforcer``."""
        for group in self._groups:
            group.set_cap(NO_CAPS)
        self.gen = 0

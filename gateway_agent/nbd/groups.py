"""Groups: several volumes of a plane under one cap, which they share by weight.

A group's rates hold beside those of its volumes and of their clients: an I/O passes when all let it. While
the group holds I/Os back, its volumes are served in fair order (``fair_order``): each gets the share of the
group's rate that its weight is of the weights of those that wait, and what one does not use the others have.
That is water-filling, done for each I/O.

A volume that the group holds back has no timer; the group has one for all, and lets volume after volume go
on. Groups come and go with the server's set of caps (``CapsInForce``); the configuration has none. No clock,
no I/O: time is an argument, the timer is the loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway_agent.nbd.fair_order import FairOrder
from gateway_agent.nbd.loop import EventLoop
from pmdaemon.wire.messages.plane_sets import VolumeGroupCap
from pmdaemon.wire.rates import FormerRates, RateSet

if TYPE_CHECKING:
    from gateway_agent.nbd.volume import Volume

CONTENDED_NS: Final = 10 * 10**9
"""Others that used a rate within this time count as waiting for it: a client with one request outstanding at
a time is seldom found waiting."""


class VolumeGroup:
    """See the module docstring.

    Attributes:
        rates: in force.
        charges: how many charges there were, so that a volume's turn without one is seen.
    """

    def __init__(self, name: str, loop: EventLoop, rates: RateSet) -> None:
        self.name = name
        self.rates = rates
        self.charges = 0
        self._loop = loop
        self._weights: Mapping[str, float] = {}
        self._order: FairOrder[Volume] = FairOrder()
        self._used_ns: dict[Volume, int] = {}  # when a volume used it last
        self._is_pumping = False

    def set_cap(self, cap: VolumeGroupCap, now_ns: int) -> None:
        """Other rates and weights hold from now on, also for what is held."""
        self._weights = cap.weights
        if self.rates.set_caps(cap.rates, now_ns):
            self.pump(now_ns)

    def admits(self, volume: Volume, now_ns: int) -> bool:
        """Whether the volume may pass an I/O now; if not, it is called when it may."""
        self._order.add(volume)
        if self.rates.ready_ns() <= now_ns and self._order.first() is volume:
            return True
        if not self._is_pumping:
            self._loop.at(self, self.rates.ready_ns(), self.pump)
        return False

    def charge(self, volume: Volume, now_ns: int, transfer_bytes: int, cost: float, part: float) -> None:
        """An I/O of the volume, or a part of it, passes now."""
        self.rates.charge(now_ns, transfer_bytes, cost, part)
        self.charged(volume, now_ns, self.rates.duration_ns(transfer_bytes, cost) * part)

    def charged(self, volume: Volume, now_ns: int, used_ns: float) -> None:
        """So much of the rates, in ns of them, was charged for the volume."""
        self.charges += 1
        self._used_ns[volume] = now_ns
        self._order.served(volume, used_ns / self._weights.get(volume.name, 1.0))

    def is_free_for(self, volume: Volume) -> bool:
        """Whether no other volume waits for the group."""
        return all(each is volume for each in self._order)

    def withdraw(self, volume: Volume) -> None:
        """The volume has nothing that waits for the group."""
        self._order.remove(volume)

    def forget(self, volume: Volume) -> None:
        """The volume is not in this group any more."""
        self._order.forget(volume)
        self._used_ns.pop(volume, None)

    def is_contended(self, volume: Volume, now_ns: int) -> bool:
        """Whether another volume waits for the group, or used it a short time ago."""
        return any(each is not volume for each in self._order) or any(
            now_ns - used_ns < CONTENDED_NS for each, used_ns in self._used_ns.items() if each is not volume
        )

    def pump(self, now_ns: int) -> None:
        """Let volumes go on, in their order, as far as the rates allow."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self.rates.ready_ns() <= now_ns and (volume := self._order.first()) is not None:
                before = self.charges
                volume.pump(now_ns)
                if self.charges == before:  # something else holds it now; it comes back when that lets it go
                    self._order.remove(volume)
        finally:
            self._is_pumping = False
        if len(self._order):
            self._loop.at(self, self.rates.ready_ns(), self.pump)
        else:
            self._loop.cancel(self)


class GroupTable:
    """The groups of a plane, by name; empty while the server caps none."""

    def __init__(self, loop: EventLoop, tau_ns: int) -> None:
        self.groups: dict[str, VolumeGroup] = {}
        self._loop, self._former = loop, FormerRates(tau_ns)
        self._members: dict[Volume, VolumeGroup] = {}

    def apply(self, caps: Mapping[str, VolumeGroupCap], volumes: Mapping[str, Volume], now_ns: int) -> None:
        """Put the complete ``caps`` in force; a group that stays keeps its debt and its order.

        Args:
            caps: by group.
            volumes: those of the plane, by name.
            now_ns: monotonic.
        """
        for name, cap in caps.items():
            if name not in self.groups:
                self.groups[name] = VolumeGroup(name, self._loop, self._former.take(name))
            self.groups[name].set_cap(cap, now_ns)
        wanted = {
            volumes[volume]: self.groups[name]
            for name, cap in caps.items()
            for volume in cap.weights
            if volume in volumes
        }
        before, self._members = self._members, wanted
        for volume, former in before.items():
            if wanted.get(volume) is not former:
                former.forget(volume)
        for name in self.groups.keys() - caps.keys():
            gone = self.groups.pop(name)
            self._loop.cancel(gone)
            self._former.keep(name, gone.rates, now_ns)
        for volume in before.keys() | wanted.keys():
            if wanted.get(volume) is not before.get(volume):
                volume.set_group(wanted.get(volume), now_ns)
        for group in self.groups.values():
            group.pump(now_ns)

    def of(self, volume: Volume) -> VolumeGroup | None:
        """The group that a volume is in."""
        return self._members.get(volume)

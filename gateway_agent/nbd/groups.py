"""Groups: several volumes of a plane under one cap, which they share by weight; and whole clients.

A group's rates hold beside those of its volumes and of their clients: an I/O passes when all let it. While
the group holds I/Os back, its volumes are served in fair order (``fair_order``): each gets the share of the
group's rate that its weight is of the weights of those that wait, and what one does not use the others have.
That is water-filling, done for each I/O.

A volume that the group holds back has no timer; the group has one for all, and lets volume after volume go
on. Groups come and go with the server's set of caps, and with the configuration (``CapsInForce``). So a
volume may be in two, one of each, and an I/O passes when both let it. The two are seldom ready at the same
moment, since others use them: so a volume whose turn comes at one keeps it (``keep_turn``) until it passed
the other, and the first one lets another volume go on meanwhile. By that one I/O a volume a group may let
through more than its burst; it is charged, so its rate holds.

A *whole client* is one client over all volumes that it uses through the plane (ADR 74). Its cap is such a
group, too, of all the plane's volumes and of this client's connections alone: what it holds back are they,
the other clients of a volume go on (``Volume.whole_clients``), and the volumes that the client asks for have
equal shares of the rate. A large request is paid for when it passes: it holds up its own client alone.

No clock, no I/O: time is an argument, the timer is the loop's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway_agent.nbd.fair_order import FairOrder
from gateway_agent.nbd.loop import EventLoop
from pmdaemon.wire.messages.plane_sets import VolumeGroupCap
from pmdaemon.wire.rates import FormerRates, Rates, RateSet

if TYPE_CHECKING:
    from gateway_agent.nbd.volume import Volume

CONTENDED_NS: Final = 10 * 10**9
"""Others that used a rate within this time count as waiting for it: a client with one request outstanding at
a time is seldom found waiting."""


SERVER: Final = "server"
CONFIGURED: Final = "configured"
CLIENT: Final = "client"
GroupKey = tuple[str, str]
"""Where a group is from, ``SERVER`` or ``CONFIGURED``, and its name; or ``CLIENT`` and a whole client's."""
NO_WHOLE_CLIENTS: Final[Mapping[str, Rates]] = {}


class VolumeGroup:
    """See the module docstring.

    Attributes:
        rates: in force.
        charges: how many charges there were, so that a volume's turn without one is seen.
    """

    def __init__(self, key: GroupKey, loop: EventLoop, rates: RateSet) -> None:
        self.key = key
        self.rates = rates
        self.charges = 0
        self._loop = loop
        self._weights: Mapping[str, float] = {}
        self._order: FairOrder[Volume] = FairOrder()
        self._used_ns: dict[Volume, int] = {}  # when a volume used it last
        self._turn_of: set[Volume] = set()  # they wait for their other group alone
        self._is_pumping = False

    def set_cap(self, cap: VolumeGroupCap, now_ns: int) -> None:
        """Other rates and weights hold from now on, also for what is held."""
        self._weights = cap.weights
        if self.rates.set_caps(cap.rates, now_ns):
            self.pump(now_ns)

    def admits(self, volume: Volume, now_ns: int) -> bool:
        """Whether the volume may pass an I/O now; if not, it is called when it may."""
        if volume in self._turn_of:
            return True
        self._order.add(volume)
        if self.rates.ready_ns() <= now_ns and self._order.first() is volume:
            return True
        if not self._is_pumping:
            self._loop.at(self, self.rates.ready_ns(), self.pump)
        return False

    def keep_turn(self, volume: Volume) -> None:
        """It may pass whenever another group lets it, and the others go on."""
        self._turn_of.add(volume)
        self._order.remove(volume)

    def charge(self, volume: Volume, now_ns: int, transfer_bytes: int, cost: float, part: float) -> None:
        """An I/O of the volume, or a part of it, passes now."""
        self.rates.charge(now_ns, transfer_bytes, cost, part)
        self.charged(volume, now_ns, self.rates.duration_ns(transfer_bytes, cost) * part)

    def charged(self, volume: Volume, now_ns: int, used_ns: float, ios: int = 1) -> None:
        """So much of the rates, in ns of them, was charged for the volume, for one I/O or several at once."""
        self.charges += 1
        self._turn_of.discard(volume)
        self._used_ns[volume] = now_ns
        share_ns = used_ns / self._weights.get(volume.name, 1.0)
        last_ns = share_ns / ios  # a volume that comes now begins where the last I/O did, not the first
        if ios > 1:
            self._order.served(volume, share_ns - last_ns)
        self._order.served(volume, last_ns)

    def is_free_for(self, volume: Volume) -> bool:
        """Whether no other volume waits for the group."""
        return all(each is volume for each in self._order)

    def withdraw(self, volume: Volume) -> None:
        """The volume has nothing that waits for the group."""
        self._order.remove(volume)

    def forget(self, volume: Volume) -> None:
        """The volume is not in this group any more."""
        self._order.forget(volume)
        self._turn_of.discard(volume)
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
    """The groups of a plane, and its whole clients; empty while there are none."""

    def __init__(self, loop: EventLoop, tau_ns: int, since_ns: int | None = None) -> None:
        self.groups: dict[GroupKey, VolumeGroup] = {}
        self.whole_clients: dict[str, VolumeGroup] = {}
        self._loop, self._former = loop, FormerRates(tau_ns, since_ns)
        self._members: dict[Volume, tuple[VolumeGroup, ...]] = {}
        self._volumes: frozenset[Volume] = frozenset()

    def apply(
        self,
        caps: Mapping[GroupKey, VolumeGroupCap],
        volumes: Mapping[str, Volume],
        now_ns: int,
        whole_clients: Mapping[str, Rates] = NO_WHOLE_CLIENTS,
    ) -> None:
        """Put the complete ``caps`` in force; a group that stays keeps its debt and its order.

        Args:
            caps: by group.
            volumes: those of the plane, by name.
            now_ns: monotonic.
            whole_clients: rates by client, complete, too.
        """
        self._apply_clients(whole_clients, frozenset(volumes.values()), now_ns)
        wanted: dict[Volume, tuple[VolumeGroup, ...]] = {}
        for key, cap in caps.items():
            if key not in self.groups:
                self.groups[key] = VolumeGroup(key, self._loop, self._former.take(repr(key)))
            group = self.groups[key]
            group.set_cap(cap, now_ns)
            for volume in [volumes[name] for name in cap.weights if name in volumes]:
                wanted[volume] = (*wanted.get(volume, ()), group)
        before, self._members = self._members, wanted
        for volume, formers in before.items():
            for former in formers:
                if former not in wanted.get(volume, ()):
                    former.forget(volume)
        for key in self.groups.keys() - caps.keys():
            gone = self.groups.pop(key)
            self._loop.cancel(gone)
            self._former.keep(repr(key), gone.rates, now_ns)
        for volume in before.keys() | wanted.keys():
            if wanted.get(volume) != before.get(volume):
                volume.set_groups(wanted.get(volume, ()), now_ns)
        for group in self.groups.values():
            group.pump(now_ns)

    def _apply_clients(self, caps: Mapping[str, Rates], volumes: frozenset[Volume], now_ns: int) -> None:
        gone = [self.whole_clients.pop(client) for client in self.whole_clients.keys() - caps.keys()]
        come = caps.keys() - self.whole_clients.keys()
        for client in come:
            key = CLIENT, client
            group = self.whole_clients[client] = VolumeGroup(key, self._loop, self._former.take(repr(key)))
            group.set_cap(VolumeGroupCap(caps[client], {}), now_ns)
        for volume in self._volumes - volumes:
            for group in self.whole_clients.values():
                group.forget(volume)
            volume.set_whole_clients({}, now_ns)
        for volume in volumes if gone or come else volumes - self._volumes:
            volume.set_whole_clients(self.whole_clients, now_ns)
        self._volumes = volumes
        for client, group in self.whole_clients.items():
            group.set_cap(VolumeGroupCap(caps[client], {}), now_ns)
        for group in gone:
            self._loop.cancel(group)
            self._former.keep(repr(group.key), group.rates, now_ns)

    def of(self, volume: Volume) -> tuple[VolumeGroup, ...]:
        """The groups that a volume is in."""
        return self._members.get(volume, ())

"""Caps that agreements have for their own use: of whole volumes, or of the clients that they name.

An agreement for all clients caps each of its volumes. One that names clients caps each of those on each of
its volumes, and nothing else: another agreement may have promised the same volume to other clients. Such a
cap needs gateways that apply caps of clients. Where one does not, the cap is not applied, and an event says
so, once until it can be. Of several agreements the lowest cap counts of those in mode enforce: one that is
only observed hides no other. Bursts are held to their peak by gateways with ``burst-caps``; through others
there are none.

State: what is asked for of each volume, and where it cannot be applied. No clock, no I/O. Changed only by the
controller's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pmdaemon.wire.rates import Rates, at_once_s
from sla_server.agreements.promise import VolumeClass
from sla_server.services.control.decisions import RaiseEvent
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.targets import named, target_of, volume_of
from sla_server.services.control.usage import backend_among


class AgreedCap(NamedTuple):
    """A cap, and the agreement that has it."""

    rates: Rates
    sla: str


def rates_of(agreed: VolumeClass) -> Rates:
    """The cap of an agreement.

    At its peak a burst uses up what had accumulated, and what accumulates meanwhile, in just ``burst_s``.
    """
    cap, peak, length_s = agreed.cap_iops, agreed.burst_iops, agreed.burst_s
    if cap is None or peak is None or length_s is None or peak <= cap:
        return Rates(ops_per_s=cap)
    return Rates(ops_per_s=cap, burst_s=at_once_s(length_s, cap, peak), peak_ops_per_s=peak)


class AgreedCaps:
    """See the module."""

    def __init__(self, inventory: BackendInventory, policy: PolicyManager) -> None:
        self._inventory, self._policy = inventory, policy
        self._wanted: dict[str, dict[str, AgreedCap]] = {}
        self._blocked: dict[str, set[str]] = {}
        self._reported: set[str] = set()
        self._is_restored = False

    def restored(self) -> None:
        """What is in force was found in SQL: it is asked for only if the agreements still say so."""
        self._is_restored = True

    def follow(self, volumes: Iterable[str] = (), *, complete: bool = False) -> None:
        """Ask for what agreements cap of these volumes; ``complete``: of all, restored ones included."""
        if complete or self._is_restored:
            self._is_restored, self._blocked, self._wanted = False, {}, {}
            volumes = self._inventory.volumes() | {volume_of(t) for t in self._policy.layers["agreed"]}
            for volume in volumes:
                if caps := self._caps_of(volume):
                    self._wanted[volume] = caps
            every = {target: cap for caps in self._wanted.values() for target, cap in caps.items()}
            self._policy.set_agreed(every)
            return
        changed, gone = dict[str, AgreedCap](), list[str]()
        for volume in volumes:
            before, caps = self._wanted.get(volume, {}), self._caps_of(volume)
            if caps != before:
                self._wanted[volume] = caps
                changed |= caps
                gone += before.keys() - caps.keys()
        if changed or gone:
            self._policy.change_agreed(changed, gone)

    def _caps_of(self, volume: str) -> dict[str, AgreedCap]:
        terms, found = self._inventory.terms_of(volume), dict[str, AgreedCap]()
        if terms.caps:
            lowest = self._lowest_last(volume, terms.caps)[-1]
            found[volume] = AgreedCap(rates_of(lowest), lowest.sla)
        if not terms.client_caps:
            return found
        can_cap = self._inventory.is_divided(volume)
        for each in terms.client_caps:
            self._blocked.setdefault(each.sla, set()).discard(volume)
            if can_cap is False:
                self._blocked[each.sla].add(volume)
        if can_cap is False:
            return found
        tables = self._inventory.carriers_of(volume).values()
        clients = {c for table in tables for c in self._inventory.uses.clients(table, volume)}
        if can_cap is None:  # after a restart: those found in force stay until gateways say what they can do
            layer = self._policy.layers["agreed"].values()
            clients |= {t.client for t in layer if t.volume == volume and t.client}
        for each in self._lowest_last(volume, terms.client_caps):
            for client in sorted(clients):
                if each.has_client(client):
                    found[target_of(volume, client)] = AgreedCap(rates_of(each), each.sla)
        return found

    def _lowest_last(self, volume: str, classes: Sequence[VolumeClass]) -> list[VolumeClass]:
        """Those that are only observed, then those that are enforced, each by falling cap."""
        backend = backend_among(self._inventory.carriers_of(volume), volume)
        return sorted(
            classes,
            key=lambda c: (self._policy.mode_of(backend, c.sla) == "enforce", -(c.cap_iops or 0.0)),
        )

    def modes_changed(self) -> None:
        """Another of several caps may count now."""
        if not self._is_restored:  # else agreements are still to come, which say what is asked for
            self.follow(list(self._wanted))

    def events(self) -> list[RaiseEvent]:
        """Of agreements whose caps cannot be applied since the last call."""
        found = []
        for sla, volumes in self._blocked.items():
            if not volumes:
                self._reported.discard(sla)
            elif sla not in self._reported:
                self._reported.add(sla)
                found.append(self._event(sla, volumes))
        self._reported &= self._blocked.keys()
        return found

    def _event(self, sla: str, volumes: set[str]) -> RaiseEvent:
        old = {
            table.name or table.gateway_id
            for volume in volumes
            for table in self._inventory.carriers_of(volume).values()
            if table.state == "up" and table.caps_clients is False
        }
        text = (
            f"the cap of {sla} is not applied on {named(volumes)}: it is for some clients only, and the "
            f"agent of {named(old)} caps whole volumes (a cap of clients needs agents with client-caps): "
            "upgrade it"
        )
        details = {"sla": sla, "volumes": len(volumes), "gateways": len(old)}
        return RaiseEvent("throttle-not-effective", "warning", "sla", sla, text, details)

"""What the loop needs to know of a backend: victims, neighbours, and what was promised to them.

State: which gateways carry a volume, on which backend it is, the classes and budgets of the agreements
in force. Filled by the controller; everything else here only answers questions.

A volume is *divided* while an agreement names some of its clients and all its gateways apply caps of clients:
then its clients are the neighbours, not the volume (ADR 21). Questions about a volume take the target of one
of its clients, too (``targets``).

Pure: no clock. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, KeysView, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sla_server.agreements.promise import VolumeClass
from sla_server.services.control.client_use import ClientUse, ClientUses
from sla_server.services.control.scopes import Key, PromiseScope
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour, NeighbourTerms, terms, urgency
from sla_server.services.control.targets import client_of, target_of, volume_of
from sla_server.services.control.usage import GatewayTable, Usage
from sla_server.services.control.verdicts import NOTHING
from sla_server.services.control.victims import Need, Victim

SMALL_IO_COST: Final = 1.0 + 4096 / 65_536
"""Mean cost assumed of a volume that has not done any I/O yet."""
SEEN_ONLY: Final = "is only counted on its host, beside the I/O path"
REFUSED: Final = "is not served by the gateway that was sent its caps"
FULL_RATIO: Final = 0.9
"""A volume that holds I/Os back but uses less of its cap met a short burst, not its cap."""


class BackendInventory:
    """See the module. ``budgets`` maps an objective to (burn_1h, remaining_ratio)."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self.budgets: dict[Key, tuple[float, float]] = {}
        self._named: dict[str, list[VolumeClass]] = {}
        self._patterned: list[VolumeClass] = []
        self._terms: dict[str, NeighbourTerms] = {}
        self._carriers: dict[str, dict[str, GatewayTable]] = {}
        self._on_backend: dict[str, set[str]] = {}
        self._places: dict[str, frozenset[str]] = {}
        self._mean_costs: dict[str, float] = {}
        self.uses = ClientUses()
        self._names_clients: dict[str, bool] = {}
        self._any_names_clients = False

    def set_classes(self, classes: Sequence[VolumeClass]) -> None:
        """What the agreements in force say of volumes as neighbours."""
        self._named, self._patterned, self._terms, self._names_clients = {}, [], {}, {}
        self._any_names_clients = any("*" not in each.clients for each in classes)
        for each in classes:
            if any(character in name for name in each.volumes for character in "*?["):
                self._patterned.append(each)
                continue
            for name in dict.fromkeys(each.volumes):
                self._named.setdefault(name, []).append(each)

    def carries(self, volume: str, table: GatewayTable) -> bool:
        """A gateway carries a volume; whether the volume was on another backend until now."""
        self._carriers.setdefault(volume, {})[table.gateway_id] = table
        return self.locate(volume)

    def locate(self, volume: str) -> bool:
        """Find out where a volume is; whether it was on another backend until now.

        A gateway that is lost says where it was: that counts only while no other is up.
        """
        tables = self._carriers[volume].values()
        speaking = [table for table in tables if table.state == "up"] or tables
        found = frozenset(table.backend_of(volume) for table in speaking) - {""}
        before = self._places.get(volume, frozenset())
        if found == before or not found:
            return False
        for backend in before - found:
            self._on_backend[backend].discard(volume)
            if not self._on_backend[backend]:
                del self._on_backend[backend]
        for backend in found - before:
            self._on_backend.setdefault(backend, set()).add(volume)
        self._places[volume] = found
        return bool(before)

    def is_on(self, target: str, backend: str) -> bool:
        """Whether a volume is on this backend, as far as is known."""
        return backend in self._places.get(volume_of(target), (backend,))

    def volumes(self) -> KeysView[str]:
        """All that some gateway carries."""
        return self._carriers.keys()

    def backends(self) -> Mapping[str, set[str]]:
        """Volumes by backend."""
        return self._on_backend

    def volumes_on(self, backend: str) -> int:
        """How many volumes some gateway carries on a backend."""
        return len(self._on_backend.get(backend, ()))

    def carriers_of(self, target: str) -> Mapping[str, GatewayTable]:
        """Gateways that carry a volume."""
        return self._carriers.get(volume_of(target), {})

    def terms_of(self, target: str) -> NeighbourTerms:
        """Priority, floor and cap of a volume."""
        found = self._terms.get(target)
        if found is None:
            volume = volume_of(target)
            found = terms(volume, self._classes_of(volume), self._settings, client_of(target))
            self._terms[target] = found
        return found

    def _classes_of(self, volume: str) -> tuple[VolumeClass, ...]:
        return (*self._named.get(volume, ()), *self._patterned)

    def mean_cost_of(self, target: str) -> float:
        """Recent cost of its mean I/O, where it is known now; the last known while no gateway says."""
        used = self._used(target)
        cost, ops = sum(use.cost_per_s for use in used), sum(use.ops_per_s for use in used)
        if ops > 0.5:
            self._mean_costs[target] = max(cost / ops, 1.0)
        return self._mean_costs.get(target, self._mean_costs.get(volume_of(target), SMALL_IO_COST))

    def _used(self, target: str, backend: str = "") -> list[Usage | ClientUse]:
        """What it uses through each of the gateways that are up; with a ``backend`` only there."""
        volume = volume_of(target)
        tables = [
            table
            for table in self.carriers_of(target).values()
            if table.state == "up" and backend in ("", table.backend_of(volume))
        ]
        return [use for table in tables if (use := self.uses.of(table, target)) is not None]

    def urgency_of(self, key: Key) -> float:
        """G of an objective; 0 while its budget is not known."""
        return urgency(*self.budgets.get(key, (0.0, 1.0)))

    def r_on(self, key: Key) -> float:
        """Entry threshold of r for an objective."""
        return self._settings.r_on - self._settings.r_on_urgency * self.urgency_of(key)

    def neighbour(self, target: str, cap: float | None, backend: str = "") -> Neighbour:
        """A volume as a neighbour.

        Args:
            target: its name, or that of one of its clients.
            cap: the cost rate that the loop allows it now, if any.
            backend: only what it uses there; "": everywhere.
        """
        place, fresh = self.terms_of(target), self._used(target, backend)
        # The newest cut counts in full: a neighbour that just came must be cut from what it uses now.
        cost = sum(max(use.cost_per_s, use.last_cost_per_s) for use in fresh)
        full = cap is None or cost >= FULL_RATIO * cap
        return Neighbour(
            target,
            place.priority,
            cost,
            sum(use.peak_cost_per_s for use in fresh),
            max(place.floor_cost(self.mean_cost_of(target)), 1.0),
            full and any(use.held > 0 for use in fresh),
        )

    def neighbours(
        self, backend: str, scopes: Iterable[PromiseScope], caps: Mapping[str, float | None]
    ) -> dict[str, Neighbour]:
        """All of a backend that can be slowed down, the victims' own among them: volumes, or their clients.

        Args:
            backend: whose volumes.
            scopes: promises on it.
            caps: what the loop allows each of them now.
        """
        found = {
            target: self.neighbour(target, caps.get(target), backend)
            for volume in sorted(self._on_backend.get(backend, ()))
            if self.can_throttle(volume)
            for target in self.targets(volume)
        }
        for scope in scopes:
            signal = scope.row.signal()
            if signal.windows and signal.threshold_us is None:  # above its own curve
                every = self.targets_of(scope)
                own = every & found.keys()
                # A client that is gone takes no part of the curve.
                using = {t for t in every if not client_of(t) or t not in found or found[t].peak >= 1.0}
                end_iops = scope.promise.curve[-1].up_to_iops / max(len(using or every), 1)
                for target in own:
                    found[target] = replace(found[target], curve_end=end_iops * self.mean_cost_of(target))
        return found

    def targets(self, volume: str) -> list[str]:
        """What control may slow down of a volume: itself, or while it is divided its clients."""
        if not self._is_divided(volume):
            return [volume]
        tables = self.carriers_of(volume).values()
        return sorted({target_of(volume, c) for table in tables for c in self.uses.clients(table, volume)})

    def targets_of(self, scope: PromiseScope) -> set[str]:
        """What the streams of a promise are: volumes, or those of their clients that it covers."""
        if not self._any_names_clients:
            return set(scope.volumes)
        return {
            target
            for volume in scope.volumes
            for target in self.targets(volume)
            if target == volume or scope.promise.covers(volume, client_of(target))
        }

    def can_be_managed(self, target: str) -> bool:
        """Whether caps of it are what control uses now; True while that is not known."""
        divided = self._is_divided(target)
        return self.can_throttle(target) and (divided is None or divided == bool(client_of(target)))

    def _is_divided(self, target: str) -> bool | None:
        """See the module; None while none of its gateways is up, or one did not say yet what it can do."""
        if not self._any_names_clients:
            return False
        volume = volume_of(target)
        named = self._names_clients.get(volume)
        if named is None:
            covering = [each for each in self._classes_of(volume) if each.has_volume(volume)]
            named = any("*" not in each.clients for each in covering)
            self._names_clients[volume] = named
        if not named:
            return False
        tables = [t for t in self.carriers_of(volume).values() if t.state == "up" and t.can_throttle(volume)]
        if any(table.caps_clients is False for table in tables):
            return False
        return True if tables and all(table.caps_clients for table in tables) else None

    def can_throttle(self, target: str) -> bool:
        """Whether a gateway that carries it is in its I/O path and takes caps; True while none is known."""
        carriers = self.carriers_of(target).values()
        return not carriers or any(table.can_throttle(volume_of(target)) for table in carriers)

    def out_of_reach(self, backend: str, neighbours: Mapping[str, Neighbour]) -> dict[str, str]:
        """Volumes of a backend that use much of it and that no gateway can slow down, and why.

        Args:
            backend: whose volumes.
            neighbours: those that can be slowed down.
        """
        others = self._on_backend.get(backend, set()) - {volume_of(target) for target in neighbours}
        if not others:
            return {}
        cost = {v: self.neighbour(v, None, backend).cost_per_s for v in others}
        least = self._settings.small_share_ratio * (
            sum(cost.values()) + sum(n.cost_per_s for n in neighbours.values())
        )
        return {
            v: SEEN_ONLY if all(v in t.only_seen for t in self.carriers_of(v).values()) else REFUSED
            for v in sorted(others)
            if cost[v] > 0 and cost[v] >= least
        }

    def victim(self, scope: PromiseScope, now_ns: int) -> Victim:
        """A promise on a backend as the loop sees it."""
        key = scope.promise.key
        need = self._need(scope, now_ns)
        signal = scope.row.signal()
        volumes = frozenset(self.targets_of(scope))
        last_ns = scope.row.last_piece_ns
        limit_s = max(self._settings.stale_s, self._settings.poll_interval_s * 3)
        fresh = last_ns is not None and now_ns - last_ns <= limit_s * 1e9
        return Victim(key, scope.promise.priority, self.urgency_of(key), need, signal, volumes, fresh)

    def _heard_ns(self, scope: PromiseScope, now_ns: int) -> int:
        """When a promise had news on this backend last.

        Its row may be new, because the agreement was applied again, and may never be fed: its gateways are
        gone, or do not measure what is promised. Then it is as old as what they said last, or as the first
        question.
        """
        last_ns = scope.row.last_piece_ns
        if last_ns is not None:
            return last_ns
        if scope.asked_ns is None:
            scope.asked_ns = now_ns
        spoke = [
            table.last_cut_ns
            for volume in scope.volumes
            for gateway_id, table in self.carriers_of(volume).items()
            if gateway_id in scope.parts and table.last_cut_ns is not None
        ]
        return min(max(spoke, default=now_ns), scope.asked_ns)

    def _need(self, scope: PromiseScope, now_ns: int) -> Need:
        s, row = self._settings, scope.row
        if now_ns - self._heard_ns(scope, now_ns) > s.lease_s * 1e9:
            return Need.GONE
        if row.is_excluded:
            return Need.EXCLUDED
        if row.idle:
            row.reset()
            return Need.IDLE
        signal = row.signal()
        if signal is NOTHING:
            return Need.UNKNOWN
        if signal.threshold_us is None:
            return Need.OUT_OF_CURVE
        if not signal.applies:
            return Need.NOT_APPLICABLE
        if signal.at_risk:
            return Need.AT_RISK
        if signal.windows < s.at_risk_windows:
            return Need.UNKNOWN
        calm = not signal.risky and signal.u <= s.clear_u and signal.r <= s.clear_r
        return Need.CLEAR if calm else Need.HOLD

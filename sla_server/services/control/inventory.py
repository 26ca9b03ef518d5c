"""What the loop needs to know of a backend: victims, neighbours, and what was promised to them.

State: which gateways carry a volume, on which backend it is, the classes and budgets of the agreements
in force; of a backend that was asked about, where its use is found (``backend_use``); of divided volumes,
what part of a floor each client has (``client_floors``). Filled by the controller; everything else here only
answers questions.

A volume is *divided* while an agreement names some of its clients and all its gateways apply caps of clients:
then its clients are the neighbours, not the volume (ADR 21). Where they come under one new name after another
(``newcomers``), those of a glob are one neighbour together: a client belongs to the first glob that it
matches, of the highest priority, or to ``*`` if it matches none; one whose own name an agreement lists stays
by itself. Questions about a volume take the target of one of its clients, too (``targets``).

Pure: no clock. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Final

from pmdaemon.wire.messages.client_caps import MAX_EXCEPT, OTHER_CLIENTS
from sla_server.agreements.promise import VolumeClass
from sla_server.agreements.selectors import can_meet, is_pattern
from sla_server.services.control.backend_use import BackendUse, Place
from sla_server.services.control.client_floors import ClientFloors
from sla_server.services.control.client_use import ClientUse, ClientUses
from sla_server.services.control.drain import LEAST_UNDER_WAY
from sla_server.services.control.scopes import Key, PromiseScope
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import (
    WHOLE,
    Neighbour,
    Neighbours,
    NeighbourTerms,
    cost_of,
    terms,
    urgency,
)
from sla_server.services.control.targets import client_of, is_glob, target_of, volume_of
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
        self.uses = ClientUses(self.except_of)
        self._together: dict[str, set[str]] = {}  # by volume, globs whose clients are, where one can
        self._floors = ClientFloors(settings)
        self._floors_at: dict[str, int] = {}  # how often use had been summed when a volume's were shared
        self._client_terms: dict[str, set[str]] = {}  # targets in _terms, by volume
        self._named_clients: dict[str, tuple[str, ...]] = {}
        self._any_names_clients = False
        self._tables_on: dict[str, dict[str, GatewayTable]] = {}  # that carry, or carried, a volume of it
        self._changes: dict[str, int] = {}  # of what is on a backend
        self._found: dict[str, tuple[Hashable, BackendUse]] = {}
        self._unreachable: dict[str, set[str]] = {}

    def set_classes(self, classes: Sequence[VolumeClass]) -> None:
        """What the agreements in force say of volumes as neighbours."""
        self._named, self._patterned, self._terms, self._named_clients = {}, [], {}, {}
        self._client_terms = {}
        self._floors.clear()
        self._floors_at.clear()
        self._found.clear()
        self._any_names_clients = any("*" not in each.clients for each in classes)
        for each in classes:
            if any(map(is_pattern, each.volumes)):
                self._patterned.append(each)
                continue
            for name in dict.fromkeys(each.volumes):
                self._named.setdefault(name, []).append(each)

    def carries(self, volume: str, table: GatewayTable) -> bool:
        """A gateway carries a volume; whether the volume was on another backend until now."""
        self._carriers.setdefault(volume, {})[table.gateway_id] = table
        has_moved = self.locate(volume)
        for backend in self._places.get(volume, ()):
            self._tables_on.setdefault(backend, {})[table.gateway_id] = table
            self._changes[backend] = self._changes.get(backend, 0) + 1
        return has_moved

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
        for backend in before | found:
            self._changes[backend] = self._changes.get(backend, 0) + 1
            self._tables_on.setdefault(backend, {}).update(self._carriers[volume])
        return bool(before)

    def leaves(self, volume: str, table: GatewayTable) -> None:
        """A gateway carries a volume no more; one that no gateway carries is on no backend."""
        carriers = self._carriers.get(volume, {})
        if carriers.pop(table.gateway_id, None) is None:
            return
        for backend in self._places.get(volume, ()):
            self._changes[backend] = self._changes.get(backend, 0) + 1
        if carriers:
            self.locate(volume)
            return
        del self._carriers[volume]
        for backend in self._places.get(volume, ()):
            self._on_backend[backend].discard(volume)
            if not self._on_backend[backend]:
                del self._on_backend[backend]
        self._places[volume] = frozenset()

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
        """Priority, floor and cap of a volume; of one of its clients, its part of the floors."""
        volume, client = volume_of(target), client_of(target)
        if client:
            self._share_floors(volume)
        found = self._terms.get(target)
        if found is None:
            classes = self._classes_of(volume)
            parts = self._floors.of(volume, client, classes) if client else WHOLE
            found = terms(volume, classes, self._settings, client, parts)
            self._terms[target] = found
            if client:
                self._client_terms.setdefault(volume, set()).add(target)
        return found

    def _share_floors(self, volume: str) -> None:
        """Share the floors of a volume between its clients, as they use it now."""
        if self._floors_at.get(volume) == self.uses.sums:
            return
        use: dict[str, float] = {}
        for table in self.carriers_of(volume).values():
            if table.state == "up":
                for client, cost in self.uses.costs(table, volume).items():
                    use[client] = use.get(client, 0.0) + cost
        self._floors_at[volume] = self.uses.sums
        if globs := self._globs_together(volume):
            alone, use = use, {}
            for client, cost in alone.items():
                name = self._name_in(volume, client, globs)
                use[name] = use.get(name, 0.0) + cost
        if self._floors.follow(volume, self._classes_of(volume), use):
            for target in self._client_terms.pop(volume, ()):
                del self._terms[target]

    def _classes_of(self, volume: str) -> tuple[VolumeClass, ...]:
        return (*self._named.get(volume, ()), *(each for each in self._patterned if each.has_volume(volume)))

    def mean_cost_of(self, target: str) -> float:
        """Recent cost of its mean I/O, where it is known now; the last known while no gateway says."""
        used = [use for _, use in self._used(target)]
        return self._mean_cost(
            target, sum(use.cost_per_s for use in used), sum(use.ops_per_s for use in used)
        )

    def _mean_cost(self, target: str, cost: float, ops: float) -> float:
        if ops > 0.5:
            self._mean_costs[target] = max(cost / ops, 1.0)
        return self._mean_costs.get(target, self._mean_costs.get(volume_of(target), SMALL_IO_COST))

    def cost_of(self, volume: str) -> float:
        """What a volume uses now, cost units a second."""
        return sum(use.cost_per_s for _, use in self._used(volume))

    def _used(self, target: str) -> list[tuple[GatewayTable, Usage | ClientUse]]:
        """What it uses through each of the gateways that are up."""
        tables = [table for table in self.carriers_of(target).values() if table.state == "up"]
        return [(table, use) for table in tables if (use := self.uses.of(table, target)) is not None]

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
        place, volume = self.terms_of(target), volume_of(target)
        cost = last = peak = all_cost = all_ops = 0.0
        is_held, under_way, newest_ns, queued_ns = False, 0, 0, list[int]()
        for table, use in self._used(target):
            smoothed = use.cost_per_s
            all_cost, all_ops = all_cost + smoothed, all_ops + use.ops_per_s
            if backend in ("", table.backend_of(volume)):
                # The newest cut counts in full: a neighbour that just came must be cut from what it uses now.
                # Of a cut that caps have ended at once a few I/Os are a high rate: no more than the peak.
                cost += min(max(smoothed, use.last_cost_per_s), use.peak_cost_per_s)
                last += use.last_cost_per_s
                peak += use.peak_cost_per_s
                is_held = is_held or use.held > 0
                under_way += use.inflight
                newest_ns = max(newest_ns, table.last_cut_ns or 0)
                if use.inflight > LEAST_UNDER_WAY:
                    queued_ns.append(table.last_cut_ns or 0)
        full = cap is None or cost >= FULL_RATIO * cap
        floor = max(place.floor_cost(self._mean_cost(target, all_cost, all_ops)), 1.0)
        seen_ns, queueing = min(queued_ns, default=newest_ns), full and is_held
        return Neighbour(target, place.priority, cost, peak, floor, queueing, None, last, under_way, seen_ns)

    def neighbours(
        self, backend: str, scopes: Iterable[PromiseScope], caps: Mapping[str, float | None]
    ) -> Neighbours:
        """Those of a backend that can be slowed down and may count: volumes, or their clients.

        The victims' own are among them, and all that have a cap of the loop.

        Args:
            backend: whose volumes.
            scopes: promises on it.
            caps: what the loop allows each of them now.
        """
        every, found = self._use_on(backend), Neighbours()
        cost, peak = every.rates()
        for at in every.chosen(cost, caps.keys(), self._settings.small_share_ratio).tolist():
            target = every.names[at]
            found[target] = self.neighbour(target, caps.get(target), backend)
        if len(found) < len(every.names):
            found.left_out = len(every.names) - len(found)
            used = sum(n.cost_per_s for n in found.values())
            found.rest_cost_per_s = max(float(cost.sum()) - used, 0.0)
        volumes = {volume_of(target) for target in found}
        for scope in scopes:
            signal = scope.row.signal()
            if not signal.windows or signal.threshold_us is not None or volumes.isdisjoint(scope.volumes):
                continue
            own = self.targets_of(scope)  # above its own curve
            # A client that is gone takes no part of the curve.
            using = [t for t in own if not client_of(t) or t not in every.index or peak[every.index[t]] >= 1]
            end_iops = scope.promise.curve[-1].up_to_iops / max(len(using or own), 1)
            for target in own & found.keys():
                found[target] = replace(found[target], curve_end=end_iops * self.mean_cost_of(target))
        return found

    def _use_on(self, backend: str) -> BackendUse:
        """Where the use of all of a backend is found that can be slowed down."""
        tables = self._tables_on.get(backend, {})
        states = tuple(
            (t.state, t.caps_clients, t.caps_others, t.only_seen, t.refused, len(t.streams), len(t.exports))
            for t in tables.values()
        )
        key = self._changes.get(backend), states
        known = self._found.get(backend)
        if known is not None and known[0] == key:
            return known[1]
        names, places = list[str](), list[Place]()
        here, beyond = self._on_backend.get(backend, set()), set[str]()
        for volume in sorted(here):
            if not self.can_throttle(volume):
                beyond.add(volume)
                continue
            targets = self.targets(volume)
            names += targets
            carriers = self.carriers_of(volume).values()
            up = [t for t in carriers if t.state == "up" and t.backend_of(volume) == backend]
            places += [Place(target, table) for target in targets for table in up]
        made = BackendUse(names, places, self.uses)
        self._found[backend], self._unreachable[backend] = (key, made), beyond
        return made

    def targets(self, volume: str) -> list[str]:
        """What control may slow down of a volume: itself, or while it is divided its clients."""
        if not self.is_divided(volume):
            return [volume]
        tables = self.carriers_of(volume).values()
        clients = {c for table in tables for c in self.uses.clients(table, volume)}
        if globs := self._globs_together(volume):
            clients = {self._name_in(volume, client, globs) for client in clients}
        return sorted(target_of(volume, client) for client in clients)

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
        divided, client = self.is_divided(target), client_of(target)
        if not self.can_throttle(target) or divided is None:
            return self.can_throttle(target)
        if not (divided and client):
            return divided == bool(client)
        return self.is_together(target) if is_glob(target) else self.neighbour_of(target) == target

    @property
    def together(self) -> Iterable[str]:
        """Volumes of which some clients are taken together, where one can."""
        return self._together.keys()

    def take_together(self, target: str, is_together: bool) -> None:
        """The clients of a glob are one neighbour from now on, or no longer so."""
        volume = volume_of(target)
        globs = self._together.setdefault(volume, set())
        (globs.add if is_together else globs.discard)(client_of(target))
        if not globs:
            del self._together[volume]
        self._floors_at.pop(volume, None)
        for each in self._client_terms.pop(volume, ()):
            del self._terms[each]
        for backend in self._places.get(volume, ()):
            self._changes[backend] = self._changes.get(backend, 0) + 1

    def is_together(self, target: str) -> bool:
        """Whether a glob is, and its gateways can cap it; one that did not say yet is believed."""
        return client_of(target) in self._globs_together(volume_of(target))

    def _globs_together(self, volume: str) -> Collection[str]:
        """Those of a volume that agreements still have, and that its gateways can cap."""
        globs, named = self._together.get(volume), self.named_clients(volume)
        if not globs or not named:
            return ()
        tables = (t for t in self.carriers_of(volume).values() if t.state == "up" and t.can_throttle(volume))
        if any(table.caps_others is False for table in tables):
            return ()
        return [
            glob
            for glob in globs & {OTHER_CLIENTS, *named}
            if len(self.except_of(target_of(volume, glob))) <= MAX_EXCEPT
        ]

    def named_clients(self, volume: str) -> tuple[str, ...]:
        """Clients of a volume that agreements name: names, then globs, of the highest priority first."""
        found = self._named_clients.get(volume)
        if found is None:
            order = dict[str, tuple[bool, int, int, str]]()
            for each in self._classes_of(volume):
                for glob in each.clients if "*" not in each.clients else ():
                    place = is_pattern(glob), -each.priority, -len(glob), glob
                    order[glob] = min(place, order.get(glob, place))
            found = self._named_clients[volume] = tuple(sorted(order, key=order.__getitem__))
        return found

    def glob_of(self, target: str) -> str:
        """The target of the glob that a client would be taken together by; "" for what is listed by name."""
        volume, client = volume_of(target), client_of(target)
        named = self.named_clients(volume)
        if not client or is_pattern(client) or client in named:
            return ""
        return target_of(volume, next((g for g in named if fnmatchcase(client, g)), OTHER_CLIENTS))

    def beside(self, slowed: Collection[str], managed: Iterable[Neighbour]) -> list[Neighbour]:
        """Of the managed, those that are not ``slowed`` yet, as others of their volume and glob are."""
        globs = {glob for target in slowed if (glob := self.glob_of(target))}
        return [n for n in managed if n.volume not in slowed and self.glob_of(n.volume) in globs]

    def except_of(self, target: str) -> tuple[str, ...]:
        """Names and globs of the clients that match a target's glob and are not of it."""
        named, glob = self.named_clients(volume_of(target)), client_of(target)
        before = named[: named.index(glob)] if glob in named else named
        return tuple(each for each in before if can_meet(each, glob))

    def neighbour_of(self, target: str) -> str:
        """What a client of a divided volume counts as: itself, or the glob that it is taken together by."""
        volume = volume_of(target)
        return target_of(volume, self._name_in(volume, client_of(target), self._globs_together(volume)))

    def _name_in(self, volume: str, client: str, globs: Collection[str]) -> str:
        """The one of ``globs`` that a client is of, or its own name."""
        glob = client_of(self.glob_of(target_of(volume, client))) if globs else ""
        return glob if glob in globs else client

    def is_divided(self, target: str) -> bool | None:
        """See the module; None while none of its gateways is up, or one did not say yet what it can do."""
        if not self._any_names_clients:
            return False
        volume = volume_of(target)
        if not self.named_clients(volume):
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
        self._use_on(backend)
        others = self._unreachable[backend]
        if not others:
            return {}
        cost = {v: self.neighbour(v, None, backend).cost_per_s for v in others}
        least = self._settings.small_share_ratio * (sum(cost.values()) + cost_of(neighbours))
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
        promise, urgency = scope.promise, self.urgency_of(key)
        return Victim(key, promise.priority, urgency, need, signal, volumes, fresh, promise.metric)

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
        if signal.at_risk:
            return Need.AT_RISK
        if signal.excuse and not signal.over:
            return Need.OUT_OF_CURVE if signal.threshold_us is None else Need.NOT_APPLICABLE
        if signal.windows < s.at_risk_windows:
            return Need.UNKNOWN
        calm = not signal.risky and signal.u <= s.clear_u and signal.r <= s.clear_r
        return Need.CLEAR if calm else Need.HOLD

"""Which streams a promise is about: the link from cuts to promises.

State: a *scope* is one promise on one backend, or over all backends (for display); ``_by_gateway`` lists
those with streams at a gateway. A scope at one gateway has its windows in the bank, one that reaches a second
gateway a tracker of its own. From the scopes at a gateway follows its ``RowPlan``, by which a batch of its
cuts finds its promises without matching a pattern; it is made when the first cut needs it and dropped when a
scope or stream is added.

Promises that name volumes are found by name, only those with patterns are matched. A change of agreements
touches the promises that changed; the others keep scopes and windows.

Changed only by the brain's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import Promise
from sla_server.services.control.batch import NO_ROW, RowPlan, kind_of
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalTable
from sla_server.services.control.signal_row import SignalRow
from sla_server.services.control.usage import GatewayTable
from sla_server.services.control.windows import Tracker

Key = tuple[str, str]


@dataclass(slots=True)
class PromiseScope:
    """One promise on one backend (``backend`` "" for all of them together).

    Attributes:
        masks: gateway_id to which rows of its table are in scope, shape (rows,).
    """

    promise: Promise
    backend: str
    tracker: Tracker
    masks: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    volumes: set[str] = field(default_factory=set)
    _order: list[str] = field(default_factory=list)
    _heard: int = 0

    def heard(
        self, spoken: Collection[str], tables: dict[str, GatewayTable], stale_ns: float, now_ns: int
    ) -> bool:
        """Whether every gateway in scope that still speaks is among ``spoken`` of the window that is open.

        Where the last look ended is remembered: over one window each gateway is looked at about once.
        """
        if len(spoken) <= 1 or len(self._order) != len(self.masks):
            self._order, self._heard = list(self.masks), 0
        while self._heard < len(self._order):
            gateway_id = self._order[self._heard]
            if gateway_id not in spoken and tables[gateway_id].fresh(stale_ns, now_ns):
                return False
            self._heard += 1
        self._heard = 0
        return True


class PromiseScopes:
    """All scopes; see the module. ``r_on`` gives an objective's entry threshold of r."""

    def __init__(self, settings: ControlSettings, r_on: Callable[[Key], float] | None = None) -> None:
        self._settings = settings
        self._r_on = r_on or (lambda _key: settings.r_on)
        self.bank = SignalTable(settings)
        self._wide: dict[str, list[tuple[int, PromiseScope]]] = {}
        self._spanning: dict[str, set[Key]] = {}
        self._by_key: dict[Key, dict[str, PromiseScope]] = {}
        self._by_gateway: dict[str, list[PromiseScope]] = {}
        self._by_backend: dict[str, dict[Key, PromiseScope]] = {}
        self._plans: dict[str, RowPlan] = {}
        self._promises: dict[Key, Promise] = {}
        self._named: dict[str, list[Promise]] = {}
        self._patterned: list[Promise] = []

    # What is promised, and where.

    def set_promises(self, promises: Iterable[Promise], tables: Iterable[GatewayTable]) -> None:
        """Another set of promises; a promise that did not change keeps its windows."""
        old, self._promises = self._promises, {promise.key: promise for promise in promises}
        gone = [key for key, promise in old.items() if self._promises.get(key) != promise]
        self._drop(gone)
        self._named, self._patterned = {}, []
        self._index(p for key, p in self._promises.items() if old.get(key) != p)
        for table in tables:
            self._match(table, range(len(table.streams)))
        self._named, self._patterned = {}, []
        self._index(self._promises.values())

    def _index(self, promises: Iterable[Promise]) -> None:
        for promise in promises:
            if any(character in name for name in promise.volumes for character in "*?["):
                self._patterned.append(promise)
                continue
            for name in dict.fromkeys(promise.volumes):
                self._named.setdefault(name, []).append(promise)

    def _drop(self, keys: Iterable[Key]) -> None:
        gone = [scope for key in keys for scope in self._by_key.pop(key, {}).values()]
        gateways = {gateway_id for scope in gone for gateway_id in scope.masks}
        dropped = {id(scope) for scope in gone}
        for gateway_id in gateways:
            self._by_gateway[gateway_id] = [s for s in self._by_gateway[gateway_id] if id(s) not in dropped]
            self._plans.pop(gateway_id, None)
        for scope in gone:
            del self._by_backend[scope.backend][scope.promise.key]
            if not self._by_backend[scope.backend]:
                del self._by_backend[scope.backend]
            if isinstance(scope.tracker, SignalRow):
                self.bank.free(scope.tracker.row)
            else:
                self._spanning[scope.backend].discard(scope.promise.key)

    def extend(self, table: GatewayTable, rows: Iterable[int]) -> set[Key]:
        """Streams appeared in ``rows`` of a gateway's table; the objectives whose trackers are others now."""
        self._plans.pop(table.gateway_id, None)
        changed = self._match(table, rows)
        size = len(table.streams)
        for scope in self._by_gateway.get(table.gateway_id, ()):
            mask = scope.masks[table.gateway_id]
            if len(mask) < size:
                scope.masks[table.gateway_id] = _longer(mask, size)
        return changed

    def _match(self, table: GatewayTable, rows: Iterable[int]) -> set[Key]:
        changed: set[Key] = set()
        for row in rows:
            stream = table.streams[row]
            for promise in (*self._named.get(stream.volume, ()), *self._patterned):
                if promise.covers(stream.volume, stream.client):
                    for backend in ("", stream.backend):
                        if self._enter(promise, backend, table, row, stream.volume):
                            changed.add(promise.key)
                    self._plans.pop(table.gateway_id, None)
        return changed

    def _enter(self, promise: Promise, backend: str, table: GatewayTable, row: int, volume: str) -> bool:
        """One more row of a scope; whether its tracker is another one now."""
        gateway_id, changed = table.gateway_id, False
        scope = self._by_key.setdefault(promise.key, {}).get(backend)
        if scope is None:
            row_of_bank = self.bank.allot(promise, gateway_id, backend, self._r_on(promise.key))
            tracker = SignalRow(self.bank, row_of_bank)
            scope = self._by_key[promise.key][backend] = PromiseScope(promise, backend, tracker)
            self._by_backend.setdefault(backend, {})[promise.key] = scope
            changed = True
        scope.volumes.add(volume)
        mask = scope.masks.get(gateway_id)
        if mask is None:
            self._by_gateway.setdefault(gateway_id, []).append(scope)
            if scope.masks and isinstance(scope.tracker, SignalRow):
                scope.tracker, changed = scope.tracker.leave(), True
                self._spanning.setdefault(scope.backend, set()).add(promise.key)
                for other in scope.masks:
                    self._plans.pop(other, None)
            mask = np.zeros(len(table.streams), dtype=np.bool_)
        elif len(mask) < len(table.streams):
            mask = _longer(mask, len(table.streams))
        mask[row] = True
        scope.masks[gateway_id] = mask
        return changed

    def set_r_on(self, key: Key) -> None:
        """An objective's entry threshold of r has changed."""
        for scope in self._by_key.get(key, {}).values():
            if isinstance(scope.tracker, SignalRow):
                self.bank.set_r_on(scope.tracker.row, self._r_on(key))

    # Questions.

    def at(self, gateway_id: str) -> list[PromiseScope]:
        """Scopes with streams at a gateway."""
        return self._by_gateway.get(gateway_id, [])

    def on_backend(self, backend: str) -> list[PromiseScope]:
        """Scopes of one backend; "" gives those over all backends."""
        return list(self._by_backend.get(backend, {}).values())

    def on(self, backend: str, key: Key) -> PromiseScope:
        """One promise on one backend.

        Raises:
            KeyError: it has no streams there.
        """
        return self._by_backend[backend][key]

    def backends(self) -> set[str]:
        """Backends on which some promise has streams."""
        return self._by_backend.keys() - {""}

    def whole(self, key: Key) -> PromiseScope | None:
        """A promise over all backends, or None while it has no streams."""
        return self._by_key.get(key, {}).get("")

    def plan(self, table: GatewayTable, stream_ids: npt.NDArray[np.int64]) -> RowPlan:
        """The plan of a gateway for cuts that name these streams in this order."""
        ids = stream_ids.tobytes()
        plan = self._plans.get(table.gateway_id)
        if plan is None or plan.ids != ids or plan.threshold_us.shape[1] != self.bank.steps:
            plan = self._plans[table.gateway_id] = self._planned(table, ids, stream_ids)
        return plan

    def wide_at(self, gateway_id: str) -> list[tuple[int, PromiseScope]]:
        """Of a gateway's plan: lines and their scopes with a tracker of their own."""
        return self._wide.get(gateway_id, [])

    def spanning(self, backend: str) -> Collection[Key]:
        """Objectives whose scope on this backend ("": over all) has a tracker of its own."""
        return self._spanning.get(backend, ())

    def wide_backends(self) -> set[str]:
        """Backends with a scope that has a tracker of its own."""
        return {backend for backend, keys in self._spanning.items() if backend and keys}

    def _planned(self, table: GatewayTable, ids: bytes, stream_ids: npt.NDArray[np.int64]) -> RowPlan:
        gateway_id, rows = table.gateway_id, table.rows_of(stream_ids)
        wide, lines = [], self._lines_at(gateway_id)
        known = np.flatnonzero(rows >= 0)
        pairs: list[tuple[int, int]] = []
        threshold_us = np.zeros((len(lines), self.bank.steps))
        whole, back = np.full(len(lines), NO_ROW), np.full(len(lines), NO_ROW)
        backends = [""] * len(lines)
        promises = []
        for line, scopes in enumerate(lines):
            promise = scopes[0].promise
            promises.append(promise)
            pairs += [(row, line) for row in known[scopes[0].masks[gateway_id][rows[known]]].tolist()]
            for step, curve in enumerate(promise.curve):
                threshold_us[line, step] = curve.threshold_us
            for scope in scopes:
                if not isinstance(scope.tracker, SignalRow):
                    wide.append((line, scope))
                elif scope.backend:
                    back[line], backends[line] = scope.tracker.row, scope.backend
                else:
                    whole[line] = scope.tracker.row
        self._wide[gateway_id] = wide
        pairs.sort()
        pair = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return RowPlan(
            ids=ids,
            rows=rows,
            known=known,
            place=table.volume_of_row[rows[known]],
            pair_row=np.ascontiguousarray(pair[:, 0]),
            pair_line=np.ascontiguousarray(pair[:, 1]),
            io=np.array([kind_of(promise.io) for promise in promises], dtype=np.int64),
            percentile=np.array([promise.percentile for promise in promises], dtype=np.float64),
            threshold_us=threshold_us,
            whole=whole,
            back=back,
            backends=tuple(backends),
            plain=len(known) == len(rows) and len(np.unique(pair[:, 0])) == len(pair),
        )

    def _lines_at(self, gateway_id: str) -> list[list[PromiseScope]]:
        """Scopes with streams at a gateway; those of one promise with the same streams are one line."""
        lines: dict[tuple[Key, bytes], list[PromiseScope]] = {}
        for scope in self.at(gateway_id):
            lines.setdefault((scope.promise.key, scope.masks[gateway_id].tobytes()), []).append(scope)
        return list(lines.values())


def _longer(mask: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.bool_]:
    return np.concatenate((mask, np.zeros(size - len(mask), dtype=np.bool_)))

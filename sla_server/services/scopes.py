"""Which streams a promise is about: the link from cuts to promises.

State: for each gateway the list of scopes that have streams there; a scope is one promise on one backend, or
over all backends (for display). Rebuilt when agreements change, extended when streams appear; a cut then
finds its promises without matching a pattern.

Changed only by the brain's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sla_server.agreements.promise import Promise
from sla_server.services.entity import GatewayTable, Taken
from sla_server.services.settings import ControlSettings
from sla_server.services.windows import WindowTracker

Key = tuple[str, str]


@dataclass(slots=True)
class Scope:
    """One promise on one backend (``backend`` "" for all of them together).

    Attributes:
        masks: gateway_id to which rows of its table are in scope, shape (rows,).
    """

    promise: Promise
    backend: str
    tracker: WindowTracker
    masks: dict[str, npt.NDArray[np.bool_]] = field(default_factory=dict)
    volumes: set[str] = field(default_factory=set)

    def rows_of(self, taken: Taken) -> npt.NDArray[np.bool_]:
        """Which rows of a cut are in scope, shape (cut.rows,)."""
        mask = self.masks[taken.cut.gateway_id]
        known = taken.rows >= 0
        inside = np.zeros(len(taken.rows), dtype=np.bool_)
        rows = taken.rows[known]
        inside[known] = mask[rows]
        return inside

    def needed(self, tables: dict[str, GatewayTable], now_ns: int) -> frozenset[str]:
        """Gateways that must have spoken before a window closes: those in scope that still speak."""
        return frozenset(g for g in self.masks if tables[g].fresh(self.tracker.stale_ns, now_ns))


class Scopes:
    """All scopes; see the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self._settings = settings
        self._by_key: dict[tuple[Key, str], Scope] = {}
        self._by_gateway: dict[str, list[Scope]] = {}
        self._promises: list[Promise] = []

    def set_promises(self, promises: Iterable[Promise], tables: Iterable[GatewayTable]) -> None:
        """Another set of promises; a promise that did not change keeps its windows."""
        kept = dict(self._by_key)
        self._promises = list(promises)
        self._by_key, self._by_gateway = {}, {}
        for table in tables:
            self.extend(table, range(len(table.streams)))
        for key, scope in self._by_key.items():
            old = kept.get(key)
            if old is not None and old.promise == scope.promise:
                scope.tracker = old.tracker

    def extend(self, table: GatewayTable, rows: Iterable[int]) -> None:
        """Streams appeared in ``rows`` of a gateway's table."""
        for row in rows:
            stream = table.streams[row]
            for promise in self._promises:
                if promise.covers(stream.volume, stream.client):
                    for backend in ("", stream.backend):
                        self._enter(promise, backend, table, row, stream.volume)
        size = len(table.streams)
        for scope in self._by_gateway.get(table.gateway_id, ()):
            mask = scope.masks[table.gateway_id]
            if len(mask) < size:
                scope.masks[table.gateway_id] = np.concatenate(
                    (mask, np.zeros(size - len(mask), dtype=np.bool_))
                )

    def _enter(self, promise: Promise, backend: str, table: GatewayTable, row: int, volume: str) -> None:
        key = (promise.key, backend)
        scope = self._by_key.get(key)
        if scope is None:
            scope = self._by_key[key] = Scope(promise, backend, WindowTracker(self._settings, promise))
        scope.volumes.add(volume)
        mask = scope.masks.get(table.gateway_id)
        if mask is None:
            self._by_gateway.setdefault(table.gateway_id, []).append(scope)
            mask = np.zeros(len(table.streams), dtype=np.bool_)
        elif len(mask) < len(table.streams):
            mask = np.concatenate((mask, np.zeros(len(table.streams) - len(mask), dtype=np.bool_)))
        mask[row] = True
        scope.masks[table.gateway_id] = mask

    def at(self, gateway_id: str) -> list[Scope]:
        """Scopes with streams at a gateway."""
        return self._by_gateway.get(gateway_id, [])

    def on_backend(self, backend: str) -> list[Scope]:
        """Scopes of one backend; "" gives those over all backends."""
        return [scope for (_, where), scope in self._by_key.items() if where == backend]

    def backends(self) -> set[str]:
        """Backends on which some promise has streams."""
        return {backend for _, backend in self._by_key if backend}

    def whole(self, key: Key) -> Scope | None:
        """A promise over all backends, or None while it has no streams."""
        return self._by_key.get((key, ""))

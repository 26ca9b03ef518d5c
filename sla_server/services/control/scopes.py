"""Which streams a promise is about: the link from cuts to promises.

State: a *scope* is one promise on one backend, or over all backends (for display); ``_by_gateway`` lists
those with streams at a gateway. A scope has its windows in one row of the signal table, and a member of that
row for each of its gateways. From the scopes at a gateway follows its ``RowPlan``, by which a batch of its
cuts finds its promises without matching a pattern; it is made when the first cut needs it and dropped when a
scope or stream is added. A *line* of the plan is one promise and the streams it covers at one gateway; it
yields one piece a cut.

Promises that name volumes are found by name, only those with patterns are matched. A change of agreements
touches the promises that changed; the others keep scopes and windows.

Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.promise import Promise
from sla_server.agreements.thresholds import unmeasured_prefixes
from sla_server.services.control.pieces import Floats, Ints
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import SignalRow, SignalTable
from sla_server.services.control.targets import client_of, volume_of
from sla_server.services.control.usage import NO_VOLUME, GatewayTable

Key = tuple[str, str]
NO_MEMBER: Final = -1


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where the rows of a gateway's cuts belong.

    Attributes:
        ids: the stream_id column it was made for, as bytes.
        rows: table row of each cut row, -1 for a stream not announced; shape (n,).
        of_known: of announced streams the row in a cut, the index of their volume at the gateway, and their
            number in the stream table; shape (3, k).
        pairs: cut row and line of each pair of the two, by row; shape (2, pairs).
        absent, absent_line: numbers of streams that the cuts leave out, and the line that has each in scope.
        of_lines: of each line its kind (wire.cut.IO_KINDS); the members of the signal table to feed, over all
            backends and on one, NO_MEMBER for none; whether I/Os are compared with ``threshold_us`` (not for
            availability); whether an I/O that failed does not count; shape (5, lines).
        figures: of each line the percentile, then the threshold (us) of each step, 0 where a curve has fewer;
            shape (1 + steps, lines).
        is_mean: whether a mean latency is promised; promised: the rate that is, or 0; is_bytes: of bytes;
            shape (lines,). has_others: there is one of these.
        gateway: its number in the signal table.
        backends: of the second of these members, by line.
        plain: every stream is known and in at most one line.
        blind: cut rows of streams that are not measured for a promise, and the member, over all backends, to
            report their I/Os to; shape (2, b).

    What every batch joins is in few arrays: to join hundreds of small ones costs by their number.
    """

    ids: bytes
    rows: Ints
    of_known: Ints
    pairs: Ints
    absent: Ints
    absent_line: Ints
    of_lines: Ints
    figures: Floats
    is_mean: npt.NDArray[np.bool_]
    promised: Floats
    is_bytes: npt.NDArray[np.bool_]
    has_others: bool
    gateway: int
    backends: tuple[str, ...]
    plain: bool
    blind: Ints

    @property
    def known(self) -> Ints:
        """Cut rows of announced streams, shape (k,)."""
        found: Ints = self.of_known[0]
        return found

    @property
    def numbers(self) -> Ints:
        """Of announced streams, in the stream table, shape (k,)."""
        found: Ints = self.of_known[2]
        return found

    @property
    def threshold_us(self) -> Floats:
        """Shape (lines, steps)."""
        return self.figures[1:].T

    @property
    def members(self) -> Ints:
        """All members that it feeds."""
        every = self.of_lines[1:3]
        found: Ints = every[every != NO_MEMBER]
        return found


@dataclass(slots=True)
class ScopePart:
    """A scope's streams at one gateway.

    Attributes:
        mask: which rows of the gateway's table are in scope, shape (rows,).
        member: of the signal table, to feed with what its cuts say.
    """

    mask: npt.NDArray[np.bool_]
    member: int


@dataclass(slots=True)
class PromiseScope:
    """One promise on one backend (``backend`` "" for all of them together).

    Attributes:
        row: its windows.
        parts: by gateway_id.
        asked_ns: when the loop first asked while no cut had ever fed it; None: not yet.
    """

    promise: Promise
    backend: str
    row: SignalRow
    parts: dict[str, ScopePart] = field(default_factory=dict)
    volumes: set[str] = field(default_factory=set)
    asked_ns: int | None = None


class PromiseScopes:
    """All scopes; see the module. ``r_on`` gives an objective's entry threshold of r."""

    def __init__(self, settings: ControlSettings, r_on: Callable[[Key], float] | None = None) -> None:
        self._settings = settings
        self._r_on = r_on or (lambda _key: settings.r_on)
        self.table = SignalTable(settings)
        self._by_key: dict[Key, dict[str, PromiseScope]] = {}
        self._by_gateway: dict[str, list[PromiseScope]] = {}
        self._by_backend: dict[str, dict[Key, PromiseScope]] = {}
        self._plans: dict[str, RowPlan] = {}
        self._promises: dict[Key, Promise] = {}
        self._named: dict[str, list[Promise]] = {}
        self._patterned: list[Promise] = []
        self._excluded: frozenset[str] = frozenset()

    # What is promised, and where.

    def set_promises(self, promises: Iterable[Promise], tables: Iterable[GatewayTable]) -> set[str]:
        """Another set of promises; a promise that did not change keeps its windows.

        One whose labels choose other volumes keeps those of each backend on which it loses none.

        Returns:
            Backends on which a promise is new, another one or gone.
        """
        old, self._promises = self._promises, {promise.key: promise for promise in promises}
        chosen, gone, by_id = set[Key](), list[Key](), {table.gateway_id: table for table in tables}
        for key, promise in old.items():
            after = self._promises.get(key)
            if after is not None and after.differs_in_volumes(promise):
                chosen.add(key)
            elif after != promise:
                gone.append(key)
        changed = [key for key, promise in self._promises.items() if old.get(key) != promise]
        backends = self._backends_of(gone)
        before = {key: set(self._by_key.get(key, ())) for key in chosen}
        self._drop(gone)
        backends |= {backend for key in chosen for backend in self._lose(self._promises[key], by_id)}
        self._named, self._patterned = {}, []
        self._index(self._promises[key] for key in changed)
        for table in by_id.values():
            self._match(table, range(len(table.streams)))
        self._named, self._patterned = {}, []
        self._index(self._promises.values())
        for key in chosen:
            backends |= before[key] ^ set(self._by_key.get(key, ()))
        return (backends | self._backends_of(set(changed) - chosen)) - {""}

    def _lose(self, promise: Promise, tables: Mapping[str, GatewayTable]) -> list[str]:
        """The promise is of other volumes now; those it had and has no more leave. Backends with some."""
        begun = []
        for backend, scope in list(self._by_key.get(promise.key, {}).items()):
            scope.promise = promise
            if all(map(promise.has_volume, scope.volumes)):
                continue
            begun.append(backend)
            self._remove([scope])
            del self._by_key[promise.key][backend]
            self._include_again(scope, tables, promise.has_volume)
        return begun

    def _include_again(
        self, scope: PromiseScope, tables: Mapping[str, GatewayTable], is_meant: Callable[[str], bool]
    ) -> None:
        """Those streams of a scope that was removed whose volumes are meant, in a scope with new windows."""
        for gateway_id, part in scope.parts.items():
            for row in np.flatnonzero(part.mask).tolist():
                stream = tables[gateway_id].streams[row]
                if stream.volume != NO_VOLUME and is_meant(stream.volume):
                    self._include(scope.promise, scope.backend, tables[gateway_id], row, stream.volume)

    def _backends_of(self, keys: Iterable[Key]) -> set[str]:
        return {backend for key in keys for backend in self._by_key.get(key, ())} - {""}

    def _index(self, promises: Iterable[Promise]) -> None:
        for promise in promises:
            if any(character in name for name in promise.volumes for character in "*?["):
                self._patterned.append(promise)
                continue
            for name in dict.fromkeys(promise.volumes):
                self._named.setdefault(name, []).append(promise)

    def _drop(self, keys: Iterable[Key]) -> None:
        self._remove([scope for key in keys for scope in self._by_key.pop(key, {}).values()])

    def _remove(self, gone: Collection[PromiseScope]) -> None:
        gateways = {gateway_id for scope in gone for gateway_id in scope.parts}
        dropped = {id(scope) for scope in gone}
        for gateway_id in gateways:
            self._by_gateway[gateway_id] = [s for s in self._by_gateway[gateway_id] if id(s) not in dropped]
            self._plans.pop(gateway_id, None)
        for scope in gone:
            on_backend = self._by_backend.get(scope.backend, {})
            on_backend.pop(scope.promise.key, None)
            if not on_backend:
                self._by_backend.pop(scope.backend, None)
            self.table.free(scope.row.row)

    def move(self, table: GatewayTable, rows: Iterable[int], tables: Mapping[str, GatewayTable]) -> None:
        """Streams in these rows of a gateway's table are on another backend than before.

        Where they were, their promises begin again without them: what their windows say is of another
        backend. Over all backends nothing changes.
        """
        moved = np.zeros(len(table.streams), np.bool_)
        moved[list(rows)] = True
        self._plans.pop(table.gateway_id, None)
        for scope in list(self.at(table.gateway_id)):
            mask = _longer(scope.parts[table.gateway_id].mask, len(moved))
            if not scope.backend or not (mask & moved).any():
                continue
            self._remove([scope])
            del self._by_key[scope.promise.key][scope.backend]
            for gateway_id, part in scope.parts.items():
                for row in np.flatnonzero(part.mask).tolist():
                    stream = tables[gateway_id].streams[row]
                    if stream.backend == scope.backend:
                        self._include(scope.promise, scope.backend, tables[gateway_id], row, stream.volume)
        self._match(table, np.flatnonzero(moved).tolist())

    def leave(
        self, table: GatewayTable, rows: Collection[int], tables: Mapping[str, GatewayTable]
    ) -> set[Key]:
        """Streams in these rows of a gateway's table are its own no more (``GatewayTable.forget``).

        Their promises begin again with what is left of them, if anything is. Returns the objectives.
        """
        gone, changed = set(rows), set[Key]()
        self._plans.pop(table.gateway_id, None)
        for scope in list(self.at(table.gateway_id)):
            if gone.isdisjoint(np.flatnonzero(scope.parts[table.gateway_id].mask).tolist()):
                continue
            changed.add(scope.promise.key)
            self._remove([scope])
            del self._by_key[scope.promise.key][scope.backend]
            self._include_again(scope, tables, lambda _volume: True)
        return changed

    def extend(self, table: GatewayTable, rows: Iterable[int]) -> set[Key]:
        """Streams appeared in ``rows`` of a gateway's table; the objectives that are new here."""
        self._plans.pop(table.gateway_id, None)
        changed = self._match(table, rows)
        size = len(table.streams)
        for scope in self._by_gateway.get(table.gateway_id, ()):
            part = scope.parts[table.gateway_id]
            part.mask = _longer(part.mask, size)
        return changed

    def _match(self, table: GatewayTable, rows: Iterable[int]) -> set[Key]:
        changed: set[Key] = set()
        for row in rows:
            stream = table.streams[row]
            if stream.volume == NO_VOLUME:
                continue
            for promise in (*self._named.get(stream.volume, ()), *self._patterned):
                if promise.covers(stream.volume, stream.client):
                    for backend in ("", stream.backend):
                        if self._include(promise, backend, table, row, stream.volume):
                            changed.add(promise.key)
                    self._plans.pop(table.gateway_id, None)
        return changed

    def _include(self, promise: Promise, backend: str, table: GatewayTable, row: int, volume: str) -> bool:
        """One more row of a gateway's table for a scope; whether the scope is new."""
        gateway_id, scopes = table.gateway_id, self._by_key.setdefault(promise.key, {})
        scope, new = scopes.get(backend), backend not in scopes
        if scope is None:
            windows = self.table.allot(promise, gateway_id, backend, self._r_on(promise.key))
            scope = scopes[backend] = PromiseScope(promise, backend, windows)
            if not backend or promise.metric == "latency":  # else it says nothing of how the backend does
                self._by_backend.setdefault(backend, {})[promise.key] = scope
            self.table.set_excluded(windows.row, promise.sla in self._excluded)
        scope.volumes.add(volume)
        part = scope.parts.get(gateway_id)
        if part is None:
            number = scope.row.row
            known = self.table.windows
            member = int(known.member[number]) if new else known.join(number, gateway_id)
            part = scope.parts[gateway_id] = ScopePart(np.zeros(len(table.streams), np.bool_), member)
            self._by_gateway.setdefault(gateway_id, []).append(scope)
        part.mask = _longer(part.mask, len(table.streams))
        part.mask[row] = True
        if part.mask.sum() == 1 and _is_blind(table, promise, volume):
            self.table.windows.m_measures[part.member] = False  # until its plan says more
        return new

    def set_excluded(self, agreements: Collection[str]) -> None:
        """Agreements of which nothing is promised at present, complete."""
        before, self._excluded = self._excluded, frozenset(agreements)
        changed = before ^ self._excluded
        if not changed:
            return
        for key, scopes in self._by_key.items():
            if key[0] in changed:
                for scope in scopes.values():
                    self.table.set_excluded(scope.row.row, key[0] in self._excluded)

    def replan(self, gateway_id: str) -> None:
        """What a gateway can measure of its volumes may have changed."""
        self._plans.pop(gateway_id, None)

    def is_measured(self, key: Key, tables: Mapping[str, GatewayTable]) -> bool:
        """Whether some stream in scope is seen by a source that measures what is promised."""
        scope = self.over_all(key)
        return scope is not None and any(
            bool(_measured_rows(tables[gateway_id], scope.promise, part.mask).any())
            for gateway_id, part in scope.parts.items()
        )

    def blind_volume(self, key: Key, tables: Mapping[str, GatewayTable]) -> str:
        """A volume with I/O of which what is promised cannot be measured; "" if there is none."""
        scope, windows = self.over_all(key), self.table.windows
        for gateway_id, part in scope.parts.items() if scope is not None else ():
            table = tables[gateway_id]
            if scope is None or not windows.is_blind(part.member, table.last_cut_ns or 0):
                continue
            hidden = part.mask & ~_measured_rows(table, scope.promise, part.mask)
            return min((table.streams[row].volume for row in np.flatnonzero(hidden).tolist()), default="")
        return ""

    def set_r_on(self, key: Key) -> None:
        """An objective's entry threshold of r has changed."""
        for scope in self._by_key.get(key, {}).values():
            self.table.set_r_on(scope.row.row, self._r_on(key))

    # Questions.

    def at(self, gateway_id: str) -> list[PromiseScope]:
        """Scopes with streams at a gateway."""
        return self._by_gateway.get(gateway_id, [])

    def on_backend(self, backend: str) -> list[PromiseScope]:
        """Scopes of one backend of which something can be measured; "" gives those over all backends."""
        scopes, windows = self._by_backend.get(backend, {}).values(), self.table.windows
        return [scope for scope in scopes if not backend or windows.measures(scope.row.row)]

    def on(self, backend: str, key: Key) -> PromiseScope:
        """One promise on one backend.

        Raises:
            KeyError: it has no streams there.
        """
        return self._by_backend[backend][key]

    def find(self, backend: str, key: Key) -> PromiseScope | None:
        """One promise on one backend, None if it has no streams there."""
        return self._by_backend.get(backend, {}).get(key)

    def backends(self) -> set[str]:
        """Backends on which some promise has streams."""
        return self._by_backend.keys() - {""}

    def over_all(self, key: Key) -> PromiseScope | None:
        """A promise over all backends, or None while it has no streams."""
        return self._by_key.get(key, {}).get("")

    def is_promised(self, target: str) -> bool:
        """Whether something is promised of a volume, or of one client of it, that a cap could break.

        Availability it does not.
        """
        volume, client = volume_of(target), client_of(target)
        return any(
            promise.metric != "availability"
            and (promise.covers(volume, client) if client else promise.has_volume(volume))
            for promise in (*self._named.get(volume, ()), *self._patterned)
        )

    def plan(self, table: GatewayTable, stream_ids: npt.NDArray[np.int64]) -> RowPlan:
        """The plan of a gateway for cuts that name these streams in this order."""
        ids = stream_ids.tobytes()
        plan = self._plans.get(table.gateway_id)
        if plan is None or plan.ids != ids or len(plan.figures) != 1 + self.table.windows.steps:
            plan = self._plans[table.gateway_id] = self._planned(table, ids, stream_ids)
        return plan

    def _planned(self, table: GatewayTable, ids: bytes, stream_ids: npt.NDArray[np.int64]) -> RowPlan:
        gateway_id, rows = table.gateway_id, table.rows_of(stream_ids)
        lines = self._lines_at(gateway_id)
        known = np.flatnonzero(rows >= 0)
        pairs, blind = list[tuple[int, int]](), list[tuple[int, int]]()
        figures = np.zeros((1 + self.table.windows.steps, len(lines)))
        of_lines = np.full((5, len(lines)), NO_MEMBER)
        backends = [""] * len(lines)
        promises, left_out = [], list[Ints]()
        is_out = np.ones(len(table.streams), np.bool_)
        is_out[rows[known]] = False
        for line, scopes in enumerate(lines):
            promise = scopes[0].promise
            promises.append(promise)
            of_lines[0, line], figures[0, line] = IO_KINDS[promise.io], promise.percentile
            of_lines[3:, line] = promise.metric == "latency", not promise.counts_errors
            mask = scopes[0].parts[gateway_id].mask
            measured = _measured_rows(table, promise, mask)
            hidden = known[(mask & ~measured)[rows[known]]].tolist()
            blind += [(row, s.parts[gateway_id].member) for s in scopes if not s.backend for row in hidden]
            pairs += [(row, line) for row in known[measured[rows[known]]].tolist()]
            out = np.flatnonzero(measured & is_out)
            left_out.append(np.stack((out, np.full(len(out), line)), axis=1))
            is_measured = bool(measured.any())
            for scope in scopes:
                self.table.windows.m_measures[scope.parts[gateway_id].member] = is_measured
            if not is_measured:
                continue  # fed with nothing, it would look idle
            for step, curve in enumerate(promise.curve):
                figures[1 + step, line] = curve.threshold_us
            for scope in scopes:
                member = scope.parts[gateway_id].member
                if scope.backend and promise.metric != "latency":
                    continue  # slowing others down is for latencies
                if scope.backend:
                    of_lines[2, line], backends[line] = member, scope.backend
                else:
                    of_lines[1, line] = member
        pairs.sort()
        pair = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        absent = np.concatenate(left_out) if left_out else pair[:0]
        return RowPlan(
            ids=ids,
            rows=rows,
            of_known=np.stack((known, table.volume_of_row[rows[known]], table.numbers[rows[known]])),
            pairs=np.ascontiguousarray(pair.T),
            absent=table.numbers[absent[:, 0]],
            absent_line=np.ascontiguousarray(absent[:, 1]),
            of_lines=of_lines,
            figures=figures,
            is_mean=np.array([promise.metric == "mean_latency" for promise in promises], dtype=np.bool_),
            promised=np.array([promise.promised for promise in promises], dtype=np.float64),
            is_bytes=np.array([promise.metric == "throughput" for promise in promises], dtype=np.bool_),
            has_others=any(p.metric == "mean_latency" or p.promised for p in promises),
            gateway=self.table.windows.gateway(gateway_id),
            backends=tuple(backends),
            plain=len(known) == len(rows) and len(np.unique(pair[:, 0])) == len(pair),
            blind=np.array(blind, dtype=np.int64).reshape(-1, 2).T,
        )

    def _lines_at(self, gateway_id: str) -> list[list[PromiseScope]]:
        """Scopes with streams at a gateway; those of one promise with the same streams are one line."""
        lines: dict[tuple[Key, bytes], list[PromiseScope]] = {}
        for scope in self.at(gateway_id):
            lines.setdefault((scope.promise.key, scope.parts[gateway_id].mask.tobytes()), []).append(scope)
        return list(lines.values())


def _is_blind(table: GatewayTable, promise: Promise, volume: str) -> bool:
    """Whether what is promised cannot be measured of a volume, as its gateway counts it beside the I/O path.

    There only sums of completions are known; its name, or what its agent says, tells.
    """
    needs_path = promise.metric != "mean_latency" or promise.io != "any"
    return volume.startswith(unmeasured_prefixes(promise)) or (needs_path and volume in table.only_seen)


def _measured_rows(
    table: GatewayTable, promise: Promise, mask: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Those of the rows in scope whose source measures what is promised."""
    if not (table.only_seen or table.has_beside):
        return mask
    measured = mask.copy()
    for row in np.flatnonzero(mask).tolist():
        measured[row] = not _is_blind(table, promise, table.streams[row].volume)
    return measured


def _longer(mask: npt.NDArray[np.bool_], size: int) -> npt.NDArray[np.bool_]:
    return mask if len(mask) == size else np.concatenate((mask, np.zeros(size - len(mask), np.bool_)))

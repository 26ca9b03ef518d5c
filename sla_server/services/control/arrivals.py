"""Cuts on their way into the brain's state: they wait, and are entered many at once.

``settle`` enters them in the order they came, with the same result as one after another: what depends on the
order (who spoke when, which caps a cut confirms, which gates are shut at that moment) is done one by one, and
a batch ends before a second cut of a gateway, and before one that makes a gateway known or brings it back.

A cut that waits is a view into its message: messages must be taken as copies (``Mailbox.take``), since a view
of shared memory would be overwritten meanwhile.

Changed only by the brain's one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from pmdaemon.wire.cut import Cut, parse_late
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.batch import CutBatch, Taken
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import PromiseScope, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import Bools, Pieces
from sla_server.services.control.signal_row import piece_at
from sla_server.services.control.usage import GatewayTable, UsageTable
from sla_server.services.control.windows import WindowTracker

MOST_CUTS: Final = 256
"""Of one batch, and that wait: some 20 ms of work at 16 streams, between two looks into the mailbox."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    cut: Cut
    recv_us: int
    offset_us: int
    now_ns: int


class CutIntake:
    """See the module. ``unix_us``: the newest time of receipt."""

    def __init__(
        self,
        settings: ControlSettings,
        scopes: PromiseScopes,
        policy: PolicyManager,
        tables: dict[str, GatewayTable],
        controls: Mapping[str, BackendControl],
        board: UsageTable,
    ) -> None:
        self.unix_us = 0
        self._settings = settings
        self._scopes, self._policy, self._board = scopes, policy, board
        self._tables, self._controls = tables, controls
        self._waiting: list[_Waiting] = []
        self._taken: list[Taken] = []
        self._received: list[int] = []
        self._shut: list[frozenset[str]] = []

    def put(self, cut: Cut, recv_us: int, offset_us: int, now_ns: int) -> None:
        """A cut came; it is entered with the next ``settle``, or at once with others if many wait."""
        self._waiting.append(_Waiting(cut, recv_us, offset_us, now_ns))
        if len(self._waiting) >= MOST_CUTS:
            self.settle()

    def settle(self) -> None:
        """Enter what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        stale_us, inside = self._settings.stale_s * 1e6, set[str]()
        awaiting = {backend: c for backend, c in self._controls.items() if c.awaiting}
        for each in waiting:
            gateway_id = each.cut.gateway_id
            table = self._tables.get(gateway_id)
            known = table is not None and table.state == "up" and gateway_id in self._policy.ports
            if not known or gateway_id in inside or len(inside) == MOST_CUTS:
                self._enter()
                inside.clear()
            if table is None:
                table = self._tables[gateway_id] = GatewayTable(gateway_id, self._board)
            if gateway_id not in self._policy.ports:
                self._policy.gateway_up(table, each.now_ns)
            if not table.accept(each.cut, each.recv_us, each.offset_us, stale_us, each.now_ns):
                continue
            if table.state != "up":  # a stalled gateway recovered: its statistics are the proof
                table.state, table.reason = "up", ""
                self._policy.gateway_up(table, each.now_ns)
            inside.add(gateway_id)
            for control in awaiting.values():
                control.confirm(gateway_id, each.cut.throttle_gen, self._policy.ports[gateway_id].gen)
            plan = self._scopes.plan(table, each.cut.column("stream_id"))
            self._taken.append(Taken(each.cut, table, plan, each.now_ns, self._excused(table.starved_ratio)))
            self._received.append(each.recv_us)
            self._shut.append(frozenset(b for b, c in awaiting.items() if not c.gate_open))
        self._enter()

    def _excused(self, starved_ratio: float) -> float:
        """Share of a cut's I/Os that its gateway's own host may have made late; see ``windows``."""
        s = self._settings
        if starved_ratio < s.starved_least_ratio:
            return 0.0
        return min(s.starved_weight * starved_ratio, s.starved_most_ratio)

    def _enter(self) -> None:
        if not self._taken:
            return
        taken, received, shut = self._taken, self._received, self._shut
        self._taken, self._received, self._shut = [], [], []
        self.unix_us = max(self.unix_us, *received)
        batch = CutBatch(taken)
        batch.measure(self._board)
        for each, recv_us in zip(taken, received, strict=True):
            table, rows = each.table, each.plan.rows
            table.keep(each.cut, rows)
            table.unknown_rows += len(rows) - len(each.plan.known)
            self._policy.cut(table, each.cut.duration_us, recv_us)
            if "late" in each.cut.extra:
                self._policy.held_late(parse_late(each.cut.extra["late"]))
        pieces = batch.pieces()
        if pieces is not None:
            self._feed(batch, pieces, shut)

    def _feed(self, batch: CutBatch, pieces: Pieces, shut: list[frozenset[str]]) -> None:
        whole, back = batch.targets()
        closed = _lines_shut(batch, shut)
        feeds, notes = back >= 0, np.zeros(len(back), dtype=np.bool_)
        if closed is not None:
            feeds, notes = feeds & ~closed, feeds & closed
        over_all = np.flatnonzero(whole >= 0)
        fed = np.flatnonzero(feeds)
        rows = np.concatenate((whole[over_all], back[fed]))
        if len(rows):
            self._scopes.bank.add(rows, np.concatenate((over_all, fed)), pieces)
        if notes.any():
            self._scopes.bank.note(back[notes], np.flatnonzero(notes), pieces)
        first = 0
        for each, lines, gates in zip(batch.taken, batch.lines.tolist(), shut, strict=True):
            for line, scope in self._scopes.wide_at(each.table.gateway_id):
                self._feed_one(scope, pieces, first + line, each, gates)
            first += lines

    def _feed_one(
        self, scope: PromiseScope, pieces: Pieces, index: int, each: Taken, gates: frozenset[str]
    ) -> None:
        """A scope at several gateways."""
        tracker = scope.tracker
        assert isinstance(tracker, WindowTracker)  # what ``wide_at`` lists
        piece = piece_at(pieces, index, each.table.gateway_id, scope.promise)
        if scope.backend in gates:
            tracker.note(piece, each.now_ns)
            return
        stale_ns, now_ns = tracker.stale_ns, each.now_ns
        tracker.add(piece, lambda spoken: scope.heard(spoken, self._tables, stale_ns, now_ns), now_ns)


def _lines_shut(batch: CutBatch, shut: list[frozenset[str]]) -> Bools | None:
    """Which lines of a batch are on a backend whose gate was shut when their cut came; None if none."""
    if not any(shut):
        return None
    return np.array(
        [
            backend in gates
            for plan, gates in zip(batch.plans, shut, strict=True)
            for backend in plan.backends
        ],
        dtype=np.bool_,
    )

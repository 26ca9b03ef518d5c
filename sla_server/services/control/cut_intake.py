"""Cuts: checked when their message comes, kept until there are many, and entered as a batch (``cut_batch``).

``read_cuts`` takes the cuts out of a message and checks their columns all at once: to look at each cut by
itself takes as long as to decode it, of forty joined a third. Only if something is wrong anywhere is each
looked at, since the others are other gateways'.

``CutIntake`` keeps them and enters them in the order they came, with the same result as one after another:
what depends on the order (who spoke when, which caps a cut confirms, which gates are shut at that moment) is
done one by one, and a batch ends before a second cut of a gateway, and before one that makes a gateway known
or brings it back.

A cut is a view into its message: messages must be taken as copies (``Mailbox.take``), since a view of shared
memory would be overwritten while the cut waits. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, Cut, parse_late
from pmdaemon.wire.messages.base import count
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.cut_batch import CutBatch, Taken
from sla_server.services.control.pieces import Bools, Pieces
from sla_server.services.control.planes import PlaneStates
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import NO_MEMBER, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.usage import GatewayTable, UsageTable

MOST_CUTS: Final = 512
"""Of one batch, and that wait: some 30 ms of work at 16 streams, between two reads of the mailbox. Half a
millisecond of it is the price of a batch, whatever is in it."""
_STREAM_ID: Final = COL["stream_id"]
Place = tuple[int, Cut]
"""Position in the message, and the cut."""


def read_cuts(message: frame.Frame, on_bad: Callable[[BadCut], None]) -> list[Place]:
    """The cuts of a message that can be true, in order; the others are reported to ``on_bad``.

    Raises:
        WireError: the message holds fewer frames than it says, or does not say how many.
    """
    end = _frames_end(message.blob, count(message.header, "n"))
    found: list[Place] = []
    for position, raw in enumerate(frame.split(message.blob[:end])):
        try:
            found.append((position, cuts.view(raw)))
        except BadCut as exc:
            on_bad(exc)
    if cuts.are_sound([cut for _, cut in found]):
        return found
    sound: list[Place] = []
    for position, cut in found:
        problem = cuts.fault_of(cut)
        if problem is None:
            sound.append((position, cut))
        else:
            on_bad(BadCut(problem))
    return sound


def _frames_end(blob: memoryview, announced: int) -> int:
    """Where the last of ``count`` frames ends; a blob is padded to a multiple of 8, and so are frames."""
    end = 0
    for _ in range(announced):
        size = frame.peek_size(blob[end:])
        if size is None:
            raise WireError(f"CUTS announces {announced} cuts, its blob holds fewer")
        end += size
    return end


class _Waiting(NamedTuple):
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
        usage_table: UsageTable,
        planes: PlaneStates,
    ) -> None:
        self.unix_us = 0
        self._settings = settings
        self._scopes, self._policy, self._usage = scopes, policy, usage_table
        self._planes = planes
        self._tables, self._controls = tables, controls
        self._waiting: list[_Waiting] = []
        self._taken: list[Taken] = []
        self._received: list[int] = []
        self._shut: list[frozenset[str]] = []

    def put(self, cut: Cut, recv_us: int, offset_us: int, now_ns: int) -> None:
        """A cut came; it is entered with the next ``flush``, or at once with others if many wait."""
        self._waiting.append(_Waiting(cut, recv_us, offset_us, now_ns))
        if len(self._waiting) >= MOST_CUTS:
            self.flush()

    def flush(self) -> None:
        """Enter what waits."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        stale_us, inside = self._settings.stale_s * 1e6, set[str]()
        awaiting = [c.gate for c in self._controls.values() if c.gate.awaiting]
        gated = {b: c.gate for b, c in self._controls.items() if not c.gate.is_open or c.gate.in_force_ns}
        gateways = self._policy.gateways
        for cut, recv_us, offset_us, now_ns in waiting:
            gateway_id = cut.gateway_id
            table = self._tables.get(gateway_id)
            known = table is not None and table.state == "up" and gateway_id in gateways
            if not known or gateway_id in inside or len(inside) == MOST_CUTS:
                self._flush_batch()
                inside.clear()
            if table is None:
                table = self._tables[gateway_id] = GatewayTable(gateway_id, self._usage)
            if gateway_id not in gateways:
                self._policy.gateway_up(table, now_ns)
            if not table.accept(cut, recv_us, offset_us, stale_us, now_ns):
                continue
            if table.state != "up":  # a stalled gateway recovered: its statistics are the proof
                table.state, table.reason = "up", ""
                self._policy.gateway_up(table, now_ns)
            inside.add(gateway_id)
            began_ns = now_ns - (max(recv_us - table.end_unix_us, 0) + cut.duration_us) * 1000
            for gate in awaiting:
                gate.confirm(gateway_id, cut.throttle_gen, gateways[gateway_id].gen, began_ns)
            plan = self._scopes.plan(table, cut.counters[_STREAM_ID])
            if table.skipped:
                self._usage.resync(table.places)
                self._usage.streams.resync(table.numbers)
                self._scopes.table.windows.resync(plan.members)
            lacks, has_stopped = self._planes.check(table, cut, plan, now_ns)
            excused = self._excused(table.starved_ratio) if table.starved_ratio else 0.0
            self._taken.append(Taken(cut, table, plan, now_ns, excused, lacks, has_stopped))
            self._received.append(recv_us)
            here = gated.keys() & plan.backends if gated else ()
            self._shut.append(frozenset(b for b in here if not gated[b].is_evidence(began_ns)))
        self._flush_batch()

    def _excused(self, starved_ratio: float) -> float:
        """Share of a cut's I/Os that its gateway's own host may have made late; see ``verdicts``."""
        s = self._settings
        if starved_ratio < s.starved_least_ratio:
            return 0.0
        return min(s.starved_weight * starved_ratio, s.starved_most_ratio)

    def _flush_batch(self) -> None:
        if not self._taken:
            return
        taken, received, shut = self._taken, self._received, self._shut
        self._taken, self._received, self._shut = [], [], []
        self.unix_us = max(self.unix_us, *received)
        gateways = np.array([each.plan.gateway for each in taken])
        self._scopes.table.windows.spoke(gateways, np.array([each.now_ns for each in taken]))
        batch = CutBatch(taken)
        batch.measure(self._usage)
        confirm = self._policy.cut
        for each, recv_us in zip(taken, received, strict=True):
            cut, table, plan = each.cut, each.table, each.plan
            table.keep(cut, plan.rows)
            table.unknown_rows += len(plan.rows) - len(plan.known)
            if plan.blind.size:
                self._record_blind(each)
            confirm(table, cut.duration_us, recv_us)
            if "late" in cut.extra:
                late = parse_late(cut.extra["late"])
                self._policy.held_late({v: figures for v, figures in late.items() if table.carries(v)})
        pieces = batch.pieces()
        if pieces is not None:
            self._feed(batch, pieces, shut)

    def _record_blind(self, taken: Taken) -> None:
        """Of streams that cannot be measured for a promise it is known that they have I/O."""
        rows, members = taken.plan.blind
        done = taken.cut.counters[COL["reads"]] + taken.cut.counters[COL["writes"]]
        busy = members[done[rows] > 0]
        if len(busy):
            self._scopes.table.windows.record_blind(busy, taken.now_ns)

    def _feed(self, batch: CutBatch, pieces: Pieces, shut: list[frozenset[str]]) -> None:
        windows = self._scopes.table.windows
        over_all, on_backend = batch.targets()
        closed = _lines_shut(batch, shut)
        measured = pieces.is_measured
        if not measured.all():
            members = np.concatenate((over_all[~measured], on_backend[~measured]))
            windows.m_measures[members[members != NO_MEMBER]] = False
        silent = np.flatnonzero(pieces.says_nothing)
        if len(silent):
            for members in (over_all[silent], on_backend[silent]):
                known = members != NO_MEMBER
                windows.pass_over(members[known], pieces.now_ns[silent[known]])
        measured = measured & ~pieces.says_nothing
        feeds = (on_backend != NO_MEMBER) & measured
        if closed is not None:
            noted = np.flatnonzero(feeds & closed)
            windows.record_activity(on_backend[noted], noted, pieces)
            feeds &= ~closed
        shown, fed = np.flatnonzero((over_all != NO_MEMBER) & measured), np.flatnonzero(feeds)
        offset_us = np.repeat([each.table.offset_us for each in batch.taken], batch.lines)
        start_us = pieces.end_us - pieces.covered_us + offset_us
        windows.add_to_slices(over_all[shown], start_us[shown], shown, pieces)
        for targets, lines in ((over_all, shown), (on_backend, fed)):
            if len(lines):
                windows.add(targets[lines], lines if len(lines) < len(targets) else slice(None), pieces)


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

"""The loops of all backends: which of them take a step, what each decides, and which gates are shut.

A backend takes a step while caps of its loop are in force, while one of its promises is at risk, and once
more when it is calm again (what was noted of it is withdrawn then). The others cost nothing. A backend
whose loop is idle needs only the promise that would lead it; one that is active needs all of them.

So that a day on which everything is at risk at once does not make the whole server late, backends
take turns once they have more than ``MOST_VOLUMES`` volumes together; half of each is for those that are not
active yet, and a backend that is larger than that rests in between.

Modes: a promise is enforced or only observed (``PolicyManager.mode_of``). The loop of a backend works for
those enforced; for the others a loop that is thrown away says what it would do first.

A backend whose storage hangs or fails takes no step (``storage_faults``).

State: ``controls`` by backend, what was observed, whose turn it is. No clock, no I/O. Changed only by the
controller's one thread.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final

from pmdaemon.wire.rates import Rates
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.client_turnover import Turnover, carry_over, priority_of, turn_over
from sla_server.services.control.decision_log import (
    LoopBefore,
    loop_figures,
    observed_figures,
    step_kind,
)
from sla_server.services.control.decisions import Decision, DecisionKind, RaiseEvent, Reason, RecordThrottle
from sla_server.services.control.feed_forward import FeedForward, PrePosition
from sla_server.services.control.loop_context import LoopContext
from sla_server.services.control.loop_step import LoopStep
from sla_server.services.control.newcomers import Newcomers, together_text
from sla_server.services.control.scopes import Key, PromiseScope
from sla_server.services.control.sharing import Neighbour, allot, claims, cost_of
from sla_server.services.control.targets import client_of, is_glob, named, volume_of
from sla_server.services.control.throttle import LoopMemory, Throttle, new_id
from sla_server.services.control.unneeded import unneeded
from sla_server.services.control.usage import GatewayTable
from sla_server.services.control.victims import Need, Victim

MOST_PROMISES: Final = 64
"""Of an active backend looked at one by one; of more, arrays tell which of them decide."""
MOST_VOLUMES: Final = 4096
"""Of the backends of one tick: some 40 ms of work, a sixth of the time between two ticks."""

NAMED_AGAIN_S: Final = 3600.0
"""An hour: what no gateway can slow down is a matter of how the site is built."""


class Loops:
    """See the module."""

    def __init__(self, context: LoopContext) -> None:
        self.controls: dict[str, BackendControl] = {}
        self._settings, self._log = context.settings, context.log
        self._inventory, self._scopes, self._policy = context.inventory, context.scopes, context.policy
        self._faults = context.faults
        self._observed: dict[str, set[Key]] = {}
        self._helped: dict[str, set[Key]] = {}  # at risk while the loop acted, whichever of them led
        self._left_out: dict[str, dict[str, int]] = {}
        self._shadows: dict[str, BackendControl] = {}
        self._stepped: set[str] = set()
        self._turns = ["", ""]  # last one of each group that took a step
        self._tick = 0
        self._rests: dict[str, int] = {}
        self.forward = FeedForward(context)
        self._newcomers = Newcomers()

    def modes_changed(self) -> None:
        """A promise that is only observed now is helped no longer; where none is left, nothing is in force.

        Caps that were set for it go on for the others that are being helped.
        """
        self.forward.modes_changed()
        self._observed.clear()
        for backend, keys in self._helped.items():
            keys -= {key for key in keys if self._policy.mode_of(backend, key[0]) == "observe"}
        for backend, control in self.controls.items():
            helped = control.victims or {("", "")}
            kept = {key for key in helped if self._policy.mode_of(backend, key[0]) == "enforce"}
            if not kept:
                control.reset()
            elif kept != helped:
                control.victims = kept
                if control.lead is not None and control.lead.key not in kept:
                    control.lead = None
                self._policy.change_victim(backend, "/".join(min(kept)))

    def gateway_lost(self, table: GatewayTable) -> None:
        """It cannot confirm; the others go on. What is learned while it is away is forgotten afterwards."""
        backends = {table.backend_of(volume) for volume in (*table.exports, *table.use)}
        for backend, control in self.controls.items():
            control.gate.awaiting.pop(table.gateway_id, None)
            if backend in backends:
                control.lost(table.gateway_id)

    def restore(self, restored: Iterable[Throttle]) -> None:
        """Go on with the caps found in force."""
        by_backend: dict[str, list[Throttle]] = {}
        for throttle in restored:
            if throttle.source == "control":
                by_backend.setdefault(throttle.backend, []).append(throttle)
                if is_glob(throttle.target):
                    self._newcomers.restored(throttle.target)
                    self._inventory.take_together(throttle.target, True)
        for backend, throttles in by_backend.items():
            managed = {t.target: self._inventory.neighbour(t.target, None) for t in throttles}
            victims = {_key_of(t.victim) for t in throttles if t.victim}
            allowed = sum(t.rates.cost_per_s or 0.0 for t in throttles)
            self._control(backend).adopt(managed, victims, allowed, throttles[0].loop)

    def run(self, now_ns: int, unix_us: int) -> list[Decision]:
        """One step of every backend that is due."""
        if self._newcomers.together:
            targets = (target for control in self.controls.values() for target in control.managed)
            capped = set(filter(is_glob, targets))
            for target in self._newcomers.keep(capped, now_ns):
                self._inventory.take_together(target, False)
        table = self._scopes.table
        risky: dict[str, list[int]] = {}
        for row in table.risky_rows(now_ns, self._settings.lease_s):
            risky.setdefault(table.backends[row], []).append(row)
        active = {backend for backend, control in self.controls.items() if control.active}
        resting = {backend for backend, control in self.controls.items() if now_ns < control.quiet_until_ns}
        due = risky.keys() | active | resting
        outside: dict[str, list[PromiseScope]] = {}
        for row in table.outside_rows() if due else ():
            promise = table.promises[row]
            if promise is not None and table.backends[row] in due:
                scope = self._scopes.on(table.backends[row], promise.key)
                outside.setdefault(table.backends[row], []).append(scope)
        decisions: list[Decision] = []
        for backend in self._by_turns(due | self._stepped, active):
            fault_ns = self._faults.since_ns(backend)
            if fault_ns is not None:
                self._suspend(self._control(backend), now_ns - fault_ns, unix_us)
            if fault_ns is not None or self._faults.may_hang(backend):
                continue
            rows = risky.get(backend, [])
            scopes = self._leads(backend, rows)
            if backend in active or backend in resting:
                scopes = self._deciding(backend, scopes, now_ns)
            at_risk = {p.key for row in rows if (p := table.promises[row]) is not None}
            decisions += self._step(backend, scopes, outside.get(backend, ()), at_risk, now_ns, unix_us)
        self._stepped = set(due)
        for ready in self.forward.poll(self.controls, now_ns, unix_us):
            self._pre_position(ready, now_ns, unix_us)
        return decisions

    def shut_gates(
        self, waits: Mapping[str, Mapping[str, int]], tables: Mapping[str, GatewayTable], now_ns: int
    ) -> None:
        """Caps went out: windows begin again once the gateways show that they hold them."""
        shut = set()
        for volume, gens in waits.items():
            for gateway_id, gen in gens.items():
                backend = tables[gateway_id].backend_of(volume)
                self._control(backend).gate.wait_for(gateway_id, gen, now_ns)
                shut.add(backend)
        self.forget(shut)

    def faults_ended(self, backends: Iterable[str]) -> None:
        """The storage of these backends answers again: windows begin again, and no rest is for the fault."""
        for backend in backends:
            if (control := self.controls.get(backend)) is not None:
                control.end_rest()
            self.forget([backend])

    # Inside.

    def _control(self, backend: str) -> BackendControl:
        return self.controls.setdefault(backend, BackendControl(self._settings, backend))

    def helped(self, backend: str) -> set[Key]:
        """Promises that an active loop helps: those that asked, and those at risk while it acted."""
        control = self.controls.get(backend)
        if control is None or not control.active:
            return set()
        return control.victims | self._helped.get(backend, set())

    def _by_turns(self, due: set[str], active: set[str]) -> list[str]:
        """The backends that take a step in this tick, in order of name unless they are too many.

        Active ones go first, each group in turn; half of the room is for the others, as far as they need it
        in this tick, or they would wait until a loop ends. A backend that is larger than a whole turn rests
        after its step for as many turns as it was too large, and takes no more than half of the room.
        """
        names, size_of = sorted(due), self._inventory.volumes_on
        self._tick += 1
        if sum(size_of(name) for name in names) <= MOST_VOLUMES:
            return names
        half, room, chosen = MOST_VOLUMES // 2, MOST_VOLUMES, list[str]()
        names = [n for n in names if size_of(n) <= MOST_VOLUMES or self._rests.get(n, 0) <= self._tick]
        others = [name for name in names if name not in active]
        kept = min(half, sum(min(size_of(name), half) for name in others))
        groups = ([name for name in names if name in active], kept), (others, 0)
        for group, (members, reserved) in enumerate(groups):
            turn = self._turns[group]
            members = [*(n for n in members if n > turn), *(n for n in members if n <= turn)]
            taken, room = 0, room - reserved
            for name in members:
                size = size_of(name)
                if size > MOST_VOLUMES:
                    self._rests[name] = self._tick + math.ceil(size / MOST_VOLUMES)
                    size = half
                if size > room and taken:
                    break
                room -= size
                taken, self._turns[group] = taken + 1, name
                chosen.append(name)
            room = max(room, 0) + reserved
        return chosen

    def _leads(self, backend: str, rows: Sequence[int]) -> list[PromiseScope]:
        """Of promises at risk those that ask loudest, one enforced and one observed; unhelped ones last."""
        table, found = self._scopes.table, dict[str, tuple[tuple[bool, int, float, float], Key]]()
        unhelped, urgency, u = self._control(backend).effect.unhelped, self._inventory.urgency_of, table.u
        for row in rows:
            promise = table.promises[row]
            if promise is not None:
                key, mode = promise.key, self._policy.mode_of(backend, promise.sla)
                rank = key not in unhelped, int(promise.priority), urgency(key), u.item(row)
                if mode not in found or rank > found[mode][0]:
                    found[mode] = rank, key
        return [self._scopes.on(backend, key) for _, key in found.values()]

    def _deciding(self, backend: str, leads: list[PromiseScope], now_ns: int) -> list[PromiseScope]:
        """Promises of an active backend that decide its step: all of them, or of very many a few.

        These are those at risk that ask loudest, those that are being helped, and, for what is given back,
        one that is not clear, or those that are clear with the least room.
        """
        rows = self._scopes.table.rows_on(backend)
        if len(rows) <= MOST_PROMISES:
            return self._scopes.on_backend(backend)
        control, table = self._control(backend), self._scopes.table
        found = {scope.promise.key: scope for scope in leads}
        for key in control.victims:
            if (scope := self._scopes.find(backend, key)) is not None:
                found[key] = scope
        throttled = control.managed.keys()
        for order in table.least_room(rows, now_ns):
            for row in order.tolist():
                promise = table.promises[row]
                if promise is None or self._policy.mode_of(backend, promise.sla) == "observe":
                    continue
                scope = self._scopes.on(backend, promise.key)
                if self._inventory.targets_of(scope).isdisjoint(throttled):
                    found[promise.key] = scope
                    break
        return list(found.values())

    def _step(
        self,
        backend: str,
        scopes: Sequence[PromiseScope],
        above: Sequence[PromiseScope],
        at_risk: set[Key],
        now_ns: int,
        unix_us: int,
    ) -> list[Decision]:
        """One backend.

        Args:
            backend: its name.
            scopes: promises on it, at least those that may decide.
            above: promises that may be above their curve.
            at_risk: keys of those at risk.
            now_ns: monotonic.
            unix_us: wall clock.
        """
        victims = [self._inventory.victim(scope, now_ns) for scope in scopes]
        control = self._control(backend)
        is_observed = {v.key: self._policy.mode_of(backend, v.key[0]) == "observe" for v in victims}
        watched = [v for v in victims if is_observed[v.key] and v.need is Need.AT_RISK]
        victims = [v for v in victims if not is_observed[v.key]]
        decisions, neighbours = list[Decision](), dict[str, Neighbour]()
        if control.active or watched or any(v.need is Need.AT_RISK for v in victims):
            neighbours = self._inventory.neighbours(backend, above, self._control_caps())
        is_carried = control.active and self._part_with(control, victims, neighbours, unix_us)
        if watched:
            keys = {key for key in at_risk if self._policy.mode_of(backend, key[0]) == "observe"}
            keys |= {v.key for v in watched}
            decisions += self._observe(backend, watched, keys, neighbours, now_ns, unix_us)
        else:
            self._observed.pop(backend, None)
            if backend in self._shadows:
                self._shadows[backend].helpless_since_ns = None
        if is_carried:
            return decisions  # what is known is of clients that were free until now
        if control.active or now_ns < control.quiet_until_ns or any(v.need is Need.AT_RISK for v in victims):
            keys = {key for key in at_risk if self._policy.mode_of(backend, key[0]) == "enforce"}
            decisions += self._enforce(control, victims, keys, neighbours, now_ns, unix_us)
        else:
            control.helpless_since_ns = None
        return decisions

    def _enforce(
        self,
        control: BackendControl,
        victims: Sequence[Victim],
        at_risk: set[Key],
        neighbours: Mapping[str, Neighbour],
        now_ns: int,
        unix_us: int,
    ) -> list[Decision]:
        """One step of the loop, and what follows from it."""
        backend = control.backend
        if not control.active:
            self._helped.pop(backend, None)  # of a loop that has ended
        self._helped.setdefault(backend, set()).update(at_risk)
        control.gate.stop_waiting(self._settings.confirm_limit_s, now_ns)
        self._restore_returned(control)
        turned = turn_over(control, victims, neighbours, now_ns)
        if turned is not None:
            if not self._take_together(turned[0].join, now_ns):
                self._replace(control, turned[0], neighbours, turned[1])
            if turned[0].join:
                return []  # what is known is of clients that were free until now
        if control.active and control.gate.is_open:
            shares = partial(self._shares, control, neighbours)
            if found := unneeded(control, shares, victims, now_ns):
                text = f"{named(found)}: no promise needs that it is slowed down any more"
                self._let_go(control, found, shares(), Reason.WITHDRAWN, text, neighbours, unix_us)
        before, slowed = LoopBefore.of(control), frozenset(control.managed)
        step = control.step(victims, neighbours, now_ns)
        self._take_together(self._inventory.beside(slowed, control.managed.values()), now_ns)
        self._record(before, control, step, neighbours, unix_us)
        self.forward.learn(control, step, before, now_ns)
        left_out = self._name_left_out(backend, neighbours, now_ns) if step.changed or step.notice else []
        if control.active:
            self._actuate(control, neighbours, step, now_ns)
        elif step.changed and step.reason is not None:
            self._policy.release_control(backend, step.reason, step.text)
        return [*_notices(backend, step), *left_out]

    def _restore_returned(self, control: BackendControl) -> None:
        """Gateways that were lost, are back and hold what they should."""
        for gateway_id in list(control.away):
            found = self._policy.gateways.get(gateway_id)
            if found is not None and found.holds_its_caps:
                control.came_back(gateway_id)

    def _take_together(self, joined: Iterable[Neighbour], now_ns: int) -> bool:
        """Whether clients came under new names too often: their caps go over in the next step."""
        find = self._inventory
        came = {glob for n in joined if (glob := find.glob_of(n.volume))}
        found = self._newcomers.joined(sorted(came), now_ns)
        for target in found:
            find.take_together(target, True)
        return any(map(find.is_together, found))

    def _part_with(
        self,
        control: BackendControl,
        victims: Sequence[Victim],
        neighbours: Mapping[str, Neighbour],
        unix_us: int,
    ) -> bool:
        """Volumes that no cap of this loop can be for: out of reach, or on another backend now.

        Returns:
            Whether caps went over to clients that had none.
        """
        backend, find = control.backend, self._inventory
        moved = [v for v in control.managed if not find.is_on(v, backend)]
        if moved:
            text = f"{named(moved)} is no longer on backend {backend}"
            self._let_go(control, moved, None, Reason.WITHDRAWN, text, neighbours, unix_us)
        gone = [v for v in control.managed if not find.can_throttle(v)]
        if gone:
            text = f"no gateway can slow down {named(gone)}"
            self._let_go(control, gone, None, Reason.WITHDRAWN, text, neighbours, unix_us)
        # A cap of the whole volume would go on holding a promised client of it.
        others = [v for v in control.managed if not find.can_be_managed(v)]
        if not others:
            return False
        together = sorted({t for t in map(find.neighbour_of, others) if is_glob(t) and t not in others})
        text = f"{named(others)}: its clients are slowed down one by one from now on, or no longer so"
        if together:
            text = together_text(together)
        found = carry_over(control, others, victims, neighbours, together)
        if found.join:
            self._replace(control, found, neighbours, text)
        others = [v for v in others if v in control.managed]
        if others:
            self._let_go(control, others, None, Reason.WITHDRAWN, text, neighbours, unix_us)
        return bool(found.join)

    def _replace(
        self, control: BackendControl, found: Turnover, neighbours: Mapping[str, Neighbour], text: str
    ) -> None:
        """Other targets in the place of some, and caps for them."""
        control.replace(*found)
        lead, first = control.lead, min(map("/".join, control.victims), default="")
        victim = lead.name if lead is not None else first
        loop, shares = LoopMemory(control.start, control.ceiling), self._shares(control, neighbours)
        self._policy.release_volumes(control.backend, found.leave, Reason.WITHDRAWN, text)
        self._policy.set_control(control.backend, shares, Reason.FAIR_SHARE, text, victim, loop)

    def _let_go(
        self,
        control: BackendControl,
        volumes: Sequence[str],
        shares: Mapping[str, float] | None,
        reason: Reason,
        text: str,
        neighbours: Mapping[str, Neighbour],
        unix_us: int,
    ) -> None:
        """Slow down these volumes no longer; without any, the loop of the backend has ended."""
        before = LoopBefore.of(control)
        control.leave_out(volumes, shares)
        self._policy.release_volumes(control.backend, volumes, reason, text)
        if not control.active:
            self._record(before, control, LoopStep(True, reason, text), neighbours, unix_us)

    def _name_left_out(
        self, backend: str, neighbours: Mapping[str, Neighbour], now_ns: int
    ) -> list[Decision]:
        """Volumes that take a large part and that nothing can slow down; named once in ``NAMED_AGAIN_S``."""
        found = self._inventory.out_of_reach(backend, neighbours)
        named = self._left_out.setdefault(backend, {})
        new = [v for v in found if v not in named or now_ns - named[v] >= NAMED_AGAIN_S * 1e9]
        if not new:
            return []
        named |= dict.fromkeys(found, now_ns)
        why = "; ".join(f"{volume} {reason}" for volume, reason in found.items())
        text = f"backend {backend}: {why}. It is left out of what control shares"
        details = {"backend": backend, "volumes": sorted(found)}
        return [RaiseEvent("neighbour-out-of-reach", "warning", "backend", backend, text, details)]

    def _suspend(self, control: BackendControl, lasted_ns: int, unix_us: int) -> None:
        """Its storage hangs or fails: no step; what is in force stays for a lease, as it may answer soon."""
        if control.active and lasted_ns > self._settings.lease_s * 1e9:
            before, backend = LoopBefore.of(control), control.backend
            control.reset()
            text = f"backend {backend} {self._faults.kind_of(backend)}: no cap can help"
            self._policy.release_control(backend, Reason.STORAGE_FAULT, text)
            self._record(before, control, LoopStep(True, Reason.STORAGE_FAULT, text), {}, unix_us)

    def forget(self, backends: Iterable[str]) -> None:
        """The windows of these backends begin again: what they say is of other caps, or of a fault."""
        for backend in backends:
            self._scopes.table.reset(self._scopes.table.rows_on(backend))

    def _record(
        self,
        before: LoopBefore,
        control: BackendControl,
        step: LoopStep,
        neighbours: Mapping[str, Neighbour],
        unix_us: int,
        helped: Collection[Key] | None = None,
    ) -> None:
        """Keep what the step rested on, if it did anything; ``helped``: for whom a shadow would act."""
        if not (step.changed or step.notice):
            return
        lead, backend = step.lead or before.lead, control.backend
        scope = self._scopes.on(backend, lead.key) if lead is not None and step.lead is lead else None
        shares = self._shares(control, neighbours) if control.active else {}
        helped = self._helped.get(backend, ()) if helped is None else helped
        names = {"/".join(key) for key in helped}
        figures = partial(loop_figures, before, control, neighbours, shares, step.lead, scope, names)
        victim = lead.name if lead is not None else next(iter(before.victims), "")
        changes = [(step_kind(before, control, step), step.text)] if step.changed else []
        if step.notice and not (step.changed and step.notice == DecisionKind.UNATTRIBUTED):
            changes.append((DecisionKind(step.notice), step.notice_text))
        for kind, text in changes:
            reason = step.reason or ""
            self._log.add(
                kind, unix_us, backend=backend, victim=victim, reason=reason, text=text, figures=figures
            )

    def _pre_position(self, ready: PrePosition, now_ns: int, unix_us: int) -> None:
        """C before a burst that is expected; the loop goes on from there."""
        control = self._control(ready.backend)
        control.pre_position(
            ready.managed, ready.lead, ready.victims, ready.allowed, ready.loop, ready.r_free, now_ns
        )
        before = LoopBefore(False, 0.0, {}, None, ())
        neighbours = self._inventory.neighbours(ready.backend, (), self._control_caps())
        shares, scope = self._shares(control, neighbours), self._scopes.find(ready.backend, ready.lead.key)
        self._policy.set_control(ready.backend, shares, ready.reason, ready.text, ready.lead.name, ready.loop)
        figures = partial(loop_figures, before, control, neighbours, shares, ready.lead, scope)
        self._log.add(
            DecisionKind.PRE_POSITION,
            unix_us,
            backend=ready.backend,
            victim=ready.lead.name,
            reason=ready.reason,
            text=ready.text,
            figures=figures,
        )

    def _control_caps(self) -> dict[str, float | None]:
        return {volume: t.rates.cost_per_s for volume, t in self._policy.layers["control"].items()}

    def _actuate(
        self, control: BackendControl, neighbours: Mapping[str, Neighbour], step: LoopStep, now_ns: int
    ) -> None:
        shares = self._shares(control, neighbours)
        loop = LoopMemory(control.start, control.ceiling)
        if step.changed and step.reason is not None:
            victim = control.lead.name if control.lead is not None else ""
            self._policy.set_control(control.backend, shares, step.reason, step.text, victim, loop)
            return
        in_force = {
            v: t.rates.cost_per_s or 0.0 for v, t in self._policy.layers["control"].items() if v in shares
        }
        # Only a volume that waits is a reason to share again: every change makes the loop wait for evidence.
        ratio = 1 + self._settings.resplit_ratio
        starved = any(
            control.managed[v].queueing and shares[v] > ratio * cost for v, cost in in_force.items()
        )
        known = self._policy.gateways
        holders = [known[g] for v in shares for g in self._inventory.carriers_of(v) if g in known]
        issued_ns = max((holder.issued_ns for holder in holders), default=0)
        due = now_ns - issued_ns >= self._settings.resplit_min_s * 1e9
        if starved and due and control.gate.is_open:
            text = f"{control.allowed:.0f} weighted IOPS shared again by demand"
            self._policy.set_control(control.backend, shares, Reason.FAIR_SHARE, text, "", loop)

    def _shares(self, control: BackendControl, neighbours: Mapping[str, Neighbour]) -> dict[str, float]:
        wanted = claims(control.managed, priority_of(control), cost_of(neighbours), self._settings)
        return allot(control.allowed, control.managed, wanted)

    def _observe(
        self,
        backend: str,
        victims: Sequence[Victim],
        at_risk: set[Key],
        neighbours: Mapping[str, Neighbour],
        now_ns: int,
        unix_us: int,
    ) -> list[Decision]:
        """What the loop would do first; said once until the victims are no longer at risk."""
        if at_risk <= self._observed.get(backend, set()):
            return []
        # The loop of this backend may be at work for other promises.
        control = self._shadows.setdefault(backend, BackendControl(self._settings, backend))
        before, slowed = LoopBefore.of(control), frozenset(control.managed)
        step = control.step(victims, neighbours, now_ns)
        self._take_together(self._inventory.beside(slowed, control.managed.values()), now_ns)
        self._record(before, control, step, neighbours, unix_us, at_risk)
        decisions: list[Decision] = _notices(backend, step)
        if step.changed or step.notice:  # else the view has not settled yet
            decisions += self._name_left_out(backend, neighbours, now_ns)
            self._observed[backend] = at_risk | self._observed.get(backend, set())
        if step.changed and control.active and step.reason is not None:
            lead = control.lead
            shares = self._shares(control, neighbours)
            for volume, share in shares.items():
                throttle = Throttle(
                    new_id("observed", volume, unix_us),
                    volume_of(volume),
                    backend,
                    "control",
                    Rates(cost_per_s=share),
                    step.reason,
                    step.text,
                    victim=lead.name if lead is not None else "",
                    state="observed",
                    requested_us=unix_us,
                    client=client_of(volume),
                )
                decisions.append(RecordThrottle(throttle.row()))
                self._log.add(
                    DecisionKind.OBSERVED,
                    unix_us,
                    backend=backend,
                    volume=throttle.volume,
                    victim=throttle.victim,
                    reason=step.reason,
                    text=step.text,
                    figures=partial(observed_figures, throttle.throttle_id, share, neighbours[volume]),
                )
        control.reset()
        return decisions


def _notices(backend: str, step: LoopStep) -> list[Decision]:
    if not step.notice:
        return []
    severity = "critical" if step.violated else "warning"  # at risk is not broken yet
    details = {"backend": backend} | ({"promise": step.lead.name} if step.lead is not None else {})
    return [RaiseEvent(step.notice, severity, "backend", backend, step.notice_text, details)]


def _key_of(name: str) -> Key:
    sla, _, objective = name.partition("/")
    return sla, objective

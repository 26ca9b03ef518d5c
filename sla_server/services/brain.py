"""The brain of the services process: statistics in, decisions out.

It ties the pure parts together and owns all their state:

    cut --> GatewayTable (entity) --> Scopes --> windows of each promise --> LiveState --> violations
                  |                                      |
                  |                   gate open? --------+--> BackendControl --> PolicyManager --> SetCaps
                  |-- use of each volume ----------------------------^                 |
                  `-- generation and measured rate: proof of actuation ----------------'

Invariants: no clock, no I/O, no threads; the same calls give the same decisions. ``now_ns`` is the caller's
monotonic clock, ``unix_us`` its wall clock (stored times only). Windows for control are fed only while the
gate of their backend is open, so no decision rests on statistics made under other caps than those in force.

Thread: one thread calls everything. Source: SLA-MODEL.md 3; DESIGN.md 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pmdaemon.wire.cut import Cut
from sla_server.agreements.promise import Promise, VolumeClass
from sla_server.services.control import BackendControl, Need, Step, Victim
from sla_server.services.decisions import Decision, RaiseEvent, Reason, RecordThrottle
from sla_server.services.entity import GatewayTable, Stream, Taken
from sla_server.services.live_state import LiveState
from sla_server.services.live_view import snapshot
from sla_server.services.neighbours import Neighbour, claims
from sla_server.services.policy import PolicyManager, new_id
from sla_server.services.scopes import Key, Scopes
from sla_server.services.settings import ControlSettings
from sla_server.services.surroundings import Surroundings
from sla_server.services.throttles import Rates, Throttle
from sla_server.services.waterfill import spread, water_fill
from sla_server.services.windows import Piece, WindowTracker, piece_of


class Brain:
    """See the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.tables: dict[str, GatewayTable] = {}
        self.controls: dict[str, BackendControl] = {}
        self.live: dict[Key, LiveState] = {}
        self.threshold_version = 0
        self.scopes = Scopes(settings)
        self.around = Surroundings(settings)
        self.policy = PolicyManager(
            settings, self.around.standing_of, self.around.mean_cost_of, self.around.carriers_of
        )
        self._unix_us = 0
        self._now_ns = 0
        self._observed: dict[str, set[Key]] = {}

    # What is promised.

    def set_agreements(
        self, promises: Sequence[Promise], classes: Sequence[VolumeClass], threshold_version: int
    ) -> None:
        """The agreements in force, complete; promises that did not change keep their state."""
        self.around.set_classes(classes)
        self.threshold_version = threshold_version
        self.scopes.set_promises(promises, self.tables.values())
        old, self.live = self.live, {}
        for promise in promises:
            kept = old.get(promise.key)
            if kept is None or kept.promise != promise:
                kept = LiveState(self.settings, promise, WindowTracker(self.settings, promise))
            self.live[promise.key] = kept
        self._link_trackers()
        self._set_agreed_caps()

    def set_budget(self, key: Key, burn_1h: float, remaining_ratio: float) -> None:
        """Error budget of one objective: what its urgency follows."""
        self.around.budgets[key] = (burn_1h, remaining_ratio)

    def set_mode(self, mode: str) -> None:
        """Mode "observe" (decide and write down) or "enforce".

        Raises:
            ValueError: another word.
        """
        if mode not in ("observe", "enforce"):
            raise ValueError(f"mode {mode!r} is neither 'observe' nor 'enforce'")
        self.policy.mode = mode
        self._observed.clear()
        if mode == "observe":
            for control in self.controls.values():
                control.reset()

    # What is measured.

    def gateway_up(
        self, gateway_id: str, name: str, exports: Iterable[Mapping[str, Any]], now_ns: int
    ) -> None:
        """A gateway registered, or its exports changed."""
        table = self.tables.setdefault(gateway_id, GatewayTable(gateway_id))
        table.name, table.state, table.reason = name, "up", ""
        table.exports = {export["volume"]: export["backend"] for export in exports}
        for volume in table.exports:
            self.around.carries(volume, table)
        self.policy.gateway_up(table, now_ns)
        self._set_agreed_caps()

    def cuts_dropped(self, gateway_id: str, cuts: int) -> None:
        """How many cuts its spool has lost in its life, as it says; for the live view."""
        self.tables.setdefault(gateway_id, GatewayTable(gateway_id)).dropped_cuts = cuts

    def gateway_lost(self, gateway_id: str, reason: str, now_ns: int) -> None:
        """Its session ended; caps it holds lapse with their lease."""
        table = self.tables.get(gateway_id)
        if table is None:
            return
        table.state, table.reason = "lost", reason
        self.policy.gateway_lost(gateway_id)
        for control in self.controls.values():
            control.awaiting.pop(gateway_id, None)  # it cannot confirm; the others go on

    def add_streams(self, gateway_id: str, streams: Iterable[Mapping[str, Any]]) -> None:
        """Streams of a gateway, all or only new ones."""
        table = self.tables.setdefault(gateway_id, GatewayTable(gateway_id))
        rows = table.add_streams([Stream(s["id"], s["volume"], s["client"], s["backend"]) for s in streams])
        for row in rows:
            self.around.carries(table.streams[row].volume, table)
        if rows:
            self.scopes.extend(table, rows)
            self._link_trackers()
            self._set_agreed_caps()

    def add_cut(self, cut: Cut, recv_us: int, offset_us: int, live: bool, now_ns: int) -> None:
        """One cut, in order or not, for the first time or again.

        Args:
            cut: decoded.
            recv_us: server's wall clock at receipt.
            offset_us: what to add to the agent's wall clock.
            live: sent beside a backlog; used like any other here, the order decides.
            now_ns: monotonic.
        """
        table = self.tables.setdefault(cut.gateway_id, GatewayTable(cut.gateway_id))
        if cut.gateway_id not in self.policy.ports:
            self.policy.gateway_up(table, now_ns)
        taken = table.take(cut, recv_us, offset_us, self.settings.stale_s * 1e6, now_ns)
        if taken is None:
            return
        if table.state != "up":  # a stalled gateway recovered: its statistics are the proof
            table.state, table.reason = "up", ""
            self.policy.gateway_up(table, now_ns)
        self._unix_us = max(self._unix_us, recv_us)
        for control in self.controls.values():
            control.confirm(cut.gateway_id, cut.throttle_gen)
        self.policy.cut(table, cut.duration_us, recv_us)
        self._feed(taken, now_ns)

    def caps_state(self, gateway_id: str, gen: int, state: str, reason: str, at_unix_us: int) -> None:
        """A SET_CAPS was sent, confirmed or refused at ``at_unix_us``, by the server's wall clock."""
        self.policy.caps_state(gateway_id, gen, state, reason, at_unix_us)

    # What people and policies ask for.

    def manual_set(
        self,
        throttle_id: str,
        volume: str,
        *,
        cost_per_s: float | None = None,
        ops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        until_unix_us: int | None = None,
        who: str = "",
        reason: str = "",
    ) -> None:
        """An operator's throttle; it acts in both modes, from the next tick."""
        rates = Rates(cost_per_s, ops_per_s, bytes_per_s)
        text = reason or "set by an operator"
        backend = next((t.backend_of(volume) for t in self.around.carriers_of(volume).values()), "")
        self.policy.manual_set(
            Throttle(
                throttle_id,
                volume,
                backend,
                "manual",
                rates,
                Reason.MANUAL,
                text,
                who=who,
                expires_us=until_unix_us,
            )
        )

    def manual_release(
        self, volume: str | None = None, throttle_id: str | None = None, who: str = ""
    ) -> list[str]:
        """Release operators' throttles of a volume, or one by id; returns the ids released."""
        return self.policy.manual_release(volume, throttle_id, who)

    def set_policy_caps(self, version: int | None, caps: Mapping[str, float | None]) -> None:
        """The Spark policy's caps of the current hour, complete; None is no cap."""
        wanted = {volume: Rates(cost=cost) for volume, cost in caps.items() if cost is not None}
        self.policy.set_wanted("policy", wanted, version)

    def restore(self, throttle_rows: Iterable[dict[str, Any]]) -> None:
        """Caps in force according to SQL, after a restart and before the first gateway.

        They are believed, not issued; the gateways' next cuts confirm them or have them sent again.
        """
        restored = self.policy.restore(throttle_rows)
        if any(t.source != "manual" for t in restored):
            self.policy.mode = (
                "enforce"  # what was in force was so in that mode; the shell says so next if it changed
            )
        for backend in {t.backend for t in restored if t.source == "control"}:
            ours = [t for t in restored if t.source == "control" and t.backend == backend]
            managed = {t.volume: self.around.neighbour(t.volume, None) for t in ours}
            victims = {_key_of(t.victim) for t in ours if t.victim}
            allowed = sum(t.rates.cost or 0.0 for t in ours)
            self._control(backend).adopt(managed, victims, allowed)

    # What follows.

    def tick(self, now_ns: int, unix_us: int) -> list[Decision]:
        """Look at everything; call it some four times a second."""
        self._unix_us, self._now_ns = max(self._unix_us, unix_us), now_ns
        decisions: list[Decision] = []
        for key, state in self.live.items():
            event = state.update(self.around.r_on(key), now_ns)
            if event is not None:
                decisions.append(event)
        for backend in sorted(self.scopes.backends() | {b for b, c in self.controls.items() if c.active}):
            decisions += self._run(backend, now_ns, unix_us)
        plan = self.policy.decide(self.tables, now_ns, unix_us)
        self._shut_gates(plan.waits)
        return decisions + plan.decisions

    def snapshot(self, unix_us: int) -> dict[str, Any]:
        """The live view of docs/formats/messages.md, without compliance, processes, events and policy."""
        return snapshot(self.policy.mode, self.tables, self.live, self.policy, self.controls, unix_us)

    # Inside.

    def _control(self, backend: str) -> BackendControl:
        return self.controls.setdefault(backend, BackendControl(self.settings, backend))

    def _link_trackers(self) -> None:
        """The windows over all backends are the live states' own."""
        for scope in self.scopes.on_backend(""):
            scope.tracker = self.live[scope.promise.key].tracker

    def _set_agreed_caps(self) -> None:
        known = (
            self.around.volumes() | self.policy.layers["agreed"].keys()
        )  # restored ones come before gateways
        caps = {v: c for v in known if (c := self.around.standing_of(v).cap_iops) is not None}
        self.policy.set_wanted("agreed", {v: Rates(ops=cap) for v, cap in caps.items()})

    def _control_caps(self) -> dict[str, float | None]:
        return {volume: t.rates.cost for volume, t in self.policy.layers["control"].items()}

    def _feed(self, taken: Taken, now_ns: int) -> None:
        before: tuple[Key, npt.NDArray[np.bool_], Piece] | None = None
        for scope in self.scopes.at(taken.cut.gateway_id):
            rows = scope.rows_of(taken)
            # As a rule a promise has one backend and its two scopes the same streams: sum up once.
            if before is None or before[0] != scope.promise.key or not np.array_equal(before[1], rows):
                before = scope.promise.key, rows, piece_of(taken.cut, rows, scope.promise)
            piece = before[2]
            if (
                scope.backend
                and scope.backend in self.controls
                and not self.controls[scope.backend].gate_open
            ):
                scope.tracker.note(piece, now_ns)
            else:
                scope.tracker.add(piece, scope.needed(self.tables, now_ns), now_ns)

    def _run(self, backend: str, now_ns: int, unix_us: int) -> list[Decision]:
        scopes = self.scopes.on_backend(backend)
        victims = [self.around.victim(scope, now_ns) for scope in scopes]
        control = self._control(backend)
        if not control.active and not any(v.need is Need.AT_RISK for v in victims):
            self._observed.pop(backend, None)
            control.helpless_since_ns = None
            return []
        neighbours = self.around.neighbours(backend, scopes, self._control_caps())
        if self.policy.mode == "observe":
            return self._observe(backend, victims, neighbours, now_ns, unix_us)
        self._give_up_waiting(control, now_ns)
        step = control.step(victims, neighbours, now_ns)
        if control.active:
            self._actuate(control, neighbours, step)
        elif step.changed and step.reason is not None:
            self.policy.release_control(backend, step.reason, step.text)
        return _notices(backend, step)

    def _give_up_waiting(self, control: BackendControl, now_ns: int) -> None:
        """A gateway that does not confirm must not blind the loop; the policy manager reports it."""
        if control.awaiting and now_ns - control.waiting_ns > self.settings.confirm_limit_s * 1e9:
            control.awaiting.clear()

    def _actuate(self, control: BackendControl, neighbours: Mapping[str, Neighbour], step: Step) -> None:
        shares = self._shares(control, neighbours)
        if step.changed and step.reason is not None:
            victim = control.lead.name if control.lead is not None else ""
            self.policy.set_control(control.backend, shares, step.reason, step.text, victim)
            return
        held = {v: t.rates.cost or 0.0 for v, t in self.policy.layers["control"].items() if v in shares}
        # Only somebody who waits is a reason to share anew: every change makes the loop wait for evidence.
        ratio = 1 + self.settings.resplit_ratio
        starved = any(control.managed[v].queueing and shares[v] > ratio * cost for v, cost in held.items())
        ports = [
            self.policy.ports[g] for v in shares for g in self.around.carriers_of(v) if g in self.policy.ports
        ]
        settled_ns = max((port.issued_ns for port in ports), default=0)
        due = self._now_ns - settled_ns >= self.settings.resplit_min_s * 1e9
        if starved and due and control.gate_open:
            text = f"{control.allowed:.0f} cost/s shared anew by demand"
            self.policy.set_control(control.backend, shares, Reason.FAIR_SHARE, text, "")

    def _shares(self, control: BackendControl, neighbours: Mapping[str, Neighbour]) -> dict[str, float]:
        lead, managed = control.lead, control.managed
        priority = lead.priority if lead is not None else max(n.priority for n in managed.values())
        backend_cost = sum(n.cost_per_s for n in neighbours.values())
        wanted = claims(managed, priority, backend_cost, self.settings)
        return spread(control.allowed, water_fill(control.allowed, wanted), wanted)

    def _observe(
        self,
        backend: str,
        victims: Sequence[Victim],
        neighbours: Mapping[str, Neighbour],
        now_ns: int,
        unix_us: int,
    ) -> list[Decision]:
        """What the loop would do first; said once until the victims are no longer at risk."""
        at_risk = {v.key for v in victims if v.need is Need.AT_RISK}
        if at_risk <= self._observed.get(backend, set()):
            return []
        control = self._control(backend)
        step = control.step(victims, neighbours, now_ns)
        if step.changed or step.notice:  # else the view has not settled yet
            self._observed[backend] = at_risk | self._observed.get(backend, set())
        decisions: list[Decision] = _notices(backend, step)
        if step.changed and control.active and step.reason is not None:
            lead = control.lead
            shares = self._shares(control, neighbours)
            for volume, share in shares.items():
                throttle = Throttle(
                    new_id("observed", volume, unix_us),
                    volume,
                    backend,
                    "control",
                    Rates(cost=share),
                    step.reason,
                    step.text,
                    victim=lead.name if lead is not None else "",
                    state="observed",
                    requested_us=unix_us,
                )
                decisions.append(RecordThrottle(throttle.row()))
        control.reset()
        return decisions

    def _shut_gates(self, waits: Mapping[str, Mapping[str, int]]) -> None:
        """Caps went out: windows begin anew once the gateways show that they hold them."""
        for volume, gens in waits.items():
            for gateway_id, gen in gens.items():
                backend = self.tables[gateway_id].backend_of(volume)
                control = self._control(backend)
                control.wait_for(gateway_id, gen, self._now_ns)
                for scope in self.scopes.on_backend(backend):
                    scope.tracker.reset()


def _notices(backend: str, step: Step) -> list[Decision]:
    if not step.notice:
        return []
    severity = "critical" if step.violated else "warning"  # at risk is not broken yet
    return [RaiseEvent(step.notice, severity, "backend", backend, step.notice_text, {"backend": backend})]


def _key_of(name: str) -> Key:
    sla, _, objective = name.partition("/")
    return sla, objective

"""The loops of all backends: which of them take a step, what each decides, and which gates are shut.

A backend takes a step while caps of its loop are in force, while one of its promises is at risk, and once
more when it is calm again (what was noted of it is withdrawn then). The others cost nothing. A backend
whose loop is idle needs only the promise that would lead it; one that is active needs all of them.

So that a day on which everything is at risk at once does not make the whole server late, backends
take turns once they have more than ``MOST_VOLUMES`` volumes together; active ones come first.

State: ``controls`` by backend, what was observed, whose turn it is. No clock, no I/O. Changed only by the
controller's one thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pmdaemon.wire.rates import Rates
from sla_server.services.control.backend_loop import BackendControl, LoopStep, Need, Victim
from sla_server.services.control.decisions import Decision, RaiseEvent, Reason, RecordThrottle
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.policy_manager import PolicyManager, new_id
from sla_server.services.control.scopes import Key, PromiseScope, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour, claims, spread, water_fill
from sla_server.services.control.throttle import LoopMemory, Throttle
from sla_server.services.control.usage import GatewayTable

MOST_VOLUMES: Final = 4096
"""Of the backends of one tick: some 40 ms of work, a sixth of the time between two ticks."""


class Loops:
    """See the module."""

    def __init__(
        self,
        settings: ControlSettings,
        inventory: BackendInventory,
        scopes: PromiseScopes,
        policy: PolicyManager,
    ) -> None:
        self.controls: dict[str, BackendControl] = {}
        self._settings = settings
        self._inventory, self._scopes, self._policy = inventory, scopes, policy
        self._observed: dict[str, set[Key]] = {}
        self._stepped: set[str] = set()
        self._turn = ""

    def set_mode(self, mode: str) -> None:
        """In mode observe nothing is in force."""
        self._observed.clear()
        if mode == "observe":
            for control in self.controls.values():
                control.reset()

    def gateway_lost(self, gateway_id: str) -> None:
        """It cannot confirm; the others go on."""
        for control in self.controls.values():
            control.awaiting.pop(gateway_id, None)

    def restore(self, restored: Iterable[Throttle]) -> None:
        """Go on with the caps found in force."""
        by_backend: dict[str, list[Throttle]] = {}
        for throttle in restored:
            if throttle.source == "control":
                by_backend.setdefault(throttle.backend, []).append(throttle)
        for backend, throttles in by_backend.items():
            managed = {t.volume: self._inventory.neighbour(t.volume, None) for t in throttles}
            victims = {_key_of(t.victim) for t in throttles if t.victim}
            allowed = sum(t.rates.cost_per_s or 0.0 for t in throttles)
            self._control(backend).adopt(managed, victims, allowed, throttles[0].loop)

    def run(self, now_ns: int, unix_us: int) -> list[Decision]:
        """One step of every backend that is due."""
        table = self._scopes.table
        risky: dict[str, list[int]] = {}
        for row in table.risky_rows(now_ns, self._settings.lease_s):
            risky.setdefault(table.backends[row], []).append(row)
        active = {backend for backend, control in self.controls.items() if control.active}
        due = risky.keys() | active
        outside: dict[str, list[PromiseScope]] = {}
        for row in table.outside_rows() if due else ():
            promise = table.promises[row]
            if promise is not None and table.backends[row] in due:
                scope = self._scopes.on(table.backends[row], promise.key)
                outside.setdefault(table.backends[row], []).append(scope)
        decisions: list[Decision] = []
        for backend in self._by_turns(due | self._stepped, active):
            scopes: list[PromiseScope] = []
            if backend in active:
                scopes = self._scopes.on_backend(backend)
            elif backend in risky:
                scopes = [self._lead(backend, risky[backend])]
            at_risk = {p.key for row in risky.get(backend, ()) if (p := table.promises[row]) is not None}
            decisions += self._step(backend, scopes, outside.get(backend, ()), at_risk, now_ns, unix_us)
        self._stepped = set(due)
        return decisions

    def shut_gates(
        self, waits: Mapping[str, Mapping[str, int]], tables: Mapping[str, GatewayTable], now_ns: int
    ) -> None:
        """Caps went out: windows begin again once the gateways show that they hold them."""
        shut = set()
        for volume, gens in waits.items():
            for gateway_id, gen in gens.items():
                backend = tables[gateway_id].backend_of(volume)
                self._control(backend).wait_for(gateway_id, gen, now_ns)
                shut.add(backend)
        for backend in shut:
            for scope in self._scopes.on_backend(backend):
                scope.row.reset()

    # Inside.

    def _control(self, backend: str) -> BackendControl:
        return self.controls.setdefault(backend, BackendControl(self._settings, backend))

    def _by_turns(self, due: set[str], active: set[str]) -> list[str]:
        """The backends that take a step in this tick, in order of name unless they are too many."""
        names = sorted(due)
        size_of = self._inventory.volumes_on
        if sum(size_of(name) for name in names) <= MOST_VOLUMES:
            return names
        later = [name for name in names if name > self._turn]
        names = [name for name in (*later, *names[: len(names) - len(later)]) if name not in active]
        chosen, room = sorted(active & due), MOST_VOLUMES
        room -= sum(size_of(name) for name in chosen)
        for index, name in enumerate(names):
            room -= size_of(name)
            if room < 0 and index:
                break
            self._turn = name
            chosen.append(name)
        return chosen

    def _lead(self, backend: str, rows: Sequence[int]) -> PromiseScope:
        """Of promises at risk the one that asks loudest, as ``control`` ranks them."""
        table, found = self._scopes.table, list[tuple[tuple[int, float, float], Key]]()
        for row in rows:
            promise = table.promises[row]
            if promise is not None:
                rank = int(promise.priority), self._inventory.urgency_of(promise.key), table.u.item(row)
                found.append((rank, promise.key))
        return self._scopes.on(backend, max(found, key=lambda each: each[0])[1])

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
        if not control.active and not any(v.need is Need.AT_RISK for v in victims):
            self._observed.pop(backend, None)
            control.helpless_since_ns = None
            return []
        neighbours = self._inventory.neighbours(backend, above, self._control_caps())
        if self._policy.mode == "observe":
            at_risk = at_risk | {v.key for v in victims if v.need is Need.AT_RISK}
            return self._observe(backend, victims, at_risk, neighbours, now_ns, unix_us)
        self._give_up_waiting(control, now_ns)
        step = control.step(victims, neighbours, now_ns)
        if control.active:
            self._actuate(control, neighbours, step, now_ns)
        elif step.changed and step.reason is not None:
            self._policy.release_control(backend, step.reason, step.text)
        return _notices(backend, step)

    def _control_caps(self) -> dict[str, float | None]:
        return {volume: t.rates.cost_per_s for volume, t in self._policy.layers["control"].items()}

    def _give_up_waiting(self, control: BackendControl, now_ns: int) -> None:
        """A gateway that does not confirm must not blind the loop; the policy manager reports it."""
        if control.awaiting and now_ns - control.waiting_ns > self._settings.confirm_limit_s * 1e9:
            control.awaiting.clear()

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
        if starved and due and control.gate_open:
            text = f"{control.allowed:.0f} cost/s shared again by demand"
            self._policy.set_control(control.backend, shares, Reason.FAIR_SHARE, text, "", loop)

    def _shares(self, control: BackendControl, neighbours: Mapping[str, Neighbour]) -> dict[str, float]:
        lead, managed = control.lead, control.managed
        priority = lead.priority if lead is not None else max(n.priority for n in managed.values())
        backend_cost = sum(n.cost_per_s for n in neighbours.values())
        wanted = claims(managed, priority, backend_cost, self._settings)
        return spread(control.allowed, water_fill(control.allowed, wanted), wanted)

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
                    Rates(cost_per_s=share),
                    step.reason,
                    step.text,
                    victim=lead.name if lead is not None else "",
                    state="observed",
                    requested_us=unix_us,
                )
                decisions.append(RecordThrottle(throttle.row()))
        control.reset()
        return decisions


def _notices(backend: str, step: LoopStep) -> list[Decision]:
    if not step.notice:
        return []
    severity = "critical" if step.violated else "warning"  # at risk is not broken yet
    return [RaiseEvent(step.notice, severity, "backend", backend, step.notice_text, {"backend": backend})]


def _key_of(name: str) -> Key:
    sla, _, objective = name.partition("/")
    return sla, objective

"""The controller of the services process: statistics in, decisions out.

It ties the pure parts together and owns all their state:

    cut --> GatewayTable --> PromiseScopes --> windows of each promise --> LiveState --> violations
                  |                                      |
                  |                   gate open? --------+--> Loops (control) --> PolicyManager --> SetCaps
                  |-- use of each volume ----------------------------^                 |
                  `-- generation and measured rate: proof of actuation ----------------'

Cuts wait until the next question (a tick as a rule) and are then entered as batches (``cut_intake``), with
the result of one after another; a tick looks at the promises that were fed since the last one and at the
backends where something is at risk or in force.

Invariants: no clock, no I/O, no threads; the same calls give the same decisions. ``now_ns`` is the caller's
monotonic clock, ``unix_us`` its wall clock (stored times only). Windows for control are fed only while the
gate of their backend is open, so no decision rests on statistics made under other caps than those in force.

Thread: one thread calls everything. Source: SLA-MODEL.md 3; DESIGN.md 7.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pmdaemon.wire.cut import Cut
from pmdaemon.wire.rates import Rates
from sla_server.agreements.promise import Promise, VolumeClass
from sla_server.explanation.words import listed
from sla_server.services.control.agreed_caps import AgreedCaps
from sla_server.services.control.cut_intake import CutIntake
from sla_server.services.control.decision_log import DecisionLog
from sla_server.services.control.decisions import Decision, Reason
from sla_server.services.control.groups import MOST_GROUPS, terms_of_all
from sla_server.services.control.inventory import BackendInventory
from sla_server.services.control.live_state import LiveState
from sla_server.services.control.live_view import snapshot
from sla_server.services.control.loop_context import LoopContext
from sla_server.services.control.loops import Loops
from sla_server.services.control.manual import ManualEffect, effect
from sla_server.services.control.manual_causes import ManualCauses
from sla_server.services.control.planes import PlaneStates
from sla_server.services.control.policy_manager import PolicyManager
from sla_server.services.control.scopes import Key, PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import CODE, QUIET, STATES
from sla_server.services.control.storage_faults import StorageFaults
from sla_server.services.control.targets import named, target_of
from sla_server.services.control.throttle import LEAST, Throttle
from sla_server.services.control.usage import GatewayTable, KnownStream, UsageTable, backend_among
from sla_server.services.control.whole_clients import MOST_CLIENT_CAPS, WholeClients

BESIDE_THE_PATH: Final = frozenset(("host",))
"""Sources of statistics whose volumes no cap of ours reaches."""
LIMITED_ALONE: Final = frozenset(("cgroup", "qemu"))
"""Sources of volumes whose caps the kernel or QEMU enforces: each by itself, no group."""
MOST_NAMED: Final = 10
"""Clients of a volume that a refusal lists."""
Headers = Iterable[Mapping[str, Any]]
NO_NUMBERS: Final[Mapping[str, float]] = {}


class Controller:
    """See the module."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.tables: dict[str, GatewayTable] = {}
        self.live: dict[Key, LiveState] = {}
        self.inventory = BackendInventory(settings)
        self.scopes = PromiseScopes(settings, self.inventory.r_on)
        self.log = DecisionLog()
        self.policy = PolicyManager(
            settings,
            self.inventory.terms_of,
            self.inventory.mean_cost_of,
            self.inventory.carriers_of,
            log=self.log,
            uses=self.inventory.uses,
        )
        self.log.mode_of = self.policy.mode_of
        self._usage = UsageTable(settings.silent_s)
        self.planes = PlaneStates(self._usage.streams, settings.silent_s)
        self.faults = StorageFaults(settings, self._usage)
        context = LoopContext(settings, self.inventory, self.scopes, self.policy, self.faults, self.log)
        self.loops = Loops(context)
        self._intake = CutIntake(
            settings, self.scopes, self.policy, self.tables, self.loops.controls, self._usage, self.planes
        )
        self._agreed = AgreedCaps(self.inventory, self.policy)
        self.manual_causes = ManualCauses(settings, self.inventory, self.scopes, self.policy)
        self.whole_clients = WholeClients(self.inventory, self.policy, self.tables, self._effect)
        self._excluded: dict[str, str] = {}
        self._ticked_ns = 0
        self._closing: dict[Key, int] = {}  # open episodes of promises that are kept, and when they close

    @property
    def last_cut_us(self) -> int:
        """When the cut came that was received last, by the server's wall clock; 0: none has come yet."""
        return self._intake.unix_us

    # What is promised.

    def set_agreements(self, promises: Sequence[Promise], classes: Sequence[VolumeClass]) -> None:
        """The agreements in force, complete; promises that did not change keep their state."""
        self._intake.flush()
        self.inventory.set_classes(classes)
        self.loops.forward.promises_changed(self.scopes.set_promises(promises, self.tables.values()))
        old, self.live = self.live, {}
        for promise in promises:
            kept = old.get(promise.key)
            if kept is not None and promise.differs_in_volumes(kept.promise):
                kept.promise = promise  # its labels choose others now: episodes go on
            elif kept is None or kept.promise != promise:
                kept = LiveState(self.settings, promise, excluded=self._excluded.get(promise.sla, ""))
            self.live[promise.key] = kept
        self._link_rows(self.live)
        self.policy.carriers_changed(self.inventory.together)  # their named clients may be others
        self._agreed.follow(complete=True)

    def set_budget(self, key: Key, burn_1h: float, remaining_ratio: float) -> None:
        """Error budget of one objective: what its urgency follows."""
        if self.inventory.budgets.get(key) == (burn_1h, remaining_ratio):
            return
        self._intake.flush()
        self.inventory.budgets[key] = (burn_1h, remaining_ratio)
        self.scopes.set_r_on(key)

    def set_excluded(self, reasons: Mapping[str, str]) -> None:
        """Agreements of which nothing is promised at present, and why; complete."""
        if reasons == self._excluded:
            return
        self._intake.flush()
        changed = reasons.keys() | self._excluded.keys()
        self._excluded = dict(reasons)
        for key, state in self.live.items():
            if key[0] in changed:
                state.excluded = reasons.get(key[0], "")
        self.scopes.set_excluded(reasons.keys())

    def set_mode(self, mode: str) -> None:
        """Mode "observe" (decide and write down) or "enforce".

        Raises:
            ValueError: another word.
        """
        if mode not in ("observe", "enforce"):
            raise ValueError(f"mode {mode!r} is neither 'observe' nor 'enforce'")
        self._intake.flush()
        self.policy.mode = mode
        self._modes_changed()

    def backends(self) -> list[str]:
        """Names of the backends that some gateway has volumes on."""
        return sorted(self.inventory.backends())

    def volumes_by_backend(self) -> Mapping[str, Collection[str]]:
        """Volumes that some gateway carries, by backend."""
        return self.inventory.backends()

    def set_backend_modes(self, modes: Mapping[str, str]) -> None:
        """Backends with a mode of their own, complete; it takes precedence over ``set_mode``."""
        if dict(modes) == self.policy.backend_modes:
            return
        self._intake.flush()
        self.policy.backend_modes = dict(modes)
        self._modes_changed()

    def set_policy_stage(self, mode: str, modes: Mapping[str, str]) -> None:
        """Where the policy's caps hold: on all backends, and on those with a stage of their own, complete."""
        stage = self.policy.stage
        if (mode, dict(modes)) != (stage.mode, stage.modes):
            stage.mode, stage.modes = mode, dict(modes)
            self.policy.modes_changed()

    def compare_policy(self, now_ns: int) -> None:
        """Compare uses with the policy's caps that do not hold; once a second."""
        manager = self.policy

        def holds(volume: str) -> bool:
            return manager.enforces("policy", volume)

        def place_of(volume: str) -> tuple[str, float]:
            return backend_among(self.inventory.carriers_of(volume), volume), self.inventory.cost_of(volume)

        caps = manager.wanted["policy"]
        manager.stage.compare(manager.policy_version, caps, holds, place_of, now_ns)

    def set_agreement_modes(self, modes: Mapping[str, str]) -> None:
        """Agreements with a mode of their own, complete; it takes precedence over that of a backend."""
        if modes != self.policy.agreement_modes:
            self._intake.flush()
            self.policy.agreement_modes = dict(modes)
            self._modes_changed()

    def _modes_changed(self) -> None:
        self.policy.modes_changed()
        self.loops.modes_changed()
        self._agreed.modes_changed()

    # What is measured.

    def set_features(self, gateway_id: str, features: Iterable[str]) -> None:
        """What the agent of a gateway can do, as it says before it is up."""
        self._table(gateway_id).set_features(frozenset(features))

    def gateway_up(
        self, gateway_id: str, name: str, exports: Headers, now_ns: int, *, is_announced: bool = True
    ) -> None:
        """A gateway registered, or its exports changed; not ``is_announced``: it had, before this process."""
        table = self._table(gateway_id)
        table.name, table.state, table.reason, table.is_announced = name, "up", "", is_announced
        self.scopes.table.set_up(gateway_id, True)
        exports = list(exports)
        self.policy.carriers_changed(table.only_seen | table.refused)
        moved = table.set_exports({export["volume"]: export["backend"] for export in exports})
        table.only_seen = frozenset(e["volume"] for e in exports if e.get("source") in BESIDE_THE_PATH)
        table.no_groups = frozenset(e["volume"] for e in exports if e.get("source") in LIMITED_ALONE)
        table.refused = frozenset()  # another set of exports: the next acknowledgement says again
        if moved:
            self.scopes.move(table, moved, self.tables)
        self.planes.exports_changed(table)
        self.scopes.replan(gateway_id)
        self._locate(table, table.exports)
        self.policy.gateway_up(table, now_ns)
        self._agreed.follow(table.exports)

    def gateway_away(self, gateway_id: str, name: str, streams: Headers) -> None:
        """A gateway that was lost before this process began: what its streams do is not known."""
        table = self._table(gateway_id)
        table.name, table.state, table.reason = name, "lost", "not heard of since the server started"
        self.scopes.table.set_up(gateway_id, False)
        self.add_streams(gateway_id, streams)

    def cuts_dropped(self, gateway_id: str, cuts: int) -> None:
        """How many cuts its spool has lost in its life, as it says; for the live view."""
        self._table(gateway_id).dropped_cuts = cuts

    def gateway_lost(self, gateway_id: str, reason: str, now_ns: int) -> None:
        """Its session ended; caps it holds lapse with their lease."""
        self._intake.flush()
        table = self.tables.get(gateway_id)
        if table is None:
            return
        table.state, table.reason = "lost", reason
        self.scopes.table.set_up(gateway_id, False)
        self.policy.gateway_lost(gateway_id, now_ns)
        self.loops.gateway_lost(table)
        self._move(v for v in {*table.exports, *table.use} if self.inventory.locate(v))
        self._agreed.follow({*table.exports, *table.use})

    def add_streams(self, gateway_id: str, streams: Headers) -> None:
        """Streams of a gateway, all or only new ones."""
        table = self._table(gateway_id)
        known = [KnownStream(s["id"], s["volume"], s["client"], s["backend"]) for s in streams]
        elsewhere = {s.volume: s.backend for s in known if s.volume not in table.exports}
        if elsewhere and (moved := table.set_backends(elsewhere)):
            self.scopes.move(table, moved, self.tables)
        rows = table.add_streams(known)
        self._locate(table, {table.streams[row].volume for row in rows} | elsewhere.keys())
        if rows:
            self._link_rows(self.scopes.extend(table, rows))
            self.policy.streams_seen(table, [table.streams[row] for row in rows])
            self._agreed.follow({table.streams[row].volume for row in rows})

    def forget_volumes(self, gateway_id: str, volumes: Collection[str]) -> None:
        """A gateway carries these volumes no more: what it says of them does not count."""
        table = self._table(gateway_id)
        if not any(table.carries(volume) for volume in volumes):
            return
        rows = table.forget(volumes)
        self._link_rows(self.scopes.leave(table, rows, self.tables))
        for volume in volumes:
            self.inventory.leaves(volume, table)
        for throttle in self.policy.index.of_volumes(volumes):
            throttle.forget(gateway_id)
        self.policy.index.changed()  # its next set of caps is without them
        self._agreed.follow(volumes)

    def add_cut(self, cut: Cut, recv_us: int, offset_us: int, live: bool, now_ns: int) -> None:
        """One cut, in order or not, for the first time or again.

        Args:
            cut: decoded.
            recv_us: server's wall clock at receipt.
            offset_us: what to add to the agent's wall clock.
            live: sent beside a backlog; used like any other here, the order decides.
            now_ns: monotonic.
        """
        self._intake.put(cut, recv_us, offset_us, now_ns)

    def caps_state(
        self,
        gateway_id: str,
        gen: int,
        state: str,
        reason: str,
        at_unix_us: int,
        refused: Iterable[str] = (),
    ) -> None:
        """A SET_CAPS was sent, confirmed or refused at ``at_unix_us``, by the server's wall clock.

        ``refused``: volumes of it whose caps the gateway did not take, as it does not serve them.
        """
        self._intake.flush()
        table = self.tables.get(gateway_id)
        if table is not None and state != "sent" and (names := frozenset(refused)) - table.refused:
            table.refused |= names
            self.policy.volumes_refused(table, names)
            self._agreed.follow(names)
        self.policy.caps_state(gateway_id, gen, state, reason, at_unix_us)

    # What people and policies ask for.

    def can_throttle(self, volume: str) -> bool:
        """Whether a gateway that carries it is in its I/O path and takes caps; True while none is known."""
        return self.inventory.can_throttle(volume)

    def why_no_client_cap(self, volume: str, client: str) -> tuple[str, str] | None:
        """Why one client of a volume cannot be capped now, and what to do; None if it can."""
        tables = self.inventory.carriers_of(volume).values()
        known = sorted({name for table in tables for name in self.inventory.uses.clients(table, volume)})
        if client not in known:
            named = f"; it has {listed(known, MOST_NAMED)}" if known else ", nor any other"
            return f"volume {volume!r} has no client {client!r}{named}", "Name a client that uses the volume"
        old = sorted(t.name or t.gateway_id for t in tables if t.state == "up" and t.caps_clients is False)
        if not old:
            by_hand = sum(bool(t.client) for t in self.policy.layers["manual"].values())
            if by_hand < MOST_CLIENT_CAPS:
                return None
            return f"{by_hand} clients are throttled by hand, which is the most", "Release some of them"
        problem = f"the agent of {', '.join(old)} caps whole volumes only, no single clients"
        return problem, "Upgrade it, or throttle the whole volume"

    def why_no_group_cap(self, group: str, volumes: Iterable[str]) -> tuple[int, str, str] | None:
        """Why these volumes cannot share a cap now: (status, problem, what to do); None if they can."""
        for volume in sorted(volumes):
            tables = self.inventory.carriers_of(volume).values()
            other = self.policy.groups.of_volume(volume)
            if other not in ("", group):
                problem = f"volume {volume!r} is in group {other!r}, and a volume is in one group at a time"
                return 409, problem, f"Leave it out, or release that: sla throttle release --group {other}"
            if any(volume in table.no_groups for table in tables):
                problem = f"volume {volume!r} is limited by its host's kernel or by QEMU, which share no caps"
                return 422, problem, "Throttle it by itself"
            old = [t.name or t.gateway_id for t in tables if t.state == "up" and t.caps_groups is False]
            if old:
                problem = f"the agent of {named(old)}, which has volume {volume!r}, caps no groups"
                return 422, problem, "Upgrade it, or throttle the volumes one by one"
        if group not in self.policy.groups.names() and len(self.policy.groups.names()) >= MOST_GROUPS:
            return 422, f"{MOST_GROUPS} groups are throttled, which is the most", "Release some of them"
        return None

    def group_effect(self, weights: Mapping[str, float], rates: Rates) -> ManualEffect:
        """What a cap of a group would do to the promises of its volumes while all use their shares."""
        terms = terms_of_all(weights, self.inventory.terms_of)
        mean_cost = max(map(self.inventory.mean_cost_of, weights))
        least = Rates(terms.floor_iops, terms.floor_bytes_per_s, terms.floor_cost(mean_cost))
        held = (rates.at_least(least) if terms.agreed else rates).at_least(LEAST)
        total, broken = sum(weights.values()), list[str]()
        for volume, weight in weights.items():
            share = held.scaled(weight / total)
            found = self._effect(share, share, volume)
            broken += (f"{promise} for {volume}" for promise in found.broken)
        return ManualEffect(held, held.differs(rates, 0.001), tuple(broken))

    def manual_effect(
        self,
        volume: str,
        *,
        cost_per_s: float | None = None,
        ops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        burst_s: float | None = None,
        client: str = "",
    ) -> ManualEffect:
        """What such a throttle would do to the promises of the volume itself; nothing is set.

        Of one of a ``client``: to those that cover it.
        """
        asked = Rates(ops_per_s, bytes_per_s, cost_per_s, burst_s)
        return self._effect(asked, self.policy.manual_held(target_of(volume, client), asked), volume, client)

    def _effect(self, asked: Rates, held: Rates, volume: str, client: str = "") -> ManualEffect:
        known = self.inventory.volumes()
        covering = [
            state.promise
            for state in self.live.values()
            if (state.promise.covers(volume, client) if client else state.promise.has_volume(volume))
        ]
        sizes = [sum(promise.has_volume(name) for name in known) for promise in covering]
        mean_cost = self.inventory.mean_cost_of(target_of(volume, client))
        return effect(asked, held, mean_cost, zip(covering, sizes, strict=True))

    def manual_set(
        self,
        throttle_id: str,
        volume: str,
        *,
        cost_per_s: float | None = None,
        ops_per_s: float | None = None,
        bytes_per_s: float | None = None,
        burst_s: float | None = None,
        until_unix_us: int | None = None,
        who: str = "",
        reason: str = "",
        client: str = "",
        group: str = "",
        weights: Mapping[str, float] = NO_NUMBERS,
    ) -> None:
        """An operator's throttle, in both modes and from the next tick.

        Of a volume, of one ``client`` of it, of a ``group`` with the ``weights`` of its volumes, or of a
        whole ``client``, without a volume.
        """
        if client and not volume:
            weights = self.whole_clients.weights(client)
        rates = Rates(ops_per_s, bytes_per_s, cost_per_s, burst_s)
        text = reason or "set by an operator"
        volumes = (volume,) if volume else weights
        backends = {backend_among(self.inventory.carriers_of(v), v) for v in volumes}
        backend = backends.pop() if len(backends) == 1 else ""
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
                client=client,
                group=group,
                weights=dict(weights),
            )
        )

    def manual_release(
        self,
        volume: str | None = None,
        throttle_id: str | None = None,
        who: str = "",
        client: str | None = None,
        group: str | None = None,
    ) -> list[str]:
        """Release operators' throttles of a volume, group or client, or one by id; returns the ids."""
        return self.policy.manual_release(volume, throttle_id, who, client, group)

    def set_policy_caps(
        self, version: int | None, caps: Mapping[str, float | None], bursts: Mapping[str, float] = NO_NUMBERS
    ) -> None:
        """The Spark policy's caps of this hour, complete; None is no cap. ``bursts``: ``Rates.burst_s``."""
        capped = {volume: cost for volume, cost in caps.items() if cost is not None}
        wanted = {v: Rates(cost_per_s=cost, burst_s=bursts.get(v)) for v, cost in capped.items()}
        self.policy.set_wanted("policy", wanted, version)

    def set_coming_caps(self, caps: Mapping[str, float | None], from_unix_us: int) -> None:
        """The Spark policy's caps of the hour that begins at ``from_unix_us``, complete; None is no cap."""
        self.loops.forward.set_coming_caps(caps, from_unix_us)

    def restore(self, throttle_rows: Iterable[dict[str, Any]]) -> None:
        """Caps in force according to SQL, after a restart and before the first gateway.

        They are believed, not issued; the gateways' next cuts confirm them or have them sent again.
        """
        self._intake.flush()
        restored = self.policy.restore(throttle_rows)
        self._agreed.restored()
        if any(t.source != "manual" for t in restored):
            # What was in force was so in that mode; the process sets the mode next.
            self.policy.mode = "enforce"
        self.loops.restore(restored)

    # What follows.

    def tick(self, now_ns: int, unix_us: int) -> list[Decision]:
        """Look at everything; call it some four times a second."""
        self._ticked_ns = now_ns
        self._intake.flush()
        events, ended = self.faults.check(self.tables, now_ns)
        self.loops.faults_ended(ended)
        decisions = [*self._assess_promises(now_ns), *events]
        decisions += self.manual_causes.check(now_ns)
        decisions += self.manual_causes.without_known(self.loops.run(now_ns, unix_us))
        plan = self.policy.decide(self.tables, now_ns, unix_us)
        self.loops.shut_gates(plan.waits, self.tables, now_ns)
        return [*decisions, *self._agreed.events(), *plan.decisions, *self.log.take()]

    def snapshot(self, unix_us: int, most: int = 200) -> dict[str, Any]:
        """The live view of docs/formats/messages.md, without compliance, processes, events and policy.

        Args:
            unix_us: wall clock.
            most: rows of each kind; those at risk or with the most use are shown.
        """
        self._intake.flush()
        view = snapshot(
            self.policy.mode,
            self.tables,
            self.live,
            self.scopes,
            self.policy,
            self.loops.controls,
            self.loops.helped,
            self.inventory,
            self.faults,
            self._usage,
            self.planes,
            most,
            unix_us,
            self._ticked_ns - round(self.settings.silent_s * 1e9),
        )
        stage = self.policy.stage.view(most)
        return {**view, "policy_stage": stage, "feed_forward": self.loops.forward.figures()}

    def promise_states(self, keys: Iterable[Key]) -> dict[Key, dict[str, Any]]:
        """``state`` and ``u`` of these objectives, as in the live view; those not in force are left out.

        ``is_open``: the controller has an episode of it open, also while the promise is kept.
        """
        return {
            key: {
                "state": self.live[key].state,
                "u": self.live[key].signal.u,
                "is_open": self.live[key].violating,
            }
            for key in keys
            if key in self.live
        }

    # Inside.

    def _table(self, gateway_id: str) -> GatewayTable:
        self._intake.flush()
        table = self.tables.get(gateway_id)
        if table is None:
            table = self.tables[gateway_id] = GatewayTable(gateway_id, self._usage)
        return table

    def _locate(self, table: GatewayTable, volumes: Iterable[str]) -> None:
        """A gateway carries these volumes; what is about them goes to the backend they are on."""
        self._move(v for v in volumes if self.inventory.carries(v, table))

    def _move(self, volumes: Iterable[str]) -> None:
        moved = {v: backend_among(self.inventory.carriers_of(v), v) for v in volumes}
        if moved:
            self.policy.moved(moved)

    def _link_rows(self, keys: Iterable[Key]) -> None:
        """A live state is about the windows over all backends."""
        for key in keys:
            scope, live = self.scopes.over_all(key), self.live[key]
            if scope is not None and live.row is not scope.row:
                live.row = scope.row
                self._set_state(key)
            elif scope is None and live.row is not None:
                live.row = None
                self._closing[key] = 0  # no row shows that it has no data: look at it in the next tick

    def _set_state(self, key: Key) -> None:
        """Write the live state into the signal table, so that the table finds a change of it."""
        state = self.live[key]
        if state.row is not None:
            self.scopes.table.set_state(state.row.row, CODE[state.state], state.shows_violation)

    def _assess_promises(self, now_ns: int) -> list[Decision]:
        """Violations that opened or closed, of promises whose windows or silence changed their state."""
        table, decisions, keys = self.scopes.table, list[Decision](), list[Key]()
        for row, code in table.assess(now_ns, self.settings.silent_s):
            promise = table.promises[row]
            if promise is None:
                continue
            state = self.live[promise.key]
            if code in QUIET and not state.violating:
                # A whole fleet that comes or goes changes states so, and no event is due.
                state.state = STATES[code]
                table.set_state(row, code, False)
            else:
                keys.append(promise.key)
        table.work_out(found for key in keys if (found := self.live[key].row) is not None)
        calm = [key for key, due_ns in self._closing.items() if now_ns >= due_ns]
        for key in dict.fromkeys((*keys, *calm)):
            if (live := self.live.get(key)) is None:
                del self._closing[key]
                continue
            event = live.update(now_ns)
            self._set_state(key)
            if live.closes_ns is not None:
                self._closing[key] = live.closes_ns
            else:
                self._closing.pop(key, None)
            if event is not None:
                decisions.append(event)
        return decisions

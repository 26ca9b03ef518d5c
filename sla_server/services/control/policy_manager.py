"""The policy manager: the only one that may issue a throttle.

Layers of wishes for a volume, each with a throttle row of its own:

    manual     an operator's, in any mode, until released or expired
    control    the loop's, in mode enforce
    policy     the Spark policy of this hour, in mode and stage enforce; a manual one takes its place
    agreed     the cap written in an agreement of the volume, or of a client of it, in mode enforce

In force is the lowest of them, rate by rate, but never below the volume's floor: the loop and the policies
respect every floor, an operator only those that an agreement promises (the 50 IOPS of a volume without one
are our courtesy). Per volume caps are split over the gateways that carry it, and a gateway is sent its
complete set when it changes.

A wish of the layers manual, control and agreed may be about one client of a volume, one of an operator about
a group of volumes or a whole client (*targets*). It holds beside what is in force for the volume, and is sent
to gateways that apply such caps. Pure: no clock, no I/O. Changed only by the controller's one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.wire.cut import Late
from pmdaemon.wire.rates import Rates
from sla_server.services.control.cap_figures import cap_figures
from sla_server.services.control.cap_shares import CapShares
from sla_server.services.control.cap_split import CapSplit
from sla_server.services.control.caps_message import entries, fitting, left_out_event, throttle_event
from sla_server.services.control.client_use import ClientUses
from sla_server.services.control.decision_log import DecisionLog
from sla_server.services.control.decisions import (
    Decision,
    DecisionKind,
    RaiseEvent,
    Reason,
    RecordThrottle,
    SetCaps,
)
from sla_server.services.control.groups import Groups, TargetAnswers
from sla_server.services.control.policy_stage import PolicyStage
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import NeighbourTerms
from sla_server.services.control.targets import client_of, group_of, target_of, volume_of
from sla_server.services.control.throttle import (
    LEAST,
    MAX_GEN,
    SAME_RATIO,
    GatewayCaps,
    LoopMemory,
    Throttle,
    new_id,
)
from sla_server.services.control.throttle_index import ThrottleIndex
from sla_server.services.control.usage import GatewayTable, KnownStream, backend_among

_IN_FORCE: Final = frozenset(("requested", "sent", "confirmed", "seen", "refused"))


@dataclass(frozen=True, slots=True)
class ThrottlePlan:
    """What one ``decide`` led to: decisions, and volume -> gateway -> generation to wait for."""

    decisions: list[Decision]
    waits: dict[str, dict[str, int]]


@dataclass(slots=True)
class PolicyManager:
    """See the module. ``terms_of``, ``mean_cost_of`` and ``carriers_of`` answer for a volume or a client."""

    settings: ControlSettings
    terms_of: Callable[[str], NeighbourTerms]
    mean_cost_of: Callable[[str], float]
    carriers_of: Callable[[str], Mapping[str, GatewayTable]]
    mode: str = "observe"
    backend_modes: dict[str, str] = field(default_factory=dict)
    agreement_modes: dict[str, str] = field(default_factory=dict)
    policy_version: int | None = None
    stage: PolicyStage = field(default_factory=PolicyStage)
    gen: int = 0
    layers: dict[str, dict[str, Throttle]] = field(
        default_factory=lambda: {"manual": {}, "control": {}, "policy": {}, "agreed": {}}
    )
    gateways: dict[str, GatewayCaps] = field(default_factory=dict)
    log: DecisionLog = field(default_factory=DecisionLog)
    uses: ClientUses = field(default_factory=ClientUses)
    index: ThrottleIndex = field(default_factory=ThrottleIndex)
    shares: CapShares = field(default_factory=CapShares)
    groups: Groups = field(default_factory=Groups)
    answers: TargetAnswers = field(init=False)
    _split: CapSplit = field(init=False)
    wanted: dict[str, dict[str, Rates]] = field(default_factory=lambda: {"policy": {}, "agreed": {}})
    _agreed_by: dict[str, str] = field(default_factory=dict)
    _followed: str = ""  # mode in which _wanted was last carried out; "" when it has changed since
    _fresh: list[Throttle] = field(default_factory=list)
    _dirty: dict[str, Throttle] = field(default_factory=dict)
    _events: list[RaiseEvent] = field(default_factory=list)
    _ended: list[tuple[Throttle, str, Reason, str]] = field(default_factory=list)
    _failed: list[tuple[Throttle, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = self.terms_of, self.mean_cost_of, self.carriers_of, self.uses
        self.answers = TargetAnswers(self.groups, *known)
        self._split = CapSplit(self.settings, self.gateways, self.groups, self.answers)

    # Modes.

    def mode_of(self, backend: str, agreement: str = "") -> str:
        """Observe or enforce: what the agreement says, else its backend's mode, else that of the server."""
        return self.agreement_modes.get(agreement) or self.backend_modes.get(backend) or self.mode

    def modes_changed(self) -> None:
        """Follow the modes with the next ``decide``."""
        self._followed = ""

    def enforces(self, layer: str, target: str, backend: str = "", victim: str = "") -> bool:
        """Whether a wish of this layer is carried out."""
        place = backend or backend_among(self.carriers_of(target), volume_of(target))
        of_layer = {"control": victim.partition("/")[0], "agreed": self._agreed_by.get(target, "")}
        is_off = layer == "policy" and self.stage.mode_of(place) != "enforce"
        return not is_off and self.mode_of(place, of_layer.get(layer, "")) == "enforce"

    # Wishes.

    def throttles(self) -> list[Throttle]:
        """All in force."""
        return [t for layer in self.layers.values() for t in layer.values()]

    def set_control(
        self,
        backend: str,
        shares: Mapping[str, float],
        reason: Reason,
        text: str,
        victim: str,
        loop: LoopMemory | None = None,
    ) -> None:
        """The loop's caps of one backend; those not named any more are released."""
        layer = self.layers["control"]
        for volume in [v for v, t in layer.items() if t.backend == backend and v not in shares]:
            self._end("control", volume, "released", reason, text)
        for target, cost in shares.items():
            rates = Rates(cost_per_s=cost)
            if target in layer:
                throttle = layer[target]
                throttle.rates, throttle.reason, throttle.text = rates, reason.value, text
                throttle.victim, throttle.loop = victim or throttle.victim, loop
                throttle.backend = backend
                self._dirty[throttle.throttle_id] = throttle
            else:
                volume, client = volume_of(target), client_of(target)
                begun = Throttle("", volume, backend, "control", rates, reason, text, victim, client=client)
                begun.loop = loop
                self._begin("control", target, begun)

    def release_control(self, backend: str, reason: Reason, text: str) -> None:
        """The loop gives up its caps on this backend."""
        self.set_control(backend, {}, reason, text, "")

    def release_volumes(self, backend: str, volumes: Iterable[str], reason: Reason, text: str) -> None:
        """The loop gives up its caps on some volumes of this backend."""
        for volume in volumes:
            found = self.layers["control"].get(volume)
            if found is not None and found.backend == backend:
                self._end("control", volume, "released", reason, text)

    def change_victim(self, backend: str, victim: str) -> None:
        """The loop's caps of a backend that were set for a promise only observed now are for another."""
        for throttle in self.layers["control"].values():
            if throttle.backend == backend and not self.enforces(
                "control", throttle.volume, backend, throttle.victim
            ):
                throttle.victim = victim
                self._dirty[throttle.throttle_id] = throttle

    def moved(self, backends: Mapping[str, str]) -> None:
        """Volumes are on these backends now: their caps go with them, but for those of the old one's loop."""
        self._followed = ""
        for throttle in self.throttles():
            backend = backends.get(throttle.volume, throttle.backend)
            if throttle.backend not in ("", backend) and throttle.source != "control":
                throttle.backend = backend
                self._dirty[throttle.throttle_id] = throttle

    def set_wanted(self, layer: str, wanted: Mapping[str, Rates], version: int | None = None) -> None:
        """Caps of layer "policy" or "agreed" by target, complete; they act in mode enforce."""
        self.wanted[layer] = dict(wanted)
        self._followed = ""
        if layer == "policy":
            self.policy_version = version

    def set_agreed(self, caps: Mapping[str, tuple[Rates, str]]) -> None:
        """Caps of layer "agreed" by target, complete: rates, and the agreement that has them."""
        self._agreed_by = {target: sla for target, (_, sla) in caps.items()}
        self.set_wanted("agreed", {target: rates for target, (rates, _) in caps.items()})

    def change_agreed(self, caps: Mapping[str, tuple[Rates, str]], gone: Iterable[str]) -> None:
        """Caps of more targets, or other caps of the same ones, and targets without one now."""
        for target in gone:
            self.wanted["agreed"].pop(target, None)
        self.wanted["agreed"].update({target: rates for target, (rates, _) in caps.items()})
        self._agreed_by.update({target: sla for target, (_, sla) in caps.items()})
        self._followed = ""

    def manual_set(self, throttle: Throttle) -> None:
        """An operator's throttle; a second one with the same id, group or whole client replaces the first."""
        group = throttle.group_key
        if (before := self.layers["manual"].pop(throttle.throttle_id, None)) is not None:
            self.index.remove(before)
            self.groups.remove(before.group_key)
            throttle.follow(before)
        for key in [k for k, t in self.layers["manual"].items() if group and t.group_key == group]:
            text = f"replaced by {throttle.who or 'an operator'}"
            self._end("manual", key, "released", Reason.MANUAL_RELEASE, text)
        if group:
            self.groups.set(group, throttle.weights)
            for gateway in self.gateways.values():  # which confirm the new one, also if its rate is the same
                gateway.members.pop(throttle.target, None)
        self._begin("manual", throttle.throttle_id, throttle)

    def manual_release(
        self,
        volume: str | None,
        throttle_id: str | None,
        who: str = "",
        client: str | None = None,
        group: str | None = None,
    ) -> list[str]:
        """Release operators' throttles by volume, group or id, on behalf of ``who``; returns their ids.

        With a ``client`` only those of this client of the volume; without a volume that of the whole client.
        """
        keys = [
            key
            for key, t in self.layers["manual"].items()
            if (throttle_id is not None and key == throttle_id)
            or (volume is not None and t.volume == volume and client in (None, t.client))
            or (group is not None and t.group == group)
            or (volume is None and client is not None and t.target == target_of("", client))
        ]
        for key in keys:
            self._end("manual", key, "released", Reason.MANUAL_RELEASE, f"released by {who or 'an operator'}")
        return keys

    def restore(self, rows: Iterable[dict[str, Any]]) -> list[Throttle]:
        """Take over throttles in force from SQL; returns them. Nothing is issued because of it."""
        restored = []
        for row in rows:
            if row.get("released_us") is not None or row["state"] not in _IN_FORCE:
                continue
            throttle = Throttle.of(row)
            layer = "agreed" if throttle.reason == Reason.AGREED_CAP else throttle.source
            key = throttle.throttle_id if layer == "manual" else throttle.target
            if (before := self.layers[layer].get(key)) is not None:
                self.index.remove(before)
            self.layers[layer][key] = throttle
            self.index.add(throttle)
            if throttle.group_key:
                self.groups.set(throttle.group_key, throttle.weights)
            if throttle.gen is not None and throttle.gen < MAX_GEN:  # others were never issued by us
                self.gen = max(self.gen, throttle.gen)
            if layer in self.wanted:
                self.wanted[layer][throttle.target] = throttle.rates
            self._followed = ""
            restored.append(throttle)
        return restored

    # News of gateways.

    def carriers_changed(self, volumes: Iterable[str]) -> None:
        """Other gateways carry these volumes, or can throttle them, than before."""
        self.index.changed([throttle.target for throttle in self.index.of_volumes(volumes)])

    def streams_seen(self, table: GatewayTable, streams: Collection[KnownStream]) -> None:
        """Clients use volumes through a gateway for the first time; whole clients' caps follow them there."""
        for throttle in self.index.join(table, streams):
            self.groups.set(throttle.group_key, throttle.weights)
            self._dirty[throttle.throttle_id] = throttle
        self.carriers_changed({stream.volume for stream in streams})

    def gateway_up(self, table: GatewayTable, now_ns: int) -> None:
        """A gateway speaks: for the first time (what it holds is believed) or again (a cut will tell)."""
        if self.backend_modes or self.stage.modes:  # which backend a volume is on may be known only now
            self._followed = ""
        self.carriers_changed({*table.exports, *table.use})
        self.shares.due.add(table.gateway_id)
        self.shares.lapsing.pop(table.gateway_id, None)
        gateway = self.gateways.get(table.gateway_id)
        if gateway is not None:
            if not gateway.up:
                gateway.up, gateway.reported, gateway.issued_ns, gateway.acknowledged = True, None, now_ns, 0
            return
        gateway = self.gateways[table.gateway_id] = GatewayCaps(table.gateway_id, issued_ns=now_ns)
        found = self.index.of_volumes({*table.exports, *table.use})
        in_force = [throttle for throttle in found if throttle.gen is not None]
        if not in_force:
            return
        unsettled = [t.gen or 1 for t in in_force if t.state in ("requested", "sent", "refused")]
        totals = {t.target: r for t in in_force if not (r := self.effective(t.target)).is_open}
        share_of = self._split.shares
        shares = {t: share_of(t, rates, now_ns).get(table.gateway_id, rates) for t, rates in totals.items()}
        gateway.adopt(shares, totals, max(unsettled, default=1), now_ns)
        gateway.members = self.answers.members(shares, table)
        for throttle in in_force:
            throttle.wait_for(table.gateway_id, max(unsettled, default=1), now_ns)
            throttle.issued_ns = now_ns
            self.index.refresh(throttle)

    def gateway_lost(self, gateway_id: str, now_ns: int) -> None:
        """Nothing reaches it now; its lease decides what it does."""
        gateway = self.gateways.get(gateway_id)
        if gateway is None:
            return
        if gateway.up:
            gateway.up, gateway.lost_ns = False, now_ns
            self.shares.lapsing[gateway_id] = now_ns + self.settings.lease_s * 1e9
        holds = gateway.issued.keys() | self.shares.at(gateway_id).keys()
        self.index.changed(holds)
        for throttle in (*self.index.about(holds), *self.index.unproven()):
            throttle.forget(gateway_id)

    def cut(self, table: GatewayTable, duration_us: int, unix_us: int) -> None:
        """A cut was taken: proof, or its absence, that the gateway does what it was sent."""
        gateway = self.gateways.get(table.gateway_id)
        if gateway is None:
            return
        self.index.changed(gateway.issued)  # their mean I/O, and with it their floor
        gateway.report(gen := table.throttle_gen, table.last_cut_ns)
        held, is_known = gateway.held_under(gen), gateway.knows(gen)
        for throttle in self.index.about(gateway.issued):
            share, use = held.get(throttle.target), self.answers.use(table, throttle.target)
            changed = is_known and throttle.confirmed(table.gateway_id, gen, unix_us)
            if use is not None and share is None:
                throttle.under_way[table.gateway_id] = use.inflight
            elif use is not None and share is not None:
                made = table.gateway_id, share, use, duration_us / 1e6
                changed |= throttle.measured(*made, self.settings, unix_us, is_proof=gen == gateway.gen)
                self.index.refresh(throttle)
            if changed:
                self._dirty[throttle.throttle_id] = throttle

    def held_late(self, late: Late) -> None:
        """A gateway's caps held I/Os of these volumes for too long; live views say so, nothing is decided."""
        for throttle in self.index.of_volumes(late):
            for ios, longest_us in (late[volume] for volume in throttle.volumes if volume in late):
                throttle.late_ios += ios
                throttle.longest_hold_us = max(throttle.longest_hold_us, longest_us)

    def caps_state(self, gateway_id: str, gen: int, state: str, reason: str, unix_us: int) -> None:
        """News of a SET_CAPS on its way: sent, confirmed or refused."""
        gateway = self.gateways.get(gateway_id)
        if gateway is None or (gen != gateway.gen and not (state == "confirmed" and gateway.knows(gen))):
            return
        gateway.acknowledged = max(gateway.acknowledged, gen if state == "confirmed" else 0)
        for throttle in self.index.about(gateway.issued):
            if state != "confirmed" and throttle.waiting.get(gateway_id) != gen:
                continue
            if state == "sent" and throttle.state == "requested":
                throttle.state = "sent"
            elif state == "refused":
                if throttle.state != "refused":
                    self._failed.append((throttle, f"gateway {gateway_id} refused its caps: {reason}"))
                throttle.state = "refused"
            elif state != "confirmed" or not throttle.confirmed(gateway_id, gen, unix_us):
                continue
            self._dirty[throttle.throttle_id] = throttle
        if state == "refused" and gateway.refused != reason:
            text, what = f"gateway {gateway_id} refused its caps: {reason}", "throttle-not-effective"
            details = {"gateway_id": gateway_id, "gen": gen, "reason": reason}
            self._events.append(RaiseEvent(what, "critical", "gateway", gateway_id, text, details))
        if state != "sent" and gen == gateway.gen:
            gateway.refused = reason if state == "refused" else ""

    def volumes_refused(self, table: GatewayTable, volumes: Iterable[str]) -> None:
        """A gateway does not serve these volumes: it gets no caps for them until its exports change."""
        self.carriers_changed(volumes)
        for volume in sorted(volumes):
            for throttle in self.index.of_volumes((volume,)):
                if not throttle.group_key:  # of which it has other volumes, and holds the cap for those
                    throttle.forget(table.gateway_id)
            where = table.name or table.gateway_id
            text = f"gateway {where} does not serve volume {volume}: its caps have no effect there"
            details, what = {"gateway_id": table.gateway_id, "volume": volume}, "throttle-not-effective"
            self._events.append(RaiseEvent(what, "critical", "volume", volume, text, details))

    # Decisions.

    def effective(self, target: str) -> Rates:
        """What is in force for a volume or a client: the lowest wish, not below the floor."""
        manual = Rates()
        for throttle in self.index.about((target,)) if self.layers["manual"] else ():
            if throttle.source == "manual":
                manual = manual.tighter(throttle.rates)
        if not manual.is_open:
            manual = self.manual_held(target, manual)
        automatic = Rates()
        for name in ("control", "policy", "agreed"):
            found = self.layers[name].get(target)
            if found is not None and (name != "policy" or manual.is_open):
                automatic = automatic.tighter(found.rates)
        if automatic.is_open:
            return manual
        return self._lift(automatic, self.answers.terms_of(target), target).tighter(manual)

    def held(self, throttle: Throttle) -> Rates:
        """What one throttle comes to: its rates, raised to a floor that holds before them."""
        if throttle.source == "manual":
            return self.manual_held(throttle.target, throttle.rates)
        return self._lift(throttle.rates, self.answers.terms_of(throttle.target), throttle.target)

    def manual_held(self, target: str, rates: Rates) -> Rates:
        """What an operator's rates come to on this target: never below a floor that an agreement promises."""
        floor = self.answers.terms_of(target)
        return (self._lift(rates, floor, target) if floor.agreed else rates).at_least(LEAST)

    def _lift(self, rates: Rates, floor: NeighbourTerms, target: str) -> Rates:
        mean_cost = self.answers.mean_cost_of(target)
        least = Rates(floor.floor_iops, floor.floor_bytes_per_s, floor.floor_cost(mean_cost))
        return rates.at_least(least).at_least(LEAST)

    def decide(self, tables: Mapping[str, GatewayTable], now_ns: int, unix_us: int) -> ThrottlePlan:
        """Everything that must be said and sent now."""
        self._follow_mode()
        self._expire(now_ns, unix_us)
        decisions: list[Decision] = []
        waits = self._issue(tables, decisions, now_ns, unix_us)
        for throttle in self._fresh:
            throttle.requested_us = throttle.requested_us or unix_us
            if not throttle.throttle_id:
                throttle.throttle_id = new_id(throttle.source, throttle.target, unix_us)
            self._dirty[throttle.throttle_id] = throttle
            self._events.append(throttle_event("throttle-set", throttle, throttle.announced(self.held)))
        self._fresh = []
        for throttle, state, reason, text in self._ended:
            self._record_ended(throttle, reason, text, unix_us)
            throttle.end(state, text, unix_us)
            if throttle.throttle_id:
                decisions.append(RecordThrottle(throttle.row()))
                said = throttle.text if throttle.source == "manual" else text
                event = throttle_event("throttle-released", throttle, said)
                event.details["ended"] = reason.value
                self._events.append(event)
        self._ended = []
        for throttle in self.index.unproven():
            if why := throttle.failure(self.settings, now_ns):
                self._events.append(throttle_event("throttle-not-effective", throttle, why))
                self._failed.append((throttle, why))
        self._dirty.pop("", None)
        for throttle in self._dirty.values():
            self._record_cap(throttle, unix_us)
        for throttle, why in self._failed:
            self._add_row(DecisionKind.NOT_EFFECTIVE, throttle, throttle.reason, why, throttle.rates, unix_us)
        self._failed = []
        decisions += [RecordThrottle(t.row()) for t in self._dirty.values()]
        decisions += self._events
        self._dirty, self._events = {}, []
        return ThrottlePlan(decisions, waits)

    def _record_cap(self, throttle: Throttle, unix_us: int) -> None:
        """Keep a cap that is new or has another rate, and what its gateways have confirmed since."""
        noted = throttle.noted_rates
        if noted is None or throttle.rates.differs(noted, SAME_RATIO):
            kind = DecisionKind.CAP_SET if noted is None else DecisionKind.CAP_CHANGED
            rates = throttle.rates
            throttle.noted = self._add_row(kind, throttle, throttle.reason, throttle.text, rates, unix_us)
            throttle.noted_rates = rates  # after the row, which names those of before
            return
        if throttle.noted is not None:
            self.log.confirm(throttle.noted, throttle.confirmed_us, throttle.seen_us)

    def _record_ended(self, throttle: Throttle, reason: Reason, text: str, unix_us: int) -> None:
        if throttle.throttle_id and throttle.noted_rates is not None:  # else it never was in force
            self._add_row(DecisionKind.CAP_RELEASED, throttle, reason, text, None, unix_us)

    def _add_row(
        self,
        kind: DecisionKind,
        throttle: Throttle,
        reason: str,
        text: str,
        rates: Rates | None,
        unix_us: int,
    ) -> dict[str, Any] | None:
        return self.log.add(
            kind,
            unix_us,
            backend=throttle.backend,
            volume=throttle.volume or " ".join(throttle.element),
            victim=throttle.victim,
            reason=reason,
            text=text,
            figures=lambda: self._figures(throttle, rates),
        )

    def _figures(self, throttle: Throttle, rates: Rates | None) -> dict[str, Any]:
        in_force, version = self.effective(throttle.target), self.policy_version
        return cap_figures(throttle, rates, in_force, version, self.answers, self.gateways)

    def _follow_mode(self) -> None:
        """Layers other than manual exist in mode enforce only."""
        if self._followed == self.mode:
            return
        self._followed = self.mode
        self.index.changed()
        for name in ("control", "policy", "agreed"):
            for key, found in list(self.layers[name].items()):
                if not self.enforces(name, key, found.backend, found.victim):
                    self._end(name, key, "released", Reason.MODE_OBSERVE, "mode observe actuates nothing")
        for name, reason in (("policy", Reason.POLICY), ("agreed", Reason.AGREED_CAP)):
            layer = self.layers[name]
            wanted = {v: rates for v, rates in self.wanted[name].items() if self.enforces(name, v)}
            for target in [t for t in layer if t not in wanted]:
                self._end(name, target, "released", Reason.WITHDRAWN, "no longer asked for")
            for target, rates in wanted.items():
                known = layer.get(target)
                sla = self._agreed_by.get(target, "") if name == "agreed" else ""
                text = f"policy version {self.policy_version}"
                if name == "agreed":
                    text = f"cap of agreement {sla}" if sla else "cap of its own agreement"
                if known is None:
                    volume, client = volume_of(target), client_of(target)
                    begun = Throttle("", volume, "", "policy", rates, reason, text, client=client)
                    self._begin(name, target, begun)
                elif known.rates != rates or (sla and known.text != text):
                    known.rates, known.text = rates, text
                    self._dirty[known.throttle_id] = known

    def _expire(self, now_ns: int, unix_us: int) -> None:
        for key, throttle in list(self.layers["manual"].items()):
            before_us = throttle.expires_us
            if throttle.expired(now_ns, unix_us):
                self._end("manual", key, "expired", Reason.EXPIRED, "its time is over")
            elif throttle.expires_us != before_us:
                self._dirty[throttle.throttle_id] = throttle

    def _issue(
        self, tables: Mapping[str, GatewayTable], decisions: list[Decision], now_ns: int, unix_us: int
    ) -> dict[str, dict[str, int]]:
        for gateway_id in self.shares.lapsed(now_ns):
            self.index.changed(self.gateways[gateway_id].issued)
        totals = self.index.totals(self.effective, self._dirty.values())
        for target in self.index.renewed:
            rates = totals.get(target)
            self.shares.put(target, self._split.shares(target, rates, now_ns) if rates is not None else {})
        waits: dict[str, dict[str, int]] = {}
        gen = max(self.gen + 1, unix_us)  # above all that was issued, also before the database was lost
        for gateway_id, gateway in self.gateways.items():
            stray = gateway.stray(self.settings, now_ns)
            if not stray and gateway_id not in self.shares.due:
                continue
            table, wanted = tables[gateway_id], self.shares.at(gateway_id)
            members = self.answers.members(wanted, table)
            shares = fitting(wanted, table.caps_large is not False, gateway.issued.keys(), members)
            moved = gateway.changed(shares, totals, self.settings, now_ns)
            moved |= {t for t in members if t in shares and gateway.members.get(t) != members[t]}
            if now_ns - gateway.issued_ns >= self.settings.resplit_min_s * 1e9 or not gateway.up:
                self.shares.due.discard(gateway_id)  # else its shares may have moved, and have to wait
            if not gateway.up or not (moved or stray):
                continue
            if gateway.lacks_caps != (len(shares) < len(wanted)):
                gateway.lacks_caps = not gateway.lacks_caps
                if gateway.lacks_caps:
                    self._events.append(left_out_event(table, wanted.keys() - shares.keys()))
            touched = shares.keys() | gateway.issued.keys() if stray else moved
            gateway.send(shares, totals, gen, now_ns, is_repeat=stray and not moved)
            self.gen = gen
            lease_us = round(self.settings.lease_s * 1e6)
            decisions.append(SetCaps(gateway_id, gen, lease_us, *entries(shares, members)))
            gateway.members = {t: weights for t, weights in members.items() if t in shares}
            for target in touched:
                for volume in self.answers.volumes_of(target):
                    if not group_of(target) or table.carries(volume):
                        waits.setdefault(volume, {})[gateway_id] = gen
            for throttle in self.index.about(sorted(touched)):
                if not throttle.group_key:
                    throttle.backend = throttle.backend or table.backend_of(throttle.volume)
                throttle.issued(gateway_id, gen, now_ns)
                self.index.refresh(throttle)
                self._dirty[throttle.throttle_id] = throttle
        for throttle in self._fresh:
            throttle.join(self.gateways, now_ns)
            self.index.refresh(throttle)
        return waits

    def _begin(self, layer: str, key: str, throttle: Throttle) -> None:
        self.layers[layer][key] = throttle
        self.index.add(throttle)
        self._fresh.append(throttle)

    def _end(self, layer: str, key: str, state: str, reason: Reason, text: str) -> None:
        throttle = self.layers[layer].pop(key)
        self.index.remove(throttle)
        self.groups.remove(throttle.group_key)
        self._fresh = [t for t in self._fresh if t is not throttle]
        self._dirty.pop(throttle.throttle_id, None)
        self._ended.append((throttle, state, reason, text))

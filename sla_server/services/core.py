"""The services process without its mailboxes, threads and clocks: messages in, messages out.

It joins four parts that do not know each other: the controller (gets gateways and cuts, returns decisions),
the catalog of agreements (changed by requests), the SQL worker's findings (slices, policies, what SQL shows)
and the sender of records. It decides nothing about I/O itself.

All methods run in the main loop. ``tick`` is due every 250 ms and after messages; within it the order is:
findings, decisions, what is due once a second, then posting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog

from pmdaemon.errors import FrameTooLarge, WireError
from pmdaemon.mailbox.sender import MailboxSender
from pmdaemon.reserve import raise_event
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import printable
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.messages.api import ServiceRequest, ServiceResponse
from pmdaemon.wire.messages.orders import CapsOrder, CostsOrder, Lease, ThresholdsOrder
from pmdaemon.wire.messages.server import (
    CapsState,
    CutsHeader,
    GatewayAlert,
    GatewayReport,
    Pressure,
    Recorded,
    StreamsSeen,
)
from pmdaemon.wire.messages.space import GatewaySpace
from pmdaemon.wire.messages.stored import StoredGateway
from pmdaemon.wire.messages.thresholds import Thresholds
from sla_server.agreements import promise as compiler
from sla_server.agreements.compliance import ObjectiveStatus
from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.load import Loaded
from sla_server.agreements.promise import LIVE, InForce
from sla_server.agreements.volume_labels import Labels
from sla_server.events.routing import NotificationInForce, RoutingFile
from sla_server.ownership import FIRST_SIGHT_VOLUMES, Ownership
from sla_server.rows import Row, Rows
from sla_server.services import catalog as catalogs
from sla_server.services import notifications
from sla_server.services.catalog import AgreementChange, AgreementChanges, Catalog
from sla_server.services.config import ServicesConfig
from sla_server.services.control.controller import Controller
from sla_server.services.control.cut_intake import read_cuts
from sla_server.services.control.decisions import RaiseEvent, RecordDecision, RecordThrottle, SetCaps
from sla_server.services.costs import FittedCosts
from sla_server.services.documents import DocumentReader
from sla_server.services.episodes import Episodes
from sla_server.services.exclusions import Exclusions
from sla_server.services.gateway_states import GatewayStates
from sla_server.services.health import AwaitedGateways, Pressures, Problems
from sla_server.services.record_sender import RecordSender
from sla_server.services.reports import announcement
from sla_server.services.requests import Requests
from sla_server.services.rows import event_row, identity
from sla_server.services.snapshot import Shown, snapshot_frame
from sla_server.services.sql_worker import PolicyInForce, SqlState, SqlWorker
from sla_server.services.startup import Start
from sla_server.services.threshold_sets import ThresholdSets, left_out_event
from sla_server.services.volume_gate import GatewayChange, VolumeGate
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.manager import ServedVolumes, StorageManager

log = structlog.get_logger("services")
SECOND_NS: Final = 1_000_000_000
VIEW_REST: Final = 19  # times what making the live view took: for 64,000 agreements that is 0.3 s
VIEW_MOST_NS: Final = 2_500_000_000  # pages call it stale after 5 s
FIRST_PAIR: Final = "pair-0"
_GONE: Final = frozenset(("lost", "detached", "stalled"))


class Services:
    """See the module."""

    def __init__(
        self,
        config: ServicesConfig,
        controller: Controller,
        sql_worker: SqlWorker,
        documents: DocumentReader,
        outbox: MailboxSender,
        record_sender: RecordSender,
        start: Start,
        clock: Clock,
        ownership: Ownership = "first",
        first_sight_volumes: int = FIRST_SIGHT_VOLUMES,
        routing: RoutingFile | None = None,
        storage: StorageManager | None = None,
        external_url: str = "",
    ) -> None:
        now_ns, now_us = clock.monotonic_ns(), clock.unix_us()
        # The start of this process: tells the pairs that a new services knows no gateway yet.
        self._incarnation = now_us
        self.controller = controller
        self.sql_worker = sql_worker
        self.record_sender = record_sender
        self.rollup_s = start.rollup_s
        self.mode = start.mode
        self.backend_modes: Mapping[str, str] = start.backend_modes
        self.policy_mode = start.policy_mode or config.policy_mode
        self.policy_modes: Mapping[str, str] = start.policy_modes
        self.changes = AgreementChanges(start.catalog, record_sender, clock, self._catalog_changed)
        self._documents = documents
        self._live_rows = config.live_rows
        self.bad_frames = 0
        self._bad_log = LimitedLog("services")
        self._outbox = outbox
        self._external_url = external_url
        self._requests = Requests(self, config.request_limit_s)
        self._episodes = Episodes(start.episodes, now_us)
        self._policy = PolicyInForce(start.policy_version, start.policy_applied_us, start.policy_pinned)
        self._clock = clock
        self._shown = Shown(start.events, now_us)
        self._pressures = Pressures()
        self._problems = Problems(now_ns, now_us)
        self._standings: dict[tuple[str, str], ObjectiveStatus] = {}
        self._rows: Rows = list(start.rows)
        self._attendance = AwaitedGateways(start.awaited, now_ns)
        self._pair_of: dict[str, str] = {}
        self._gateway_states = GatewayStates()
        self._pairs = {FIRST_PAIR}
        self._new_volumes: set[str] = set()
        self._labels = dict(start.catalog.labels.announced)
        self._new_labels: dict[str, Labels] = {}
        self._thresholds = ThresholdSets()
        self._costs = FittedCosts()
        self._gate = VolumeGate(ownership, start.claims, first_sight_volumes)
        self._exclusions = Exclusions()
        self._storage = storage or StorageManager(StorageConfig(), start.pools)
        self._agreed: tuple[InForce, ...] | None = None
        self._routing = routing
        self._notified: tuple[NotificationInForce, ...] | None = None
        self._second_ns = 0
        self._view_ns = 0
        self._handlers: dict[int, Callable[[str, frame.Frame, int, int], None]] = {
            Kind.CUTS: self._cuts,
            Kind.GATEWAY: self._gateway,
            Kind.STREAMS_SEEN: self._streams_seen,
            Kind.CAPS_STATE: self._caps_state,
            Kind.GATEWAY_ALERT: self._gateway_alert,
            Kind.GATEWAY_SPACE: self._gateway_space,
            Kind.PRESSURE: self._pressure,
            Kind.RECORDED: self._recorded,
            Kind.REQUEST: self._request,
        }
        if start.policy_pinned is not None:
            self.sql_worker.order_policy(self._policy.orders)
        # Restore caps from SQL first: the controller trusts SQL about what is in force. Gateways and the mode
        # follow.
        self._catalog_changed(start.catalog)
        controller.set_backend_modes(self.backend_modes)
        controller.set_policy_stage(self.policy_mode, self.policy_modes)
        controller.restore(start.throttles)
        controller.faults.restore(start.storage_faults, now_ns)
        controller.set_mode(self.mode)
        for gateway_id, name in start.awaited.items():
            self._problems.name(gateway_id, name)
        for gateway in start.gateways:
            if gateway.is_away:
                streams = self._gate.streams(gateway.gateway_id, gateway.streams, now_us)
                controller.gateway_away(gateway.gateway_id, gateway.name, streams)
                continue
            own = self._gate.up(
                gateway.gateway_id, gateway.name, gateway.exports, None, now_us, is_start=True
            )
            controller.gateway_up(
                gateway.gateway_id, gateway.name, own.exports or [], now_ns, is_announced=False
            )
            streams = self._gate.streams(gateway.gateway_id, gateway.streams, now_us)
            controller.add_streams(gateway.gateway_id, streams)

    # Messages in.

    def on_message(self, sender: str, payload: bytes, now_ns: int, now_us: int) -> None:
        """One message of a mailbox; what cannot be read is logged and counted, nothing else."""
        try:
            parsed = frame.decode_own(payload)
            handler = self._handlers.get(parsed.kind)
            if handler is None:
                raise WireError(f"frames of kind {parsed.kind} are not for services")
            handler(sender, parsed, now_ns, now_us)
        except WireError as exc:
            self._count_bad(sender, exc)
        except Exception as exc:
            # A header of ours that lacks what messages.md promises; the trace tells it from a bug in here.
            log.exception("message-failed", sender=sender)
            self._count_bad(sender, exc)

    def _count_bad(self, sender: str, error: Exception) -> None:
        self.bad_frames += 1
        text = printable(f"{type(error).__name__}: {error}", 500)
        now_ns = self._clock.monotonic_ns()  # a poll's answer may hold a thousand cuts of an agent gone wrong
        self._bad_log.warning(now_ns, "bad-message", sender=sender, error=text, count=self.bad_frames)

    def _cuts(self, sender: str, message: frame.Frame, now_ns: int, _now_us: int) -> None:
        self._pairs.add(sender)
        said = CutsHeader.parse(message.header)
        for at, cut in read_cuts(message, lambda bad: self._count_bad(sender, bad)):
            self.controller.add_cut(cut, said.recv_us[at], said.offset_us[at], said.live[at], now_ns)

    def _gateway(self, sender: str, message: frame.Frame, now_ns: int, now_us: int) -> None:
        report = GatewayReport.parse(message.header)
        gateway_id, name, state = report.gateway_id, report.name, report.state
        self._pairs.add(sender)
        if state == "refused":
            return  # perhaps by a peer that used the id of a gateway which is there
        if state != "up" and self._pair_of.get(gateway_id, sender) != sender:
            return  # of the session before, at its former pair: mailboxes keep no order between pairs
        self._pair_of[gateway_id] = sender
        if (row := self._gateway_states.event(StoredGateway.read(message.header))) is not None:
            raise_event(row)
        if state == "detached":
            self._attendance.await_return(gateway_id, name, now_ns)
        else:
            self._attendance.settled(gateway_id)
        if state in _GONE:
            self._gate.lost(gateway_id)
            self._costs.lost(gateway_id)
            self.controller.gateway_lost(gateway_id, report.reason, now_ns)
            return
        if state == "up":
            self._problems.name(gateway_id, name)
            self.controller.set_features(gateway_id, report.features or ())
            self._costs.announced(gateway_id, report.features or (), report.exports or [])
            self._open_gate(
                self._gate.up(gateway_id, name, report.exports or [], report.listed, now_us), now_ns
            )
            self.controller.cuts_dropped(gateway_id, report.dropped)

    def _open_gate(self, change: GatewayChange, now_ns: int) -> None:
        """What of a gateway's volumes counts is different, or it is announced."""
        gateway_id = change.gateway_id
        if change.gone:
            self.controller.forget_volumes(gateway_id, change.gone)
        if change.exports is not None:
            self.controller.gateway_up(gateway_id, change.name, change.exports, now_ns)
        if change.streams:
            self.controller.add_streams(gateway_id, change.streams)
        self._learn(change.volumes)
        self._learn_labels(change.exports or ())
        self._thresholds.announced(gateway_id, change.volumes)

    def _streams_seen(self, _sender: str, message: frame.Frame, _now_ns: int, now_us: int) -> None:
        seen = StreamsSeen.parse(message.header)
        streams = self._gate.streams(seen.gateway_id, seen.streams, now_us)
        if not streams:
            return
        self.controller.add_streams(seen.gateway_id, streams)
        volumes = [stream["volume"] for stream in streams]
        self._learn(volumes)
        self._thresholds.seen(seen.gateway_id, volumes)

    def _caps_state(self, _sender: str, message: frame.Frame, _now_ns: int, now_us: int) -> None:
        said = CapsState.parse(message.header, now_us)
        self.controller.caps_state(
            said.gateway_id, said.gen, said.state, said.reason, said.at_us, said.refused or ()
        )

    def _gateway_alert(self, _sender: str, message: frame.Frame, now_ns: int, now_us: int) -> None:
        received = GatewayAlert.parse(message.header, now_us)
        gateway_id, alert = received.gateway_id, received.alert
        name = self._problems.name_of(gateway_id)
        details = {**alert.details, "gateway_id": gateway_id}
        text = f"gateway {name}: {alert.text}"
        # Reported again to a process that does not know the name yet, it is the same event.
        event_id = identity("event", alert.kind, "gateway", gateway_id, alert.at_us)
        self._keep(
            event_row(alert.kind, alert.severity, "gateway", name, text, alert.at_us, details, event_id)
        )
        self._problems.alert(gateway_id, alert.kind, alert.text, alert.at_us, now_ns)

    def _gateway_space(self, _sender: str, message: frame.Frame, _now_ns: int, now_us: int) -> None:
        received = GatewaySpace.parse(message.header, now_us)
        name = self._problems.name_of(received.gateway_id)
        served = self._served()
        self._keep(*self._storage.read(received.gateway_id, name, received.space, served, now_us))

    def _pressure(self, _sender: str, message: frame.Frame, now_ns: int, now_us: int) -> None:
        report = Pressure.parse(message.header)
        self._problems.report(report, now_ns, now_us)
        for row in self._pressures.add(report, now_ns):
            self._keep(row)

    def _recorded(self, _sender: str, message: frame.Frame, now_ns: int, _now_us: int) -> None:
        answer = Recorded.parse(message.header)
        self.record_sender.recorded(answer.request, answer.ok, answer.error, now_ns)

    def _request(self, _sender: str, message: frame.Frame, now_ns: int, now_us: int) -> None:
        self._requests.handle(ServiceRequest.parse(message.header), now_ns, now_us)

    def _learn(self, names: Iterable[str]) -> None:
        self._new_volumes |= set(names) - self.changes.catalog.volumes

    def _learn_labels(self, exports: Iterable[Row]) -> None:
        """Labels as the owner of a volume announces them; an agent of before names none."""
        for export in exports:
            volume, labels = export["volume"], export.get("labels") or {}
            if labels != self._labels.get(volume, {}):
                self._labels[volume] = self._new_labels[volume] = labels

    # What requests act on.

    @property
    def documents(self) -> DocumentReader:
        """Reads YAML aside."""
        return self._documents

    def respond(self, request: str, code: int, body: Row) -> None:
        """Post RESPONSE."""
        try:
            answer = ServiceResponse.of(request, code, body).encode()
        except FrameTooLarge as exc:
            problem = DocumentProblem(0, "", f"the answer is too long ({exc})", "Ask for less at once")
            answer = ServiceResponse.of(request, 500, {"errors": [problem.as_dict()]}).encode()
        self._outbox.put("appserver", answer)

    def set_mode(self, mode: str) -> None:
        """Switch the controller."""
        self.mode = mode
        self.controller.set_mode(mode)

    def set_backend_modes(self, modes: Mapping[str, str]) -> None:
        """Modes of single backends, complete."""
        self.backend_modes = modes
        self.controller.set_backend_modes(modes)

    def set_policy_stage(self, mode: str, modes: Mapping[str, str]) -> None:
        """See ``requests.RequestTarget``."""
        self.policy_mode, self.policy_modes = mode, modes
        self.controller.set_policy_stage(mode, modes)

    @property
    def policy(self) -> PolicyInForce:
        """See ``requests.RequestTarget``."""
        return self._policy

    @property
    def gate(self) -> VolumeGate:
        """Which gateway a volume belongs to."""
        return self._gate

    def carried(self) -> Mapping[str, Collection[str]]:
        """Gateways announced, and the volumes of each."""
        return self._thresholds.volumes

    def refusals(
        self, documents: Sequence[Loaded], in_force: Collection[str], now_us: int, *, is_trial: bool = False
    ) -> list[DocumentProblem]:
        """Why pools of storage take no new agreements among these; recorded, unless it is only tried."""
        labels = self.changes.catalog.labels
        problems, rows = self._storage.refusals(documents, in_force, self._served(), labels, now_us)
        if not is_trial:
            self.record_sender.append(rows)
        return problems

    def apply(self, catalog: Catalog, documents: Sequence[Loaded], who: str, now_us: int) -> catalogs.Change:
        """``catalog.apply``, with what is said of throttles that were set by hand before.

        Raises:
            AgreementsRefused: nothing is applied.
        """
        change = catalogs.apply(catalog, documents, who, now_us, self.carried())
        new = {row["name"] for row in change.applied if row["changed"] and "kind" not in row}
        promised = [each for item in change.catalog.items if item.name in new for each in item.all_promises]
        change.warnings.extend(self.controller.manual_causes.below(promised))
        return change

    def _served(self) -> ServedVolumes:
        return ServedVolumes(self.controller.volumes_by_backend(), self.carried())

    def _catalog_changed(self, catalog: Catalog) -> None:
        self._route(catalog)
        if catalog.items is self._agreed:
            return  # only volumes were learnt, which those below hear of by themselves
        self._agreed = catalog.items
        promises, classes = compiler.promises(catalog.items), compiler.classes(catalog.items)
        live = [p for item in catalog.items for p in item.all_promises if p.metric in LIVE]
        self.controller.set_agreements(live, classes)
        modes = {item.name: mode for item in catalog.items if (mode := item.agreement.spec.control)}
        self.controller.set_agreement_modes(modes)
        self._exclusions.set_items(catalog.items)
        self.controller.set_excluded(self._exclusions.check_all(self._clock.unix_us()))
        self._thresholds.set_promises(promises)
        self.sql_worker.set_catalog(catalog)

    def _route(self, catalog: Catalog) -> None:
        """Bring documents about delivery, and recipients that agreements name, to ``delivery``."""
        if self._routing is None or (
            catalog.items is self._agreed and catalog.plans.notifications is self._notified
        ):
            return
        self._notified = catalog.plans.notifications
        self._routing.publish(notifications.table_of(catalog.plans, catalog.items))

    # Time.

    def tick(self, now_ns: int, now_us: int) -> None:
        """Act on what was found, decide, and post."""
        while not self.sql_worker.found.empty():
            self._take(self.sql_worker.found.get_nowait(), now_us)
        for change in self._gate.take():
            self._open_gate(change, now_ns)
        self._documents.deliver()
        self._decide(now_ns, now_us)
        if (self._new_volumes or self._new_labels) and self.changes.idle:
            names, self._new_volumes = self._new_volumes, set()
            labels, self._new_labels = self._new_labels, {}
            self.changes.submit(
                AgreementChange(
                    lambda catalog, _us: catalogs.with_volumes(catalog, names, labels),
                    lambda _change, _error: None,
                )
            )
        self._requests.tick(now_ns)
        if now_ns - self._second_ns >= SECOND_NS:
            self._second_ns = now_ns
            self._each_second(now_ns, now_us)
            if self._routing is not None:
                self._routing.retry()
        self._post_thresholds(now_us)
        self._post_costs()
        self.flush(now_ns)

    def flush(self, now_ns: int) -> None:
        """Post what waits and has room."""
        rows, self._rows = self._rows, []
        self.record_sender.append(rows)
        self.record_sender.flush(now_ns)
        self._outbox.flush()

    def _take(self, found: SqlState, now_us: int) -> None:
        self._rows += found.judgement.rows
        self._show(found.judgement.rows, now_us)
        self._standings = found.judgement.standings
        for key in found.judgement.changed:
            standing = self._standings[key]
            remaining = standing.budget.remaining_ratio
            self.controller.set_budget(key, standing.burn_1h, 1.0 if remaining is None else remaining)
        self._gate.learn(found.claims)
        self._rows += [row for report in found.reports for row in announcement(report, self._external_url)]
        self._shown.processes = found.processes
        self._shown.add(found.events, now_us)
        if found.policy_looked:
            if found.policy is not None:
                self._keep(*self._policy.apply(found.policy, self.controller, now_us))
                if found.policy.version == self._policy.version:
                    self._costs.learned(found.policy.version, found.policy.costs)
            if found.policy is None or found.policy.orders == self._policy.orders.number:
                self._requests.policy_looked()

    def _decide(self, now_ns: int, now_us: int) -> None:
        for decision in self.controller.tick(now_ns, now_us):
            if isinstance(decision, SetCaps):
                self._post_caps(decision)
            elif isinstance(decision, RecordThrottle):
                self._rows.append(("throttles", decision.row))
            elif isinstance(decision, RecordDecision):
                self._rows.append(("decisions", decision.row))
            else:
                self._keep(*self._event_rows(decision, now_us))

    def _event_rows(self, event: RaiseEvent, now_us: int) -> Rows:
        if event.kind == "violation-opened":
            return self._episodes.opened(event.subject, event.text, event.severity, event.details, now_us)
        if event.kind == "violation-closed":
            return self._episodes.closed(event.subject, event.text, event.severity, event.details, now_us)
        return [
            event_row(
                event.kind, event.severity, event.element, event.subject, event.text, now_us, event.details
            )
        ]

    def _keep(self, *rows: tuple[str, Row]) -> None:
        """Record rows; events among them are shown at once."""
        self._rows += rows
        for table, row in rows:
            if table == "events" and row["severity"] == "critical":
                log.warning("critical-event", kind=row["kind"], subject=row["subject"], text=row["text"])
        self._show(rows, self._clock.unix_us())

    def _show(self, rows: Iterable[tuple[str, Row]], now_us: int) -> None:
        self._shown.add((row for table, row in rows if table == "events"), now_us)

    def _each_second(self, now_ns: int, now_us: int) -> None:
        self._miss_gateways(now_ns, now_us)
        self.controller.compare_policy(now_ns)
        for pair in sorted(self._pairs):
            lease = Lease(self._incarnation).encode()
            self._outbox.put(pair, lease, key="lease")
        self.controller.set_excluded(self._exclusions.check(now_us))
        states = self.controller.promise_states(self._episodes.open_keys())
        self._keep(*self._episodes.update(states, now_us))
        self._keep(*self._storage.tick(now_us))
        if now_ns >= self._view_ns:
            began_ns = time.thread_time_ns()
            self._show_view(now_ns, now_us)
            took_ns = time.thread_time_ns() - began_ns
            self._view_ns = now_ns + min(VIEW_REST * took_ns, VIEW_MOST_NS)

    def _show_view(self, now_ns: int, now_us: int) -> None:
        view = self.controller.snapshot(now_us, self._live_rows)
        policy, trouble = self._policy.shown(), self.sql_worker.trouble
        shown = self._shown.compose(view, self.mode, self._standings, policy, now_us, trouble)
        for row in shown["processes"]:
            row["pressure"] = self._pressures.of(row["name"], now_ns)
        shown["problems"] = self._problems.now(now_ns) + self._gate.problems() + self._shown.problems(now_us)
        self._outbox.put("appserver", snapshot_frame(shown), key="snapshot")

    def _miss_gateways(self, now_ns: int, now_us: int) -> None:
        rows = self._attendance.overdue(now_ns, now_us)
        for table, row in rows:
            if table == "gateways":
                self._gateway_states.is_lost(row["gateway_id"])
                self._gate.lost(row["gateway_id"])
                self.controller.gateway_lost(row["gateway_id"], row["reason"], now_ns)
        self._keep(*rows)

    def _post_caps(self, caps: SetCaps) -> None:
        sets = (tuple(each) or None for each in (caps.clients, caps.groups, caps.whole_clients))
        made = CapSet(caps.gen, caps.lease_us, tuple(caps.caps), *sets)
        pair = self._pair_of.get(caps.gateway_id, FIRST_PAIR)
        try:
            order = CapsOrder.of(caps.gateway_id, made).encode()
        except FrameTooLarge:  # cannot happen: the policy manager leaves out what does not fit
            log.exception("caps-not-sent", gateway_id=caps.gateway_id)
            return
        self._outbox.put(pair, order, key=("caps", caps.gateway_id))

    def _post_costs(self) -> None:
        for gateway_id, costs in self._costs.take():
            pair = self._pair_of.get(gateway_id, FIRST_PAIR)
            self._outbox.put(pair, CostsOrder.of(gateway_id, costs).encode(), key=("costs", gateway_id))

    def _post_thresholds(self, now_us: int) -> None:
        for gateway_id, found in self._thresholds.take():
            entries = tuple(entry.as_dict() for entry in found.entries)
            order = ThresholdsOrder.of(gateway_id, Thresholds(found.version, entries))
            pair = self._pair_of.get(gateway_id, FIRST_PAIR)
            self._outbox.put(pair, order.encode(), key=("thresholds", gateway_id))
            if found.left_out:
                self._keep(left_out_event(gateway_id, found, now_us))

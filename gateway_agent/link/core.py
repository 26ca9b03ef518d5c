"""What the link does when a frame arrives, a plane comes or goes, or time passes. No socket.

    server bytes ──► session ──► POLL ──────► collection ──► spool ──► reply
                             ├─► CAPS ──────► enforcers, then a collection: its answers prove the hand-over,
                             │                and a cut ends where the caps changed, so that the next is
                             │                wholly under them
                             └─► THRESHOLDS, COSTS ► store, planes
    time ──► cut without a poll after 1.5 intervals; expired lease; silent server

The loop calls ``server_*``, ``plane_*`` and ``tick``, and afterwards sends what is in ``session.outgoing``
and in each plane's ``outgoing``. Every cut goes through the spool, polled or not: replies are read there.

Thread: the link's loop only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog

from gateway_agent.enforcers.base import Enforcer
from gateway_agent.errors import PlaneLost, ServerLost, SpoolWriteFailed
from gateway_agent.link import reply
from gateway_agent.link.alerts import Alerts
from gateway_agent.link.caps import CostStore, KeptCaps, LeasedCaps, ThresholdStore
from gateway_agent.link.collection import CollectionRound, CutSpooler, StreamNames
from gateway_agent.link.conditions import Conditions, PlaneConditions, StorageConditions
from gateway_agent.link.exports import VolumeLabels, exports_of
from gateway_agent.link.identity import Identity
from gateway_agent.link.plane_client import PlaneClient
from gateway_agent.link.qemu_client import QemuClient
from gateway_agent.link.space import SpaceReports
from gateway_agent.link.spool import Spool
from gateway_agent.qemu import QmpAnswer, QmpConnected, QmpEvent, QmpLost
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.sample import Sample
from pmdaemon.errors import WireError
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.cut import joined_late
from pmdaemon.wire.messages.agent import (
    PLANE_FEATURES,
    CapSet,
    Hello,
    Poll,
    Registered,
    Registration,
    Schema,
    Welcome,
)
from pmdaemon.wire.messages.certificates import Certificate, Renew
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.ends import Bye, Error, Unsupported
from pmdaemon.wire.messages.planes import DpCosts, DpThresholds
from pmdaemon.wire.messages.thresholds import Thresholds, ThresholdsAck
from pmdaemon.wire.session import AgentSession, FromServer, SessionState

log = structlog.get_logger("link")

DEFAULT_INTERVAL_NS: Final = 1_000_000_000  # until a server has named its own in WELCOME
QUIET_FLOOR_NS: Final = 5_000_000_000  # and three intervals: then other servers are tried (``elsewhere``)
SILENCE_FLOOR_NS: Final = 10_000_000_000  # and three intervals: a server may restart its database


class AgentFacts(NamedTuple):
    """Identity of this agent; each link process draws another ``epoch``."""

    gateway_id: str
    name: str
    epoch: int
    software: str


class LinkCore:
    """See the module docstring.

    State: the interval, the polls that wait for the running collection, whether another must follow it, the
    planes that leave for good and those of them that have handed over to another process (``_former``, and
    what the spool has of them), what it has of planes that were forgotten (they may come back with the cut
    that they repeat), what HELLO said that planes can do, and when was the last collection, poll and byte.
    """

    def __init__(
        self,
        facts: AgentFacts,
        spool: Spool,
        stream_names: StreamNames,
        thresholds: ThresholdStore,
        clock: Clock,
        planes: Sequence[PlaneClient],
        sources: Sequence[StatisticsSource] = (),
        identity: Identity | None = None,
        enforcers: Sequence[Enforcer] = (),
        qemu: Sequence[QemuClient] = (),
        waited_us: Callable[[], int | None] = lambda: None,
        kept_caps: KeptCaps | None = None,
        costs: CostStore | None = None,
        conditions: Path | None = None,
    ) -> None:
        self._facts = facts
        self._spool = spool
        self._stream_names = stream_names
        self._thresholds = thresholds
        self._costs = costs or CostStore(None)
        self._clock = clock
        self.planes = {plane.name: plane for plane in planes}
        self.qemu = {client.name: client for client in qemu}
        self._sources: list[StatisticsSource] = [
            *(plane.source for plane in planes),
            *(client.source for client in qemu),
            *sources,
        ]
        self.session = AgentSession()
        self._alerts = Alerts(self.session, clock)
        self._conditions = Conditions(self.session, self._alerts, clock, conditions)
        self._plane_conditions = PlaneConditions(self._conditions, clock)
        self._storage_conditions = StorageConditions(self._conditions, clock)
        self.space = SpaceReports(self.session, self._conditions)
        self._identity = identity
        self._enforcers: list[Enforcer] = [
            *(plane.enforcer for plane in planes),
            *(client.enforcer for client in qemu),
            *enforcers,
        ]
        self._caps = LeasedCaps(self._enforcers, kept_caps)
        self._collection = CollectionRound(self._sources)
        self._cut_spooler = CutSpooler(
            facts.gateway_id, facts.epoch, spool, stream_names, self._sources, waited_us
        )
        self._interval_ns = DEFAULT_INTERVAL_NS
        self._polls: list[Poll] = []
        self._wants_cut = self._wants_proof = False
        self._leaving: set[str] = set()
        self._former: set[str] = set()
        self._former_marks: dict[str, int] = {}
        self.labels: VolumeLabels = {}
        self._forgotten_marks: dict[str, int] = {}
        self._said: tuple[str, ...] = PLANE_FEATURES
        self.polled_unix_us: int | None = None
        self._collected_ns = self._received_ns = clock.monotonic_ns()
        self._cut_due_ns = self._collected_ns + self._unpolled_cut_ns
        self.on_planes_changed: Callable[[], None] = lambda: None
        self._caps.resume(self._collected_ns)
        if spool.damaged:
            text = (
                f"{spool.damaged} cuts in the spool were damaged and are lost; their time is no-data. "
                "Check the disk of state_dir"
            )
            self._alerts.report("spool-damaged", "critical", "spool", text, lost=spool.damaged)

    def restarted(self, restarts: int, reason: str, plane_pids: Mapping[str, int]) -> None:
        """Report that this process replaced one that died for a ``reason``, and knew planes by these pids."""
        self._plane_conditions.pids = dict(plane_pids)
        text = f"the link was restarted: {reason}; restart {restarts}"
        self._alerts.report("process-restarted", "warning", "link", text, restarts=restarts)

    @property
    def caps_in_force(self) -> tuple[int, float] | None:
        """Generation of the server's caps and what is left of their lease in seconds; None without any."""
        end_ns, generation = self._caps.lease_end_ns, self._caps.generation
        if end_ns is None or generation is None:
            return None
        return generation, max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    @property
    def spool_facts(self) -> dict[str, int]:
        """Cuts that wait for the server, their bytes, and how many were ever dropped."""
        return {"cuts": self._spool.cuts, "bytes": self._spool.size_bytes, "dropped": self._spool.dropped}

    # -- reloads

    def replan(self, wanted: Mapping[str, Collection[str]], labels: VolumeLabels) -> None:
        """The agent's file was read again: planes, and the volumes of each; labels of volumes.

        A plane that is not among them stays until its last counts are here and its connection ends.
        """
        for name, volumes in wanted.items():
            if name not in self.planes:
                mark = self._spool.marks.get(name, self._forgotten_marks.pop(name, 0))
                self._add_plane(PlaneClient(name, mark))
            self._leaving.discard(name)
            self.planes[name].enforcer.configure(frozenset(volumes))
        for name in self.planes.keys() - wanted.keys() - self._former:
            if self.planes[name].enforcer.reachable:
                self._leaving.add(name)
            else:
                self._forget_plane(name)
        before, self.labels = self.labels, labels
        if before != labels:
            self._register_again()
        self.on_planes_changed()

    def _add_plane(self, plane: PlaneClient) -> None:
        self.planes[plane.name] = plane
        self._sources.append(plane.source)
        self._enforcers.append(plane.enforcer)

    def follow_former(self, handed_over: Collection[str], handing_over: Collection[str]) -> None:
        """Which processes (NAME.PID) have handed over to another one and let their clients go; which will.

        The ids of the next process replace those of the former one in the spool's marks: what the spool has
        of the former one is noted before.
        """
        marks, known = self._spool.marks, {*handed_over, *handing_over}
        for name in known:
            plane = name.rpartition(".")[0]
            self._former_marks.setdefault(name, marks.get(name, marks.get(plane, 0)))
        for name in handed_over:
            self._add_former(name)
        for name in self._former - known:
            if not self.planes[name].enforcer.reachable:
                self._forget_plane(name)
        self._former_marks = {name: mark for name, mark in self._former_marks.items() if name in known}

    def _add_former(self, name: str) -> None:
        if name not in self.planes:
            self._spool.marks[name] = self._former_marks.get(name, 0)
            plane = name.rpartition(".")[0]
            now = self.planes.get(plane)
            volumes = now.enforcer.volumes if now is not None else ()  # its parts of groups, from the first
            self._add_plane(PlaneClient(name, self._spool.marks[name], volumes, plane))
            self._leaving.add(name)
            self._former.add(name)

    def _forget_plane(self, name: str) -> None:
        plane = self.planes.pop(name)
        self._leaving.discard(name)
        if name not in self._former:  # no process is called so again
            self._forgotten_marks[name] = plane.source.mark
        self._former.discard(name)
        self._sources.remove(plane.source)
        self._enforcers.remove(plane.enforcer)
        self._plane_conditions.gone(name)
        log.info("plane-removed", plane=name)
        if plane.source.exports():
            self._register_again()

    def parent_stalled(self, text: str) -> None:
        """Report that the agent's parent hangs, or goes on again; ``text``: what it does."""
        self._alerts.report("process-stalled", "warning", "agent", f"the agent's parent {text}")

    def reload_ended(self, record: Mapping[str, Any]) -> None:
        """Report what came of a reload; ``record``: as in the parent's ``agent.json``."""
        self._alerts.report_reload(record)

    # -- the server's side

    def server_connected(self) -> None:
        """The connection to the PMDaemon is open."""
        facts, self._said = self._facts, self._features()
        self._received_ns = self._clock.monotonic_ns()
        self.session.opened(Hello.of(facts.gateway_id, facts.name, facts.epoch, facts.software, self._said))

    def _features(self) -> tuple[str, ...]:
        """What all data planes can do; a cap that one of them does not know would be no cap."""
        planes = self.planes.values()
        return tuple(each for each in PLANE_FEATURES if all(each in plane.features for plane in planes))

    def server_data(self, data: bytes) -> None:
        """Bytes from the PMDaemon.

        Raises:
            ServerLost: the session has ended; send what is in ``outgoing``, close, connect again.
        """
        self._received_ns = self._clock.monotonic_ns()
        try:
            for command in self.session.receive(data):
                self._handle(command)
            self._collect_if_wanted()
        except WireError as exc:
            self.session.drain(Error("protocol", str(exc)))
            raise ServerLost(str(exc)) from exc

    def server_lost(self, reason: str) -> None:
        """The connection to the PMDaemon is gone."""
        log.info("session-ended", reason=reason)
        self.session.closed()
        self._polls.clear()
        self._caps.server_gone()

    def _handle(self, command: FromServer) -> None:
        match command:
            case Poll():
                self._polled(command)
            case CapSet():
                self._caps.replace(command, self._clock.monotonic_ns())
                self._wants_cut = self._wants_proof = True
            case Thresholds():
                self._new_thresholds(command)
            case Costs():
                self._new_costs(command)
            case Welcome():
                self._interval_ns = command.interval_us * 1000
                self.space.welcomed(command)
                self.session.send(Schema.of())
                self._register()
            case Registered():
                self._registered()
            case Certificate():
                self._certified(command)
            case Unsupported():
                log.warning("server-does-not-know", kind=command.kind)
            case Error() | Bye():
                raise ServerLost(command.farewell)

    def _register(self) -> None:
        spool = [(epoch, first, last) for epoch, first, last in self._spool.epochs()]
        self.session.send(Registration(exports_of(self._sources, self.labels), spool))

    def _register_again(self) -> None:
        """The exports have changed."""
        if self.session.state in (SessionState.AUTHENTICATED, SessionState.REGISTERED, SessionState.POLLING):
            self._register()

    def _registered(self) -> None:
        if self.session.state is SessionState.REGISTERED:
            log.info("registered", epoch=self._facts.epoch, spooled_cuts=self._spool.cuts)
            self._stream_names.new_session()
            self._conditions.session_began()
        self._announce()

    def _announce(self) -> None:
        for message in self._stream_names.announcements():
            self.session.send(message)

    def _polled(self, poll: Poll) -> None:
        for epoch, seq in poll.ack:
            self._spool.forget(epoch, seq)
        if poll.lease:
            self._caps.renew(self._clock.monotonic_ns())
        self._polls.append(poll)
        self.polled_unix_us = self._clock.unix_us()
        self._wants_cut = True

    def _new_thresholds(self, received: Thresholds) -> None:
        if received != self._thresholds.current:
            self._adopt_thresholds(received)
        self.session.send(ThresholdsAck(received.version))

    def _adopt_thresholds(self, received: Thresholds) -> None:
        try:
            self._thresholds.replace(received)
        except OSError as exc:
            self._alerts.report(
                "state-write-failed", "warning", "thresholds", f"they hold, but are not kept: {exc}"
            )
        for plane in self.planes.values():
            if plane.enforcer.reachable:
                plane.send(DpThresholds(received.version, received.entries))

    def _new_costs(self, received: Costs) -> None:
        if received == self._costs.current:
            return
        try:
            self._costs.replace(received)
        except OSError as exc:
            self._alerts.report(
                "state-write-failed", "warning", "costs", f"they hold, but are not kept: {exc}"
            )
        for plane in self.planes.values():
            if plane.enforcer.reachable:
                plane.send(DpCosts(received.version, received.backends))

    # -- the certificate

    def _certified(self, received: Certificate) -> None:
        try:
            problem = self._identity.store(received.der) if self._identity is not None else "TLS is off here"
        except OSError as exc:
            problem = f"it cannot be kept: {exc.strerror}"
        if problem:
            text = f"the new certificate is not used: {problem}"
            self._alerts.report("certificate-not-renewed", "warning", "certificate", text)

    def _renew_if_due(self) -> None:
        if self._identity is None or self.session.state is not SessionState.POLLING:
            return
        request = self._identity.request()
        if request is None:
            return
        if self._identity.is_urgent:
            text = "the certificate expires soon and was not renewed; see the server's log"
            self._alerts.report("certificate-expires", "critical", "certificate", text)
        self.session.send(Renew(request))

    # -- the planes' side

    def plane_connected(self, name: str) -> None:
        """The control socket of a plane is connected: it gets what is in force before its first question."""
        plane = self.planes[name]
        plane.opened()
        self._plane_conditions.connected(name)
        costs, current = self._costs.current, self._thresholds.current
        if costs is not None:  # before caps, which are in their units: a new plane charges them at once
            plane.send(DpCosts(costs.version, costs.backends))
        self._caps.enforcer_connected(plane.enforcer, self._clock.monotonic_ns())
        if current is not None:
            plane.send(DpThresholds(current.version, current.entries))

    def plane_data(self, name: str, data: bytes) -> None:
        """Bytes from a plane.

        Raises:
            PlaneLost: they are not the protocol; close that connection, connect again.
        """
        plane = self.planes[name]
        before = plane.config, plane.problems, plane.listening
        has_other_exports = plane.receive(data)
        self._plane_conditions.introduced(name, plane.pid, self._former)
        if plane.leaving is not None:
            self._handed_over(plane, plane.leaving)
        if has_other_exports:
            self._register_again()
        if has_other_exports or before != (plane.config, plane.problems, plane.listening):
            self.on_planes_changed()
        if plane.problems and plane.problems != before[1]:
            self._alerts.report("reload-incomplete", "warning", name, "; ".join(plane.problems))
        self._advance()
        if plane.has_more:
            self.collect_now()

    def _handed_over(self, plane: PlaneClient, name: str) -> None:
        """Another process serves this plane; the one on this connection is called ``name`` from now on.

        Raises:
            PlaneLost: always: close this connection, and dial both.
        """
        self._former_marks[name] = plane.source.mark
        self._add_former(name)
        raise PlaneLost(plane.name, f"another process serves now; this one is {name} until its clients go")

    def plane_lost(self, name: str, reason: str) -> None:
        """The control socket of a plane is gone: it stopped, died, or was closed for what it sent."""
        self.planes[name].closed()
        self._plane_conditions.lost(name)
        if name in self._leaving:
            if name in self._former and not self.planes[name].is_stopping:
                text = f"{name}, which let its clients go, is gone: {reason}; its last counts are lost"
                self._plane_conditions.lost(name, text)
            self._forget_plane(name)
        elif self.planes[name].is_stopping:
            log.info("plane-stopped", plane=name)
        elif self.planes[name].leaving is not None:
            log.info("plane-handed-over", plane=name, former=self.planes[name].leaving)
        else:
            self._plane_conditions.lost(name, f"plane {name} is gone: {reason}")
        self.on_planes_changed()
        self._advance()

    # -- QEMU's side

    def qemu_event(self, event: QmpEvent) -> None:
        """A monitor was connected, lost, or has answered."""
        client = self.qemu[event.name]
        match event:
            case QmpConnected():
                log.info("qemu-connected", monitor=event.name)
                client.connected(event.daemon)
            case QmpAnswer():
                if client.answered(event) and not self._caps.enforcer_connected(
                    client.enforcer, self._clock.monotonic_ns()
                ):
                    client.enforcer.lapsed()  # static caps; limits that a killed link has left go
                self._advance()
            case QmpLost():
                if event.was_connected:
                    text = f"the monitor of {event.name} is gone: {event.reason}"
                    self._alerts.report("qemu-lost", "warning", event.name, text)
                elif client.problem != event.reason:  # logged once, not at every try
                    log.warning("cannot-connect", to=event.name, address=client.socket, reason=event.reason)
                client.lost(event.reason, is_off=event.is_off)
                if event.is_off:  # its machine was switched off
                    self._plane_conditions.gone(event.name)
                self._advance()

    # -- collecting

    def _collect_if_wanted(self) -> None:
        """Once for all frames that arrived together: CAPS and POLL often share one write.

        A collection that runs already is good enough for a poll, but proves nothing about caps sent since.
        """
        if self._wants_cut and not self._collection.busy:
            self._wants_cut = self._wants_proof = False
            self._collected_ns = self._clock.monotonic_ns()
            self._collection.begin(self._collected_ns, self._cut_due_ns)
            self._advance()

    def _advance(self) -> None:
        """Go on with the running collection as far as the answers at hand allow."""
        while self._collection.busy:
            samples = self._collection.gather(self._clock.monotonic_ns())
            if samples is None:
                return
            self._spool_samples(samples)
            self._collection.next_round(self._clock.monotonic_ns(), samples)
            if not self._collection.busy:
                self._collection_ended()

    def _spool_samples(self, samples: Sequence[Sample]) -> None:
        late = joined_late(sample.late for sample in samples)
        try:
            dropped = self._cut_spooler.spool(samples)
        except (SpoolWriteFailed, WireError) as exc:
            self._alerts.report("spool-write-failed", "critical", "spool", f"cuts wait in the sources: {exc}")
            return
        self._alerts.late(late)
        self._caps.used(samples, self._clock.monotonic_ns())
        if dropped:
            text = f"the spool is full: {self._spool.dropped} cuts were dropped so far; their time is no-data"
            self._alerts.report("spool-overflow", "critical", "spool", text, dropped=self._spool.dropped)

    def _collection_ended(self) -> None:
        asked = [source.name for source in self._sources if source.can_be_asked]
        planes = self.planes.keys() - self._leaving
        self._plane_conditions.collected(self._collection.overdue(), asked, self.qemu, planes)
        self._storage_conditions.check([plane.source for plane in self.planes.values()])
        for failure in self._collection.failures:
            self._alerts.report("source-failed", "warning", failure.source, str(failure))
        if self.session.state is SessionState.POLLING:
            self._announce()
            for poll in self._polls:
                reply.answer(self.session, self._spool, poll, self._clock.unix_us())
        self._polls.clear()
        acknowledgement = self._caps.due_ack()
        if acknowledgement is not None:
            self.session.send(acknowledgement)
        # A plane that stops is asked until it has nothing more: then it closes its connection.
        self._wants_cut = self._wants_proof or any(plane.has_more for plane in self.planes.values())
        self._collect_if_wanted()

    # -- time

    @property
    def collecting(self) -> bool:
        """Whether a collection runs; a stopping link waits for its end."""
        return self._collection.busy

    def collect_now(self) -> None:
        """Collect without a poll: by the timer, or as the last act of a link that stops."""
        self._wants_cut = True
        self._collect_if_wanted()

    def next_due_ns(self) -> int:
        """When ``tick`` has something to do, on the monotonic clock."""
        busy = self._collection.busy
        due = [self._collection.deadline_ns if busy else self._collected_ns + self._unpolled_cut_ns]
        if self._caps.lease_end_ns is not None:
            due.append(self._caps.lease_end_ns)
        if self.session.state is not SessionState.CLOSED:
            limit_ns = self._silence_ns if self.is_quiet else self._quiet_ns
            due.append(self._received_ns + limit_ns)
        return min(due)

    @property
    def _unpolled_cut_ns(self) -> int:
        return self._interval_ns * 3 // 2

    @property
    def is_quiet(self) -> bool:
        """Whether the server of the session has said nothing for so long that another may act."""
        return self._silent_ns() >= self._quiet_ns

    def _silent_ns(self) -> int:
        is_closed = self.session.state is SessionState.CLOSED
        return 0 if is_closed else self._clock.monotonic_ns() - self._received_ns

    @property
    def _quiet_ns(self) -> int:
        return 3 * self._interval_ns + QUIET_FLOOR_NS

    @property
    def _silence_ns(self) -> int:
        return 3 * self._interval_ns + SILENCE_FLOOR_NS

    def tick(self) -> None:
        """Time has passed.

        Raises:
            ServerLost: the server has been silent for too long; close and connect again.
        """
        now_ns = self._clock.monotonic_ns()
        self._advance()
        lapsed = self._caps.expire(now_ns)
        if lapsed is not None:
            text = f"caps of generation {lapsed.gen} were not renewed; static caps hold"
            self._alerts.report("lease-expired", "warning", "caps", text, gen=lapsed.gen)
        if not self._collection.busy and now_ns - self._collected_ns >= self._unpolled_cut_ns:
            self.collect_now()
        self._cut_due_ns = self._collected_ns + self._unpolled_cut_ns  # by the interval that it sleeps by
        self._renew_if_due()
        self.space.flush()
        self._plane_conditions.keep_only([*self.planes, *self.qemu])
        self._conditions.flush()
        if self.session.state is not SessionState.CLOSED and self._said != self._features():
            raise ServerLost("what its data planes can do has changed")
        if (silent_ns := self._silent_ns()) >= self._silence_ns:
            raise ServerLost(f"silent for {silent_ns / 1e9:.0f} s")

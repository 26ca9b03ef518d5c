"""Acts on each frame an agent sends: the inbound half of the daemon's side of a session.

``wire.session`` has already decided that the frame is allowed now; here its header is checked and its
meaning carried out. What is wrong raises a ``WireError``; the caller closes that connection with it.
CUT frames are handed on as they are; their columns are never read (P10: the inbound thread's work
for one gateway is short and independent of the number of its streams).

Thread: belongs to the inbound thread. Other threads reach gateways through their locks.

Source: P3, P9, P10; docs/formats/messages.md.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Container
from typing import Final

import structlog

from pmdaemon.errors import BadCut, PeerRefused, ProtocolViolation, not_enrolled
from pmdaemon.pki.certificates import Credential
from pmdaemon.poller import announcements
from pmdaemon.poller.certificates import CertificateWorker, Enrolments
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.fast_path import FastPath
from pmdaemon.poller.gateway import ANSWER_BYTES, Gateway, GatewayState, Registry
from pmdaemon.poller.publisher import DBMANAGER, SERVICES, CutPublisher
from pmdaemon.poller.quotas import Allowances
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.logs import LimitedLog
from pmdaemon.wire import cut, frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import (
    CapsAck,
    Hello,
    Registered,
    Registration,
    Reply,
    Schema,
    Streams,
    Welcome,
)
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.messages.certificates import CaCertificate, Enrol, Renew
from pmdaemon.wire.messages.ends import Error, Unsupported
from pmdaemon.wire.messages.space import SPACE, Space
from pmdaemon.wire.messages.thresholds import ThresholdsAck
from pmdaemon.wire.session import negotiate

SOFTWARE: Final = "storage-sla-server 0.1"
MAX_STREAMS: Final = (
    4 * cut.MAX_ROWS
)  # clients come and go within a session; four times what one cut may hold
log = structlog.get_logger("reception")

Handler = Callable[["FrameHandlers", AgentConnection, frame.Frame], None]


class FrameHandlers:
    """Carries out what agents send.

    Args:
        on_registered: called for each new session, so that outbound schedules it.
        counters: shared with the pair's summary line; only the inbound thread adds to it here.
        certificate_worker: makes certificates; None without TLS, when any peer may speak for any gateway.

    Attributes:
        fast_path: takes nearly every answer before it comes here.
        enrolments: announces certificates made and refused.
    """

    def __init__(
        self,
        registry: Registry,
        publisher: CutPublisher,
        clock: Clock,
        *,
        interval_us: int,
        on_registered: Callable[[str], None],
        counters: Counter[str],
        certificate_worker: CertificateWorker | None = None,
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._clock = clock
        self._interval_us = interval_us
        self._on_registered = on_registered
        self._stamp = (-1, 0)
        self._counters = counters
        self._fleet_log = LimitedLog("reception")
        self._fleet_warnings = LimitedLog("reception")  # not crowded out by what is merely said
        self._certificate_worker = certificate_worker
        self._allowances = Allowances(registry, publisher, clock, counters)
        self.enrolments = Enrolments(publisher, clock)
        self.fast_path = FastPath(publisher, clock, interval_us, counters)

    def handle(self, conn: AgentConnection, received: frame.Frame) -> None:
        """Carry out one frame.

        Raises:
            WireError: the frame is malformed or out of place; close this connection.
        """
        handler = _HANDLERS.get(received.kind)
        if handler is None:
            self._counters["unsupported_frames"] += 1
            if conn.gateway is not None:
                self._allowances.demand(conn.gateway.gateway_id, conn.gateway.name, "answers")
            conn.send((Kind.UNSUPPORTED, Unsupported(received.kind).encode()))
            return
        handler(self, conn, received)

    def _unix_us(self, now_ns: int) -> int:
        """Wall clock of a read at ``now_ns``; read once for all frames of it."""
        if now_ns != self._stamp[0]:
            self._stamp = now_ns, self._clock.unix_us()
        return self._stamp[1]

    # -- registration

    def _hello(self, conn: AgentConnection, received: frame.Frame) -> None:
        credential = (
            _check_holder(conn.credential, self._certificate_worker.revoked)
            if self._certificate_worker is not None
            else None
        )
        hello = Hello.parse(received.header)
        if credential is not None and self._certificate_worker is not None:
            _check_identity(credential, hello)
            self._certificate_worker.used(credential)
        conn.hello = hello
        proto = negotiate(hello.proto_min, hello.proto_max)
        welcome = Welcome(proto, (SPACE,), SOFTWARE, self._interval_us, self._clock.unix_us())
        conn.send((Kind.WELCOME, welcome.encode()))

    # -- certificates

    def _ca_query(self, conn: AgentConnection, _received: frame.Frame) -> None:
        authority = CaCertificate(self._required_worker().authority_der)
        conn.send((Kind.CA_CERT, authority.encode()))

    def _enrol(self, conn: AgentConnection, received: frame.Frame) -> None:
        self._counters["enrolments_asked"] += 1
        self._required_worker().enrol(conn, Enrol.parse(received.header))

    def _renew(self, conn: AgentConnection, received: frame.Frame) -> None:
        certificate_worker = self._required_worker()
        assert conn.credential is not None  # HELLO is not passed without one
        self._allowances.demand(conn.credential.gateway_id, conn.credential.name, "renewals")
        certificate_worker.renew(conn, conn.credential, Renew.parse(received.header).request)

    def _required_worker(self) -> CertificateWorker:
        if self._certificate_worker is None:
            raise PeerRefused("no-tls", "this server runs without TLS and hands out no certificates")
        return self._certificate_worker

    def _schema(self, conn: AgentConnection, received: frame.Frame) -> None:
        Schema.parse(received.header)
        conn.schema_seen = True

    def _register(self, conn: AgentConnection, received: frame.Frame) -> None:
        hello = conn.hello
        if hello is None or not conn.schema_seen:
            raise ProtocolViolation(conn.session.state.value, "REGISTER", "SCHEMA before it")
        registration = Registration.parse(received.header)
        is_known = conn.gateway is not None
        self._check_quotas(hello, registration, "changes" if is_known else "sessions")
        if conn.gateway is not None:
            conn.gateway.exports = registration.exports
        else:
            self._begin(conn, hello, registration)
        # Before services is notified: the thresholds it answers with go to registered gateways only.
        conn.send((Kind.REGISTERED, Registered().encode()))
        assert conn.gateway is not None  # begun just now, or before
        self._announce(conn.gateway)
        self._on_registered(hello.gateway_id)

    def _check_quotas(self, hello: Hello, registration: Registration, step: str) -> None:
        gateway_id, name = hello.gateway_id, hello.name
        self._allowances.demand(gateway_id, name, step)
        self._allowances.demand_new(
            gateway_id, name, "epochs", [hello.epoch, *(row[0] for row in registration.spool)]
        )
        self._allowances.demand_new(
            gateway_id, name, "volumes", [item["volume"] for item in registration.exports]
        )

    def _begin(self, conn: AgentConnection, hello: Hello, registration: Registration) -> None:
        older = self._registry.get(hello.gateway_id)
        if older is not None and older.conn is not None:
            self._supersede(older, older.conn, conn.address)
        gateway = self._registry.register(conn, hello, registration)
        conn.gateway = gateway
        self._counters["registrations"] += 1
        self._fleet_log.info(
            conn.last_received_ns,
            "gateway-up",
            gateway=gateway.name,
            gateway_id=gateway.gateway_id,
            address=conn.address,
        )

    def _supersede(self, gateway: Gateway, older: AgentConnection, address: str) -> None:
        """The newer session wins; the older one is sent ERROR and closed, and not reported as lost."""
        self._counters["superseded_sessions"] += 1
        log.warning("session-superseded", gateway=gateway.name, older=older.address, newer=address)
        older.gateway = None
        text = f"gateway {gateway.gateway_id} has registered again from {address}; the newer session wins"
        details = {"gateway_id": gateway.gateway_id, "older": older.address, "newer": address}
        row = announcements.event(
            "gateway-superseded", "warning", gateway.name, text, self._clock.unix_us(), **details
        )
        self._publisher.news(row, DBMANAGER)
        last = Error("superseded", text).encode()
        older.finish(Kind.ERROR, last, "superseded by a newer session", self._clock.monotonic_ns())

    def registered_elsewhere(self, gateway: Gateway, address: str) -> None:
        """The same gateway has registered with another pair: the newer session wins."""
        conn = gateway.conn
        if conn is not None:
            self._supersede(gateway, conn, address)
            gateway.end()

    def _announce(self, gateway: Gateway) -> None:
        """GATEWAY up to both recipients.

        Raises:
            FrameTooLarge: the exports do not fit one announcement; fewer or shorter names.
        """
        message = announcements.gateway_state(gateway, "up", "", self._clock.unix_us())
        gateway.announced_dropped = (gateway.dropped, self._clock.monotonic_ns())
        self._publisher.news(message, DBMANAGER, SERVICES)

    def announce_again(self, *recipients: str) -> None:
        """Every session's GATEWAY up and STREAMS_SEEN: a recipient has restarted and knows nothing."""
        for gateway in self._registry.all():
            if gateway.conn is not None:
                self._announce_to(gateway, *recipients)

    def _announce_to(self, gateway: Gateway, *recipients: str) -> None:
        self._publisher.news(
            announcements.gateway_state(gateway, "up", "", self._clock.unix_us()), *recipients
        )
        if gateway.condition is GatewayState.STALLED:
            stalled = announcements.gateway_state(gateway, "stalled", "no reply", self._clock.unix_us())
            self._publisher.news(stalled, *recipients)
        for message in announcements.streams_seen(gateway.gateway_id, gateway.streams.values()):
            self._publisher.news(message, *recipients)

    def _streams(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = _gateway_of(conn)
        streams = Streams.parse(received.header, gateway.gateway_id).streams
        new = [stream for stream in streams if stream.stream_id not in gateway.streams]
        names = [stream.stream_id for stream in new]
        self._allowances.demand_new(gateway.gateway_id, gateway.name, "streams", names)
        gateway.streams.update((stream.stream_id, stream) for stream in new)
        while len(gateway.streams) > MAX_STREAMS:
            del gateway.streams[next(iter(gateway.streams))]  # the oldest: the others have known it for long
        for message in announcements.streams_seen(gateway.gateway_id, new):
            self._publisher.news(message, DBMANAGER, SERVICES)

    # -- statistics

    def _cut(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = conn.gateway
        assert gateway is not None  # see _gateway_of
        gateway_bytes, epoch, seq = cut.check(received)
        if gateway_bytes != gateway.id_bytes:
            raise BadCut(f"it names gateway {uuid.UUID(bytes=gateway_bytes)}, the session is another's")
        live = bool(received.flags & frame.FLAG_LIVE)
        now_ns = conn.last_received_ns
        record = gateway.record
        if not gateway.takes_answer(len(received.raw)):
            self._counters["over_limit"] += 1
            raise BadCut(
                f"the answer to a poll holds more than {ANSWER_BYTES} bytes of cuts; end it with REPLY"
            )
        # Positions of cuts belong to this thread; the lock is for rewinds by others.
        hole = not live and record.leaves_hole(epoch, seq, cut.gap_of(received.header))
        if hole:
            # What is batched must be posted first: it may lie below the floor that is announced next.
            self._publisher.post_cuts()
        with gateway.lock:
            verdict = record.received(epoch, seq, live, now_ns)
        if hole and verdict.keep:
            self._give_up_before(gateway, epoch, seq)
        self._counters["cuts"] += 1
        if not verdict.keep and not verdict.judge:
            return
        self._publisher.cut(
            received.raw,
            gateway.gateway_id,
            epoch,
            seq,
            self._unix_us(now_ns),
            gateway.offset.offset_us,
            now_ns,
            keep=verdict.keep,
            judge=verdict.judge,
            live=live,
        )

    def _give_up_before(self, gateway: Gateway, epoch: int, seq: int) -> None:
        """The agent lacks cuts before this one and the cut does not say so: dbmanager must know."""
        with gateway.lock:
            gateway.record.give_up_before(epoch, seq)
        self._counters["unexplained_holes"] += 1
        log.warning("cuts-missing", gateway=gateway.name, epoch=epoch, seq=seq)
        self._announce(gateway)

    def _reply(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = _gateway_of(conn)
        reply = Reply.parse(received.header)
        poll = reply.poll
        now_ns = conn.last_received_ns
        with gateway.lock:
            sent_ns = gateway.record.answered(poll)
            if sent_ns is not None:
                gateway.awaiting_since_ns = None
        if sent_ns is None:
            raise ProtocolViolation(conn.session.state.value, f"REPLY to poll {poll}", "a poll that was sent")
        if poll == gateway.record.backlog_poll:
            self._registry.catch_up.answered(gateway.answer_bytes(poll), now_ns - sent_ns, now_ns)
        gateway.offset.add(reply.wall_us, self._unix_us(now_ns), (now_ns - sent_ns) // 1000)
        self._counters["replies"] += 1
        if now_ns - sent_ns > self._interval_us * 1000:
            self._counters["late_replies"] += 1  # kept like any other; the schedule has not moved
        if gateway.condition is GatewayState.STALLED:
            gateway.condition = GatewayState.UP
            self._fleet_log.info(now_ns, "gateway-recovered", gateway=gateway.name)
            self._announce_state(gateway, "recovered", "it answers polls again")
        gateway.dropped = reply.dropped

    # -- answers to orders, and what an agent says unasked

    def _caps_ack(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = _gateway_of(conn)
        ack = CapsAck.parse(received.header)
        self._allowances.demand(gateway.gateway_id, gateway.name, "answers")
        state = "confirmed" if ack.ok else "refused"
        message = announcements.caps_state(
            gateway.gateway_id, ack.gen, state, ack.reason, self._clock.unix_us(), ack.refused
        )
        self._publisher.news(message, SERVICES)

    def _thresholds_ack(self, conn: AgentConnection, received: frame.Frame) -> None:
        version = ThresholdsAck.parse(received.header).version
        gateway = _gateway_of(conn)
        self._allowances.demand(gateway.gateway_id, gateway.name, "answers")
        log.debug("thresholds-acknowledged", gateway=gateway.name, version=version)

    def _alert(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = _gateway_of(conn)
        alert = Alert.parse(received.header, self._clock.unix_us())
        if not self._allowances.allow(gateway.gateway_id, gateway.name, "alerts"):
            return
        self._counters["alerts"] += 1
        self._publisher.news(announcements.alert(gateway.gateway_id, alert), SERVICES)

    def _space(self, conn: AgentConnection, received: frame.Frame) -> None:
        gateway = _gateway_of(conn)
        space = Space.parse(received.header, self._clock.unix_us())
        if self._allowances.allow(gateway.gateway_id, gateway.name, "readings"):
            message = announcements.space(gateway.gateway_id, space)
            self._counters["dropped_readings"] += not self._publisher.reading(message, SERVICES)

    # -- state of a gateway

    def _announce_state(self, gateway: Gateway, state: str, reason: str, *, planned: bool = False) -> None:
        message = announcements.gateway_state(gateway, state, reason, self._clock.unix_us(), planned=planned)
        self._publisher.news(message, DBMANAGER, SERVICES)

    def stalled(self, gateway: Gateway, reason: str) -> None:
        """It did not answer a poll in time. It may be polled again, and stays stalled until it answers."""
        with gateway.lock:
            gateway.awaiting_since_ns = None
        self._counters["stalls"] += 1
        if gateway.condition is GatewayState.UP:
            gateway.condition = GatewayState.STALLED
            self._fleet_warnings.warning(
                self._clock.monotonic_ns(), "gateway-stalled", gateway=gateway.name, reason=reason
            )
            self._announce_state(gateway, "stalled", reason)

    def lost(self, conn: AgentConnection, reason: str, *, by_us: bool = False, planned: bool = False) -> None:
        """A connection has ended. Announced to both recipients if a gateway was registered on it.

        ``by_us``: this process ends, nothing is wrong with the gateway: it is ``detached``, not ``lost``.
        ``planned``: its agent said goodbye.
        """
        gateway, conn.gateway = conn.gateway, None
        if gateway is None:
            return
        gateway.end()
        self._counters["lost_sessions"] += not by_us and not planned
        state, now_ns = "detached" if by_us else "lost", self._clock.monotonic_ns()
        if planned:
            self._fleet_log.info(now_ns, "gateway-stopped", gateway=gateway.name, reason=reason)
        else:
            self._fleet_warnings.warning(now_ns, f"gateway-{state}", gateway=gateway.name, reason=reason)
        self._announce_state(gateway, state, reason, planned=planned)

    def refused(self, conn: AgentConnection, reason: str) -> None:
        """A session ended by an error of the peer; news if it was never registered but named itself."""
        self._counters["refused_sessions"] += 1
        credential, hello = conn.credential, conn.hello
        if hello is None and credential is not None:  # refused before HELLO: the certificate names it
            hello = Hello.of(credential.gateway_id, credential.name, epoch=0, software="")
        if conn.gateway is not None or hello is None:
            return
        # Without TLS a peer may use another's id: it says nothing about a gateway that is there.
        if not self._registry.has_session(hello.gateway_id) and self._allowances.allow_claim("refusals"):
            message = announcements.gateway_refused(hello, conn.address, reason, self._clock.unix_us())
            self._publisher.news(message, DBMANAGER, SERVICES)

    def announce_losses(self, gateway: Gateway, min_age_ns: int) -> None:
        """Announce cuts the agent's spool had to drop, at most once in ``min_age_ns``."""
        dropped, at_ns = gateway.announced_dropped
        if gateway.dropped > dropped and self._clock.monotonic_ns() - at_ns >= min_age_ns:
            log.warning("cuts-dropped-by-agent", gateway=gateway.name, dropped=gateway.dropped)
            self._announce(gateway)


def _gateway_of(conn: AgentConnection) -> Gateway:
    # Cannot be None: the session's table lets these kinds pass only after REGISTERED.
    assert conn.gateway is not None
    return conn.gateway


_HANDLERS: Final[dict[int, Handler]] = {
    Kind.HELLO: FrameHandlers._hello,
    Kind.CA_QUERY: FrameHandlers._ca_query,
    Kind.ENROL: FrameHandlers._enrol,
    Kind.RENEW: FrameHandlers._renew,
    Kind.SCHEMA: FrameHandlers._schema,
    Kind.REGISTER: FrameHandlers._register,
    Kind.STREAMS: FrameHandlers._streams,
    Kind.CUT: FrameHandlers._cut,
    Kind.REPLY: FrameHandlers._reply,
    Kind.CAPS_ACK: FrameHandlers._caps_ack,
    Kind.THRESHOLDS_ACK: FrameHandlers._thresholds_ack,
    Kind.ALERT: FrameHandlers._alert,
    Kind.SPACE: FrameHandlers._space,
}


def _check_holder(held: Credential | None, revoked: Container[str]) -> Credential:
    """Whether a peer with this certificate may speak at all; decided before its HELLO is read.

    With TLS a peer without a certificate may ask for the CA's and enrol, nothing else. Expired certificates
    and those of another CA do not get this far: the handshake refuses them.

    Raises:
        PeerRefused: ``not-enrolled`` or ``revoked``.
    """
    if held is None:
        raise not_enrolled()
    if held.serial in revoked:
        raise PeerRefused(
            "revoked", f"the certificate {held.serial} of gateway {held.name} was revoked; enrol it again"
        )
    return held


def _check_identity(held: Credential, hello: Hello) -> None:
    """Whether this HELLO has the gateway and the name that its certificate has.

    Raises:
        PeerRefused: ``wrong-identity`` or ``wrong-name``.
    """
    if held.gateway_id != hello.gateway_id:
        raise PeerRefused(
            "wrong-identity",
            f"it calls itself {hello.gateway_id}, its certificate is for {held.gateway_id} ({held.name})",
        )
    if held.name != hello.name:
        raise PeerRefused(
            "wrong-name",
            f"it calls itself {hello.name!r}, its certificate is for {held.name!r}. Correct `name` in the "
            "agent's file, or enrol it under the new name",
        )

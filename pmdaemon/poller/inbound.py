"""The inbound thread of a pair: the only one that selects on agents' sockets, reads, closes and posts.

It wakes for data, for a blocked send that has cleared, for new connections from the parent and for messages
of the outbound thread and the certificate thread (``ToInbound``); it never waits for one gateway. Fairness:
a ready socket gets one read of at most ``ROOM_BYTES`` a round (epoll is level-triggered, what is left comes
up in the next round), so a gateway with a large backlog delays another by one read's work. Time: every
``SWEEP_NS`` it ends the sessions that ``poller.timeouts`` names. Admission of new connections lives in
``poller.admission``.

Whatever goes wrong while one connection is served ends that connection: it is logged with its trace,
counted (``connection_faults``) and closed, and the thread goes on. A damaged mailbox alone is no peer's
doing and ends the process, which the parent replaces.

``Readiness`` is epoll itself, with the owner of each descriptor found by its number:
``selectors.EpollSelector`` builds a key object for every event and looks it up twice; measured, that is 1.5
us a poll.

Owns: the selector, every ``AgentConnection``'s ending, the publisher. Shares: the registry (its locks),
``to_inbound`` (a thread inbox); connections come and go through ``poller.migration``.

Source: P10, P16; DESIGN.md 3.
"""

from __future__ import annotations

import select
import selectors
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Final, NamedTuple

import structlog

from pmdaemon.errors import MailboxError, PeerGone, WireError
from pmdaemon.mailbox.mailbox import HasFileno
from pmdaemon.pki.errors import CredentialRefused
from pmdaemon.poller.admission import Admission
from pmdaemon.poller.balance import DecayingMax
from pmdaemon.poller.certificates import Answered, CertificateRefused, CertificateWorker, Revoked
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.fast_path import FRAMES
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.migration import Forward, ShardMigrator
from pmdaemon.poller.publisher import NEWS_RETRY_NS, CutPublisher
from pmdaemon.poller.timeouts import SWEEP_NS, SessionTimeouts, TimeoutPolicy
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox
from pmdaemon.runtime.transport import HandshakeFailed
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.ends import Bye, Error
from pmdaemon.wire.session import error_code, farewell

FAULTS_A_TRACE: Final = 100  # a peer that found a defect must not fill the log with its trace
FAREWELL_S: Final = 0.5  # of the 5 s or so that a pair has to stop
TIMED_READS: Final = 32  # one read in 32 is timed: the thread's clock is a system call, 1.5 us each
log = structlog.get_logger("inbound")
_MAY_LEAVE: Final = frozenset((int(Kind.ERROR), int(Kind.BYE), int(Kind.HELLO)))
READ: Final = select.EPOLLIN
WRITE: Final = select.EPOLLOUT
EVENTS_A_ROUND: Final = 256  # some 5 ms of work: messages, posts and sweeps have their turn between rounds
_INTEREST: Final = {
    selectors.EVENT_READ: READ,
    selectors.EVENT_WRITE: WRITE,
    selectors.EVENT_READ | selectors.EVENT_WRITE: READ | WRITE,
}


class Readiness:
    """Sources and what is awaited of them (``selectors.EVENT_READ``, ``EVENT_WRITE``).

    Attributes:
        owners: source by descriptor.
        wait: (seconds or -1, most events) -> (descriptor, events) of those that are ready.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self.owners: dict[int, HasFileno] = {}
        self.wait = self._epoll.poll

    def register(self, source: HasFileno, interest: int) -> None:
        """Begin to wait for it."""
        descriptor = source.fileno()
        self._epoll.register(descriptor, _INTEREST[interest])
        self.owners[descriptor] = source

    def modify(self, source: HasFileno, interest: int) -> None:
        """Wait for something else of it."""
        self._epoll.modify(source.fileno(), _INTEREST[interest])

    def unregister(self, source: HasFileno) -> None:
        """Wait for it no more; its descriptor is still open."""
        descriptor = source.fileno()
        del self.owners[descriptor]
        self._epoll.unregister(descriptor)

    def close(self) -> None:
        """Give the descriptor back."""
        self._epoll.close()
        self.owners.clear()


class PostAnnouncement(NamedTuple):
    """Post this announcement."""

    message: bytes
    recipients: tuple[str, ...]


class AnnounceAgain(NamedTuple):
    """These recipients have restarted; announce every session to them."""

    recipients: tuple[str, ...]


class Blocked(NamedTuple):
    """This connection has output waiting, or is doomed."""

    conn: AgentConnection


ToInbound = PostAnnouncement | AnnounceAgain | Blocked | Answered | CertificateRefused | Revoked | Forward


class Inbound:
    """The inbound thread's work; ``run`` is the thread's target, ``step`` one round of it.

    Attributes:
        received_bytes: from agents, by this process.
        steps: rounds so far.
        t_ptmax: CPU us a message takes, at most (P11).
    """

    def __init__(
        self,
        registry: Registry,
        handlers: FrameHandlers,
        publisher: CutPublisher,
        clock: Clock,
        policy: TimeoutPolicy,
        *,
        to_inbound: ThreadInbox[ToInbound],
        migrator: ShardMigrator | None,
        counters: Counter[str],
        certificate_worker: CertificateWorker | None = None,
        on_sweep: Callable[[], None] = lambda: None,
        thread_time_ns: Callable[[], int] = time.thread_time_ns,
    ) -> None:
        self._handlers = handlers
        self._catch_up = registry.catch_up
        self._fast_path = handlers.fast_path
        self._publisher = publisher
        self._batch = publisher.batch
        self._clock = clock
        self._monotonic_ns = clock.monotonic_ns
        self._to_inbound = to_inbound
        self._migrator = migrator
        self._channel_waits = False
        self.steps = 0
        self._counters = counters
        self._admission = Admission(
            clock, counters, certificate_worker, lambda conn: self._to_inbound.put(Blocked(conn))
        )
        self._timeouts = SessionTimeouts(
            registry, handlers, clock, policy, counters, certificate_worker, publisher
        )
        self._on_sweep = on_sweep
        self._readiness = Readiness()
        self._thread_time_ns = thread_time_ns
        self._connections: set[AgentConnection] = set()
        self.received_bytes = 0
        self._sweep_at_ns = clock.monotonic_ns() + SWEEP_NS
        self._reads = 0
        self.t_ptmax = DecayingMax()
        self._readiness.register(to_inbound, selectors.EVENT_READ)
        if migrator is not None:
            self._readiness.register(migrator, selectors.EVENT_READ)

    @property
    def connections(self) -> int:
        """Open connections, registered or not."""
        return len(self._connections)

    def run(self, stop: Stop) -> None:
        """Work until the stop; then post what is batched and close every connection."""
        self.watch(stop)
        while not stop.is_set():
            self.step()
        self.shut(stop.reason)

    def watch(self, stop: Stop) -> None:
        """Let the stop end a step's wait."""
        self._readiness.register(stop, selectors.EVENT_READ)

    def shut(self, reason: str) -> None:
        """Send every agent BYE, post what waits, close everything."""
        bye = Bye(f"server stops: {reason}").encode()
        why = f"its pair of the PMDaemon stops: {reason}"
        for conn in self._connections:
            conn.finish(Kind.BYE, bye, why, self._clock.monotonic_ns())
        self._flush_farewells()
        for conn in tuple(self._connections):
            self._drop(conn, why, by_us=True)
        self._publisher.post_cuts()
        self._publisher.flush(self._clock.monotonic_ns())
        self._readiness.close()

    def _flush_farewells(self) -> None:
        """Give agents with output that waits ``FAREWELL_S`` to read it: BYE is the end of it."""
        sleeper, waiting = select.poll(), {}
        for conn in self._connections:
            if conn.secured and conn.waiting_bytes:
                waiting[conn.fileno()] = conn
                sleeper.register(conn, select.POLLOUT)
        deadline = Deadline(FAREWELL_S)
        while waiting and not deadline.passed:
            for descriptor, _events in sleeper.poll(deadline.left_s() * 1000):
                if waiting[descriptor].flush():
                    del waiting[descriptor]
                    sleeper.unregister(descriptor)

    def step(self, limit_s: float | None = None) -> bool:
        """One round: wait, serve each ready descriptor once, flush and sweep what is due.

        Returns:
            Whether a connection was ready.
        """
        self._admission.begin_round()
        ready = self._readiness.wait(self._timeout_s() if limit_s is None else limit_s, EVENTS_A_ROUND)
        self.steps += 1
        self._fast_path.begin()
        served = False
        owner_of = self._readiness.owners.get
        for descriptor, events in ready:
            source = owner_of(descriptor)  # None: closed by an earlier event of this round
            if isinstance(source, AgentConnection):
                served = True
                try:
                    if events == READ and source.secured:
                        self._receive(source)  # nearly every event
                    else:
                        self._serve(source, events)
                except MailboxError:
                    raise
                except Exception:  # noqa: BLE001 - ``_fault`` logs it
                    self._fault(source)
            elif source is self._to_inbound:
                self._take_messages()
            elif source is self._migrator and self._migrator is not None:
                self._serve_channel(self._migrator, events)
        if self._migrator is not None:
            self._move(self._migrator)
        now_ns = self._clock.monotonic_ns()
        self._fast_path.account()
        self._publisher.flush(now_ns)
        for recipient in self._publisher.neglected():
            self._handlers.announce_again(recipient)
        if now_ns >= self._sweep_at_ns:
            self._sweep_at_ns = now_ns + SWEEP_NS
            self._sweep(now_ns)
            self._on_sweep()
        return served

    def _fault(self, conn: AgentConnection) -> None:
        """A defect of the server came up while this connection was served: it ends, nothing else does."""
        self._counters["connection_faults"] += 1
        if self._counters["connection_faults"] % FAULTS_A_TRACE == 1:
            log.exception("connection-fault", address=conn.address, count=self._counters["connection_faults"])
        self._drop(conn, "a fault of the server, see its log")

    def _timeout_s(self) -> float:
        if self._migrator is not None and self._migrator.has_work:
            return 0.0
        now_ns = self._clock.monotonic_ns()
        until_ns = self._sweep_at_ns
        if (due_ns := self._publisher.due_ns()) is not None:
            until_ns = min(until_ns, due_ns)
        if self._publisher.waiting_news:
            until_ns = min(until_ns, now_ns + NEWS_RETRY_NS)
        return max(0.0, (until_ns - now_ns) / 1e9)

    # -- connections

    def adopt(self, sock: socket.socket, address: str) -> AgentConnection | None:
        """Serve a new socket; None if it was turned away. With TLS configured it must speak that."""
        may_stay, oldest = self._admission.make_room(sock, address)
        if oldest is not None:
            reason = "it did not register, and others wait"
            self._admission.record_eviction(oldest, reason)
            self._drop(oldest, reason)
        if not may_stay:
            return None
        conn = self._admission.open(sock, address)
        if conn is not None:
            self._connections.add(conn)
            self._readiness.register(conn, selectors.EVENT_READ)
        return conn

    def _secure(self, conn: AgentConnection) -> None:
        """One step of a TLS handshake; a few a round, the others come up again in the next."""
        if not self._admission.handshakes_left:
            return
        if self._migrator is not None and self._migrator.passes_on_before_tls(conn, self):
            return
        self._admission.handshakes_left -= 1
        try:
            wanted = conn.secure()
        except (HandshakeFailed, CredentialRefused) as exc:
            self._record_refusal(conn, exc.code, str(exc))
            self._drop(conn, str(exc))
            return
        if wanted is None:
            self._counters["tls_handshakes"] += 1
        self._readiness.modify(conn, wanted or selectors.EVENT_READ)

    def release(self, conn: AgentConnection) -> None:
        """Serve a connection no more; it leaves for another process."""
        self._connections.discard(conn)
        self._admission.unregistered.remove(conn)
        self._readiness.unregister(conn)

    def read_pending(self, conn: AgentConnection) -> None:
        """Act on bytes that came with a connection from another process."""
        try:
            self._handle(conn, conn.resume_frames())
        except MailboxError:
            raise
        except Exception:  # noqa: BLE001 - ``_fault`` logs it
            self._fault(conn)
        if not conn.closed and conn.waiting_bytes:
            self._readiness.modify(conn, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _serve_channel(self, migrator: ShardMigrator, events: int) -> None:
        try:
            if events & WRITE:
                migrator.channel.flush()
            if events & ~WRITE:
                migrator.take(self)
        except PeerGone as exc:
            # The parent has died; its pipe stops this process. Until then, serve what is here.
            log.warning("no-more-arrivals", reason=str(exc))
            self._readiness.unregister(migrator)
            self._migrator = None

    def _move(self, migrator: ShardMigrator) -> None:
        """End sessions whose shards have left, and ask for write readiness while the parent's end is full."""
        if migrator.has_work:
            migrator.end_leaving(self._monotonic_ns())
        if bool(migrator.channel.waiting) != self._channel_waits:
            self._channel_waits = not self._channel_waits
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._channel_waits else 0)
            self._readiness.modify(migrator, events)

    def _serve(self, conn: AgentConnection, events: int) -> None:
        if not conn.secured:
            self._secure(conn)
            return
        if events & ~READ and conn.flush():
            self._readiness.modify(conn, selectors.EVENT_READ)
        if events & ~WRITE:  # also an error or a hang-up: reading tells which
            self._receive(conn)
        if conn.doomed and not conn.closed:
            self._end_doomed(conn)

    def _end_doomed(self, conn: AgentConnection) -> None:
        self._counters["doomed_connections"] += 1
        self._ended(conn, conn.doomed)

    def _receive(self, conn: AgentConnection) -> None:
        """Read once and act on it; one read in ``TIMED_READS`` is timed, for T_ptmax."""
        clock = self._monotonic_ns
        now_ns = clock()
        self._reads += 1
        is_timed = not self._reads % TIMED_READS
        started_ns = self._thread_time_ns() if is_timed else 0
        room = self._batch.room
        try:
            size = conn.receive(room, now_ns)
        except OSError as exc:
            self._ended(conn, f"receiving failed: {exc.strerror or exc}")
            return
        if size is None:
            self._ended(conn, "the connection was closed by the agent")
            return
        self.received_bytes += size
        is_taken = self._fast_path.take(conn, room, size, is_placed=True)
        messages = FRAMES if is_taken else self._take(conn, room[:size])
        if is_timed and messages:
            self.t_ptmax.add((self._thread_time_ns() - started_ns) / 1000 / messages, now_ns)

    def _take(self, conn: AgentConnection, data: memoryview) -> int:
        """Act on what one read brought, the long way; returns the number of frames."""
        fast_path = self._fast_path
        sample = (
            bytes(data) if fast_path.should_learn else b""
        )  # handling a cut may move it over what was read
        messages = self._handle(conn, conn.session.feed(data))
        if sample and messages == FRAMES:
            is_accepted = conn.gateway is not None  # a refused session has none any more
            if is_accepted and conn.session.is_whole:  # nothing is left behind the two frames
                fast_path.learn(memoryview(sample))
        return messages

    def _handle(self, conn: AgentConnection, frames: Iterator[frame.Frame]) -> int:
        """Act on frames, one after the other; returns their number."""
        messages = 0
        try:
            for received in frames:
                messages += 1
                if received.kind in _MAY_LEAVE and self._leaves(conn, received, frames):
                    return messages
                self._handlers.handle(conn, received)
            if conn.gateway is not None:
                self._admission.unregistered.remove(conn)
        except WireError as exc:
            self._refuse(conn, exc)
        return messages

    def _ended(self, conn: AgentConnection, reason: str) -> None:
        """The peer, or the network, has ended it: counted where there was no proper farewell."""
        part_bytes = conn.session.pending_bytes
        if part_bytes:
            reason += f", {part_bytes} bytes into a frame"
        if conn.drain_until_ns is None and (part_bytes or conn.gateway is None):
            code = "cut-short" if part_bytes else "closed"
            self._record_refusal(conn, code, reason)
        self._drop(conn, reason)

    def _record_refusal(self, conn: AgentConnection, code: str, reason: str) -> None:
        if conn.is_dialled and self._migrator is not None:
            self._migrator.report_refusal(conn, f"{code}: {reason}")
        self._admission.record_refusal(conn, code, reason)

    def _leaves(self, conn: AgentConnection, received: frame.Frame, frames: Iterator[frame.Frame]) -> bool:
        """Whether this frame ends the connection here: a farewell, or HELLO of another pair's gateway."""
        if received.kind != Kind.HELLO:
            self._drop(conn, farewell(received), planned=received.kind == Kind.BYE)
            return True
        gateway_id = None if self._migrator is None else self._migrator.foreign_gateway(conn, received)
        if self._migrator is None or gateway_id is None:
            return False
        if isinstance(frames, Generator):
            frames.close()  # the session keeps HELLO and what follows it, for the other pair
        self._migrator.pass_on(conn, gateway_id, self)
        return True

    def _refuse(self, conn: AgentConnection, error: WireError) -> None:
        """A malformed or misplaced frame: this connection is closed with the reason, nothing else."""
        code = error_code(error)
        self._record_refusal(conn, code, str(error))
        self._handlers.refused(conn, str(error))
        last = Error(code, f"{conn.address}: {error}"[:2000]).encode()
        conn.finish(Kind.ERROR, last, f"{code}: {error}", self._clock.monotonic_ns())
        self._handlers.lost(conn, conn.end_reason)

    def _drop(
        self, conn: AgentConnection, reason: str, *, by_us: bool = False, planned: bool = False
    ) -> None:
        self._connections.discard(conn)
        self._admission.unregistered.remove(conn)
        self._readiness.unregister(conn)
        conn.close()
        if self._migrator is not None:
            self._migrator.forget(conn)
        self._handlers.lost(conn, conn.end_reason or reason, by_us=by_us, planned=planned)
        log.debug("disconnected", address=conn.address, reason=conn.end_reason or reason)

    def _take_messages(self) -> None:
        for item in self._to_inbound.drain():
            try:
                self._act_on(item)
            except MailboxError:
                raise
            except Exception:
                if not isinstance(item, Blocked | Answered | CertificateRefused):
                    raise  # it is about no connection
                self._fault(item.conn)

    def _act_on(self, item: ToInbound) -> None:
        match item:
            case PostAnnouncement(message, recipients):
                self._publisher.news(message, *recipients)
            case Forward():
                if self._migrator is not None:
                    self._migrator.forward(item)
            case AnnounceAgain(recipients):
                self._handlers.announce_again(*recipients)
            case Blocked(conn):
                if conn.closed:
                    return
                if conn.doomed:
                    self._end_doomed(conn)
                elif conn.waiting_bytes:
                    self._readiness.modify(conn, selectors.EVENT_READ | selectors.EVENT_WRITE)
            case Answered(conn, held, encoded):
                conn.asking = False
                self._handlers.enrolments.made(conn, held)
                conn.send((Kind.CERTIFICATE, encoded))
            case CertificateRefused(conn, error):
                conn.asking = False
                self._handlers.enrolments.refused(conn, error)
                if not conn.closed:
                    self._refuse(conn, error)
            case Revoked():
                for conn, error in self._timeouts.revoked(tuple(self._connections)):
                    self._refuse(conn, error)

    def _sweep(self, now_ns: int) -> None:
        for conn, error in self._timeouts.expired(tuple(self._connections)):
            self._refuse(conn, error)
        for conn, reason, code in self._timeouts.overdue(tuple(self._connections), now_ns):
            if code:
                self._record_refusal(conn, code, reason)
            self._drop(conn, reason)
        self._timeouts.check_durability(now_ns)
        if cuts := self._counters["cuts"]:
            gateways = len(self._connections) - len(self._admission.unregistered)
            self._catch_up.set_present(gateways * self.received_bytes / cuts)

"""A session: what a program has of the message system.

::

    with MessageSession(urls, "billing", node=7, directory=path) as session:
        session.create(Destination("orders.eu"))
        session.producer("orders.eu").send(b"...")
        consumer = session.consumer("orders.*", "billing")
        if received := consumer.receive(5.0):
            received.acknowledge()

Threads: ``cl-NAME`` has the connection (``link``); ``cl-work-N`` run handlers (``subscribe``), in order
within the session and destination. All methods block, and may be called from any thread but these.

Lock ``_lock`` guards ``_outboxes``, ``_consumers``, ``_pool`` and ``_is_closed``.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pmdaemon.runtime.clock import Deadline, SystemClock
from sla_server.cluster.errors import ClusterError
from sla_server.cluster.messages import mirrors, names, subscribers
from sla_server.cluster.messages.catalogue import Catalogue, Destination
from sla_server.cluster.messages.consumer import (
    ACK_WAIT_S,
    CREDIT,
    CREDIT_BYTES,
    MAX_DELIVERIES,
    Consumer,
    headers_of_copy,
    run_handler,
)
from sla_server.cluster.messages.credit import ReceiveShares
from sla_server.cluster.messages.errors import DestinationFull, DestinationMissing, PayloadTooLarge
from sla_server.cluster.messages.feed import Received
from sla_server.cluster.messages.fragments import EARLY, MANIFEST, FragmentStore, fragments_identity
from sla_server.cluster.messages.identifiers import IdentifierSource
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_streams import mirror_name
from sla_server.cluster.messages.ordered import OrderedPool
from sla_server.cluster.messages.producer import (
    IDENTITY,
    SEND_LIMIT_S,
    Outbox,
    Outgoing,
    Producer,
    SendWindows,
    checked_headers,
    expiry,
)
from sla_server.cluster.messages.transaction import LIMIT_S, Transaction, no_fault
from sla_server.cluster.messages.transaction_records import MARK, Mark, State, check_identity
from sla_server.cluster.messages.transaction_recovery import PassResult, TransactionRecovery
from sla_server.cluster.messages.transaction_register import TransactionRegister

WINDOW_MESSAGES = 1000
WINDOW_BYTES = 16 << 20
RECEIVED_MESSAGES = 10_000
RECEIVED_BYTES = 64 << 20
FRAGMENTS_BYTES = 256 << 20
TRANSACTIONS_BYTES = 64 << 20
"""A state takes some 550 bytes, each lock 280 and 100 in the state. They are kept for an hour, so three
quarters of it are enough for 17 transactions a second that acknowledge one message."""


class MessageSession:
    """See the module.

    Args:
        urls: of nodes of the cluster.
        name: of the session.
        node: number of this program's node, unlike all others in the cluster (``identifiers``).
        directory: for the state of identifiers, and which large messages are being sent; of this session
            alone.
        replicas: of the catalogue and of ``_DMQ``, if this session is the first to need them.
        workers: threads that run handlers.
        window_messages, window_bytes: what may be unconfirmed at once.
        received_messages, received_bytes: what may be handed out and not acknowledged at once, in equal
            shares for each destination of each consumer.
        fragments_bytes: for fragments of large messages, if this session is the first to send one.
        transactions_bytes: for states of transactions, if this session is the first to have one.
        tls: if nodes ask for it.

    Raises:
        ClusterUnreachable: no node answers.
        BadName, BadSettings, StateInUse: what was given is wrong.
    """

    def __init__(
        self,
        urls: Sequence[str],
        name: str,
        *,
        node: int,
        directory: Path,
        replicas: int = 3,
        workers: int = 4,
        window_messages: int = WINDOW_MESSAGES,
        window_bytes: int = WINDOW_BYTES,
        received_messages: int = RECEIVED_MESSAGES,
        received_bytes: int = RECEIVED_BYTES,
        fragments_bytes: int = FRAGMENTS_BYTES,
        transactions_bytes: int = TRANSACTIONS_BYTES,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        names.check_name(name, "session")
        self.name = name
        self._replicas = replicas
        self._workers = workers
        self._lock = threading.Lock()
        self._is_closed = False
        self._outboxes: dict[str, Outbox] = {}
        self._consumers: list[Consumer] = []
        self._pool: OrderedPool | None = None
        self._windows = SendWindows(window_messages, window_bytes)
        self._shares = ReceiveShares(received_messages, received_bytes)
        self.identifiers = IdentifierSource(directory, node)
        try:
            self.link = EngineLink(urls, name, tls)
            try:
                self.catalogue = Catalogue(self.link, replicas)
                self._fragments = FragmentStore(self.link, replicas, fragments_bytes, directory)
                self._register = TransactionRegister(
                    self.link, self.catalogue, name, replicas, transactions_bytes
                )
                self._recovery = TransactionRecovery(self.link, self._register)
                self.link.run(self.catalogue.open())
                self.link.start(self._fragments.collect())
            except BaseException:
                self.link.close()
                raise
        except BaseException:
            self.identifiers.close()
            raise

    def __enter__(self) -> MessageSession:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def create(self, destination: Destination) -> Destination:
        """Make a destination, or find that it is there.

        Raises:
            BadName, BadSettings: it cannot be.
            DestinationDiffers: it is there with other settings.
            NotConfirmed: perhaps it is there; repeat it.
        """
        destination.check()
        return self.link.run(self.catalogue.create(destination))

    def add_mirror(self, name: str, node: str) -> str:
        """Make an asynchronous mirror of a destination, and of all others of its domain, on a node.

        What is confirmed is not on it yet: it is behind, says how far (``mirrors_of``), and is counted
        nowhere as a copy. Returns the JetStream stream that it is.

        Raises:
            MirrorRefused: the node has the primary or a backup, there is none such, or ``name`` is a mirror.
            BadName, DestinationMissing: there is no such destination, or it is reserved.
            NotConfirmed: perhaps it is made; repeat it.
        """
        return self.link.run(mirrors.add(self.link, self.catalogue, name, node, SystemClock()))

    def remove_mirror(self, name: str, node: str) -> None:
        """Remove the mirror of a destination's domain on a node.

        Raises:
            MirrorRefused: there is none.
            NotConfirmed: perhaps it is removed; repeat it.
        """
        self.link.run(mirrors.remove(self.link, self.catalogue, name, node))

    def mirrors_of(self, name: str) -> list[mirrors.MirrorRow]:
        """Of a destination's domain: where they are, and how far behind.

        Raises:
            DestinationMissing: there is no such destination.
            NotConfirmed: the cluster has no majority.
        """

        async def found() -> list[mirrors.MirrorRow]:
            stream = (await self.catalogue.get(name)).stream
            rows = await self.link.retry(
                lambda: mirrors.rows(self.link, SystemClock()), "mirrors", SEND_LIMIT_S
            )
            return [row for row in rows if row.primary == stream]

        return self.link.run(found())

    def read_mirror(self, name: str, node: str, begin: int = 1) -> Iterator[mirrors.MirroredMessage]:
        """What a mirror has of a destination, on purpose: nothing is acknowledged by it, or taken away.

        It may lack what was sent last, and still have what was consumed a few seconds ago. What transactions
        have not committed is left out.

        Args:
            name: of the destination.
            node: that has the mirror.
            begin: sequence; with that of the last one and 1 more, what has come since.

        Raises:
            DestinationMissing: there is no such destination or mirror.
            NotConfirmed: its node does not answer.
        """
        destination = self.destination(name)
        mirror = mirror_name(destination.stream, node)
        reading = mirrors.read(self.link, mirror, destination.subject, begin)
        while (message := self.link.run(_next_of(reading))) is not None:
            mark = message.headers.get(MARK)
            if mark is None or self.link.run(self._register.is_committed(Mark.parse(mark))):
                yield message

    def subscribers_of(self, name: str) -> tuple[subscribers.SubscriberRow, ...]:
        """Of a topic: who they are, and what waits for each.

        Raises:
            DestinationMissing, SubscriberRefused: there is no such topic.
            NotConfirmed: the cluster has no majority.
        """
        return self.link.run(subscribers.rows(self.link, self.catalogue, name))

    def end_subscriber(self, name: str, subscriber: str) -> subscribers.SubscriberRow:
        """Have a topic keep nothing more for a subscriber that does not come back; what it was.

        Raises:
            DestinationMissing, SubscriberRefused: there is none, or a program receives as it now.
            NotConfirmed: perhaps it has ended; repeat it.
        """
        return self.link.run(subscribers.end(self.link, self.catalogue, name, subscriber))

    def producer(self, name: str) -> Producer:
        """Of a destination; all of one session share its order and its window.

        Raises:
            BadName: reserved.
            DestinationMissing: there is none.
        """
        names.check_name(name)
        return Producer(self._outbox(name), self.identifiers)

    def consumer(
        self,
        selector: str,
        name: str,
        *,
        credit: int = CREDIT,
        credit_bytes: int = CREDIT_BYTES,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> Consumer:
        """Of all destinations that ``selector`` matches (``names``), those created later included.

        Args:
            selector: a name, or a pattern.
            name: of the subscriber: a topic remembers under it what was acknowledged.
            credit: messages of each destination that may be handed out and not acknowledged.
            credit_bytes: likewise of their bytes with headers. Both are less if the session has so many
                destinations that its own limits are (``received_messages``).
            ack_wait_s: after the death of the session what it held is handed out again after this time, or
                the longest that another consumer of the destination has asked for. With less than
                ``ACK_WAIT_S`` also what a living session holds, when a node dies and elections take longer.
            max_deliveries: so often handed out without an acknowledgement, a message goes to ``_DMQ``.
        """
        return self._add_consumer(
            Consumer(
                self.link,
                self.catalogue,
                names.Selector(selector),
                name,
                self._store_dead,
                self._register,
                self._shares,
                credit=credit,
                credit_bytes=credit_bytes,
                ack_wait_s=ack_wait_s,
                max_deliveries=max_deliveries,
            )
        )

    def subscribe(
        self,
        selector: str,
        name: str,
        handler: Callable[[Received], None],
        *,
        credit: int = CREDIT,
        credit_bytes: int = CREDIT_BYTES,
        ack_wait_s: float = ACK_WAIT_S,
        max_deliveries: int = MAX_DELIVERIES,
    ) -> Consumer:
        """Like ``consumer``; a pool gives messages to ``handler``, in order within a destination.

        What ``handler`` returns from is acknowledged; if it raises, the message comes again.
        """
        consumer: Consumer
        made = threading.Event()
        pool = self._workers_pool()

        def task(received: Received) -> None:
            made.wait()
            run_handler(consumer, received, handler)

        def dispatch(received: Received) -> None:
            pool.post(received.destination, lambda: task(received))

        consumer = Consumer(
            self.link,
            self.catalogue,
            names.Selector(selector),
            name,
            self._store_dead,
            self._register,
            self._shares,
            credit=credit,
            credit_bytes=credit_bytes,
            ack_wait_s=ack_wait_s,
            max_deliveries=max_deliveries,
            handler=dispatch,
        )
        made.set()
        return self._add_consumer(consumer)

    def send_large(
        self,
        name: str,
        source: BinaryIO,
        headers: Mapping[str, str] | None = None,
        *,
        expires_s: float | None = None,
        early: bool = False,
    ) -> str:
        """Store a message of any size, read from ``source`` piece by piece; returns its identity (C8).

        Args:
            name: of the destination.
            source: blocks until it has something, or ends.
            headers: as of ``Producer.send``.
            expires_s: likewise.
            early: consumers are given it with its first fragments, and may read those before the last has
                come (``fragments``); of a release that does not know this they find it damaged.

        Raises:
            DestinationFull: there is no room for its fragments, or for the message at the destination.
            SourceTooSlow: ``source`` took half a day; not stored.
            NotConfirmed: perhaps stored.
            OSError: of ``source``; no consumer sees anything of it, or with ``early`` that it has failed.
        """
        names.check_name(name)
        outbox, identity = self._outbox(name), str(self.identifiers.make())
        known_as = outbox.destination.engine_identity(identity)
        own = checked_headers(headers) | expiry(expires_s) | {IDENTITY: known_as}

        def message_of(manifest: str) -> Outgoing:
            return Outgoing(identity, b"", own | {MANIFEST: manifest}, Deadline(SEND_LIMIT_S), SEND_LIMIT_S)

        def announce() -> None:
            message = message_of(EARLY)
            outbox.add(message, wait=True)
            message.done.result()

        if early:
            self._fragments.store_early(identity, source, announce)
            return identity
        message = message_of(self._fragments.store(identity, source).encode())
        try:
            outbox.add(message, wait=True)
        except ClusterError:  # it was not sent at all
            self._fragments.discard(identity)
            raise
        try:
            return message.done.result()
        except (DestinationFull, PayloadTooLarge):  # refused; of all else it is not known
            self._fragments.discard(identity)
            raise

    def read_large(self, received: Received) -> Iterator[bytes]:
        """The pieces of a message that ``send_large`` sent. Use them only when the last has come.

        Raises:
            FragmentsDamaged: a piece is missing, or they are not what was sent.
            NotConfirmed: no node answers.
        """
        return self._fragments.read(received)

    def acknowledge_large(self, received: Received) -> None:
        """Acknowledge it, then remove its fragments: for queues, where no other consumer needs them.

        Raises:
            NotConfirmed, SessionClosed: as by ``Received.acknowledge``.
        """
        received.acknowledge()
        if MANIFEST in received.headers:
            self._fragments.remove(fragments_identity(received))

    def transaction(
        self, identity: str = "", *, limit_s: float = LIMIT_S, fault: Callable[[str], None] = no_fault
    ) -> Transaction:
        """Sends and acknowledgements that all happen, or none (``transaction``).

        Args:
            identity: of a program that wants to ask ``outcome`` after its own death: it writes this down
                before. No other transaction has had it. "": one is made.
            limit_s: from this call to the commit.
            fault: called with a name between every two steps of the commit, for tests.
        """

        async def begin() -> None:
            self._recovery.start()

        if not self.link.has_account:  # what others leave it may not see or remove: nodes do
            self.link.run(begin())
        return Transaction(self, self._register, identity, limit_s, fault)

    def outcome(self, identity: str, limit_s: float = SEND_LIMIT_S) -> bool:
        """Whether a transaction was committed. One that is open is rolled back by the question (C1).

        Only of one that was given its identity, and within an hour of the commit (``KEPT_S``). To ask is how
        a program goes on that died, here or elsewhere: what it finds rolled back it does again under another
        identity, and the program of before, should it only be slow, can commit no more.

        Raises:
            BadSettings: the identity is none that a program has given.
            NotConfirmed: the cluster has no majority.
        """
        check_identity(identity)

        async def attempt() -> bool:
            record = await self._register.final(identity, limit_s, at_once=True)
            if record is None:
                raise TimeoutError("another session decides it just now")
            return record.state is State.COMMITTED

        async def ask() -> bool:
            await self._register.make(limit_s)
            return await self.link.retry(attempt, f"outcome of transaction {identity}", limit_s)

        return self.link.run(ask())

    def recover_transactions(self) -> PassResult:
        """End what other sessions have left; a session that has transactions does so from time to time.

        Raises:
            NotConfirmed: the cluster has no majority.
        """
        return self.link.run(self._recovery.recover())

    def destination(self, name: str) -> Destination:
        """A queue or topic by its name.

        Raises:
            BadName: reserved.
            DestinationMissing: there is none.
        """
        names.check_name(name)
        return self.link.run(self.catalogue.get(name))

    def flush(self, name: str, limit_s: float) -> None:
        """Wait until all that was sent to a destination before is confirmed or refused.

        Raises:
            NotConfirmed: not within ``limit_s``.
        """
        with self._lock:
            outbox = self._outboxes.get(name)
        if outbox is not None:
            outbox.flush(limit_s)

    def has_received(self, received: Received) -> bool:
        """Whether a message came by this session."""
        return received.came_by(self.link)

    @property
    def resumptions(self) -> int:
        """How often the session went on at another node."""
        return self.link.reconnections

    @property
    def connected_node(self) -> str:
        """Host and port of the node that the session is connected to; "" if there is none."""
        return self.link.node

    def close(self) -> None:
        """End handlers, give back what is held; what is unconfirmed is not waited for.

        Raises:
            ThreadDidNotStop: a handler runs on; all else has ended.
        """
        with self._lock:
            consumers, self._consumers = self._consumers, []
            outboxes, self._outboxes = list(self._outboxes.values()), {}
            pool, self._pool = self._pool, None
            is_closed, self._is_closed = self._is_closed, True
        if is_closed:
            return
        # In this order from the last to the first, each whatever becomes of the others: a session half closed
        # would keep what it holds from everyone else.
        with contextlib.ExitStack() as ends:
            ends.callback(self.identifiers.close)
            ends.callback(self.link.close)
            for outbox in outboxes:
                ends.callback(outbox.close)
            for consumer in consumers:
                ends.callback(consumer.close)
            if pool is not None:
                ends.callback(pool.close)

    def _add_consumer(self, consumer: Consumer) -> Consumer:
        with self._lock:
            self._consumers.append(consumer)
        return consumer

    def _workers_pool(self) -> OrderedPool:
        with self._lock:
            if self._pool is None:
                self._pool = OrderedPool(self._workers)
            return self._pool

    def _outbox(self, name: str) -> Outbox:
        destination = self.link.run(self.catalogue.get(name))

        async def make() -> Outbox:
            return Outbox(self.link, self.catalogue, destination, self._windows)

        with self._lock:
            if name not in self._outboxes:
                self._outboxes[name] = self.link.run(make())
            return self._outboxes[name]

    def _store_dead(self, received: Received, reason: str) -> None:
        """Store a copy of a message in ``_DMQ``; the same identity however often it is tried."""
        try:
            self.link.run(self.catalogue.get(names.DEAD_MESSAGES))
        except DestinationMissing:  # for accounts, which may make none, a node has
            self.link.run(self.catalogue.create(Destination(names.DEAD_MESSAGES, replicas=self._replicas)))
        headers = headers_of_copy(received, reason, self.link.copy_limit_bytes)
        message = Outgoing(
            headers[IDENTITY], received.data, headers, Deadline(SEND_LIMIT_S), SEND_LIMIT_S, is_copy=True
        )
        self._outbox(names.DEAD_MESSAGES).add(message, wait=True)
        message.done.result()


async def _next_of(reading: AsyncIterator[mirrors.MirroredMessage]) -> mirrors.MirroredMessage | None:
    return await anext(reading, None)

"""The gateways of a pair: what each is, its session, the positions of its cuts; and the registry of all.

A ``Gateway`` lives as long as the pair process; sessions come and go. Two threads use it:

    written by inbound alone     name, software, address, epoch, exports, streams, offset, condition, dropped,
                                 conn (under the lock)
    under ``lock``               record, conn, awaiting_since_ns
    read by outbound             conn, awaiting_since_ns, record: always under the lock

The lock is held for microseconds and never while sending: outbound takes what it needs (the frame and the
connection), lets go, then sends. If a newer session took over in between, the bytes go to the old, closed
connection and are dropped there; the new session starts with no poll out.

The ``Registry`` has a lock of its own, which guards the map of gateways and ``watermarks``. It is taken
before a gateway's lock, never after. Story of the race it prevents: a gateway registers (inbound) while
WATERMARKS of a new dbmanager arrive (outbound). Either the gateway is in the map before, and is rewound
with the others; or it reads the new watermarks when it registers. Without the lock it could start from the
old ones and never be rewound.

What is durable of an epoch is stored in one place: in the gateway's record while that holds the epoch, else
in ``watermarks``. A caller that needs both, before a record begins again or leaves, asks ``_gather``.

Source: P3, P16; DESIGN.md 4 (watermarks before polls).
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Container, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from pmdaemon.poller.balance import SHARDS, shard_of
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.clock_offset import OffsetEstimator
from pmdaemon.poller.positions import CutPositions, Watermarks
from pmdaemon.wire.frame_template import encode_poll, encode_single_epoch_poll
from pmdaemon.wire.messages.agent import Hello, Registration, StreamEntry
from pmdaemon.wire.messages.server import HighWaters
from pmdaemon.wire.session import MAX_CUT_BYTES

if TYPE_CHECKING:
    from pmdaemon.poller.connection import AgentConnection

ANSWER_BYTES: Final = 2 * MAX_CUT_BYTES
"""Of cuts in the answer to one poll: one in order of any size or 256 KB of them, and the newest as LIVE."""


class GatewayState(Enum):
    """The state of a gateway, as it is announced to the rest of the server."""

    UP = "up"
    STALLED = "stalled"
    LOST = "lost"


class Gateway:
    """State of one gateway; see the module for which thread may touch what.

    Attributes:
        lock: guards ``record``, ``conn`` and ``awaiting_since_ns``.
        awaiting_since_ns: when the poll that keeps it from being polled again was sent; None while it may
            be polled.
        dropped: cuts its spool has lost in its lifetime, as it says.
        announced_dropped: the same as last announced, and when (monotonic).
    """

    __slots__ = (
        "_answer_bytes",
        "_answer_to",
        "address",
        "announced_dropped",
        "awaiting_since_ns",
        "condition",
        "conn",
        "dropped",
        "epoch",
        "exports",
        "features",
        "gateway_id",
        "id_bytes",
        "listed",
        "lock",
        "name",
        "offset",
        "record",
        "shard",
        "software",
        "streams",
    )

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.id_bytes = uuid.UUID(gateway_id).bytes
        self.shard = shard_of(gateway_id)
        self.lock = threading.Lock()
        self.record = CutPositions()
        self.conn: AgentConnection | None = None
        self.awaiting_since_ns: int | None = None
        self.name = ""
        self.software = ""
        self.address = ""
        self.epoch = 0
        self.exports: list[dict[str, Any]] = []
        self.features: tuple[str, ...] = ()
        self.listed: tuple[str, ...] | None = None
        self.streams: dict[int, StreamEntry] = {}
        self.offset = OffsetEstimator()
        self.condition = GatewayState.LOST
        self.dropped = 0
        self.announced_dropped = (0, 0)
        self._answer_bytes = 0
        self._answer_to: int | None = None

    def begin(
        self, conn: AgentConnection, hello: Hello, registration: Registration, durable: dict[int, int]
    ) -> None:
        """A session has registered. The caller has closed the one before."""
        self.name = hello.name
        self.software = hello.software
        self.address = conn.address
        self.epoch = hello.epoch
        self.exports = registration.exports
        self.features = hello.features
        self.listed = conn.credential.volumes or None if conn.credential is not None else None
        self.streams = {}
        self.offset = OffsetEstimator()
        self.condition = GatewayState.UP
        self._answer_to, self._answer_bytes = None, 0
        with self.lock:
            self.record.register(hello.epoch, registration.spool, durable)
            self.awaiting_since_ns = None
            self.conn = conn

    def end(self) -> None:
        """Its session has ended."""
        self.condition = GatewayState.LOST
        with self.lock:
            self.conn = None
            self.awaiting_since_ns = None

    def ask(
        self, number: int, now_ns: int, lease: bool, catch_up: CatchUp, unread: Container[str]
    ) -> tuple[AgentConnection, bytes] | None:
        """Account for a poll that leaves now: whereto, and the POLL frame. Thread: outbound.

        Args:
            number: of the poll.
            now_ns: monotonic.
            lease: whether it renews the lease of caps.
            catch_up: the pair's budget for backlog.
            unread: gateways whose newest cut waits for room at services.

        Returns:
            None if there is no session, an answer is still awaited, or there is no room for what it could ask
            for (``CutPositions.poll``).
        """
        with self.lock:
            conn = self.conn
            if conn is None or self.awaiting_since_ns is not None:
                return None
            single, request = self.record.poll_single_epoch(number, now_ns), None
            if single is None:
                request = self.record.poll(number, now_ns, catch_up, self.gateway_id in unread)
                if request is None:
                    return None
            self.awaiting_since_ns = now_ns
        if single is not None:
            epoch, ack, start = single
            return conn, encode_single_epoch_poll(number, now_ns, epoch, ack, start, lease)
        assert request is not None  # one of the two
        return conn, encode_poll(number, now_ns, request.ack, request.start, lease)

    def takes_answer(self, size_bytes: int) -> bool:
        """Whether a cut of this size fits into the answer to the oldest poll that is out; accounts for it.

        Cuts that come while no poll is out count to the answer before. Thread: inbound.
        """
        with self.lock:
            poll = self.record.oldest_poll
        if poll is not None and poll != self._answer_to:
            self._answer_to, self._answer_bytes = poll, 0
        self._answer_bytes += size_bytes
        return self._answer_bytes <= ANSWER_BYTES

    def answer_bytes(self, poll: int) -> int:
        """Of the cuts in the answer to ``poll``, the last that came. Thread: inbound."""
        return self._answer_bytes if poll == self._answer_to else 0

    def unask(self, number: int) -> None:
        """The poll did not leave: the session had just ended, or not quite begun. Thread: outbound."""
        with self.lock:
            self.record.unsent(number)
            self.awaiting_since_ns = None


class Registry:
    """Gateways by id. A record outlives its sessions, until the gateway moves to another pair or makes room.

    Attributes:
        catch_up: the pair's budget for backlog.
        get: a gateway that registered at least once, by its id, or None.
    """

    def __init__(self, catch_up: CatchUp) -> None:
        self.catch_up = catch_up
        self.lock = threading.Lock()
        self.watermarks = Watermarks()
        self._gateways: dict[str, Gateway] = {}
        self.get = self._gateways.get

    @property
    def has_watermarks(self) -> bool:
        """Whether dbmanager has said what it holds; before that no gateway is polled."""
        return self.watermarks.incarnation is not None

    def all(self) -> list[Gateway]:
        """Every gateway known, in order of first registration."""
        with self.lock:
            return list(self._gateways.values())

    def has_session(self, gateway_id: str) -> bool:
        """Whether a gateway is there now."""
        gateway = self.get(gateway_id)
        return gateway is not None and gateway.conn is not None

    def register(self, conn: AgentConnection, hello: Hello, registration: Registration) -> Gateway:
        """Begin a session. Thread: inbound."""
        with self.lock:
            gateway = self._gateways.get(hello.gateway_id) or Gateway(hello.gateway_id)
            self._gateways[hello.gateway_id] = gateway
            gateway.begin(conn, hello, registration, self._gather(gateway))
        return gateway

    def forget(self, gateway_id: str) -> tuple[int | None, HighWaters]:
        """Forget a gateway that has moved away or makes room; returns what is known of its durable cuts."""
        with self.lock:
            gateway = self._gateways.pop(gateway_id, None)
            known = self.watermarks.of(gateway_id) if gateway is None else self._gather(gateway)
            return self.watermarks.incarnation, [(gateway_id, epoch, seq) for epoch, seq in known.items()]

    def open(self, incarnation: int, notice: HighWaters, now_ns: int) -> bool:
        """WATERMARKS arrived; True if dbmanager is another one than before. Thread: outbound."""
        with self.lock:
            is_new = self.watermarks.open(incarnation, notice)
            if not is_new:
                self._apply_durable(notice, now_ns)
                return False
            for gateway in self._gateways.values():
                with gateway.lock:
                    gateway.record.restart(self.watermarks.of(gateway.gateway_id))
        return True

    def advance(self, incarnation: int, notice: HighWaters, now_ns: int) -> bool:
        """DURABLE arrived; False if it is of another incarnation. Thread: outbound."""
        with self.lock:
            if incarnation != self.watermarks.incarnation:
                return False
            self.watermarks.learn(self._apply_durable(notice, now_ns))
        return True

    def refused(self, first_cuts: Mapping[str, tuple[int, int]], now_ns: int) -> None:
        """A batch was refused: its cuts are asked for again. Any thread.

        Args:
            first_cuts: gateway_id to (epoch, seq) of the first of its cuts.
            now_ns: monotonic.
        """
        self.catch_up.refused(now_ns)
        for gateway_id, (epoch, seq) in first_cuts.items():
            if (gateway := self.get(gateway_id)) is not None:
                with gateway.lock:
                    gateway.record.refused(now_ns, gateway.shard / SHARDS, epoch, seq)

    def _apply_durable(self, notice: HighWaters, now_ns: int) -> HighWaters:
        """Apply what is durable where a record holds the epoch; returns the other rows."""
        others = []
        for row in notice:
            gateway_id, epoch, seq = row
            if (gateway := self.get(gateway_id)) is not None:
                with gateway.lock:
                    if gateway.record.durable(epoch, seq, now_ns):
                        continue
            others.append(row)
        return others

    def _gather(self, gateway: Gateway) -> dict[int, int]:
        """Epoch to high water, from both places."""
        with gateway.lock:
            durable = gateway.record.high_water()
        self.watermarks.learn([(gateway.gateway_id, epoch, seq) for epoch, seq in durable])
        return self.watermarks.of(gateway.gateway_id)

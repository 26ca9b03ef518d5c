"""One gateway: what it is, its session, and the positions of its cuts.

A ``Gateway`` lives as long as the pair process; sessions come and go. Two threads use it:

    written by inbound alone     name, software, address, epoch, exports, streams, offset, state, dropped,
                                 conn (under the lock)
    under ``lock``               record, conn, awaiting_since_ns
    read by outbound             conn, awaiting_since_ns, record: always under the lock

The lock is held for microseconds and never while sending: outbound takes what it needs (the frame and the
connection), lets go, then sends. If a newer session took over in between, the bytes go to the old, closed
connection and are dropped there; the new session starts with no poll out.

Source: P3, P16.
"""

from __future__ import annotations

import threading
import uuid
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from pmdaemon.poller.balance import shard_of
from pmdaemon.poller.clock_offset import OffsetEstimator
from pmdaemon.poller.positions import CutPositions
from pmdaemon.wire.frame_template import encode_poll, encode_single_epoch_poll
from pmdaemon.wire.messages.agent import Hello, Registration, StreamEntry
from pmdaemon.wire.session import MAX_CUT_BYTES

if TYPE_CHECKING:
    from pmdaemon.poller.catch_up import CatchUp
    from pmdaemon.poller.peer import AgentPeer


ANSWER_BYTES: Final = 2 * MAX_CUT_BYTES
"""Of cuts in the answer to one poll: one in order of any size or 256 KB of them, and the newest as LIVE."""


class GatewayState(Enum):
    """What the rest of the server is told of a gateway."""

    UP = "up"
    STALLED = "stalled"
    LOST = "lost"


class Gateway:
    """State of one gateway; see the module for who may touch what.

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
        "gateway_id",
        "id_bytes",
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
        self.conn: AgentPeer | None = None
        self.awaiting_since_ns: int | None = None
        self.name = ""
        self.software = ""
        self.address = ""
        self.epoch = 0
        self.exports: list[dict[str, Any]] = []
        self.streams: dict[int, StreamEntry] = {}
        self.offset = OffsetEstimator()
        self.condition = GatewayState.LOST
        self.dropped = 0
        self.announced_dropped = (0, 0)
        self._answer_bytes = 0
        self._answer_to: int | None = None

    def begin(
        self, conn: AgentPeer, hello: Hello, registration: Registration, durable: dict[int, int]
    ) -> None:
        """A session has registered. The caller has closed the one before."""
        self.name = hello.name
        self.software = hello.software
        self.address = conn.address
        self.epoch = hello.epoch
        self.exports = registration.exports
        self.streams = {}
        self.offset = OffsetEstimator()
        self.condition = GatewayState.UP
        self._answer_to, self._answer_bytes = None, 0
        with self.lock:
            self.record.register(hello.epoch, registration.spool, durable)
            self.awaiting_since_ns = None
            self.conn = conn

    def end(self) -> None:
        """Its session is over."""
        self.condition = GatewayState.LOST
        with self.lock:
            self.conn = None
            self.awaiting_since_ns = None

    def ask(self, number: int, now_ns: int, lease: bool, catch_up: CatchUp) -> tuple[AgentPeer, bytes] | None:
        """Account for a poll that leaves now: whereto, and the POLL frame.

        None if there is no session, or an answer is still awaited. ``catch_up``: the pair's budget for
        backlog. Thread: outbound.
        """
        with self.lock:
            conn = self.conn
            if conn is None or self.awaiting_since_ns is not None:
                return None
            self.awaiting_since_ns = now_ns
            sole = self.record.poll_sole(number, now_ns)
            request = self.record.poll(number, now_ns, catch_up) if sole is None else None
        if sole is not None:
            epoch, ack, start = sole
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

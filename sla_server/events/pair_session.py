"""The two ends of a mirror connection: bytes in, bytes out; no socket, no thread, no clock but the one given.

    origin   opened ──HELLO──► greeting ──WELCOME received──► mirroring
    keeper   greeting ──HELLO received, WELCOME sent──► mirroring

What a side may receive in which state is in ``RECEIVE``; anything else is a ``ProtocolViolation``, and the
link answers ERROR and closes that connection, nothing else. ``pmdaemon.wire.messages.mirror`` has the
messages.

*Origin.* It sends what its queues hold behind what the keeper has, in the order of a replay, and at most
``MOST_UNKEPT_BYTES`` that are not on the keeper's disk yet: a slow keeper costs no memory, because what waits
is in our own queues. What all recipients have confirmed before its turn came is never sent, and neither is
what was taken over from the keeper itself. A keeper without room is tried again a second later.

An event goes from the queue of events to that of what is due later, and back. So a confirmation is sent
behind all that the queues held when it was made: else the keeper would forget an event before it has the
record that takes its place. Only a keeper without room gets it at once, because it makes room.

*Keeper.* It checks each event before it stores it, and says what is on disk.

Thread: ``ev-pair``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from pmdaemon.errors import PeerRefused, ProtocolViolation, SlaError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.frame import MAX_FRAME_BYTES, Frame, FrameReader, unfold
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import WireMessage
from pmdaemon.wire.messages.ends import Bye, Error
from pmdaemon.wire.messages.mirror import (
    MIRROR_PROTO,
    MOST_EVENT_BYTES,
    MOST_EVENTS,
    MOST_IDENTITIES,
    MirrorBeat,
    MirrorConfirmed,
    MirrorDelivered,
    MirroredOpening,
    MirroredQueue,
    MirrorEvents,
    MirrorHello,
    MirrorKept,
    MirrorWelcome,
)
from sla_server.events.pair_history import Opening
from sla_server.events.pair_ledger import PartnerLedger
from sla_server.events.pair_store import MirrorStore
from sla_server.events.queue import EventQueue, decode, origin_of

CHUNK_BYTES: Final = 128 << 10
MOST_UNKEPT_BYTES: Final = 512 << 10
PIECE_BYTES: Final = 256 << 10
"""What was delivered goes to the socket in pieces: the link ends a connection with megabytes unread."""
CONFIRMED_NS: Final = 50_000_000
"""Confirmations of this time go in one message: it is part of the bound on what may be delivered twice."""
FULL_NS: Final = 1_000_000_000
BEATS: Final = 5
"""Beats within the time after which silence means that the partner is lost."""
STRANGER_BYTES: Final = 4096
"""The largest frame before the partner has said who it is."""


class MirrorState(Enum):
    """How far a session has come."""

    GREETING = "greeting"
    MIRRORING = "mirroring"


_GREETING, _MIRRORING = MirrorState.GREETING, MirrorState.MIRRORING
_ENDS: Final = frozenset((Kind.ERROR, Kind.BYE))
RECEIVE: Final = MappingProxyType(
    {
        ("origin", _GREETING): _ENDS | {Kind.MIRROR_DELIVERED, Kind.MIRROR_WELCOME},
        ("origin", _MIRRORING): _ENDS | {Kind.MIRROR_DELIVERED, Kind.MIRROR_KEPT, Kind.MIRROR_BEAT},
        ("keeper", _GREETING): _ENDS | {Kind.MIRROR_HELLO},
        ("keeper", _MIRRORING): _ENDS | {Kind.MIRROR_EVENTS, Kind.MIRROR_CONFIRMED, Kind.MIRROR_BEAT},
    }
)
"""What each role may receive, by state."""


class Reached(NamedTuple):
    """How far our recipients have come.

    Attributes:
        confirmed: what is sent to the partner. newest: number of each queue when that was so.
        passed: cursors in the queue of events, by recipient.
        noticed: the newest loss of the partner that the lanes know of.
        firing: conditions of the partner that a recipient believes to last.
    """

    confirmed: MirrorConfirmed
    newest: Mapping[str, int]
    passed: Mapping[str, int] = {}
    noticed: int = 0
    firing: frozenset[str] = frozenset()


class MirrorEnded(SlaError):
    """The partner has ended the connection, and says why."""

    retryable = True


class PartnerNames(Protocol):
    """What both sessions need of the configuration."""

    @property
    def name(self) -> str:
        """Our own."""

    @property
    def partner(self) -> str:
        """The partner's."""

    @property
    def silence_s(self) -> float:
        """After which it is lost."""


class MirrorSession(ABC):
    """What both roles share: framing, state, and what is received when.

    Attributes:
        outgoing: bytes for the socket; the link takes away what was sent.
        heard_ns: when bytes came, the newest time.
    """

    role = ""

    def __init__(self, names: PartnerNames, clock: Clock) -> None:
        self.names = names
        self.clock = clock
        self.state = MirrorState.GREETING
        self.outgoing = bytearray()
        self.heard_ns = clock.monotonic_ns()
        self._reader = FrameReader(STRANGER_BYTES)

    def received(self, data: bytes) -> None:
        """Take bytes in.

        Raises:
            MirrorEnded: the partner says so.
            WireError: it broke framing, order or a message's form: answer with ``refuse`` and close.
        """
        self.heard_ns = self.clock.monotonic_ns()
        for each in self._reader.feed(data):
            self._check(each)
            if each.kind == Kind.BYE:
                raise MirrorEnded(f"it said goodbye: {Bye.parse(each.header).reason}")
            if each.kind == Kind.ERROR:
                error = Error.parse(each.header)
                raise MirrorEnded(f"it refused us ({error.code}): {error.text}")
            self.handle(each)
            if self.state is MirrorState.MIRRORING:
                self._reader.limit_bytes = MAX_FRAME_BYTES

    def refill(self) -> bool:
        """The socket has taken all: add what waited for that; whether there was anything."""
        return False

    @abstractmethod
    def handle(self, received: Frame) -> None:
        """Act on a frame that ``RECEIVE`` allows."""

    def send(self, message: WireMessage) -> None:
        """Leave a message for the socket."""
        self.outgoing += message.encode()

    def _check(self, received: Frame) -> None:
        allowed = RECEIVE[self.role, self.state]
        if received.kind not in allowed:
            names = ", ".join(sorted(kind.name for kind in allowed))
            known = Kind(received.kind).name if received.kind in set(Kind) else f"kind {received.kind}"
            raise ProtocolViolation(self.state.value, known, names)

    def _check_partner(self, proto: int, name: str) -> None:
        if proto != MIRROR_PROTO:
            raise PeerRefused(
                "proto", f"it mirrors by protocol {proto}, we by {MIRROR_PROTO}: upgrade the older server"
            )
        if name != self.names.partner:
            raise PeerRefused("name", f"it is {excerpt(name)}; events.pair.partner says {self.names.partner}")


class OriginSession(MirrorSession):
    """Our events on their way to the partner; see the module.

    Args:
        queues: in the order of a replay.
        openings: of these queues, the oldest first.
        ledger: takes what the partner has delivered for us.

    Attributes:
        kept: newest number of each queue on the partner's disk. is_full: it has no room for more.
        most_events: how many it can hold.
    """

    role = "origin"

    def __init__(
        self,
        names: PartnerNames,
        clock: Clock,
        queues: Sequence[EventQueue],
        openings: Sequence[Opening],
        ledger: PartnerLedger,
    ) -> None:
        super().__init__(names, clock)
        self.reader_limit(MAX_FRAME_BYTES)  # we have dialled it, and seen its certificate
        self._queues = {queue.queue_id: queue for queue in queues}
        self._ledger = ledger
        self.kept: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._unkept: list[tuple[str, int, int]] = []  # queue id, through, bytes
        self.is_full = False
        self.most_events = 0
        self._not_before_ns = self._beat_ns = self._confirmed_ns = 0
        self._confirmed: MirrorConfirmed | None = None
        self._next: Reached | None = None  # the next confirmation
        hello = MirrorHello(
            MIRROR_PROTO,
            names.name,
            names.partner,
            tuple(MirroredQueue(queue.name, queue.queue_id, queue.newest_record) for queue in queues),
            tuple(
                MirroredOpening(
                    each.opening_id, tuple(each.newest.get(queue.queue_id, 0) for queue in queues)
                )
                for each in openings
            ),
        )
        self.send(hello)

    def reader_limit(self, limit_bytes: int) -> None:
        """Most bytes of a frame."""
        self._reader.limit_bytes = limit_bytes

    def handle(self, received: Frame) -> None:
        """See ``MirrorSession``."""
        header = received.header
        match received.kind:
            case Kind.MIRROR_DELIVERED:
                delivered = MirrorDelivered.parse(header)
                self._ledger.delivered_there(delivered.recipient, delivered.identities)
            case Kind.MIRROR_WELCOME:
                self._welcomed(MirrorWelcome.parse(header))
            case Kind.MIRROR_KEPT:
                self._has_kept(MirrorKept.parse(header))

    def step(self, reached: Reached | None) -> None:
        """Send what is due.

        Args:
            reached: how far our recipients have come; None while it is not known.
        """
        if self.state is not MirrorState.MIRRORING:
            return
        now_ns = self.clock.monotonic_ns()
        if now_ns >= self._not_before_ns:
            self._send_events(reached.confirmed.done if reached is not None else {})
            self.is_full = self.is_full and bool(self._unkept)  # nothing is left for which it had no room
        if reached is not None and (self._next is None or self._may_follow(reached)):
            self._next = reached if reached.confirmed != self._confirmed else None
        if self._next is not None and now_ns >= self._confirmed_ns and self._may_follow(self._next):
            self._confirmed, self._confirmed_ns = self._next.confirmed, now_ns + CONFIRMED_NS
            self._next = None
            self.send(self._confirmed)
        if now_ns >= self._beat_ns:
            self._beat_ns = now_ns + round(self.names.silence_s * 1e9 / BEATS)
            self.send(MirrorBeat())

    def due_ns(self) -> int:
        """When ``step`` has something to send, as far as the clock decides it."""
        due = self._beat_ns
        if self.is_full:
            due = min(due, self._not_before_ns)
        if self._next is not None and self._may_follow(self._next):
            due = min(due, self._confirmed_ns)
        return due

    def _welcomed(self, welcome: MirrorWelcome) -> None:
        self._check_partner(welcome.proto, welcome.name)
        self.state = MirrorState.MIRRORING
        self.most_events = welcome.most_events
        for queue_id, queue in self._queues.items():
            # It may have more than we have: our disk has lost the newest, and gives their numbers again.
            self.kept[queue_id] = self._sent[queue_id] = min(welcome.kept.get(queue_id, 0), queue.newest_seq)

    def _has_kept(self, kept: MirrorKept) -> None:
        if kept.queue_id not in self._queues:
            raise PeerRefused("queue", f"it keeps events of {kept.queue_id}, which is no queue of ours")
        seq = self.kept[kept.queue_id] = min(kept.seq, self._sent[kept.queue_id])
        self.is_full = kept.is_full
        if kept.is_full:
            self._not_before_ns = self.clock.monotonic_ns() + FULL_NS
            self._sent[kept.queue_id] = seq
        others = [each for each in self._unkept if each[0] != kept.queue_id]
        own = [each for each in self._unkept if each[0] == kept.queue_id and each[1] > seq]
        self._unkept = others if kept.is_full else [*others, *own]
        self._has_all(kept.queue_id)

    def _has_all(self, queue_id: str) -> None:
        """What is not mirrored counts as kept as soon as all that was sent is kept."""
        if all(each[0] != queue_id for each in self._unkept):
            self.kept[queue_id] = self._sent[queue_id]

    def _may_follow(self, reached: Reached) -> bool:
        """Whether a confirmation may be sent now; see the module."""
        return self.is_full or all(
            self._sent.get(queue_id, 0) >= seq for queue_id, seq in reached.newest.items()
        )

    def _send_events(self, done: Mapping[str, int]) -> None:
        theirs = {queue.queue_id for queue in self._ledger.queues}
        for queue_id, queue in reversed(self._queues.items()):  # confirmations wait for what is due later
            while sum(size for _, _, size in self._unkept) < MOST_UNKEPT_BYTES:
                after = max(self._sent[queue_id], queue.done_seq, done.get(queue_id, 0))
                records, through = queue.records(after, CHUNK_BYTES)
                if len(records) > MOST_EVENTS:
                    records, through = records[:MOST_EVENTS], records[MOST_EVENTS - 1][0]
                records = [
                    (seq, data)
                    for seq, data in records
                    if len(data) <= MOST_EVENT_BYTES and origin_of(seq, data) not in theirs
                ]
                if not records:
                    if through <= self._sent[queue_id]:
                        break
                    self._sent[queue_id] = through
                    self._has_all(queue_id)
                    continue
                self.send(MirrorEvents.of(queue_id, records))
                self._sent[queue_id] = through
                self._unkept.append((queue_id, records[-1][0], sum(len(data) for _, data in records)))


class KeeperSession(MirrorSession):
    """The partner's events on their way to our disk; see the module.

    Args:
        greeted: called with the partner's first message, before anything of its queues is taken.
        store: takes events.
        ledger: takes confirmations, and says what was delivered here.
    """

    role = "keeper"

    def __init__(
        self,
        names: PartnerNames,
        clock: Clock,
        store: MirrorStore,
        ledger: PartnerLedger,
        greeted: Callable[[MirrorHello], None],
    ) -> None:
        super().__init__(names, clock)
        self._store = store
        self._ledger = ledger
        self._greeted = greeted
        self._waiting: deque[MirrorDelivered] = deque()
        self._is_welcome_due = False

    def handle(self, received: Frame) -> None:
        """See ``MirrorSession``."""
        match received.kind:
            case Kind.MIRROR_HELLO:
                self._begin(MirrorHello.parse(received.header))
            case Kind.MIRROR_EVENTS:
                self._keep(MirrorEvents.parse(received))
            case Kind.MIRROR_CONFIRMED:
                self._confirm(MirrorConfirmed.parse(unfold(received).header))
            case Kind.MIRROR_BEAT:
                self.send(MirrorBeat())

    def step(self) -> None:
        """Send what recipients have confirmed here since."""
        if self.state is not MirrorState.MIRRORING:
            return
        if not self._waiting:
            self._add_delivered(self._ledger.unsent())
        self.refill()

    def refill(self) -> bool:
        """See ``MirrorSession``: deliveries, which may be megabytes, and behind the first ones WELCOME."""
        before = len(self.outgoing)
        while self._waiting and len(self.outgoing) < PIECE_BYTES:
            self.send(self._waiting.popleft())
        if self._is_welcome_due and not self._waiting:
            self._is_welcome_due = False
            kept = {queue.queue_id: self._store.complete_seq(queue.queue_id) for queue in self._ledger.queues}
            self.send(MirrorWelcome(MIRROR_PROTO, self.names.name, kept, self._store.most_events))
        return len(self.outgoing) > before

    def _begin(self, hello: MirrorHello) -> None:
        self._check_partner(hello.proto, hello.name)
        if hello.partner != self.names.name:
            raise PeerRefused(
                "name", f"it looks for {excerpt(hello.partner)}; events.pair.name says {self.names.name}"
            )
        self._greeted(hello)
        self.state = MirrorState.MIRRORING
        self._add_delivered(self._ledger.delivered())
        self._is_welcome_due = True
        self.refill()

    def _add_delivered(self, delivered: Mapping[str, Sequence[str]]) -> None:
        for recipient, identities in delivered.items():
            for start in range(0, len(identities), MOST_IDENTITIES):
                piece = tuple(identities[start : start + MOST_IDENTITIES])
                self._waiting.append(MirrorDelivered(recipient, piece))

    def _keep(self, events: MirrorEvents) -> None:
        if all(queue.queue_id != events.queue_id for queue in self._ledger.queues):
            raise PeerRefused("queue", f"it sends events of {events.queue_id}, which its HELLO did not name")
        records = list(events.each())
        try:
            items = [decode(seq, data) for seq, data in records]
        except (ValueError, RecursionError) as exc:
            raise PeerRefused("event", f"it sent what is no event: {exc}") from exc
        seq, is_full = self._store.add(events.queue_id, records)
        self._ledger.kept(events.queue_id, items)
        self.send(MirrorKept(events.queue_id, seq, is_full))

    def _confirm(self, said: MirrorConfirmed) -> None:
        self._ledger.confirmed(said)
        for queue in self._ledger.queues:
            self._store.discard_through(queue.queue_id, self._ledger.done_seq(queue.queue_id))
        if said.open_seqs is not None:
            self._store.keep_only(said.queues[-1], said.open_seqs, said.open_through)

"""The mailbox of one participant: post to others, take what they posted, sleep until something comes.

    box = attach(path, "services")
    box.post(("pair-0", "pair-1"), frame)        # two-step exchange (P8): neither side waits
    for message in box.take(): ...
    if box.prepare_sleep():                      # with a selector of one's own ...
        selector.select(BACKSTOP_S)
        box.awake()
    box.wait(0.05)                               # ... or in one call,
    wait_any((main, app), 1.0, [stop])           # or on several mailboxes and other descriptors

Thread: one thread may post and one, the same or another, may take (``take``, ``prepare_sleep``, ``awake``,
``wait``) on the same object. That is safe without a lock because they touch nothing in common: the poster
owns this participant's lane, its rings and the ringer; the taker owns look-aheads, the bell and TAKEN marks
in the lanes of others. The shared words have one writer at a time, and SLEEP may be cleared twice.
``stats`` may be called from any thread; ``close`` when both have stopped.

Delivery is at least once. A message is in shared memory when ``post`` returns, and survives the death of
both sides until it is *released*. The messages of one ``take`` are an *unacknowledged batch*: released by
the next ``take`` or ``prepare_sleep`` (``wait``), by ``release``, or by ``close``; leaving a ``with`` block
by an exception does not release. A process that dies with a batch is given it again, in order, at its next
attach; a living recipient never gets a message twice, unless it gave it back. A sender that dies in ``post``
cannot know whether it was posted. Source: P8, M1-M9.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol

from pmdaemon.mailbox.doorbell import BACKSTOP_S, Bell, Ringer, bell_path
from pmdaemon.mailbox.errors import (
    MailboxCorrupt,
    MailboxFull,
    MessageDamaged,
    PayloadInUse,
    RoomMissing,
    mailbox_closed,
    no_route,
    unknown_participant,
)
from pmdaemon.mailbox.inspect import Sources, metrics, publish, stats
from pmdaemon.mailbox.layout import C_FRONT, C_HEAD, C_INCARNATION, C_PID, C_ROOM, C_SLEEP, L_FRONT, L_HEAD
from pmdaemon.mailbox.message import ListPlace, LookAhead, Message, View
from pmdaemon.mailbox.reader import LaneReader, UnackedBatch
from pmdaemon.mailbox.ring import Outlet, PayloadRing
from pmdaemon.mailbox.segment import RingGrowth, Segment, claim
from pmdaemon.mailbox.shared_writer import SharedWriter
from pmdaemon.mailbox.writer import LaneWriter, SenderPlace
from pmdaemon.runtime.clock import Deadline

_SEARCHES_BEFORE_SLEEP = 50  # some 50 us, about what falling asleep and being woken cost both sides
_PUBLISH_EVERY = 64  # takes of a recipient that never sleeps
_KEPT_BYTES: Final = 1 << 20
"""Several times what a take copies by default."""
Buffer = bytes | bytearray | memoryview


def attach(path: Path, name: str, look_ahead: LookAhead | None = None) -> Mailbox:
    """Join a segment as participant ``name``, repairing what an earlier process of that name left half done.

    Messages that were posted to it and not taken are still there; its own sequence goes on. A process may
    attach again under its own name (the older object must not be used any more).

    Raises:
        SegmentMissing: not made yet; try again.
        LayoutMismatch, SegmentUnsafe, SegmentError, MachineUnsupported: this file cannot be used.
        MailboxError: the layout has no participant of this name.
        RoomMissing: its room is not reserved yet (``reserve_room``).
        ParticipantBusy: another living process holds the name.
        MailboxCorrupt: the participant's own lane (`shared`: the list) is damaged.
        MailboxBusy: form `shared`, a stopped process holds the list's lock.
    """
    segment = Segment(path)
    try:
        if name not in segment.layout.participants:
            raise unknown_participant(name, segment.layout.participants)
        index = segment.layout.index(name)
        if not segment.has_room(index):
            raise RoomMissing(name)
        _keep_freed_memory()
        claim(segment, index, name)
        try:
            return Mailbox(segment, index, look_ahead or LookAhead())
        except BaseException:
            segment.words[segment.layout.control_word(index) + C_PID] = 0
            raise
    except BaseException as exc:
        if isinstance(exc, MailboxCorrupt):
            segment.mark_damaged(name, exc)
        segment.close()
        raise


class Mailbox:
    """One participant's end of a segment; made by ``attach``. Threads: see the module.

    Attributes:
        name: of this participant. incarnation: 1 at its first attach to this segment, then one more each
        time.
    """

    def __init__(self, segment: Segment, index: int, look_ahead: LookAhead) -> None:
        layout = segment.layout
        control = layout.control_word(index)
        self.name = layout.participants[index]
        self.incarnation: int = segment.words[control + C_INCARNATION]
        self._segment = segment
        self._words = segment.words
        self._pid_word = control + C_PID
        self._sleep_word = control + C_SLEEP
        self._closed = False
        self._ringer = Ringer(segment.path)
        outlets = _make_outlets(segment, self.name, index)
        self._outlets: dict[str, tuple[Outlet, ...]] = {outlet.recipient: (outlet,) for outlet in outlets}
        shared = layout.form == "shared"
        where = f"{segment.path}, " + ("the shared list" if shared else f"lane of {self.name}")
        writer = SharedWriter if shared else LaneWriter
        self._writer = writer(
            SenderPlace(segment.memory, segment.words, layout, index, outlets, self._ringer, where)
        )
        self._post_one = self._writer.post_one
        self._batch = UnackedBatch(segment.words, layout, self.name)
        self._unacked = self._batch.unacked
        self._control = control
        self._readers = [
            LaneReader(segment.memory, segment.words, place, self._unacked, look_ahead)
            for place in _list_places(segment, index)
        ]
        self._sources = Sources(self._writer, self._ringer, self._readers, self._batch)
        # Lanes are searched in turn, so that a busy one cannot hide another: one order for each start.
        self._orders = [self._readers[i:] + self._readers[:i] for i in range(len(self._readers))] or [[]]
        self._turn = 0
        self._takes_unpublished = 0
        self._fence = threading.Lock()
        self._bell = Bell(bell_path(segment.path, self.name))

    @property
    def recipients(self) -> tuple[str, ...]:
        """Names this participant may post to."""
        return tuple(self._outlets)

    @property
    def expected(self) -> tuple[str, ...]:
        """Those of them whose room is reserved: they run, or may start at any time."""
        outlets = [outlet for (outlet,) in self._outlets.values()]
        return tuple(item.recipient for item in outlets if not item.room_word or self._words[item.room_word])

    def post(
        self, recipients: str | Sequence[str], payload: Buffer | Sequence[Buffer], *, urgent: bool = False
    ) -> None:
        """Give each recipient a copy of the payload; the copies become visible together. Never blocks.

        Args:
            recipients: one name, or several (each gets one copy).
            payload: bytes, or parts to be joined; smaller than the ring of each recipient. May be empty.
            urgent: ahead of everything that is not; urgent messages keep their order among themselves.

        Raises:
            MailboxFull: ``recipients`` of the error had no room; the others have the message.
            MessageTooLarge, MailboxError (no route to a recipient): nothing was posted.
            MailboxCorrupt: this participant's lane was overwritten by another program.
        """
        try:
            if type(payload) is bytes and type(recipients) is str and not urgent:
                one = self._outlets.get(recipients)  # empty when closed
                if one:
                    if self._post_one(one[0], payload):
                        return
                    raise MailboxFull(self.name, (recipients,))
            self._post_copies(recipients, payload, urgent)
        except MailboxCorrupt as exc:
            self._segment.mark_damaged(self.name, exc)
            raise

    def _post_copies(
        self, recipients: str | Sequence[str], payload: Buffer | Sequence[Buffer], urgent: bool
    ) -> None:
        if self._closed:
            raise mailbox_closed(self.name)
        if type(payload) is not bytes:
            payload = _flatten(payload)
        try:
            if isinstance(recipients, str):
                outlets = self._outlets[recipients]
            else:
                outlets = tuple(self._outlets[name][0] for name in dict.fromkeys(recipients))
        except KeyError as exc:
            raise no_route(self.name, exc.args[0], self.recipients) from None
        if outlets:
            full = self._writer.post(outlets, payload, urgent)
            if full:
                raise MailboxFull(self.name, tuple(outlet.recipient for outlet in full))

    def post_many(self, recipient: str, payloads: Sequence[Buffer], *, urgent: bool = False) -> None:
        """Post several messages to one recipient; they become visible together. Never blocks.

        Raises:
            MailboxFull: the first ``posted`` of them were posted, the others found no room.
            MessageTooLarge, MailboxError (no route), MailboxCorrupt, MailboxBusy: nothing was posted.
        """
        if self._closed:
            raise mailbox_closed(self.name)
        outlet = self._outlets.get(recipient)
        if outlet is None:
            raise no_route(self.name, recipient, self.recipients)
        flat = [payload if type(payload) is bytes else _flatten(payload) for payload in payloads]
        try:
            posted = self._writer.post_many(outlet[0], flat, urgent)
        except MailboxCorrupt as exc:
            self._segment.mark_damaged(self.name, exc)
            raise
        if posted < len(flat):
            raise MailboxFull(self.name, (recipient,), posted=posted)

    def take(self, max_messages: int = 64, max_bytes: int = 262_144) -> list[Message]:
        """Messages to this participant, ``max_messages`` and ``max_bytes`` at most, each list in order.

        Releases the batch before, and never blocks. A message above ``max_bytes`` comes alone. The limit in
        bytes keeps the copies within the CPU's cache and the allocator's reach.

        Raises:
            MailboxCorrupt: a lane is damaged. The other lanes are served by the next calls.
            MessageDamaged: a message was, and is discarded; the next call goes on behind it.
        """
        taken: list[Message] = []
        self._collect(taken, max_messages, max_bytes, False)
        return taken

    def take_views(self, max_messages: int = 64, max_bytes: int = 4_194_304) -> list[View]:
        """As ``take``, without a copy: payloads are views of shared memory.

        Only a payload that meets the end of its ring is copied. A view is valid until its batch is released,
        and raises ``ValueError`` afterwards. Slices and arrays made of it must be gone by then: Python
        does not know all of them.

        Raises:
            PayloadInUse: a buffer taken of one is in use still; that batch stays.
            MailboxCorrupt: as ``take``.
        """
        taken: list[View] = []
        self._collect(taken, max_messages, max_bytes, True)
        self._batch.views = [view.payload for view in taken]
        return taken

    def _collect(
        self, taken: list[Message] | list[View], max_messages: int, max_bytes: int, views: bool
    ) -> None:
        if self._closed:
            raise mailbox_closed(self.name)
        if self._unacked:
            self.release()
        order = self._orders[self._turn]
        self._turn = (self._turn + 1) % len(self._orders)
        room_bytes = max_bytes
        for reader in order:
            try:
                room_bytes = reader.collect(taken, max_messages, room_bytes, views)
            except MailboxCorrupt as exc:
                if taken:
                    break  # never lose what was taken; the damage is met again
                if not isinstance(exc, MessageDamaged):
                    self._segment.mark_damaged(self.name, exc)
                raise
            if (room_bytes <= 0 and taken) or len(taken) >= max_messages:
                break
        self._takes_unpublished += 1
        if self._takes_unpublished >= _PUBLISH_EVERY:
            self._publish()

    def release(self) -> None:
        """Done with the batch: its messages are gone for good, its views void.

        Raises:
            PayloadInUse: a view of it is still in use; the batch stays.
        """
        if self._closed:
            raise mailbox_closed(self.name)
        self._batch.release()

    def give_back(self, messages: Sequence[Message | View]) -> None:
        """Put messages of the batch back where they were; the next takes bring them again, in order.

        Raises:
            MailboxError: one is not in the batch; none was given back.
        """
        if self._closed:
            raise mailbox_closed(self.name)
        self._batch.give_back(messages)
        for reader in self._readers:
            reader.search_from_head()

    def _publish(self) -> None:
        """Show the figures to onlookers (``describe``)."""
        self._takes_unpublished = 0
        publish(self._words, self._control, self._sources)

    def fileno(self) -> int:
        """Doorbell, readable when something was posted after ``prepare_sleep``; for selectors."""
        return self._bell.fileno()

    def prepare_sleep(self) -> bool:
        """Ask to be rung. Returns False if something is waiting (take it), True if sleep is right.

        Releases the batch. Sleep no longer than ``BACKSTOP_S`` at a time, then call ``awake``.

        Raises:
            MailboxCorrupt, PayloadInUse: as ``take``.
        """
        if self._closed:
            raise mailbox_closed(self.name)
        if self._unacked:
            self.release()
        self._publish()
        self._words[self._sleep_word] = 1
        # SLEEP must be visible before the last search; ``LaneWriter._ring`` is the other half.
        self._fence.acquire()
        self._fence.release()
        waiting = True
        try:
            waiting = self._something_waits()
        finally:
            if waiting:
                self._words[self._sleep_word] = 0
        return not waiting

    def _something_waits(self) -> bool:
        try:
            return any(reader.find() >= 0 for reader in self._readers)
        except MailboxCorrupt as exc:
            self._segment.mark_damaged(self.name, exc)
            raise

    def awake(self) -> None:
        """End of sleep: no sender rings any more, and the rings so far are forgotten."""
        self._words[self._sleep_word] = 0
        self._bell.drain()

    def wait(self, timeout_s: float) -> bool:
        """Sleep until something can be taken (True) or ``timeout_s`` has passed (False).

        Releases the batch. At first it only gives others the processor and searches again, a few
        times: a busy sender is then not made to ring for every message.
        """
        if self._unacked:
            self.release()
        for _ in range(_SEARCHES_BEFORE_SLEEP if timeout_s else 0):
            if self._something_waits():
                return True
            os.sched_yield()
        deadline = Deadline(timeout_s)
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        while self.prepare_sleep():
            expired = deadline.passed
            if not expired:
                poll.poll(1000 * min(deadline.left_s(), BACKSTOP_S))
            self.awake()
            if expired:
                return False
        return True

    def stats(self) -> dict[str, Any]:
        """Counters since ``attach`` and the present fill of the rings to each recipient (0 to 1)."""
        if self._closed:
            raise mailbox_closed(self.name)
        return stats(self._sources)

    def metrics(self) -> dict[str, float]:
        """The same for a collector: by name and labels, as ``inspect.METRICS`` declares them."""
        return metrics(self.name, self.stats())

    def close(self, *, release: bool = True) -> None:
        """Release the batch and leave the segment. Call it when its threads have stopped; twice is fine.

        Without ``release`` (a process that ends before it has processed what it took), and while a view of it
        is in use (which keeps the mapping), the batch is left to the next attach.
        """
        if self._closed:
            return
        if release:
            with contextlib.suppress(PayloadInUse):
                self.release()
        self._publish()
        self._closed = True
        self._outlets = {}
        self._words[self._sleep_word] = 0
        self._words[self._pid_word] = 0
        self._bell.close()
        self._ringer.close()
        self._segment.close()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, _value: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close(release=type_ is None)


class HasFileno(Protocol):
    """Something with a descriptor."""

    def fileno(self) -> int:
        """The descriptor."""


class WaitingMailbox(HasFileno, Protocol):
    """What ``wait_any`` needs of a mailbox; its descriptor is the doorbell."""

    def prepare_sleep(self) -> bool:
        """Ask to be rung; False if something waits."""

    def awake(self) -> None:
        """End of sleep."""


def wait_any(
    mailboxes: Sequence[WaitingMailbox], timeout_s: float, others: Sequence[HasFileno | int] = ()
) -> None:
    """Sleep until one of ``mailboxes`` has a message, one of ``others`` is readable, or the time has passed.

    Returns at once if a message is there, and after ``BACKSTOP_S`` at the latest: the caller calls it again.
    The time is rounded up to a millisecond, so that no caller spins. Releases the batches of the mailboxes.

    Raises:
        MailboxCorrupt, PayloadInUse: as ``Mailbox.prepare_sleep``.
    """
    asleep: list[WaitingMailbox] = []
    try:
        for mailbox in mailboxes:
            if not mailbox.prepare_sleep():
                return
            asleep.append(mailbox)
        poll = select.poll()
        for source in (*asleep, *others):
            poll.register(source, select.POLLIN)
        poll.poll(1000 * max(0.0, min(timeout_s, BACKSTOP_S)))
    finally:
        for mailbox in asleep:
            mailbox.awake()


def _keep_freed_memory() -> None:
    """Let the process keep the memory of one batch for the next, instead of faulting it in each time.

    glibc gives the top of its heap back beyond twice the size of the largest block that was mapped and freed,
    and maps blocks from that size on; at first that is 128 KiB. Source: mallopt(3), M_MMAP_THRESHOLD.
    """
    block = bytearray(_KEPT_BYTES)
    del block


def _flatten(payload: Buffer | Sequence[Buffer]) -> bytes | memoryview:
    """The payload as one run of bytes; copies only what is not one already."""
    if isinstance(payload, memoryview):
        return (
            payload
            if payload.c_contiguous and payload.format == "B" and payload.ndim == 1
            else payload.tobytes()
        )
    if isinstance(payload, bytes | bytearray):
        return bytes(payload)
    return b"".join(payload)


def _ring(segment: Segment, sender: str, recipient: str, *, to_write: bool) -> PayloadRing:
    at_bytes, size_bytes = segment.layout.ring_at_bytes(sender, recipient)
    if all(segment.has_room(segment.layout.index(end)) for end in (sender, recipient)):
        segment.prefault(at_bytes, min(size_bytes, segment.layout.first_bytes), to_write=to_write)
    return PayloadRing(segment.memory, segment.bytes, at_bytes, size_bytes)


def _make_outlets(segment: Segment, name: str, index: int) -> list[Outlet]:
    """The sender's side of each route of participant ``name``, whose number is ``index``."""
    layout = segment.layout
    outlets = []
    for route in layout.routes_of(name):
        recipient = layout.index(route.recipient)
        control = layout.control_word(recipient)
        ring = _ring(segment, name, route.recipient, to_write=True)
        address, quota = index << 16 | recipient, layout.quota(name)
        outlet = Outlet(route.recipient, address, ring, control + C_SLEEP, quota)
        if ring.size > layout.first_bytes:
            outlet.reserve_first(layout.first_bytes, RingGrowth(segment, route.recipient).reserve)
        if not segment.has_room(recipient):
            outlet.room_word = control + C_ROOM
        outlets.append(outlet)
    return outlets


def _list_places(segment: Segment, index: int) -> list[ListPlace]:
    """Where messages to participant ``index`` may be: a place for each lane, or the one shared list."""
    layout = segment.layout
    rings: dict[int, tuple[str, PayloadRing]] = {}
    for route in layout.routes:
        if route.recipient == layout.participants[index]:
            ring = _ring(segment, route.sender, route.recipient, to_write=False)
            rings[layout.index(route.sender) << 16 | index] = (route.sender, ring)
    if layout.form == "shared":
        base, where = layout.list_word, f"{segment.path}, the shared list"
        return [
            ListPlace(layout, 0, len(layout.participants), base + L_HEAD, base + L_FRONT, index, rings, where)
        ]
    found = []
    for address, (name, ring) in rings.items():
        sender = address >> 16
        control, where = layout.control_word(sender), f"{segment.path}, lane of {name}"
        found.append(
            ListPlace(
                layout, sender, 1, control + C_HEAD, control + C_FRONT, index, {address: (name, ring)}, where
            )
        )
    return found

"""Who has delivered what, of two cooperating servers: the table that both threads of the pair look at.

The main loop asks before each delivery (``decide``) and notes what recipients have confirmed (``report``).
The thread ``ev-pair`` enters what the partner says. Two directions:

*the partner's events, taken over here.* While the partner is lost they are delivered; those that a recipient
has confirmed at the partner are left out for it. When the partner is back, what was not handed over to a
recipient is left out, too: the partner still has it. An event of a queue that the partner has lost with its
disk is delivered whatever happens, because no other server has it.

*our events, delivered by the partner* while we were away: left out for the recipients that have confirmed
them there. What follows a delivery (reminders, escalation) is made here for them, as if it had been ours.

State: the notes and the tables below. Guarded by ``_lock``, a leaf, held for table look-ups only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from pmdaemon.wire.messages.mirror import MOST_RECIPIENTS, MirrorConfirmed, MirroredQueue
from sla_server.events.pair_history import Opening
from sla_server.events.pair_store import PartnerNotes
from sla_server.events.queue import QueuedEvent
from sla_server.events.sql_link import NAME
from sla_server.events.stages.base import StageDecision, StageReason, StageVerdict

MOST_DELIVERED: Final = 20_000
"""Deliveries for the other server that are remembered for each recipient, here and there alike; the oldest
go first, and may come twice."""
MOST_GONE: Final = 8
"""Queues that the partner has lost with its disk, of which cursors are kept."""
Addressed = tuple[str, str]
"""An event, and the recipient to whom alone it goes, or ""."""
Position = tuple[str, int]
"""Queue id and number of an event at the partner."""


class PartnerLedger:
    """See the module.

    Args:
        notes: what a former process knew; changed in place.
    """

    def __init__(self, notes: PartnerNotes) -> None:
        self._lock = threading.Lock()
        self._notes = notes
        self._taken: dict[Addressed, dict[str, Position]] = {}  # by identity: of each reminder its own place
        self._open = frozenset(notes.open_seqs)
        self._unsent: dict[str, dict[str, None]] | None = None  # None: no connection of the partner takes it
        self._left: dict[Position, dict[str, int]] = {}  # by recipient: number here of what its lane has left
        self._losses = self._noticed = 0
        self._delivered_there: dict[str, OrderedDict[str, None]] = {}
        self._is_changed = False
        self.is_dirty = self.is_prunable = False

    # The main loop.

    def decide(self, item: QueuedEvent, recipient: str) -> StageDecision | None:
        """Whether a recipient does not get an event here because of the partner; None: go on."""
        if recipient == NAME:  # each server has rows of what it delivers
            return None
        with self._lock:
            if item.origin:
                return self._of_partner(item, recipient)
            known = self._delivered_there.get(recipient)
            if known is None or _delivery_id(item) not in known:
                return None
            text = "the partner has delivered it while this server was away"
            return StageDecision(StageVerdict.SKIP, StageReason.SENT_BY_PARTNER, text)

    def report(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Note what recipients have confirmed of the partner's events."""
        with self._lock:
            if not self._taken:
                return
            for row in rows:
                event_id, recipient, identity = row["event_id"], row["recipient"], row["delivery_id"]
                position = self._place_of(event_id, recipient, identity)
                if position is None or row["state"] != "confirmed" or recipient == NAME:
                    continue
                _remember(self._notes.delivered.setdefault(recipient, {}), identity, position)
                if self._unsent is not None:
                    _remember(self._unsent.setdefault(recipient, {}), identity)
                self.is_dirty = True

    def take_change(self) -> bool:
        """Whether lanes have to look again at what they were about to send; True once for each change."""
        with self._lock:
            changed, self._is_changed = self._is_changed, False
            self._noticed = self._losses
            return changed

    @property
    def noticed(self) -> int:
        """The newest loss of the partner that the lanes know of."""
        return self._noticed

    # The thread ev-pair.

    @property
    def is_lost(self) -> bool:
        """Whether the partner's events are delivered here."""
        return self._notes.is_lost

    @property
    def is_behind(self) -> bool:
        """Whether people are notified that the partner does not have all of our events."""
        return self._notes.is_behind

    def set_behind(self, *, is_behind: bool) -> None:
        """They are, of that or of its end."""
        with self._lock:
            self._notes.is_behind, self.is_dirty = is_behind, True

    @property
    def queues(self) -> list[MirroredQueue]:
        """The partner's, in the order of a replay."""
        return [MirroredQueue(*each) for each in self._notes.queues]

    @property
    def openings(self) -> list[Opening]:
        """Those of the partner's queues that it has named, the oldest first."""
        return [Opening(*each) for each in self._notes.openings]

    def newest_seq(self, queue_id: str) -> int:
        """The newest number of a queue of the partner that it has spoken of."""
        notes = self._notes
        seqs = [notes.done.get(queue_id, 0), *(each.get(queue_id, 0) for each in notes.cursors.values())]
        return max([*seqs, notes.open_through] if queue_id == notes.open_queue else seqs)

    def greeted(self, queues: Sequence[MirroredQueue], openings: Sequence[Opening] = ()) -> list[str]:
        """The partner is there, with these queues; returns the ids of those that it had before and lost."""
        with self._lock:
            ids = {queue.queue_id for queue in queues}
            notes = self._notes
            gone = [queue_id for _, queue_id in notes.queues if queue_id not in ids]
            notes.queues = [(queue.name, queue.queue_id) for queue in queues]
            notes.openings = [(each.opening_id, dict(each.newest)) for each in openings]
            notes.gone = [each for each in (*notes.gone, *gone) if each not in ids][-MOST_GONE:]
            self._forget_all_but(ids.union(notes.gone))
            self._is_changed = self._is_changed or self._notes.is_lost
            self._notes.is_lost = False
            self.is_dirty = True
            return gone

    def set_back(self, queue_id: str, newest_seq: int, lost_id: str) -> None:
        """The partner has a queue up to ``newest_seq`` only; what it had behind that is ``lost_id`` now.

        With "" there is nothing of that here.
        """
        with self._lock:
            notes = self._notes
            for seqs in (notes.done, *notes.cursors.values()):
                if seqs.get(queue_id, 0) > newest_seq:
                    seqs |= {lost_id: seqs[queue_id]} if lost_id else {}
                    seqs[queue_id] = newest_seq
            if queue_id == notes.open_queue and notes.open_through > newest_seq:
                notes.open_through = newest_seq
                notes.open_seqs = [seq for seq in notes.open_seqs if seq <= newest_seq]
                self._open = frozenset(notes.open_seqs)
            self.is_dirty = True
            if not lost_id:
                return
            notes.gone = [*(each for each in notes.gone if each != lost_id), lost_id][-MOST_GONE:]
            positions: list[dict[str, Position]] = [*notes.delivered.values(), *self._taken.values()]
            for events in positions:
                for key, (where, seq) in events.items():
                    if where == queue_id and seq > newest_seq:
                        events[key] = lost_id, seq

    def back(self) -> None:
        """The partner was heard again."""
        with self._lock:
            self._notes.is_lost, self._is_changed, self.is_dirty = False, True, True

    def lost(self) -> None:
        """The partner was not heard for too long: its events are delivered here."""
        with self._lock:
            self._notes.is_lost, self._is_changed, self.is_dirty = True, True, True
            self._losses += 1

    def take_left(self, noticed: int, passed: Mapping[str, int]) -> set[Position] | None:
        """What has to be taken over once more: a lane has left it to the partner and passed it.

        Args:
            noticed: the newest loss that the lanes know of; None is returned as long as it is an older one.
            passed: recipient to its lane's cursor in the queue of events.
        """
        with self._lock:
            if noticed != self._losses:
                return None
            found, self._left = self._left, {}
            return {
                position
                for position, places in found.items()
                if any(seq <= passed.get(recipient, 0) for recipient, seq in places.items())
            }

    def confirmed(self, said: MirrorConfirmed) -> None:
        """The partner's recipients have come so far."""
        with self._lock:
            notes = self._notes
            ids = {queue_id for _, queue_id in notes.queues}
            notes.done |= {key: seq for key, seq in said.done.items() if key in ids}
            if said.open_seqs is not None and said.queues[-1] in ids:
                notes.open_queue, notes.open_through = said.queues[-1], said.open_through
                notes.open_seqs, self._open = list(said.open_seqs), frozenset(said.open_seqs)
            for recipient in [name for name in notes.cursors if name not in said.cursors]:
                for queue_id in ids:
                    notes.cursors[recipient].pop(queue_id, None)
            for recipient, seqs in said.cursors.items():
                places = zip(said.queues, seqs, strict=True)
                known = notes.cursors.setdefault(recipient, {})
                known.update((queue_id, seq) for queue_id, seq in places if queue_id in ids)
            notes.cursors = {name: seqs for name, seqs in notes.cursors.items() if seqs}
            self.is_dirty = self.is_prunable = True

    def prune(self) -> None:
        """Forget what the partner has passed itself; once a second at most, because it looks at all of it."""
        with self._lock:
            notes, self.is_prunable = self._notes, False
            for recipient, events in list(notes.delivered.items()):
                left = {key: at for key, at in events.items() if not self._has_passed(recipient, at)}
                notes.delivered[recipient] = left
                if not left:
                    del notes.delivered[recipient]
            for key, places in list(self._taken.items()):
                still = {
                    identity: (queue_id, seq)
                    for identity, (queue_id, seq) in places.items()
                    if seq > notes.done.get(queue_id, 0)
                }
                self._taken[key] = still
                if not still:
                    del self._taken[key]
            self._left = {at: places for at, places in self._left.items() if at[1] > notes.done.get(at[0], 0)}
            self.is_dirty = True

    def is_done(self, recipient: str, position: Position) -> bool:
        """Whether a recipient needs this event of the partner no more."""
        with self._lock:
            return self._has_passed(recipient, position)

    def done_seq(self, queue_id: str) -> int:
        """No recipient of the partner needs an event of this queue up to here."""
        return self._notes.done.get(queue_id, 0)

    def take(self, items: Iterable[QueuedEvent]) -> None:
        """These, of the partner, are about to enter the queue of events here."""
        with self._lock:
            for item in items:
                addressed, at = (item.event.event_id, item.recipient), (item.origin, item.origin_seq)
                self._add(addressed, item.identity, at)

    def kept(self, queue_id: str, items: Iterable[QueuedEvent]) -> None:
        """The partner has these: what was delivered here may have come to another place there.

        An event that is held back goes from one of its queues to the other. It is remembered until the
        recipient has passed the newest place: the partner forgets what we have reported when it dies.
        """
        with self._lock:
            for item in items:
                if not item.recipient:
                    continue
                at = queue_id, item.seq
                known, identity = self._notes.delivered.get(item.recipient, {}), _delivery_id(item)
                if identity in known:
                    known[identity], self.is_dirty = at, True
                if (addressed := (item.event.event_id, item.recipient)) in self._taken:
                    self._add(addressed, identity, at)

    def unsent(self) -> dict[str, list[str]]:
        """Deliveries since ``delivered`` or the last call: recipient to identities, each once."""
        with self._lock:
            if not self._unsent:
                return {}
            found, self._unsent = self._unsent, {}
            return {recipient: list(identities) for recipient, identities in found.items()}

    def delivered(self) -> dict[str, list[str]]:
        """All deliveries of the partner's events that it has not passed itself: recipient to identities.

        From now on ``unsent`` has those that come, until ``stop_sending``.
        """
        with self._lock:
            self._unsent = {}
            return {recipient: list(events) for recipient, events in self._notes.delivered.items()}

    def stop_sending(self) -> None:
        """No connection takes what is unsent: the next one begins with ``delivered``."""
        with self._lock:
            self._unsent = None

    def delivered_there(self, recipient: str, identities: Collection[str]) -> None:
        """The partner has delivered these of ours."""
        with self._lock:
            known = self._delivered_there.setdefault(recipient, OrderedDict())
            while len(self._delivered_there) > MOST_RECIPIENTS:
                del self._delivered_there[next(iter(self._delivered_there))]
            new = [identity for identity in identities if identity not in known]
            known.update(dict.fromkeys(new))
            while len(known) > MOST_DELIVERED:
                known.popitem(last=False)
            self._is_changed = self._is_changed or bool(new)

    def notes(self) -> PartnerNotes:
        """A copy, to be written; of what changes in place only, because the main loop waits meanwhile."""
        with self._lock:
            self.is_dirty = False
            cursors = {name: dict(seqs) for name, seqs in self._notes.cursors.items()}
            delivered = {name: dict(events) for name, events in self._notes.delivered.items()}
            changed = {"cursors": cursors, "delivered": delivered, "done": dict(self._notes.done)}
            return self._notes.model_copy(update=changed)

    # Guarded by the lock.

    def _forget_all_but(self, queue_ids: Collection[str]) -> None:
        notes = self._notes
        self._left = {at: places for at, places in self._left.items() if at[0] in queue_ids}
        notes.done = {key: seq for key, seq in notes.done.items() if key in queue_ids}
        for name, seqs in list(notes.cursors.items()):
            notes.cursors[name] = {key: seq for key, seq in seqs.items() if key in queue_ids}
        for name, events in list(notes.delivered.items()):
            notes.delivered[name] = {key: at for key, at in events.items() if at[0] in queue_ids}

    def _add(self, addressed: Addressed, identity: str, at: Position) -> None:
        places = self._taken.setdefault(addressed, {})
        places.pop(identity, None)  # the newest is the last one
        places[identity] = at

    def _place_of(self, event_id: str, recipient: str, identity: str) -> Position | None:
        """The partner's place of what was delivered here.

        A reminder that the partner never had, because it follows a delivery here, has the place of the newest
        one that it had: the partner makes the others when it passes that.
        """
        own = self._taken.get((event_id, recipient), {})
        for_all = self._taken.get((event_id, ""), {})
        return own.get(identity) or for_all.get(identity) or _last(own) or _last(for_all)

    def _has_passed(self, recipient: str, position: Position) -> bool:
        queue_id, seq = position
        if seq <= self._notes.done.get(queue_id, 0):
            return True
        if queue_id == self._notes.open_queue:
            return seq <= self._notes.open_through and seq not in self._open
        return seq <= self._notes.cursors.get(recipient, {}).get(queue_id, 0)

    def _of_partner(self, item: QueuedEvent, recipient: str) -> StageDecision | None:
        # What follows a delivery here has the number of the event, which its recipient may have passed.
        is_follow_up = (item.reminder or item.escalated) and item.origin != self._notes.open_queue
        if not is_follow_up and self._has_passed(recipient, (item.origin, item.origin_seq)):
            return _skip("it was confirmed at the partner")
        if _delivery_id(item) in self._notes.delivered.get(recipient, {}):
            return _skip("it was confirmed here")
        is_there = any(queue_id == item.origin for _, queue_id in self._notes.queues)
        if is_there and not self._notes.is_lost:  # else the partner is away, or has lost it with its disk
            if not is_follow_up:
                self._left.setdefault((item.origin, item.origin_seq), {})[recipient] = item.seq
            text = "the partner is back, and has it"
            return StageDecision(StageVerdict.SKIP, StageReason.LEFT_TO_PARTNER, text)
        return None


def _remember(known: dict[str, Any], identity: str, value: Any = None) -> None:
    """Add to what is remembered of a recipient; beyond ``MOST_DELIVERED`` the oldest goes."""
    known[identity] = value
    if len(known) > MOST_DELIVERED:
        del known[next(iter(known))]


def _last(places: dict[str, Position]) -> Position | None:
    return next(reversed(places.values()), None)


def _delivery_id(item: QueuedEvent) -> str:
    return item.identity


def _skip(text: str) -> StageDecision:
    return StageDecision(StageVerdict.SKIP, StageReason.PARTNER, text)

"""A lane: what delivery knows of one recipient, and the file in which it is durable.

The file ``state.json`` is replaced whole. It is written before anything is deleted from the queues, so a
crash leaves cursors that are too small at most: the same batches are sent again, with the same identities.

Which batches are handed over is written without a sync, to ``state-sent.json``: a file that was not synced
may be empty after a power cut, and must not have taken the place of one that was. The newer of the two holds.

Thread: the main loop.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import write_whole
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import Notice, Routed
from sla_server.events.stages.send import BatchSender
from sla_server.events.trouble import CollectedTrouble, RecipientTrouble

log = structlog.get_logger("delivery")
Firing = dict[tuple[str, ...], tuple[int, int]]
SENT: Final = "state-sent.json"
PAUSE: Final = 10
"""A write of a large state is followed by a pause ten times as long: it takes a tenth of the time at most."""
LARGE_BYTES: Final = 1 << 16
"""A smaller state is written after each answer, so a kill repeats one batch of a recipient at most."""
AGAIN_NS: Final = 1_000_000_000
FAILING_ATTEMPTS: Final = 3
"""The third failure in a row is worth an event: a restart of the other side lasts no longer."""
UNWRITTEN: Final = ("event-state", "recipient", "delivery", "")
"""The condition that this file cannot be written."""
Raise = Callable[[str, str, str, str, dict[str, Any]], None]
"""Raises an event about a recipient: kind, severity, name, text, details."""
Cursor = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class LaneSettings:
    """What the engine needs to know of a recipient.

    Attributes:
        per_minute: most calls a minute, with bursts of as many; 0: no limit.
    """

    name: str
    sender: BatchSender
    most_notices: int = 100
    timeout_s: float = 10.0
    per_minute: float = 0.0


@dataclass(slots=True)
class DeliveryBatch:
    """A run of notices.

    Attributes:
        queue: name of the queue it is from. through: the cursor behind it.
        entries: the notices with what they were made of.
        due_ns: when it may go, by the clock that is never set.
        firing: what the recipient knows once it has them.
        attempt: tries so far. failing_ns: when the first one failed in this process; 0 before.
        failed_ns: for how long it has failed, at the newest answer; kept over restarts.
        not_before_ns: of the next try.
    """

    queue: str
    through: int
    entries: list[tuple[Notice, QueuedEvent, Routed]]
    due_ns: int
    firing: Firing
    attempt: int = 0
    failing_ns: int = 0
    failed_ns: int = 0
    not_before_ns: int = 0

    def notices(self) -> Sequence[Notice]:
        """As they are sent now."""
        return [notice for notice, _, _ in self.entries]


@dataclass(frozen=True, slots=True)
class Tries:
    """What is known of a batch that is made again: it failed before, and its pause and limit go on.

    Attributes: see ``DeliveryBatch``.
    """

    queue: str
    through: int
    attempt: int
    failed_ns: int
    failing_ns: int = 0
    not_before_ns: int = 0


@dataclass(slots=True)
class Lane:
    """See the module.

    Attributes:
        cursors: queue to the newest number that this recipient needs no more.
        number: of the last notice that it confirmed or gave up.
        firing: conditions that it knows to be firing.
        sent: queue and end of the newest batch that was handed over; it comes again with the same numbers.
        batch: what goes next, or is under way if ``token`` is not 0.
        limit: most notices of the next batch: 1 while a refused one is tried singly.
        singly_through: until this cursor of ``batch``'s queue.
        tries: of the batch that was there before; None while there is one.
        escalated: queue to the number up to which escalations were kept although it has not confirmed.
        ahead: what it would know to be firing if it had all up to there; None before any was read.
        is_failing: an event has said so.
        may_owe_end: a process before may have said so, and died before that was in the file.
        no_room: queue in which it stays, because there is no room to hold back what comes there; "" for none.
        paced_ns: when the notices sent so far are paid for.
    """

    settings: LaneSettings
    cursors: dict[str, int]
    number: int = 0
    firing: Firing = field(default_factory=dict)
    sent: tuple[str, int] = ("", 0)
    batch: DeliveryBatch | None = None
    token: int = 0
    deadline_ns: int = 0
    singly: tuple[str, int] = ("", 0)
    is_failing: bool = False
    may_owe_end: bool = False
    no_room: str = ""
    paced_ns: int = 0
    last_answer: str = ""
    confirmed: int = 0
    confirmed_us: int = 0
    dead_letters: int = 0
    tries: Tries | None = None
    escalated: dict[str, int] = field(default_factory=dict)
    ahead: Firing | None = None

    @property
    def name(self) -> str:
        """Of the recipient."""
        return self.settings.name

    def take(self, batch: DeliveryBatch | None) -> None:
        """This goes next; it is tried as often and as long as the one before that it begins within."""
        self.batch = batch
        if batch is None or self.tries is None:
            return
        tries, self.tries = self.tries, None
        if batch.queue == tries.queue and batch.entries[0][1].seq <= tries.through:
            batch.attempt, batch.failed_ns, batch.failing_ns = (
                tries.attempt,
                tries.failed_ns,
                tries.failing_ns,
            )
            batch.not_before_ns = tries.not_before_ns

    def drop(self) -> None:
        """The batch is made again."""
        self.tries, self.batch, self.token = self.tried(), None, 0

    def tried(self) -> Tries | None:
        """Tries that a batch made from now on has to go on with."""
        batch = self.batch
        if batch is None or not batch.attempt:
            return self.tries
        return Tries(
            batch.queue, batch.through, batch.attempt, batch.failed_ns, batch.failing_ns, batch.not_before_ns
        )

    @property
    def does_not_confirm(self) -> bool:
        """Whether what goes next was tried before."""
        tries = self.tried()
        return tries is not None and tries.attempt > bool(self.token)

    def is_escalated(self, queue: str, item: QueuedEvent) -> bool:
        """Whether escalations of an event were kept before it was confirmed; never of a partner's."""
        return not item.origin and item.seq <= self.escalated.get(queue, 0)

    def limit(self, queue: str) -> int:
        """Most notices of the next batch of a queue."""
        is_singly = self.singly[0] == queue and self.cursors[queue] < self.singly[1]
        return 1 if is_singly else self.settings.most_notices

    def has_sent(self, queue: str) -> bool:
        """Whether a batch of the queue was handed over, but not passed."""
        return self.sent[0] == queue and self.cursors[queue] < self.sent[1]


class _StoredLane(BaseModel):
    """What the file says of one lane."""

    model_config = ConfigDict(strict=True)
    cursors: dict[str, Cursor]
    number: Cursor
    firing: list[tuple[tuple[str, ...], int, int]]
    sent: tuple[str, Cursor] = ("", 0)
    tries: tuple[str, Cursor, Cursor, Cursor] | None = None
    is_failing: bool = False
    escalated: dict[str, Cursor] = {}


class _StoredState(BaseModel):
    """The file. A state always has a lane, the engine's own: one without any is none."""

    model_config = ConfigDict(strict=True)
    generation: Cursor = 0
    queues: dict[str, str]
    trouble: list[CollectedTrouble] = []
    lanes: Annotated[dict[str, _StoredLane], Field(min_length=1)]


class DeliveryState:
    """The file; see the module.

    One that cannot be read is kept beside it, as ``state.json.unreadable``, for people: also one that the
    disk does not give back, since what is on its way must not wait for a person to remove it.

    Args:
        path: of ``state.json``.
        queues: name to identity of each queue: cursors of another one mean nothing.
        trouble: what it has collected is in the file; what the file has is given back to it.

    Attributes:
        due_ns: not before then is it written by ``is_written``.
    """

    def __init__(self, path: Path, queues: Mapping[str, str], trouble: RecipientTrouble) -> None:
        self._path = path
        self._sent_path = path.with_name(SENT)
        self._generation = 0
        self._trouble = trouble
        self._queues = dict(queues)
        self._kept: dict[str, _StoredLane] = {}
        self._firing: dict[str, tuple[Firing, str]] = {}  # as it was written, and the text
        self.due_ns = 0
        self._is_large = False
        self._is_failing = self._has_said_end = False
        self._relieved: set[str] = set()
        self._is_lost = True
        if (found := self._read()) is not None:
            self._kept = found.lanes
            trouble.restore(found.trouble)
            for name in self._queues:
                if found.queues.get(name) != self._queues[name]:
                    for lane in self._kept.values():
                        lane.cursors[name] = 0
                        lane.escalated.pop(name, None)
                        lane.sent = ("", 0) if lane.sent[0] == name else lane.sent

    @property
    def names(self) -> list[str]:
        """Lanes that are known and that are not taken."""
        return list(self._kept)

    def lane(self, settings: LaneSettings, newest: Mapping[str, int]) -> Lane:
        """A lane as it was left; a new one begins behind ``newest``.

        Without a file that can be read no lane is known to be new: all begin with what the queues hold.
        """
        found = self._kept.pop(settings.name, None)
        if found is None:
            return Lane(settings, dict.fromkeys(newest, 0) if self._is_lost else dict(newest))
        return Lane(
            settings,
            {name: min(found.cursors.get(name, 0), newest[name]) for name in newest},
            found.number,
            {key: (rank, at_us) for key, rank, at_us in found.firing},
            (found.sent[0], min(found.sent[1], newest.get(found.sent[0], 0))),
            tries=Tries(*found.tries) if found.tries is not None else None,
            is_failing=found.is_failing,
            may_owe_end=_may_owe_end(found),
            escalated={name: min(seq, newest.get(name, 0)) for name, seq in found.escalated.items()},
        )

    def keep(self, lane: Lane) -> None:
        """Nothing can be said of its recipient for now: it stays as it is until ``lane`` gives it back."""
        self._kept[lane.name] = _stored(lane)

    def keep_only(self, names: Collection[str]) -> list[str]:
        """All others that are not taken are those of recipients that have ended; which of them may fail."""
        failing = [name for name, lane in self._kept.items() if lane.is_failing or _may_owe_end(lane)]
        ended = [name for name in failing if name not in names]
        self._kept = {name: lane for name, lane in self._kept.items() if name in names}
        return ended

    def needed(self, queue: str) -> list[int]:
        """Cursors of the lanes that are not taken."""
        return [lane.cursors.get(queue, 0) for lane in self._kept.values()]

    def relieve(self, queue: EventQueue, oldest: int, raise_event: Raise) -> bool:
        """The lane that is furthest behind gives up a chunk, if it is not taken; whether one did.

        Args:
            queue: is nearly full.
            oldest: smallest cursor of the lanes that are taken.
            raise_event: an event says so, once for each recipient.
        """
        seqs = ((lane.cursors.get(queue.name, 0), name) for name, lane in self._kept.items())
        seq, name = min(seqs, default=(oldest, ""))
        if seq >= oldest:
            return False
        self._kept[name].cursors[queue.name] = queue.read(seq)[1]
        if name not in self._relieved:
            self._relieved.add(name)
            reason = "its document cannot be read, and the queue of events is nearly full"
            text = f"events for recipient {name} are given up: {reason}"
            raise_event("delivery-failed", "critical", name, text, {"answer": reason})
        return True

    def write(self, lanes: Mapping[str, Lane], *, synced: bool = True) -> None:
        """Replace the file, or the one beside it; lanes that are not taken stay in it.

        Durability: it is on disk on return, also after a power cut; unsynced, it survives a kill.

        Raises:
            OSError: it is as it was.
        """
        self._generation += 1
        texts = {name: strict_json.dumps(lane.model_dump()) for name, lane in self._kept.items()}
        texts |= {name: self._text(lane) for name, lane in lanes.items()}
        self._firing = {name: found for name, found in self._firing.items() if name in lanes}
        stored = ",".join(f"{strict_json.dumps(name)}:{text}" for name, text in texts.items())
        trouble = strict_json.dumps([found.model_dump() for found in self._trouble.collected()])
        queues = strict_json.dumps(self._queues)
        content = (
            f'{{"generation":{self._generation},"queues":{queues},"trouble":{trouble},"lanes":{{{stored}}}}}'
        )
        write_whole(self._path if synced else self._sent_path, content, synced=synced)
        self._is_large = len(content) > LARGE_BYTES
        self._is_lost = False

    def is_written(self, lanes: Mapping[str, Lane], clock: Clock, raise_event: Raise) -> bool:
        """Write if it is time to; whether the file has these lanes now.

        A disk that does not take it is tried each second; one event says when that begins, one when it ends.
        """
        begun_ns = clock.monotonic_ns()
        if begun_ns < self.due_ns:
            return False
        try:
            self.write(lanes)
        except OSError as exc:  # a full disk: nothing is deleted, so nothing is lost
            self.due_ns = begun_ns + AGAIN_NS
            if not self._is_failing:
                self._is_failing, self._has_said_end = True, False
                log.error("state-not-written", problem=str(exc))
                text = f"what recipients have confirmed cannot be written: {exc}"
                raise_event("event-state-not-written", "critical", "delivery", text, {"problem": str(exc)})
            return False
        done_ns = clock.monotonic_ns()
        self.due_ns = done_ns + PAUSE * (done_ns - begun_ns) * self._is_large
        if self._is_failing or (not self._has_said_end and _knows_unwritten(lanes)):
            self._is_failing, self._has_said_end = False, True
            text = "what recipients have confirmed is written again"
            raise_event("event-state-written", "info", "delivery", text, {})
        return True

    def _text(self, lane: Lane) -> str:
        """What is stored of a lane; thousands of firing conditions are made text when they change only."""
        known, firing = self._firing.get(lane.name, ({}, "[]"))
        if known != lane.firing:
            firing = strict_json.dumps([[key, rank, at_us] for key, (rank, at_us) in lane.firing.items()])
        self._firing[lane.name] = dict(lane.firing), firing
        rest = strict_json.dumps(_stored(replace(lane, firing={})).model_dump(exclude={"firing"}))
        return f'{rest[:-1]},"firing":{firing}}}'

    def _read(self) -> _StoredState | None:
        """What the files have; None: there is none, or none that can be used.

        Raises:
            OSError: it may be read later: there is no descriptor, or it belongs to another user.
        """
        found, sent = self._read_synced(), self._read_sent()
        # Of both: what a former release left beside its own file must never seem newer than what we write.
        self._generation = max(each.generation if each is not None else 0 for each in (found, sent))
        self._is_lost = found is None  # the other file need not know the newest lanes
        if found is None:
            return sent
        # A former release counts no generations, and knows nothing of the file beside its own.
        is_newer = sent is not None and sent.generation > found.generation > 0
        return sent if is_newer else found

    def _read_synced(self) -> _StoredState | None:
        try:
            return _StoredState.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:
            aside = self._path.with_name(f"{self._path.name}.unreadable")
            if isinstance(exc, ValidationError):
                errors = exc.errors(include_url=False, include_input=False)
                problem = "; ".join(each["msg"] for each in errors[:3])
            elif exc.errno == errno.EIO:
                problem = str(exc)
            else:
                raise
            log.error(
                "state-unreadable",
                path=str(self._path),
                kept_as=str(aside),
                problem=problem,
                effect="recipients get again what the queues hold",
            )
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            return None

    def _read_sent(self) -> _StoredState | None:
        try:
            return _StoredState.model_validate_json(self._sent_path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as exc:  # what was under way comes again under other numbers
            log.warning("sent-state-unreadable", path=str(self._sent_path), problem=str(exc)[:200])
            with contextlib.suppress(OSError):  # once readable it would seem newer than what is written now
                self._sent_path.unlink()
            return None


def _knows_unwritten(lanes: Mapping[str, Lane]) -> bool:
    """Whether a recipient believes that it is not written: a process before has said so, and died."""
    return any(name and UNWRITTEN in lane.firing for name, lane in lanes.items())  # "": the observer


def _may_owe_end(stored: _StoredLane) -> bool:
    """A process may have said that it fails, and died before that was in the file."""
    return stored.tries is not None and stored.tries[2] >= FAILING_ATTEMPTS - 1


def _stored(lane: Lane) -> _StoredLane:
    tries = lane.tried()
    return _StoredLane(
        cursors=dict(lane.cursors),
        number=lane.number,
        firing=[(key, rank, at_us) for key, (rank, at_us) in lane.firing.items()],
        sent=lane.sent,
        tries=(tries.queue, tries.through, tries.attempt, tries.failed_ns) if tries is not None else None,
        is_failing=lane.is_failing,
        escalated=dict(lane.escalated),
    )

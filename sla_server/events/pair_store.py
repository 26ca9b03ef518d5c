"""What a server keeps for its partner: the partner's events on disk, and what is known of them.

``MirrorStore`` is a disk queue of its own. A record is an event of the partner as that has it in its queue,
behind the id of that queue and the number there:

    offset  size  field
    0       16    queue id (hexadecimal digits)
    16      8     number, little-endian
    24      ...   the record (``queue.QueuedEvent.encode``)

One of kind ``SET_BACK`` says that what is before it of a queue, behind a number, is of another queue id:

    0       24    "set-back" and NULs, which is no queue's id
    24      24    queue id, number
    48      16    the other queue id

In memory there are the numbers alone. ``PartnerNotes`` is the rest, a small file that is replaced whole: the
partner's queues, how far its recipients have come, what was delivered for it here, and whether it is lost.

Durability: ``add`` returns when the records are on disk; a power cut before may keep any of them. So where
something is missing at an opening, or later, the partner is asked for all again (``complete_seq``), and what
fills a gap is in ``take_late``. A deletion may be undone by a crash; it is repeated
by the partner's next confirmation, or by the notes. Notes are written once a second at most, and at once
when the partner says what it has (``pair_core``): what a crash takes of them may be delivered twice.

Thread: ``ev-pair``; ``fullness_ratio`` and ``len`` any.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pmdaemon.diskqueue import DiskQueue, QueueMessage, QueueSettings
from pmdaemon.diskqueue.errors import QueueFull, RecordDamaged, RecordTooLarge
from pmdaemon.diskqueue.storage import Storage
from pmdaemon.errors import SlaError
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.files import make_directory, write_whole
from sla_server.events.queue import CHUNK_BYTES, ENTRY_BYTES

log = structlog.get_logger("events")
FILE: Final = "partner"
NOTES: Final = "partner.json"
SET_BACK: Final = 1
_HEAD: Final = struct.Struct("<16sQ")
_NO_QUEUE: Final = b"set-back"
Cursor = Annotated[int, Field(ge=0)]


class MirrorStore:
    """See the module.

    Args:
        directory: made if missing.
        data_bytes: room for records.
        storage: the two files, for tests.

    Attributes:
        damaged: records that could not be read back.
        most_events: how many it holds.

    Raises:
        DiskQueueError, OSError: it cannot be opened.
    """

    def __init__(
        self,
        directory: Path,
        data_bytes: int,
        storage: tuple[Storage, Storage] | None = None,
        clock: Clock | None = None,
    ) -> None:
        make_directory(directory, 0o700)
        data, index = storage or (None, None)
        self.most_events = max(1024, data_bytes // ENTRY_BYTES)
        settings = QueueSettings(data_path=directory / FILE, data_bytes=data_bytes, entries=self.most_events)
        self._queue = DiskQueue(settings, data=data, index=index, clock=clock, helper=storage is None)
        self.damaged = sum(max(1, extent.records) for extent in self._queue.report.extents)
        self._places: dict[str, dict[int, int]] = {}  # queue id: number there to number here, ascending
        self._newest: dict[str, int] = {}
        self._complete: dict[str, int] = {}  # up to here nothing is missing
        self._lacking: set[str] = set()  # something is, and the partner was not asked for it yet
        self._late: dict[str, set[int]] = {}
        self._set_backs: dict[str, int] = {}  # by the other queue id: the record that says so
        try:
            self._load()
            self._places = {name: dict(sorted(places.items())) for name, places in self._places.items()}
            self._complete = dict(self._newest)
            self._lacking = set(self._newest) if self.damaged else set()
            self._forget_set_backs()
        except BaseException:
            with contextlib.suppress(SlaError, OSError):
                self._queue.close()
            raise

    def __len__(self) -> int:
        """How many events it has."""
        return sum(map(len, list(self._places.values())))

    @property
    def fullness_ratio(self) -> float:
        """Share of the room in use."""
        return self._queue.fullness_ratio

    @property
    def queue_ids(self) -> list[str]:
        """Queues of which there is something, in the order in which it came."""
        return [queue_id for queue_id, places in self._places.items() if places]

    def count(self, queue_id: str) -> int:
        """How many events of a queue it has."""
        return len(self._places.get(queue_id, ()))

    def count_behind(self, queue_id: str, seq: int) -> int:
        """How many of those are behind a number."""
        return sum(each > seq for each in self._places.get(queue_id, ()))

    def has(self, queue_id: str, seq: int) -> bool:
        """Whether it has this event."""
        return seq in self._places.get(queue_id, ())

    def newest_seq(self, queue_id: str) -> int:
        """The newest number that it got, since it was opened, or has."""
        return self._newest.get(queue_id, 0)

    def complete_seq(self, queue_id: str) -> int:
        """Up to here it has all that it got: a new connection brings what is behind."""
        if queue_id in self._lacking:
            self._lacking.discard(queue_id)
            self._complete[queue_id] = 0
        return self._complete.get(queue_id, 0)

    def take_late(self, queue_id: str) -> set[int]:
        """Numbers that came after greater ones, each once."""
        return self._late.pop(queue_id, set())

    def add(self, queue_id: str, records: Sequence[tuple[int, bytes]]) -> tuple[int, bool]:
        """Keep these, in the order of their numbers; what it has got before is not added again.

        Returns:
            Up to which number it has all, and whether there was no room for some of them.

        Raises:
            QueuePoisoned: the disk fails.
        """
        complete, places = self._complete.get(queue_id, 0), self._places.setdefault(queue_id, {})
        left = [(seq, data) for seq, data in records if seq > complete and seq not in places]
        chunk = len(left)
        while left:
            now = left[:chunk]
            head = queue_id.encode()
            try:
                found = self._queue.put_many([_HEAD.pack(head, seq) + data for seq, data in now])
            except RecordTooLarge as exc:  # of a store that is smaller than one event
                log.error("event-not-kept", seq=now[0][0], problem=str(exc))
                return self._complete.get(queue_id, 0), True
            except QueueFull:
                if chunk > 1:
                    chunk = min(chunk, len(now)) // 2 or 1
                    continue
                return self._complete.get(queue_id, 0), True
            self._place(queue_id, dict(zip((seq for seq, _ in now), found, strict=True)))
            self._complete[queue_id] = now[-1][0]
            del left[: len(now)]
        self._complete[queue_id] = max([complete, *(seq for seq, _ in records)])
        return self._complete[queue_id], False

    def _place(self, queue_id: str, found: dict[int, int]) -> None:
        places, newest = self._places[queue_id], self.newest_seq(queue_id)
        places.update(found)
        if late := {seq for seq in found if seq < newest}:
            self._late.setdefault(queue_id, set()).update(late)
            self._places[queue_id] = dict(sorted(places.items()))
        self._newest[queue_id] = max(newest, *found)

    def set_back(self, queue_id: str, newest_seq: int, lost_id: str) -> int:
        """The partner gives numbers behind ``newest_seq`` again: what is here of them is of ``lost_id`` now.

        One record says so, for which there is a reserve: a full store has no room to write them again.

        Durability: on disk on return, all or nothing.

        Returns:
            How many there were.

        Raises:
            QueuePoisoned: the disk fails.
        """
        self._complete[queue_id] = min(newest_seq, self._complete.get(queue_id, 0))
        if not self.count_behind(queue_id, newest_seq):
            self._newest[queue_id] = min(newest_seq, self.newest_seq(queue_id))
            return 0
        record = _HEAD.pack(_NO_QUEUE, 0) + _HEAD.pack(queue_id.encode(), newest_seq) + lost_id.encode()
        try:
            self._set_backs[lost_id] = self._queue.put(record, kind=SET_BACK, reserved=True)
        except QueueFull as exc:  # the partner's next start finds them as they were
            log.error("set-back-not-kept", queue=queue_id, problem=str(exc))
        return self._move(queue_id, newest_seq, lost_id)

    def _move(self, queue_id: str, newest_seq: int, lost_id: str) -> int:
        places = self._places.get(queue_id, {})
        lost = {seq: place for seq, place in places.items() if seq > newest_seq}
        self._places[queue_id] = {seq: place for seq, place in places.items() if seq <= newest_seq}
        self._places[lost_id] = lost
        self._newest[lost_id] = max(lost, default=0)
        self._newest[queue_id] = min(newest_seq, self.newest_seq(queue_id))
        return len(lost)

    def read(self, queue_id: str, after_seq: int, most: int) -> list[tuple[int, bytes]]:
        """As ``each``, at most so many."""
        return list(itertools.islice(self.each(queue_id, after_seq), most))

    def each(
        self, queue_id: str, after_seq: int, is_wanted: Callable[[int], bool] = lambda _seq: True
    ) -> Iterator[tuple[int, bytes]]:
        """Number and record of events behind ``after_seq``; what is damaged is left out and forgotten.

        What is not wanted, by its number, is not read from the disk.
        """
        places = self._places.get(queue_id, {})
        seqs = list(places)
        for seq in seqs[bisect.bisect_right(seqs, after_seq) :]:
            if not is_wanted(seq):
                continue
            try:
                message = self._queue.read(places[seq])
            except RecordDamaged as exc:
                self.damaged += 1
                log.error("partner-event-damaged", queue=queue_id, seq=seq, problem=str(exc))
                self._lacking.add(queue_id)
                message = None
            if message is None:
                self._forget(queue_id, [seq])
            else:
                yield seq, message.data[_HEAD.size :]

    def discard_through(self, queue_id: str, seq: int) -> int:
        """The partner needs none of these any more; returns how many there were."""
        found = []
        for each in self._places.get(queue_id, ()):
            if each > seq:
                break
            found.append(each)
        return self._forget(queue_id, found)

    def keep_only(self, queue_id: str, seqs: Sequence[int], through: int) -> int:
        """The partner needs these alone of what it had up to ``through``; returns how many are gone."""
        wanted = set(seqs)
        others = [seq for seq in self._places.get(queue_id, ()) if seq <= through and seq not in wanted]
        return self._forget(queue_id, others)

    def close(self) -> None:
        """Let go of the files."""
        self._queue.close()

    def _forget(self, queue_id: str, seqs: Sequence[int]) -> int:
        places = self._places.get(queue_id, {})
        self._queue.discard([places.pop(seq) for seq in seqs])
        return len(seqs)

    def _load(self) -> None:
        after = 0
        while after < self._queue.durable_seq:
            try:
                messages = self._queue.peek(after, CHUNK_BYTES)
            except RecordDamaged as exc:
                self.damaged += 1
                log.error("partner-event-damaged", place=exc.seq, problem=str(exc))
                self._queue.discard([exc.seq])
                continue
            if not messages:
                return
            for message in messages:
                if message.kind == SET_BACK:
                    self._load_set_back(message)
                    continue
                queue_id, seq = _HEAD.unpack_from(message.data)
                name = queue_id.decode("ascii", "replace")
                places = self._places.setdefault(name, {})
                if seq in places:  # the partner has given the number again, and a crash undid the deletion
                    self._queue.discard([places[seq]])
                places[seq] = message.seq
                self._newest[name] = max(seq, self._newest.get(name, 0))
            after = messages[-1].seq

    def _load_set_back(self, message: QueueMessage) -> None:
        queue_id, newest_seq = _HEAD.unpack_from(message.data, _HEAD.size)
        lost_id = message.data[2 * _HEAD.size :].decode("ascii", "replace")
        self._move(queue_id.decode("ascii", "replace"), newest_seq, lost_id)
        self._set_backs[lost_id] = message.seq

    def _forget_set_backs(self) -> None:
        """At the start only: what they were about must not come back behind them, by a crash."""
        for lost_id in [lost_id for lost_id in self._set_backs if not self._places.get(lost_id)]:
            self._queue.discard([self._set_backs.pop(lost_id)])


class PartnerNotes(BaseModel):
    """What is known of the partner, and has to outlive this process.

    Attributes:
        queues: name and id of its queues, in the order of a replay.
        openings: of its queues, the oldest first (``pair_history``).
        gone: ids of queues that it had before, and has lost with its disk.
        cursors: of its recipients, by queue id.
        done: newest number of each queue that none of them needs.
        open_queue: id of the queue of what is due later; of its numbers up to ``open_through`` those in
            ``open_seqs`` alone are still needed.
        delivered: recipient to the events of the partner that it has confirmed here: identity to queue id and
            number there.
        is_lost: it was not heard for too long.
        is_behind: an event has said that it does not have all of ours.
    """

    model_config = ConfigDict(strict=True)
    queues: list[tuple[str, str]] = Field(default_factory=list)
    openings: list[tuple[str, dict[str, Cursor]]] = Field(default_factory=list)
    gone: list[str] = Field(default_factory=list)
    cursors: dict[str, dict[str, Cursor]] = Field(default_factory=dict)
    done: dict[str, Cursor] = Field(default_factory=dict)
    open_queue: str = ""
    open_through: Cursor = 0
    open_seqs: list[Cursor] = Field(default_factory=list)
    delivered: dict[str, dict[str, tuple[str, Cursor]]] = Field(default_factory=dict)
    is_lost: bool = False
    is_behind: bool = False

    @classmethod
    def read(cls, directory: Path) -> PartnerNotes:
        """The file's content; without one that can be read, nothing is known: more is delivered twice."""
        path = directory / NOTES
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as exc:
            log.error("partner-notes-unreadable", path=str(path), problem=str(exc).partition("\n")[0])
            return cls()

    def write(self, directory: Path) -> None:
        """Replace the file.

        Durability: it is on disk on return.

        Raises:
            OSError: see ``write_whole``.
        """
        write_whole(directory / NOTES, self.model_dump_json(), synced=True)

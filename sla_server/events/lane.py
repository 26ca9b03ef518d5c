"""A lane: what delivery knows of one recipient, and the file in which it is durable.

The file ``state.json`` is replaced whole. It is written before anything is deleted from the queues, so a
crash leaves cursors that are too small at most: the same batches are sent again, with the same identities.

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.files import write_whole
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import Notice, Routed
from sla_server.events.stages.send import BatchSender

log = structlog.get_logger("delivery")
Firing = dict[tuple[str, ...], tuple[int, int]]


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
        due_us: when it may go.
        firing: what the recipient knows once it has them.
        attempt: tries so far. failing_us: when the first one failed; 0 before.
        not_before_ns: of the next try.
    """

    queue: str
    through: int
    entries: list[tuple[Notice, QueuedEvent, Routed]]
    due_us: int
    firing: Firing
    attempt: int = 0
    failing_us: int = 0
    not_before_ns: int = 0

    def notices(self) -> Sequence[Notice]:
        """As they are sent now."""
        return [notice for notice, _, _ in self.entries]


@dataclass(slots=True)
class Lane:
    """See the module.

    Attributes:
        cursors: queue to the newest number that this recipient needs no more.
        number: of the last notice that it confirmed or gave up.
        firing: conditions that it knows to be firing.
        batch: what goes next, or is under way if ``token`` is not 0.
        limit: most notices of the next batch: 1 while a refused one is tried singly.
        singly_through: until this cursor of ``batch``'s queue.
        is_failing: an event has said so.
        has_no_room: what is held back from it finds no room, so it stays where it is.
        paced_ns: when the notices sent so far are paid for.
    """

    settings: LaneSettings
    cursors: dict[str, int]
    number: int = 0
    firing: Firing = field(default_factory=dict)
    batch: DeliveryBatch | None = None
    token: int = 0
    deadline_ns: int = 0
    singly: tuple[str, int] = ("", 0)
    is_failing: bool = False
    has_no_room: bool = False
    paced_ns: int = 0
    last_answer: str = ""
    confirmed: int = 0
    confirmed_us: int = 0
    dead_letters: int = 0

    @property
    def name(self) -> str:
        """Of the recipient."""
        return self.settings.name

    def limit(self, queue: str) -> int:
        """Most notices of the next batch of a queue."""
        is_singly = self.singly[0] == queue and self.cursors[queue] < self.singly[1]
        return 1 if is_singly else self.settings.most_notices


class DeliveryState:
    """The file; see the module.

    Args:
        path: of ``state.json``.
        queues: name to identity of each queue: cursors of another one mean nothing.
    """

    def __init__(self, path: Path, queues: Mapping[str, str]) -> None:
        self._path = path
        self._queues = dict(queues)
        self._lanes: dict[str, dict[str, Any]] = {}
        self._stored: dict[str, Any] = self._read()

    @property
    def names(self) -> list[str]:
        """Lanes that are known."""
        return [name for name in self._stored.get("lanes", {}) if isinstance(name, str)]

    def lane(self, settings: LaneSettings, newest: Mapping[str, int]) -> Lane:
        """A lane as it was left; a new one begins behind ``newest``.

        Without a file that can be read no lane is known to be new: all begin with what the queues hold.
        """
        found = self._stored.get("lanes", {}).get(settings.name)
        if not isinstance(found, dict):
            return Lane(settings, dict(newest) if self._stored else dict.fromkeys(newest, 0))
        same = {
            name
            for name, identity in self._stored.get("queues", {}).items()
            if self._queues.get(name) == identity
        }
        cursors = found.get("cursors", {})
        return Lane(
            settings,
            {name: min(int(cursors.get(name, 0)), newest[name]) if name in same else 0 for name in newest},
            int(found.get("number", 0)),
            {tuple(key): (int(rank), int(at_us)) for key, rank, at_us in found.get("firing", [])},
        )

    def write(self, lanes: Mapping[str, Lane]) -> None:
        """Replace the file.

        Durability: survives the death of the process; a power cut may bring the former one back.

        Raises:
            OSError: it is as it was.
        """
        found = {
            "queues": self._queues,
            "lanes": {
                name: {
                    "cursors": lane.cursors,
                    "number": lane.number,
                    "firing": [[list(key), rank, at_us] for key, (rank, at_us) in lane.firing.items()],
                }
                for name, lane in lanes.items()
            },
        }
        write_whole(self._path, strict_json.dumps(found))
        self._stored = found

    def _read(self) -> dict[str, Any]:
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return {}
        found = strict_json.loads(text)
        if isinstance(found, dict):
            return found
        log.error(
            "state-unreadable", path=str(self._path), effect="recipients get again what the queue holds"
        )
        return {}

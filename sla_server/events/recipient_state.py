"""How a recipient is, as a row for people (``delivery_state``), and how many events wait for it.

A cursor alone does not say how many events wait: behind it are also those for other recipients. So the queues
are read once more, each event once for all recipients, a bounded part of them in one look. What has not been
looked at yet makes a count a least one (``is_least``).

Thread: the main loop.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.runtime.clock import Clock
from sla_server.events.event import Event
from sla_server.events.lane import Lane
from sla_server.events.queue import EventQueue
from sla_server.events.recipients.base import Outcome

CHUNKS: Final = 4
"""Of a queue in one look: some 750 events, which take 20 ms of a second at most."""
Route = Callable[[Event], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Waiting:
    """How many events wait for a recipient; there may be more if ``is_least``."""

    count: int = 0
    is_least: bool = False


class WaitingEvents:
    """See the module.

    Args:
        queues: that the lanes read.
    """

    def __init__(self, queues: Sequence[EventQueue]) -> None:
        self._queues = queues
        self._through: dict[str, int] = {}
        self._seqs: defaultdict[tuple[str, str], deque[int]] = defaultdict(deque)

    def forget(self) -> None:
        """The routes are others now: everything is looked at again."""
        self._through.clear()
        self._seqs.clear()

    def look(self, cursors: Mapping[str, Mapping[str, int]], route: Route) -> dict[str, Waiting]:
        """How many events wait for each recipient.

        Args:
            cursors: recipient to its cursors, by queue.
            route: names of the recipients that an event goes to.
        """
        found = dict.fromkeys(cursors, Waiting())
        for queue in self._queues:
            is_whole = self._read_on(queue, {name: each[queue.name] for name, each in cursors.items()}, route)
            for name, each in cursors.items():
                seqs = self._seqs[queue.name, name]
                while seqs and seqs[0] <= each[queue.name]:
                    seqs.popleft()
                is_least = found[name].is_least or not is_whole
                found[name] = Waiting(found[name].count + len(seqs), is_least)
        return found

    def _read_on(self, queue: EventQueue, cursors: Mapping[str, int], route: Route) -> bool:
        """Take in what follows; whether that was all."""
        oldest = min(cursors.values(), default=queue.newest_seq)
        through = max(self._through.get(queue.name, 0), oldest)
        is_whole = False
        for _ in range(CHUNKS):
            items, reached = queue.read(through)
            if reached == through:
                is_whole = True
                break
            for item in items:
                for name in (item.recipient,) if item.recipient else route(item.event):
                    if name in cursors and item.seq > cursors[name]:
                        self._seqs[queue.name, name].append(item.seq)
            through = reached
        self._through[queue.name] = through
        return is_whole


def recipient_row(lane: Lane, kind: str, waiting: Waiting, held: int, clock: Clock) -> dict[str, Any]:
    """What ``delivery_state`` says of a recipient.

    Args:
        lane: its lane.
        kind: of its document.
        waiting: events for it in the queues.
        held: events that silences hold back from it.
        clock: both time bases.
    """
    now_us, now_ns = clock.unix_us(), clock.monotonic_ns()
    tries = lane.tried()
    since_ns = tries.failing_ns if tries is not None and is_failing(lane) else 0
    next_ns = tries.not_before_ns if tries is not None and not lane.token else 0
    return {
        "name": lane.name,
        "kind": kind,
        "state": "failing" if is_failing(lane) else "held" if held and not waiting.count else "ok",
        "waiting": waiting.count + held,
        "is_least": waiting.is_least,
        "attempt": tries.attempt if tries is not None else 0,
        "is_trying": lane.token != 0,
        "failing_since_us": now_us - (now_ns - since_ns) // 1000 if since_ns else None,
        "next_try_us": now_us + (next_ns - now_ns) // 1000 if next_ns > now_ns else None,
        "last_answer": lane.last_answer,
        "last_confirmed_us": lane.confirmed_us,
        "confirmed": lane.confirmed,
        "dead_letters": lane.dead_letters,
    }


def is_failing(lane: Lane) -> bool:
    """Whether its newest answer was no confirmation; after a restart whether the last known one was none."""
    if lane.last_answer:
        return lane.last_answer != Outcome.CONFIRMED.value
    return lane.is_failing or (lane.tries is not None and lane.tries.attempt > 1)

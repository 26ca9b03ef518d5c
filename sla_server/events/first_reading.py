"""What the queue of events holds at the start, from one reading of it.

A backlog of hundreds of thousands of events takes seconds to decode, and three want to know what is in it:
intake (identities that it drops if they come again), the queue of later events (what a crash left in both),
and the order of conditions. All three are served by one pass, while nothing is added.

Thread: the main loop, before any other begins.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from sla_server.events.later import LaterQueue
from sla_server.events.order import ReadOrder
from sla_server.events.queue import EventQueue, QueuedEvent

MOST_IDS: Final = 20_000


class FirstReading:
    """See the module.

    Args:
        main: the queue that lanes read last.
        later: what comes at a certain time.
        most_ids: so many identities are kept, of the newest.

    Attributes:
        order: of conditions; reads on from here.
        identities: of events that are routed, oldest first.
        moves: number in ``later`` to number here of what is in both; see ``LaterQueue.repeat_moves``.
    """

    def __init__(self, main: EventQueue, later: LaterQueue, most_ids: int = MOST_IDS) -> None:
        self.order = ReadOrder(main)
        self.identities: OrderedDict[str, None] = OrderedDict()
        self.moves: dict[int, int] = {}
        self._later = later
        self._most_ids = most_ids
        self.order.read_on(self._saw)

    def _saw(self, item: QueuedEvent) -> None:
        if not item.recipient:
            self.identities[item.identity] = None
            if len(self.identities) > self._most_ids:
                self.identities.popitem(last=False)
        if item.later_seq and self._later.has_moved(item):
            self.moves[item.later_seq] = item.seq

"""Who is next of those that wait for a rate: each gets an equal, or a weighted, share of it.

Start-time fair queueing. What waits is a *flow*: a connection of a volume, or a volume of a group. Each flow
has a tag, which is how much of the rate it has used, in ns at the full rate and divided by its weight; the
smallest tag is served first, and among equal ones the one that was served longest ago. So flows whose
requests are alike take turns, and one with large requests waits until the others had as much. A flow that
comes, or comes back, begins where the one that is served now began: what it left unused while it asked for
nothing is not owed to it.

State: the tags, and a heap of those that wait. An entry of the heap counts only while it is the newest of its
flow. No clock, no I/O.

Source: Goyal, Vin, Cheng: Start-time Fair Queueing (SIGCOMM 1996).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Generic, TypeVar

Flow = TypeVar("Flow")


class FairOrder(Generic[Flow]):
    """See the module docstring. ``len`` and iteration are those of the flows that wait."""

    def __init__(self) -> None:
        self._tags: dict[Flow, float] = {}
        self._entries: dict[Flow, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, Flow]] = []
        self._aside: list[tuple[float, int, Flow]] = []
        self._number = 0
        self._virtual = 0.0  # where the flow that was served last began

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Flow]:
        return iter(self._entries)

    def __contains__(self, flow: Flow) -> bool:
        return flow in self._entries

    def add(self, flow: Flow) -> None:
        """It waits from now on; one that does already keeps its place."""
        if flow not in self._entries:
            self._push(flow, max(self._tags.get(flow, 0.0), self._virtual))

    def _push(self, flow: Flow, tag: float) -> None:
        self._number += 1
        self._tags[flow] = tag
        self._entries[flow] = tag, self._number
        heapq.heappush(self._heap, (tag, self._number, flow))

    def first(self) -> Flow | None:
        """The next one, without those set aside; None when there is none."""
        while self._heap:
            tag, number, flow = self._heap[0]
            if self._entries.get(flow) == (tag, number):
                return flow
            heapq.heappop(self._heap)
        return None

    def set_aside(self, flow: Flow) -> None:
        """The first one cannot go now: look at those behind it, until ``put_back``."""
        if self.first() == flow:
            self._aside.append(heapq.heappop(self._heap))

    def put_back(self) -> None:
        """Those set aside have their places again; what passed meanwhile is not owed to them.

        Else one that something else held back for a minute would be alone for that minute once it may go. Of
        several whose tags are equal then, the one that waited longest is still the first.
        """
        for tag, number, flow in self._aside:
            if self._entries.get(flow) == (tag, number):
                self._tags[flow] = tag = max(tag, self._virtual)
                self._entries[flow] = tag, number
                heapq.heappush(self._heap, (tag, number, flow))
        self._aside = []

    def served(self, flow: Flow, used_ns: float) -> None:
        """A flow was given so much of the rate, divided by its weight; if it waits, it goes on waiting."""
        began = self._tags.get(flow, self._virtual)
        if used_ns > 0:
            self._virtual = max(self._virtual, began)
        tag = began + used_ns
        if self._entries.pop(flow, None) is not None:
            self._push(flow, tag)
        else:
            self._tags[flow] = tag

    def remove(self, flow: Flow) -> None:
        """It waits no more; what it used is remembered."""
        self._entries.pop(flow, None)

    def forget(self, flow: Flow) -> None:
        """It is gone."""
        self._entries.pop(flow, None)
        self._tags.pop(flow, None)

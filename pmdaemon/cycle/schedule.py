"""When each gateway is polled.

The phase of a gateway is a pure function of its id, so that polls spread over the interval, keep their
place over restarts, and a late reply never shifts anything: due times are ``phase + k * interval`` on the
monotonic clock, whatever happened before. A tick that was missed because the process did not run is
skipped and counted, never made up for in a burst.

Thread: belongs to the outbound thread.

Source: P10, P16; STYLE.md 1 (Prometheus ``scrape/``).
"""

from __future__ import annotations

import hashlib
import heapq


def phase_ns(gateway_id: str, interval_ns: int) -> int:
    """Offset of the gateway's polls within the interval, 0 <= phase < interval."""
    digest = hashlib.blake2b(gateway_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % interval_ns


def due_after_ns(now_ns: int, phase: int, interval_ns: int) -> int:
    """First due time strictly after ``now_ns``."""
    return now_ns + 1 + (phase - now_ns - 1) % interval_ns


class Schedule:
    """Due times of all gateways of a pair, as a heap.

    Attributes:
        missed_ticks: polls that fell due while this process did not run.
    """

    def __init__(self, interval_ns: int) -> None:
        if interval_ns <= 0:
            raise ValueError(f"poll interval of {interval_ns} ns")
        self.interval_ns = interval_ns
        self.missed_ticks = 0
        self._heap: list[tuple[int, str]] = []
        self._due_ns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._due_ns)

    def add(self, gateway_id: str, now_ns: int) -> None:
        """Poll this gateway from its next phase on; nothing changes if it is scheduled already."""
        if gateway_id not in self._due_ns:
            self._push(
                gateway_id, due_after_ns(now_ns, phase_ns(gateway_id, self.interval_ns), self.interval_ns)
            )

    def remove(self, gateway_id: str) -> None:
        """Poll it no more. Its heap entry is dropped when it comes up."""
        self._due_ns.pop(gateway_id, None)

    def next_due_ns(self) -> int | None:
        """The next due time, or None when nothing is scheduled."""
        while self._heap and self._due_ns.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take_due(self, now_ns: int) -> list[str]:
        """Gateways that are due, in order of their due times; each is scheduled for its next phase."""
        due = []
        while (at_ns := self.next_due_ns()) is not None and at_ns <= now_ns:
            _, gateway_id = heapq.heappop(self._heap)
            due.append(gateway_id)
            following = due_after_ns(now_ns, at_ns, self.interval_ns)
            self.missed_ticks += (following - at_ns) // self.interval_ns - 1
            self._push(gateway_id, following)
        return due

    def _push(self, gateway_id: str, due_ns: int) -> None:
        self._due_ns[gateway_id] = due_ns
        heapq.heappush(self._heap, (due_ns, gateway_id))

"""When each gateway is polled.

The phase of a gateway is a pure function of its id, so that polls spread over the interval, keep their
place over restarts, and a late reply never shifts anything: due times are ``phase + k * interval`` on the
monotonic clock, whatever happened before. A tick that was missed because the process did not run is
skipped and counted, never made up for in a burst.

All gateways of a pair have the same interval, so they fall due in the order of their phases, round after
round: a list sorted by phase, the *ring*, and the time up to which all due polls were taken say everything.
Taking those of a moment is a search for two places in the ring. A gateway joins it with its first poll.

Thread: belongs to the outbound thread.

Source: P10, P16; STYLE.md 1 (Prometheus ``scrape/``).
"""

from __future__ import annotations

import hashlib
import heapq
from bisect import bisect_left, bisect_right


def phase_ns(gateway_id: str, interval_ns: int) -> int:
    """Offset of the gateway's polls within the interval, 0 <= phase < interval."""
    digest = hashlib.blake2b(gateway_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % interval_ns


def due_after_ns(now_ns: int, phase: int, interval_ns: int) -> int:
    """First due time strictly after ``now_ns``."""
    return now_ns + 1 + (phase - now_ns - 1) % interval_ns


class Schedule:
    """The gateways of a pair in the order of their phases.

    Attributes:
        missed_ticks: polls that fell due while this process did not run.
    """

    def __init__(self, interval_ns: int) -> None:
        if interval_ns <= 0:
            raise ValueError(f"poll interval of {interval_ns} ns")
        self.interval_ns = interval_ns
        self.missed_ticks = 0
        self._phases: list[int] = []  # the ring: sorted, and beside it
        self._gateways: list[str] = []
        self._taken_until_ns = 0
        self._joining: list[tuple[int, str]] = []  # a heap of first due times
        self._first_due_ns: dict[str, int] = {}  # what of that heap holds
        self._members: set[str] = set()

    def __len__(self) -> int:
        return len(self._members) + len(self._first_due_ns)

    def add(self, gateway_id: str, now_ns: int) -> None:
        """Poll this gateway from its next phase on; nothing changes if it is scheduled already."""
        if gateway_id in self._members or gateway_id in self._first_due_ns:
            return
        due_ns = due_after_ns(now_ns, phase_ns(gateway_id, self.interval_ns), self.interval_ns)
        self._first_due_ns[gateway_id] = due_ns
        heapq.heappush(self._joining, (due_ns, gateway_id))

    def remove(self, gateway_id: str) -> None:
        """Poll it no more."""
        self._first_due_ns.pop(gateway_id, None)  # its entry is dropped when it comes up
        if gateway_id in self._members:
            self._members.remove(gateway_id)
            at = bisect_left(self._phases, phase_ns(gateway_id, self.interval_ns))
            at = self._gateways.index(gateway_id, at)  # others may have the same phase
            del self._phases[at], self._gateways[at]

    def next_due_ns(self) -> int | None:
        """The next due time, or None when nothing is scheduled."""
        first_ns = self._next_joining_ns()
        if not self._phases:
            return first_ns
        at = bisect_right(self._phases, self._taken_until_ns % self.interval_ns) % len(self._phases)
        due_ns = due_after_ns(self._taken_until_ns, self._phases[at], self.interval_ns)
        return due_ns if first_ns is None else min(due_ns, first_ns)

    def take_due(self, now_ns: int) -> list[str]:
        """Gateways that are due, in order of their due times; each is scheduled for its next phase."""
        due = self._take_ring(now_ns)
        first_ns = self._next_joining_ns()
        if first_ns is not None and first_ns <= now_ns:
            due = self._join_due(due, now_ns)
        self._taken_until_ns = now_ns
        return due

    def _take_ring(self, now_ns: int) -> list[str]:
        after_ns, interval_ns, gateways = self._taken_until_ns, self.interval_ns, self._gateways
        low = bisect_right(self._phases, after_ns % interval_ns)
        high = bisect_right(self._phases, now_ns % interval_ns)
        is_over_the_end = now_ns % interval_ns < after_ns % interval_ns
        rounds = (now_ns - after_ns) // interval_ns
        if rounds > 0:
            self.missed_ticks += (rounds - 1) * len(gateways) + high - low
            self.missed_ticks += len(gateways) if is_over_the_end else 0
            return gateways[low:] + gateways[:low]
        return gateways[low:] + gateways[:high] if is_over_the_end else gateways[low:high]

    def _next_joining_ns(self) -> int | None:
        joining = self._joining
        while joining and self._first_due_ns.get(joining[0][1]) != joining[0][0]:
            heapq.heappop(joining)
        return joining[0][0] if joining else None

    def _join_due(self, due: list[str], now_ns: int) -> list[str]:
        """``due`` of the ring and those that join it now, in order of their due times."""
        after_ns, interval_ns = self._taken_until_ns, self.interval_ns
        found = [(due_after_ns(after_ns, phase_ns(name, interval_ns), interval_ns), name) for name in due]
        while (first_ns := self._next_joining_ns()) is not None and first_ns <= now_ns:
            _, gateway_id = heapq.heappop(self._joining)
            del self._first_due_ns[gateway_id]
            found.append((first_ns, gateway_id))
            self.missed_ticks += (now_ns - first_ns) // interval_ns
            self._members.add(gateway_id)
            phase = first_ns % interval_ns
            at = bisect_right(self._phases, phase)
            self._phases.insert(at, phase)
            self._gateways.insert(at, gateway_id)
        return [name for _, name in sorted(found)]

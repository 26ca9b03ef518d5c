"""How much backlog gateways are asked for: a budget of the pair, and a pause after a refusal.

*The budget* (``CatchUp``). After an outage every gateway of a fleet holds a backlog, and each answer may
carry 256 KB of it: thirty times what the present needs. Asked for by all at once, it fills the pair,
dbmanager and the database, and answers come late, on which control depends. So a poll of a gateway that is
behind asks for backlog only while this budget lasts; otherwise it asks for the newest cut alone. Gateways
that have caught up need none of the budget, so those that wait get their turn.

The budget is a rate in bytes that finds its own size, as TCP finds a path's: what a machine can store
beside the present is not known beforehand, and differs by a factor of a hundred. Every answer with backlog
that comes in time raises it, twofold in a second at first, by a tenth after the first setback. It is halved
when many answers take longer than ``SLOW`` of the interval, or when a batch found no room at dbmanager.
Many: a few gateways behind slow links say nothing of this machine.

*The present* is what the pair's gateways make in an interval. A fleet that is not behind is asked for it
whatever happens, so slow answers never bring the budget below it, or a machine that is slow for a while would
leave dbmanager idle and the whole fleet behind for ever. Only refusals do: then dbmanager has no room.

*The pause* (``RefusalBackoff``). A gateway whose cuts found no room at dbmanager is not asked for them
again at once: it would send up to 256 KB of backlog, most of it to be refused again; a thousand gateways a
quarter of a gigabyte a second, and what services needs to judge the present would wait behind it. So its
polls ask for the newest cut alone until the pause has ended. Each refusal that follows doubles the pause,
each time that something becomes durable halves what the next one begins from: while dbmanager catches up,
about as much is accepted as is refused. Pauses are spread over the gateways, so that those refused together
do not come back together.

Thread: ``CatchUp`` any; it has a lock of its own, and only polls and answers of gateways that are behind
come here. ``RefusalBackoff`` is guarded by its gateway's lock.

Source: DESIGN.md 4 ("paced"); P16; ADR 14, ADR 17.
"""

from __future__ import annotations

import threading
from typing import Final

FIRST_BYTES_PER_S: Final = 4 << 20
LEAST_BYTES_PER_S: Final = 256 << 10  # one full answer a second: every gateway gets its turn some time
SAVED_S: Final = 0.25  # what was not asked for is forgotten after this long: no burst after a quiet time
SLOW: Final = 0.25  # of the interval: an answer is late after the whole
MANY: Final = 0.25  # of the recent answers
FORGET_NS: Final = 60 * 10**9  # without backlog; the next outage finds another machine
_GROWTH_FIRST: Final = 1.0  # of what was answered: twofold in a second
_GROWTH_AFTER: Final = 0.1
_FIRST_ANSWER_BYTES: Final = 64 << 10
_LEAST_ANSWER_BYTES: Final = 32 << 10  # an empty one costs, too, and the next may be full
_WEIGHT: Final = 0.1  # of one answer in the mean
_SLOW_WEIGHT: Final = 0.05
FIRST_PAUSE_NS: Final = 10**9
LONGEST_PAUSE_NS: Final = 8 * 10**9  # before it is spread; 4,000 gateways then try some 100 MB/s
# Of the longest pauses none is as long as the one before: dbmanager may have no room at regular times, and
# who came back in step with them would never find any.
_GOLDEN: Final = 0.618
# No cut has this seq or a later one (``wire.cut``): a poll from there asks for the newest cut alone.
BEYOND: Final = 1 << 63


class CatchUp:
    """A token bucket of bytes of backlog.

    Args:
        most_bytes_per_s: its rate is never above this, over all gateways of the pair.
        interval_ns: between two polls of a gateway.

    Attributes:
        bytes_per_s: its rate now.
    """

    __slots__ = (
        "_answer_bytes",
        "_filled_ns",
        "_granted_ns",
        "_growth",
        "_halved_ns",
        "_interval_ns",
        "_lock",
        "_most",
        "_present",
        "_slow_ratio",
        "_tokens",
        "bytes_per_s",
    )

    def __init__(self, most_bytes_per_s: int, interval_ns: int) -> None:
        self._most = float(most_bytes_per_s)
        self._interval_ns = interval_ns
        self._lock = threading.Lock()
        self._filled_ns: int | None = None
        self._present = 0.0
        self._begin()

    def _begin(self) -> None:
        self.bytes_per_s = min(self._most, float(FIRST_BYTES_PER_S))
        self._growth = _GROWTH_FIRST
        self._answer_bytes = float(_FIRST_ANSWER_BYTES)  # the mean of one with backlog
        self._slow_ratio = 0.0
        self._halved_ns: int | None = None
        self._granted_ns: int | None = None
        self._tokens = self._room

    @property
    def _room(self) -> float:
        return max(self.bytes_per_s * SAVED_S, self._answer_bytes)

    def grant(self, now_ns: int) -> bool:
        """Whether a gateway that is behind may be asked for backlog now; charges a mean answer if so."""
        with self._lock:
            if self._filled_ns is not None and now_ns - self._filled_ns > FORGET_NS:
                self._begin()
            elif self._filled_ns is not None:
                earned = (now_ns - self._filled_ns) * 1e-9 * self.bytes_per_s
                self._tokens = min(self._room, self._tokens + earned)
            self._filled_ns = now_ns
            if self._tokens < self._answer_bytes:
                return False
            self._tokens -= self._answer_bytes
            self._granted_ns = now_ns
            return True

    def set_present(self, size_bytes: float) -> None:
        """What all gateways of the pair together make in an interval."""
        with self._lock:
            self._present = min(self._most, size_bytes * 1e9 / self._interval_ns)

    def answered(self, size_bytes: int, waited_ns: int, now_ns: int) -> None:
        """A poll that asked for backlog was answered with ``size_bytes`` of cuts, after ``waited_ns``."""
        with self._lock:
            size_bytes = max(size_bytes, _LEAST_ANSWER_BYTES)
            self._answer_bytes += _WEIGHT * (size_bytes - self._answer_bytes)
            is_slow = waited_ns > SLOW * self._interval_ns
            self._slow_ratio += _SLOW_WEIGHT * (is_slow - self._slow_ratio)
            if not is_slow or self.bytes_per_s < self._present:
                self.bytes_per_s = min(self._most, self.bytes_per_s + self._growth * size_bytes)
            elif self._slow_ratio > MANY:
                self._halve(now_ns, least=self._present)

    def refused(self, now_ns: int) -> None:
        """A batch found no room at dbmanager. If nothing was granted lately, the backlog is not why."""
        with self._lock:
            if self._granted_ns is not None and now_ns - self._granted_ns <= 2 * self._interval_ns:
                self._halve(now_ns)

    def _halve(self, now_ns: int, least: float = 0.0) -> None:
        """Once for what was under way together."""
        if self._halved_ns is None or now_ns - self._halved_ns >= self._interval_ns:
            self._halved_ns = now_ns
            self._growth = _GROWTH_AFTER
            least = max(least, min(self._most, float(LEAST_BYTES_PER_S)))
            self.bytes_per_s = max(least, self.bytes_per_s / 2)


class RefusalBackoff:
    """When a gateway may be asked for its backlog again.

    Attributes:
        until_ns: monotonic; before that it may not.
    """

    __slots__ = ("_length_ns", "_shift", "until_ns")

    def __init__(self) -> None:
        self._length_ns = 0
        self._shift = 0.0
        self.until_ns = 0

    def refused(self, now_ns: int, spread: float) -> None:
        """Its cuts found no room. ``spread``: the gateway's own number, 0 <= spread < 1."""
        if now_ns >= self.until_ns:  # else it was refused together with one that began the pause
            if self._length_ns == LONGEST_PAUSE_NS:
                self._shift = (self._shift + _GOLDEN) % 1
            self._length_ns = min(LONGEST_PAUSE_NS, 2 * self._length_ns or FIRST_PAUSE_NS)
            self.until_ns = now_ns + int(self._length_ns * (0.5 + (spread + self._shift) % 1))

    def accepted(self, now_ns: int) -> RefusalBackoff | None:
        """Something of it became durable; returns what is left of the pause, if anything."""
        self._length_ns = self._length_ns // 2 if self._length_ns > FIRST_PAUSE_NS else 0
        return self if self._length_ns or now_ns < self.until_ns else None

"""A gateway whose cuts found no room at dbmanager is not asked for them again at once.

Asked for everything at each poll, it would send up to 256 KB of backlog, most of it to be refused again: a
thousand gateways a quarter of a gigabyte a second, and what services needs to judge the present would wait
behind it. So its polls ask for the newest cut alone until the pause is over. Each refusal that follows
doubles the pause, each time that something becomes durable halves what the next one begins from: while
dbmanager catches up, about as much is accepted as is refused. Pauses are spread over the gateways, so that
those refused together do not come back together.

Pure; guarded by the gateway's lock, with the rest of its record. Source: DESIGN.md 4 ("paced"); P16.
"""

from __future__ import annotations

from typing import Final

FIRST_NS: Final = 10**9
MOST_NS: Final = 8 * 10**9  # before it is spread; 4,000 gateways then try some 100 MB/s
BEYOND: Final = 1 << 62  # a seq behind all there will ever be: who asks from there wants the newest cut alone


class RefusalBackoff:
    """When a gateway may be asked for its backlog again.

    Attributes:
        until_ns: monotonic; before that it may not.
    """

    __slots__ = ("_length_ns", "until_ns")

    def __init__(self) -> None:
        self._length_ns = 0
        self.until_ns = 0

    def refused(self, now_ns: int, spread: float) -> None:
        """Its cuts found no room. ``spread``: the gateway's own number, 0 <= spread < 1."""
        if now_ns >= self.until_ns:  # else it was refused together with one that began the pause
            self._length_ns = min(MOST_NS, 2 * self._length_ns or FIRST_NS)
            self.until_ns = now_ns + int(self._length_ns * (0.5 + spread))

    def accepted(self, now_ns: int) -> RefusalBackoff | None:
        """Something of it became durable; returns what is left of the pause, if anything."""
        self._length_ns = self._length_ns // 2 if self._length_ns > FIRST_NS else 0
        return self if self._length_ns or now_ns < self.until_ns else None

"""How much a gateway may say: a token bucket for each kind of thing that costs others something.

Statistics are asked for, so polls bound them. What an agent sends unasked ends as rows in SQL, files of the
authority or work of other processes; each kind has a burst, which an honest agent's worst minute does not
reach, and a steady rate. A gateway keeps its buckets as long as the pair process knows it, over its sessions
(``poller.allowances`` says when it is forgotten).

    what       burst     a second   counted
    refusals   50        1          GATEWAY refused of peers that are not known, all of them together
    newcomers  60        1          gateways not known yet for which another is forgotten
    alerts     50        1          ALERT; what exceeds it is dropped and counted
    answers    500       20         CAPS_ACK, THRESHOLDS_ACK, frames of an unknown kind
    sessions   120       1/5        first REGISTER of a session
    changes    60        1/5        REGISTER of changed exports
    renewals   5         1/60       RENEW
    epochs     512       1/10       agent starts named in HELLO and REGISTER that were not named before
    volumes    2,048     1          exports that were not named before
    streams    65,536    16         streams that were not named before

Pure; the caller gives the time. Thread: the inbound thread's.

Source: docs/operations/security.md, "What a gateway may do".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple


class Limit(NamedTuple):
    """Of one bucket. ``per_s``: how fast it fills again."""

    burst: int
    per_s: float


LIMITS: Final = {
    "refusals": Limit(50, 1.0),
    "newcomers": Limit(60, 1.0),
    "alerts": Limit(50, 1.0),
    "answers": Limit(500, 20.0),
    "sessions": Limit(120, 0.2),
    "changes": Limit(60, 0.2),
    "renewals": Limit(5, 1 / 60),
    "epochs": Limit(512, 0.1),
    "volumes": Limit(2048, 1.0),
    "streams": Limit(65_536, 16.0),
}
REMEMBERED: Final = 65_536  # names of each kind; then they are counted as new again, against the same bucket
EVENT_NS: Final = 600 * 10**9


class Quotas:
    """The buckets of one gateway.

    Attributes:
        refused: how often something was too much, by what.
    """

    __slots__ = ("_event_ns", "_known", "_left", "refused")

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, int]] = {}
        self._known: dict[str, set[Hashable]] = {}
        self._event_ns: dict[str, int] = {}
        self.refused: dict[str, int] = {}

    def take(self, what: str, now_ns: int, count: int = 1) -> bool:
        """Whether ``count`` more are allowed now; if so, they are accounted for."""
        limit = LIMITS[what]
        left, at_ns = self._left.get(what, (float(limit.burst), now_ns))
        left = min(float(limit.burst), left + (now_ns - at_ns) / 1e9 * limit.per_s)
        is_allowed = left >= count
        self._left[what] = (left - count if is_allowed else left), now_ns
        if not is_allowed:
            self.refused[what] = self.refused.get(what, 0) + 1
        return is_allowed

    def take_new(self, what: str, names: Iterable[Hashable], now_ns: int) -> bool:
        """``take`` for the names among these that were not named before."""
        known = self._known.setdefault(what, set())
        new = set(names) - known
        if new and not self.take(what, now_ns, len(new)):
            return False
        if len(known) + len(new) > REMEMBERED:
            known.clear()
        known |= new
        return True

    def should_tell(self, what: str, now_ns: int) -> bool:
        """Whether an event is due: at most one of a kind in ``EVENT_NS``."""
        if now_ns < self._event_ns.get(what, 0):
            return False
        self._event_ns[what] = now_ns + EVENT_NS
        return True

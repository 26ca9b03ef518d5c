"""How much a gateway may say: a token bucket for each kind of thing that costs others something.

Statistics are asked for, so polls bound them. What an agent sends unasked ends as rows in SQL, files of the
authority or work of other processes; each kind has a burst, which an honest agent's worst minute does not
reach, and a steady rate. A gateway keeps its buckets as long as the pair process knows it, over its
sessions (``Allowances`` says when it is forgotten).

    what       burst     a second   counted
    refusals   50        1          GATEWAY refused of peers that are not known, all of them together
    newcomers  60        1          gateways not known yet for which another is forgotten
    alerts     50        1          ALERT; what exceeds it is dropped and counted
    readings   256       2          SPACE; what exceeds it is dropped and counted
    answers    500       20         CAPS_ACK, THRESHOLDS_ACK, frames of an unknown kind
    sessions   120       1/5        first REGISTER of a session
    changes    60        1/5        REGISTER of changed exports
    renewals   5         1/60       RENEW
    epochs     512       1/10       agent starts named in HELLO and REGISTER that were not named before
    volumes    2,048     1          exports that were not named before
    streams    65,536    16         streams that were not named before

``Quotas`` is pure; the caller gives the time. ``Allowances`` has those of all gateways of a pair, and
reports when one exceeds its own. Thread: the inbound thread's.

Source: docs/operations/security.md, "What a gateway may do".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final, NamedTuple

import structlog

from pmdaemon.errors import PeerRefused
from pmdaemon.poller import announcements
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.publisher import DBMANAGER, CutPublisher
from pmdaemon.runtime.clock import Clock

REMEMBERED: Final = 65_536  # names of each kind; then they are counted as new again, against the same bucket
EVENT_NS: Final = 600 * 10**9
MAX_GATEWAYS: Final = 16_384  # four times a large fleet


class Limit(NamedTuple):
    """Of one bucket. ``per_s``: how fast it fills again."""

    burst: int
    per_s: float


LIMITS: Final = {
    "refusals": Limit(50, 1.0),
    "newcomers": Limit(60, 1.0),
    "alerts": Limit(50, 1.0),
    "readings": Limit(256, 2.0),
    "answers": Limit(500, 20.0),
    "sessions": Limit(120, 0.2),
    "changes": Limit(60, 0.2),
    "renewals": Limit(5, 1 / 60),
    "epochs": Limit(512, 0.1),
    "volumes": Limit(2048, 1.0),
    "streams": Limit(65_536, 16.0),
}


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

    def should_report(self, what: str, now_ns: int) -> bool:
        """Whether an event is due: at most one of a kind in ``EVENT_NS``."""
        if now_ns < self._event_ns.get(what, 0):
            return False
        self._event_ns[what] = now_ns + EVENT_NS
        return True


log = structlog.get_logger("reception")


class Allowances:
    """See the module.

    At most ``MAX_GATEWAYS``: for one more, the one that spoke least recently and has no session is
    forgotten, by the registry too; how often that happens has a limit as well.

    Args:
        counters: shared with the inbound thread's others.
    """

    def __init__(
        self, registry: Registry, publisher: CutPublisher, clock: Clock, counters: Counter[str]
    ) -> None:
        self._registry = registry
        self._publisher = publisher
        self._clock = clock
        self._counters = counters
        self._of: dict[str, Quotas] = {}  # the one that spoke least recently comes first
        self._claims = Quotas()

    def demand(self, gateway_id: str, name: str, what: str) -> None:
        """Account for one more.

        Raises:
            PeerRefused: ``over-limit``, or ``too-many-gateways``.
        """
        if not self._quotas(gateway_id).take(what, self._clock.monotonic_ns()):
            raise PeerRefused("over-limit", self._report_excess(gateway_id, name, what))

    def demand_new(self, gateway_id: str, name: str, what: str, names: Iterable[Hashable]) -> None:
        """Account for those names that were not named before; raises as ``demand``."""
        if not self._quotas(gateway_id).take_new(what, names, self._clock.monotonic_ns()):
            raise PeerRefused("over-limit", self._report_excess(gateway_id, name, what))

    def allow(self, gateway_id: str, name: str, what: str) -> bool:
        """``demand`` for what may be dropped: whether it is allowed."""
        if self._quotas(gateway_id).take(what, self._clock.monotonic_ns()):
            return True
        self._report_excess(gateway_id, name, what)
        return False

    def allow_claim(self, what: str) -> bool:
        """``allow`` for peers that are not known, all of them together; the excess is counted only."""
        if self._claims.take(what, self._clock.monotonic_ns()):
            return True
        self._counters["over_limit"] += 1
        return False

    def _quotas(self, gateway_id: str) -> Quotas:
        found = self._of.pop(gateway_id, None)
        if found is None:
            if len(self._of) >= MAX_GATEWAYS:
                self._forget_one()
            found = Quotas()
        self._of[gateway_id] = found
        return found

    def _forget_one(self) -> None:
        away = (name for name in self._of if not self._registry.has_session(name))
        if not self.allow_claim("newcomers") or (oldest := next(away, None)) is None:
            raise PeerRefused(
                "too-many-gateways",
                f"the server knows {MAX_GATEWAYS} gateways already. It forgets those that are away, "
                f"{LIMITS['newcomers'].per_s:g} a second at most: dial again",
            )
        del self._of[oldest]
        self._registry.forget(oldest)

    def _report_excess(self, gateway_id: str, name: str, what: str) -> str:
        """Count what is too much, and raise an event if none was raised lately; returns its text."""
        quotas, limit = self._quotas(gateway_id), LIMITS[what]
        self._counters["over_limit"] += 1
        text = (
            f"gateway {name} sends more {what} than are allowed ({limit.burst} at once, then "
            f"{limit.per_s * 60:g} a minute); the excess is refused"
        )
        if quotas.should_report(what, self._clock.monotonic_ns()):
            log.warning("gateway-over-limit", gateway=name, what=what)
            details = {"gateway_id": gateway_id, "what": what, "refused": quotas.refused.get(what, 0)}
            now_us = self._clock.unix_us()
            row = announcements.event("gateway-over-limit", "warning", name, text, now_us, **details)
            self._publisher.news(row, DBMANAGER)
        return text

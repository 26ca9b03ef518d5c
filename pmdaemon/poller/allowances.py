"""The quotas of all gateways of a pair, and what is said when one exceeds its own.

Thread: belongs to the inbound thread.

Source: docs/operations/security.md, "What a gateway may do".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Final

import structlog

from pmdaemon.errors import PeerRefused
from pmdaemon.poller import announcements
from pmdaemon.poller.publisher import DBMANAGER, CutPublisher
from pmdaemon.poller.quotas import LIMITS, Quotas
from pmdaemon.poller.registry import Registry
from pmdaemon.runtime.clock import Clock

MAX_GATEWAYS: Final = 16_384  # four times a large fleet
log = structlog.get_logger("reception")


class Allowances:
    """See the module.

    At most ``MAX_GATEWAYS``: for one more, the one that was heard least recently and has no session is
    forgotten, by the registry too; how often that happens has a limit as well.

    Args:
        counters: shared with the inbound thread's others.
    """

    def __init__(
        self, registry: Registry, courier: CutPublisher, clock: Clock, counters: Counter[str]
    ) -> None:
        self._registry = registry
        self._courier = courier
        self._clock = clock
        self._counters = counters
        self._of: dict[str, Quotas] = {}  # the least recently heard first
        self._claims = Quotas()

    def demand(self, gateway_id: str, name: str, what: str) -> None:
        """Account for one more.

        Raises:
            PeerRefused: ``over-limit``, or ``too-many-gateways``.
        """
        if not self._quotas(gateway_id).take(what, self._clock.monotonic_ns()):
            raise PeerRefused("over-limit", self._note(gateway_id, name, what))

    def demand_new(self, gateway_id: str, name: str, what: str, names: Iterable[Hashable]) -> None:
        """Account for those names that were not named before; raises as ``demand``."""
        if not self._quotas(gateway_id).take_new(what, names, self._clock.monotonic_ns()):
            raise PeerRefused("over-limit", self._note(gateway_id, name, what))

    def allow(self, gateway_id: str, name: str, what: str) -> bool:
        """``demand`` for what may be dropped: whether it is allowed."""
        if self._quotas(gateway_id).take(what, self._clock.monotonic_ns()):
            return True
        self._note(gateway_id, name, what)
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

    def _note(self, gateway_id: str, name: str, what: str) -> str:
        """Count what is too much, and raise an event if none was raised lately; returns its text."""
        quotas, limit = self._quotas(gateway_id), LIMITS[what]
        self._counters["over_limit"] += 1
        text = (
            f"gateway {name} sends more {what} than are allowed ({limit.burst} at once, then "
            f"{limit.per_s * 60:g} a minute); the excess is refused"
        )
        if quotas.should_tell(what, self._clock.monotonic_ns()):
            log.warning("gateway-over-limit", gateway=name, what=what)
            details = {"gateway_id": gateway_id, "what": what, "refused": quotas.refused.get(what, 0)}
            now_us = self._clock.unix_us()
            row = announcements.event("gateway-over-limit", "warning", name, text, now_us, **details)
            self._courier.news(row, DBMANAGER)
        return text

"""What an I/O costs each backend, as policy jobs fitted it, for the gateways that charge it.

A policy's report has a fit for each backend whose data tell one (``policy_jobs.cost_model``). Of each backend
the newest fit up to the version in force holds: a night without data does not bring the constants back.
Gateways without the feature ``fitted-costs`` are sent nothing, nor is one of whose backends none was fitted.
One that is announced is sent its costs in any case: its pair keeps none.

State: the version in force with its fits, the backends of each gateway, and which are due. Belongs to the
main loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from pmdaemon.wire.messages.costs import COST_WRITE_RANGE, FITTED_COSTS, MAX_BACKENDS, Costs
from sla_server.services.rows import Row

Fit = tuple[float | None, float]
"""``cost_write``, or None where no writes were seen, and ``cost_bytes``."""


def fits_of(policies: Iterable[Row], version: int) -> dict[str, Fit]:
    """The newest fit of each backend, up to a version.

    Args:
        policies: rows of SQL, newest first, ``report`` decoded.
        version: in force.
    """
    found: dict[str, Fit] = {}
    for policy in policies:
        if policy["version"] > version:
            continue
        for row in (policy.get("report") or {}).get("cost_model") or ():
            if row["cost_bytes"] is not None:
                found.setdefault(row["backend"], (_within(row["cost_write"]), float(row["cost_bytes"])))
    return found


def _within(cost_write: float | None) -> float | None:
    low, high = COST_WRITE_RANGE
    return None if cost_write is None else min(max(float(cost_write), low), high)


class FittedCosts:
    """See the module."""

    def __init__(self) -> None:
        self._version = 0
        self._fits: Mapping[str, Fit] = {}
        self._backends: dict[str, frozenset[str]] = {}  # of gateways that take costs
        self._due: dict[str, None] = {}  # a set that keeps its order

    def announced(self, gateway_id: str, features: Collection[str], exports: Iterable[Row]) -> None:
        """A gateway registered, or its pair says again that it is there."""
        if FITTED_COSTS in features:
            self._backends[gateway_id] = frozenset(export["backend"] for export in exports)
            self._due[gateway_id] = None
        else:
            self.lost(gateway_id)

    def lost(self, gateway_id: str) -> None:
        """A gateway is gone."""
        self._backends.pop(gateway_id, None)
        self._due.pop(gateway_id, None)

    def learned(self, version: int, fits: Mapping[str, Fit]) -> None:
        """A policy is in force."""
        if version < self._version or fits == self._fits:
            return
        changed = {name for name in fits.keys() | self._fits.keys() if fits.get(name) != self._fits.get(name)}
        self._version, self._fits = version, fits
        for gateway_id, backends in self._backends.items():
            if not backends.isdisjoint(changed):
                self._due[gateway_id] = None

    def take(self) -> Iterator[tuple[str, Costs]]:
        """Gateways to send to now, and what."""
        due, self._due = self._due, {}
        for gateway_id in due:
            known = sorted(self._backends[gateway_id] & self._fits.keys())[:MAX_BACKENDS]
            if known:
                yield gateway_id, Costs(self._version, tuple(self._entry(backend) for backend in known))

    def _entry(self, backend: str) -> Row:
        cost_write, cost_bytes = self._fits[backend]
        return {"backend": backend, "cost_write": cost_write, "cost_bytes": cost_bytes}

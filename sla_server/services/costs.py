"""What an I/O costs each backend, as policy jobs fitted it, for the gateways that charge it.

A policy's report has a fit for each backend whose data tell one (``policy_jobs.cost_model``). Of each backend
the newest fit up to the version in force holds, however old it is: nights without data do not bring the
constants back. Gateways without the feature ``fitted-costs`` are sent nothing. One that is announced is sent
its costs in any case, as its pair keeps none: an empty list, too, because it may have kept some of a backend
that has none any more. Before a policy is in force there is nothing to send.

State: of ``NewestFits`` what was read of SQL (it belongs to the thread that reads); of ``FittedCosts``, which
belongs to the main loop, the version in force with its fits, the backends of each gateway, and which are due.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard

from pmdaemon.wire.messages.costs import (
    COST_BYTES_RANGE,
    COST_WRITE_RANGE,
    FITTED_COSTS,
    MAX_BACKENDS,
    Costs,
)
from sla_server.rows import Row

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
        for backend, fit in _fits(policy.get("report")):
            found.setdefault(backend, fit)
    return found


def _fits(report: object) -> Iterator[tuple[str, Fit]]:
    """The fits of a report; what is none, of another release or by another hand, is left out."""
    rows = report.get("cost_model") if isinstance(report, Mapping) else None
    for row in rows if isinstance(rows, list) else ():
        if not isinstance(row, Mapping) or not isinstance(backend := row.get("backend"), str):
            continue
        size, write = row.get("cost_bytes"), row.get("cost_write")
        if _is_number(size) and (write is None or _is_number(write)):
            limited = None if write is None else _within(write, COST_WRITE_RANGE)
            yield backend, (limited, _within(size, COST_BYTES_RANGE))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _within(value: float, limits: tuple[float, float]) -> float:
    return float(min(max(value, limits[0]), limits[1]))


class NewestFits:
    """The newest fit of each backend. A policy that was published never changes, so each is read once."""

    def __init__(self) -> None:
        self._version = 0  # up to which all were read
        self._fits: dict[str, Fit] = {}

    def up_to(self, version: int, read: Callable[[int | None], Sequence[Row]]) -> dict[str, Fit]:
        """Fits of the policies up to a version.

        Args:
            version: in force.
            read: the newest rows of SQL (None) or those before a version, newest first; none after the
                oldest. Reports of a large fleet take seconds, so nothing is read for a version that is known.
        """
        if version == self._version:
            return dict(self._fits)
        if version < self._version:  # it was rolled back, another is pinned, or the database was restored
            self._version, self._fits = 0, {}
        found, page = dict[str, Fit](), read(None)
        while page:
            found = fits_of(page, version) | found
            oldest = page[-1]["version"]
            if oldest <= self._version + 1:
                break
            page = read(oldest)
        self._version, self._fits = version, self._fits | found
        return dict(self._fits)


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
        if not self._version:  # of those announced before it was known whether there is a policy
            self._due |= dict.fromkeys(self._backends)
        changed = {name for name in fits.keys() | self._fits.keys() if fits.get(name) != self._fits.get(name)}
        self._version, self._fits = version or self._version, fits  # 0: none is in force any more
        for gateway_id, backends in self._backends.items():
            if not backends.isdisjoint(changed):
                self._due[gateway_id] = None

    def take(self) -> Iterator[tuple[str, Costs]]:
        """Gateways to send to now, and what."""
        due, self._due = self._due, {}
        for gateway_id in due:
            known = sorted(self._backends[gateway_id] & self._fits.keys())[:MAX_BACKENDS]
            if self._version:
                yield gateway_id, Costs(self._version, tuple(self._entry(backend) for backend in known))

    def _entry(self, backend: str) -> Row:
        cost_write, cost_bytes = self._fits[backend]
        return {"backend": backend, "cost_write": cost_write, "cost_bytes": cost_bytes}

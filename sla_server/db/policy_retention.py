"""The age of policies: versions that nobody needs any more leave, their caps in small steps.

What stays, however old it is: the version in force or pinned, the newest that may come into force, the newest
``KEPT`` of all and of those that may be in force again after rollbacks, and a version with the newest fit of
what an I/O costs a backend (``services.costs``: nights without data do not bring the constants back), counted
from the version in force and from the newest.

A version leaves in two steps, so that none is ever in force with a part of its caps: first its row, with
which its report goes (back-test, attribution), then its caps, ``STEP_ROWS`` at a time; what has no version
any more is found in the key of the caps. The number of a version is not used again, as the newest stays.

Thread: the caller's (``partitions.Retention``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import structlog
from sqlalchemy import Connection, Engine, delete, func, select, text

from sla_server.db.engine import begin
from sla_server.db.schema import POLICY_IN_FORCE, POLICY_USABLE, policies, policy_caps

log = structlog.get_logger("policies")
KEPT: Final = 10
STEP_ROWS: Final = 5_000  # some 50 ms of SQLite
STEP_VERSIONS: Final = 4  # of each reports may have to be read, some MB each in a large fleet


class PolicyRetention:
    """See the module.

    Args:
        engine: a writing engine.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fitted: dict[int, frozenset[str]] = {}  # backends with a fit, of versions whose report was read

    def step(self, limit_us: int) -> bool:
        """Delete a few versions from before ``limit_us``, or some caps; returns whether there is more.

        Raises:
            DatabaseUnavailable: come again.
        """
        with begin(self._engine) as connection:
            states = self._states(connection)
            old = select(policies.c.version).where(policies.c.created_us.between(1, limit_us - 1))
            found = set(connection.execute(old).scalars())
            kept, in_force = _kept(states)
            gone: list[int] = []
            has_more = False
            for version in sorted(found - kept):
                if has_more := len(gone) == STEP_VERSIONS:
                    break
                if not self._has_newest_fit(connection, version, states, in_force):
                    gone.append(version)
            if gone:  # what is pinned meanwhile is not yet in SQL: states are changed by the caller's thread
                connection.execute(delete(policies).where(policies.c.version.in_(gone)))
                log.info("policies-deleted", versions=gone)
        return self._delete_caps() or has_more

    def _states(self, connection: Connection) -> dict[int, str]:
        rows = connection.execute(select(policies.c.version, policies.c.state))
        states = {row.version: row.state for row in rows}
        self._fitted = {version: fitted for version, fitted in self._fitted.items() if version in states}
        return states

    def _has_newest_fit(
        self, connection: Connection, version: int, states: Mapping[int, str], in_force: int
    ) -> bool:
        """Whether no newer version, up to the one in force if that is newer, has all fits of this one."""
        needed = set(self._fits(connection, version))
        newest = in_force if version <= in_force else max(states)
        for newer in sorted((each for each in states if version < each <= newest), reverse=True):
            if not needed:
                break
            needed -= self._fits(connection, newer)
        return bool(needed)

    def _fits(self, connection: Connection, version: int) -> frozenset[str]:
        if version not in self._fitted:
            report = select(policies.c.report).where(policies.c.version == version)
            self._fitted[version] = _fitted(connection.execute(report).scalar() or "")
        return self._fitted[version]

    def _delete_caps(self) -> bool:
        """Delete caps without a version; returns whether there may be more."""
        with begin(self._engine) as connection:
            # In this order: a version that is published meanwhile comes with its caps.
            of_caps = _versions_of_caps(connection)
            orphans = sorted(of_caps - set(connection.execute(select(policies.c.version)).scalars()))
            if not orphans:
                return False
            row = "ctid" if connection.dialect.name == "postgresql" else "rowid"
            table = policy_caps.name
            some = f"SELECT {row} FROM {table} WHERE version = :version LIMIT {STEP_ROWS}"  # noqa: S608
            some = f"= ANY (ARRAY ({some}))" if row == "ctid" else f"IN ({some})"
            statement = text(f"DELETE FROM {table} WHERE {row} {some}")  # noqa: S608
            deleted = connection.execute(statement, {"version": orphans[0]}).rowcount
        log.info("rows-deleted", table=table, version=orphans[0], rows=deleted)
        return deleted >= STEP_ROWS or len(orphans) > 1


def _kept(states: Mapping[int, str]) -> tuple[set[int], int]:
    """Versions that stay however old they are, and the one in force; 0: none."""
    newest_first = sorted(states, reverse=True)
    usable = [version for version in newest_first if states[version] in POLICY_USABLE]
    in_force = [version for version in newest_first if states[version] in POLICY_IN_FORCE]
    return {*newest_first[:KEPT], *usable[:KEPT], *in_force}, next(iter([*in_force, *usable]), 0)


def _versions_of_caps(connection: Connection) -> set[int]:
    """Each look goes to the next version in the key: millions of rows are never counted."""
    found: set[int] = set()
    version = 0
    while True:
        behind = select(func.min(policy_caps.c.version)).where(policy_caps.c.version > version)
        following = connection.execute(behind).scalar()
        if following is None:
            return found
        version = following
        found.add(version)


def _fitted(report: str) -> frozenset[str]:
    """Backends of which a report has a fit of the costs; one that cannot be read has none."""
    try:
        rows: Any = json.loads(report)["cost_model"]
    except (ValueError, LookupError, TypeError):
        return frozenset()
    listed = rows if isinstance(rows, list) else ()
    return frozenset(
        str(row["backend"])
        for row in listed
        if isinstance(row, dict) and "backend" in row and row.get("cost_bytes") is not None
    )

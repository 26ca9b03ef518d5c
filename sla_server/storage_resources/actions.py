"""Actions by policy: which commands are due for which pools, and which pools take no new agreements.

Notices are events, which routes bring to people; commands and refusals are here. A command that is due for a
pool is run at most every ``every_s``, and ``most_a_day`` times in 24 hours for all pools together; beyond
that it is said once that it was not. With ``dry_run`` it is said once for each time a pool comes to the
level. For a pool it is not ordered again before it has ended, however long it waits for others and takes.
Everything is a row of ``pool_actions`` and an event; what was begun before a restart counts
(``stored``): a run has its row from its begin on, so that one that takes the server with it is not run again
and again. Agreements that are refused again and again while a pool is at one level have one row. A pool that
is not read any more causes nothing.

    state     dry-run, limited, started ──► done or failed; one that stays started never came to its end
              refused: an agreement was

Pure. Owner: the main loop of ``services``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Final

from sla_server.rows import Row, Rows
from sla_server.services.rows import event_row, identity
from sla_server.storage_resources.config import StorageCommand, StorageConfig
from sla_server.storage_resources.pools import DAY_US, PoolState, is_stale
from sla_server.storage_resources.watermarks import LEVELS

RUN: Final = ("done", "failed", "started")
REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True)
class CommandOrder:
    """A command to be run for a pool; ``variables`` of its environment, ``action_id`` of its row."""

    command: StorageCommand
    owner: str
    pool: str
    pool_name: str
    variables: dict[str, str]
    action_id: str = ""


@dataclass(frozen=True, slots=True)
class CommandDone:
    """It has ended; ``problem`` is "" if it did what it should."""

    order: CommandOrder
    problem: str
    said: str


class StorageActions:
    """State: per command and pool the newest row, and the times of runs within a day; orders under way."""

    def __init__(self, config: StorageConfig, stored: Sequence[Row] = ()) -> None:
        self._config = config
        self._newest: dict[tuple[str, str, str], Row] = {}
        self._runs: dict[str, list[int]] = {}
        self._under_way: set[str] = set()  # action_id; none of a process before, whose commands have ended
        for row in stored:
            if row["state"] != REFUSED:  # no command's, whatever that is called
                self._record(row)

    def due(self, states: Iterable[PoolState], now_us: int) -> tuple[Rows, list[CommandOrder]]:
        """What is to be recorded, and run, now."""
        rows: Rows = []
        orders: list[CommandOrder] = []
        for state in states if self._config.command else ():
            if is_stale(state, now_us):
                continue
            for command in self._config.command:
                if is_at(state.row["level"], command.at) and fnmatchcase(state.name, command.pools):
                    rows += self._check(command, state, now_us, orders)
        return rows, orders

    def _check(
        self, command: StorageCommand, state: PoolState, now_us: int, orders: list[CommandOrder]
    ) -> Rows:
        owner, pool = state.row["owner"], state.row["pool"]
        newest = self._newest.get((command.name, owner, pool))
        why = f"because pool {state.name} is {state.row['level']} ({_share(state):.1%} used)"
        order = CommandOrder(command, owner, pool, state.name, _variables(state))
        is_known = newest is not None and newest["at_us"] >= state.row["level_us"]
        if command.dry_run:
            if is_known:
                return []
            text = f"{_shown(command)} would be run {why}; dry_run is on"
            return self._rows(order, "dry-run", text, now_us)
        if newest is not None and newest["action_id"] in self._under_way:
            return []
        if newest is not None and 0 <= now_us - newest["at_us"] < command.every_s * 1e6:
            return []
        runs = self._runs[command.name] = [
            at_us for at_us in self._runs.get(command.name, ()) if 0 <= now_us - at_us < DAY_US
        ]
        if len(runs) >= command.most_a_day:
            if newest is not None and newest["state"] == "limited" and is_known:
                return []
            text = (
                f"{_shown(command)} is not run although it should be, {why}: it ran {len(runs)} times in 24 h"
            )
            return self._rows(order, "limited", text, now_us)
        order = replace(order, action_id=identity("pool-action", command.name, owner, pool, "run", now_us))
        orders.append(order)
        self._under_way.add(order.action_id)
        text = f"{_shown(command)} was started {why}; nothing is known of its end"
        row = _row(order, order.action_id, "started", text, now_us)
        self._record(row)
        return [("pool_actions", row)]

    def done(self, done: CommandDone, now_us: int) -> Rows:
        """What is to be recorded of a command that has ended."""
        order = done.order
        self._under_way.discard(order.action_id)
        level = order.variables["SLA_LEVEL"]
        words = f"{_shown(order.command)} was run for pool {order.pool_name}, which was {level}"
        text = (
            f"{words}, and failed: {done.problem}" if done.problem else f"{words}. {done.said}".rstrip(". ")
        )
        return self._rows(order, "failed" if done.problem else "done", text, now_us)

    def _rows(self, order: CommandOrder, state: str, text: str, now_us: int) -> Rows:
        name = order.command.name
        action_id = order.action_id or identity("pool-action", name, order.owner, order.pool, state, now_us)
        row = _row(order, action_id, state, text, now_us)
        if state in ("dry-run", "limited"):
            self._record(row)
        severity = "warning" if state in ("failed", "limited") else "info"
        details = {"action": name, "state": state, "owner": order.owner, "pool": order.pool}
        event = event_row("space-action", severity, "pool", order.pool_name, text, now_us, details, action_id)
        return [("pool_actions", row), event]

    def _record(self, row: Row) -> None:
        key = (row["action"], row["owner"], row["pool"])
        known = self._newest.get(key)
        if known is None or row["at_us"] >= known["at_us"]:
            self._newest[key] = row
        if row["state"] in RUN:
            self._runs.setdefault(row["action"], []).append(row["at_us"])

    def full_pools(self, states: Iterable[PoolState], now_us: int) -> list[PoolState]:
        """Pools that take no new agreements."""
        return [
            state
            for state in states
            if not is_stale(state, now_us)
            and (least := self._config.refusal_of(state.name)) != "never"
            and is_at(state.row["level"], least)
        ]


def refused(state: PoolState, what: str, why: str, now_us: int) -> Rows:
    """What is to be recorded of agreements that a pool is too full for."""
    owner, pool = state.row["owner"], state.row["pool"]
    action_id = identity("pool-action", REFUSED, owner, pool, what, state.row["level_us"])
    action, text = "refuse-agreements", f"{what} refused: {why}"
    row = {"action_id": action_id, "at_us": now_us, "owner": owner, "pool": pool, "action": action}
    details = {"action": action, "state": REFUSED, "owner": owner, "pool": pool}
    event = event_row("space-action", "info", "pool", state.name, text, now_us, details, action_id)
    return [("pool_actions", {**row, "state": REFUSED, "text": text}), event]


def is_at(level: str, least: str) -> bool:
    """Whether a level is this one or a higher one."""
    return level in LEVELS and LEVELS.index(level) >= LEVELS.index(least)


def _row(order: CommandOrder, action_id: str, state: str, text: str, now_us: int) -> Row:
    return {
        "action_id": action_id,
        "at_us": now_us,
        "owner": order.owner,
        "pool": order.pool,
        "action": order.command.name,
        "state": state,
        "text": text,
    }


def _share(state: PoolState) -> float:
    size = state.row["size_bytes"]
    used: float = state.row["used_bytes"] / size if size else 1.0
    return used


def _variables(state: PoolState) -> dict[str, str]:
    return {
        "SLA_POOL": state.name,
        "SLA_LEVEL": state.row["level"],
        "SLA_USED_BYTES": str(state.row["used_bytes"]),
        "SLA_SIZE_BYTES": str(state.row["size_bytes"]),
    }


def _shown(command: StorageCommand) -> str:
    return f"{command.name} ({' '.join(command.argv)[:120]})"

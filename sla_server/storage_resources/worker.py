"""The thread ``sv-space``: forecasts from SQL, and commands of the operator; the main loop waits for neither.

Every ``FORECAST_S`` it reads the days of all pools and puts a ``PoolForecast`` of each into ``found``; a
command that was ordered is run at once, also between two forecasts (those of a fleet take minutes), and its
``CommandDone`` comes the same way. A command that cannot be killed is not run again, the others are. While
the database is away the former forecasts stay, and the next turn tries again; the thread ``sv-sql`` says that
it is away.

Shared with the main loop: the two queues. All else belongs to the thread.
"""

from __future__ import annotations

import queue
from itertools import groupby
from operator import itemgetter
from typing import Final

import numpy as np
import structlog

from pmdaemon.errors import SlaError
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.commands import CommandFailed, CommandRunner
from pmdaemon.runtime.excerpt import printable
from pmdaemon.runtime.stop import Stop
from sla_server.rows import Row
from sla_server.services.store import SqlReads
from sla_server.storage_resources.actions import CommandDone, CommandOrder
from sla_server.storage_resources.forecast import DAY_US, MOST_DAYS, forecast, growth_spike
from sla_server.storage_resources.pools import PoolForecast, PoolKey

log = structlog.get_logger("space")
FORECAST_S: Final = 3600.0
AGAIN_S: Final = 60.0  # the first forecasts, and after a failure of the database
TURN_S: Final = 0.5
SAID_CHARACTERS: Final = 200
STALE_DAYS: Final = 4  # a history that ended before says nothing of what comes
STEP_LIMIT_S: Final = 900.0
"""Of one turn: a command takes 600 s at most, a question to SQL has no limit of its own."""


class StorageWorker:
    """See the module."""

    def __init__(self, store: SqlReads, clock: Clock, stop: Stop) -> None:
        self.found: queue.SimpleQueue[PoolForecast | CommandDone] = queue.SimpleQueue()
        self._orders: queue.SimpleQueue[CommandOrder] = queue.SimpleQueue()
        self._store = store
        self._clock = clock
        self._stop = stop
        self._runners: dict[str, CommandRunner] = {}  # by name of the command
        self._due_ns = clock.monotonic_ns() + round(AGAIN_S * 1e9)

    def order(self, order: CommandOrder) -> None:
        """Have a command run. Thread: any."""
        self._orders.put(order)

    def run(self) -> None:
        """The thread."""
        while not self._stop.is_set():
            watchdog.beat(STEP_LIMIT_S)
            if not self._run_next(TURN_S) and self._clock.monotonic_ns() >= self._due_ns:
                self.forecast_all()

    def _run_next(self, timeout_s: float = 0.0) -> bool:
        """Run the command that was ordered first; whether there was one in that time."""
        try:
            order = self._orders.get(timeout_s > 0, timeout_s or None)
        except queue.Empty:
            return False
        self.found.put(self._run(order))
        return True

    def _run(self, order: CommandOrder) -> CommandDone:
        command = order.command
        runner = self._runners.setdefault(command.name, CommandRunner(self._stop.is_set))
        try:
            said = runner.run(command.argv, command.limit_s, order.variables, is_end_enough=True)
        except CommandFailed as exc:
            return CommandDone(order, str(exc), "")
        lines = said.strip().splitlines()
        return CommandDone(order, "", f"It said: {printable(lines[-1], SAID_CHARACTERS)}" if lines else "")

    def forecast_all(self) -> None:
        """Forecasts of all pools, from the days that have ended."""
        now_us = self._clock.unix_us()
        try:
            rows = self._store.pool_days(now_us - (MOST_DAYS + 1) * DAY_US)
        except SlaError as exc:
            if not exc.retryable:
                raise
            self._due_ns = self._clock.monotonic_ns() + round(AGAIN_S * 1e9)
            return
        for key, days in groupby(rows, itemgetter("owner", "pool")):
            if self._stop.is_set():
                return
            watchdog.beat(STEP_LIMIT_S)
            while not self._stop.is_set() and self._run_next():
                watchdog.beat(STEP_LIMIT_S)
            ended = [row for row in days if row["day_us"] + DAY_US <= now_us]
            if ended and ended[-1]["day_us"] >= now_us - STALE_DAYS * DAY_US:
                self.found.put(forecast_of(PoolKey(*key), ended, now_us))
        self._due_ns = self._clock.monotonic_ns() + round(FORECAST_S * 1e9)


def forecast_of(key: PoolKey, days: list[Row], now_us: int) -> PoolForecast:
    """What the days of one pool say; pure."""
    newest = days[-1]
    used = np.array([row["used_bytes"] for row in days], dtype=np.float64)
    day_us = np.array([row["day_us"] for row in days], dtype=np.int64)
    size = newest["size_bytes"]
    spike = growth_spike(day_us, used, size)
    return PoolForecast(key, forecast(day_us, used, size, now_us), spike, newest["day_us"])

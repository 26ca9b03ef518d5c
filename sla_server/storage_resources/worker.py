"""The thread ``sv-space``: forecasts from SQL, and commands of the operator; the main loop waits for neither.

Every ``FORECAST_S`` it lists the pools; of ``MOST_A_TURN`` of them a turn it reads the days and puts a
``PoolForecast`` into ``found``. Those of a fleet take minutes of processor time, and this process judges and
controls: with ``TURN_S`` between two turns they take a part of it. What the space job has found since the
last pass, from the same days, is taken instead (``forecast_of`` made both). A command that was ordered is run
before the next turn, and its ``CommandDone`` comes the same way. A command that cannot be killed is not run
again, the others are. While the database is away the former forecasts stay, and it is tried again after
``AGAIN_S``; the thread ``sv-sql`` says that it is away.

Shared with the main loop: the two queues. All else belongs to the thread.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Iterable, Mapping
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
from sla_server.storage_resources.forecast import DAY_US, MOST_DAYS, Forecast, forecast, growth_spike
from sla_server.storage_resources.pools import PoolForecast, PoolKey

log = structlog.get_logger("space")
FORECAST_S: Final = 3600.0
AGAIN_S: Final = 60.0  # the first forecasts, and after a failure of the database
TURN_S: Final = 0.5
MOST_A_TURN: Final = 2  # some 50 ms each; four a second are 4,000 pools in 17 minutes
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
        self._left: deque[PoolKey] = deque()  # of the pass under way
        self._of_job: Mapping[PoolKey, PoolForecast] = {}  # the same
        self._due_ns = clock.monotonic_ns() + round(AGAIN_S * 1e9)  # the next pass
        self._not_before_ns = 0

    def order(self, order: CommandOrder) -> None:
        """Have a command run. Thread: any."""
        self._orders.put(order)

    def run(self) -> None:
        """The thread."""
        while not self._stop.is_set():
            watchdog.beat(STEP_LIMIT_S)
            self.turn(TURN_S)

    def turn(self, timeout_s: float = 0.0) -> None:
        """Run a command if one comes in that time, else make some forecasts."""
        if not self._run_next(timeout_s):
            self._forecast_some()

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

    def _forecast_some(self) -> None:
        """Forecasts of the next pools, from the days that have ended, if it is time for them."""
        now_ns, now_us = self._clock.monotonic_ns(), self._clock.unix_us()
        if now_ns < (self._not_before_ns if self._left else max(self._due_ns, self._not_before_ns)):
            return
        try:
            if not self._left:
                self._of_job = forecasts_of_job(self._store.space_results(), now_us)
                self._left.extend(PoolKey(*key) for key in self._store.pool_keys())
                self._due_ns = now_ns + round(FORECAST_S * 1e9)
            for _ in range(min(MOST_A_TURN, len(self._left))):
                if (found := self._of_job.get(self._left[0])) is not None:
                    self._left.popleft()
                    self.found.put(found)
                    continue
                days = self._store.pool_days(now_us - (MOST_DAYS + 1) * DAY_US, *self._left[0])
                self._forecast(self._left.popleft(), days, now_us)
        except SlaError as exc:
            if not exc.retryable:
                raise
            self._not_before_ns = now_ns + round(AGAIN_S * 1e9)

    def _forecast(self, key: PoolKey, days: list[Row], now_us: int) -> None:
        if usable := usable_days(days, now_us):
            self.found.put(forecast_of(key, usable, now_us))


def usable_days(days: Iterable[Row], now_us: int) -> list[Row]:
    """Of the days of one pool those that have ended; none if the newest one says nothing of what comes."""
    ended = [row for row in days if row["day_us"] + DAY_US <= now_us]
    return ended if ended and ended[-1]["day_us"] >= now_us - STALE_DAYS * DAY_US else []


def forecasts_of_job(stored: tuple[int, list[Row]] | None, now_us: int) -> dict[PoolKey, PoolForecast]:
    """What the space job has found that this thread would find now; nothing if it is older than a pass.

    Args:
        stored: when it was made, us, and a row a pool (``as_stored``).
        now_us: wall clock; a day that has ended since has more to say.
    """
    if stored is None or not 0 <= now_us - stored[0] <= FORECAST_S * 1e6:
        return {}
    if stored[0] // DAY_US != now_us // DAY_US:
        return {}
    found = {}
    for row in stored[1]:
        try:
            each = PoolForecast(
                PoolKey(row["owner"], row["pool"]),
                Forecast.from_row(row),
                row["spike_bytes"],
                row["newest_us"],
            )
        except KeyError:
            return {}  # another release
        found[each.key] = each
    return found


def as_stored(found: PoolForecast, at_us: int) -> Row:
    """As the space job stores it for ``forecasts_of_job``."""
    spike = {"spike_bytes": found.spike_bytes, "newest_us": found.newest_us}
    return {**found.key._asdict(), **spike, **found.forecast.as_row(at_us)}


def forecast_of(key: PoolKey, days: list[Row], now_us: int) -> PoolForecast:
    """What the days of one pool say; pure."""
    newest = days[-1]
    used = np.array([row["used_bytes"] for row in days], dtype=np.float64)
    day_us = np.array([row["day_us"] for row in days], dtype=np.int64)
    size = newest["size_bytes"]
    spike = growth_spike(day_us, used, size)
    return PoolForecast(key, forecast(day_us, used, size, now_us), spike, newest["day_us"])

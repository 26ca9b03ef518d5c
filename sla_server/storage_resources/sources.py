"""Sources of space that the server reads itself: ``[[space.source]]`` as on agents, ``[[storage.array]]``.

Owner: ``services``; the thread is ``space`` (``pmdaemon.space.watcher``).
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence

from pmdaemon.runtime.clock import Clock
from pmdaemon.space.config import SpaceConfig
from pmdaemon.space.watcher import COMMANDS_A_SOURCE, SpaceOutcome, SpaceWatcher, WatchedSource, local_sources
from sla_server.storage_resources.actions import CommandDone
from sla_server.storage_resources.config import RestSource
from sla_server.storage_resources.pools import PoolForecast
from sla_server.storage_resources.worker import StorageWorker


def server_watcher(
    config: SpaceConfig,
    arrays: Sequence[RestSource],
    clock: Clock,
    on_failure: Callable[[str, BaseException], None],
) -> SpaceWatcher:
    """The thread that reads the server's own sources; not started yet."""
    asked: list[WatchedSource] = []
    if arrays:
        from sla_server.storage_resources.rest import (
            rest_reader,  # the HTTP client, which others need not have
        )

        asked = [WatchedSource(array.name, rest_reader(array, config.timeout_s)) for array in arrays]
    return SpaceWatcher(
        lambda stopping: [*local_sources(config, {}, stopping), *asked],
        config.interval_s,
        COMMANDS_A_SOURCE * config.timeout_s,
        clock,
        on_failure,
    )


def found_of(
    worker: StorageWorker, watcher: SpaceWatcher
) -> Iterator[PoolForecast | CommandDone | SpaceOutcome]:
    """What both threads have found since the last call."""
    yield from watcher.inbox.drain()
    while True:
        try:
            yield worker.found.get_nowait()
        except queue.Empty:
            return

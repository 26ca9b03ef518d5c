"""The process ``standby``: runs on a server while another one acts (``supervisor``).

    main thread   forwards agents to the acting server (``forwarder``)
    sb-sql        makes the ingest queue, if this server has never acted; then writes the documents about
                  delivery that are in force to ``routing.json``, as the acting server's services do there:
                  this server's events go by them

It holds nothing that has to be stored: when this server begins to act it is ended first, and services write
the file from then on. While the database is away the documents stay as they were.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import structlog

from pmdaemon.errors import ConfigError, SlaError
from pmdaemon.reserve import initialized
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.clock import server_clock
from pmdaemon.runtime.open_files import raise_open_files
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.db.process import make_queue
from sla_server.db.queries.reader import open_reader
from sla_server.events.routing import RoutingFile, RoutingTable, stored_table
from sla_server.lease_file import LeaseFile
from sla_server.rows import Row
from sla_server.standby.forwarder import LOOK_S, SPARE_FILES, LinkForwarder

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

log = structlog.get_logger("standby")
REFRESH_S: Final = 5.0
AGAIN_S: Final = 1.0
SQL_LIMIT_S: Final = 600.0  # a statement of a database that is nearly away


class DocumentSource(Protocol):
    """What is asked of SQL."""

    def document_state(self) -> Sequence[Row]:
        """What changes with each change of the rest."""

    def documents(self, kind: str | None = None, in_force: bool = False) -> Sequence[Row]:
        """Rows of documents."""

    def agreements(self, in_force: bool = True) -> Sequence[Row]:
        """Rows of agreements."""


class StoredRouting:
    """Keeps ``routing.json`` as SQL has it. Thread: ``sb-sql``.

    Args:
        source: SQL.
        file: the file, of this server alone.
    """

    def __init__(self, source: DocumentSource, file: RoutingFile) -> None:
        self._source = source
        self._file = file
        self._published: dict[str, Any] | None = None
        self._state: Sequence[Row] = ()
        self._is_away = False

    def refresh(self) -> None:
        """Once; what is as it was is not read again: ten thousand agreements take a second of a processor."""
        try:
            state = self._source.document_state()
            if state == self._state:
                self._is_away = False
                return
            table: RoutingTable = stored_table(
                self._source.documents(None, True), self._source.agreements(True)
            )
        except SlaError as exc:
            if not self._is_away:
                log.warning("documents-not-read", error=str(exc), effect="events go by those read last")
            self._is_away = True
            return
        self._is_away = False
        content = table.as_json()
        if content != self._published:
            if not self._file.publish(table):
                return
            self._published = content
            log.info("documents-in-force", documents=len(content["documents"]))
        self._state = state

    def run(self, stop: Stop) -> None:
        """Until the stop."""
        while not stop.is_set():
            watchdog.beat(SQL_LIMIT_S)
            self.refresh()
            stop.wait(REFRESH_S)


def run(config: ResolvedConfig, stop: Stop) -> int:
    """Run until ``stop``; 1 if its thread has died.

    Raises:
        ConfigError: the address of agents cannot be listened on.
    """
    threads = ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}"))
    reader = open_reader(config.database, config.data_dir)
    routing = StoredRouting(reader, RoutingFile(config.data_dir))
    threads.start("sb-sql", lambda: _prepare(config, routing, stop), SQL_LIMIT_S)
    settings = config.pmdaemon
    most = raise_open_files(settings.open_files) // 2 - SPARE_FILES
    clock, lease = server_clock(), LeaseFile(config.runtime_dir)
    forwarder = LinkForwarder(settings.listen, lease.read, settings.agent_uids(), most, clock.monotonic_ns)
    initialized()
    asyncio.run(_forward(forwarder, stop))  # nothing of the thread has to be kept: it ends with the process
    log.info("stopped", reason=stop.reason)
    return 1 if threads.failed else 0


def _prepare(config: ResolvedConfig, routing: StoredRouting, stop: Stop) -> None:
    watchdog.beat(SQL_LIMIT_S)
    try:
        make_queue(config)
    except (SlaError, OSError) as exc:  # the one that has to act says the same, and its supervisor what to do
        log.warning("queue-not-made", error=str(exc))
    routing.run(stop)


async def _forward(forwarder: LinkForwarder, stop: Stop) -> None:
    """Until the stop, which ends a dial that is under way: this server is to act, and its machine is gone."""
    loop, following = asyncio.get_running_loop(), asyncio.ensure_future(_follow(forwarder))

    def end() -> None:
        loop.remove_reader(stop.fileno())
        following.cancel()

    loop.add_reader(stop.fileno(), end)
    try:
        await following
    except asyncio.CancelledError:
        pass
    finally:
        loop.remove_reader(stop.fileno())
        await forwarder.close()


async def _follow(forwarder: LinkForwarder) -> None:
    problem, wait_s = "", LOOK_S
    while True:
        watchdog.beat()
        try:
            await forwarder.follow()
            problem, wait_s = "", LOOK_S
        except ConfigError as exc:  # taken by another program: events are delivered all the same
            if str(exc) != problem:
                log.warning("agents-not-forwarded", problem=str(exc))
            problem, wait_s = str(exc), AGAIN_S
        await asyncio.sleep(wait_s)

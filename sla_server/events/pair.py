"""The cooperating pair as the process ``delivery`` sees it (E7): one object, whose thread does all the rest.

    main loop    publish (cursors), decide (is it the partner's?), report (confirmed), status
    ev-pair      sockets (pair_link), sessions (pair_session), what follows (pair_core), disk (pair_store)

Both look at ``pair_ledger``. The main loop never waits for the thread but at the start, for ``SETTLE_S`` at
most: what the partner has delivered while this server was away is not sent again. A thread or a disk of the
pair that fails ends the pair, says so by an event, and local delivery goes on alone; the pair is opened again
after a while (``PairRetry``).

Files in DATA_DIR/events: ``partner`` (disk queue), ``partner.json`` (``pair_store``), ``openings.json``
(``pair_history``).

Thread: the main loop, except where it is said.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.errors import SlaError
from pmdaemon.pki import contexts
from pmdaemon.pki.certificates import ends_us
from pmdaemon.reserve import event_row, raise_event
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadDidNotStop, ThreadGroup, ThreadInbox
from sla_server.events import pair_history
from sla_server.events.config import EventPairConfig
from sla_server.events.engine import DeliveryEngine
from sla_server.events.lane import Lane
from sla_server.events.later import LaterQueue
from sla_server.events.pair_core import SETTLE_S, BatchesUnderWay, PairCore, how_far
from sla_server.events.pair_ledger import PartnerLedger
from sla_server.events.pair_link import PairLink
from sla_server.events.pair_store import MirrorStore, PartnerNotes
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.stages.base import StageDecision

log = structlog.get_logger("pair")
JOIN_S: Final = 2.0
RETRY_FIRST_S: Final = 30.0
RETRY_MAX_S: Final = 1800.0
"""Each failure is an event for people: not many of them while the disk stays full."""


class CooperatingPair:
    """See the module.

    Args:
        config: table ``[events.pair]``.
        data_dir: of the server, in which relative paths are.
        directory: of the queues.
        queues: ours, in the order of a replay; nothing was added since the process has opened them, or the
            pair was there before. later: what is due later.
        clock: both time bases.
        arrived: called by ev-pair when something was added to the last queue.

    Raises:
        DiskQueueError, OSError: the partner's store cannot be opened.
    """

    def __init__(
        self,
        config: EventPairConfig,
        data_dir: Path,
        directory: Path,
        queues: Sequence[EventQueue],
        later: LaterQueue,
        clock: Clock,
        arrived: Callable[[], None],
    ) -> None:
        self._config = config
        self._data_dir = data_dir
        self._clock = clock
        self._queues = list(queues)
        self._later = later
        openings = pair_history.begin(
            directory, {queue.queue_id: queue.newest_record for queue in (*queues, later.queue)}
        )
        with contextlib.ExitStack() as undo:  # a store that stays locked could not be opened again
            self._store = MirrorStore(directory, config.mirror_bytes)
            undo.callback(self._store.close)
            self._ledger = PartnerLedger(PartnerNotes.read(directory))
            self._under_way = BatchesUnderWay()
            self._settled = threading.Event()
            self._core = PairCore(
                config,
                directory,
                queues,
                later.queue,
                openings,
                self._store,
                self._ledger,
                self._raise,
                clock,
                arrived,
                self._settled.set,
                self._certificate_ends_us,
            )
            self._inbox: ThreadInbox[None] = ThreadInbox()
            undo.callback(self._inbox.close)
            self._link = PairLink(config, self._core, self._context, self._inbox, clock)
            undo.pop_all()
        self._stop = Stop()
        self._threads = ThreadGroup(self._has_died)
        self._later_mark = -1, -1
        self._later_seqs: tuple[int, ...] = ()
        self.problem = ""

    def start(self, settle_s: float = SETTLE_S) -> None:
        """Begin, and wait for what the partner has delivered for us, for so long at most."""
        if self._store.damaged:
            text = (
                f"{self._store.damaged} events of partner {self._config.partner} that were on disk are gone"
            )
            self._raise("event-queue-damage", "critical", text, {"events": self._store.damaged})
        self._threads.start("ev-pair", self._run)
        self._settled.wait(settle_s)

    def decide(self, item: QueuedEvent, recipient: str) -> StageDecision | None:
        """See ``PartnerLedger.decide``."""
        return self._ledger.decide(item, recipient)

    def report(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """See ``PartnerLedger.report``; the partner is sent it."""
        self._ledger.report(rows)
        self._inbox.put(None)

    def has_changed(self, lanes: Mapping[str, Lane]) -> bool:
        """Whether lanes have to look again at what they are about to send."""
        self._take_later()
        return self._under_way.must_compose(lanes, has_changed=self._ledger.take_change())

    def publish(self, engine: DeliveryEngine) -> None:
        """How far recipients have come, and that there may be new events."""
        later = self._later.queue
        if (
            mark := (later.newest_seq, len(self._later))
        ) != self._later_mark:  # each change changes one of both
            self._later_mark, self._later_seqs = mark, self._later.seqs()
        reached = how_far(
            self._queues, later, self._later_seqs, engine, self._ledger.noticed, self._config.partner
        )
        if reached != self._core.reached:
            self._core.reached = reached
            self._inbox.put(None)

    def _take_later(self) -> None:
        """What the partner has held back, or has to remind of, waits here as ours does."""
        items = self._core.later_items
        while items:
            try:
                self._later.take_over(items[0])
            except QueueFull:  # the next turn tries again
                return
            items.popleft()

    def status(self) -> dict[str, Any]:
        """For people and figures."""
        return {**self._core.status(), "last_failure": self.problem or self._link.last_failure}

    @property
    def port(self) -> int:
        """Of the listener; 0 while there is none."""
        return self._link.port

    def close(self) -> bool:
        """Send the last confirmations, end the thread, let go of the files; False: the thread hangs."""
        self._stop.set("the process ends")
        self._inbox.put(None)
        try:
            self._threads.join(JOIN_S)
        except ThreadDidNotStop as exc:
            log.warning("pair-hangs", problem=str(exc))
            return False  # it has the files
        self._core.close()  # what was delivered for the partner since the thread failed
        with contextlib.suppress(SlaError, OSError):  # of a disk that failed: said already
            self._store.close()
        self._inbox.close()
        return True

    def _run(self) -> None:
        try:
            self._link.run(self._stop)
        except (SlaError, OSError) as exc:
            self._has_failed(str(exc))
        finally:
            self._core.close()
            self._settled.set()

    def _has_died(self, name: str, exc: BaseException) -> None:
        self._has_failed(f"thread {name} died: {exc}")

    def _has_failed(self, problem: str) -> None:
        self.problem = problem
        log.error("pair-failed", problem=problem)
        text = f"events are not mirrored to partner {self._config.partner} any more: {problem}"
        self._raise("pair-failed", "critical", text, {"problem": problem})

    def _context(self, server_side: bool) -> ssl.SSLContext:
        authority, certificate = (
            self._data_dir / path for path in (self._config.authority, self._config.certificate)
        )
        return contexts.partner(authority, certificate, server_side=server_side)

    def _certificate_ends_us(self) -> int | None:
        try:
            return ends_us((self._data_dir / self._config.certificate).read_bytes())
        except (OSError, ValueError):  # the next connection says what is wrong with it
            return None

    def _raise(self, kind: str, severity: str, text: str, details: dict[str, Any]) -> None:
        at_us = self._clock.unix_us()
        raise_event(event_row(kind, severity, "server", self._config.partner, text, at_us, details))


class PairRetry:
    """When a pair that has failed is opened again: waits double from ``RETRY_FIRST_S`` to ``RETRY_MAX_S``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoff = Backoff(RETRY_FIRST_S, RETRY_MAX_S)
        self._due: Deadline | None = None
        self._lasting = Deadline(
            RETRY_MAX_S, clock
        )  # a pair that was well for so long begins with short waits

    def is_due(self, *, is_well: bool) -> bool:
        """Whether it is opened again now."""
        if is_well:
            return False
        if self._due is None:
            if self._lasting.passed:
                self._backoff.succeeded()
            self._due = Deadline(self._backoff.failed(), self._clock)
        if not self._due.passed:
            return False
        self._due, self._lasting = None, Deadline(RETRY_MAX_S, self._clock)
        return True


def open_pair(
    config: EventPairConfig,
    data_dir: Path,
    directory: Path,
    queues: Sequence[EventQueue],
    later: LaterQueue,
    clock: Clock,
    arrived: Callable[[], None],
) -> CooperatingPair | None:
    """The pair, if the configuration has one, and its store can be opened: delivery goes on without."""
    if not config.enabled:
        try:
            pair_history.forget(directory)
        except OSError as exc:
            log.error("openings-not-removed", problem=str(exc))
        return None
    try:
        return CooperatingPair(config, data_dir, directory, queues, later, clock, arrived)
    except (SlaError, OSError) as exc:
        log.error("pair-failed", problem=str(exc))
        text, details = f"events are not mirrored to partner {config.partner}: {exc}", {"problem": str(exc)}
        at_us = clock.unix_us()
        raise_event(event_row("pair-failed", "critical", "server", config.partner, text, at_us, details))
        return None

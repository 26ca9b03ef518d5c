"""The process of a relay: the delivery of a server, with servers that post in the place of its processes.

Threads: those of ``events.delivery`` (the main loop, ``ev-intake`` for the relay's own events, ``ev-NAME``
for each recipient) and ``ev-post-N``, which take posts (``events.receiver``). The order of a start:
documents, queues and memory, then what is in them goes out, then the first post is taken. At the stop posts
end first.

Files in DATA_DIR: as in a server, ``events/`` and ``routing.json``; beside the queues ``events/identities``
(``records``). In the runtime directory ``relay.port``, and in ``metrics/`` beside ``delivery.json`` the file
``relay.json``: figures for people, written each second.

The relay's own events (a recipient that fails, wrong documents, a queue that fills, damage) are raised as in
any process, and go to its recipients by its routes; a webhook recipient brings them to a server that receives
(``[events.receive]``), or to another relay.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Final

import structlog

from pmdaemon.reserve import attach_reserves, event_row, initialized, raise_event
from pmdaemon.runtime import strict_json
from pmdaemon.runtime.clock import Clock, Deadline, server_clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import make_directory, write_whole
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.directories import lock_data_dir, prepare_runtime_dir, remove_runtime_dir
from sla_server.errors import RelayRunning, ServerRunning
from sla_server.events import routing
from sla_server.events.delivery import DIRECTORY, RESERVES, Delivery
from sla_server.events.receiver.service import EventReceiver, at_once, check_files
from sla_server.relay.config import ResolvedRelayConfig
from sla_server.relay.documents import DocumentFolder, read_documents
from sla_server.relay.final import FinalConfirmation
from sla_server.relay.records import IdentityMemory, RelayRecords

log = structlog.get_logger("relay")
PORT: Final = "relay.port"
STATE: Final = "relay.json"
SECOND_S: Final = 1.0
FILLING_RATIO: Final = 0.7
"""Before the recipient that is furthest behind loses events (``engine.FULL_RATIO``)."""
DRAINED_RATIO: Final = 0.5


class FullnessWatch:
    """How full the queue of events is, as events: one when it fills, one when it has room again. Pure.

    Args:
        ratio: at the start. A relay of before may have said that its queue fills, so that the end is due; or
            not, so that the beginning is.

    Attributes:
        is_filling: between both events.
    """

    def __init__(self, ratio: float) -> None:
        self.is_filling = False
        self._may_owe_end = ratio > DRAINED_RATIO
        self._has_said_end = False

    def check(self, ratio: float, *, is_known: bool = False) -> tuple[str, str, str] | None:
        """Kind, severity and text of the event that is due now.

        Args:
            ratio: now.
            is_known: a recipient believes that it fills; also by an event of a relay of before, whose queue
                may have been made larger since.
        """
        if not self.is_filling and ratio >= FILLING_RATIO:
            self.is_filling, self._has_said_end = True, False
            return "event-queue-filling", "warning", f"the queue of events is {ratio:.0%} full"
        owes_end = self.is_filling or self._may_owe_end or (is_known and not self._has_said_end)
        if ratio <= DRAINED_RATIO and owes_end:
            self.is_filling = self._may_owe_end = False
            self._has_said_end = True
            return "event-queue-drained", "info", "the queue of events has room again"
        return None


def run(config: ResolvedRelayConfig, stop: Stop) -> int:
    """Run until ``stop``; returns 0, or 1 if a thread died.

    Raises:
        RelayRunning: another process has the data directory.
        ConfigError: documents, address or certificate cannot be used.
        DiskQueueError, OSError: a queue cannot be opened, or its disk fails.
    """
    try:
        lock = lock_data_dir(config.data_dir)
    except ServerRunning as exc:
        raise RelayRunning(exc.data_dir, exc.pid) from exc
    try:
        prepare_runtime_dir(config.runtime_dir)
        return Relay(config, stop).run()
    finally:
        for name in (PORT, f"metrics/{STATE}"):
            (config.runtime_dir / name).unlink(missing_ok=True)
        remove_runtime_dir(config.runtime_dir)
        os.close(lock)


def check(config: ResolvedRelayConfig) -> None:
    """Check what a start needs beside the file.

    Raises:
        ConfigError, SecretUnusable: documents, certificate or a secret cannot be used.
    """
    read_documents(config.documents)
    check_files(config, config.secrets_dir, config.data_dir)


class Relay:
    """The parts of the process; see the module. Thread: the main one."""

    def __init__(self, config: ResolvedRelayConfig, stop: Stop) -> None:
        self._config = config
        self._stop = stop
        self._clock: Clock = server_clock()
        self._threads, self._takers = (
            ThreadGroup(lambda name, exc: stop.set(f"thread {name} died: {exc}")) for _ in range(2)
        )
        self._second = Deadline(0)
        self._has_wrong_documents = False

    def run(self) -> int:
        """See ``run``."""
        config, directory = self._config, self._config.data_dir / DIRECTORY
        if not (config.data_dir / routing.FILE).exists():
            read_documents(config.documents)  # or say what is wrong: there are none of before
        make_directory(directory / RESERVES, 0o700)
        attach_reserves(config.name, directory / RESERVES)
        self._raise("relay-started", "info", f"relay {config.name} was started", {})
        self._documents = DocumentFolder(config.documents, config.data_dir, self._report_documents)
        self._documents.poll()
        memory = IdentityMemory(directory, config.identities)
        if memory.damaged:
            text = f"{memory.damaged} records of identities are gone: repeats of those events are not dropped"
            self._raise("event-queue-damage", "critical", text, {"records": memory.damaged})
        records = RelayRecords(
            memory, config.events.queue_bytes, config.identities, self._stop.set, self._each_step
        )
        try:
            delivery = Delivery(config, directory, self._threads, self._takers, self._clock, records)
        except BaseException:
            memory.close()
            raise
        memory.known.clear()  # the intake has them
        try:
            return self._run(delivery)
        finally:
            self._stop.set("the main loop ended")
            delivery.close()

    def _run(self, delivery: Delivery) -> int:
        self._queue, self._later = delivery.queues
        self._is_known = delivery.is_known
        self._fullness = FullnessWatch(self._queue.fullness_ratio)
        self._final = FinalConfirmation(self._queue, self._later, self._config.final_wait_s)
        config = self._config
        self._receiver = receiver = EventReceiver(
            "listen", config, config.secrets_dir, config.data_dir, delivery.intake.accept, self._clock,
            self._final.waits_for if config.confirm == "final" else at_once,
        )  # fmt: skip
        hangup = Hangup()
        try:
            delivery.start(self._stop)
            hangup.install()
            initialized()
            receiver.start(self._stop)
            write_whole(self._config.runtime_dir / PORT, f"{receiver.port}\n")
            log.info("ready", port=receiver.port, confirm=config.confirm)
            delivery.loop(self._stop, hangup)
            self._final.close()
            receiver.join()
            delivery.finish()
            log.info("stopped", reason=self._stop.reason)
        finally:
            self._stop.set("the main loop ended")
            receiver.close()
        return 1 if self._threads.failed or self._takers.failed or receiver.has_failed else 0

    def _each_step(self) -> None:
        if self._config.confirm == "final":
            self._final.step()
        if self._second.passed:
            self._second = Deadline(SECOND_S)
            if self._documents.poll() and self._has_wrong_documents:
                self._has_wrong_documents = False
                self._raise("relay-documents-taken", "info", "the documents are right again", {})
            self._check_fullness()
            self._write_state()

    def _check_fullness(self) -> None:
        ratio, name = self._queue.fullness_ratio, self._config.name
        is_known = self._is_known(("event-queue", "relay", name, ""))
        if (due := self._fullness.check(ratio, is_known=is_known)) is not None:
            kind, severity, text = due
            self._raise(kind, severity, f"relay {name}: {text}", {"fullness_ratio": ratio})

    def _report_documents(self, problem: str) -> None:
        self._has_wrong_documents = True
        text = f"documents of relay {self._config.name} are not taken: {problem}"
        self._raise("relay-documents-refused", "critical", text, {"problem": problem[:2000]})

    def _raise(self, kind: str, severity: str, text: str, details: dict[str, Any]) -> None:
        at_us = self._clock.unix_us()
        raise_event(event_row(kind, severity, "relay", self._config.name, text, at_us, details))

    def _write_state(self) -> None:
        state = {
            "name": self._config.name,
            "confirm": self._config.confirm,
            "listen": f"{parse_address(self._config.listen)[0]}:{self._receiver.port}",
            "is_tls": self._config.tls.cert_file is not None,
            "is_filling": self._fullness.is_filling,
            "has_wrong_documents": self._has_wrong_documents,
            **self._receiver.figures(),
        }
        folder = self._config.runtime_dir / "metrics"
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            write_whole(folder / STATE, strict_json.dumps(state))

"""The one thread that takes messages: snapshots and reports to the live view, responses to the calls.

A mailbox has one posting and one taking thread (``pmdaemon.mailbox``). The taker is ``api-mailbox``; requests
are posted by whichever request thread asks, one at a time under ``_posting``.

Failure: a message that is no frame, or a snapshot of the wrong form, is logged and dropped; the thread goes
on. Anything else ends the thread, and by the process's policy the process (the supervisor restarts it).
"""

from __future__ import annotations

import select
import threading
from collections.abc import Sequence
from typing import Any, Final, Protocol

import structlog

from pmdaemon.errors import WireError
from pmdaemon.mailbox.errors import MessageDamaged
from pmdaemon.runtime import watchdog
from pmdaemon.runtime.excerpt import printable
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.api import ServiceResponse, Snapshot
from pmdaemon.wire.messages.server import Pressure
from sla_server.api.live_view import LiveView
from sla_server.api.operations import Operations

log = structlog.get_logger("api-bridge")
BACKSTOP_S: Final = 0.05  # a doorbell may be lost in a crash of its ringer; see DESIGN.md 3


class TakenMessage(Protocol):
    """A message taken from the mailbox."""

    @property
    def sender(self) -> str:
        """Participant that posted it."""

    @property
    def payload(self) -> bytes:
        """One or more frames."""


class ApiMailbox(Protocol):
    """What is used of ``pmdaemon.mailbox.Mailbox``."""

    name: str

    def stats(self) -> dict[str, Any]:
        """Its figures; any thread."""

    def post(self, recipients: str, payload: bytes) -> object:
        """Post one payload; MailboxFull when the recipient has no room."""

    def take(self) -> Sequence[TakenMessage]:
        """What has arrived, oldest first; never blocks."""

    def fileno(self) -> int:
        """Readable when the doorbell rang."""

    def prepare_sleep(self) -> bool:
        """Announce sleep; False if something is waiting already."""

    def awake(self) -> None:
        """Undo ``prepare_sleep``."""


class RequestPoster:
    """The posting side, shared by the request threads. Lock ``_posting`` guards the mailbox's post."""

    def __init__(self, box: ApiMailbox) -> None:
        self._box = box
        self._posting = threading.Lock()

    def __call__(self, message: bytes) -> None:
        """Post to ``services``; MailboxError when that fails."""
        with self._posting:
            self._box.post("services", message)


class MailboxThread:
    """The taking side. Thread: ``run`` is the body of ``api-mailbox``."""

    def __init__(self, box: ApiMailbox, live: LiveView, calls: Operations, stop: Stop) -> None:
        self._box = box
        self._live = live
        self._calls = calls
        self._stop = stop

    def run(self) -> None:
        """Take and hand on until the stop."""
        while not self._stop.is_set():
            watchdog.beat()
            if self.step() == 0:
                self._sleep()

    def step(self) -> int:
        """Take what is there; returns the number of messages."""
        try:
            letters = self._box.take()
        except MessageDamaged as exc:
            log.error("message-discarded", error=str(exc))
            return 1  # there may be more behind it
        for letter in letters:
            try:
                for raw in frame.split(letter.payload):
                    self._hand_on(frame.decode(raw))
            except (WireError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
                log.warning("message-dropped", sender=letter.sender, problem=printable(str(exc), 500))
        return len(letters)

    def _hand_on(self, message: frame.Frame) -> None:
        if message.kind == Kind.SNAPSHOT:
            self._live.put(Snapshot.parse(message).view)
        elif message.kind == Kind.PRESSURE:
            self._live.put_report(Pressure.parse(message.header))
        elif message.kind == Kind.RESPONSE:
            response = ServiceResponse.parse(message.header)
            if not self._calls.answer(response):
                log.info("response-unclaimed", req=response.request)
        else:
            log.warning("message-unexpected", kind=message.kind)

    def _sleep(self) -> None:
        try:
            if self._box.prepare_sleep():
                select.select([self._box.fileno(), self._stop.fileno()], [], [], BACKSTOP_S)
        finally:
            self._box.awake()

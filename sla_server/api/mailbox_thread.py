"""The one thread that takes messages: snapshots and reports go to the live view, responses to the operations.

A mailbox has one posting and one taking thread (``pmdaemon.mailbox``). The taker is ``api-mailbox``; requests
are posted by the request threads, one at a time under ``RequestPoster._posting``.

Failure: a message that is no frame, or a snapshot of the wrong form, is logged and dropped, and the thread
goes on. Any other error ends the thread, and with it, by policy, the process; the supervisor restarts it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from pmdaemon.errors import WireError
from pmdaemon.mailbox import BACKSTOP_S, Mailbox, wait_any
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


class RequestPoster:
    """The posting side, shared by the request threads. Lock ``_posting`` guards the mailbox's post."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._posting = threading.Lock()

    def __call__(self, message: bytes) -> None:
        """Post to ``services``; MailboxError when that fails."""
        with self._posting:
            self._mailbox.post("services", message)


class MailboxThread:
    """The taking side. Thread: ``run`` is the body of ``api-mailbox``."""

    def __init__(
        self,
        mailbox: Mailbox,
        live: LiveView,
        operations: Operations,
        stop: Stop,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        """``look`` is called in each round: it posts what has become due."""
        self._look = look
        self._mailbox = mailbox
        self._live = live
        self._operations = operations
        self._stop = stop

    def run(self) -> None:
        """Take messages and dispatch them until the stop."""
        while not self._stop.is_set():
            watchdog.beat()
            self._look()
            if self.step() == 0:
                wait_any([self._mailbox], BACKSTOP_S, [self._stop])

    def step(self) -> int:
        """Take the messages that are there; returns their number."""
        try:
            messages = self._mailbox.take()
        except MessageDamaged as exc:
            log.error("message-discarded", error=str(exc))
            return 1  # there may be more behind it
        for message in messages:
            try:
                for raw in frame.split(message.payload):
                    self._dispatch(frame.decode(raw))
            except (WireError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as exc:
                log.warning("message-dropped", sender=message.sender, problem=printable(str(exc), 500))
        return len(messages)

    def _dispatch(self, message: frame.Frame) -> None:
        if message.kind == Kind.SNAPSHOT:
            self._live.put(Snapshot.parse(message).view)
        elif message.kind == Kind.PRESSURE:
            self._live.put_report(Pressure.parse(message.header))
        elif message.kind == Kind.RESPONSE:
            response = ServiceResponse.parse(frame.unfold(message).header)
            if not self._operations.answer(response):
                log.info("response-unclaimed", req=response.request)
        else:
            log.warning("message-unexpected", kind=message.kind)

"""Changes are requests to ``services``: post, wait briefly, else answer with the address of an operation.

State, under ``_lock``: ``_operations`` (id -> Operation, the newest 1,000) and ``_waiting`` (request threads
that wait now). An Operation is completed once, by the mailbox thread; the request thread waits on its event.
At most 8 threads wait, so that a dead ``services`` cannot hold all 16 worker threads: further changes are
answered 202 at once.

Of several servers one that stands by asks nothing (``acting``): no ``services`` would answer before it acts.

Failure: a mailbox without room is ``Unavailable`` and nothing was posted. No answer within the wait: 202, the
request is still in the mailbox and will be carried out when ``services`` is back; the operation's address
says when. After a restart of this process old operations are unknown; the audit log has them.

Source: DESIGN.md 11; docs/formats/messages.md, REQUEST and RESPONSE.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.errors import FrameTooLarge, MailboxError
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.messages.api import ServiceRequest, ServiceResponse
from sla_server.api.errors import NotFound, ServiceRefused, TooLarge, Unavailable

WAITING_MAX: Final = 8
KEPT_OPERATIONS: Final = 1000


@dataclass
class Operation:
    """One request to ``services`` and, once it has come, the answer."""

    req: str
    op: str
    who: str
    asked_us: int
    code: int = 0
    body: dict[str, Any] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event, repr=False)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)
    _undoing: threading.Lock = field(default_factory=threading.Lock, repr=False)
    """Guards ``_undo``, and that ``done`` is set: each is called once, however the two threads meet."""

    def on_refusal(self, undo: Callable[[], None]) -> None:
        """Call this if ``services`` refuse, however late: at once if they have."""
        with self._undoing:
            if not self.done.is_set():
                self._undo.append(undo)
                return
        if self.code >= 400:
            undo()

    def complete(self, code: int, body: dict[str, Any]) -> None:
        """The answer has come. Thread: the mailbox thread."""
        self.code, self.body = code, body
        with self._undoing:
            self.done.set()
            undo, self._undo = self._undo, []
        for each in undo if code >= 400 else ():
            each()

    def result(self) -> dict[str, Any]:
        """The answer's body.

        Raises:
            ServiceRefused: ``services`` said no.
        """
        assert self.done.is_set()  # callers check it before
        if self.code >= 400:
            raise ServiceRefused(self.code, self.body)
        return self.body

    def describe(self) -> dict[str, Any]:
        """The answer of ``GET /operations/ID``."""
        described: dict[str, Any] = {
            "id": self.req,
            "op": self.op,
            "who": self.who,
            "asked_us": self.asked_us,
        }
        if not self.done.is_set():
            return {**described, "state": "pending"}
        return {
            **described,
            "state": "failed" if self.code >= 400 else "done",
            "code": self.code,
            "body": self.body,
        }


class Operations:
    """Asks ``services``. Thread: ``ask`` and ``find`` from any thread, ``answer`` from the mailbox thread."""

    def __init__(
        self,
        post: Callable[[bytes], None],
        clock: Clock,
        *,
        wait_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """``check`` raises what a change is refused with before it is posted."""
        self._post = post
        self._check = check
        self._clock = clock
        self._wait_s = wait_s
        self._lock = threading.Lock()  # guards the two below
        self._operations: OrderedDict[str, Operation] = OrderedDict()
        self._waiting = 0

    def ask(self, op: str, who: str, body: dict[str, Any], *, waits: bool = True) -> Operation:
        """Post a request and wait; the operation's ``done`` says whether the answer came in time.

        Raises:
            TooLarge: the body does not fit into a message's header (64 KB).
            Unavailable: the mailbox to ``services`` has no room, or this server stands by; nothing was asked.
        """
        self._check()
        operation = Operation(uuid.uuid4().hex, op, who, self._clock.unix_us())
        try:
            message = ServiceRequest(operation.req, op, who, body).encode()
        except FrameTooLarge as exc:
            raise TooLarge(str(exc), "Split the file: apply its documents in several calls") from exc
        with self._lock:
            # Before the post: the answer may come before the post returns.
            self._operations[operation.req] = operation
            while len(self._operations) > KEPT_OPERATIONS:
                self._operations.popitem(last=False)
        try:
            self._post(message)
        except MailboxError as exc:
            with self._lock:
                self._operations.pop(operation.req, None)
            raise Unavailable(
                f"the services part takes no requests ({exc})", "Try again in a moment"
            ) from exc
        if waits:
            self.wait(operation)
        return operation

    def wait(self, operation: Operation) -> None:
        """Wait for the answer, as ``ask`` does: for so long, and with so many others, as is allowed."""
        with self._lock:
            if self._waiting >= WAITING_MAX:
                return
            self._waiting += 1
        try:
            operation.done.wait(self._wait_s)
        finally:
            with self._lock:
                self._waiting -= 1

    def answer(self, response: ServiceResponse) -> bool:
        """Complete an operation; False if this process did not ask it."""
        with self._lock:
            operation = self._operations.get(response.request)
            if operation is None or operation.done.is_set():
                return False
        if response.code == 202:  # "not yet", said by services; the final answer follows under the same id
            return True
        operation.complete(response.code, response.body)
        return True

    def knows(self, req: str) -> bool:
        """Whether ``find`` finds it."""
        with self._lock:
            return req in self._operations

    def find(self, req: str) -> Operation:
        """The operation of that id.

        Raises:
            NotFound: never asked by this process, or long ago.
        """
        with self._lock:
            operation = self._operations.get(req)
        if operation is None:
            raise NotFound(
                f"no operation {req!r} since this application server started",
                "GET /api/v1/audit shows which changes were made",
            )
        return operation

    @property
    def pending(self) -> int:
        """Requests without an answer yet."""
        with self._lock:
            return sum(not operation.done.is_set() for operation in self._operations.values())

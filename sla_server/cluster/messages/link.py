"""The session's connection to the engine: one thread with an asyncio loop, in which all of nats runs.

Everything else is blocking: ``run`` hands a coroutine to the thread and waits. A client is connected to one
node at a time; when that dies the library connects to another of the list, and what had no answer is asked
again by ``retry``. So whatever is given to ``retry`` must be safe to repeat: publishing with an identity that
the engine knows from before, acknowledging, creating what may exist.

Errors of nats end here. ``classify`` says which pass (a leader is elected, a node is gone, no majority), and
which are final. "Full" is an error of its own: the engine has one code for it and for a failed store, so the
text decides.

The library keeps what is published without a connection and sends it at the next node, be it an hour later,
when the engine no longer knows the identities of what it has stored. So here nothing is kept: what has no
connection fails at once, and ``retry`` asks again as long as it may.

Thread: ``run`` from any thread but the link's own; coroutines run in the link's thread, ``cl-NAME``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from enum import Enum
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import nats
import nats.aio.client
import nats.errors
import nats.js
import nats.js.api
import nats.js.errors
import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.cluster import access
from sla_server.cluster.errors import ClusterError, ClusterRefused, ClusterUnreachable
from sla_server.cluster.messages.errors import AccessDenied, NotConfirmed, SessionClosed

log = structlog.get_logger("messages")
Result = TypeVar("Result")

ANSWER_S: Final = 2.0
"""For one answer; less than an election takes (4 s at least)."""
CONNECT_S: Final = 30.0
CANCEL_S: Final = 1.0
HEADERS_BYTES: Final = 512  # of the engine's limit, for headers that the library and a batch add
BATCH_BYTES: Final = 128  # of these, for those of a batch and what the engine writes around them
_PING_S: Final = 1  # two unanswered: a node that is stopped but not dead is left after 3 s
_STORE_FAILED: Final = 10077
_IN_PROCESS: Final = 10158
_PASSING_CODES: Final = (408, 429)
_PASSING: Final = frozenset(
    {
        10005,  # no peers: also while nodes are starting
        10014,  # no such consumer, or
        10059,  # no such stream: a node that has just started says so until it knows what the others do
        10058,  # the name of a stream, or
        10148,  # of a consumer is taken: made meanwhile by another session, or by a try of ours
        10149,  # no such consumer to change: it went meanwhile
        10202,  # members of the cluster are changing
        _IN_PROCESS,
    }
)
"""Errors with the code of a mistake that pass all the same. What is asked of a stream or a consumer here is
asked because it exists; where it may not, ``NotFoundError`` is caught before ``retry`` has it."""
NOT_SENT: Final = (
    nats.js.errors.NoStreamResponseError,
    nats.errors.MaxPayloadError,
    nats.errors.NoRespondersError,
    nats.errors.OutboundBufferLimitError,
)
"""What was tried did not come to any node that stores."""
STUCK_S: Final = 3.0
"""So long a primary may say of a message that it is being stored. One that has lost it says so until it
forgets the identity; its successor does not."""
NEW_PRIMARY_S: Final = 3.0
"""So long a primary that was asked for is let be: many messages may be stuck at once, and say so together."""


def end_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what is left of a loop that has stopped, wait for it, close the loop."""
    try:
        while left := asyncio.all_tasks(loop):
            for task in left:  # again, if one has lost it: ``wait_for`` does when its time comes then
                task.cancel()
            ended, _ = loop.run_until_complete(asyncio.wait(left, timeout=CANCEL_S))
            for task in ended:
                if not task.cancelled():
                    task.exception()  # nothing waits for it; unread, it would be logged
    finally:
        loop.close()


class Trouble(Enum):
    """What an error of the engine means for a request."""

    TRANSIENT = "ask again"
    FULL = "no room at the destination"
    FINAL = "asking again changes nothing"


def classify(exc: Exception) -> Trouble:
    """See ``Trouble``."""
    if isinstance(exc, nats.js.errors.APIError):
        # The library's errors of its key-value buckets lack these attributes.
        code, err_code = getattr(exc, "code", None) or 503, getattr(exc, "err_code", None)
        if err_code == _STORE_FAILED and "maximum" in (exc.description or ""):
            return Trouble.FULL
        is_passing = code >= 500 or code in _PASSING_CODES or err_code in _PASSING
        return Trouble.TRANSIENT if is_passing else Trouble.FINAL
    if isinstance(
        exc,
        nats.errors.MaxPayloadError
        | nats.errors.BadSubjectError
        | nats.errors.BadHeaderError
        | nats.errors.AuthorizationError,
    ):
        return Trouble.FINAL
    return Trouble.TRANSIENT


def size_bytes(data: bytes, headers: Mapping[str, str]) -> int:
    """What the engine counts of a message."""
    return len(data) + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())


class EngineLink:
    """The connection; see the module.

    Args:
        urls: of nodes of the cluster, ``nats://USER:PASSWORD@HOST:PORT``; others are learned from them, and
            connected to with the first one's user and password.
        name: of the session, for those who look at a node's connections.
        tls: if nodes ask for it.

    Attributes:
        client, stream: of nats; the link's thread only.
        reconnections: how often another node (or the same, again) was connected to.
    """

    def __init__(self, urls: Sequence[str], name: str, tls: ssl.SSLContext | None = None) -> None:
        self._name = name
        self._urls = list(urls)
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadGroup()
        self._is_closed = False
        self._replaced: dict[str, Deadline] = {}  # JetStream stream: its primary is let be until then
        self._denied: set[str] = set()  # subjects that the engine has refused, in small letters
        user = urlsplit(self._urls[0]).username or ""
        self._account = "" if user == access.PRODUCT_USER else user
        self.reconnections = 0
        self.client: nats.aio.client.Client
        self.stream: nats.js.JetStreamContext
        self._threads.start(f"cl-{name}"[:15], self._run_loop)
        try:
            self.run(self._connect(), CONNECT_S + 5)
        except BaseException:
            self._stop()
            raise

    def run(self, work: Coroutine[Any, Any, Result], limit_s: float | None = None) -> Result:
        """Run ``work`` in the link's thread; its result or its error.

        Raises:
            SessionClosed: it was, or became, closed.
            ClusterRefused: the engine refuses it.
            TimeoutError: not within ``limit_s``.
        """
        try:
            return self.start(work).result(limit_s)
        except nats.errors.Error as exc:
            raise ClusterRefused(f"the cluster's engine refuses it: {exc}") from exc
        except concurrent.futures.CancelledError as exc:
            raise SessionClosed(self._name) from exc

    def start(self, work: Coroutine[Any, Any, Result]) -> concurrent.futures.Future[Result]:
        """Begin ``work`` in the link's thread."""
        if self._is_closed:
            work.close()
            raise SessionClosed(self._name)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, call: Callable[[], object]) -> None:
        """Let the link's thread call it; after the end nothing happens."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def retry(self, attempt: Callable[[], Awaitable[Result]], what: str, limit_s: float) -> Result:
        """``attempt`` until it succeeds or fails for good.

        An error that is not of nats comes from its insides, as when a connection breaks in the middle of a
        call: it passes, too.

        Raises:
            NotConfirmed: not within ``limit_s``.
            nats.js.errors.APIError: the engine refuses it (``classify``: full or final).
            ClusterError: of ``attempt`` itself.
        """
        deadline, backoff, is_said = Deadline(limit_s), Backoff(0.02, 0.5), False
        while True:
            try:
                return await asyncio.wait_for(attempt(), max(0.01, min(ANSWER_S * 2, deadline.left_s())))
            except ClusterError:
                raise
            except Exception as exc:
                if classify(exc) is not Trouble.TRANSIENT:
                    raise
                if not isinstance(exc, OSError | nats.errors.Error) and not is_said:
                    is_said = True  # once: the next try may be half a second away
                    log.warning("cluster-library-failed", asked=what, problem=repr(exc))
                if deadline.passed:
                    raise NotConfirmed(what, limit_s, str(exc) or type(exc).__name__) from exc
            await asyncio.sleep(min(backoff.failed(), deadline.left_s()))

    @property
    def limit_bytes(self) -> int:
        """Of a message with its headers."""
        return self.client.max_payload - HEADERS_BYTES

    @property
    def copy_limit_bytes(self) -> int:
        """Of a copy of a message, which has more headers than that one, of ``limit_bytes`` perhaps."""
        return self.client.max_payload - BATCH_BYTES

    @property
    def node(self) -> str:
        """Host and port of the node that is connected to, without user and password; "" if there is none."""
        url = self.client.connected_url
        return url.netloc.rpartition("@")[2] if url is not None else ""

    def check_size(self, data: bytes, headers: Mapping[str, str], *, is_copy: bool = False) -> None:
        """Refuse what the engine would: its answer makes the library close the connection for good.

        Raises:
            nats.errors.MaxPayloadError: it is too large.
        """
        if size_bytes(data, headers) > (self.copy_limit_bytes if is_copy else self.limit_bytes):
            raise nats.errors.MaxPayloadError

    async def store(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        *,
        stream: str,
        what: str,
        limit_s: float,
        is_open: bool = False,
        is_copy: bool = False,
    ) -> int:
        """Store one message with an identity, once, however often that must be asked for; its sequence.

        ``is_open``: a try of it, as in a batch, had no answer. It may be on its way for as long as a node
        hangs, and be stored when there is room again: then "full" does not say that it is not stored.
        ``is_copy``: see ``copy_limit_bytes``.

        Raises:
            NotConfirmed: perhaps stored.
            nats.errors.MaxPayloadError: too large.
            nats.js.errors.APIError: the engine refuses it (``classify``: full or final).
        """
        self.check_size(data, headers, is_copy=is_copy)
        stuck_since: Deadline | None = None
        self.forget_denial(subject)

        async def attempt() -> int:
            nonlocal stuck_since, is_open
            was_open, is_open = is_open, True
            try:
                stored = await self.stream.publish(
                    subject, data, timeout=ANSWER_S, headers=dict(headers), stream=stream
                )
                return int(stored.seq)
            except (TimeoutError, nats.errors.TimeoutError):
                self.check_not_denied(subject)
                raise
            except NOT_SENT:
                is_open = was_open
                raise
            except nats.js.errors.APIError as exc:
                is_open = was_open or exc.err_code == _IN_PROCESS
                if is_open and classify(exc) is Trouble.FULL:
                    problem = f"a try of it had no answer, and the next one: {exc.description}"
                    raise NotConfirmed(what, limit_s, problem) from exc
                if exc.err_code == _IN_PROCESS:
                    stuck_since = stuck_since or Deadline(STUCK_S)
                    if stuck_since.passed:
                        stuck_since = None
                        await self._step_down(stream)
                raise

        return await self.retry(attempt, what, limit_s)

    async def make_stream(self, config: nats.js.api.StreamConfig) -> nats.js.api.StreamInfo:
        """The JetStream stream of this name, made if there is none; for ``retry``. Settings may differ."""
        try:
            return await self.stream.stream_info(str(config.name))
        except nats.js.errors.NotFoundError:
            return await self.stream.add_stream(config)

    async def ask(self, subject: str, body: Mapping[str, object]) -> dict[str, Any]:
        """A request of the engine's own, for what the library lacks; for ``retry``.

        Raises:
            nats.js.errors.APIError: it is refused.
        """
        answer = await self.client.request(f"$JS.API.{subject}", json.dumps(body).encode(), timeout=ANSWER_S)
        found = json.loads(answer.data)
        if "error" in found:
            raise nats.js.errors.APIError.from_error(found["error"])
        assert isinstance(found, dict)
        return found

    def forget_denial(self, subject: str) -> None:
        """A role may have been given since; before a request is sent."""
        self._denied.discard(subject.lower())

    def check_not_denied(self, subject: str) -> None:
        """After a request had no answer: the engine's refusal comes beside it.

        Raises:
            AccessDenied: the account has no role for it.
        """
        if subject.lower() in self._denied:
            raise self._denial(subject) from None

    def _denial(self, subject: str) -> AccessDenied:
        role, destination = access.needed(subject)
        return AccessDenied(self._account, destination, role)

    async def _step_down(self, stream: str) -> None:
        """Ask a JetStream stream's leader to let another one lead; takes well below a second."""
        if stream in self._replaced and not self._replaced[stream].passed:
            return
        self._replaced[stream] = Deadline(NEW_PRIMARY_S)
        await self.client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{stream}", b"", timeout=ANSWER_S)
        log.warning("stream-leader-stepped-down", stream=stream, session=self._name)

    def close(self, goodbye: Coroutine[Any, Any, object] | None = None, limit_s: float = 10.0) -> None:
        """End the connection and the thread, after ``goodbye``."""
        if self._is_closed:
            if goodbye is not None:
                goodbye.close()
            return
        with contextlib.suppress(TimeoutError, ClusterRefused):
            self.run(self._disconnect(goodbye), limit_s)
        self._stop()

    def _stop(self) -> None:
        self._is_closed = True
        self.call_soon(self._loop.stop)
        self._threads.join()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._beat()
        try:
            self._loop.run_forever()
        finally:
            end_loop(self._loop)

    def _beat(self) -> None:
        watchdog.beat()
        self._loop.call_later(1.0, self._beat)

    async def _connect(self) -> None:
        self.client = nats.aio.client.Client()

        async def lost() -> None:
            # Not yet written when the connection broke; the library has no public way to drop it.
            self.client._pending.clear()
            self.client._pending_data_size = 0

        async def reconnected() -> None:
            self.reconnections += 1
            log.info("cluster-reconnected", session=self._name, node=self.node)

        async def failed(exc: Exception) -> None:
            if (subject := access.refused_subject(str(exc))) and self._account:
                if subject not in self._denied:
                    log.warning(
                        "cluster-access-denied", session=self._name, problem=str(self._denial(subject))
                    )
                self._denied.add(subject)
                return
            log.debug("cluster-connection", session=self._name, problem=str(exc))

        options: dict[str, Any] = {"reconnect_time_wait": 0.2}
        if self._tls is not None:
            options["tls"] = self._tls
        first = urlsplit(self._urls[0])
        if first.username and first.password:
            options |= {"user": first.username, "password": first.password}
            if self._account:
                options["inbox_prefix"] = access.inbox_of(self._account)
        try:
            await asyncio.wait_for(
                self.client.connect(
                    self._urls,
                    name=self._name,
                    connect_timeout=2,
                    max_reconnect_attempts=-1,
                    ping_interval=_PING_S,
                    max_outstanding_pings=2,
                    pending_size=0,
                    disconnected_cb=lost,
                    reconnected_cb=reconnected,
                    error_cb=failed,
                    **options,
                ),
                CONNECT_S,
            )
        except (TimeoutError, OSError, nats.errors.Error) as exc:
            # An address has a password before its @.
            tried = ", ".join(url.rpartition("@")[2] for url in self._urls)
            raise ClusterUnreachable(tried, str(exc) or type(exc).__name__) from exc
        self.stream = self.client.jetstream(timeout=ANSWER_S)

    @property
    def has_account(self) -> bool:
        """Whether it is connected as an account, not as the product or without any name."""
        return bool(self._account)

    async def _disconnect(self, goodbye: Coroutine[Any, Any, object] | None) -> None:
        if goodbye is not None:
            await goodbye
        await self.client.close()


class BorrowedLink(EngineLink):
    """Requests over a connection of someone else, in their loop: what ``TransactionRegister`` needs.

    It has no thread, and is neither run nor closed.
    """

    def __init__(self, client: nats.aio.client.Client, name: str) -> None:
        self.client = client
        self.stream = client.jetstream(timeout=ANSWER_S)
        self._name = name
        self._account = ""
        self._replaced = {}
        self._denied = set()

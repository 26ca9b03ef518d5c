"""The decisions about a request of another server: is it let in, is its body taken, what is it answered.

    404, 405  another path than /events/NAME, another method than POST
    429       the host sends more requests than ``requests_per_s``; asked to come again
    411, 413  no Content-Length; a body above ``max_body_bytes``: not read
    401       NAME is no sender, or the signature is not of its secret, this body and this time
    400       the body is none of a webhook recipient (``posts``)
    503       no room, or not confirmed by all recipients yet; asked to come again
    200       recorded, or confirmed by all

In this order, so that nothing of a body is parsed before it is known whose it is. A webhook recipient tries
again after 401, 429 and 503 with the same notices, and makes a dead letter of what is answered 400 or 413
alone. That a notice is answered 200 which was recorded before is what drops duplicates.

Why 503 and not 202 for what is recorded only: every 2xx confirms there.

Thread: any. ``_lock`` guards the rates and the figures.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.runtime.clock import Clock
from pmdaemon.wire.rates import Gcra
from sla_server.events.queue import QueuedEvent
from sla_server.events.receiver.posts import PostRefused, posted
from sla_server.events.recipients.secret_files import SecretUnusable, read_secret
from sla_server.events.recipients.webhook import is_signed

log = structlog.get_logger("receiver")
FULL_AFTER_S: Final = 5
UNCONFIRMED_AFTER_S: Final = 1
MOST_HOSTS: Final = 1024
"""Hosts whose rates are kept; the one that was silent for longest goes first."""
BURST_NS: Final = 1_000_000_000
_PATH: Final = re.compile(r"/events/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
Accept = Callable[[Sequence[QueuedEvent]], int]
"""Makes notices durable, drops those that were taken before; returns how many were new."""


@dataclass(frozen=True, slots=True)
class PostAnswer:
    """What a request is answered; ``after_s``: when to come again, 0 for no wish."""

    status: int
    text: str
    after_s: int = 0


@dataclass(slots=True)
class SenderFigures:
    """What came of one sender: requests answered 200, notices taken and dropped, when the newest came."""

    confirmed: int = 0
    taken: int = 0
    repeated: int = 0
    last_us: int = 0


@dataclass(frozen=True, slots=True)
class PostLimits:
    """See ``relay.config``."""

    max_body_bytes: int = 4 << 20
    requests_per_s: float = 50.0


@dataclass(slots=True)
class _Figures:
    senders: dict[str, SenderFigures] = field(default_factory=dict)
    answers: Counter[int] = field(default_factory=Counter)


class PostHandler:
    """See the module.

    Args:
        secrets: name of a sender to the file of its secret, which is read for each request.
        accept: makes notices durable.
        confirmed: waits a while until all recipients have confirmed; whether they have.
        clock: both time bases.
    """

    def __init__(
        self,
        secrets: Mapping[str, Path],
        limits: PostLimits,
        accept: Accept,
        confirmed: Callable[[Sequence[QueuedEvent]], bool],
        clock: Clock,
    ) -> None:
        self._secrets = secrets
        self._limits = limits
        self._accept = accept
        self._confirmed = confirmed
        self._clock = clock
        self._lock = threading.Lock()
        self._rates: OrderedDict[str, Gcra] = OrderedDict()
        self._figures = _Figures({name: SenderFigures() for name in secrets})

    def admit(self, method: str, target: str, host: str, length: int | None) -> PostAnswer | None:
        """Look at a request before its body is read; None: read it.

        Args:
            method: of its first line.
            target: likewise.
            host: address that it comes from.
            length: announced size of the body; None: there is none.
        """
        if _PATH.fullmatch(target) is None:
            return PostAnswer(404, "nothing is here; post to /events/NAME, where NAME is a configured sender")
        if method != "POST":
            return PostAnswer(405, "post to this address")
        if (wait_s := self._wait_s(host)) > 0:
            text = f"more than {self._limits.requests_per_s:g} requests a second come from this host"
            return PostAnswer(429, text, math.ceil(wait_s))
        if length is None:
            return PostAnswer(411, "the request has no Content-Length")
        if length > self._limits.max_body_bytes:
            limit = self._limits.max_body_bytes
            return PostAnswer(
                413, f"a body of {length} bytes; max_body_bytes here is {limit}: lower the recipient's batch"
            )
        return None

    def answer(self, target: str, signature: str, content: bytes) -> PostAnswer:
        """Take the body of a request that was admitted.

        Durability: what is answered 200, or 503 because it is not confirmed yet, is on disk.

        Raises:
            QueuePoisoned: the disk fails.
        """
        path = _PATH.fullmatch(target)
        name = path[1] if path is not None else ""
        if (refusal := self._check_sender(name, signature, content)) is not None:
            return refusal
        try:
            items = posted(content)
        except PostRefused as exc:
            log.warning("post-refused", sender=name, problem=str(exc))
            return PostAnswer(400, str(exc))
        try:
            new = self._accept(items)
        except QueueFull as exc:
            log.error("no-room-for-events", sender=name, problem=str(exc))
            return PostAnswer(503, "the queue of events is full", FULL_AFTER_S)
        self._count(name, new, len(items))
        if not self._confirmed(items):
            text = "recorded; not every recipient has confirmed it yet"
            return PostAnswer(503, text, UNCONFIRMED_AFTER_S)
        with self._lock:
            self._figures.senders[name].confirmed += 1
        return PostAnswer(200, "confirmed")

    def answered(self, status: int) -> None:
        """Count an answer."""
        with self._lock:
            self._figures.answers[status] += 1

    def figures(self) -> dict[str, Any]:
        """For ``relay status``: what came of each sender, and how many answers of each status there were."""
        with self._lock:
            senders = [{"name": name, **asdict(each)} for name, each in self._figures.senders.items()]
            return {"senders": senders, "answers": {str(k): v for k, v in self._figures.answers.items()}}

    def _check_sender(self, name: str, signature: str, content: bytes) -> PostAnswer | None:
        """One text for all that is wrong: it must not help to guess names."""
        refusal = PostAnswer(
            401, "this sender is not known here, or its secret, body or time is not the signed one"
        )
        if name not in self._secrets:
            return refusal
        try:
            secret = read_secret(self._secrets[name])
        except SecretUnusable as exc:
            log.error("no-secret", sender=name, problem=str(exc))
            return PostAnswer(503, "the secret of this sender cannot be read here", 60)
        return None if is_signed(secret, signature, content, self._clock.unix_us() / 1e6) else refusal

    def _count(self, name: str, new: int, count: int) -> None:
        with self._lock:
            found = self._figures.senders[name]
            found.taken += new
            found.repeated += count - new
            found.last_us = self._clock.unix_us()

    def _wait_s(self, host: str) -> float:
        """Seconds until a request of this host may pass; 0 for one that passes now."""
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            rate = self._rates.pop(host, None) or Gcra(self._limits.requests_per_s, BURST_NS)
            self._rates[host] = rate
            if len(self._rates) > MOST_HOSTS:
                self._rates.popitem(last=False)
            if (wait_ns := rate.ready_ns() - now_ns) > 0:
                return wait_ns / 1e9
            rate.charge(now_ns, 1)
            return 0.0

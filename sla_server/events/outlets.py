"""The recipients that documents name, as lanes of the engine and as heartbeats.

A recipient is made again only if its document has changed. One that cannot be made (its secret file is
missing) is a recipient that asks to be tried again, so its events wait and the others go on; it is made with
the next call that follows a failure.

A heartbeat is no lane: it gets no events. It is sent at its interval, each in a thread of its own, while
delivery makes progress, and left out when it does not: its absence is the alarm (dead man's switch).

Thread: the main loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import Clock, Deadline
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.documents import RecipientDocument, RecipientSpec
from sla_server.events.event import Event
from sla_server.events.lane import LaneSettings
from sla_server.events.recipients.base import (
    Answer,
    Builder,
    Held,
    Notice,
    Outcome,
    Recipient,
    Reopening,
    Routed,
    Router,
    retry,
)
from sla_server.events.recipients.heartbeat import Heartbeat
from sla_server.events.sql_link import NAME
from sla_server.events.stages.send import GRACE_S, BatchSender, SentBatch, ThreadSender

log = structlog.get_logger("delivery")
UNMADE_TIMEOUT_S: Final = 10.0
HEARTBEAT: Final = "heartbeat"


class RecordingRouter:
    """Routes of documents, and every event to SQL, never held back."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def route(self, event: Event) -> Sequence[Routed]:
        """See ``Router``."""
        return (*self._router.route(event), Routed(NAME, "every event is a row"))

    def held(self, event: Event, recipient: str, now_us: int) -> Held | None:
        """See ``Router``."""
        return None if recipient == NAME else self._router.held(event, recipient, now_us)

    def escalates(self, recipient: str) -> bool:
        """See ``Router``."""
        return self._router.escalates(recipient)


class UnmadeRecipient:
    """Takes the place of one that cannot be made; each call tries to make it."""

    kind = "unmade"
    timeout_s = UNMADE_TIMEOUT_S
    most_notices = 1000

    def __init__(self, name: str, make: Callable[[], Recipient]) -> None:
        self.name = name
        self._make = make
        self._made: Recipient | None = None

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """See ``Recipient``."""
        if self._made is None:
            try:
                self._made = self._make()
            except (ConfigError, OSError) as exc:
                return retry(str(exc))
        return self._made.deliver(notices, deadline)

    def reopen(self) -> None:
        """See ``Reopening``."""
        if isinstance(self._made, Reopening):
            self._made.reopen()

    def close(self) -> None:
        """See ``Recipient``."""
        if self._made is not None:
            self._made.close()


class _Beating:
    """A heartbeat as a sender calls it."""

    kind = HEARTBEAT
    most_notices = 1

    def __init__(self, heartbeat: Heartbeat, clock: Clock) -> None:
        self.name, self.timeout_s = heartbeat.name, heartbeat.timeout_s
        self._heartbeat = heartbeat
        self._clock = clock

    def deliver(self, _notices: Sequence[Notice], deadline: Deadline) -> Answer:
        return self._heartbeat.beat(self._clock.unix_us(), deadline)

    def close(self) -> None:
        self._heartbeat.close()


@dataclass(slots=True)
class Pulsing:
    """The state of one heartbeat.

    Attributes:
        due_ns: of the next beat. token: of the one under way, 0 for none; late after ``deadline_ns``.
        left_out: beats that were not sent because delivery stood still.
        confirmed: beats that were answered well, the newest at ``confirmed_us``.
    """

    spec: RecipientSpec
    sender: BatchSender
    interval_s: float
    timeout_s: float
    due_ns: int = 0
    token: int = 0
    deadline_ns: int = 0
    left_out: int = 0
    confirmed: int = 0
    confirmed_us: int = 0
    last_answer: str = ""


class Outlets:
    """See the module.

    Args:
        builder: makes recipients.
        threads: starts their threads.
        done: takes answers; any thread.
        clock: both time bases.
    """

    def __init__(
        self, builder: Builder, threads: ThreadGroup, done: Callable[[SentBatch], None], clock: Clock
    ) -> None:
        self._builder = builder
        self._threads = threads
        self._done = done
        self._clock = clock
        self._specs: dict[str, RecipientSpec] = {}
        self._lanes: dict[str, LaneSettings] = {}
        self._token = 0
        self.pulses: dict[str, Pulsing] = {}

    def kind_of(self, name: str) -> str:
        """Kind of a recipient, for people."""
        return self._specs[name].kind if name in self._specs else "record"

    def lanes(self, documents: Mapping[str, RecipientDocument]) -> list[LaneSettings]:
        """The lanes of these documents; heartbeats are taken up beside them."""
        for name in [name for name in self.pulses if name not in documents]:
            self.pulses.pop(name).sender.close()
        for name in [name for name in self._lanes if name not in documents]:
            del self._lanes[name]  # the engine closes its sender
        for name, document in documents.items():
            if self._specs.get(name) == document.spec:
                continue
            self._lanes.pop(name, None)
            if name in self.pulses:
                self.pulses.pop(name).sender.close()
            if document.spec.kind == HEARTBEAT:
                self._add_pulse(name, document.spec)
            else:
                self._lanes[name] = self._lane(name, document.spec)
        self._specs = {name: document.spec for name, document in documents.items()}
        return list(self._lanes.values())

    def beat(self, *, is_well: bool) -> float:
        """Send what is due; returns the seconds until the next. Not well: nothing is sent."""
        now_ns, wait_s = self._clock.monotonic_ns(), 60.0
        for name, pulse in self.pulses.items():
            if pulse.token and now_ns >= pulse.deadline_ns:
                pulse.sender.abandon()
                pulse.token, pulse.last_answer = 0, f"no answer within {pulse.timeout_s:g} s"
            if not pulse.token and now_ns >= pulse.due_ns:
                pulse.due_ns = now_ns + round(pulse.interval_s * 1e9)
                if not is_well:
                    pulse.left_out += 1
                    log.warning("heartbeat-left-out", recipient=name, left_out=pulse.left_out)
                    continue
                self._token += 1
                if pulse.sender.start(self._token, (), pulse.timeout_s):
                    pulse.token = self._token
                    pulse.deadline_ns = now_ns + round((pulse.timeout_s + GRACE_S) * 1e9)
            due_ns = pulse.deadline_ns if pulse.token else pulse.due_ns
            wait_s = min(wait_s, max(0.0, (due_ns - now_ns) / 1e9))
        return wait_s

    def reopen(self) -> None:
        """Recipients that write files let go of them: they were renamed."""
        for each in self._lanes.values():
            if isinstance(each.sender, ThreadSender):
                each.sender.reopen()

    def pulse_rows(self) -> list[dict[str, Any]]:
        """How the heartbeats are, as ``delivery_state`` says it of recipients."""
        confirmed = Outcome.CONFIRMED.value
        return [
            {
                "name": name,
                "kind": HEARTBEAT,
                "state": "ok" if pulse.last_answer in ("", confirmed) else "failing",
                "waiting": 0,
                "attempt": 0,
                "last_answer": pulse.last_answer,
                "last_confirmed_us": pulse.confirmed_us,
                "confirmed": pulse.confirmed,
                "dead_letters": 0,
                "left_out": pulse.left_out,
            }
            for name, pulse in self.pulses.items()
        ]

    def answered(self, sent: SentBatch) -> bool:
        """Whether it is the answer to a heartbeat."""
        pulse = self.pulses.get(sent.lane)
        if pulse is None:
            return False
        if pulse.token == sent.token:
            pulse.token = 0
            pulse.last_answer = f"{sent.answer.outcome.value}: {sent.answer.reason}".removesuffix(": ")
            if sent.answer.outcome is Outcome.CONFIRMED:
                pulse.confirmed, pulse.confirmed_us = pulse.confirmed + 1, self._clock.unix_us()
            else:
                log.warning("heartbeat-failed", recipient=sent.lane, problem=sent.answer.reason)
        return True

    def close(self) -> None:
        """End the heartbeats."""
        for pulse in self.pulses.values():
            pulse.sender.close()

    def _lane(self, name: str, spec: RecipientSpec) -> LaneSettings:
        make = self._maker(name, spec)
        try:
            found: Recipient = make()
        except (ConfigError, OSError) as exc:
            log.error("recipient-not-made", recipient=name, problem=str(exc))
            found = UnmadeRecipient(name, make)
        timeout_s, most = found.timeout_s, found.most_notices
        found.close()

        def made() -> Recipient:
            try:
                return make()
            except (ConfigError, OSError):
                return UnmadeRecipient(name, make)

        sender = ThreadSender(name, made, self._done, self._threads)
        return LaneSettings(name, sender, min(most, spec.batch), timeout_s, float(spec.per_minute or 0))

    def _maker(self, name: str, spec: RecipientSpec) -> Callable[[], Recipient]:
        written = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        return lambda: self._builder(name, written)

    def _add_pulse(self, name: str, spec: RecipientSpec) -> None:
        make = self._maker(name, spec)

        def beating() -> Recipient:
            made = make()
            assert isinstance(made, Heartbeat)  # so its document says
            return _Beating(made, self._clock)

        try:
            made = make()
        except (ConfigError, OSError) as exc:
            log.error("recipient-not-made", recipient=name, problem=str(exc))
            return
        assert isinstance(made, Heartbeat)
        made.close()
        sender = ThreadSender(name, beating, self._done, self._threads)
        self.pulses[name] = Pulsing(spec, sender, made.interval_s, made.timeout_s)

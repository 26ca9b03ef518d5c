"""What passes between the delivery engine, its routing and a recipient (E5).

A recipient gets notices in the order of their ``number`` and answers for the whole batch: all confirmed, all
to be sent again, or all refused. The engine calls ``deliver`` of one recipient from one thread at a time and
gives it a deadline of the recipient's own ``timeout_s``. A call that outlives it is left behind and counted
as a retry, so a recipient that hangs delays no other one.

Confirmed means processed: a file is synced, a server has answered with success, a mail was accepted. A notice
can come more than once (at least once, E9); ``delivery_id`` is then the same, and a recipient that can hand
it on as idempotency key does so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol, runtime_checkable

from pmdaemon.runtime.clock import Deadline
from sla_server.events.event import Event


class Status(Enum):
    """Where the condition is that an event speaks of."""

    FIRING = "firing"
    RESOLVED = "resolved"
    INFO = "info"
    """An event with no end: nothing will resolve it."""


def delivery_identity(event: Event, reminder: int, escalated: bool) -> str:
    """The event's identity; with ``/N`` for its N-th reminder, ``/escalated`` for an escalation.

    Several recipients can have one address, such as a relay's: by the event's identity alone, it would drop
    an escalation as a repeat of the first notice.
    """
    number = f"/{reminder}" if reminder else ""
    return f"{event.event_id}{number}{'/escalated' if escalated else ''}"


@dataclass(frozen=True, slots=True)
class Notice:
    """An event on its way to one recipient.

    Attributes:
        event: the event.
        recipient: name of the recipient.
        number: place in this recipient's order, from 1, without gaps; kept over restarts.
        attempt: 1 at the first try.
        repeats: how many equal events it is for; 1 unless a flood was folded.
        group_key: notices of one key are best shown together; "" without grouping.
        status: firing, resolved or info.
        condition: name of what began and ends, the same in both events (``violation`` for
            ``violation-opened`` and ``violation-closed``); the kind where there is no such pair.
        reminder: 0 for the first notice of an event, then counting up while no person acknowledges it.
        escalated: it comes to this recipient because nobody acknowledged it in time.
        is_caught_up: it was held back (quiet hours, a silence with catch-up) and comes late.
        action: what to do next, for people. runbook: link to that entry of the catalogue.
    """

    event: Event
    recipient: str
    number: int
    attempt: int = 1
    repeats: int = 1
    group_key: str = ""
    status: Status = Status.INFO
    condition: str = ""
    reminder: int = 0
    escalated: bool = False
    is_caught_up: bool = False
    action: str = ""
    runbook: str = ""

    @property
    def delivery_id(self) -> str:
        """Identity of this delivery; see ``delivery_identity``."""
        return delivery_identity(self.event, self.reminder, self.escalated)

    def as_json(self) -> dict[str, Any]:
        """All fields, for bodies, files and commands."""
        return {
            "delivery_id": self.delivery_id,
            "recipient": self.recipient,
            "number": self.number,
            "attempt": self.attempt,
            "repeats": self.repeats,
            "group_key": self.group_key,
            "status": self.status.value,
            "condition": self.condition or self.event.kind,
            "reminder": self.reminder,
            "escalated": self.escalated,
            "is_caught_up": self.is_caught_up,
            "action": self.action,
            "runbook": self.runbook,
            "event": self.event.as_json(),
        }


class Outcome(Enum):
    """What became of a batch."""

    CONFIRMED = "confirmed"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Answer:
    """A recipient's answer for a batch.

    Attributes:
        outcome: confirmed, to be sent again, or refused for good (a dead letter).
        reason: for people, e.g. ``HTTP 503``; never a secret.
        after_s: with RETRY, the recipient's own wish (Retry-After); None leaves it to the engine's back-off.
    """

    outcome: Outcome
    reason: str = ""
    after_s: float | None = None


CONFIRMED: Final = Answer(Outcome.CONFIRMED)


def retry(reason: str, after_s: float | None = None) -> Answer:
    """The same notices are sent again later."""
    return Answer(Outcome.RETRY, reason, after_s)


def refused(reason: str) -> Answer:
    """The recipient will never take these notices: they become dead letters."""
    return Answer(Outcome.REFUSED, reason)


class Recipient(Protocol):
    """One way out of the server.

    Attributes:
        name: of its document.
        kind: webhook, smtp, syslog, file, inbox, command, apprise, heartbeat.
        timeout_s: the longest that one ``deliver`` may take, name resolution included.
        most_notices: the longest batch it takes.
    """

    name: str
    kind: str
    timeout_s: float
    most_notices: int

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        """Hand on and process; may block until the deadline. Must not raise for what the other side does.

        Thread: the recipient's own, one call at a time.
        """

    def close(self) -> None:
        """Let go of connections and files; ``deliver`` is not called again. May be called at any time."""


@runtime_checkable
class Reopening(Protocol):
    """A recipient that writes a file which other programs rename."""

    def reopen(self) -> None:
        """Let go of the file; the next notice opens it again. Any thread; never waits."""


class Builder(Protocol):
    """Makes a recipient from the ``spec`` of its document (``recipients.build``)."""

    def __call__(self, name: str, spec: Mapping[str, Any]) -> Recipient:
        """Make it; opens nothing yet.

        Raises:
            ConfigError: names the field, its value and what to do.
        """


@dataclass(frozen=True, slots=True)
class Routed:
    """Routing's decision that an event goes to a recipient, and in what manner.

    Attributes:
        recipient: its name.
        reason: which route and which match, for people.
        group_key: events of one key go out together; "" for none.
        group_wait_s: how long the first of a group waits for others.
        remind_s: send again at this interval until a person acknowledges or it is resolved; 0 never.
        escalate_s: with no acknowledgement for so long, ``escalate_to`` get it too; 0 never.
        escalate_to: names of recipients.
        inhibit: leave out lesser events about a gateway that is gone.
    """

    recipient: str
    reason: str
    group_key: str = ""
    group_wait_s: float = 0.0
    remind_s: float = 0.0
    escalate_s: float = 0.0
    escalate_to: tuple[str, ...] = ()
    inhibit: bool = False


@dataclass(frozen=True, slots=True)
class Held:
    """The decision that an event does not go to a recipient now.

    Attributes:
        reason: which silence or which quiet hours, for people.
        until_us: when it is looked at again; 0: it is not delivered at all.
    """

    reason: str
    until_us: int = 0


class Router(Protocol):
    """``stages.route`` and ``stages.silence``, made of documents; used by delivery and preview alike."""

    def route(self, event: Event) -> Sequence[Routed]:
        """Who gets the event; in no order, each recipient once."""

    def held(self, event: Event, recipient: str, now_us: int) -> Held | None:
        """Whether a silence or quiet hours keep it back from this recipient now."""

    def escalates(self, recipient: str) -> bool:
        """Whether anything that goes to this recipient may be escalated."""

"""What is stored of transactions, in the JetStream stream ``SLA_TRANSACTIONS``, and what it means. Pure.

::

    sla.t.s.IDENTITY                      state: open, committed or rolled back; who opened it, and until when
    sla.t.l.STREAM.CONSUMER.SEQUENCE      lock of a received message: the transaction that acknowledges it

The stream keeps one message a subject. A state is written with the sequence of the state before it
(0: there is none), and the engine refuses it if another has come first: so of two that decide, one wins.

A message sent in a transaction of two phases has the header ``Sla-Transaction``, the same text as the value
of a lock: the transaction's identity, and its owner (random, of one try). It is visible if the state of this
identity is *committed* and of this owner. All else means rolled back: presumed abort.

Every account with a role may store anything under these subjects, and the nodes act on what they find there
with the rights of the product. So each field is checked where it is read (``Record.parse``): above all, what
is acknowledged must be a message of the stream and consumer that it is said to be of.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

from pmdaemon.runtime.excerpt import excerpt
from sla_server.cluster.messages import names
from sla_server.cluster.messages.errors import BadSettings

STREAM: Final = names.stream_name(names.TRANSACTIONS)
SUBJECTS: Final = "sla.t.>"
STATES: Final = "sla.t.s.>"
MARK: Final = "Sla-Transaction"
MOST_MESSAGES: Final = 1000
"""Of a transaction, sent and acknowledged together; as many as a batch of the engine may have."""
MOST_BYTES: Final = 8 << 20
KEPT_S: Final = 3600.0
"""So long states and locks are kept after the decision, and longer while a message of it is unconsumed."""
HELD_S: Final = KEPT_S / 2
"""A message in hand for longer cannot be acknowledged in a transaction. It may have been handed out to
another session meanwhile, whose transaction took it; the lock that says so must still be there."""
MOST_OPEN_S: Final = KEPT_S
"""So long after it was stored an open state's time is up, whatever it says: far longer than any commit."""
MOST_US: Final = 1 << 62
_STREAM_NAME: Final = re.compile(r"SLA_[A-Za-z0-9_-]{1,240}")
_CONSUMER: Final = re.compile(r"[A-Za-z0-9_-]{1,500}")
_TEXT_LENGTH: Final = 256
_IDENTITY: Final = re.compile(r"[A-Za-z0-9_-]{1,120}")
_MADE: Final = re.compile(r"[0-9a-f]{32}")


class State(Enum):
    """Of a transaction."""

    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


class LockedMessage(NamedTuple):
    """A received message that the transaction acknowledges; ``reply`` is where the engine takes that."""

    stream: str
    consumer: str
    sequence: int
    reply: str

    @property
    def subject(self) -> str:
        """Of its lock."""
        return lock_subject(self.stream, self.consumer, self.sequence)


class Staged(NamedTuple):
    """Messages of the transaction that a destination's stream has, from ``first`` to ``last``."""

    stream: str
    first: int
    last: int


class Mark(NamedTuple):
    """Which try of which transaction."""

    identity: str
    owner: str

    def __str__(self) -> str:
        return f"{self.identity} {self.owner}"

    @classmethod
    def parse(cls, text: str) -> Mark:
        """What ``str`` has made; of anything else a transaction that never was."""
        identity, _, owner = text.partition(" ")
        return cls(identity if _IDENTITY.fullmatch(identity) else "-", owner)


@dataclasses.dataclass(frozen=True)
class Record:
    """A transaction's state, as it is stored.

    Attributes:
        until_unix_us: an open one may be rolled back by anyone after this.
    """

    state: State
    owner: str
    session: str
    until_unix_us: int
    staged: tuple[Staged, ...] = ()
    taken: tuple[LockedMessage, ...] = ()

    def encode(self) -> bytes:
        """For the stream."""
        fields = {
            "state": self.state.value,
            "owner": self.owner,
            "session": self.session,
            "until_unix_us": self.until_unix_us,
            "staged": self.staged,
            "taken": self.taken,
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def parse(cls, data: bytes) -> Record:
        """What ``encode`` has made.

        Raises:
            ValueError: it is of a later release, or no session of ours has stored it.
        """
        try:
            fields: dict[str, Any] = dict(json.loads(data))
            return cls(
                State(fields["state"]),
                _text(fields["owner"]),
                _text(fields["session"]),
                _whole(fields["until_unix_us"], 0),
                tuple(_staged(*part) for part in _parts(fields["staged"])),
                tuple(_taken(*part) for part in _parts(fields["taken"])),
            )
        except (KeyError, TypeError, RecursionError) as exc:
            raise ValueError(f"no state of a transaction: {type(exc).__name__}") from exc

    def decided(self, state: State, staged: Sequence[Staged] = ()) -> Record:
        """The same transaction with its decision."""
        return dataclasses.replace(self, state=state, staged=tuple(staged))

    def is_visible(self, mark: Mark) -> bool:
        """Whether what has this mark is visible."""
        return self.state is State.COMMITTED and self.owner == mark.owner


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _TEXT_LENGTH:
        raise ValueError(f"{excerpt(value)} is no name")
    return value


def _whole(value: object, least: int) -> int:
    if type(value) is not int or not least <= value < MOST_US:
        raise ValueError(f"{excerpt(value)} is no whole number from {least} on")
    return value


def _parts(value: object) -> list[Any]:
    if not isinstance(value, list) or len(value) > MOST_MESSAGES:
        raise ValueError(f"{excerpt(value)} is no list of at most {MOST_MESSAGES}")
    return value


def _stream_name(value: object) -> str:
    if not isinstance(value, str) or not _STREAM_NAME.fullmatch(value):
        raise ValueError(f"{excerpt(value)} is no stream of a destination")
    return value


def _staged(stream: object, first: object, last: object) -> Staged:
    begin = _whole(first, 1)
    return Staged(_stream_name(stream), begin, _whole(last, begin))


def _taken(stream: object, consumer: object, sequence: object, reply: object) -> LockedMessage:
    if not isinstance(consumer, str) or not _CONSUMER.fullmatch(consumer):
        raise ValueError(f"{excerpt(consumer)} is no consumer")
    found = LockedMessage(_stream_name(stream), consumer, _whole(sequence, 1), str(reply))
    # $JS.ACK.STREAM.CONSUMER.DELIVERIES.SEQUENCE, and numbers of the engine
    begin = re.escape(f"$JS.ACK.{found.stream}.{consumer}.")
    if len(found.reply) > 4 * _TEXT_LENGTH or not re.fullmatch(
        rf"{begin}[0-9]+\.{found.sequence}(\.[0-9]+)+", found.reply
    ):
        raise ValueError(f"{excerpt(reply)} is no acknowledgement of message {found.sequence}")
    return found


def check_identity(identity: str) -> None:
    """Refuse what a program may not give to a transaction.

    Raises:
        BadSettings: with what is allowed.
    """
    if not _IDENTITY.fullmatch(identity):
        raise BadSettings("identity", identity, "a transaction's has 1 to 120 letters, digits, - and _ only")
    if _MADE.fullmatch(identity):
        raise BadSettings(
            "identity", identity, "32 hexadecimal digits are of transactions that were given none"
        )


def state_subject(identity: str) -> str:
    """Where a transaction's state is stored."""
    return f"sla.t.s.{identity}"


def identity_of(subject: str) -> str:
    """Whose state is stored there."""
    return subject.removeprefix("sla.t.s.")


def lock_subject(stream: str, consumer: str, sequence: int | str) -> str:
    """Where it is stored which transaction acknowledges a message."""
    return f"sla.t.l.{stream}.{consumer}.{sequence}"


def ranges(stream: str, sequences: Sequence[int]) -> list[Staged]:
    """Sequences in as few ranges as there can be."""
    found: list[Staged] = []
    for sequence in sorted(sequences):
        if found and found[-1].last + 1 == sequence:
            found[-1] = found[-1]._replace(last=sequence)
        else:
            found.append(Staged(stream, sequence, sequence))
    return found

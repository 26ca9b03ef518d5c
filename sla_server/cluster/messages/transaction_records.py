"""What is stored of transactions, in the JetStream stream ``SLA_TRANSACTIONS``, and what it means. Pure.

::

    sla.t.s.IDENTITY                      state: open, committed or rolled back; who opened it, and until when
    sla.t.l.STREAM.CONSUMER.SEQUENCE      lock of a received message: the transaction that acknowledges it

The stream keeps one message a subject. A state is written with the sequence of the state before it
(0: there is none), and the engine refuses it if another has come first: so of two that decide, one wins.

A message sent in a transaction of two phases has the header ``Sla-Transaction``, the same text as the value
of a lock: the transaction's identity, and its owner (random, of one try). It is visible if the state of this
identity is *committed* and of this owner. All else means rolled back: presumed abort.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

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
            ValueError, KeyError, TypeError: it is of a later release.
        """
        fields: dict[str, Any] = json.loads(data)
        return cls(
            State(fields["state"]),
            fields["owner"],
            fields["session"],
            int(fields["until_unix_us"]),
            tuple(Staged(*part) for part in fields["staged"]),
            tuple(LockedMessage(*part) for part in fields["taken"]),
        )

    def decided(self, state: State, staged: Sequence[Staged] = ()) -> Record:
        """The same transaction with its decision."""
        return dataclasses.replace(self, state=state, staged=tuple(staged))

    def is_visible(self, mark: Mark) -> bool:
        """Whether what has this mark is visible."""
        return self.state is State.COMMITTED and self.owner == mark.owner


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

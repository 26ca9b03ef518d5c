"""Errors of the message system.

ClusterError (sla_server.cluster.errors)
└── MessagesError                 root of all below
    ├── AccessDenied              an account has no role for what it tried
    ├── BadName                   a name of a destination or consumer that is not allowed
    ├── BadSelector               a selector that cannot be read
    ├── BadSettings               a limit that is out of its range
    ├── StateInUse                another process makes identifiers from this directory
    ├── DestinationMissing        no destination of that name
    ├── DestinationDiffers        it exists with other settings
    ├── MirrorRefused             there cannot be such a mirror, or it cannot be promoted
    ├── SubscriberRefused         there is no such subscriber, or it cannot be ended now
    ├── DestinationFull           it refuses more until some is consumed (retryable)
    ├── PayloadTooLarge           it does not fit into one message of the engine
    ├── SourceTooSlow             a large message takes half a day to send: its fragments would not last
    ├── FragmentsDamaged          fragments are missing, or not what was sent
    ├── NotConfirmed              no answer in time: it may have happened (retryable, with the same identity)
    │   └── TransactionInDoubt    the same of a commit
    ├── TransactionTooLarge       more messages or bytes than one may have
    ├── TransactionRolledBack     it was decided against; nothing of it happened
    │   ├── MessageTaken          another session or transaction has a message that it acknowledges
    │   └── TransactionExists     its identity was used before
    ├── TransactionEnded          it was committed or rolled back already
    └── SessionClosed             the session was closed
"""

from __future__ import annotations

from sla_server.cluster.errors import ClusterError


class MessagesError(ClusterError):
    """Root of the errors of the message system."""


class AccessDenied(MessagesError):
    """An account has no role for what it tried.

    Attributes:
        destination: "" if it was about the cluster itself.
        role: that it needs.
    """

    exit_status = 77  # EX_NOPERM

    def __init__(self, account: str, destination: str, role: str) -> None:
        self.account = account
        self.destination = destination
        self.role = role
        what = f"destination {destination}" if destination else "the cluster"
        super().__init__(
            f"{what} refuses the account {account}: it lacks the role {role}. On a node: sla cluster account "
            f"role {account} --add {role}"
        )


class BadName(MessagesError):
    """A name that is not allowed."""

    def __init__(self, what: str, name: str, problem: str) -> None:
        self.name = name
        super().__init__(f"{what} {name!r}: {problem}")


class BadSelector(MessagesError):
    """A selector that cannot be read."""

    def __init__(self, text: str, problem: str) -> None:
        self.text = text
        super().__init__(
            f"selector {text!r}: {problem}. Write tokens with * and > (orders.*, orders.>), "
            "glob:PATTERN or regex:EXPRESSION"
        )


class BadSettings(MessagesError):
    """A limit or number that is out of its range."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        super().__init__(f"{field} is {value!r}; {allowed}")


class StateInUse(MessagesError):
    """Two processes with one directory would make the same identifiers."""

    exit_status = 75  # EX_TEMPFAIL
    retryable = True

    def __init__(self, directory: object) -> None:
        super().__init__(
            f"{directory} is in use by another process. End that one, or give each process a directory and a "
            "node number of its own"
        )


class DestinationMissing(MessagesError):
    """No destination has this name."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(f"there is no destination {name!r}. Create it first")


class DestinationDiffers(MessagesError):
    """The destination exists with other settings."""

    def __init__(self, name: str, differences: dict[str, tuple[object, object]]) -> None:
        self.name = name
        self.differences = differences
        named = ", ".join(
            f"{key} is {there!r}, not {here!r}" for key, (here, there) in sorted(differences.items())
        )
        super().__init__(f"destination {name!r} exists with other settings: {named}. Ask for the same")


class MirrorRefused(MessagesError):
    """There cannot be such a mirror, there is none, or it cannot be promoted now; it says what to do."""


class SubscriberRefused(MessagesError):
    """There is no such subscriber, or it cannot be ended now; it says what to do."""


class DestinationFull(MessagesError):
    """The destination takes no more until some was consumed. The message was not stored."""

    exit_status = 75
    retryable = True

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"destination {name!r} is full: {reason}. Send again when some was consumed")


class PayloadTooLarge(MessagesError):
    """The message does not fit into one of the engine."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"a message of {size_bytes} bytes exceeds {limit_bytes} bytes. Use send_large")


class SourceTooSlow(MessagesError):
    """The first fragments of a message would be removed before its consumers have had time for them."""

    exit_status = 65

    def __init__(self, identity: str, limit_s: float) -> None:
        self.identity = identity
        super().__init__(
            f"message {identity} was not sent: its source takes more than {limit_s / 3600:g} h. Gather it in "
            "a file first, or send it in parts"
        )


class FragmentsDamaged(MessagesError):
    """A message of fragments cannot be put together."""

    exit_status = 65

    def __init__(self, identity: str, problem: str) -> None:
        self.identity = identity
        super().__init__(f"message {identity}: {problem}. What was read of it must not be used")


class NotConfirmed(MessagesError):
    """The cluster gave no answer in time. What was asked may have happened, or may still."""

    exit_status = 75
    retryable = True

    def __init__(self, what: str, limit_s: float, problem: str) -> None:
        self.what = what
        super().__init__(f"{what} was not confirmed within {limit_s:g} s: {problem}. Repeat it unchanged")


class TransactionInDoubt(NotConfirmed):
    """The commit had no answer in time. It is decided in the cluster, or will be, as a whole."""

    def __init__(self, identity: str, limit_s: float, problem: str) -> None:
        self.identity = identity
        super().__init__(f"the commit of transaction {identity}", limit_s, problem)


class TransactionTooLarge(MessagesError):
    """One more would exceed what a transaction may have."""

    exit_status = 65  # EX_DATAERR

    def __init__(self, field: str, value: int, limit: int) -> None:
        self.field = field
        super().__init__(f"a transaction of {value} {field} exceeds {limit}. Make several smaller ones")


class TransactionRolledBack(MessagesError):
    """Nothing of the transaction happened: what it sent is removed, what it received is given back."""

    exit_status = 75
    retryable = True

    def __init__(self, identity: str, problem: str) -> None:
        self.identity = identity
        super().__init__(
            f"transaction {identity} was rolled back: {problem}. Repeat it as a whole under another identity"
        )


class MessageTaken(TransactionRolledBack):
    """A message cannot be acknowledged in this transaction."""

    def __init__(self, stream: str, sequence: int, identity: str, problem: str = "") -> None:
        self.sequence = sequence
        taken = problem or f"transaction {identity} acknowledges it"
        super().__init__(identity, f"message {sequence} of stream {stream}: {taken}")


class TransactionExists(TransactionRolledBack):
    """The identity is one of a former transaction."""

    def __init__(self, identity: str, state: str) -> None:
        self.state = state
        super().__init__(identity, f"one of this identity was {state} before")


class TransactionEnded(MessagesError):
    """The transaction takes nothing more."""

    def __init__(self, identity: str, state: str) -> None:
        super().__init__(f"transaction {identity} is {state} already. Begin another one")


class SessionClosed(MessagesError):
    """The session was closed while, or before, it was asked."""

    def __init__(self, name: str) -> None:
        super().__init__(f"session {name!r} is closed. Open another one")

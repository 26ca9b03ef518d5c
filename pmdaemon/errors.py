"""Errors of the low layers.

    SlaError                       root of every error this product raises on purpose
    ├── ConfigError                a configuration file or option is wrong; says which key and what to do
    ├── WireError                  a peer sent something we refuse; the connection is closed
    │   ├── FrameTooLarge          a length word above the limit
    │   ├── MalformedFrame         bytes that are not a frame, or a header that is not a map
    │   ├── BadCut                 a statistics frame whose columns do not fit its header
    │   ├── BadCaps                a set of caps or thresholds that cannot be applied; the former stays
    │   ├── ProtocolViolation      a well-formed frame in a state that does not allow it
    │   └── PeerRefused            we know what it wants and do not allow it; carries its own code
    ├── LocalProtocolError         a frame of ours that the session's state does not allow: a bug here
    ├── MailboxError               shared-memory mailbox (``pmdaemon.mailbox.errors`` has the tree below it)
    └── PeerGone                   the other side closed the connection; try again

Every class carries ``retryable`` (may the same action succeed later?) and ``exit_status`` (what a command
that dies of it returns). Messages are built by the classes from typed attributes.
"""

from __future__ import annotations


class SlaError(Exception):
    """Root of every error raised on purpose."""

    retryable = False
    exit_status = 1


class ConfigError(SlaError):
    """A configuration value is wrong; the text names the key, the value and what to do."""

    exit_status = 78  # EX_CONFIG of sysexits

    def __init__(self, where: str, problem: str, fix: str = "") -> None:
        self.where = where
        self.problem = problem
        self.fix = fix
        super().__init__(f"{where}: {problem}" + (f". {fix}" if fix else ""))


class WireError(SlaError):
    """A peer sent something we refuse. The connection that carried it is closed, nothing else."""

    exit_status = 76  # EX_PROTOCOL


class FrameTooLarge(WireError):
    """A frame announces more bytes than the limit allows."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        self.what = what
        self.size_bytes = size_bytes
        self.limit_bytes = limit_bytes
        super().__init__(f"{what} of {size_bytes} bytes exceeds the limit of {limit_bytes} bytes")


class MalformedFrame(WireError):
    """Bytes that are not a frame of this protocol."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"malformed frame: {problem}")


class BadCut(WireError):
    """A statistics frame whose columns do not fit its header."""

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"bad cut: {problem}")


class BadCaps(WireError):
    """Caps or thresholds that a plane cannot apply; the former ones stay, and so does the connection."""

    def __init__(self, what: str, problem: str) -> None:
        self.what = what
        self.problem = problem
        super().__init__(f"{what} refused, the former stay in force: {problem}")


class ProtocolViolation(WireError):
    """A well-formed frame that the session's state does not allow."""

    def __init__(self, state: str, frame: str, expected: str) -> None:
        self.state = state
        self.frame = frame
        self.expected = expected
        super().__init__(f"{frame} is not allowed while {state}; expected {expected}")


class PeerRefused(WireError):
    """A peer may not do what it asks for: its certificate, its token or its name is not accepted.

    Attributes:
        code: for the ERROR frame and the counters; docs/formats/wire.md lists them.
    """

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)


def not_enrolled() -> PeerRefused:
    """What a peer without a certificate is answered where one is needed."""
    return PeerRefused(
        "not-enrolled", "it has no certificate. On the server: sla ca token NAME; then run what that prints"
    )


class LocalProtocolError(SlaError):
    """Our own code tried to send a frame that the state does not allow. A bug of ours, never the peer's."""

    exit_status = 70  # EX_SOFTWARE

    def __init__(self, state: str, frame: str) -> None:
        self.state = state
        self.frame = frame
        super().__init__(f"tried to send {frame} while {state}; report this as a bug of the agent")


class MailboxError(SlaError):
    """Root of the mailbox errors."""


class PeerGone(SlaError):
    """The other side closed the connection or died."""

    retryable = True

    def __init__(self, peer: str, reason: str) -> None:
        self.peer = peer
        self.reason = reason
        super().__init__(f"{peer} is gone: {reason}")

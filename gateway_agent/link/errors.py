"""Errors of the agent's link process and of its parent.

    SlaError (pmdaemon.errors)
    └── LinkError
        ├── PeerLost               a connection is over; dial again (retryable)
        │   ├── ServerLost         the session to the PMDaemon ended
        │   └── PlaneLost          the control socket of a data plane closed, or broke the protocol
        ├── SpoolError
        │   ├── SpoolWriteFailed   a cut could not be spooled (disk full?); its sources keep it (retryable)
        │   └── SpoolUnusable      the spool's directory cannot be read or written at all
        ├── SourceReadFailed       a source of statistics could not be read this time (retryable)
        ├── StateFileBroken        a file in state_dir is not what we wrote
        ├── NotEnrolled            `tls` is on and this gateway has no certificate
        ├── EnrolmentFailed        the server, or what it sent, was not what `enrol` needs
        └── AlreadyRunning         another agent holds the lock of this state_dir or runtime_dir

``gateway_agent.errors`` is the tree of the data planes.
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class LinkError(SlaError):
    """Root of the errors of the agent's link and parent."""


class PeerLost(LinkError):
    """A connection is over; the shell closes it and dials again after its backoff."""

    retryable = True


class ServerLost(PeerLost):
    """The session to the PMDaemon ended."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__(f"session to the PMDaemon ended: {reason}")


class PlaneLost(PeerLost):
    """A data plane's control socket closed, or carried something that is not the protocol."""

    def __init__(self, plane: str, reason: str) -> None:
        self.plane = plane
        self.reason = reason
        super().__init__(f"data plane {plane}: {reason}")


class SpoolError(LinkError):
    """Root of the spool's errors."""


class SpoolWriteFailed(SpoolError):
    """A cut could not be written. Nothing is lost: its sources keep it and hand it over again."""

    retryable = True

    def __init__(self, path: str, cause: str) -> None:
        self.path = path
        self.cause = cause
        super().__init__(f"{path}: the cut could not be spooled ({cause}). Check the disk")


class SpoolUnusable(SpoolError):
    """The spool's directory cannot be used at all."""

    def __init__(self, path: str, cause: str) -> None:
        self.path = path
        self.cause = cause
        super().__init__(
            f"{path}: the spool cannot be used ({cause}). Check state_dir, its owner and its mode"
        )


class SourceReadFailed(LinkError):
    """A source of statistics could not be read this time."""

    retryable = True

    def __init__(self, source: str, cause: str) -> None:
        self.source = source
        self.cause = cause
        super().__init__(f"source {source} cannot be read: {cause}")


class StateFileBroken(LinkError):
    """A file in state_dir is not what we wrote."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, path: str, problem: str, fix: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}. {fix}")


class NotEnrolled(LinkError):
    """The server wants TLS and this gateway has no certificate yet."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: there is no certificate. On the server: sla ca token NAME; then run here what it "
            "prints (gateway-agent enrol ...)"
        )


class EnrolmentFailed(LinkError):
    """No certificate was obtained; nothing was changed here."""

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, server: str, problem: str) -> None:
        self.server = server
        self.problem = problem
        super().__init__(f"enrolment at {server} failed: {problem}")


class AlreadyRunning(LinkError):
    """Another agent holds the lock of this state_dir or runtime_dir."""

    exit_status = 75  # EX_TEMPFAIL

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path} is locked: another gateway-agent runs here. Stop it, or give this one its own state_dir "
            "and runtime_dir"
        )

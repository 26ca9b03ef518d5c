"""Errors of the gateway agent: its data planes, its link and its parent.

    SlaError (pmdaemon.errors)
    └── GatewayError               root of what this package raises on purpose
        ├── NbdProtocolError       an NBD peer (client or upstream) broke the protocol; it is disconnected
        ├── UpstreamError          the upstream of a volume refused, died or did not answer; clients see EIO
        ├── ExportRefused          a client asked for something this plane does not serve; says what and why
        ├── BackingFileError       a file or device of file mode cannot be used
        ├── PeerLost               a connection of the link has ended; dial again (retryable)
        │   ├── ServerLost         the session to the PMDaemon ended
        │   └── PlaneLost          the control socket of a data plane closed, or broke the protocol
        ├── SpoolWriteFailed       a cut could not be spooled (disk full?); its sources keep it (retryable)
        ├── SourceReadFailed       a source of statistics could not be read this time (retryable)
        ├── GroupUnusable          a control group cannot be counted or limited (retryable)
        │   └── DeviceNotFound     no block device has this name now (retryable)
        ├── QemuUnusable           a QEMU process cannot be asked, or refused what it was asked (retryable)
        ├── StateFileBroken        a file in state_dir is not what the agent wrote
        ├── NotEnrolled            `tls` is on and this gateway has no certificate
        ├── EnrolmentFailed        the server, or what it sent, was not what `enrol` needs
        ├── AlreadyRunning         another agent holds the lock of this state_dir or runtime_dir
        ├── AgentNotRunning        `status` and `reload` found no agent of this runtime_dir
        ├── ReloadFailed           the agent did not say what came of a reload, or cannot do it
        └── UpgradeFailed          an upgrade was refused, or the agent did not say what came of it

``retryable`` says whether the same action may succeed later. Wrong configuration is
``pmdaemon.errors.ConfigError``.
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class GatewayError(SlaError):
    """Root of the agent's errors."""


class NbdProtocolError(GatewayError):
    """An NBD peer sent bytes that the protocol does not allow.

    Attributes:
        peer: which side, e.g. ``client 10.0.0.7`` or ``upstream of vol-17``.
        problem: what was wrong.
    """

    exit_status = 76  # EX_PROTOCOL of sysexits

    def __init__(self, peer: str, problem: str) -> None:
        self.peer = peer
        self.problem = problem
        super().__init__(f"{peer} broke the NBD protocol: {problem}; the connection is closed")


class UpstreamError(GatewayError):
    """The NBD server behind a volume cannot serve; try again when it is back."""

    retryable = True
    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, upstream: str, problem: str) -> None:
        self.upstream = upstream
        self.problem = problem
        super().__init__(f"upstream {upstream}: {problem}. Check that it runs and that its address is right")


class ExportRefused(GatewayError):
    """A client asked for an export that this plane will not give it.

    Attributes:
        code: NBD_REP_ERR_* to answer with.
        reason: why, where the client must not learn it; for the log.
    """

    def __init__(self, code: int, problem: str, reason: str = "") -> None:
        self.code = code
        self.problem = problem
        self.reason = reason
        super().__init__(problem)


class BackingFileError(GatewayError):
    """The file or block device of an export cannot be opened."""

    exit_status = 66  # EX_NOINPUT

    def __init__(self, volume: str, path: str, problem: str) -> None:
        self.volume = volume
        self.path = path
        super().__init__(
            f"volume {volume}: file {path} cannot be used: {problem}. Correct `file` of this export"
        )


class PeerLost(GatewayError):
    """A connection has ended; the loop closes it and dials again after its backoff."""

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


class SpoolWriteFailed(GatewayError):
    """A cut could not be written. Nothing is lost: its sources keep it and hand it over again."""

    retryable = True

    def __init__(self, path: str, cause: str) -> None:
        self.path = path
        self.cause = cause
        super().__init__(f"{path}: the cut could not be spooled ({cause}). Check the disk")


class SourceReadFailed(GatewayError):
    """A source of statistics could not be read this time."""

    retryable = True

    def __init__(self, source: str, cause: str) -> None:
        self.source = source
        self.cause = cause
        super().__init__(f"source {source} cannot be read: {cause}")


class GroupUnusable(GatewayError):
    """A control group, or a block device, that cannot be counted or limited now.

    Attributes:
        name: the group or device, as it was asked for.
        problem: why not, and what to do.
        is_absent: whether it is not there, so that nothing in it does I/O.
    """

    retryable = True

    def __init__(self, name: str, problem: str, *, is_absent: bool = False) -> None:
        self.name = name
        self.problem = problem
        self.is_absent = is_absent
        super().__init__(f"{name}: {problem}")


class DeviceNotFound(GroupUnusable):
    """No block device has this name now."""

    def __init__(self, device: str) -> None:
        super().__init__(device, "no block device of this name; lsblk lists them", is_absent=True)


class QemuUnusable(GatewayError):
    """A QEMU process that cannot be asked now, or has refused what it was asked.

    Attributes:
        name: the socket, or what was asked for.
        problem: why not, and what to do.
    """

    retryable = True

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        self.problem = problem
        super().__init__(f"{name}: {problem}")


class StateFileBroken(GatewayError):
    """A file in state_dir is not what the agent wrote."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, path: str, problem: str, fix: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}. {fix}")


class NotEnrolled(GatewayError):
    """The server wants TLS and this gateway has no certificate yet."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: there is no certificate. On the server: sla ca token NAME; then run here what it "
            "prints (gateway-agent enrol ...)"
        )


class EnrolmentFailed(GatewayError):
    """No certificate was obtained; nothing was changed here."""

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, server: str, problem: str) -> None:
        self.server = server
        self.problem = problem
        super().__init__(f"enrolment at {server} failed: {problem}")


class AlreadyRunning(GatewayError):
    """Another agent holds the lock of this state_dir or runtime_dir."""

    exit_status = 75  # EX_TEMPFAIL

    def __init__(self, path: str) -> None:
        self.path = path
        super().__init__(
            f"{path} is locked: another gateway-agent runs here. Stop it, or give this one its own state_dir "
            "and runtime_dir"
        )


class AgentNotRunning(GatewayError):
    """No agent runs with this runtime_dir, or it cannot be asked."""

    exit_status = 69  # EX_UNAVAILABLE

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"no agent is found that runs with runtime_dir {path}: {problem}")


class ReloadFailed(GatewayError):
    """The agent did not take its file, or did not say what came of it."""

    exit_status = 1

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)


class UpgradeFailed(GatewayError):
    """The agent's processes were not replaced, or not all of them; what ran goes on."""

    exit_status = 1

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(problem)

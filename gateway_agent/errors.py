"""Errors of the gateway agent's data planes and throttles.

    SlaError
    └── GatewayError               root of what this package raises on purpose
        ├── NbdProtocolError       an NBD peer (client or upstream) broke the protocol; it is disconnected
        ├── UpstreamError          the upstream of a volume refused, died or did not answer; clients see EIO
        ├── ExportRefused          a client asked for something this plane does not serve; says what and why
        ├── BackingFileError       a file or device of file mode cannot be used
        └── BadCaps                a set of caps or thresholds that cannot be applied; the former stay

``retryable`` says whether the same action may succeed later. Errors of the link process are in
``gateway_agent.link.errors``; wrong configuration is ``pmdaemon.errors.ConfigError``.
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
    """

    def __init__(self, code: int, problem: str) -> None:
        self.code = code
        self.problem = problem
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


class BadCaps(GatewayError):
    """Caps or thresholds from the link that cannot be applied; what was in force stays so."""

    def __init__(self, what: str, problem: str) -> None:
        self.what = what
        self.problem = problem
        super().__init__(f"{what} refused, the former stay in force: {problem}")

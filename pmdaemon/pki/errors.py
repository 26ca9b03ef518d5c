"""Errors of the certificate authority and of enrolment.

    SlaError (pmdaemon.errors)
    └── PkiError                 and what has no class of its own: a second CA, a key that others can read
        ├── NoAuthority          there is no CA here yet
        ├── StateUnusable        a file that cannot be read, written or understood
        ├── NothingToRevoke      no valid certificate is known by that name
        └── CredentialRefused    a peer's token, request or certificate is not accepted; has a ``code``

``CredentialRefused`` is what a peer is sent: its code goes into the ERROR frame, the log and a counter.
"""

from __future__ import annotations

from pmdaemon.errors import SlaError


class PkiError(SlaError):
    """Root of the certificate authority's errors; a directory or key that is not private, a second CA."""

    exit_status = 77  # EX_NOPERM


class NoAuthority(PkiError):
    """There is no CA in the directory."""

    exit_status = 78  # EX_CONFIG

    def __init__(self, directory: str) -> None:
        self.directory = directory
        super().__init__(f"{directory}: there is no certificate authority here. Make one: sla ca init")


class StateUnusable(PkiError):
    """A file of ours cannot be read, written or understood."""

    exit_status = 74  # EX_IOERR

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        self.problem = problem
        super().__init__(f"{path}: {problem}. Restore it from a backup, or correct its owner and mode")


class NothingToRevoke(PkiError):
    """No valid certificate is known by that name, gateway_id or serial."""

    exit_status = 1

    def __init__(self, who: str) -> None:
        self.who = who
        super().__init__(f"{who!r} names no valid certificate; see: sla ca list")


class CredentialRefused(PkiError):
    """A token, a request or a certificate is not accepted.

    Attributes:
        code: for the ERROR frame and the counters; docs/formats/wire.md lists them.
    """

    def __init__(self, code: str, text: str) -> None:
        self.code = code
        super().__init__(text)

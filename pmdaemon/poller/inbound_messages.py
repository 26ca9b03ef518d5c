"""What other threads of a pair tell the inbound thread, which alone may touch connections' endings."""

from __future__ import annotations

from typing import NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.pki.certificates import Credential
from pmdaemon.poller.connection import AgentConnection
from pmdaemon.poller.migration import Forward


class PostAnnouncement(NamedTuple):
    """Post this announcement."""

    message: bytes
    recipients: tuple[str, ...]


class AnnounceAgain(NamedTuple):
    """These recipients have restarted; announce every session to them."""

    recipients: tuple[str, ...]


class Blocked(NamedTuple):
    """This connection has output waiting, or is doomed."""

    conn: AgentConnection


class Answered(NamedTuple):
    """The clerk has made the certificate that this connection asked for; ``held`` is what it says."""

    conn: AgentConnection
    held: Credential
    encoded: bytes


class CertificateRefused(NamedTuple):
    """The clerk refuses what this connection asked for: it is told and closed."""

    conn: AgentConnection
    error: WireError


class Revoked(NamedTuple):
    """The list of revoked certificates is another."""


Hint = PostAnnouncement | AnnounceAgain | Blocked | Answered | CertificateRefused | Revoked | Forward

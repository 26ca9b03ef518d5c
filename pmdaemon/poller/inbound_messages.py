"""What other threads of a pair tell the inbound thread, which alone may touch connections' endings."""

from __future__ import annotations

from typing import NamedTuple

from pmdaemon.errors import WireError
from pmdaemon.pki.identity import Credential
from pmdaemon.poller.connection import Connection
from pmdaemon.poller.migration import Forward


class Post(NamedTuple):
    """Post this announcement."""

    message: bytes
    recipients: tuple[str, ...]


class AnnounceAgain(NamedTuple):
    """These recipients have restarted; announce every session to them."""

    recipients: tuple[str, ...]


class Blocked(NamedTuple):
    """This connection has output waiting, or is doomed."""

    conn: Connection


class Answered(NamedTuple):
    """The clerk has made the certificate that this connection asked for; ``held`` is what it says."""

    conn: Connection
    held: Credential
    encoded: bytes


class Refused(NamedTuple):
    """The clerk refuses what this connection asked for: it is told and closed."""

    conn: Connection
    error: WireError


class Revoked(NamedTuple):
    """The list of revoked certificates is another."""


Hint = Post | AnnounceAgain | Blocked | Answered | Refused | Revoked | Forward

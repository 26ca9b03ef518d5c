"""Which users of this host may be the server, where no certificate says who it is.

Without TLS the server is a process of this host. While it is down any user may listen at its port, or dial an
agent that waits to be dialled, and what came then would be caps of any process. So the kernel is asked whose
process is at the other end, before a byte is sent or taken. Nothing is kept: the answer holds for the
connection, and a later one is asked about again. Thread: any.
"""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pmdaemon.runtime.client_user import client_uid, server_uids, user_name

ANY_NAME: Final = "*"
FIX: Final = "Name that user in server_users if it runs the SLA server, or use TLS"


@dataclass(frozen=True, slots=True)
class ServerUsers:
    """See the module. ``uids``: the users; None: every one."""

    uids: frozenset[int] | None

    @classmethod
    def named(cls, names: Collection[str]) -> ServerUsers:
        """These, the agent's own user and root; names that this host does not have count for nothing."""
        if ANY_NAME in names:
            return EVERY_USER
        found = {0, os.geteuid()}
        for name in names:
            with suppress(KeyError):
                found.add(pwd.getpwnam(name).pw_uid)
        return cls(frozenset(found))

    def why_not_dialled(self, connection: socket.socket) -> str:
        """Why a connection that was dialled does not lead to the server; "" if it may."""
        return "" if self.uids is None else self._why_not(server_uids(connection))

    def why_not_accepted(self, connection: socket.socket) -> str:
        """Why who has dialled is not the server; "" if it may be."""
        if self.uids is None:
            return ""
        uid = client_uid(connection)
        return self._why_not(set() if uid is None else {uid})

    def _why_not(self, uids: set[int]) -> str:
        assert self.uids is not None
        if not uids:
            return f"the kernel does not say which user is at the other end. {FIX}"
        strange = sorted(uids - self.uids)
        return (
            f"user {user_name(strange[0])} is at the other end, which is not the server's. {FIX}"
            if strange
            else ""
        )


EVERY_USER: Final = ServerUsers(None)

"""Of several servers the one that acts, and what this one says while it stands by.

No state: each question reads the file that the node publishes (``lease_file``). A server that stands by has
no ``services``. A change that waited in their mailbox would be carried out hours later, when this server acts
again; so it is refused at once, with the name of the server that acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sla_server.api.errors import StandsBy
from sla_server.lease_file import LeaseFile, LeaseState


@dataclass(frozen=True, slots=True)
class ActingServer:
    """See the module. Thread: any.

    Attributes:
        runtime_dir: of this server; None: it is alone, and acts always.
    """

    runtime_dir: Path | None = None

    def check(self) -> None:
        """Before a change.

        Raises:
            StandsBy: this server does not act.
        """
        if reason := self.why_not_here():
            raise StandsBy(reason, self._name_of(self._lease()))

    def why_not_here(self) -> str:
        """Why this server changes nothing now, in words; "" while it acts."""
        if self.runtime_dir is None or (lease := self._lease()).held_fence is not None:
            return ""
        if name := self._name_of(lease):
            return f"the server of node {name} acts, this one (node {lease.node}) stands by"
        return "no server acts just now: none that is known here has the lease of the cluster"

    def described(self) -> dict[str, Any] | None:
        """For answers: ``acting`` (null: not known), and ``stands_by``, see ``why_not_here``; None: alone."""
        if self.runtime_dir is None:
            return None
        return {"acting": self._name_of(self._lease()) or None, "stands_by": self.why_not_here()}

    def _lease(self) -> LeaseState:
        assert self.runtime_dir is not None  # of a server that is alone nobody asks
        return LeaseFile(self.runtime_dir).read()

    @staticmethod
    def _name_of(lease: LeaseState) -> str:
        """The node whose server acts; "": not known. This one's own lease may have lapsed."""
        if lease.held_fence is not None:
            return lease.node
        return "" if lease.holder == lease.node else lease.holder


ALONE: Final = ActingServer()
"""A server over a database of its own."""

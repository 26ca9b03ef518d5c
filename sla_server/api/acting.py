"""Of several servers the one that acts, and what this one says while it stands by.

No state: each question reads the file that the node publishes (``lease_file``). A server that stands by has
no ``services``. A change that waited in their mailbox would be carried out hours later, when this server acts
again; so what is not forwarded (``forwarding``) is refused at once, with the name of the server that acts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pmdaemon.runtime.clock import Clock, SystemClock
from sla_server.api.errors import StandsBy
from sla_server.lease_file import LeaseFile, LeaseState
from sla_server.nodes_file import read_nodes


@dataclass(frozen=True, slots=True)
class ActingServer:
    """See the module. Thread: any.

    Attributes:
        runtime_dir: of this server; None: it is alone, and acts always.
        clock: server time.
        authority: certificate of this server's authority, of which the others' pages may have theirs; the
            file need not be there.
    """

    runtime_dir: Path | None = None
    clock: Clock = field(default_factory=SystemClock)
    authority: Path | None = None

    def check(self) -> None:
        """Before a change.

        Raises:
            StandsBy: this server does not act.
        """
        if reason := self.why_not_here():
            lease = self._lease()
            raise StandsBy(reason, lease.acting, lease.page)

    def elsewhere(self) -> LeaseState | None:
        """What is known of the lease while another server acts; None: this one acts, or none is known to."""
        if self.runtime_dir is None or (lease := self._lease()).held_fence is not None:
            return None
        return lease if lease.acting else None

    def why_not_here(self) -> str:
        """Why this server changes nothing now, in words; "" while it acts."""
        if self.runtime_dir is None or (lease := self._lease()).held_fence is not None:
            return ""
        if name := lease.acting:
            said = f"the server of node {name} acts, this one (node {lease.node}) stands by"
            has_given = lease.gave_up == lease.node
            return f"{said}: it gave the lease up, as it {lease.why}" if has_given else said
        if lease.heard_s is not None and not lease.is_fresh:
            who = "this server" if lease.holder == lease.node else f"the server of node {lease.holder}"
            return (
                f"which server acts is not known here: node {lease.node} has had no answer of the cluster "
                f"for {lease.heard_s:.0f} s; {who if lease.holder else 'none'} acted then"
            )
        return "no server acts just now: none that is known here has the lease of the cluster"

    def described(self) -> dict[str, Any] | None:
        """For answers; None: alone.

        ``acting``: the node whose server acts; null: not known. ``acting_page``: where its page is, null: not
        known. ``stands_by``: see ``why_not_here``. ``pages``: of the other servers, by node.
        """
        if self.runtime_dir is None:
            return None
        lease, nodes = self._lease(), read_nodes(self.runtime_dir, self.clock.unix_us())
        acting = lease.acting
        return {
            "acting": acting or None,
            "acting_page": (lease.page if acting else "") or None,
            "stands_by": self.why_not_here(),
            "pages": {name: node.page for name, node in nodes.items() if node.page and name != lease.node},
        }

    def _lease(self) -> LeaseState:
        assert self.runtime_dir is not None  # of a server that is alone nobody asks
        return LeaseFile(self.runtime_dir).read()


ALONE: Final = ActingServer()
"""A server over a database of its own."""

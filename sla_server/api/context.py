"""What the handlers work with: one immutable bundle, made by ``server`` or by a test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pmdaemon.runtime.clock import Clock
from sla_server.api.access import Access
from sla_server.api.acting import ALONE, ActingServer
from sla_server.api.config import ApiConfig
from sla_server.api.live_view import LiveView
from sla_server.api.metrics import Metrics
from sla_server.api.operations import Operations
from sla_server.api.scope import Scopes
from sla_server.api.security import Guard, Logins
from sla_server.db.queries.reader import SqlReader

if TYPE_CHECKING:  # their libraries take some MB, for those who use them
    from sla_server.api.forwarding import RequestForwarder
    from sla_server.api.oidc import OidcProvider


@dataclass(frozen=True, slots=True)
class AppContext:
    """Each member says itself which threads may call it; all may be called from request threads."""

    config: ApiConfig
    token: str = field(repr=False)
    source: SqlReader
    live: LiveView
    operations: Operations
    guard: Guard
    logins: Logins
    scopes: Scopes
    access: Access
    metrics: Metrics
    clock: Clock
    address: str
    """Of the page, as a browser on this machine names it; ends with a slash."""
    oidc: OidcProvider | None = None
    """None: nobody signs in through a provider."""
    nodes: tuple[str, ...] = ()
    """Of the cluster, this server's own first; empty without ``[cluster]``."""
    acting: ActingServer = ALONE
    """Which of several servers acts."""
    forwarder: RequestForwarder | None = None
    """None: the server is alone, and there is no other one to forward requests to."""
    other_runbook: str = ""
    """Address of a runbook that is not the page's own."""

    @property
    def runbook_url(self) -> str:
        """Page with an entry for each kind of event, behind ``#KIND``."""
        return self.other_runbook or f"{self.address}runbook"

    @property
    def cookie_suffix(self) -> str:
        """Makes names of cookies this server's: the ports of a host share cookies."""
        return str(urlsplit(self.address).port)

"""What the handlers work with: one immutable bundle, made by ``server`` or by a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from pmdaemon.runtime.clock import Clock
from sla_server.api.access import Access
from sla_server.api.config import ApiConfig
from sla_server.api.live_view import LiveView
from sla_server.api.metrics import Metrics
from sla_server.api.operations import Operations
from sla_server.api.scope import Scopes
from sla_server.api.security import Guard, Logins
from sla_server.db.queries.reader import SqlReader


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

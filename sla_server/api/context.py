"""What the handlers work with: one immutable bundle, made by ``process`` or by a test."""

from __future__ import annotations

from dataclasses import dataclass, field

from pmdaemon.runtime.clock import Clock
from sla_server.api.config import ApiConfig
from sla_server.api.live_view import LiveView
from sla_server.api.metrics import Meters
from sla_server.api.operations import Calls
from sla_server.api.security import Guard, Logins
from sla_server.api.source import Source


@dataclass(frozen=True, slots=True)
class Parts:
    """Each member says itself which threads may call it; all may be called from request threads."""

    config: ApiConfig
    token: str = field(repr=False)
    source: Source
    live: LiveView
    calls: Calls
    guard: Guard
    logins: Logins
    meters: Meters
    clock: Clock
    address: str
    """Of the page, as a browser on this machine names it; ends with a slash."""

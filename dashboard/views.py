"""The views of the page: each has an address of its own, a template and a script. One line adds a view.

``templates/views/KEY.html`` is what the server renders, ``static/views/KEY.js`` what fills it; the script's
``start`` is called once. A view loads what it shows and nothing else. One that another blueprint serves
(``elsewhere``) needs neither; its template may extend ``base.html`` and is given ``view`` and ``views``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PageView:
    """One address."""

    key: str
    """Name of the template and of the script."""
    path: str
    """In Flask's spelling; its parameter, if there is one, is ``name``."""
    title: str
    above: str = ""
    """Of a view of one thing: the key of the list it belongs to; empty: the view is in the navigation."""
    elsewhere: bool = False
    """Whether a blueprint of its own serves it: it is in the navigation only."""
    own: bool = False
    """Whether accounts with labels have it: the API answers them what it shows."""


VIEWS: Final = (
    PageView("overview", "/", "Overview", own=True),
    PageView("agreements", "/agreements", "Agreements", own=True),
    PageView("agreement", "/agreements/<name>", "Agreement", "agreements", own=True),
    PageView("apply", "/apply", "Apply a document", "agreements"),
    PageView("volumes", "/volumes", "Volumes", own=True),
    PageView("volume", "/volumes/<name>", "Volume", "volumes", own=True),
    PageView("backends", "/backends", "Backends"),
    PageView("backend", "/backends/<name>", "Backend", "backends"),
    PageView("gateways", "/gateways", "Gateways"),
    PageView("pools", "/pools", "Pools"),
    PageView("policies", "/policies", "Policies"),
    PageView("policy", "/policies/<name>", "Policy", "policies"),
    PageView("events", "/events", "Events"),
    PageView("approvals", "/approvals", "Approvals"),
    PageView("jobs", "/jobs", "Jobs"),
    PageView("servers", "/servers", "Servers"),
    PageView("reports", "/reports", "Reports", elsewhere=True, own=True),
    PageView("audit", "/audit", "Audit"),
    PageView("users", "/users", "Users"),
)
"""In the order of the navigation."""


def navigation(*, sees_own: bool) -> list[PageView]:
    """The views that are in the navigation; of an account with labels those that it may see."""
    return [view for view in VIEWS if not view.above and (view.own or not sees_own)]

"""The runbook of events: what each kind means and what to do about it, where links of notices lead.

It is a part of the documentation and says nothing of this site, so it asks for no login: whoever gets a
notice at night has the entry one click away.
"""

from __future__ import annotations

from collections.abc import Mapping

from flask import Blueprint, render_template, request

from dashboard.views import PageView, navigation
from sla_server.api.context import AppContext
from sla_server.api.security import PAGE
from sla_server.events import catalogue


def _by(kinds: Mapping[str, catalogue.EventKind], which: str) -> dict[str, str]:
    """Condition to the kinds of events that begin it, or end it."""
    found: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        if condition := getattr(kind, which):
            found.setdefault(condition, []).append(name)
    return {condition: " or ".join(names) for condition, names in found.items()}


def _views(context: AppContext) -> list[PageView]:
    """The navigation for who asks; none for those who must sign in before they see a view."""
    if not context.guard.may_read(request):
        return []
    principal = context.guard.admit(request, PAGE)
    return navigation(sees_own=principal is not None and bool(principal.labels))


def make_runbook(context: AppContext) -> Blueprint:
    """One route; an entry is behind ``#KIND``."""
    pages = Blueprint("runbook", __name__, template_folder="templates")

    def runbook() -> str:
        kinds = {name: kind for group in catalogue.GROUPS.values() for name, kind in group.items()}
        opening, closing = (_by(kinds, which) for which in ("begins", "ends"))
        return render_template(
            "runbook.html",
            views=_views(context),
            groups=catalogue.GROUPS,
            opening=opening,
            closing=closing,
        )

    pages.add_url_rule("/runbook", "kinds", runbook)
    return pages

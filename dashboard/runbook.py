"""The runbook of events: what each kind means and what to do about it, where links of notices lead.

It is a part of the documentation and says nothing of this site, so it asks for no login: whoever gets a
notice at night has the entry one click away.
"""

from __future__ import annotations

from flask import Blueprint, render_template

from sla_server.events import catalogue


def make_runbook() -> Blueprint:
    """One route; an entry is behind ``#KIND``."""
    pages = Blueprint("runbook", __name__, template_folder="templates")

    def runbook() -> str:
        return render_template("runbook.html", groups=catalogue.GROUPS)

    pages.add_url_rule("/runbook", "kinds", runbook)
    return pages

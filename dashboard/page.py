"""The page's routes: its views, their scripts and style, and plotly's script from its own wheel (no CDN).

Nothing is inline, so the Content-Security-Policy allows neither inline script nor inline style. Files are
served with an ETag and checked by the browser on each load, so an upgrade shows at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import as_file, files
from typing import Any, Final

from flask import Blueprint, Flask, Response, abort, g, redirect, render_template, request, send_file

from dashboard.harms import HARMS, make_harms
from dashboard.login import make_blueprint
from dashboard.reports import make_reports
from dashboard.runbook import make_runbook
from dashboard.shared_use import SHARED_USE, make_shared_use
from dashboard.views import VIEWS, PageView, navigation
from sla_server.api.app import create_app as create_api_app
from sla_server.api.context import AppContext
from sla_server.api.security import PAGE

REPORTS: Final = "reports"
ABOUT_ALL: Final = (HARMS, SHARED_USE)
"""Blueprints whose pages are about all agreements and volumes."""
ABOUT_MORE: Final = "This account sees its own agreements alone, and this is about more than them."
FREE: Final = ("page.static", "page.plotly_script")
"""What the form to sign in needs, too."""
page = Blueprint(
    "page", __name__, template_folder="templates", static_folder="static", static_url_path="/static"
)


def server_zone() -> str:
    """What this machine calls its time zone; a browser that does not know the name shows UTC."""
    linked = os.path.realpath("/etc/localtime").partition("zoneinfo/")[2]
    return os.environ.get("TZ", "").lstrip(":") or linked or "UTC"


def _shell_of(view: PageView) -> Callable[..., str]:
    """Renders a view's shell; its script asks the API for what is in it."""

    def shell(name: str = "") -> str:
        sees_own = bool(g.get("sees_own"))
        if sees_own and not view.own:
            abort(403, ABOUT_MORE)
        return render_template(
            f"views/{view.key}.html",
            view=view,
            views=navigation(sees_own=sees_own),
            sees_own=sees_own,
            name=name,
            version=version("storage-sla-server"),
            server_zone=server_zone(),
        )

    return shell


for _view in VIEWS:
    if not _view.elsewhere:
        page.add_url_rule(_view.path, _view.key, _shell_of(_view))


@page.get("/static/plotly.min.js")
def plotly_script() -> Response:
    """The chart library, 5 MB, fetched only when a chart is shown."""
    with as_file(files("plotly").joinpath("package_data/plotly.min.js")) as path:
        return send_file(path, mimetype="text/javascript", max_age=86_400, conditional=True)


def guard_page(context: AppContext) -> Callable[[], Any]:
    """Where reading needs a login, pages send those without one to the form.

    Views that are about more than an account with labels sees are refused to it, and so are the graphs of who
    hurt or slowed whom; the other views draw no link to them. Reports are those of its own agreements.
    """

    def check() -> Any:
        if request.blueprint not in (page.name, REPORTS, *ABOUT_ALL) or request.endpoint in FREE:
            return None
        if not context.guard.may_read(request):
            return redirect("/login", 303)
        principal = context.guard.admit(request, PAGE)
        g.sees_own = principal is not None and bool(principal.labels)
        g.scope = None if request.blueprint == page.name else context.scopes.of(principal)
        if request.blueprint in ABOUT_ALL and g.scope is not None:
            abort(403, ABOUT_MORE)
        return None

    return check


def create_app(context: AppContext) -> Flask:
    """API and page in one application."""
    app = create_api_app(context)
    app.before_request(guard_page(context))
    app.jinja_env.globals["other_runbook"] = context.other_runbook
    app.register_blueprint(page)
    app.register_blueprint(make_blueprint(context))
    app.register_blueprint(make_reports(context))
    app.register_blueprint(make_runbook(context))
    app.register_blueprint(make_harms(context))
    app.register_blueprint(make_shared_use(context))
    return app

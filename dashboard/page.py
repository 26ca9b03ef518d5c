"""The page's routes: the shell, its script and style, and plotly's script from plotly's own wheel (no CDN).

Nothing is inline, so the Content-Security-Policy allows neither inline script nor inline style. Files are
served with an ETag and checked by the browser on each load, so an upgrade shows at once.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import as_file, files

from flask import Blueprint, Flask, Response, render_template, send_file

from dashboard.reports import make_reports
from sla_server.api.app import create_app as create_api_app
from sla_server.api.context import AppContext

page = Blueprint(
    "page", __name__, template_folder="templates", static_folder="static", static_url_path="/static"
)


@page.get("/")
def index() -> str:
    """The one page."""
    return render_template("index.html", version=version("storage-sla-server"))


@page.get("/static/plotly.min.js")
def plotly_script() -> Response:
    """The chart library, 5 MB, fetched only when a chart is shown."""
    with as_file(files("plotly").joinpath("package_data/plotly.min.js")) as path:
        return send_file(path, mimetype="text/javascript", max_age=86_400, conditional=True)


def create_app(context: AppContext) -> Flask:
    """API and page in one application."""
    app = create_api_app(context)
    app.register_blueprint(page)
    app.register_blueprint(make_reports(context))
    return app

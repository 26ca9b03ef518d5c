"""The page that signs a browser in: with name and password, or with a one-time code that it was opened with.

A look at the page changes nothing; its form does (POST). No script is needed.
"""

from __future__ import annotations

from typing import Any, Final

from flask import Blueprint, Response, redirect, render_template, request

from sla_server.api.context import AppContext
from sla_server.api.errors import ApiError
from sla_server.api.security import remember_session

# With no-referrer a browser would send "Origin: null" with the form.
HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
USED: Final = "This address was used already or is too old.\nRun 'sla login' for a new one.\n"


def make_blueprint(context: AppContext) -> Blueprint:
    """The routes of /login."""
    login = Blueprint("login", __name__, template_folder="templates")

    @login.get("/login")
    def form() -> Response:
        return _page(code=request.args.get("code", ""))

    @login.post("/login")
    def sign_in() -> Any:
        context.guard.check_origin(request, required=False)
        address, browser = request.remote_addr or "", request.headers.get("User-Agent", "")
        if "name" in request.form:
            name = request.form.get("name", "").strip().lower()
            try:
                principal = context.access.by_password(name, request.form.get("password", ""), address)
            except ApiError as exc:
                return _page(name=name, problem=exc.detail, fix=exc.fix, status=exc.status)
            how = "password"
        else:
            found = context.access.by_code(context.logins.spend(request.form.get("code", "")))
            if found is None:
                context.access.code_refused(address)
                return Response(USED, 403, mimetype="text/plain")
            principal, how = found, "one-time code"
        within = principal.session
        remember_session(context.access.begin_session(principal, address, browser, how, within=within))
        return redirect("/", 303)

    return login


def _page(*, status: int = 200, **values: str) -> Response:
    text = render_template("login.html", **{"code": "", "name": "", "problem": "", "fix": "", **values})
    return Response(text, status, mimetype="text/html", headers=HEADERS)

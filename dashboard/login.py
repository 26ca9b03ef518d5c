"""The page that signs a browser in: with name and password, through a provider, or with a one-time code.

A look at the page changes nothing; its form does (POST). No script is needed. The way to the provider of
OpenID Connect and back is a chain of GETs: state, nonce and code verifier are in a cookie of their own, which
only comes along to ``/login/oidc``. That cookie is Lax, as the provider's redirect comes from another site;
for the same reason the answer to it is no redirect to the page but a page that leads there: the session's
cookie is Strict, and would stay away from a chain that another site began. No address of any request says
where the browser goes: it goes to the configured provider, and then to the overview.
"""

from __future__ import annotations

from typing import Any, Final

from flask import Blueprint, Response, redirect, render_template, request

from sla_server.api.access import PROVIDER
from sla_server.api.config import OIDC_CALLBACK
from sla_server.api.context import AppContext
from sla_server.api.errors import ApiError
from sla_server.api.roles import Principal
from sla_server.api.security import remember_session

# With no-referrer a browser would send "Origin: null" with the form.
HEADERS: Final = {"Cache-Control": "no-store", "Referrer-Policy": "same-origin"}
USED: Final = "This address was used already or is too old.\nRun 'sla login' for a new one.\n"
OIDC_BEGIN: Final = "/login/oidc"
COOKIE_S: Final = 600
"""``oidc.PENDING_S``, after which the cookie is worth nothing."""


def make_blueprint(context: AppContext) -> Blueprint:
    """The routes of /login."""
    login = Blueprint("login", __name__, template_folder="templates")

    @login.get("/login")
    def form() -> Response:
        return _page(context, code=request.args.get("code", ""))

    @login.post("/login")
    def sign_in() -> Any:
        context.guard.check_origin(request, required=False)
        address = request.remote_addr or ""
        if "name" in request.form:
            name = request.form.get("name", "").strip().lower()
            try:
                principal = context.access.by_password(name, request.form.get("password", ""), address)
            except ApiError as exc:
                return _page(context, name=name, problem=exc.detail, fix=exc.fix, status=exc.status)
            how = "password"
        else:
            found = context.access.by_code(context.logins.spend(request.form.get("code", "")))
            if found is None:
                context.access.code_refused(address)
                return Response(USED, 403, mimetype="text/plain")
            principal, how = found, "one-time code"
        _begin_session(context, principal, how)
        return redirect("/", 303)

    if context.oidc is not None:
        _add_provider(login, context)
    return login


def _add_provider(login: Blueprint, context: AppContext) -> None:
    provider = context.oidc
    assert provider is not None
    cookie: Final = f"sla_oidc_{context.cookie_suffix}"
    kept: Final[dict[str, Any]] = {
        "path": OIDC_BEGIN,
        "secure": context.config.is_https,
        "httponly": True,
        "samesite": "Lax",
    }

    @login.get(OIDC_BEGIN)
    def go_to_provider() -> Any:
        try:
            address, pending = provider.begin()
        except ApiError as exc:
            return _page(context, problem=exc.detail, fix=exc.fix, status=exc.status)
        response = redirect(address, 303)
        response.headers.update({"Cache-Control": "no-store"})
        response.set_cookie(cookie, pending, max_age=COOKIE_S, **kept)
        return response

    @login.get(OIDC_CALLBACK)
    def come_back() -> Any:
        pending, answer = request.cookies.get(cookie, ""), request.args.to_dict()
        address = request.remote_addr or ""
        try:
            principal = context.access.by_provider(lambda: provider.finish(pending, answer), address)
        except ApiError as exc:
            response = _page(context, problem=exc.detail, fix=exc.fix, status=exc.status)
        else:
            _begin_session(context, principal, PROVIDER)
            text = render_template("signed_in.html", who=principal.who)
            response = Response(text, mimetype="text/html", headers=HEADERS)
        response.delete_cookie(cookie, **kept)
        return response


def _begin_session(context: AppContext, principal: Principal, how: str) -> None:
    address, browser = request.remote_addr or "", request.headers.get("User-Agent", "")
    secret = context.access.begin_session(principal, address, browser, how, within=principal.session)
    remember_session(secret)


def _page(context: AppContext, *, status: int = 200, **values: str) -> Response:
    values = {"code": "", "name": "", "problem": "", "fix": "", **values}
    title = context.config.oidc.title if context.oidc is not None else ""
    text = render_template("login.html", **values, provider=title, provider_path=OIDC_BEGIN)
    return Response(text, status, mimetype="text/html", headers=HEADERS)

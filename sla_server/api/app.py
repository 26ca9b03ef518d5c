"""The Flask app: table of routes, rights before the handlers, headers after them, every error as a problem.

Before each request the Host header is checked, and for each route whether who asks may (``Guard.admit``):
``g.principal`` is who it is, ``g.who`` their name in the audit log. What a server that stands by forwards is
decided by the acting one (``forwarding``). After each come security headers, ETag
and metrics. An ``ApiError`` keeps its status; a retryable error of another package (a database that does not
answer) becomes 503; any other error is logged with its traceback and answered with 500 without details.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, cast

import structlog
from flask import Flask, Response, g, request
from werkzeug.exceptions import HTTPException
from werkzeug.middleware.proxy_fix import ProxyFix

from pmdaemon.errors import SlaError
from pmdaemon.runtime import watchdog
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import ApiError, Unavailable
from sla_server.api.handlers import (
    access,
    approvals,
    backends,
    documents,
    gateways,
    live,
    nodes,
    notifications,
    policies,
    promises,
    read,
    records,
    reports,
    space,
    why,
    write,
)
from sla_server.api.route import ApiRoute
from sla_server.api.routes import ROUTES
from sla_server.api.security import HEADERS, session_key

log = structlog.get_logger("api")
Handler = Callable[..., Response]
TRANSIENT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)  # descriptors, memory, threads
STREAM: Final = "text/event-stream"
REQUEST_S: Final = 600.0  # the longest question to SQL, for which SQLite has no limit


def handler_of(route: ApiRoute) -> Handler:
    """The function that answers a route."""
    for module in (
        read,
        write,
        documents,
        live,
        why,
        notifications,
        policies,
        promises,
        records,
        reports,
        space,
        access,
        approvals,
        backends,
        gateways,
        nodes,
    ):
        found = vars(module).get(route.operation)
        if callable(found):
            return cast(Handler, found)
    # Only a mistake in the table comes here, and it is seen at the start.
    raise LookupError(f"no handler for {route.operation}")


class LocalProxy(ProxyFix):
    """Believes what the proxy on this machine adds; who comes from elsewhere says it of themselves."""

    def __call__(self, environ: Any, start_response: Any) -> Any:
        """See WSGI."""
        peer = environ.get("REMOTE_ADDR", "")
        if peer == "::1" or peer.startswith("127."):
            return super().__call__(environ, start_response)
        return self.app(environ, start_response)


def create_app(context: AppContext) -> Flask:
    """The app of the API; ``dashboard.create_app`` adds the page."""
    app = Flask("sla_server.api", static_folder=None)
    app.config.update(
        SECRET_KEY=session_key(context.token),
        SESSION_COOKIE_NAME=f"sla_session_{context.cookie_suffix}",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Strict",
        SESSION_COOKIE_SECURE=context.config.is_https,
        SESSION_REFRESH_EACH_REQUEST=False,  # it ends when it was to end
        PERMANENT_SESSION_LIFETIME=timedelta(hours=context.config.session_hours),
        MAX_CONTENT_LENGTH=context.config.max_body_bytes,
    )
    if context.config.external_url:  # one proxy, of the operator's: what it adds is believed
        app.wsgi_app = LocalProxy(app.wsgi_app, x_for=1, x_proto=1, x_host=0)  # type: ignore[method-assign]
    app.url_map.merge_slashes = False  # a path is what it says: 404, not a redirect
    app.json.sort_keys = False  # type: ignore[attr-defined]
    for route in ROUTES:
        app.add_url_rule(
            route.rule,
            route.operation,
            _make_view(route, context),
            methods=[route.method],
            provide_automatic_options=False,
        )
    _add_hooks(app, context)
    _handle_errors(app)
    return app


def _make_view(route: ApiRoute, context: AppContext) -> Callable[..., Response]:
    handler = handler_of(route)
    known = {query.name for query in route.query}

    def answer(**path: Any) -> Response:
        # What this server was asked for while it acted is known here alone.
        if context.forwarder is not None and not context.operations.knows(path.get("operation_id", "")):
            forwarded = context.forwarder.forward(request, route)
            if forwarded is not None:
                return forwarded
        responses.check_parameters(request, known)
        g.principal = context.guard.admit(request, route)
        g.who = g.principal.who if g.principal else ""
        g.scope = context.scopes.of(g.principal)
        if g.scope is None:
            return handler(context, request, **path)
        g.scope.check(route, path, request.args)
        response: Response = g.scope.filtered(route, handler(context, request, **path))
        return response

    return answer


def _add_hooks(app: Flask, context: AppContext) -> None:
    @app.before_request
    def _before() -> None:
        watchdog.beat(REQUEST_S)
        g.started_s = time.monotonic()
        context.guard.check_host(request)
        responses.check_text(request)

    @app.after_request
    def _after(response: Response) -> Response:
        response = responses.finish(request, response)
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        operation = request.endpoint or "none"
        context.metrics.requests.labels(operation, str(response.status_code)).inc()
        if response.mimetype != STREAM and "started_s" in g:
            context.metrics.seconds.observe(time.monotonic() - g.started_s)
        return response

    @app.teardown_request
    def _after_all(_error: BaseException | None) -> None:
        watchdog.rest()


def _handle_errors(app: Flask) -> None:
    @app.errorhandler(SlaError)
    def _known(error: SlaError) -> Response:
        if isinstance(error, ApiError):
            return responses.as_problem(error)
        if error.retryable:
            is_customer = bool((principal := g.get("principal")) and principal.labels)
            return responses.as_problem(Unavailable("it cannot be known now" if is_customer else str(error)))
        return _unforeseen(error)

    @app.errorhandler(HTTPException)
    def _http(error: HTTPException) -> Response:
        return responses.as_problem(responses.from_http(error))

    @app.errorhandler(OSError)
    def _system(error: OSError) -> Response:
        if error.errno not in TRANSIENT:
            return _unforeseen(error)
        log.warning("request-refused", path=request.path, error=error.strerror)
        return responses.as_problem(Unavailable(f"the server is short of something: {error.strerror}"))

    @app.errorhandler(Exception)
    def _unforeseen(error: Exception) -> Response:
        log.error("request-failed", path=request.path, exc_info=error)
        return responses.as_problem(
            ApiError("this is a fault of the server", "Its log has the details; please report it")
        )

"""Handlers of the live view, of operations and of the application server itself.

A live stream occupies one waitress thread for as long as the page is open, so there are places for
``live_streams_max`` of them and threads for all places and 16 more: however many pages are open, the API
answers. The stream writes at least every 5 s (a comment when nothing is new), so a browser that went away is
noticed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from flask import Request, Response, g
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from pmdaemon.errors import SlaError
from pmdaemon.runtime import strict_json
from pmdaemon.wire.messages.server import DAMAGED
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import TooManyStreams
from sla_server.api.live_view import LiveView, Newest, StreamPlace
from sla_server.api.openapi import document
from sla_server.api.roles import Principal
from sla_server.api.scope import AWAY

HEARTBEAT_S: Final = 5.0
SILENT: Final = "no live snapshot lately"


def live(context: AppContext, request: Request) -> Response:
    """The newest snapshot, or 204 when the caller has it."""
    newest = context.live.newest()
    since_us = responses.number(request, "since", -1, least=-1)
    if newest.number and newest.snapshot["at_us"] == since_us:
        return Response(status=204)
    unreadable = _read_problem(context) if context.live.is_stale() else ""
    return responses.as_json({**newest.snapshot, "server": feed_state(context, unreadable)})


def feed_state(context: AppContext, unreadable: str = "") -> dict[str, Any]:
    """What every answer with live values says of them.

    ``age_s`` of the newest snapshot, null before the first; ``stale``: it is old, so what is so now is not
    known; ``database``: why it cannot be used, "" if it can. Of one of several servers also ``acting`` and
    ``stands_by``, see ``ActingServer.described``.

    Args:
        context: of the application.
        unreadable: why the database cannot be read; while services are silent (they wait for it at their
            start) no other process reports that.
    """
    stale = context.live.is_stale()
    reported = _write_problem(context) if stale else context.live.newest().snapshot["database"]
    state = {"age_s": context.live.age_s(), "stale": stale, "database": unreadable or reported}
    return state if g.scope is not None else {**state, **(context.acting.described() or {})}


def trend(context: AppContext, _request: Request) -> Response:
    """Columns of the last 15 minutes."""
    return responses.as_json(context.live.trend())


def stream(context: AppContext, request: Request) -> Response:
    """Server-sent events."""
    try:
        place = context.live.take_place()
    except TooManyStreams:
        context.metrics.streams_refused.inc()
        raise
    principal = g.principal
    shown: Callable[[Newest], str] = _whole
    if g.scope is not None:
        shown = partial(_scoped, context, principal)
    events = EventStream(context.live, place, _still_admitted(context, request), shown)
    response = Response(events, mimetype="text/event-stream", headers={"Cache-Control": "no-store"})
    response.call_on_close(place.release)  # also when the browser left before the first event
    return response


def _whole(newest: Newest) -> str:
    return newest.json_text


def _scoped(context: AppContext, principal: Principal, newest: Newest) -> str:
    """What an account with labels sees of a snapshot, by the agreements in force now; "": not known now."""
    try:
        scope = context.scopes.of(principal)
    except SlaError:
        return ""
    return "" if scope is None else strict_json.dumps(scope.live(newest.snapshot))


def _still_admitted(context: AppContext, request: Request) -> Callable[[], bool]:
    """Whether session or API token of this request are as they were; asked after the request, too."""
    principal, directory = g.principal, context.access.directory
    if principal is not None and principal.token_id:
        token = request.headers.get("Authorization", "").partition(" ")[2].strip()
        return lambda: directory.by_token(token) == principal
    if principal is not None and principal.session:
        return lambda: directory.by_session_id(principal.session) == principal
    return lambda: True


class EventStream:
    """Iterates over the text of one live stream; ends when the live view closes, or its session or token."""

    def __init__(
        self,
        view: LiveView,
        place: StreamPlace,
        may_go_on: Callable[[], bool] = lambda: True,
        shown: Callable[[Newest], str] = _whole,
    ) -> None:
        """``shown``: the text of a snapshot for who asks; "" ends the stream."""
        self._may_go_on = may_go_on
        self._shown = shown
        self._view = view
        self._place = place
        self._number = 0
        self._opened = False

    def __iter__(self) -> Iterator[str]:
        """See the iterator protocol."""
        return self

    def __next__(self) -> str:
        """The next event, or a comment after ``HEARTBEAT_S`` without one."""
        if not self._opened:
            self._opened = True
            newest = self._view.newest()
            return "retry: 2000\n\n" + (self._event(newest) if newest.number else ": no snapshot yet\n\n")
        newer = self._view.wait_newer(self._number, HEARTBEAT_S)
        if not self._may_go_on():
            raise StopIteration
        if newer is not None:
            return self._event(newer)
        if self._view.closed:
            raise StopIteration
        return ": nothing new\n\n"

    def _event(self, newest: Newest) -> str:
        self._number = newest.number
        shown = self._shown(newest)
        if not shown:
            raise StopIteration
        return f"event: snapshot\nid: {newest.snapshot['at_us']}\ndata: {shown}\n\n"

    def close(self) -> None:
        """Called by the server however the stream ends."""
        self._place.release()


def mode(context: AppContext, _request: Request) -> Response:
    """From the newest snapshot; null before the first."""
    return responses.as_json(
        {
            "mode": context.live.newest().snapshot["mode"],
            "backends": context.live.newest().snapshot.get("backend_modes", {}),
            "policy": _stage_of(context),
            "stale": context.live.is_stale(),
        }
    )


def _stage_of(context: AppContext) -> dict[str, Any]:
    stage = context.live.newest().snapshot.get("policy_stage") or {}
    return {"mode": stage.get("stage"), "backends": stage.get("stages", {})}


def operation(context: AppContext, _request: Request, operation_id: str) -> Response:
    """State and outcome of a change."""
    return responses.as_json(responses.without_person(context.operations.find(operation_id).describe()))


def health(context: AppContext, _request: Request) -> Response:
    """The state of the whole server.

    200 ``ok``; 200 ``degraded``: something is in trouble, but nothing is lost and everything is answered; 503
    ``down``: the database cannot be read or is damaged, or ``services``, and with it control, is silent.
    """
    database = _read_problem(context)
    stale = context.live.is_stale()
    problems = problems_now(context, database)
    is_damaged = any(row["what"] == DAMAGED for row in problems)
    answer: dict[str, Any] = {
        "status": "down" if database or stale or is_damaged else "degraded" if problems else "ok",
        "database": database or "ok",
        "services": _silence(context) if stale else "ok",
        "problems": problems,
        "snapshot_age_s": context.live.age_s(),
        "fullness": _fullness(context),
        "version": version("storage-sla-server"),
        **(context.acting.described() or {}),
    }
    return responses.as_json(answer, 503 if answer["status"] == "down" else 200)


def alive(_context: AppContext, _request: Request) -> Response:
    """For those who restart a process that hangs: it answers, so it does not."""
    return responses.as_json({"alive": True})


def ready(context: AppContext, _request: Request) -> Response:
    """For those who send requests: 200 while everything is answered and promises are watched, else 503.

    Trouble that leaves both alone is in ``health``; a server that is ready may be degraded.
    """
    waits_for = []
    if problem := _read_problem(context):
        if g.scope is not None or (g.principal is None and context.config.reading == "login"):
            problem = AWAY
        waits_for.append({"process": "database", "reason": problem})
    if context.live.is_stale():
        waits_for.append({"process": "services", "reason": _silence(context)})
    body = {"ready": not waits_for, "waits_for": waits_for}
    return responses.as_json(body, 503, {"Retry-After": "2"}) if waits_for else responses.as_json(body)


def problems_now(context: AppContext, database: str) -> list[dict[str, Any]]:
    """Problems seen by this process, and those reported to ``services`` while its snapshot is fresh."""
    seen_here = []
    if database:
        seen_here.append({"process": "appserver", "what": "database", "since_us": None, "reason": database})
    if not context.live.is_stale():
        return [*seen_here, *context.live.newest().snapshot["problems"]]
    age_s = context.live.age_s()
    since_us = None if age_s is None else context.clock.unix_us() - round(age_s * 1e6)
    silent = {"process": "services", "what": "services", "since_us": since_us, "reason": _silence(context)}
    return [*seen_here, silent, *context.live.reported_problems()]


def _silence(context: AppContext) -> str:
    """Why there are no live values."""
    return context.acting.why_not_here() or SILENT


def _read_problem(context: AppContext) -> str:
    """Why the database cannot be read; "" if it can."""
    try:
        context.source.processes()
    except SlaError as exc:
        return str(exc)
    return ""


def _write_problem(context: AppContext) -> str:
    """Why dbmanager cannot write to the database; "" if it can, or says nothing."""
    rows = context.live.reported_problems()
    return next((str(row["reason"]) for row in rows if row["what"] in ("database", DAMAGED)), "")


def _fullness(context: AppContext) -> dict[str, float]:
    """``process/queue`` -> the share in use, for all queues and mailboxes that the data pass."""
    found: dict[str, float] = {}
    for process in context.live.newest().snapshot.get("processes", []):
        for queue, ratio in ((process.get("pressure") or {}).get("fullness") or {}).items():
            found[f"{process['name']}/{queue}"] = ratio
    return found


def metrics(context: AppContext, _request: Request) -> Response:
    """Prometheus text."""
    return Response(context.metrics.text(), content_type=CONTENT_TYPE_PLAIN_0_0_4)


def openapi(_parts: AppContext, _request: Request) -> Response:
    """The OpenAPI document."""
    return Response(json.dumps(document(), indent=1) + "\n", mimetype="application/json")

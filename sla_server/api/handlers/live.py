"""Handlers of the live view, of operations and of this part itself.

A live stream occupies one waitress thread for as long as the page is open, so there are places for
``live_streams_max`` of them and threads for all places and 16 more: however many pages are open, the API
answers. The stream writes at least every 5 s (a comment when nothing is new), so a browser that went away is
noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Final

from flask import Request, Response

from pmdaemon.errors import SlaError
from pmdaemon.wire.messages.server import DAMAGED
from sla_server.api import responses
from sla_server.api.context import AppContext
from sla_server.api.errors import TooManyStreams
from sla_server.api.live_view import LiveView, Newest, StreamPlace
from sla_server.api.openapi import document
from sla_server.api.security import session_name

HEARTBEAT_S: Final = 5.0
SILENT: Final = "no live snapshot lately"


def live(parts: AppContext, request: Request) -> Response:
    """The newest snapshot, or 204 when the caller has it."""
    newest = parts.live.newest()
    since_us = responses.number(request, "since", -1, least=-1)
    if newest.number and newest.snapshot["at_us"] == since_us:
        return Response(status=204)
    stale = parts.live.is_stale()
    # While services are silent (they wait for the database at their start) nobody else would say so.
    database = _database(parts) or _keepers_database(parts) if stale else newest.snapshot["database"]
    server = {"age_s": parts.live.age_s(), "stale": stale, "database": database}
    return responses.as_json({**newest.snapshot, "server": server})


def trend(parts: AppContext, _request: Request) -> Response:
    """Columns of the last 15 minutes."""
    return responses.as_json(parts.live.trend())


def stream(parts: AppContext, _request: Request) -> Response:
    """Server-sent events."""
    try:
        place = parts.live.take_place()
    except TooManyStreams:
        parts.meters.streams_refused.inc()
        raise
    events = EventStream(parts.live, place)
    response = Response(events, mimetype="text/event-stream", headers={"Cache-Control": "no-store"})
    response.call_on_close(place.release)  # also when the browser left before the first event
    return response


class EventStream:
    """Iterates over the text of one live stream; ends when the live view closes."""

    def __init__(self, view: LiveView, place: StreamPlace) -> None:
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
        if newer is not None:
            return self._event(newer)
        if self._view.closed:
            raise StopIteration
        return ": nothing new\n\n"

    def _event(self, newest: Newest) -> str:
        self._number = newest.number
        return f"event: snapshot\nid: {newest.snapshot['at_us']}\ndata: {newest.json_text}\n\n"

    def close(self) -> None:
        """Called by the server however the stream ends."""
        self._place.release()


def mode(parts: AppContext, _request: Request) -> Response:
    """From the newest snapshot; null while ``services`` has not spoken."""
    return responses.as_json({"mode": parts.live.newest().snapshot["mode"], "stale": parts.live.is_stale()})


def operation(parts: AppContext, _request: Request, operation_id: str) -> Response:
    """How a change went."""
    return responses.as_json(parts.calls.find(operation_id).describe())


def health(parts: AppContext, _request: Request) -> Response:
    """How the whole server is.

    200 ``ok``; 200 ``degraded``: something is in trouble, but nothing is lost and everything is answered; 503
    ``down``: the database cannot be read or is damaged, or ``services``, and with it control, is silent.
    """
    database = _database(parts)
    stale = parts.live.is_stale()
    problems = problems_now(parts, database)
    is_damaged = any(row["what"] == DAMAGED for row in problems)
    told: dict[str, Any] = {
        "status": "down" if database or stale or is_damaged else "degraded" if problems else "ok",
        "database": database or "ok",
        "services": SILENT if stale else "ok",
        "problems": problems,
        "snapshot_age_s": parts.live.age_s(),
        "fullness": _fullness(parts),
        "version": version("storage-sla-server"),
    }
    return responses.as_json(told, 503 if told["status"] == "down" else 200)


def problems_now(parts: AppContext, database: str) -> list[dict[str, Any]]:
    """What this part sees itself, and what ``services`` was told by the others, while its word is fresh."""
    mine = []
    if database:
        mine.append({"process": "appserver", "what": "database", "since_us": None, "reason": database})
    if not parts.live.is_stale():
        return [*mine, *parts.live.newest().snapshot["problems"]]
    age_s = parts.live.age_s()
    since_us = None if age_s is None else parts.clock.unix_us() - round(age_s * 1e6)
    silent = {"process": "services", "what": "services", "since_us": since_us, "reason": SILENT}
    return [*mine, silent, *parts.live.reported_problems()]


def _database(parts: AppContext) -> str:
    """Why the database cannot be read; "" if it can."""
    try:
        parts.source.processes()
    except SlaError as exc:
        return str(exc)
    return ""


def _keepers_database(parts: AppContext) -> str:
    """Why dbmanager cannot write to the database; "" if it can, or says nothing."""
    rows = parts.live.reported_problems()
    return next((str(row["reason"]) for row in rows if row["what"] in ("database", DAMAGED)), "")


def _fullness(parts: AppContext) -> dict[str, float]:
    """``process/way`` to the share in use, of all queues and mailboxes on the way of the data."""
    found: dict[str, float] = {}
    for process in parts.live.newest().snapshot.get("processes", []):
        for way, ratio in ((process.get("pressure") or {}).get("fullness") or {}).items():
            found[f"{process['name']}/{way}"] = ratio
    return found


def session_state(_parts: AppContext, _request: Request) -> Response:
    """Whether this browser is signed in."""
    return responses.as_json({"signed_in": session_name() is not None})


def metrics(parts: AppContext, _request: Request) -> Response:
    """Prometheus text."""
    return Response(parts.meters.text(), mimetype="text/plain")


def openapi(_parts: AppContext, _request: Request) -> Response:
    """The OpenAPI document."""
    return Response(json.dumps(document(), indent=1) + "\n", mimetype="application/json")

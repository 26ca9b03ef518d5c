"""Parameters in, JSON out: shared by all handlers.

Lists are ``{"items": [...], "next": CURSOR or null}``. Every JSON answer to a GET carries an ETag of its
bytes; a request with the same one in If-None-Match is answered 304 without a body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeVar

from flask import Request, Response
from pydantic import BaseModel, ValidationError
from werkzeug.exceptions import HTTPException, MethodNotAllowed

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.config import plain_problem
from pmdaemon.runtime.excerpt import excerpt
from sla_server.agreements.limits import CALL_BYTES, MAX_DOCUMENTS
from sla_server.api.errors import ApiError, BadInput, TooLarge
from sla_server.api.route import LIMIT_MAX
from sla_server.api.routes import LONG_LIMIT_MAX, MAX_US

Model = TypeVar("Model", bound=BaseModel)
LIMIT_DEFAULT: Final = 100
LONG_LIMIT_DEFAULT: Final = 2000  # a day of slices of a minute is one page
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,20}")
_CURSOR: Final = re.compile(r"[0-9]{1,18}:.+", re.DOTALL)


def as_json(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer; times and counts stay integers."""
    text = strict_json.dumps(body, default=str)
    return Response(text + "\n", status=status, mimetype="application/json", headers=dict(headers or {}))


def without_person(value: Any) -> Any:
    """The same without the person who asked for a change, at any depth: an address at a provider."""
    if isinstance(value, dict):
        return {name: without_person(one) for name, one in value.items() if name != "requested_as"}
    return [without_person(one) for one in value] if isinstance(value, list) else value


def as_list(rows: Sequence[Any], next_cursor: str | None = None, **more: Any) -> Response:
    """A page of a list."""
    return as_json({"items": rows, "next": next_cursor, **more})


def as_problem(error: ApiError) -> Response:
    """An error as ``application/problem+json``."""
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    if error.allow:
        headers["Allow"] = ", ".join(sorted(error.allow))
    if error.status == 401:
        headers["WWW-Authenticate"] = 'Bearer realm="storage-sla"'
    response = as_json(error.problem(), error.status, headers)
    response.mimetype = "application/problem+json"
    return response


def from_http(error: HTTPException) -> ApiError:
    """Flask's refusals (no such path, wrong method, body too large) as an ``ApiError``."""
    refusal = ApiError(
        str(error.description or error.name).rstrip("."), "See /api/v1/openapi.json for what exists"
    )
    refusal.status = error.code or 500
    refusal.title = error.name
    refusal.slug = error.name.lower().replace(" ", "-")
    if isinstance(error, MethodNotAllowed):
        refusal.allow = tuple(error.valid_methods or ())
    return refusal


def finish(request: Request, response: Response) -> Response:
    """ETag and 304 for a whole JSON answer to a GET; never for streams."""
    if request.method == "GET" and response.status_code == 200 and response.mimetype == "application/json":
        response.add_etag()
        response.make_conditional(request)
        response.headers.setdefault("Cache-Control", "no-cache")
    return response


def number(request: Request, name: str, default: int, *, least: int = 0, most: int = MAX_US) -> int:
    """An integer of the query.

    Raises:
        BadInput: not an integer, or out of range.
    """
    text = request.args.get(name, "")
    if not text:
        return default
    if not _INTEGER.fullmatch(text):  # int() would also take "1_0", " 1" and digits of other scripts
        raise BadInput(name, f"{text[:40]!r} is not an integer")
    value = int(text)
    if not least <= value <= most:
        raise BadInput(name, f"{value} is not within {least} to {most}")
    return value


def check_text(request: Request) -> None:
    """No NUL in path or query: names have none, and PostgreSQL refuses text with one.

    Raises:
        BadInput: names the parameter.
    """
    if "\0" in request.path:
        raise BadInput("path", "holds a NUL character")
    for name, value in request.args.items():
        if "\0" in value:
            raise BadInput(name, "holds a NUL character")


def check_parameters(request: Request, known: Collection[str]) -> None:
    """Every parameter is one of ``known``, once, and has a value: a filter that is ignored answers wrongly.

    Raises:
        BadInput: names the first that is not.
    """
    for name, value in request.args.items():
        if name not in known:
            fix = f"Use {', '.join(sorted(known))}" if known else "Leave it out: there are no parameters here"
            raise BadInput(name[:40], "there is no such parameter", fix)
        if not value:
            raise BadInput(name, "has no value", "Give one, or leave the parameter out")
        if (count := len(request.args.getlist(name))) > 1:
            fix = "Give it once; lists take several values with commas between"
            raise BadInput(name, f"is given {count} times, and one alone would count", fix)


def cursor(request: Request) -> str | None:
    """Where a page of events or audit begins, as the page before said it; None for the first.

    Raises:
        BadInput: not such a cursor.
    """
    text = request.args.get("before", "")
    if text and not _CURSOR.fullmatch(text):
        raise BadInput("before", f"{text!r} is no cursor", "Use the `next` of the page before")
    return text or None


def limit(request: Request) -> int:
    """How many rows a page may hold."""
    return number(request, "limit", LIMIT_DEFAULT, least=1, most=LIMIT_MAX)


def long_limit(request: Request) -> int:
    """The same for lists of many short rows."""
    return number(request, "limit", LONG_LIMIT_DEFAULT, least=1, most=LONG_LIMIT_MAX)


def flag(request: Request, name: str) -> bool:
    """A yes-or-no of the query: 1 or true, 0 or false or absent.

    Raises:
        BadInput: anything else.
    """
    text = request.args.get(name, "").lower()
    if text not in ("", "0", "1", "true", "false"):
        raise BadInput(name, f"{text!r} is neither 1 nor 0")
    return text in ("1", "true")


def json_body(request: Request) -> dict[str, Any]:
    """The body, a JSON object.

    Raises:
        BadInput: anything else.
    """
    try:
        body = json.loads(request.get_data(as_text=True))
        json.dumps(body, ensure_ascii=False).encode()  # half a surrogate pair is JSON, but no text
    except (ValueError, RecursionError) as exc:
        raise BadInput("body", f"is not JSON ({exc})") from exc
    if not isinstance(body, dict):
        raise BadInput("body", "is not a JSON object")
    return body


def yaml_body(request: Request) -> str:
    """The body, YAML documents of one call.

    Raises:
        BadInput: no text, or nothing.
        TooLarge: more than one call takes.
    """
    try:
        documents = request.get_data().decode()
    except UnicodeDecodeError as exc:
        raise BadInput("body", "is not UTF-8 text") from exc
    if not documents.strip():
        raise BadInput("body", "is empty", "Send agreement documents in YAML")
    if (size := len(documents.encode())) > CALL_BYTES:
        raise TooLarge(
            f"body: {size} bytes of documents, one call takes {CALL_BYTES}",
            f"Split it between documents, {MAX_DOCUMENTS} a call at most; 'sla apply -f FILE' does so itself",
        )
    return documents


def parse_body(model: type[Model], members: Mapping[str, Any]) -> Model:
    """The members of a body, checked by its model.

    Raises:
        BadInput: names the first member that is wrong, and its value where it is short.
    """
    try:
        return model.model_validate(members)
    except ValidationError as exc:
        first = exc.errors()[0]
    name = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "missing":
        problem = "is required"
    else:
        problem = plain_problem(first)
        if not isinstance(first["input"], Mapping):
            problem += f" (value: {excerpt(first['input'])})"
    raise BadInput(name, problem, "GET /api/v1/openapi.json shows what the body holds")

"""The REST interface: whatever a client sends to any route of openapi.json.

A case is one request, made from the document's own parameters and bodies, in which some are missing, of other
types, out of range, doubled, or joined by strangers. The oracle:

* no answer is a fault of the server (500), and 503 only with Retry-After;
* a status below 400 is one that the document lists for this operation;
* a refusal is a problem document that repeats its status and says what is wrong;
* JSON is JSON (no NaN), and a change without token or session reaches no other part.
"""

from __future__ import annotations

import json
import logging
import time
from random import Random
from typing import Any, Final
from urllib.parse import quote, urlencode

from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.stop import Stop
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.api.openapi import SCHEMAS, document
from tests.fuzz import Counts
from tests.support import api
from tests.support.agreements import FULL

ODD_TEXT: Final = (
    "", "0", "-1", "1", "1000", "1001", "5000", "9" * 30, "1e5", "1_0", " 1", "٣", "nan", "true", "null",
    "erp-gold", "erp-db", "../x", "%00", "\0", "a/b", "é", "\ud800", "x" * 3000, "<script>", "'; --", "1:e1",
    "batch:0", "127.0.0.1:7412", "[::1]:80", "latency", "[]", "{}",
)  # fmt: skip
ODD_VALUES: Final = (
    None, True, False, 0, -1, 1, 2.5, 1e308, float("inf"), float("nan"), 10**400, "", "x", "erp-db", [], {},
    [[]], "observe", "enforce", "x" * 300, "\ud800", {"a": 1},
)  # fmt: skip
METHODS: Final = ("GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "NONSENSE")


class Target:
    """The application over fakes; services answer, refuse or stay silent."""

    def __init__(self) -> None:
        self.mailbox = api.AnsweringMailbox()
        context = api.make_context(self.mailbox, request_wait_s=0.001, max_body_bytes=20_000)
        self.mailbox.thread = MailboxThread(self.mailbox, context.live, context.operations, Stop())
        context.live.put(api.snapshot())
        self.web: FlaskClient = dashboard.create_app(context).test_client()
        paths: dict[str, Any] = document()["paths"]
        self.operations = [
            (path, method.upper(), told) for path, item in paths.items() for method, told in item.items()
        ]

    def case(self, random: Random) -> bool:
        """One request and its oracle; whether it was refused."""
        path, method, told = random.choice(self.operations)
        where = path
        for parameter in told["parameters"]:
            if parameter["in"] == "path":
                where = where.replace("{" + parameter["name"] + "}", quote(_text(random), safe=""))
        asked = random.choice(METHODS) if random.random() < 0.05 else method
        query = _query(random, told)
        headers = _headers(random)
        body = _body(random, told)
        self.mailbox.posted.clear()
        self.mailbox.awake()
        self.mailbox.answer = _services(random)
        url = f"{where}?{query}" if query else where
        sent = f"{asked} {url[:200]!r} {headers} {body[:200]!r}"
        answer = self.web.open(
            url, method=asked, headers=headers, data=body, base_url="http://127.0.0.1:8411", buffered=False
        )
        try:
            self._check(sent, told if asked == method else None, answer)
            if headers.get("Authorization") != f"Bearer {api.TOKEN}":
                assert not self.mailbox.posted, f"{sent}: a change without token was passed on"
        finally:
            answer.close()
        return bool(answer.status_code >= 400)

    def _check(self, sent: str, told: dict[str, Any] | None, answer: Any) -> None:
        status, listed = answer.status_code, set() if told is None else set(told["responses"])
        assert status < 500 or (status == 503 and answer.headers.get("Retry-After")), f"{sent}: {status}"
        if status < 400:
            assert told is None or str(status) in listed, f"{sent}: {status} is not among {sorted(listed)}"
            assert status != 202 or answer.headers["Location"], f"{sent}: 202 without Location"
            if answer.mimetype == "application/json" and answer.data:
                json.loads(answer.data, parse_constant=_no_number)
            return
        if answer.request.method == "HEAD":
            return
        assert answer.mimetype == "application/problem+json", f"{sent}: {status} {answer.mimetype}"
        problem = json.loads(answer.data, parse_constant=_no_number)
        assert problem["status"] == status, f"{sent}: {problem}"
        assert problem["detail"], f"{sent}: {problem}"
        assert status != 405 or answer.headers["Allow"], f"{sent}: 405 without Allow"


def run(seconds: float, seed: int) -> Counts:
    """See the package."""
    logging.getLogger("waitress").setLevel(logging.CRITICAL)
    return cases(seed, end_s=time.monotonic() + seconds)


def cases(seed: int, *, end_s: float = 0.0, count: int | None = None) -> Counts:
    """Either ``count`` cases, or those that fit until ``end_s`` (monotonic)."""
    target = Target()
    made = refused = 0
    try:
        while made < count if count is not None else time.monotonic() < end_s:
            random = Random(f"{seed}/{made}")
            try:
                refused += target.case(random)
            except AssertionError as exc:
                raise AssertionError(f"seed {seed} case {made}: {exc}") from exc
            except Exception as exc:
                raise AssertionError(f"seed {seed} case {made}: {type(exc).__name__}: {exc}") from exc
            made += 1
    finally:
        target.mailbox.close()
    return Counts(made, refused)


def _no_number(text: str) -> None:
    raise AssertionError(f"{text} is not JSON")


def _text(random: Random) -> str:
    if random.random() < 0.3:
        return "".join(chr(random.randrange(1, 0x2FF)) for _ in range(random.randrange(1, 20)))
    return random.choice(ODD_TEXT).encode("utf-8", "replace").decode() or "x"


def _query(random: Random, told: dict[str, Any]) -> str:
    pairs: list[tuple[str, str]] = []
    for parameter in told["parameters"]:
        if parameter["in"] == "query" and random.random() < 0.6:
            schema = parameter["schema"]
            right = str(random.randint(schema.get("minimum", 0), min(schema.get("maximum", 99), 1 << 40)))
            value = right if random.random() < 0.5 and schema["type"] == "integer" else _text(random)
            pairs += [(parameter["name"], value)] * random.choice((1, 1, 1, 2))
    if random.random() < 0.1:
        pairs.append((_text(random), _text(random)))
    return urlencode(pairs, errors="replace")


def _headers(random: Random) -> dict[str, str]:
    headers = {}
    if random.random() < 0.8:
        headers["Authorization"] = f"Bearer {api.TOKEN}"
    elif random.random() < 0.5:
        headers["Authorization"] = random.choice(("Bearer", "Basic x", "Bearer \xe9", "x" * 2000))
    for name, values in (
        ("If-None-Match", ('"x"', "*", "garbage", 'W/"')),
        ("Content-Type", ("application/json", "text/plain", "multipart/form-data", "x")),
        ("Origin", ("http://127.0.0.1:8411", "null", "http://evil.example")),
        ("Cookie", ("sla_session_8411=x", "sla_session_8411=eyJhIjoxfQ.x.y", "=;=")),
        ("Sla-User", ("ann", "\xe9", "x" * 500)),
    ):
        if random.random() < 0.15:
            headers[name] = random.choice(values)
    return headers


def _body(random: Random, told: dict[str, Any]) -> bytes:
    if "requestBody" not in told:
        return b"" if random.random() < 0.9 else random.randbytes(20)
    how = random.random()
    if how < 0.1:
        return random.randbytes(random.randrange(200))
    if how < 0.15:
        return random.choice((b"", b"[" * 5000, b"{", b"[]", b"7", b'"x"', b"\xff", b"x" * 30_000))
    [(kind, content)] = told["requestBody"]["content"].items()
    if kind != "application/json":
        return FULL.encode()
    schema = SCHEMAS[content["schema"]["$ref"].rpartition("/")[2]]
    right = {"volume": "erp-db", "iops": 5, "reason": "why", "mode": "observe", "name": "host-1"}
    body = {name: right[name] for name in schema["properties"] if name in right}
    for name in (*schema["properties"], "stranger"):
        if random.random() < 0.2:
            body[name] = random.choice(ODD_VALUES)
        elif random.random() < 0.1:
            body.pop(name, None)
    return json.dumps(body).encode()


def _services(random: Random) -> Any:
    how = random.random()
    if how < 0.05:
        return None
    if how < 0.2:
        body = random.choice(({}, {"detail": "no"}, {"errors": [{"line": 1, "problem": "p"}]}, {"errors": 7}))
        return lambda _header: (False, random.choice((400, 404, 409, 422)), body)
    return lambda _header: (True, 200, {"done": 1})

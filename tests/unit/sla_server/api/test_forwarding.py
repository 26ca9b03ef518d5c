"""What a server that stands by forwards, and that the acting one decides who asks and what they may."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from flask.testing import FlaskClient
from werkzeug.test import TestResponse

import dashboard
from pmdaemon.runtime import sockets
from pmdaemon.runtime.clock import FakeClock, boot_ns
from pmdaemon.runtime.stop import Stop
from sla_server.api import forwarding
from sla_server.api.access import Access
from sla_server.api.accounts import digest_of, new_token
from sla_server.api.acting import ActingServer
from sla_server.api.context import AppContext
from sla_server.api.forwarding import AT_ONCE, AT_ONCE_LOCAL, HERE, LIVE, MARK, RequestForwarder
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.api.operations import Operations
from sla_server.api.routes import ROUTES
from sla_server.api.security import PEER_UID, Guard
from sla_server.lease_file import LeaseState
from tests.support import api
from tests.support.agreements import FULL

N1, N2 = "http://127.0.0.1:8411", "https://sla-2.example.org:8411"
OTHER_TOKEN = "u" * 43
THROTTLE = {"volume": "erp-db", "iops": 100, "reason": "backup"}
N2_ACTS = "the server of node n2 acts, this one (node n1) stands by"


def _acts(folder: Path, node: str, holder: str, page: str = N2) -> None:
    """What ``node`` knows of the lease."""
    until_ns = boot_ns() + 3_600 * 10**9 if node == holder else 0
    LeaseState(node, holder, 7, until_ns, 6.0, boot_ns(), page).write(folder)


class Wire(httpx.BaseTransport):
    """Between the servers; counts what passes, or does something else with it."""

    def __init__(self, app: Any) -> None:
        self._inner = httpx.WSGITransport(app)
        self.seen: list[httpx.Request] = []
        self.instead: Callable[[httpx.Request], httpx.Response] | None = None

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return self.instead(request) if self.instead else self._inner.handle_request(request)


@dataclass
class Pair:
    """Servers n1 and n2 over one database; n2 acts."""

    folder: Path
    source: api.FakeSource
    mailbox: api.AnsweringMailbox
    """Of n2's services."""
    contexts: dict[str, AppContext]
    wire: Wire
    tokens: dict[str, str] = field(default_factory=dict)

    def ask(self, node: str, method: str, path: str, token: str | None = None, **how: Any) -> TestResponse:
        """A request to one of them."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        headers |= how.pop("headers", {})
        client = dashboard.create_app(self.contexts[node]).test_client()
        where = N1 if node == "n1" else N2
        return client.open(f"/api/v1{path}", method=method, headers=headers, base_url=where, **how)


def _context(
    folder: Path, source: api.FakeSource, mailbox: api.AnsweringMailbox, token: str, **config: Any
) -> AppContext:
    context, clock = api.make_context(mailbox, FakeClock(), source, **config), FakeClock()
    folder.mkdir()
    acting = ActingServer(folder, clock)
    operations = Operations(
        lambda message: mailbox.post("services", message), clock, wait_s=0.01, check=acting.check
    )
    is_login = context.config.reading == "login"
    directory = context.access.directory
    guard = Guard(token, context.config.hosts(), directory, needs_login=is_login)
    access = Access(directory, operations, clock, config=context.config, passwords=api.QUICK_PASSWORDS)
    changed = {"guard": guard, "operations": operations, "access": access, "acting": acting}
    return replace(context, token=token, **changed)


def _make_pair(tmp_path: Path, source: api.FakeSource, mailbox: api.AnsweringMailbox, **config: Any) -> Pair:
    tokens = {}
    for role in ("viewer", "operator"):
        tokens[role] = new_token()
        source.access.rows["api_tokens"][role] = api.api_token(
            token_id=role, name=role, digest=digest_of(tokens[role]), role=role, created_by="nobody"
        )
    own = api.AnsweringMailbox(answer=mailbox.answer)
    contexts = {
        "n1": _context(tmp_path / "n1", source, own, OTHER_TOKEN, **config),
        "n2": _context(
            tmp_path / "n2", source, mailbox, api.TOKEN, allowed_hosts=["sla-2.example.org"], **config
        ),
    }
    _acts(tmp_path / "n1", "n1", "n2")
    _acts(tmp_path / "n2", "n2", "n2")
    wire = Wire(dashboard.create_app(contexts["n2"]))
    first = contexts["n1"]
    forwarder = RequestForwarder(first.acting, first.guard, first.token, 0.01, wire)
    contexts["n1"] = replace(first, forwarder=forwarder)
    return Pair(tmp_path, source, mailbox, contexts, wire, tokens)


@pytest.fixture
def pair(tmp_path: Path, source: api.FakeSource, mailbox: api.AnsweringMailbox) -> Pair:
    made = _make_pair(tmp_path, source, mailbox)
    second = made.contexts["n2"]
    mailbox.thread = MailboxThread(mailbox, second.live, second.operations, Stop())
    return made


def _said(answer: TestResponse) -> tuple[int, Any, str | None]:
    return answer.status_code, answer.json, answer.headers.get("WWW-Authenticate")


CHANGES = (
    ("POST", "/slas?dry_run=1", {"data": FULL}),
    ("POST", "/throttles", {"json": THROTTLE}),
    ("PUT", "/mode", {"json": {"mode": "observe"}}),
    ("DELETE", "/silences/disk%20swap", {}),
    ("DELETE", "/maintenance/move", {}),
    ("POST", "/policies/rollback", {"json": {}}),
)


@pytest.mark.parametrize(("method", "path", "how"), CHANGES)
def test_a_change_is_made_by_the_acting_server_whichever_is_asked(
    pair: Pair, method: str, path: str, how: dict[str, Any]
) -> None:
    answers = [pair.ask(node, method, path, pair.tokens["operator"], **how) for node in ("n2", "n1")]
    assert _said(answers[0]) == _said(answers[1])
    assert answers[1].status_code == 200
    posted = [(one["op"], one["who"], one["body"]) for one in pair.mailbox.posted]
    assert len(posted) == 2
    assert posted[0] == posted[1]
    assert posted[0][1] == "token operator"


def test_the_acting_server_gets_the_token_and_the_mark_and_nothing_else_of_who_asks(pair: Pair) -> None:
    headers = {"Cookie": "sla_session_8411=x", "X-Forwarded-For": "192.0.2.7", "Sla-User": "ann"}
    pair.ask("n1", "PUT", "/mode", pair.tokens["operator"], headers=headers, json={"mode": "observe"})
    (request,) = pair.wire.seen
    assert request.headers["Authorization"] == f"Bearer {pair.tokens['operator']}"
    assert (request.headers[MARK], request.headers["Sla-User"]) == ("n1", "ann")
    assert not {"cookie", "x-forwarded-for", "origin"} & set(request.headers)
    assert str(request.url) == f"{N2}/api/v1/mode"


@pytest.mark.parametrize("token", ["sla_nobody-knows-it", "x", "", OTHER_TOKEN[:-1]])
def test_a_wrong_token_is_refused_as_at_the_acting_server(pair: Pair, token: str) -> None:
    for method, path, how in (*CHANGES, ("GET", "/live", {}), ("GET", "/slas", {})):
        direct, forwarded = (pair.ask(node, method, path, token, **how) for node in ("n2", "n1"))
        assert _said(direct) == _said(forwarded)
        assert forwarded.status_code == 401
    assert pair.mailbox.posted == []


def test_a_token_of_no_text_and_a_query_arrive_as_they_were_sent(pair: Pair) -> None:
    """The fake network takes ASCII alone, so it does not bring them to the other server."""
    pair.wire.instead = lambda _request: httpx.Response(401, json={})
    answer = pair.ask("n1", "GET", "/volumes/a%25b%3Fc%C3%A9?streams=1&x=%26%C3%A9", "\xe9\xe8")
    assert answer.status_code == 401
    (request,) = pair.wire.seen
    assert (b"Authorization", b"Bearer \xe9\xe8") in request.headers.raw
    assert str(request.url) == f"{N2}/api/v1/volumes/a%25b%3Fc%C3%A9?streams=1&x=%26%C3%A9"


def test_a_token_that_was_revoked_at_the_acting_server_is_worth_nothing_at_the_other_at_once(
    pair: Pair,
) -> None:
    assert pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"]).status_code == 200
    revoked = pair.ask("n2", "DELETE", "/tokens/operator", api.TOKEN)
    assert revoked.status_code == 200
    assert pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"]).status_code == 401


def test_who_may_only_read_may_only_read_at_both(pair: Pair) -> None:
    for method, path, how in CHANGES:
        direct, forwarded = (
            pair.ask(node, method, path, pair.tokens["viewer"], **how) for node in ("n2", "n1")
        )
        assert _said(direct) == _said(forwarded)
        assert forwarded.status_code == 403
    for node in ("n1", "n2"):  # an operator decides nothing about accounts
        assert pair.ask(node, "GET", "/users", pair.tokens["operator"]).status_code == 403
        new = {"name": "zoe", "role": "admin", "password": api.PASSWORD}
        assert pair.ask(node, "POST", "/users", pair.tokens["operator"], json=new).status_code == 403
    assert pair.mailbox.posted == []


def test_a_token_with_labels_sees_its_own_agreements_alone_at_both(pair: Pair) -> None:
    row = pair.source.access.rows["api_tokens"]["viewer"]
    pair.source.access.rows["api_tokens"]["viewer"] = {**row, "labels": "customer=nobody"}
    for path in ("/slas", "/volumes", "/live"):
        direct, forwarded = (pair.ask(node, "GET", path, pair.tokens["viewer"]) for node in ("n2", "n1"))
        assert _said(direct) == _said(forwarded)
        assert not forwarded.json.get("items", forwarded.json.get("slas"))
    assert pair.ask("n1", "GET", "/why/erp-db", pair.tokens["viewer"]).status_code == 403


def test_live_values_are_those_of_the_acting_server(pair: Pair) -> None:
    pair.contexts["n2"].live.put(api.snapshot(at_us=api.NOW_US))
    for token in (None, pair.tokens["viewer"]):
        for path in ("/live", "/mode", "/volumes?limit=2&match=e", "/slas", "/why/erp-db?kind=volume"):
            direct, forwarded = (pair.ask(node, "GET", path, token) for node in ("n2", "n1"))
            assert _said(direct) == _said(forwarded), path
            assert forwarded.status_code == 200
    assert pair.ask("n1", "GET", f"/live?since={api.NOW_US}").status_code == 204
    etag = pair.ask("n1", "GET", "/volumes").headers["ETag"]
    assert pair.ask("n1", "GET", "/volumes", headers={"If-None-Match": etag}).status_code == 304


def test_a_browser_is_answered_here_and_its_changes_are_refused_with_the_page_of_the_acting_server(
    pair: Pair,
) -> None:
    client = dashboard.create_app(pair.contexts["n1"]).test_client()
    signed_in = client.post("/login", data={"name": "ann", "password": api.PASSWORD}, base_url=N1)
    assert signed_in.status_code == 303
    headers = {"Sec-Fetch-Site": "same-origin", "Origin": N1}
    refused = client.put("/api/v1/mode", json={"mode": "observe"}, headers=headers, base_url=N1)
    assert (refused.status_code, refused.json["detail"]) == (503, N2_ACTS)
    assert N2 in refused.json["fix"]
    for given in (headers, {}):  # with the session's cookie, and without one below
        server = client.get("/api/v1/live", headers=given, base_url=N1).json["server"]
        assert server["stands_by"] == N2_ACTS
    page = pair.ask("n1", "GET", "/live", headers={"Sec-Fetch-Site": "same-origin"}).json["server"]
    assert page["acting_page"] == N2
    assert pair.wire.seen == []


def test_a_change_from_another_web_site_is_refused_here(pair: Pair) -> None:
    headers = {"Origin": "https://evil.example.org"}
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"], headers=headers)
    assert answer.json["type"].endswith("origin-refused")
    assert pair.wire.seen == []
    own = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"], headers={"Origin": N1})
    assert own.status_code == 200


def test_where_reading_needs_a_login_nobody_reads_through_a_server_that_leaves_the_other_open(
    tmp_path: Path, source: api.FakeSource, mailbox: api.AnsweringMailbox
) -> None:
    pair = _make_pair(tmp_path, source, mailbox, reading="login")
    assert pair.ask("n1", "GET", "/live").status_code == 401
    assert pair.wire.seen == []
    assert pair.ask("n1", "GET", "/live", pair.tokens["viewer"]).status_code == 200
    assert len(pair.wire.seen) == 1


def test_two_servers_that_each_take_the_other_for_the_acting_one_refuse_after_one_hop(pair: Pair) -> None:
    _acts(pair.folder / "n2", "n2", "n1", N1)
    second = pair.contexts["n2"]
    back = Wire(dashboard.create_app(pair.contexts["n1"]))
    forwarder = RequestForwarder(second.acting, second.guard, second.token, 0.01, back)
    pair.wire._inner = httpx.WSGITransport(dashboard.create_app(replace(second, forwarder=forwarder)))
    answer = pair.ask("n1", "PUT", "/mode", pair.tokens["operator"], json={"mode": "observe"})
    assert answer.status_code == 503
    assert answer.json["detail"] == "the server of node n1 acts, this one (node n2) stands by"
    assert (len(pair.wire.seen), back.seen, pair.mailbox.posted) == (1, [], [])


def test_a_change_is_refused_while_none_acts_and_while_the_acting_one_cannot_be_reached(pair: Pair) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("Connection refused", request=request)

    pair.wire.instead = refuse
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert (answer.status_code, answer.json["type"]) == (503, "urn:storage-sla:problem:stands-by")
    assert answer.json["detail"] == (
        f"{N2_ACTS}, and the change was not forwarded: it cannot be reached at {N2} (Connection refused)"
    )
    assert f"Make the change at the server of n2, {N2}" in answer.json["fix"]
    stored = pair.ask("n1", "GET", "/volumes", pair.tokens["viewer"])
    assert (stored.status_code, stored.json["server"]["stands_by"]) == (200, N2_ACTS)
    LeaseState("n1", "", 7, 0, 6.0, boot_ns()).write(pair.folder / "n1")
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert answer.status_code == 503
    assert "no server acts just now" in answer.json["detail"]
    assert "Try again" in answer.json["fix"]


def test_a_change_without_an_answer_may_have_been_made_and_says_so(pair: Pair) -> None:
    def lose(request: httpx.Request) -> httpx.Response:
        raise httpx.ReadTimeout("timed out", request=request)

    pair.wire.instead = lose
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert answer.status_code == 503
    assert "was forwarded, and may have been made" in answer.json["detail"]
    assert answer.json["fix"].startswith("See whether it was made ('sla audit'). If not: make the change at")
    assert "Retry-After" not in answer.headers


def test_what_is_no_answer_of_a_server_is_not_passed_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    html = {"Content-Type": "text/html"}
    pair.wire.instead = lambda _request: httpx.Response(502, headers=html, text="<script>x</script>")
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert answer.status_code == 503
    assert "answers 502 without JSON" in answer.json["detail"]
    monkeypatch.setattr(forwarding, "ANSWER_BYTES", 10)  # 32 MiB would do as well, slowly
    pair.wire.instead = lambda _request: httpx.Response(200, json={"much": "x" * 20})
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert "its answer has more than" in answer.json["detail"]
    monkeypatch.undo()
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    pair.wire.instead = lambda _request: httpx.Response(200, headers=packed, stream=httpx.ByteStream(b"x"))
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert "its answer is compressed" in answer.json["detail"]
    assert pair.ask("n1", "GET", "/volumes").json["server"]["stands_by"] == N2_ACTS


def test_so_many_wait_for_the_acting_server_at_once_and_the_next_is_refused(pair: Pair) -> None:
    come, go = threading.Semaphore(0), threading.Event()

    def wait(_request: httpx.Request) -> httpx.Response:
        come.release()
        go.wait(60)
        return httpx.Response(200, json={})

    pair.wire.instead = wait
    waiting = [
        threading.Thread(target=pair.ask, args=("n1", "DELETE", "/silences/x", pair.tokens["operator"]))
        for _ in range(AT_ONCE)
    ]
    for thread in waiting:
        thread.start()
    assert all(come.acquire(timeout=60) for _ in waiting)
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    go.set()
    for thread in waiting:
        thread.join()
    assert (answer.status_code, len(pair.wire.seen)) == (503, AT_ONCE)
    assert pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"]).status_code == 200


def test_the_token_of_this_servers_own_file_is_good_where_the_other_has_the_same(pair: Pair) -> None:
    answer = pair.ask("n1", "PUT", "/mode", OTHER_TOKEN, json={"mode": "observe"})
    assert answer.status_code == 503
    assert "it does not know the token of this server's file (DATA_DIR/api.token)" in answer.json["detail"]
    assert pair.ask("n1", "GET", "/volumes", OTHER_TOKEN).status_code == 200, "from SQL"
    assert pair.mailbox.posted == []
    assert pair.ask("n1", "PUT", "/mode", api.TOKEN, json={"mode": "observe"}).status_code == 200
    assert [one["who"] for one in pair.mailbox.posted] == ["local"]


def test_what_became_of_a_change_is_asked_of_the_server_that_makes_it(pair: Pair) -> None:
    pair.mailbox.answer = lambda _header: None
    answer = pair.ask("n1", "PUT", "/mode", pair.tokens["operator"], json={"mode": "observe"})
    assert (answer.status_code, answer.headers["Retry-After"]) == (202, "1")
    where = answer.headers["Location"].removeprefix("/api/v1")
    assert pair.ask("n1", "GET", where).json["state"] == "pending"


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        ("", "its address is not known here: set page in its [cluster.takeover]"),
        ("http://192.0.2.1:8411", "is not https: a token is not sent there in clear"),
        ("http://sla-2:8411", "is not https: a token is not sent there in clear"),
        ("http://127.0.0.1:8412", "at http://127.0.0.1:8412 a process of another user listens"),
    ],
)
def test_a_token_is_sent_to_the_right_process_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, page: str, problem: str
) -> None:
    # Of this machine's tables: a test has no other user to listen as.
    monkeypatch.setattr(sockets, "listener_uids", lambda _host, _port: {4711})
    _acts(pair.folder / "n1", "n1", "n2", page)
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert answer.status_code == 503
    assert problem in answer.json["detail"]
    assert pair.wire.seen == []


def test_a_server_that_acts_or_is_alone_forwards_nothing(pair: Pair, web: FlaskClient) -> None:
    _acts(pair.folder / "n1", "n1", "n1")
    pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    pair.ask("n1", "GET", "/volumes")
    assert pair.wire.seen == []
    assert web.get("/api/v1/volumes").status_code == 200


def test_both_lists_name_operations_of_the_table_and_whatever_shows_live_values_is_in_one(
    pair: Pair,
) -> None:
    by_name = {route.operation: route for route in ROUTES}
    assert all(by_name[name].changes for name in HERE)
    assert not any(by_name[name].changes for name in LIVE)
    app = dashboard.create_app(replace(pair.contexts["n1"], forwarder=None))
    own = {"health", "stream", "pools"}  # of pools nothing is live but what every page of a list says
    for route in ROUTES:
        if route.method == "GET" and not route.parameters and route.operation not in own:
            answer = app.test_client().get(route.rule, base_url=N1)
            shows_live = "stale" in (answer.json or {}).get("server", {}) if answer.is_json else False
            assert not shows_live or route.operation in LIVE, route.path


def test_health_and_readiness_are_those_of_the_server_that_is_asked(pair: Pair) -> None:
    assert pair.ask("n1", "GET", "/ready", pair.tokens["viewer"]).status_code == 503
    assert pair.ask("n1", "GET", "/health").json["stands_by"] == N2_ACTS
    assert pair.ask("n1", "POST", "/logins", OTHER_TOKEN).json["address"].startswith(N1)
    assert pair.wire.seen == []


def _refuse_to_connect(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused", request=request)


@pytest.mark.parametrize("name", [".", ".."])
def test_a_name_of_points_is_no_way_to_another_operation(pair: Pair, name: str) -> None:
    """httpx resolves such a part of a path: the end of one session would be that of all of an account."""
    for path in (f"/sessions/{name}?account=ann", f"/throttles/{name}?volume=erp-db"):
        direct, forwarded = (pair.ask(node, "DELETE", path, api.TOKEN) for node in ("n2", "n1"))
        assert _said(direct) == _said(forwarded)
        assert forwarded.status_code in (400, 404)
    assert pair.mailbox.posted == []


def test_who_has_no_good_token_learns_nothing_of_a_server_that_cannot_be_reached(pair: Pair) -> None:
    pair.wire.instead = _refuse_to_connect
    for token in ("x", "sla_nobody-knows-it"):
        answer = pair.ask("n1", "DELETE", "/silences/x", token)
        assert answer.status_code == 401
        assert "sla-2" not in answer.text
    assert pair.ask("n1", "DELETE", "/silences/x", pair.tokens["viewer"]).status_code == 403


def test_what_is_no_bearer_token_is_not_sent_to_another_server(pair: Pair) -> None:
    assert pair.ask("n1", "GET", "/mode", headers={"Authorization": "Basic YTpi"}).status_code == 200
    (request,) = pair.wire.seen
    assert "Authorization" not in request.headers


def test_an_acting_server_that_is_not_called_as_its_page_is_or_fails_leaves_reads_here(pair: Pair) -> None:
    _acts(pair.folder / "n1", "n1", "n2", "https://other.example.org")
    assert pair.ask("n1", "GET", "/volumes").json["server"]["stands_by"] == N2_ACTS
    answer = pair.ask("n1", "DELETE", "/silences/x", pair.tokens["operator"])
    assert (answer.status_code, answer.headers.get("Retry-After")) == (503, "2")
    assert "api.allowed_hosts" in answer.json["detail"]
    pair.wire.instead = lambda _request: httpx.Response(503, json={})
    assert pair.ask("n1", "GET", "/volumes").json["server"]["stands_by"] == N2_ACTS


def test_a_change_that_this_server_made_before_it_stood_by_is_answered_here(pair: Pair) -> None:
    _acts(pair.folder / "n1", "n1", "n1")
    mailbox = api.AnsweringMailbox(answer=lambda _header: None)  # later
    own = Operations(lambda message: mailbox.post("services", message), FakeClock(), wait_s=0.01)
    pair.contexts["n1"] = replace(pair.contexts["n1"], operations=own)
    answer = pair.ask("n1", "PUT", "/mode", pair.tokens["operator"], json={"mode": "observe"})
    assert answer.status_code == 202
    where = answer.headers["Location"].removeprefix("/api/v1")
    _acts(pair.folder / "n1", "n1", "n2")
    assert pair.ask("n1", "GET", where).status_code == 200
    pair.wire.instead = _refuse_to_connect
    unknown = pair.ask("n1", "GET", "/operations/nobody-knows-it")
    assert unknown.status_code == 503, "the other one may know it"


def test_the_unix_socket_keeps_threads_for_others_than_those_that_wait_for_the_acting_server(
    pair: Pair,
) -> None:
    come, go = threading.Semaphore(0), threading.Event()

    def wait(_request: httpx.Request) -> httpx.Response:
        come.release()
        go.wait(60)
        return httpx.Response(200, json={})

    def ask(environ: dict[str, str]) -> int:
        token = pair.tokens["operator"]
        return pair.ask("n1", "DELETE", "/silences/x", token, environ_overrides=environ).status_code

    pair.wire.instead = wait
    local = {PEER_UID: "0"}
    waiting = [
        threading.Thread(target=ask, args=(environ,))
        for environ in (*[local] * AT_ONCE_LOCAL, *[{}] * AT_ONCE)
    ]
    for thread in waiting:
        thread.start()
    assert all(come.acquire(timeout=60) for _ in waiting)
    assert (ask(local), ask({})) == (503, 503)
    go.set()
    for thread in waiting:
        thread.join()
    assert len(pair.wire.seen) == AT_ONCE + AT_ONCE_LOCAL

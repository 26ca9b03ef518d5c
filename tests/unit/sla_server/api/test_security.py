from __future__ import annotations

import stat
from pathlib import Path

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from sla_server.api.context import AppContext
from sla_server.api.errors import Unavailable
from sla_server.api.roles import Principal, Role
from sla_server.api.routes import ROUTES
from sla_server.api.security import (
    CODE_LIFE_S,
    CODES_EACH,
    CODES_MAX,
    PEER_UID,
    Logins,
    load_or_make_token,
    session_key,
)
from tests.support import api

PAGE = {"Origin": "http://127.0.0.1:8411"}
CHANGES = [route for route in ROUTES if route.changes]


def path_of(rule: str) -> str:
    return rule.replace("<", "").replace(">", "")


def sign_in(web: FlaskClient, context: AppContext) -> None:
    answer = web.post("/login", data={"code": context.logins.issue()})
    assert answer.status_code == 303


@pytest.mark.parametrize("route", CHANGES, ids=lambda route: route.operation)
def test_every_change_needs_token_or_session(
    web: FlaskClient, mailbox: api.AnsweringMailbox, route: object
) -> None:
    path = path_of(route.rule)  # type: ignore[attr-defined]
    method = route.method  # type: ignore[attr-defined]
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic x"}, PAGE):
        answer = web.open(path, method=method, headers=headers, json={"mode": "enforce"})
        assert answer.status_code == 401, headers
        assert answer.mimetype == "application/problem+json"
        assert "sla login" in answer.json["fix"] or "token" in answer.json["fix"]
        assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    assert mailbox.posted == []


def test_a_change_with_the_token_says_who(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    web.put("/api/v1/mode", json={"mode": "enforce"}, headers={**bearer, "Sla-User": "ann<script>"})
    assert mailbox.posted[0]["who"] == "local (says annscript)", "nobody vouches for the name"


def test_on_the_unix_socket_the_kernel_says_who(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    headers = {**bearer, "Sla-User": "the-boss"}
    web.put("/api/v1/mode", json={"mode": "enforce"}, headers=headers, environ_base={PEER_UID: "0"})
    assert mailbox.posted[0]["who"] == "local (root)"


def test_a_token_does_not_help_another_site(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    headers = {**bearer, "Origin": "http://evil.example"}
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=headers).status_code == 403
    assert mailbox.posted == []


def test_a_login_code_signs_in_once(
    web: FlaskClient, context: AppContext, mailbox: api.AnsweringMailbox
) -> None:
    code = context.logins.issue()
    for _look in range(3):  # of a person, a link preview, a scanner
        page = web.get(f"/login?code={code}")
        assert (page.status_code, page.headers["Cache-Control"]) == (200, "no-store")
        assert f'value="{code}"' in page.text
        assert page.headers["Referrer-Policy"] == "same-origin", "else the form comes with Origin: null"
        assert "Set-Cookie" not in page.headers
    answer = web.post("/login", data={"code": code})
    cookie = answer.headers["Set-Cookie"]
    assert cookie.startswith("sla_session_8411=")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert answer.headers["Location"] == "/"
    state = web.get("/api/v1/session").json
    assert (state["signed_in"], state["who"], state["role"]) == (True, "local", "admin")
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=PAGE).status_code == 200
    assert mailbox.posted[0]["who"] == "local"
    (begun,) = mailbox.recorded
    assert (begun["body"]["action"], begun["body"]["after"]["by"]) == ("login", "one-time code")
    assert code not in str(begun)
    fresh = web.application.test_client()
    again = fresh.post("http://127.0.0.1:8411/login", data={"code": code})
    assert again.status_code == 403
    assert "sla login" in again.text
    assert "Set-Cookie" not in again.headers


def test_the_page_that_signs_in_holds_no_text_of_others(web: FlaskClient, context: AppContext) -> None:
    page = web.get('/login?code="><script>alert(1)</script>')
    assert "<script" not in page.text
    headers = {"Origin": "http://evil.example"}
    code = context.logins.issue()
    assert web.post("/login", data={"code": code}, headers=headers).status_code == 403
    assert web.post("/login", data={"code": code}).status_code == 303, "the code was not spent"


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:9999"])
def test_a_session_needs_our_own_origin(
    web: FlaskClient, context: AppContext, mailbox: api.AnsweringMailbox, origin: str | None
) -> None:
    sign_in(web, context)
    headers = {} if origin is None else {"Origin": origin}
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=headers).status_code == 403
    assert mailbox.posted == []


def test_signing_out(web: FlaskClient, context: AppContext) -> None:
    sign_in(web, context)
    assert web.delete("/api/v1/session", headers=PAGE).status_code == 200
    assert web.get("/api/v1/session").json["signed_in"] is False
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=PAGE).status_code == 401


def test_a_session_survives_a_restart_and_ends_with_the_token(
    web: FlaskClient, context: AppContext, clock: FakeClock, source: api.FakeSource
) -> None:
    answer = web.post("/login", data={"code": context.logins.issue()})
    cookie = answer.headers["Set-Cookie"].partition(";")[0]
    again = api.make_context(api.AnsweringMailbox(), clock, source)
    restarted = dashboard.create_app(again).test_client(use_cookies=False)
    headers = {"Host": "127.0.0.1:8411", "Cookie": cookie}
    assert restarted.get("/api/v1/session", headers=headers).json["signed_in"]
    restarted.application.config["SECRET_KEY"] = session_key("another token")
    assert restarted.get("/api/v1/session", headers=headers).json["signed_in"] is False


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8411", "127.0.0.1.evil.example", ""])
@pytest.mark.parametrize("path", ["/", "/api/v1/live", "/login"])
def test_other_host_names_are_refused(web: FlaskClient, host: str, path: str) -> None:
    answer = web.get(path, headers={"Host": host})
    assert answer.status_code == 421
    assert "allowed_hosts" in answer.json["fix"]


@pytest.mark.parametrize("host", ["127.0.0.1:8411", "localhost", "[::1]:8411", "LOCALHOST:1"])
def test_our_host_names(web: FlaskClient, host: str) -> None:
    assert web.get("/api/v1/mode", headers={"Host": host}).status_code == 200


def test_allowed_hosts_are_added(mailbox: api.AnsweringMailbox) -> None:
    app = dashboard.create_app(api.make_context(mailbox, allowed_hosts=["sla.example"]))
    assert app.test_client().get("/api/v1/mode", headers={"Host": "sla.example"}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/api/v1/live", "/api/v1/nothing", "/static/app.js"])
def test_headers_forbid_inline_script_and_framing(web: FlaskClient, path: str) -> None:
    answer = web.get(path)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    answer.close()


def test_large_bodies_are_refused(web: FlaskClient, bearer: dict[str, str]) -> None:
    answer = web.post("/api/v1/slas", data="x" * 100_001, headers=bearer)
    assert answer.status_code == 413
    assert answer.mimetype == "application/problem+json"


def test_codes_end_with_time_and_are_bounded(clock: FakeClock) -> None:
    logins = Logins(clock)
    code = logins.issue()
    clock.advance(CODE_LIFE_S)
    assert not logins.spend(code)
    assert not logins.spend("")
    codes = [logins.issue() for _ in range(40)]
    assert not logins.spend(codes[0])
    assert not logins.spend(codes[-CODES_EACH - 1])
    assert logins.spend(codes[-CODES_EACH]), "using a code, or a wrong one, makes no other one void"
    assert logins.spend(codes[-1])


def test_codes_of_one_account_displace_none_of_another_s(clock: FakeClock) -> None:
    def person(number: int) -> Principal:
        return Principal(f"user-{number}", Role.viewer, account=f"user-{number}")

    logins = Logins(clock)
    code = logins.issue()
    for _ in range(5 * CODES_EACH):
        logins.issue(person(0))
    assert logins.spend(code) is not None
    code = logins.issue()
    for number in range(CODES_MAX - 1 - CODES_EACH):
        logins.issue(person(number + 1))
    with pytest.raises(Unavailable, match="wait to be opened"):
        logins.issue(person(CODES_MAX))
    assert logins.spend(code) is not None
    clock.advance(CODE_LIFE_S)
    assert logins.spend(logins.issue()) is not None


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "data" / "api.token"
    token = load_or_make_token(path)
    assert len(token) >= 40
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_or_make_token(path) == token


@pytest.mark.parametrize(
    ("mode", "text", "words"),
    [
        (0o644, b"t" * 43, "chmod 600"),
        (0o600, b"short", "Delete it"),
        (0o600, b"\xff" * 43, "is not text.*Delete it"),
    ],
)
def test_an_unsafe_token_file_is_refused(tmp_path: Path, mode: int, text: bytes, words: str) -> None:
    path = tmp_path / "api.token"
    path.write_bytes(text)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=words):
        load_or_make_token(path)

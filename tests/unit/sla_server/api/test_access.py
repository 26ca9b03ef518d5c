"""Accounts and sessions over the API: who may come in, as whom, until when."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from dashboard.views import VIEWS
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire.kinds import Kind
from sla_server.api.context import AppContext
from sla_server.api.errors import TooManyLogins
from sla_server.api.mailbox_thread import MailboxThread
from sla_server.api.passwords import ACCOUNT_TRIES, ADDRESS_TRIES, PAIR_TRIES, LoginLimits, network_of
from sla_server.api.route import PREFIX
from sla_server.api.routes import ROUTES
from tests.support import api
from tests.unit.sla_server.api.conftest import Browser

PAGE = {"Origin": "http://127.0.0.1:8411"}
NEXT = "eight tall flamingos"


def user(web: FlaskClient, bearer: dict[str, str], name: str, role: str, **more: Any) -> None:
    body = {"name": name, "role": role, "password": api.PASSWORD, **more}
    answer = web.post("/api/v1/users", json=body, headers=bearer)
    assert answer.status_code == 200, answer.text


def sign_in(web: FlaskClient, name: str, password: str = api.PASSWORD) -> int:
    return web.post("/login", data={"name": name, "password": password}).status_code


def browser(web: FlaskClient) -> FlaskClient:
    """Another browser of the same server."""
    return Browser(web.application, web.application.response_class)


def state(web: FlaskClient) -> dict[str, Any]:
    answer: dict[str, Any] = web.get("/api/v1/session").json
    return answer


def test_name_and_password_sign_in_and_the_audit_log_has_the_name(
    web: FlaskClient, mailbox: api.AnsweringMailbox
) -> None:
    form = web.get("/login")
    assert 'type="password"' in form.text
    assert "script" not in form.text
    answer = web.post("/login", data={"name": " Ann ", "password": api.PASSWORD})
    assert (answer.status_code, answer.headers["Location"]) == (303, "/")
    assert state(web) == {"signed_in": True, "who": "ann", "role": "operator", "labels": "", "account": "ann"}
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=PAGE).status_code == 200
    assert mailbox.posted[0]["who"] == "ann"
    assert mailbox.recorded[-1]["body"]["action"] == "login"
    assert api.PASSWORD not in str(mailbox.recorded)


@pytest.mark.parametrize("name", ["ann", "nobody", "", "a" * 5000, "\x00", "\udfff"])
def test_wrong_names_and_passwords_are_refused_alike_and_recorded(
    web: FlaskClient, mailbox: api.AnsweringMailbox, name: str
) -> None:
    answer = web.post("/login", data={"name": name.encode(errors="replace"), "password": "wrong"})
    assert answer.status_code == 403
    assert "name and password do not fit" in answer.text
    assert "Set-Cookie" not in answer.headers
    (noted,) = mailbox.recorded
    assert (noted["who"], noted["body"]["action"]) == ("not signed in", "login-failed")
    assert len(noted["body"]["subject"]) <= 64


def test_tries_are_limited_for_an_account_and_come_back(web: FlaskClient, clock: FakeClock) -> None:
    burst, refill_s = PAIR_TRIES
    assert [sign_in(web, "ann", "wrong") for _ in range(burst)] == [403] * burst
    answer = web.post("/login", data={"name": "ann", "password": api.PASSWORD})
    assert answer.status_code == 429
    assert "too many tries" in answer.text
    assert not state(web)["signed_in"]
    clock.advance(refill_s)
    assert sign_in(web, "ann") == 303


def test_a_stranger_who_tries_passwords_does_not_keep_the_owner_out() -> None:
    limits = LoginLimits(FakeClock())
    for _ in range(PAIR_TRIES[0]):
        limits.take("ann", "198.51.100.7")
    with pytest.raises(TooManyLogins):
        limits.take("ann", "198.51.100.7")
    limits.take("ann", "10.0.0.1")


def test_an_account_has_a_limit_whatever_the_addresses_are() -> None:
    limits = LoginLimits(FakeClock())
    for number in range(ACCOUNT_TRIES[0]):
        limits.take("ann", f"10.0.{number // 256}.{number % 256}")
    with pytest.raises(TooManyLogins):
        limits.take("ann", "10.1.0.1")
    limits.take("bob", "10.1.0.1")


def test_limits_of_addresses_and_their_memory() -> None:
    clock = FakeClock()
    limits = LoginLimits(clock)
    for number in range(ADDRESS_TRIES[0]):
        limits.take(f"name-{number}", "2001:db8::1")
    with pytest.raises(TooManyLogins):
        limits.take("another", "2001:db8::2")
    limits.take("another", "2001:db8:0:1::1")
    for _number in range(10_000):  # the table does not grow, and right passwords take no tries
        limits.take("ann", "10.0.0.1")
        limits.succeeded("ann", "10.0.0.1")
    assert network_of("::ffff:10.0.0.1") == "10.0.0.1"
    assert network_of("") == "local"


def test_the_cookie_of_an_ended_session_is_worth_nothing(web: FlaskClient) -> None:
    """Review, finding 9: it went on to change the mode."""
    cookie = web.post("/login", data={"name": "ann", "password": api.PASSWORD}).headers["Set-Cookie"]
    assert web.delete("/api/v1/session", headers=PAGE).status_code == 200
    stolen = web.application.test_client(use_cookies=False)
    headers = {**PAGE, "Host": "127.0.0.1:8411", "Cookie": cookie.partition(";")[0]}
    assert stolen.put("/api/v1/mode", json={"mode": "enforce"}, headers=headers).status_code == 401
    assert stolen.post("/api/v1/logins", headers=headers).status_code == 401


def test_a_session_has_an_absolute_end(web: FlaskClient, clock: FakeClock) -> None:
    """Review, finding 9: each answer brought a fresh cookie, so it slid for ever."""
    sign_in(web, "ann")
    for _hour in range(11):
        clock.advance(3600)
        answer = web.get("/api/v1/mode")
        assert "Set-Cookie" not in answer.headers
        assert state(web)["signed_in"]
    clock.advance(3600)
    assert not state(web)["signed_in"]
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=PAGE).status_code == 401


def one_time_code(web: FlaskClient) -> str:
    return str(web.post("/api/v1/logins", headers=PAGE).json["address"]).partition("code=")[2]


def test_a_one_time_code_is_worth_no_more_than_the_session_that_made_it(
    web: FlaskClient, clock: FakeClock
) -> None:
    thief = browser(web)
    sign_in(web, "ann")
    clock.advance(11 * 3600)
    assert thief.post("/login", data={"code": one_time_code(web)}).status_code == 303
    code = one_time_code(thief)
    clock.advance(3600)
    assert not state(thief)["signed_in"], "else a session makes another one for ever"
    assert thief.post("/login", data={"code": code}).status_code == 403
    sign_in(web, "ann")
    code = one_time_code(web)
    assert web.delete("/api/v1/sessions", headers=PAGE).status_code == 200
    assert thief.post("/login", data={"code": code}).status_code == 403, "signed out everywhere"


def test_a_password_that_is_changed_while_it_is_looked_at_signs_nobody_in(
    web: FlaskClient, context: AppContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(_stored: str, _password: str) -> bool:
        row = context.access.directory.account("ann")
        assert row is not None
        at_us = context.access.directory.changed_us(row)
        context.access.directory.put("accounts", {**row, "password": "x", "changed_us": at_us})
        return True

    monkeypatch.setattr(context.access.passwords, "verify", verify)
    assert sign_in(web, "ann") == 403
    assert not state(web)["signed_in"]


def test_a_live_stream_ends_with_its_session(web: FlaskClient, context: AppContext) -> None:
    sign_in(web, "ann")
    context.live.put(api.snapshot())
    answer = web.get("/api/v1/live/stream", buffered=False)
    events = iter(answer.response)
    assert "event: snapshot" in str(next(events))
    context.live.put(api.snapshot(api.NOW_US + 1))
    assert "event: snapshot" in str(next(events))
    assert web.delete("/api/v1/session", headers=PAGE).status_code == 200
    context.live.put(api.snapshot(api.NOW_US + 2))
    assert list(events) == []
    answer.close()


def test_sessions_are_listed_and_ended(web: FlaskClient, bearer: dict[str, str]) -> None:
    other = browser(web)
    sign_in(web, "ann")
    sign_in(other, "ann")
    listed = web.get("/api/v1/sessions").json["items"]
    assert [row["account"] for row in listed] == ["ann"] * 3
    assert [row["is_this"] for row in listed].count(True) == 1
    user(web, bearer, "bob", "viewer")
    bob = browser(web)
    sign_in(bob, "bob")
    assert [row["account"] for row in bob.get("/api/v1/sessions").json["items"]] == ["bob"]
    theirs = next(row for row in listed if row["is_this"])["session_id"]
    assert bob.delete(f"/api/v1/sessions/{theirs[:12]}", headers=PAGE).status_code == 404, "not theirs"
    assert bob.delete("/api/v1/sessions?account=ann", headers=PAGE).status_code == 403
    assert other.delete(f"/api/v1/sessions/{theirs[:12]}", headers=PAGE).status_code == 200
    assert not state(web)["signed_in"]
    assert other.delete("/api/v1/sessions", headers=PAGE).json == {"ended": 2}
    assert not state(other)["signed_in"]
    assert sign_in(other, "ann") == 303, "a new one begins at once"
    assert state(other)["signed_in"]
    assert web.get("/api/v1/sessions").status_code == 401, "although reading is open"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/users/ann", {"enabled": False}),
        ("PUT", "/users/ann", {"role": "viewer"}),
        ("DELETE", "/users/ann", None),
        ("PUT", "/users/ann/password", {"password": NEXT}),
    ],
)
def test_what_changes_an_account_ends_its_sessions(
    web: FlaskClient, bearer: dict[str, str], method: str, path: str, body: Any
) -> None:
    ann = browser(web)
    sign_in(ann, "ann")
    assert web.open(f"/api/v1{path}", method=method, json=body, headers=bearer).status_code == 200
    assert not state(ann)["signed_in"]


def test_an_account_from_begin_to_end(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    user(web, bearer, "bob", "admin")
    again = web.post("/api/v1/users", json={"name": "bob", "role": "admin", "password": NEXT}, headers=bearer)
    assert again.status_code == 409
    bob = browser(web)
    assert sign_in(bob, "bob") == 303
    wrong = {"password": NEXT, "current": "no idea at all"}
    assert bob.put("/api/v1/users/bob/password", json=wrong, headers=PAGE).status_code == 403
    right = {"password": NEXT, "current": api.PASSWORD}
    assert bob.put("/api/v1/users/bob/password", json=right, headers=PAGE).status_code == 200
    assert state(bob)["signed_in"], "this browser goes on"
    assert sign_in(web, "bob") == 403
    assert sign_in(web, "bob", NEXT) == 303
    assert bob.put("/api/v1/users/bob", json={"enabled": False}, headers=PAGE).status_code == 200
    assert sign_in(bob, "bob", NEXT) == 403
    assert web.put("/api/v1/users/bob", json={"enabled": True}, headers=bearer).status_code == 200
    assert sign_in(bob, "bob", NEXT) == 303
    assert web.delete("/api/v1/users/bob", headers=bearer).status_code == 200
    assert [row["name"] for row in web.get("/api/v1/users", headers=bearer).json["items"]] == ["ann"]
    assert "password" not in web.get("/api/v1/users", headers=bearer).text
    assert web.delete("/api/v1/users/bob", headers=bearer).status_code == 404
    actions = [item["body"]["action"] for item in mailbox.recorded if item["body"]["subject"] == "bob"]
    assert actions == [
        *("user-add", "login", "login-failed", "user-password", "login", "login-failed", "login"),
        *("user-change", "login-failed", "user-change", "login", "user-delete"),
    ]
    assert all(NEXT not in str(item["body"]["after"]) for item in mailbox.recorded)
    assert "argon2id" not in str([item["body"]["after"] for item in mailbox.recorded])


def test_accounts_sessions_and_tokens_come_in_pages(web: FlaskClient, bearer: dict[str, str]) -> None:
    for name in ("bob", "zoe-1", "zoe-2", "zoe-3"):
        user(web, bearer, name, "viewer")

    def page(query: str) -> tuple[list[str], int, int, str | None]:
        answer = web.get(f"/api/v1/{query}", headers=bearer).json
        names = [row.get("name", row.get("account")) for row in answer["items"]]
        return names, answer["count"], answer["before"], answer["next"]

    assert page("users") == (["ann", "bob", "zoe-1", "zoe-2", "zoe-3"], 5, 0, None)
    assert page("users?match=ZOE&limit=2") == (["zoe-1", "zoe-2"], 3, 0, "2")
    assert page("users?match=ZOE&limit=2&offset=2") == (["zoe-3"], 3, 2, None)
    assert page("sessions?match=nobody") == ([], 0, 0, None)
    assert page("sessions?limit=1") == (["ann"], 1, 0, None)
    assert page("tokens?match=prom&limit=1") == (["prometheus"], 1, 0, None)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"name": "Bob", "role": "viewer", "password": NEXT}, "name"),
        ({"name": "bob", "role": "root", "password": NEXT}, "role"),
        ({"name": "bob", "role": "viewer", "password": "short"}, "password"),
        ({"name": "bob", "role": "viewer", "password": "bobbobbobbob"}, "password"),
        ({"name": "bob", "role": "viewer", "password": NEXT, "labels": "=x"}, "labels"),
        ({"name": "bob", "role": "operator", "password": NEXT, "labels": "customer=acme"}, "role"),
    ],
)
def test_what_is_wrong_with_an_account_is_said(
    web: FlaskClient, bearer: dict[str, str], body: dict[str, Any], word: str
) -> None:
    answer = web.post("/api/v1/users", json=body, headers=bearer)
    assert answer.status_code == 400
    assert answer.json["detail"].startswith(word)
    assert NEXT not in answer.text


@pytest.mark.parametrize("route", [route for route in ROUTES if route.needs > 1], ids=lambda r: r.operation)
def test_a_viewer_changes_nothing(
    web: FlaskClient, mailbox: api.AnsweringMailbox, source: api.FakeSource, route: Any
) -> None:
    source.access.rows["accounts"]["ann"] = api.account(role="viewer")
    sign_in(web, "ann")
    before = len(mailbox.recorded)
    path = (PREFIX + route.path).replace("{", "").replace("}", "")
    answer = web.open(path, method=route.method, json={}, headers=PAGE)
    assert answer.status_code == 403
    assert answer.json["title"] == "This account may not do that"
    assert (mailbox.posted, len(mailbox.recorded)) == ([], before)


def test_an_operator_changes_no_accounts_and_no_gateways(web: FlaskClient) -> None:
    sign_in(web, "ann")
    for method, path in (("GET", "/users"), ("POST", "/users"), ("PUT", "/gateway-list/10.0.0.1:1")):
        assert web.open(f"/api/v1{path}", method=method, json={}, headers=PAGE).status_code == 403
    assert web.put("/api/v1/mode", json={"mode": "observe"}, headers=PAGE).status_code == 200


def test_while_the_database_is_away_who_is_known_stays_known(
    web: FlaskClient,
    mailbox: api.AnsweringMailbox,
    source: api.FakeSource,
    clock: FakeClock,
    bearer: dict[str, str],
) -> None:
    sign_in(web, "ann")
    source.access.away = True
    clock.advance(60)
    assert state(web)["signed_in"]
    late = dashboard.create_app(api.make_context(api.AnsweringMailbox(), clock, source))
    late.test_client_class = Browser
    fresh = late.test_client()
    answer = fresh.post("/login", data={"name": "ann", "password": api.PASSWORD})
    assert answer.status_code == 503
    assert "not known" in answer.text
    assert fresh.get("/api/v1/mode").status_code == 200
    assert fresh.get("/api/v1/users", headers=bearer).status_code == 503


def test_a_change_that_services_refuse_changes_nothing(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    mailbox.answer = lambda _header: (False, 503, {"errors": [{"problem": "not recorded", "fix": "again"}]})
    body = {"name": "bob", "role": "viewer", "password": NEXT}
    assert web.post("/api/v1/users", json=body, headers=bearer).status_code == 503
    assert web.get("/api/v1/users", headers=bearer).json["items"][0]["name"] == "ann"
    assert sign_in(web, "ann") == 303, "a session needs no durable row"
    assert state(web)["signed_in"]
    assert web.put("/api/v1/users/ann", json={"enabled": False}, headers=bearer).status_code == 503
    assert state(web)["signed_in"]


def test_sql_wins_once_it_has_the_change(
    web: FlaskClient, source: api.FakeSource, clock: FakeClock, bearer: dict[str, str]
) -> None:
    user(web, bearer, "bob", "viewer")
    del source.access.rows["accounts"]["bob"]  # durable, not yet in SQL
    clock.advance(60)
    assert len(web.get("/api/v1/users", headers=bearer).json["items"]) == 2
    newer = {"role": "admin", "changed_us": clock.unix_us(), "sessions_from_us": 1}
    source.access.rows["accounts"]["bob"] = api.account(name="bob", **newer)
    clock.advance(60)
    roles = {row["name"]: row["role"] for row in web.get("/api/v1/users", headers=bearer).json["items"]}
    assert roles == {"ann": "operator", "bob": "admin"}


def test_the_oldest_session_gives_way(web: FlaskClient, context: AppContext) -> None:
    for _ in range(40):
        sign_in(browser(web), "ann")
    assert len(context.access.directory.open_sessions()) == 32


@pytest.fixture
def closed(mailbox: api.AnsweringMailbox, clock: FakeClock, source: api.FakeSource) -> FlaskClient:
    """A server whose reading needs a login."""
    context = api.make_context(mailbox, clock, source, reading="login")
    context.live.put(api.snapshot())
    mailbox.thread = MailboxThread(mailbox, context.live, context.operations, Stop())
    app = dashboard.create_app(context)
    app.test_client_class = Browser
    return app.test_client()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.operation)
def test_where_reading_needs_a_login_every_route_does(closed: FlaskClient, route: Any) -> None:
    """Review, finding 7: 25 routes answered everybody on the machine."""
    path = (PREFIX + route.path).replace("{", "").replace("}", "")
    answer = closed.open(path, method=route.method, json={})
    if route.operation in ("alive", "ready", "session_state"):
        assert answer.status_code in (200, 503)
        assert "erp" not in answer.text
    else:
        assert answer.status_code == 401
        assert answer.json["title"] == "Signing in is needed"


@pytest.mark.parametrize("path", [view.path.replace("<name>", "x") for view in VIEWS])
def test_no_view_is_shown_without_a_login(closed: FlaskClient, path: str) -> None:
    for address in (path, f"{path}/now", f"{path}/x.json") if path == "/reports" else (path,):
        answer = closed.get(address)
        assert (answer.status_code, answer.headers["Location"]) == (303, "/login")


def test_the_runbook_is_shown_to_everybody_and_the_views_to_who_may_see_them(closed: FlaskClient) -> None:
    """A notice leads there at night, on a telephone that is not signed in."""
    shown = closed.get("/runbook")
    assert shown.status_code == 200
    assert "<nav" not in shown.text
    sign_in(closed, "ann")
    assert '<nav aria-label="Views">' in closed.get("/runbook").text


def test_the_page_leads_to_the_form_and_back(closed: FlaskClient, bearer: dict[str, str]) -> None:
    answer = closed.get("/")
    assert (answer.status_code, answer.headers["Location"]) == (303, "/login")
    assert closed.get("/login").status_code == 200
    style = closed.get("/static/page.css")
    assert style.status_code == 200
    style.close()
    assert sign_in(closed, "ann") == 303
    assert closed.get("/").status_code == 200
    assert closed.get("/api/v1/slas").status_code == 200
    assert closed.delete("/api/v1/session", headers=PAGE).status_code == 200
    assert closed.get("/").status_code == 303
    assert closed.get("/api/v1/slas", headers=bearer).status_code == 200


def test_behind_a_proxy_its_header_says_who_asks(
    mailbox: api.AnsweringMailbox, clock: FakeClock, source: api.FakeSource
) -> None:
    url = "https://sla.example.org"
    context = api.make_context(mailbox, clock, source, reading="login", external_url=url)
    web = dashboard.create_app(context).test_client()
    headers = {"X-Forwarded-For": "6.6.6.6, 10.9.8.7", "X-Forwarded-Proto": "https", "Origin": url}
    form = {"name": "ann", "password": api.PASSWORD}
    answer = web.post("/login", data=form, headers=headers, base_url="http://sla.example.org")
    assert answer.status_code == 303
    assert "Secure" in answer.headers["Set-Cookie"]
    assert mailbox.recorded[-1]["body"]["row"]["address"] == "10.9.8.7", "what the proxy itself adds"
    from_elsewhere = {"REMOTE_ADDR": "192.0.2.7"}
    web.post(
        "/login", data=form, headers=headers, base_url="http://sla.example.org", environ_base=from_elsewhere
    )
    assert mailbox.recorded[-1]["body"]["row"]["address"] == "192.0.2.7", "no proxy: it says so of itself"


def new_api_token(web: FlaskClient, bearer: dict[str, str], **more: Any) -> dict[str, Any]:
    body = {"name": "deploy", "role": "operator", **more}
    answer = web.post("/api/v1/tokens", json=body, headers=bearer)
    assert answer.status_code == 200, answer.text
    made: dict[str, Any] = answer.json
    return made


def test_an_api_token_is_shown_once_and_says_its_name(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    made = new_api_token(web, bearer)
    secret = made["token"]
    assert len(secret) > 40
    assert secret not in str(mailbox.recorded)
    assert secret not in web.get("/api/v1/tokens", headers=bearer).text
    program = {"Authorization": f"Bearer {secret}", "Sla-User": "the-boss"}
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=program).status_code == 200
    assert mailbox.posted[0]["who"] == "token deploy", "not what the caller says"
    assert web.get("/api/v1/tokens", headers=program).status_code == 403, "an operator's"
    assert web.post("/api/v1/logins", headers=program).status_code == 403, "no browser session from it"
    again = web.post("/api/v1/tokens", json={"name": "deploy", "role": "viewer"}, headers=bearer)
    assert again.status_code == 409
    assert web.delete("/api/v1/tokens/deploy", headers=bearer).status_code == 200
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=program).status_code == 401
    assert web.get("/api/v1/mode", headers=program).status_code == 401, "also where reading is open"
    assert web.delete("/api/v1/tokens/deploy", headers=bearer).status_code == 404
    actions = [item["body"]["action"] for item in mailbox.recorded]
    assert actions == ["token-create", "token-revoke"]


def test_an_api_token_expires(web: FlaskClient, clock: FakeClock, bearer: dict[str, str]) -> None:
    made = new_api_token(web, bearer, days=1)
    program = {"Authorization": f"Bearer {made['token']}"}
    clock.advance(86_399)
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=program).status_code == 200
    clock.advance(1)
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=program).status_code == 401
    assert [row["name"] for row in web.get("/api/v1/tokens", headers=bearer).json["items"]] == ["prometheus"]


@pytest.mark.parametrize("given", ["sla_", "sla_x", "x" * 43, "", "sla_" + "0" * 64, "\u00ff"])
def test_tokens_that_nobody_made(web: FlaskClient, given: str) -> None:
    headers = {"Authorization": f"Bearer {given}"}
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=headers).status_code == 401


def test_a_live_stream_ends_with_its_api_token(
    web: FlaskClient, context: AppContext, bearer: dict[str, str]
) -> None:
    program = {"Authorization": f"Bearer {new_api_token(web, bearer)['token']}"}
    context.live.put(api.snapshot())
    answer = web.get("/api/v1/live/stream", headers=program, buffered=False)
    events = iter(answer.response)
    assert "event: snapshot" in str(next(events))
    assert web.delete("/api/v1/tokens/deploy", headers=bearer).status_code == 200
    context.live.put(api.snapshot(api.NOW_US + 1))
    assert next(events, None) is None
    answer.close()


def test_a_stranger_is_not_told_where_the_database_is(
    closed: FlaskClient, source: api.FakeSource, bearer: dict[str, str]
) -> None:
    """Review, finding 14."""
    source.away = True
    answer = closed.get("/api/v1/ready")
    assert answer.status_code == 503
    assert "database" in answer.text
    assert "postgresql" not in answer.text
    assert "postgresql" in closed.get("/api/v1/ready", headers=bearer).text


def test_a_change_that_is_refused_later_is_undone(
    web: FlaskClient, context: AppContext, mailbox: api.AnsweringMailbox, bearer: dict[str, str]
) -> None:
    """It was answered 202 and changed what this process knows; the refusal came afterwards."""
    sign_in(web, "ann")
    mailbox.answer = None
    assert web.put("/api/v1/users/ann", json={"role": "admin"}, headers=bearer).status_code == 202
    assert not state(web)["signed_in"], "a change ends sessions at once"
    body = {"name": "bob", "role": "viewer", "password": NEXT}
    assert web.post("/api/v1/users", json=body, headers=bearer).status_code == 202
    names = [row["name"] for row in web.get("/api/v1/users", headers=bearer).json["items"]]
    assert names == ["ann", "bob"]
    for request in mailbox.recorded[-2:]:
        refusal = {"req": request["req"], "ok": False, "code": 409, "body": {"detail": "no"}}
        mailbox.arrive(Kind.RESPONSE, refusal)
    (row,) = web.get("/api/v1/users", headers=bearer).json["items"]
    assert (row["name"], row["role"]) == ("ann", "operator")
    assert state(web)["signed_in"]


def test_of_two_changes_the_one_that_is_not_refused_holds(
    web: FlaskClient, mailbox: api.AnsweringMailbox, bearer: dict[str, str], source: api.FakeSource
) -> None:
    mailbox.stored = lambda _header: None  # durable, not yet in SQL
    assert web.put("/api/v1/users/ann", json={"enabled": False}, headers=bearer).status_code == 200
    mailbox.answer = None
    assert web.put("/api/v1/users/ann", json={"enabled": True}, headers=bearer).status_code == 202
    refusal = {"req": mailbox.recorded[-1]["req"], "ok": False, "code": 409, "body": {}}
    mailbox.arrive(Kind.RESPONSE, refusal)
    assert web.get("/api/v1/users", headers=bearer).json["items"][0]["state"] == "disabled"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"role": "viewer"}, 403),
        ({"role": "operator"}, 200),
        ({"enabled": False}, 401),
        (None, 401),
    ],
)
def test_a_token_does_no_more_than_who_made_it_may_do_now(
    web: FlaskClient, bearer: dict[str, str], change: dict[str, Any] | None, status: int
) -> None:
    user(web, bearer, "eva", "admin")
    assert sign_in(web, "eva") == 303
    first = web.post("/api/v1/tokens", json={"name": "first", "role": "admin"}, headers=PAGE).json
    by_token = {"Authorization": f"Bearer {first['token']}"}
    second = web.post("/api/v1/tokens", json={"name": "second", "role": "admin"}, headers=by_token).json
    assert second["created_by"] == "eva", "whose token made it"
    if change is None:
        assert web.delete("/api/v1/users/eva", headers=bearer).status_code == 200
    else:
        assert web.put("/api/v1/users/eva", json=change, headers=bearer).status_code == 200
    for made in (first, second):
        program = {"Authorization": f"Bearer {made['token']}"}
        answer = web.put("/api/v1/mode", json={"mode": "enforce"}, headers=program)
        assert answer.status_code == status
        assert web.get("/api/v1/users", headers=program).status_code in (401, 403)
    if change is None:
        user(web, bearer, "eva", "admin")
        assert web.get("/api/v1/users", headers=by_token).status_code == 401, "another person's account"


def test_a_token_sees_no_more_than_who_made_it_may_see_now(
    web: FlaskClient, bearer: dict[str, str], context: AppContext
) -> None:
    user(web, bearer, "eva", "admin")
    sign_in(web, "eva")
    body = {"name": "first", "role": "viewer", "labels": "tier=gold"}
    secret = web.post("/api/v1/tokens", json=body, headers=PAGE).json["token"]
    web.put("/api/v1/users/eva", json={"role": "viewer", "labels": "customer=acme"}, headers=bearer)
    principal = context.access.directory.by_token(secret)
    assert principal is not None
    assert (principal.role.name, principal.labels) == ("viewer", "tier=gold,customer=acme")

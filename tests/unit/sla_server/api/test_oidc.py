"""Sign-in through a provider of OpenID Connect: what its claims mean, what becomes of the account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from flask.testing import FlaskClient

import dashboard
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.kinds import Kind
from sla_server.api.config import ApiConfig, OidcConfig
from sla_server.api.context import AppContext
from sla_server.api.errors import LoginRefused, Unavailable
from sla_server.api.identity import ProviderIdentity, identity_of, is_complete
from sla_server.api.oidc import OidcProvider
from sla_server.api.passwords import PAIR_TRIES
from sla_server.events.recipients import network
from tests.support import api
from tests.unit.sla_server.api.conftest import Browser

ISSUER = "https://id.example.org"
DAY_US = 86_400_000_000
PAGE = {"Origin": "http://127.0.0.1:8411"}
SETTINGS: dict[str, Any] = {
    "issuer": ISSUER,
    "client_id": "sla",
    "title": "Example ID",
    "map": [
        {"value": "storage-admins", "role": "admin"},
        {"value": "storage", "role": "operator"},
        {"claim": "realm_access.roles", "value": "acme", "role": "viewer", "labels": "customer=acme"},
    ],
}
CONFIG = OidcConfig.model_validate(SETTINGS)
CLAIMS = {"sub": "5f3", "preferred_username": "Bea", "groups": ["storage", "storage-admins"]}


def test_the_first_row_that_fits_decides() -> None:
    assert identity_of(CONFIG, CLAIMS) == ProviderIdentity(f"{ISSUER} 5f3", "bea", "admin", "")
    acme = {"sub": "a", "preferred_username": "acme", "realm_access": {"roles": ["acme"]}}
    assert identity_of(CONFIG, acme) == ProviderIdentity(f"{ISSUER} a", "acme", "viewer", "customer=acme")
    assert identity_of(CONFIG, {**CLAIMS, "groups": "storage"}).role == "operator"
    assert is_complete(CONFIG, CLAIMS), "the first row fits, whatever else there is"
    assert not is_complete(CONFIG, {**CLAIMS, "groups": ["all"]}), "realm_access could still fit"
    assert is_complete(CONFIG, {**CLAIMS, "groups": ["all"], "realm_access": {"roles": []}})
    assert not is_complete(CONFIG, {**CLAIMS, "preferred_username": None})


@pytest.mark.parametrize(
    "groups", [None, [], "storage-admin", ["Storage"], 7, {"storage": True}, [["storage"]]]
)
def test_who_fits_no_row_has_no_role(groups: Any) -> None:
    assert identity_of(CONFIG, {**CLAIMS, "groups": groups}).role == ""


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"preferred_username": None}, "does not say a name"),
        ({"preferred_username": "two words"}, "'two words' as a name"),
        ({"preferred_username": ["bea"]}, "as a name"),
        ({"preferred_username": "../etc"}, "as a name"),
        ({"preferred_username": "Local"}, "as a name"),
        ({"sub": "x" * 600}, "claim sub"),
        ({"sub": "a\nb"}, "claim sub"),
    ],
)
def test_names_that_no_account_can_have_are_refused(claims: dict[str, Any], words: str) -> None:
    with pytest.raises(LoginRefused, match=words):
        identity_of(CONFIG, {**CLAIMS, **claims})


def test_an_address_of_mail_is_a_name_only_if_the_provider_has_verified_it() -> None:
    config = OidcConfig.model_validate({**SETTINGS, "name_claim": "email"})
    claims = {**CLAIMS, "email": "Bea@Example.org", "email_verified": True}
    assert identity_of(config, claims).name == "bea@example.org"
    assert identity_of(config, {**claims, "email_verified": "true"}).name == "bea@example.org"
    for said in (False, "false", None, "yes", [True]):
        with pytest.raises(LoginRefused, match="not verified"):
            identity_of(config, {**claims, "email_verified": said})
    assert is_complete(config, claims)
    assert not is_complete(config, {**claims, "email_verified": None}), "userinfo may say it"


def test_an_address_of_mail_gives_a_role_only_if_the_provider_has_verified_it() -> None:
    rows = [{"claim": "email", "value": "boss@example.org", "role": "admin"}]
    config = OidcConfig.model_validate({**SETTINGS, "map": rows})
    claims = {**CLAIMS, "email": "boss@example.org"}
    assert identity_of(config, {**claims, "email_verified": True}).role == "admin"
    assert [identity_of(config, {**claims, "email_verified": it}).role for it in (False, None)] == ["", ""]
    assert not is_complete(config, claims)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"issuer": "http://id.example.org"}, "https://HOST"),
        ({"client_id": ""}, "client_id"),
        ({"map": []}, "no account could come in"),
        ({"scopes": ["profile"]}, "openid"),
        ({"redirect_url": "https://sla.example.org/"}, "/login/oidc/callback"),
        ({"map": [{"value": "x", "role": "operator", "labels": "a=b"}]}, "viewer"),
        ({"map": [{"value": "x", "role": "viewer", "labels": "a b=c"}]}, "label"),
        ({"map": [{"value": "x", "role": "root"}]}, "viewer"),
    ],
)
def test_settings_that_cannot_work_are_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OidcConfig.model_validate({**SETTINGS, **changed})


def test_a_server_that_listens_everywhere_must_say_where_browsers_come_back() -> None:
    settings = {"listen": "0.0.0.0:8411", "reading": "login", "tls": {"certificate": "/etc/sla/page.pem"}}
    with pytest.raises(ValueError, match="redirect_url"):
        ApiConfig.model_validate({**settings, "oidc": SETTINGS})
    oidc = {**SETTINGS, "redirect_url": "https://sla.example.org:8411/login/oidc/callback"}
    assert ApiConfig.model_validate({**settings, "oidc": oidc}).hosts() == ["sla.example.org"]


@dataclass
class FakeProvider:
    """Sends browsers to an address and takes anybody back; ``says`` is who they are."""

    says: ProviderIdentity | Exception = field(
        default_factory=lambda: ProviderIdentity(f"{ISSUER} 5f3", "bea", "operator", "")
    )
    begin_fails: Exception | None = None
    finished: list[tuple[str, dict[str, str]]] = field(default_factory=list)

    def begin(self) -> tuple[str, str]:
        if self.begin_fails is not None:
            raise self.begin_fails
        return f"{ISSUER}/authorize?state=s", "pending"

    def finish(self, cookie: str, answer: Mapping[str, str]) -> ProviderIdentity:
        self.finished.append((cookie, dict(answer)))
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@dataclass
class DrippingSocket:
    """It gives a byte a second, of a head that never ends."""

    clock: FakeClock
    reads: int = 0
    is_closed: bool = False

    def settimeout(self, _limit_s: float) -> None:
        return

    def send(self, data: memoryview) -> int:
        return len(data)

    def recv(self, _most: int) -> bytes:
        self.clock.advance(1.0)
        self.reads += 1
        return (b"HTTP/1.1 200 OK\r\nA: " + b"a" * 1000)[self.reads - 1 : self.reads]

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def provider() -> FakeProvider:
    return FakeProvider()


@pytest.fixture
def web(context: AppContext, provider: FakeProvider) -> FlaskClient:
    settings = context.config.model_copy(update={"oidc": CONFIG})
    app = dashboard.create_app(replace(context, config=settings, oidc=provider))  # type: ignore[arg-type]
    app.test_client_class = Browser
    return app.test_client()


def come_back(web: FlaskClient, query: str = "code=c&state=s") -> Any:
    web.get("/login/oidc")
    return web.get(f"/login/oidc/callback?{query}")


def state(web: FlaskClient) -> dict[str, Any]:
    answer: dict[str, Any] = web.get("/api/v1/session").json
    return answer


def actions(mailbox: api.AnsweringMailbox) -> list[str]:
    return [each["body"]["action"] for each in mailbox.recorded]


def test_the_form_leads_to_the_provider_and_the_way_back_signs_in(
    web: FlaskClient, provider: FakeProvider, mailbox: api.AnsweringMailbox, source: api.FakeSource
) -> None:
    assert 'href="/login/oidc"' in web.get("/login").text
    assert "Sign in with Example ID" in web.get("/login").text
    there = web.get("/login/oidc")
    assert (there.status_code, there.headers["Location"]) == (303, f"{ISSUER}/authorize?state=s")
    sent = there.headers["Set-Cookie"]
    assert all(word in sent for word in ("HttpOnly", "Path=/login/oidc", "SameSite=Lax")), sent
    back = web.get("/login/oidc/callback?code=c&state=s")
    # No redirect: the browser would not send the session's cookie along a chain that another site began.
    assert (back.status_code, "Location" in back.headers) == (200, False)
    assert 'content="0; url=/"' in back.text
    assert provider.finished == [("pending", {"code": "c", "state": "s"})]
    assert state(web) == {"signed_in": True, "who": "bea", "role": "operator", "labels": "", "account": "bea"}
    assert actions(mailbox) == ["user-add", "login"]
    assert mailbox.recorded[0]["who"] == "bea (OpenID Connect)"
    assert mailbox.recorded[1]["body"]["after"]["by"] == "OpenID Connect"
    row = source.access.rows["accounts"]["bea"]
    assert (row["identity"], row["password"], row["state"]) == (f"{ISSUER} 5f3", "", "active")
    assert web.put("/api/v1/mode", json={"mode": "enforce"}, headers=PAGE).status_code == 200
    assert mailbox.posted[-1]["who"] == "bea"


def test_no_address_says_where_the_browser_goes(web: FlaskClient) -> None:
    there = web.get("/login/oidc?next=https://evil.example/&redirect_uri=https://evil.example/")
    assert there.headers["Location"] == f"{ISSUER}/authorize?state=s"
    back = web.get("/login/oidc/callback?code=c&state=s&next=https://evil.example/&url=//evil.example")
    assert "evil" not in back.text + str(back.headers)


def test_the_mapping_holds_at_each_sign_in_and_at_once(
    web: FlaskClient, provider: FakeProvider, mailbox: api.AnsweringMailbox
) -> None:
    come_back(web)
    other = Browser(web.application, web.application.response_class)
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "viewer", "customer=acme")
    come_back(other)
    assert actions(mailbox) == ["user-add", "login", "user-change", "login"]
    assert (state(web)["role"], state(web)["labels"]) == ("viewer", "customer=acme")
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "", "")
    refused = come_back(other)
    assert refused.status_code == 403
    assert "may not come in here" in refused.text
    assert not state(web)["signed_in"], "who may come in no more is signed out everywhere"
    assert actions(mailbox)[-2:] == ["user-change", "login-failed"]
    assert "may not come in" in mailbox.recorded[-1]["body"]["after"]["why"]


def test_who_may_come_in_no_more_has_no_api_tokens_and_no_sessions_under_a_former_name(
    web: FlaskClient, provider: FakeProvider, mailbox: api.AnsweringMailbox
) -> None:
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "admin", "")
    come_back(web)
    made = web.post("/api/v1/tokens", json={"name": "robot", "role": "admin"}, headers=PAGE)
    token = {"Authorization": f"Bearer {made.json['token']}"}
    program = web.application.test_client()
    assert program.get("/api/v1/users", headers=token).status_code == 200
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "beatrice", "", "")
    other = web.application.test_client()
    assert come_back(other).status_code == 403
    assert not state(web)["signed_in"]
    assert program.get("/api/v1/users", headers=token).status_code == 401
    assert mailbox.recorded[-2]["body"]["after"] == {"state": "withdrawn"}
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "viewer", "")
    assert come_back(other).status_code == 200, "the provider lets them in again"
    assert (state(other)["role"], state(web)["signed_in"]) == ("viewer", False)
    assert program.get("/api/v1/users", headers=token).status_code == 403, "as what they are now"


def robot_of_bea(web: FlaskClient, provider: FakeProvider) -> Any:
    """The answer of the API token's creation; its maker has just signed in."""
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "admin", "")
    come_back(web)
    return web.post("/api/v1/tokens", json={"name": "robot", "role": "admin", "days": 365}, headers=PAGE).json


def test_api_tokens_end_so_long_after_their_maker_has_signed_in_last(
    web: FlaskClient,
    provider: FakeProvider,
    mailbox: api.AnsweringMailbox,
    clock: FakeClock,
    context: AppContext,
    source: api.FakeSource,
) -> None:
    """Whom the provider drops, and who never comes back, keeps no token for its years."""
    begun_us = clock.unix_us()
    made = robot_of_bea(web, provider)
    assert made["ends_us"] - begun_us == 30 * DAY_US < made["expires_us"] - begun_us
    token = {"Authorization": f"Bearer {made['token']}"}
    program = web.application.test_client()
    clock.advance(29 * 86_400)
    assert program.get("/api/v1/users", headers=token).status_code == 200
    come_back(web)
    (listed,) = [row for row in web.get("/api/v1/tokens").json["items"] if row["name"] == "robot"]
    assert listed["ends_us"] == clock.unix_us() + 30 * DAY_US, "from the newest sign-in"
    clock.advance(30 * 86_400 - 1)
    context.access.end_lapsed_tokens()
    assert program.get("/api/v1/users", headers=token).status_code == 200
    clock.advance(1)
    assert program.get("/api/v1/users", headers=token).status_code == 401, "before it is recorded, too"
    assert "token-lapse" not in actions(mailbox)
    clock.advance(60)
    context.access.end_lapsed_tokens()
    context.access.end_lapsed_tokens()
    assert actions(mailbox).count("token-lapse") == 1
    entry = mailbox.recorded[-1]
    assert (entry["who"], entry["body"]["subject"]) == ("OpenID Connect", "robot")
    assert source.access.rows["api_tokens"][made["token_id"]]["revoked_us"] == clock.unix_us()
    assert source.access.rows["api_tokens"]["70c3"]["revoked_us"] is None, "that of a local account"
    come_back(web)
    assert program.get("/api/v1/users", headers=token).status_code == 401, "for good"


def test_what_has_lapsed_does_not_come_back_with_its_maker(
    web: FlaskClient, provider: FakeProvider, mailbox: api.AnsweringMailbox, clock: FakeClock
) -> None:
    made = robot_of_bea(web, provider)
    clock.advance(31 * 86_400)
    come_back(web)
    token = {"Authorization": f"Bearer {made['token']}"}
    assert web.application.test_client().get("/api/v1/users", headers=token).status_code == 401
    assert "token-lapse" in actions(mailbox)


def test_what_has_lapsed_stays_so_though_that_cannot_be_recorded(
    web: FlaskClient,
    provider: FakeProvider,
    mailbox: api.AnsweringMailbox,
    clock: FakeClock,
    context: AppContext,
    source: api.FakeSource,
) -> None:
    """The disk is full, say: the sign-in that found it counts, and yet must not revive it."""
    made = robot_of_bea(web, provider)
    clock.advance(31 * 86_400)
    takes = mailbox.answer
    assert takes is not None
    mailbox.answer = lambda header: None if header["body"].get("action") == "token-lapse" else takes(header)
    assert come_back(web).status_code == 200
    (lapse,) = [header for header in mailbox.recorded if header["body"]["action"] == "token-lapse"]
    mailbox.arrive(Kind.RESPONSE, {"req": lapse["req"], "ok": False, "code": 503, "body": {"errors": []}})
    program, token = web.application.test_client(), {"Authorization": f"Bearer {made['token']}"}
    assert program.get("/api/v1/users", headers=token).status_code == 401
    assert source.access.rows["api_tokens"][made["token_id"]]["revoked_us"] is None
    mailbox.answer = takes
    context.access.end_lapsed_tokens()
    assert source.access.rows["api_tokens"][made["token_id"]]["revoked_us"] == clock.unix_us()
    assert program.get("/api/v1/users", headers=token).status_code == 401


def test_no_lock_is_held_while_services_are_waited_for(
    context: AppContext, mailbox: api.AnsweringMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[bool] = []
    monkeypatch.setattr(  # what a wait does is its own test's
        context.operations, "wait", lambda _operation: held.append(context.access._provided.locked())
    )
    mailbox.answer = None
    context.access.by_provider(lambda: ProviderIdentity(f"{ISSUER} 5f3", "bea", "viewer", ""), "127.0.0.1")
    context.access.by_provider(lambda: ProviderIdentity(f"{ISSUER} 5f3", "bea", "operator", ""), "127.0.0.1")
    assert held == [False, False]


def test_all_that_a_provider_is_asked_at_a_sign_in_has_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers byte by byte: the time-out of each read would never be reached."""
    clock = FakeClock()
    provider = OidcProvider(CONFIG, "https://sla.example.org/login/oidc/callback", b"k" * 32, clock)
    dripping = DrippingSocket(clock)
    monkeypatch.setattr(network, "connect", lambda *_where: dripping)
    monkeypatch.setattr(  # TLS needs the provider's side
        network.BoundedStream, "start_tls", lambda stream, *_args, **_how: stream
    )
    with pytest.raises(Unavailable, match="cannot be reached: no answer in time"):
        provider.begin()
    assert (dripping.reads, dripping.is_closed) == (10, True), "a byte a second"
    assert provider._places.acquire(blocking=False)


def test_the_session_ends_absolutely(web: FlaskClient, clock: FakeClock) -> None:
    come_back(web)
    clock.advance(11 * 3600)
    assert state(web)["signed_in"]
    clock.advance(3600)
    assert not state(web)["signed_in"]


@pytest.mark.parametrize(
    ("says", "words"),
    [
        (ProviderIdentity(f"{ISSUER} 99", "ann", "admin", ""), "is a local one"),
        (ProviderIdentity("https://other.example 5f3", "bea", "admin", ""), "another person"),
        (ProviderIdentity(f"{ISSUER} 77", "bea", "admin", ""), "another person"),
        (ProviderIdentity(f"{ISSUER} 5f3", "beatrice", "admin", ""), "your account is &#39;bea&#39;"),
    ],
)
def test_nobody_gets_the_account_of_another_or_a_second_one(
    web: FlaskClient, provider: FakeProvider, source: api.FakeSource, says: ProviderIdentity, words: str
) -> None:
    come_back(web)
    provider.says = says
    other = Browser(web.application, web.application.response_class)
    refused = come_back(other)
    assert refused.status_code == 403
    assert words in refused.text
    assert not state(other)["signed_in"]
    assert source.access.rows["accounts"]["bea"]["role"] == "operator"


def test_disabled_accounts_stay_out_and_deleted_ones_are_made_again(
    web: FlaskClient, bearer: dict[str, str], provider: FakeProvider
) -> None:
    come_back(web)
    assert web.put("/api/v1/users/bea", json={"enabled": False}, headers=bearer).status_code == 200
    assert "is disabled" in come_back(web).text
    assert not state(web)["signed_in"]
    assert web.delete("/api/v1/users/bea", headers=bearer).status_code == 200
    provider.says = ProviderIdentity(
        f"{ISSUER} 78", "bea", "viewer", ""
    )  # the provider gave the name to another person
    assert come_back(web).status_code == 200
    assert state(web)["role"] == "viewer"


def test_the_provider_rules_its_accounts(web: FlaskClient, bearer: dict[str, str]) -> None:
    come_back(web)
    for path, body in (
        ("/api/v1/users/bea", {"role": "admin"}),
        ("/api/v1/users/bea", {"labels": ""}),
        ("/api/v1/users/bea/password", {"password": "eight tall flamingos"}),
    ):
        answer = web.put(path, json=body, headers=bearer)
        assert answer.status_code == 409, answer.text
        assert "provider" in answer.json["detail"]
    refused = web.post("/login", data={"name": "bea", "password": ""})
    assert refused.status_code == 403


def test_a_provider_that_is_away_leaves_local_accounts(web: FlaskClient, provider: FakeProvider) -> None:
    provider.begin_fails = Unavailable(
        "the sign-in provider cannot be reached: refused", "Use a local account"
    )
    answer = web.get("/login/oidc")
    assert answer.status_code == 503
    assert "cannot be reached" in answer.text
    assert 'type="password"' in answer.text, "the form for local accounts is there"
    provider.says = Unavailable("the sign-in provider cannot be reached: refused")
    for _ in range(PAIR_TRIES[0] + 3):
        assert web.get("/login/oidc/callback?code=c&state=s").status_code == 503  # no try was taken
    assert web.post("/login", data={"name": "ann", "password": api.PASSWORD}).status_code == 303
    assert state(web)["who"] == "ann"


def test_refusals_are_limited(
    web: FlaskClient, provider: FakeProvider, mailbox: api.AnsweringMailbox
) -> None:
    provider.says = LoginRefused("no")
    statuses = [web.get("/login/oidc/callback?code=c").status_code for _ in range(PAIR_TRIES[0] + 2)]
    assert statuses == [403] * PAIR_TRIES[0] + [429] * 2
    assert actions(mailbox) == ["login-failed"], "further ones are counted"
    assert web.post("/login", data={"name": "ann", "password": api.PASSWORD}).status_code == 303


def test_other_web_sites_lock_nobody_out(web: FlaskClient, provider: FakeProvider) -> None:
    """An image there, of the address of the way back, makes a visitor's browser come without having begun."""
    real = OidcProvider(CONFIG, "https://sla.example.org/login/oidc/callback", b"k" * 32, FakeClock())
    with pytest.raises(LoginRefused) as refused:
        real.finish("", {"code": "c", "state": "s"})
    provider.says = refused.value
    for _ in range(PAIR_TRIES[0] + 3):
        assert web.get("/login/oidc/callback?code=c").status_code == 403
    provider.says = ProviderIdentity(f"{ISSUER} 5f3", "bea", "operator", "")
    assert come_back(web).status_code == 200


def test_many_who_begin_take_no_places_of_those_who_sign_in() -> None:
    """What the provider says of itself is known, so nothing is asked: no connection is made ready."""
    clock = FakeClock()
    provider = OidcProvider(CONFIG, "https://sla.example.org/login/oidc/callback", b"k" * 32, clock)
    provider._known = clock.monotonic_ns(), {"authorization_endpoint": f"{ISSUER}/authorize"}, {}
    while provider._places.acquire(blocking=False):
        pass
    address, cookie = provider.begin()
    assert address.startswith(f"{ISSUER}/authorize?")
    assert "code_challenge=" in address
    assert provider._pending(cookie)["state"] in address


def test_without_a_provider_there_is_no_way_to_one(context: AppContext) -> None:
    app = dashboard.create_app(context)
    app.test_client_class = Browser
    web = app.test_client()
    assert "oidc" not in web.get("/login").text
    assert web.get("/login/oidc").status_code == 404
    assert web.get("/login/oidc/callback?code=c&state=s").status_code == 404

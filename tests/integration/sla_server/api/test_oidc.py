"""Sign-in through a real provider of OpenID Connect on loopback, over TLS, with PKCE required."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest

from pmdaemon.runtime.stop import Stop
from sla_server.api.config import ApiConfig
from sla_server.api.server import WebServer, open_listener
from tests.support import api, oidc


class Site:
    """A server whose people sign in through the provider, and a browser that knows no address by itself."""

    def __init__(self, folder: Path, provider: oidc.Provider, **settings: Any) -> None:
        config = ApiConfig.model_validate(
            {"listen": "127.0.0.1:0", "reading": "login", "oidc": provider.settings(**settings)}
        )
        self.provider = provider
        self.stop = Stop()
        self.mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {}))
        self.listener = open_listener(config.listen)
        self.source = api.FakeSource()
        self.mailbox.stored = self.source.access.stored
        self.server = WebServer(
            config, api.data_dir(folder), self.source, self.mailbox, self.listener, self.stop
        )
        provider.redirect_url = f"{self.server.address}login/oidc/callback"
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()
        self.browser = self.new_browser()
        self.outside = httpx.Client(verify=ssl.create_default_context(cafile=provider.ca), timeout=60)

    def new_browser(self) -> httpx.Client:
        return httpx.Client(base_url=self.server.address, timeout=60)

    def to_provider(self) -> str:
        """Where the page sends the browser."""
        answer = self.browser.get("/login/oidc")
        assert answer.status_code == 303, answer.text
        return str(answer.headers["Location"])

    def at_provider(self, address: str) -> str:
        """What the provider sends the browser back to."""
        answer = self.outside.get(address)
        assert answer.status_code == 302, answer.text
        return str(answer.headers["Location"])

    def sign_in(self) -> httpx.Response:
        return self.browser.get(self.at_provider(self.to_provider()))

    def who(self) -> str:
        return str(self.browser.get("/api/v1/session").json().get("who", ""))

    def close(self) -> None:
        self.browser.close()
        self.outside.close()
        self.stop.set()
        self.thread.join(60)
        self.listener.close()
        self.mailbox.close()


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[oidc.Provider]:
    with oidc.running(tmp_path) as made:
        made.people["7f3a"] = {"preferred_username": "Bea", "groups": ["all", "storage"]}
        made.people["90aa"] = {"preferred_username": "mallory", "groups": ["all"], "tenant": "evil"}
        made.people["41bc"] = {
            "preferred_username": "acme-ops",
            "userinfo": {"tenant": "acme", "groups": []},
        }
        made.at_the_browser = "7f3a"
        yield made


@pytest.fixture
def site(tmp_path: Path, provider: oidc.Provider) -> Iterator[Site]:
    made = Site(tmp_path, provider)
    yield made
    made.close()


def test_the_whole_sign_in(site: Site) -> None:
    assert site.browser.get("/").headers["Location"] == "/login"
    address = site.to_provider()
    asked = {name: values[0] for name, values in parse_qs(urlsplit(address).query).items()}
    assert asked["response_type"] == "code"
    assert (asked["client_id"], asked["redirect_uri"]) == (oidc.CLIENT, site.provider.redirect_url)
    assert asked["code_challenge_method"] == "S256"
    assert len({asked["state"], asked["nonce"], asked["code_challenge"]}) == 3
    done = site.browser.get(site.at_provider(address))
    assert (done.status_code, "Location" in done.headers) == (200, False)
    assert site.who() == "bea"
    assert site.browser.get("/").status_code == 200
    row = site.source.access.rows["accounts"]["bea"]
    assert (row["role"], row["identity"]) == ("operator", f"{site.provider.issuer} 7f3a")
    written = str(site.mailbox.recorded)
    assert oidc.SECRET not in written
    assert [each["body"]["action"] for each in site.mailbox.recorded] == ["user-add", "login"]
    assert site.provider.asked.count("/jwks") == 1
    assert "/userinfo" not in site.provider.asked, "the ID token had every claim that was named first"


def test_claims_that_only_userinfo_has_are_asked_there(site: Site) -> None:
    site.provider.at_the_browser = "41bc"
    assert site.sign_in().status_code == 200
    assert site.who() == "acme-ops"
    assert site.source.access.rows["accounts"]["acme-ops"]["labels"] == "customer=acme"


def test_who_fits_no_row_is_refused_and_recorded(site: Site) -> None:
    site.provider.at_the_browser = "90aa"
    refused = site.sign_in()
    assert (refused.status_code, site.who()) == (403, "")
    assert "may not come in here" in refused.text
    assert site.mailbox.recorded[-1]["body"]["action"] == "login-failed"
    assert "mallory" not in site.source.access.rows["accounts"]


@pytest.mark.parametrize(
    ("lies", "words"),
    [
        ({"nonce": "of-another-sign-in"}, "nonce"),
        ({"iss": "https://id.example.org"}, "iss"),
        ({"aud": ["another-client"]}, "aud"),
        ({"aud": [oidc.CLIENT, "another-client"], "azp": "another-client"}, "azp"),
        ({"exp": 1_600_000_000}, "expired"),
        ({"iat": 4_000_000_000}, "not accepted"),
        ({"at_hash": "AAAA"}, "at_hash"),
        ({"sub": ""}, "sub"),
    ],
)
def test_an_id_token_that_is_not_for_this_sign_in_is_refused(
    site: Site, lies: dict[str, Any], words: str
) -> None:
    site.provider.lies = lies
    refused = site.sign_in()
    assert (refused.status_code, site.who()) == (403, "")
    assert words in refused.text
    assert list(site.source.access.rows["accounts"]) == ["ann"]


def test_keys_are_read_again_when_the_provider_changes_them_and_strange_ones_refused(site: Site) -> None:
    assert site.sign_in().status_code == 200
    site.provider.key = oidc.other_key()
    assert site.sign_in().status_code == 200
    assert site.provider.asked.count("/jwks") == 2
    site.provider.signs_with = oidc.other_key()
    assert site.sign_in().status_code == 403
    site.provider.signs_with.dict_value["kid"] = site.provider.key.kid
    assert site.sign_in().status_code == 403


def test_the_way_back_belongs_to_the_browser_that_went_there(site: Site) -> None:
    """Login CSRF: another's code does not sign in the victim's browser, nor does one's own a second time."""
    back = site.at_provider(site.to_provider())
    stranger = site.new_browser()
    assert "has not begun" in stranger.get(back).text
    begun = stranger.get("/login/oidc")
    assert begun.status_code == 303
    refused = stranger.get(back)
    assert (refused.status_code, "not begun in this browser" in refused.text) == (403, True)
    assert not stranger.get("/api/v1/session").json()["signed_in"]
    assert site.browser.get(back).status_code == 200
    kept = dict(site.browser.cookies)
    assert not any(name.startswith("sla_oidc") for name in kept), "the cookie of the sign-in is gone"
    assert site.browser.get(back).status_code == 403
    stranger.close()


def test_a_code_without_its_verifier_is_worth_nothing(site: Site) -> None:
    first = parse_qs(urlsplit(site.at_provider(site.to_provider())).query)["code"][0]
    second = parse_qs(urlsplit(site.at_provider(site.to_provider())).query)
    query = urlencode({"code": first, "state": second["state"][0]})
    refused = site.browser.get(f"/login/oidc/callback?{query}")
    assert (refused.status_code, site.who()) == (403, "")
    assert "invalid_grant" in refused.text


@pytest.mark.parametrize("query", ["error=access_denied", "", "code=x&state=x", "iss=https://evil.example"])
def test_what_else_may_come_back(site: Site, query: str) -> None:
    state = parse_qs(urlsplit(site.to_provider()).query)["state"][0]
    given = query if "state=" in query else f"{query}&state={state}"
    refused = site.browser.get(f"/login/oidc/callback?{given}")
    assert (refused.status_code, site.who()) == (403, "")
    assert 'type="password"' in refused.text


def test_a_provider_that_is_away_or_misconfigured_leaves_local_accounts(
    tmp_path: Path, provider: oidc.Provider
) -> None:
    provider.secret_file.write_text("another-secret")
    site = Site(tmp_path, provider)
    refused = site.sign_in()
    assert (refused.status_code, "invalid_client" in refused.text) == (403, True)
    provider.secret_file.chmod(0o644)
    assert "chmod 600" in site.browser.get("/login/oidc").text
    provider.secret_file.chmod(0o600)
    back = site.at_provider(site.to_provider())
    provider.close()
    away = site.browser.get(back)
    assert (away.status_code, "cannot be reached" in away.text) == (503, True)
    signed = site.browser.post("/login", data={"name": "ann", "password": api.PASSWORD})
    assert (signed.status_code, site.who()) == (303, "ann")
    site.close()

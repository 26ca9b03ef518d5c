from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sla_server.api.config import ApiConfig


@pytest.mark.parametrize("text", ["127.0.0.1:8411", "localhost:0", "[::1]:8411", "127.8.0.1:1"])
def test_loopback_needs_nothing_more(text: str) -> None:
    assert ApiConfig(listen=text).listen == text


@pytest.mark.parametrize("text", ["8411", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:70000", "host:1", ""])
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(ValidationError):
        ApiConfig(listen=text)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ValidationError):
        ApiConfig(lisen="127.0.0.1:1")  # type: ignore[call-arg]


def test_token_path() -> None:
    assert ApiConfig().token_path(Path("data")) == Path("data/api.token")
    assert ApiConfig(token_file=Path("other")).token_path(Path("data")) == Path("other")


GUARDED = {"reading": "login", "tls": {"certificate": "/etc/sla/page.pem"}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "0.0.0.0:8411"}, "certificate in .api.tls.*reading = .login"),
        ({"listen": "10.0.0.1:8411", "reading": "login"}, "certificate in .api.tls."),
        ({"listen": "[::]:8411", "tls": GUARDED["tls"]}, "reading = .login"),
        ({"external_url": "https://sla.example.org"}, "Set reading = .login"),
        ({"external_url": "http://sla.example.org", "reading": "login"}, "https://HOST"),
        ({"external_url": "https://sla.example.org/sla", "reading": "login"}, "https://HOST"),
        ({"tls": {"key": "/etc/sla/page.key"}}, "without a certificate"),
    ],
)
def test_what_would_open_the_door_to_others_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ApiConfig.model_validate(settings)


def test_beyond_loopback_with_tls_and_login() -> None:
    made = ApiConfig.model_validate({"listen": "0.0.0.0:8411", "allowed_hosts": ["sla.example"], **GUARDED})
    assert (made.is_https, made.hosts()) == (True, ["sla.example"])
    proxy = ApiConfig.model_validate({"reading": "login", "external_url": "https://sla.example.org/"})
    assert (proxy.is_https, proxy.hosts()) == (True, ["127.0.0.1", "sla.example.org"])

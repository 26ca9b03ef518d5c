from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from sla_server.api.config import ApiConfig, loopback_address


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("127.0.0.1:8411", ("127.0.0.1", 8411)),
        ("localhost:0", ("127.0.0.1", 0)),
        ("[::1]:8411", ("::1", 8411)),
        ("127.8.0.1:1", ("127.8.0.1", 1)),
    ],
)
def test_loopback_addresses(text: str, expected: tuple[str, int]) -> None:
    assert loopback_address(text) == expected


@pytest.mark.parametrize("text", ["0.0.0.0:8411", "10.0.0.1:8411", "[::]:8411"])
def test_other_addresses_are_refused_and_the_text_says_what_is_missing(text: str) -> None:
    with pytest.raises(ValidationError, match=r"neither TLS nor accounts.*ssh -L"):
        ApiConfig(listen=text)


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

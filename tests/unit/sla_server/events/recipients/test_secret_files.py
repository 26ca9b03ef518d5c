"""Secrets come from files that are closed to others, and are taken out of texts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sla_server.events.recipients.secret_files import (
    MOST_BYTES,
    SecretUnusable,
    hidden,
    read_address,
    read_secret,
    secrets_of_address,
)


def _file(path: Path, content: bytes = b" key-1 \n", mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o640])
def test_white_space_around_a_secret_does_not_count(tmp_path: Path, mode: int) -> None:
    assert read_secret(_file(tmp_path / "a", mode=mode)) == "key-1"


@pytest.mark.parametrize(
    ("content", "mode", "problem"),
    [
        (b"key", 0o644, "is open to others (mode 0644). Run: chmod 600"),
        (b"key", 0o660, "is open to others (mode 0660)"),
        (b" \n", 0o600, "is empty"),
        (b"old\nnew\n", 0o600, "holds more than one line"),
        (b"k\xc3\xa4y", 0o600, "characters that are not ASCII"),
        (b"\xff\xfe", 0o600, "is not UTF-8 text"),
        (b"a" * (MOST_BYTES + 1), 0o600, f"is larger than {MOST_BYTES} bytes"),
    ],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes, mode: int, problem: str) -> None:
    path = _file(tmp_path / "a", content, mode)
    with pytest.raises(SecretUnusable) as caught:
        read_secret(path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)


def test_a_file_that_is_missing_or_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SecretUnusable, match=r"no such file or directory\. Make it"):
        read_secret(tmp_path / "missing")
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(SecretUnusable, match="is no regular file"):
        read_secret(tmp_path / "fifo")


def test_secrets_are_hidden_in_texts() -> None:
    assert hidden("401: bad token key-1 of key-1", ["key-1", ""]) == "401: bad token *** of ***"


def test_an_address_that_is_a_secret_is_hidden_in_parts() -> None:
    address = "https://user:password-1@hooks.example/services/T01/tok%20en-1?key=secret-22"
    secrets = secrets_of_address(address)
    assert hidden(address, secrets) == "***"
    assert hidden("no /services/T01/tok%20en-1?key=secret-22 here", secrets) == "no *** here"
    for part in ("password-1", "tok%20en-1", "tok en-1", "secret-22"):
        assert hidden(f"bad <{part}>", secrets) == "bad <***>"
    assert secrets_of_address("https://a.example/x") == ["https://a.example/x"]


def test_a_list_of_addresses_may_have_lines(tmp_path: Path) -> None:
    path = _file(tmp_path / "a", b"mailto://one\n# zwei\nmailto://drei\n")
    assert read_secret(path, may_have_lines=True).count("\n") == 2


@pytest.mark.parametrize(
    "content",
    ["key-0001", "https://a.example:key-0001/x", "https://[key-0001/x", "ftp://key-0001", "http:///x"],
)
def test_what_is_no_address_is_refused_and_not_repeated(tmp_path: Path, content: str) -> None:
    with pytest.raises(SecretUnusable, match="holds no address") as caught:
        read_address(_file(tmp_path / "a", content.encode()))
    assert "key-0001" not in str(caught.value)
    assert read_address(_file(tmp_path / "a", b"https://a.example:8/x\n")) == "https://a.example:8/x"

"""Space of an array: what is asked, what its answer means, and what it must not do."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.space.readers import SpaceUnreadable
from pmdaemon.wire.messages.space import Space
from sla_server.events.recipients.network import Resolver
from sla_server.storage_resources.config import RestSource
from sla_server.storage_resources.rest import MOST_BYTES, rest_reader

ANSWER = {"records": [{"space": {"size": "2000", "used": 1500.0, "name": "x", "many": [1, 2]}}]}
SOURCE = {
    "name": "array-1",
    "url": "https://array-1.example/api/space",
    "size": "$.records[0].space.size",
    "used": "$.records[0].space.used",
}
Talk = Callable[[socket.socket], object]


@contextlib.contextmanager
def array(talk: Talk) -> Iterator[tuple[int, list[bytes]]]:
    """A server for one question: its port, and the question."""
    asked: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                asked.append(connection.recv(65536))
                talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1], asked
    thread.join(10)


def asked(talk: Talk, limit_s: float = 30, query: str = "", **source: Any) -> Space:
    with array(talk) as (port, _):
        url = f"http://127.0.0.1:{port}/api/space{query}"
        return rest_reader(RestSource.model_validate({**SOURCE, "url": url, **source}), limit_s)(7)


def says(content: Any = ANSWER, status: str = "200 OK", more: str = "") -> Talk:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n{more}\r\n"
    return lambda connection: connection.sendall(head.encode() + text)


def test_figures_are_found_by_their_paths() -> None:
    pytest.importorskip("jsonpath")
    found = asked(says(), unit_bytes=1024, backend="disk-1")
    assert found == Space("array-1", "rest", "disk-1", 2_048_000, 1_536_000, None, 0, 0, (), 7)


def test_the_secret_goes_into_the_header_and_to_no_other_host(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("Bearer abc\n")
    secret.chmod(0o600)
    with array(says(status="302 Found", more="Location: https://evil.example/\r\n")) as (port, questions):
        source = {**SOURCE, "url": f"http://127.0.0.1:{port}/x", "authorization_file": str(secret)}
        read = rest_reader(RestSource.model_validate(source), 30)
        with pytest.raises(SpaceUnreadable, match="HTTP 302: redirected to https://evil"):
            read(7)
    assert b"Authorization: Bearer abc\r\n" in questions[0]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"used": "$.nothing"}, r"\$.nothing finds 0 values"),
        ({"used": "$.records[0].space.many[*]"}, "finds 2 values"),
        ({"used": "$.records[0].space.name"}, "is 'x', expected a number"),
        ({"used": "$.["}, "is no JSONPath"),
        ({"unit_bytes": 1 << 50}, "expected a number of 0 or more, below"),
    ],
)
def test_a_path_that_does_not_find_one_number_says_so(changed: Any, problem: str) -> None:
    """The last one: 2000 PiB are more than SQL counts, and the row would be refused."""
    pytest.importorskip("jsonpath")
    answer = {"records": [{"space": {**ANSWER["records"][0]["space"], "size": 2000 << 20}}]}
    with pytest.raises(SpaceUnreadable, match=problem):
        asked(says(answer), **changed)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (says(b"<html>"), "answered no JSON"),
        (says(b"[" * 100_000), "answered no JSON"),
        (says(status="503 Away"), "HTTP 503"),
        (says(b"x" * (MOST_BYTES + 1)), "more than 4 MiB"),
    ],
)
def test_an_answer_of_no_use_says_why(answer: Any, problem: str) -> None:
    with pytest.raises(SpaceUnreadable, match=problem):
        asked(answer)


@pytest.mark.parametrize("begin", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n"])
def test_an_array_that_drips_holds_the_reader_no_longer_than_its_limit(begin: bytes) -> None:
    """Each byte came within any limit of one read: headers alone could take days, and the watchdog bit."""

    def drip(connection: socket.socket) -> None:
        connection.sendall(begin)
        for _ in range(900):  # of the reader that goes away it is told before
            connection.sendall(b"X")
            time.sleep(0.2)

    with pytest.raises(SpaceUnreadable, match=r"in time"):  # not that the array has ended
        asked(drip, limit_s=1.0)


def test_a_name_server_that_hangs_holds_the_reader_no_longer_than_its_limit() -> None:
    release = threading.Event()
    resolver = Resolver(lambda *_args: release.wait(60) and [])
    read = rest_reader(RestSource.model_validate(SOURCE), 0.2, resolver)
    with pytest.raises(SpaceUnreadable, match="not resolved in time"):
        read(7)
    release.set()


def test_nothing_is_unpacked() -> None:
    """Gzip of gzip: some hundred bytes were gigabytes in memory."""
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(json.dumps(ANSWER).encode()) + packer.flush()
    with pytest.raises(SpaceUnreadable, match="answered no JSON"):
        asked(says(packed, more="Content-Encoding: gzip\r\n"))


def test_what_follows_the_question_mark_is_shown_to_nobody() -> None:
    for answer in (says(b"<html>"), says(b"token=hidden", status="403 No")):
        with pytest.raises(SpaceUnreadable) as caught:
            asked(answer, query="?token=hidden")
        assert "/api/space" in str(caught.value)
        assert "hidden" not in str(caught.value)


def test_an_array_that_is_away_and_a_missing_secret_are_problems_of_the_source(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(SpaceUnreadable, match="refused"):
        rest_reader(RestSource.model_validate({**SOURCE, "url": f"http://127.0.0.1:{port}/"}), 30)(7)
    with pytest.raises(SpaceUnreadable, match="no such file"):
        asked(says(), authorization_file=str(tmp_path / "none"))

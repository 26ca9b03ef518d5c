"""Webhook, Alertmanager form and heartbeat against real servers: every way to answer, and not to."""

from __future__ import annotations

import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome, Recipient
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.events.recipients.heartbeat import Heartbeat
from sla_server.events.recipients.network import Resolver, connect
from sla_server.events.recipients.webhook import signature
from tests.support import receivers
from tests.support.nbd_certificates import NbdAuthority
from tests.support.notices import closed, notice
from tests.support.receivers import HttpReceiver, status

SOON_S = 1.0
"""Deadline of what is to hang; the test is that it ends at all, and in the right way."""


Build = Callable[..., Recipient]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Makes recipients, and closes them."""
    made: list[Recipient] = []

    def make(spec: dict[str, Any], resolver: Resolver | None = None) -> Recipient:
        builder = RecipientBuilder(
            tmp_path / "secrets", tmp_path / "commands", tmp_path / "files", resolver=resolver
        )
        made.append(builder("oncall", spec))
        return made[-1]

    yield make
    for target in made:
        target.close()


def _secret(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / "secrets").mkdir(exist_ok=True, mode=0o700)
    path = tmp_path / "secrets" / name
    path.write_text(text)
    path.chmod(0o600)
    return name


def _deliver(target: Recipient, limit_s: float = 60.0, *numbers: int) -> Answer:
    return target.deliver([notice(number) for number in numbers or (1,)], Deadline(limit_s))


def test_a_signed_body_is_confirmed_by_any_2xx(tmp_path: Path, build: Build) -> None:
    spec = {
        "webhook": {
            "url": "",
            "secret_file": _secret(tmp_path, "key", "shared\n"),
            "bearer_file": _secret(tmp_path, "token", "geheim"),
            "headers": {"X-Site": "north"},
        }
    }
    with HttpReceiver(status(204)) as receiver:
        spec["webhook"]["url"] = f"{receiver.url}/hook?a=b"
        target = build(spec)
        assert _deliver(target, 60, 1, 2) == CONFIRMED
        assert _deliver(target, 60, 3) == CONFIRMED
    (method, path, headers, content), (_, _, second, _) = receiver.requests
    assert (method, path, headers["X-Site"]) == ("POST", "/hook?a=b", "north")
    assert headers["Authorization"] == "Bearer geheim"
    at_s = int(headers["Sla-Signature"].partition(",")[0].removeprefix("t="))
    assert headers["Sla-Signature"] == signature("shared", at_s, content)
    assert [alert["delivery"]["number"] for alert in json.loads(content)["alerts"]] == [1, 2]
    assert second["Idempotency-Key"] == "event-3"


def test_a_new_secret_counts_from_the_next_delivery_on(tmp_path: Path, build: Build) -> None:
    with HttpReceiver() as receiver:
        spec = {"webhook": {"url": receiver.url, "bearer_file": _secret(tmp_path, "token", "one")}}
        target = build(spec)
        _deliver(target)
        _secret(tmp_path, "token", "two")
        _deliver(target)
        (tmp_path / "secrets" / "token").chmod(0o644)
        answer = _deliver(target)
    assert [headers["Authorization"] for _, _, headers, _ in receiver.requests] == [
        "Bearer one",
        "Bearer two",
    ]
    assert (answer.outcome, answer.after_s) == (Outcome.RETRY, 60.0)
    assert "is open to others (mode 0644)" in answer.reason


def test_a_secret_in_a_query_that_an_earlier_release_took_is_not_repeated(build: Build) -> None:
    def echo(handler: BaseHTTPRequestHandler) -> None:
        status(404, f"no such hook: {handler.path}".encode())(handler)

    with HttpReceiver(echo) as receiver:
        answer = _deliver(build({"webhook": {"url": f"{receiver.url}/hook?team=a&token=geheim"}}))
        assert receiver.requests[0][1] == "/hook?team=a&token=geheim"
    assert "geheim" not in answer.reason
    assert "no such hook: /hook?team=a&token=***" in answer.reason


@pytest.mark.parametrize("code", [400, 404, 500])
def test_a_server_that_repeats_a_secret_address_does_not_make_it_known(
    tmp_path: Path, build: Build, code: int
) -> None:
    def echo(handler: BaseHTTPRequestHandler) -> None:
        status(code, f"no such hook: {handler.path} {handler.path[::-1]}".encode())(handler)

    with HttpReceiver(echo) as receiver:
        address = _secret(tmp_path, "address", f"{receiver.url}/hooks/geheim-0001")
        target = build({"webhook": {"url_file": address}})
        assert _deliver(target).reason == f"HTTP {code}"
    assert receiver.requests[0][1] == "/hooks/geheim-0001"


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("bearer_file", "geheim-1\ngeheim-2\n"),
        ("url_file", "http://127.0.0.1:geheim-1/x"),
        ("url_file", "geheim-1"),
    ],
)
def test_a_secret_file_with_a_mistake_is_not_repeated(
    tmp_path: Path, build: Build, key: str, content: str
) -> None:
    with HttpReceiver() as receiver:
        url = {"url": receiver.url} if key == "bearer_file" else {}
        answer = _deliver(build({"webhook": {**url, key: _secret(tmp_path, "file", content)}}))
    assert (answer.outcome, answer.after_s, receiver.requests) == (Outcome.RETRY, 60.0, [])
    assert answer.reason.startswith("secret file ")
    assert "geheim" not in answer.reason


@pytest.mark.parametrize(
    ("responder", "outcome", "reason", "after_s"),
    [
        (status(500, b"boom\n"), Outcome.RETRY, "HTTP 500: boom", None),
        (status(503, b"", Retry_After="7"), Outcome.RETRY, "HTTP 503", 7.0),
        (status(429, b"slow", Retry_After="90000"), Outcome.RETRY, "HTTP 429: slow", 3600.0),
        (status(429, b"", Retry_After="soon"), Outcome.RETRY, "HTTP 429", None),
        (status(400, b"no"), Outcome.REFUSED, "HTTP 400: no", None),
        (status(422), Outcome.REFUSED, "HTTP 422", None),
        (status(401, b"token geheim-1 is bad"), Outcome.RETRY, "HTTP 401: token *** is bad", 60.0),
        (status(404), Outcome.RETRY, "HTTP 404", 60.0),
        (
            status(302, b"", Location="https://other.example/x?token=geheim-1"),
            Outcome.RETRY,
            "HTTP 302: redirected to https://other.example; write the new address",
            60.0,
        ),
        (receivers.close, Outcome.RETRY, "Server disconnected without sending a response.", None),
    ],
)
def test_what_answers_mean(
    tmp_path: Path,
    build: Build,
    responder: receivers.Responder,
    outcome: Outcome,
    reason: str,
    after_s: float | None,
) -> None:
    with HttpReceiver(responder, status(200)) as receiver:
        spec = {"webhook": {"url": receiver.url, "bearer_file": _secret(tmp_path, "token", "geheim-1")}}
        target = build(spec)
        assert _deliver(target) == Answer(outcome, reason, after_s)
        assert _deliver(target) == CONFIRMED
    assert len(receiver.requests) == 2  # no redirect was followed, nothing was tried twice


@pytest.mark.parametrize(
    ("responder", "answer"),
    [
        (receivers.hang, Answer(Outcome.RETRY, "no answer in time")),
        (receivers.drip(200, headers=True), Answer(Outcome.RETRY, "no answer in time")),
        (receivers.drip(200, headers=False), CONFIRMED),
        (receivers.huge(200), CONFIRMED),
    ],
)
def test_a_deadline_holds_whatever_the_server_does(
    build: Build, responder: receivers.Responder, answer: Answer
) -> None:
    for limit_s in (SOON_S, 10 * SOON_S, 60 * SOON_S):  # on a busy machine the first may end too soon
        with HttpReceiver(responder, status(200)) as receiver:
            target = build({"webhook": {"url": receiver.url}})
            found = _deliver(target, limit_s), _deliver(target)
        if found == (answer, CONFIRMED):
            break
    assert found == (answer, CONFIRMED)


def test_of_a_huge_refusal_only_the_beginning_is_read(build: Build) -> None:
    with HttpReceiver(receivers.huge(500)) as receiver:
        answer = _deliver(build({"webhook": {"url": receiver.url}}))
    assert answer.outcome is Outcome.RETRY
    assert answer.reason == "HTTP 500: " + "a" * 187 + "..."


def test_a_connection_that_the_receiver_has_closed_meanwhile_is_not_the_end(build: Build) -> None:
    def answer_and_close(handler: Any) -> None:
        status(200)(handler)
        handler.close_connection = True

    with HttpReceiver(answer_and_close) as receiver:
        target = build({"webhook": {"url": receiver.url}})
        answers = [_deliver(target) for _ in range(4)]
    assert answers[0] == CONFIRMED
    assert CONFIRMED in answers[1:3]  # the one before may have met the connection as it was closed
    assert {answer.outcome for answer in answers} <= {Outcome.CONFIRMED, Outcome.RETRY}


@pytest.mark.parametrize("first", [200, 500])
def test_a_second_answer_is_not_taken_for_that_to_the_next_request(build: Build, first: int) -> None:
    """The server confirms, or refuses and confirms, in one go; the next notice it does not take."""

    def twice(handler: BaseHTTPRequestHandler) -> None:
        answers = [b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % code for code in (first, 200)]
        handler.wfile.write(b"".join(answers))

    with HttpReceiver(twice, status(500), status(200)) as receiver:
        target = build({"webhook": {"url": receiver.url}})
        outcomes = [_deliver(target, 60, number).outcome for number in (1, 2, 3)]
    assert outcomes == [
        Outcome.CONFIRMED if first == 200 else Outcome.RETRY,
        Outcome.RETRY,
        Outcome.CONFIRMED,
    ]
    assert len(receiver.requests) == 3


def test_a_second_answer_that_comes_late_is_not_taken_either(build: Build) -> None:
    sent = threading.Event()

    def late(handler: BaseHTTPRequestHandler) -> None:
        status(200)(handler)
        handler.wfile.flush()
        assert answered.wait(60)
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        sent.set()

    answered = threading.Event()
    with HttpReceiver(late, status(500)) as receiver:
        target = build({"webhook": {"url": receiver.url}})
        assert _deliver(target, 60, 1) == CONFIRMED
        answered.set()
        assert sent.wait(60)
        assert _deliver(target, 60, 2).outcome is Outcome.RETRY
    assert len(receiver.requests) == 2


def test_a_dead_name_server_costs_no_more_than_the_deadline(build: Build) -> None:
    answered: list[float] = []

    def lookup(*_args: object) -> list[Any]:
        time.sleep(30)
        return []

    resolver = Resolver(lookup)
    target = build({"webhook": {"url": "http://dead.example/"}}, resolver)
    for _ in range(3):
        answer = _deliver(target, 0.2)
        assert answer == Answer(Outcome.RETRY, "the name dead.example was not resolved in time")
        answered.append(time.monotonic())
    assert resolver.running == 1  # the three tries wait for one lookup


def test_an_unknown_name_is_said(build: Build) -> None:
    def lookup(*_args: object) -> list[Any]:
        raise OSError(-2, "Name or service not known")

    target = build({"webhook": {"url": "http://gone.example/"}}, Resolver(lookup))
    assert _deliver(target).reason == "the name gone.example is not known (Name or service not known)"


@pytest.fixture
def contexts(tmp_path: Path) -> Callable[[str], ssl.SSLContext]:
    authority = NbdAuthority(tmp_path / "ca")
    (tmp_path / "secrets").mkdir(mode=0o700)
    (tmp_path / "secrets" / "ca.pem").write_bytes(authority.file.read_bytes())

    def make(name: str) -> ssl.SSLContext:
        folder = authority.issue("server", f"server-{name}", name)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
        return context

    return make


def test_a_certificate_of_the_named_authority_is_accepted(
    build: Build, contexts: Callable[[str], ssl.SSLContext]
) -> None:
    with HttpReceiver(context=contexts("127.0.0.1")) as receiver:
        target = build({"webhook": {"url": receiver.url, "ca_file": "ca.pem"}})
        assert _deliver(target) == CONFIRMED


def test_a_wrong_certificate_is_refused(build: Build, contexts: Callable[[str], ssl.SSLContext]) -> None:
    with HttpReceiver(context=contexts("127.0.0.1")) as receiver:
        answer = _deliver(build({"webhook": {"url": receiver.url}}))
    assert answer.outcome is Outcome.RETRY
    assert answer.reason.startswith("its certificate is not accepted: ")
    with HttpReceiver(context=contexts("10.1.2.3")) as receiver:
        answer = _deliver(build({"webhook": {"url": receiver.url, "ca_file": "ca.pem"}}))
    assert "its certificate is not accepted: " in answer.reason
    assert receiver.requests == []


def test_a_server_that_does_not_begin_tls_ends_at_the_deadline(build: Build) -> None:
    with receivers.stream_listener() as listener:
        port = listener.getsockname()[1]
        answer = _deliver(build({"webhook": {"url": f"https://127.0.0.1:{port}/"}}), SOON_S)
    assert answer == Answer(Outcome.RETRY, "no answer to the beginning of TLS in time")


def test_alertmanager_gets_its_own_form_and_is_asked_before_an_end(build: Build) -> None:
    active = [{"labels": {"alertname": "violation", "severity": "critical"}}]
    with HttpReceiver(status(200), status(200, json.dumps(active).encode()), status(200)) as receiver:
        target = build({"alertmanager": {"url": f"{receiver.url}/am/"}})
        assert target.deliver([notice(1), closed(2)], Deadline(60)) == CONFIRMED
    posted, asked, ended = receiver.requests
    assert [each[0] for each in receiver.requests] == ["POST", "GET", "POST"]
    assert (posted[1], ended[1]) == ("/am/api/v2/alerts", "/am/api/v2/alerts")
    assert asked[1].startswith("/am/api/v2/alerts?filter=alertname%3D%22violation%22&")
    assert [alert["labels"]["severity"] for alert in json.loads(posted[3])] == ["critical"]
    assert [alert["labels"] for alert in json.loads(ended[3])] == [active[0]["labels"]]


@pytest.mark.parametrize(("content", "reason"), [(b"{}", "cannot be read"), (b"[", "cannot be read")])
def test_an_answer_of_something_else_is_not_taken_for_an_end(
    build: Build, content: bytes, reason: str
) -> None:
    with HttpReceiver(status(200, content)) as receiver:
        answer = build({"alertmanager": {"url": receiver.url}}).deliver([closed(2)], Deadline(60))
    assert answer.outcome is Outcome.RETRY
    assert reason in answer.reason


def test_a_heartbeat_is_a_request_and_takes_no_events(tmp_path: Path, build: Build) -> None:
    with HttpReceiver(status(200), status(500)) as receiver:
        address = _secret(tmp_path, "address", f"{receiver.url}/ping/geheim")
        target = build({"heartbeat": {"url_file": address, "method": "POST", "interval": "30s"}})
        assert isinstance(target, Heartbeat)
        assert target.interval_s == 30.0
        assert target.beat(7, Deadline(60)) == CONFIRMED
        assert target.beat(8, Deadline(60)).outcome is Outcome.RETRY
        assert target.deliver([notice(1)], Deadline(60)).outcome is Outcome.REFUSED
    method, path, _, content = receiver.requests[0]
    assert (method, path) == ("POST", "/ping/geheim")
    assert json.loads(content) == {"recipient": "oncall", "at_us": 7, "state": "ok"}


def test_no_part_of_a_request_waits_for_a_delayed_acknowledgement() -> None:
    with HttpReceiver() as receiver:
        address = urlsplit(receiver.url)
        assert address.port is not None
        with connect(address.hostname or "", address.port, Deadline(60.0), Resolver()) as sock:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

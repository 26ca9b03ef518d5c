"""Mail against a real server on loopback: STARTTLS, login, refusals, a server that hangs or sends slowly."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import SmtpSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.smtp import Smtp
from tests.support.nbd_certificates import NbdAuthority
from tests.support.notices import notice
from tests.support.receivers import stream_listener


class MailServer:
    """Handler of aiosmtpd.

    Attributes:
        mails: what was accepted.
        refusals: address to the answer to RCPT; used up.
        data_answers: answers to DATA before mails are accepted; used up.
    """

    def __init__(self) -> None:
        self.mails: list[Envelope] = []
        self.refusals: dict[str, str] = {}
        self.data_answers: list[str] = []

    async def handle_RCPT(self, _server: Any, _session: Any, envelope: Envelope, address: str, _: Any) -> str:
        if address in self.refusals:
            return self.refusals[address]
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Envelope) -> str:
        if self.data_answers:
            return self.data_answers.pop(0)
        self.mails.append(envelope)
        return "250 OK"


def _login(_server: Any, _session: Any, _envelope: Any, _mechanism: str, data: Any) -> AuthResult:
    good = isinstance(data, LoginPassword) and (data.login, data.password) == (b"sla", b"geheim-1")
    return AuthResult(success=good, handled=good)


@pytest.fixture
def context(tmp_path: Path) -> ssl.SSLContext:
    authority = NbdAuthority(tmp_path / "ca")
    (tmp_path / "ca.pem").write_bytes(authority.file.read_bytes())
    folder = authority.issue("server", "mail", "127.0.0.1")
    found = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    found.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
    return found


class AnyPort(Controller):
    """Says which port the system chose before it is connected to."""

    def _trigger_server(self) -> None:  # the base connects to the port that was asked for, 0
        assert self.server is not None
        self.port = self.server.sockets[0].getsockname()[1]
        super()._trigger_server()


Serve = Callable[..., tuple[MailServer, int]]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[Controller] = []

    def start(**settings: Any) -> tuple[MailServer, int]:
        handler = MailServer()
        controller = AnyPort(handler, hostname="127.0.0.1", port=0, ready_timeout=60, **settings)
        controller.start()
        running.append(controller)
        return handler, controller.port

    yield start
    for controller in running:
        controller.stop()


def _target(tmp_path: Path, port: int, **fields: Any) -> Smtp:
    spec = {
        "server": "127.0.0.1", "port": port, "security": "none", "sender": "sla@a.example",
        "to": ["ops@b.example"], **fields,
    }  # fmt: skip
    model = SmtpSpec.model_validate(spec)
    return Smtp("mail", model, tmp_path, Resolver(), timeout_s=30, most_notices=100)


def _deliver(target: Smtp, *numbers: int, limit_s: float = 60) -> Answer:
    return target.deliver([notice(number) for number in numbers or (1,)], Deadline(limit_s))


def test_mail_over_starttls_with_login(tmp_path: Path, serve: Serve, context: ssl.SSLContext) -> None:
    handler, port = serve(
        tls_context=context, require_starttls=True, authenticator=_login, auth_required=True
    )
    (tmp_path / "password").write_text("geheim-1\n")
    (tmp_path / "password").chmod(0o600)
    fields = {"security": "starttls", "ca_file": "ca.pem", "user": "sla", "password_file": "password"}
    target = _target(tmp_path, port, **fields)
    assert _deliver(target, 1, 2) == CONFIRMED
    assert [mail.rcpt_tos for mail in handler.mails] == [["ops@b.example"], ["ops@b.example"]]
    assert b"identity: event-1" in handler.mails[0].content
    (tmp_path / "password").write_text("geheim-2\n")
    answer = _deliver(target)
    assert (answer.outcome, answer.after_s) == (Outcome.RETRY, 60.0)
    assert answer.reason.startswith("login refused: 535")
    assert "geheim" not in answer.reason


def test_a_wrong_certificate_ends_it_before_the_login(
    tmp_path: Path, serve: Serve, context: ssl.SSLContext
) -> None:
    handler, port = serve(tls_context=context, require_starttls=True)
    answer = _deliver(_target(tmp_path, port, security="starttls"))
    assert answer.outcome is Outcome.RETRY
    assert answer.reason.startswith("its certificate is not accepted: ")
    assert handler.mails == []


def test_a_server_without_starttls_gets_no_mail(tmp_path: Path, serve: Serve) -> None:
    handler, port = serve()
    answer = _deliver(_target(tmp_path, port, security="starttls"))
    assert (answer.outcome, answer.after_s, handler.mails) == (Outcome.RETRY, 60.0, [])
    assert "STARTTLS extension not supported by server" in answer.reason


def test_tls_from_the_first_byte(tmp_path: Path, serve: Serve, context: ssl.SSLContext) -> None:
    with stream_listener() as listener:
        port = listener.getsockname()[1]
        listener.settimeout(60)

        def greet() -> None:
            sock, _ = listener.accept()
            with context.wrap_socket(sock, server_side=True) as stream:
                stream.sendall(b"421 closed for today\r\n")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        answer = _deliver(_target(tmp_path, port, security="tls", ca_file="ca.pem"))
        thread.join(60)
    assert answer == Answer(Outcome.RETRY, "421 closed for today")


@pytest.mark.parametrize(
    ("said", "outcome"),
    [("451 try later", Outcome.RETRY), ("552 too large", Outcome.REFUSED)],
)
def test_what_a_refusal_of_the_mail_means(tmp_path: Path, serve: Serve, said: str, outcome: Outcome) -> None:
    handler, port = serve()
    handler.data_answers = [said]
    target = _target(tmp_path, port)
    assert _deliver(target) == Answer(outcome, said)
    assert _deliver(target) == CONFIRMED


def test_addresses_that_have_the_mail_do_not_get_it_again(tmp_path: Path, serve: Serve) -> None:
    handler, port = serve()
    handler.refusals = {"late@b.example": "450 busy"}
    target = _target(tmp_path, port, to=["ops@b.example", "late@b.example"])
    assert _deliver(target, 1, 2) == Answer(
        Outcome.RETRY, "late@b.example: 450 busy; late@b.example: 450 busy"
    )
    handler.refusals = {"late@b.example": "550 gone"}
    assert _deliver(target, 1, 2).outcome is Outcome.REFUSED
    handler.refusals = {}
    assert _deliver(target, 1, 2) == CONFIRMED
    assert [mail.rcpt_tos for mail in handler.mails] == [
        ["ops@b.example"], ["ops@b.example"], ["late@b.example"], ["late@b.example"],
    ]  # fmt: skip


def test_a_batch_is_sent_on_where_it_ended(tmp_path: Path, serve: Serve) -> None:
    handler, port = serve()
    target = _target(tmp_path, port)
    handler.data_answers = []
    assert _deliver(target, 1) == CONFIRMED
    handler.data_answers = ["451 later"]
    assert _deliver(target, 1, 2).outcome is Outcome.RETRY  # 1 was accepted before, 2 was not
    assert _deliver(target, 1, 2) == CONFIRMED
    assert len(handler.mails) == 2


def test_a_server_that_hangs_or_answers_byte_by_byte_ends_at_the_deadline(tmp_path: Path) -> None:
    for content in (b"", b"220-"):
        with stream_listener() as listener:
            listener.settimeout(0.2)
            ended = threading.Event()

            def drip(
                listener: Any = listener, content: bytes = content, ended: threading.Event = ended
            ) -> None:
                sock = None
                while sock is None and not ended.is_set():  # on a busy machine the limit passes before that
                    with suppress(TimeoutError):
                        sock, _ = listener.accept()
                if sock is None:
                    return
                with sock:
                    while not ended.wait(0.02):
                        try:
                            sock.sendall(content)
                        except OSError:
                            return

            thread = threading.Thread(target=drip, daemon=True)
            thread.start()
            answer = _deliver(_target(tmp_path, listener.getsockname()[1]), limit_s=1.0)
            ended.set()
            thread.join(60)
        assert answer == Answer(Outcome.RETRY, "no answer in time")

"""Page and API over TLS: real sockets, a certificate of the own authority, and the command line's trust."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs
from werkzeug.test import TestResponse

import dashboard
from pmdaemon.errors import ConfigError
from pmdaemon.pki.authority import DAY_S, Authority
from pmdaemon.runtime.clock import FakeClock, boot_ns
from pmdaemon.runtime.stop import Stop
from sla_server.api.acting import ActingServer
from sla_server.api.config import ApiConfig
from sla_server.api.forwarding import RequestForwarder
from sla_server.api.server import WebServer, open_listener
from sla_server.api.tls import PageCertificate
from sla_server.cli.client import Client
from sla_server.cli.errors import NoToken, UntrustedServer
from sla_server.lease_file import LeaseState
from tests.support import api


class Site:
    """A server at a TLS port, whose reading needs a login."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "ca", 90 * DAY_S)
        self.authority.init()
        self.ca = folder / "ca" / "ca.crt"
        self.certificate, self.key = folder / "page-cert.pem", folder / "page-key.pem"
        self.renew()
        tls = {"certificate": self.certificate, "key": self.key}
        config = ApiConfig.model_validate(
            {"listen": "127.0.0.1:0", "reading": "login", "tls": tls, "live_streams_max": 1}
        )
        self.stop = Stop()
        self.mailbox = api.AnsweringMailbox(answer=lambda _header: (True, 200, {}))
        self.listener = open_listener(config.listen)
        self.server = WebServer(
            config, api.data_dir(folder), api.FakeSource(), self.mailbox, self.listener, self.stop
        )
        self.url = f"https://127.0.0.1:{self.server.port}"
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()

    def renew(self) -> None:
        key, certificate = self.authority.nbd_credential("page", ["127.0.0.1", "localhost"], DAY_S)
        for path, content in ((self.certificate, certificate), (self.key, key)):
            fresh = path.with_suffix(".new")
            fresh.touch(0o600)
            fresh.write_bytes(content)
            fresh.rename(path)

    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        self.listener.close()
        self.mailbox.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def test_the_page_over_tls_signs_in_with_a_secure_cookie(site: Site) -> None:
    with httpx.Client(base_url=site.url, verify=site.context(), timeout=60) as browser:
        assert browser.get("/api/v1/alive").status_code == 200
        assert browser.get("/api/v1/slas").status_code == 401
        answer = browser.get("/")
        assert (answer.status_code, answer.headers["Location"]) == (303, "/login")
        form = {"data": {"name": "ann", "password": api.PASSWORD}, "headers": {"Origin": site.url}}
        signed = browser.post("/login", **form)
        assert signed.status_code == 303
        assert "; Secure" in signed.headers["Set-Cookie"]
        assert browser.get("/").status_code == 200
        assert browser.get("/api/v1/slas").status_code == 200
        script = browser.get("/static/plotly.min.js")
        assert len(script.content) > 1_000_000, "an answer of many records"
        body = {"mode": "enforce", "backend": "x" * 190}
        changed = browser.put("/api/v1/mode", json=body, headers={"Origin": site.url})
        assert changed.status_code == 200
        large = browser.post("/api/v1/slas", content=b"# " + b"x" * 200_000, headers={"Origin": site.url})
        assert large.status_code in (200, 413), large.text  # several records; not cut off


def test_who_speaks_no_tls_or_an_old_one_disturbs_nobody(site: Site) -> None:
    place = ("127.0.0.1", site.server.port)
    with socket.create_connection(place, timeout=60) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            said = plain.recv(4096)
        except ConnectionResetError:
            said = b""
        assert b"HTTP" not in said
    old = site.context()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(place, timeout=60) as sock, pytest.raises(ssl.SSLError):
        old.wrap_socket(sock, server_hostname="127.0.0.1")
    with socket.create_connection(place, timeout=60) as silent:
        assert httpx.get(f"{site.url}/api/v1/alive", verify=site.context(), timeout=60).status_code == 200
        silent.close()


def test_the_token_goes_to_the_named_authority_alone(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Review, finding 11: over https the certificate decides."""
    monkeypatch.setenv("SLA_TOKEN", api.TOKEN)
    stranger = Client.find(site.url, None, None)
    with pytest.raises(UntrustedServer, match=r"(?s)nothing was sent.*--ca-file"):
        stranger.change("PUT", "/mode", json={"mode": "enforce"})
    assert site.mailbox.posted == []
    for trusted in (site.ca, site.certificate):
        client = Client.find(site.url, None, None, trusted)
        assert client.get("/slas")["items"], "reading needs a login, so the token is sent"
        client.close()
    plain = Client.find("http://203.0.113.7:8411", None, None)
    with pytest.raises(NoToken, match="not sent in clear"):
        plain.change("PUT", "/mode", json={"mode": "enforce"})


def test_a_renewed_certificate_is_taken_and_a_broken_one_is_not(site: Site) -> None:
    def serial() -> str:
        place = ("127.0.0.1", site.server.port)
        with (
            socket.create_connection(place, timeout=60) as sock,
            site.context().wrap_socket(sock, server_hostname="127.0.0.1") as tls,
        ):
            return str((tls.getpeercert() or {})["serialNumber"])

    page = site.server.certificate
    assert page is not None
    first = serial()
    site.renew()
    page._check_at_ns = 0  # it looks every ten seconds
    second = serial()
    assert second != first
    site.certificate.write_text("no certificate")
    os.utime(site.certificate, ns=(1, 1))
    page._check_at_ns = 0
    assert serial() == second


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    certificate = tmp_path / "page.pem"
    certificate.write_text("no certificate")
    certificate.chmod(0o600)
    for prepare, words in (
        (lambda: certificate.chmod(0o644), "chmod 600"),
        (lambda: certificate.chmod(0o600), "sla ca page"),
        (certificate.unlink, "cannot be used"),
    ):
        prepare()
        config = ApiConfig.model_validate({"listen": "127.0.0.1:0", "tls": {"certificate": certificate}})
        listener = open_listener(config.listen)
        mailbox = api.AnsweringMailbox()
        with pytest.raises(ConfigError, match=words):
            WebServer(config, api.data_dir(tmp_path), api.FakeSource(), mailbox, listener, Stop())
        listener.close()
        mailbox.close()


def test_a_key_that_was_refused_for_its_mode_is_read_once_it_is_mended(site: Site) -> None:
    """The log says: Run chmod 600. Neither the file's time nor its number changes by that."""
    clock = FakeClock()
    certificate = PageCertificate(site.certificate, site.key, clock)

    def seen() -> list[str]:
        clock.advance(11)
        ours, theirs = socket.socketpair()
        with capture_logs() as lines:
            certificate.wrap(ours).close()
        theirs.close()
        return [line["event"] for line in lines]

    site.renew()
    site.key.chmod(0o644)
    assert seen() == ["certificate-not-read"]
    assert seen() == []
    site.key.chmod(0o600)
    assert seen() == ["certificate-read"]


def test_a_server_that_stands_by_forwards_a_token_to_a_page_of_its_own_authority_alone(
    site: Site, tmp_path: Path
) -> None:
    LeaseState("n1", "n2", 7, 0, 6.0, boot_ns(), site.url).write(tmp_path)
    foreign = Authority(tmp_path / "foreign", 90 * DAY_S)
    foreign.init()
    authority = tmp_path / "authority.crt"
    mailbox = api.AnsweringMailbox()
    made = api.make_context(mailbox)
    acting = ActingServer(tmp_path, FakeClock(), authority)
    forwarder = RequestForwarder(acting, made.guard, made.token, 55.0)
    other = dashboard.create_app(replace(made, acting=acting, forwarder=forwarder)).test_client()
    headers = {"Authorization": f"Bearer {api.TOKEN}"}

    def ask() -> TestResponse:
        where = "http://127.0.0.1:8411"
        return other.put("/api/v1/mode", json={"mode": "observe"}, headers=headers, base_url=where)

    for trusted, status in ((None, 503), (tmp_path / "foreign" / "ca.crt", 503), (site.ca, 200)):
        if trusted is not None:
            authority.write_bytes(trusted.read_bytes())
        answer = ask()
        assert answer.status_code == status, trusted
        assert ("CERTIFICATE_VERIFY_FAILED" in str(answer.json)) == (status == 503)
    authority.write_text("no certificate")
    os.utime(authority, (1, 1))
    assert f"{authority} cannot be read" in ask().json["detail"]
    assert [header["op"] for header in site.mailbox.posted] == ["mode"]
    mailbox.close()

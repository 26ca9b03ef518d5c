import contextlib
import ssl

import pytest

from gateway_agent.config import ExportConfig
from gateway_agent.nbd.upstream_tls import UpstreamTls
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import FakeLoop, FakeSocket
from tests.support.nbd_certificates import NbdAuthority
from tests.support.nbd_tls import InlineEngine, TlsPeer


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    made = NbdAuthority(tmp_path_factory.mktemp("pki"))
    made.issue("server", "array-1", "10.0.0.5", "array-1.example")
    made.issue("client", "gw")
    return made


def opening(pki, upstream="nbds://10.0.0.5/disk", wants_certificate=False, **more):
    """(outcome, connection, peer) of one handshake with a server as whose client we speak."""
    settings = {"volume": "v", "backend": "b", "upstream": upstream, "upstream_ca": str(pki.file)}
    loop, outcome = FakeLoop(FakeClock()), []
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    folder = pki.folder / "array-1"
    server.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
    if wants_certificate:
        server.verify_mode = ssl.CERT_REQUIRED
        server.load_verify_locations(pki.file)
    tls = UpstreamTls(loop, InlineEngine(loop), ExportConfig.model_validate(settings | more))
    sock = FakeSocket()
    near, _ = tls.secure(sock, lambda: outcome.append("ready"), outcome.append)
    peer = TlsPeer(sock, server, server_side=True)
    for _ in range(4):
        loop.turn()
        with contextlib.suppress(ssl.SSLError):
            peer.shake()
        if sock.incoming and sock.fileno() in loop.masks:
            loop.handlers[sock.fileno()](1)
    return outcome, near, peer


@pytest.mark.parametrize(
    "more", [{}, {"upstream": "nbds://10.9.9.9/disk", "upstream_name": "array-1.example"}]
)
def test_an_upstream_is_who_its_certificate_says(pki, more):
    outcome, near, peer = opening(pki, **more)
    assert outcome == ["ready"]
    near.send(b"hello")
    assert peer.heard() == b"hello"


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"upstream": "nbds://10.0.0.6/disk"}, "IP address mismatch"),
        ({"upstream_name": "array-2.example"}, "Hostname mismatch"),
    ],
)
def test_a_certificate_for_another_name_is_refused(pki, more, problem):
    ((reason,), _, _) = opening(pki, **more)
    assert problem in reason


def test_a_certificate_of_another_authority_is_refused(pki, tmp_path):
    ((reason,), _, _) = opening(pki, upstream_ca=str(NbdAuthority(tmp_path / "other").file))
    assert "certificate verify failed" in reason


def test_our_own_certificate_is_shown_to_an_upstream_that_asks(pki):
    own = {"upstream_certificate": f"{pki.folder}/gw/client-cert.pem"}
    own["upstream_key"] = f"{pki.folder}/gw/client-key.pem"
    outcome, _, peer = opening(pki, wants_certificate=True, **own)
    assert outcome == ["ready"]
    assert peer.tls.getpeercert()["subject"] == ((("commonName", "gw"),),)


@pytest.mark.parametrize("key", ["upstream_ca", "upstream_certificate"])
def test_a_file_that_cannot_be_used_is_named_with_its_setting(pki, key):
    with pytest.raises(ConfigError, match=rf"\[\[export\]\] v {key}: /none\.pem"):
        opening(pki, **{key: "/none.pem"})

import ipaddress
import shutil
import ssl
import time
from dataclasses import replace

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from gateway_agent.config import ExportConfig
from gateway_agent.nbd import listeners
from gateway_agent.nbd.access import ClientIdentity
from gateway_agent.nbd.listeners import LISTS_NS, TOTALS_NS, ListenerSecurity, server_context
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import FakeLoop
from tests.support.nbd_certificates import NbdAuthority
from tests.support.nbd_tls import guard_of, security


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    authority = NbdAuthority(tmp_path_factory.mktemp("pki"))
    return authority, authority.issue("server", "gw")


def now_us():
    """The wall clock, by which the test's certificates are made."""
    return time.time_ns() // 1000


def client(address):
    return ClientIdentity(address or "uid-0", ipaddress.ip_address(address) if address else None)


PLAIN = ("10.0.0.0/8",)
FILES = {"tls_certificate": "/c.pem"}


@pytest.mark.parametrize(
    ("settings", "address", "mode"),
    [
        ({}, None, "off"),
        ({}, "127.0.0.1", "off"),
        ({}, "::1", "off"),
        ({}, "10.0.0.7", None),
        ({"plain_networks": PLAIN}, "10.0.0.7", "off"),
        ({"plain_networks": PLAIN}, "11.0.0.7", None),
        ({"plain_networks": PLAIN}, "127.0.0.1", "off"),
        ({"tls": "offer"} | FILES, None, "off"),
        ({"tls": "offer"} | FILES, "127.0.0.1", "offer"),
        ({"tls": "offer"} | FILES, "10.0.0.7", "require"),
        ({"tls": "offer", "plain_networks": PLAIN} | FILES, "10.0.0.7", "offer"),
        ({"tls": "offer", "plain_networks": PLAIN} | FILES, "11.0.0.7", "require"),
        ({"tls": "require"} | FILES, "127.0.0.1", "require"),
        ({"tls": "require"} | FILES, "10.0.0.7", "require"),
        ({"tls": "require"} | FILES, None, "off"),
    ],
)
def test_what_tls_is_to_a_client_by_its_address(settings, address, mode):
    guard = guard_of(ListenerSecurity(**settings), FakeLoop(FakeClock()))
    assert guard.mode_for(client(address)) == mode
    assert guard.turned_away == ({} if mode else {"plain-network": 1})


def test_those_turned_away_are_counted_and_said_in_one_line_a_minute():
    loop = FakeLoop(FakeClock())
    guard = guard_of(ListenerSecurity(plain_networks=PLAIN), loop)
    with capture_logs() as lines:
        for _ in range(50):
            guard.mode_for(client("11.0.0.1"))
        guard.turn_away("tls", client("10.0.0.1"), "no certificate")
        loop.fire(TOTALS_NS / 1e9)
        loop.fire(TOTALS_NS / 1e9)
    totals = [line["since_start"] for line in lines if line["event"] == "clients-turned-away"]
    assert totals == [{"plain-network": 50, "tls": 1}]
    assert loop.timers == {}
    guard.mode_for(client("11.0.0.1"))
    assert list(loop.timers) == [guard], "the next one is planned again"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"tls": "require"}, "needs tls_certificate"),
        ({"tls": "maybe"}, "'off', 'offer' or 'require'"),
        ({"tls_key": "/k"}, 'tls_key is set, and tls is "off"'),
        ({"client_ca": "/k"}, 'Set tls = "require"'),
        ({"tls": "require", "plain_networks": PLAIN} | FILES, 'tls = "require" forbids'),
        ({"plain_networks": ["10.0.0.1/8"]}, "is no network"),
    ],
)
def test_settings_that_contradict_each_other_say_what_to_write(settings, problem):
    with pytest.raises(ValidationError, match=problem):
        ListenerSecurity(**settings)


def test_files_that_cannot_be_used_are_named_with_their_setting(pki, tmp_path):
    authority, server = pki
    good = security(authority, server)
    assert server_context(good, "nbd-0").minimum_version.name == "TLSv1_2"
    for change, key in (
        ({"tls_certificate": str(tmp_path / "no.pem")}, r"\[\[plane\]\] nbd-0 tls_certificate: .*no\.pem"),
        ({"tls_key": str(authority.file)}, "tls_certificate"),
        ({"client_ca": str(tmp_path / "no.pem")}, r"client_ca: .*no\.pem .*No such file"),
        ({"client_ca": f"{server}/server-key.pem"}, "client_ca"),
    ):
        with pytest.raises(ConfigError, match=key):
            server_context(good.model_copy(update=change), "nbd-0")
    server_context(good.model_copy(update={"client_certificates": "none", "client_ca": "/no"}), "nbd-0")


def test_certificates_are_read_again_when_they_were_replaced_and_kept_when_that_fails(pki, tmp_path):
    authority, server = pki
    folder = shutil.copytree(server, tmp_path / "gw")
    guard = guard_of(security(authority, folder), FakeLoop(FakeClock()))
    first = guard.context()
    assert guard.context() is first
    (folder / "server-key.pem").write_text("half of a file")
    with capture_logs() as lines:
        assert guard.context() is guard.context() is first
    assert [line["event"] for line in lines] == ["certificates-unusable"], "said once"
    shutil.copy(server / "server-key.pem", folder / "server-key.pem")
    second = guard.context()
    assert second is not first
    with pytest.raises(ConfigError):
        guard.apply(security(authority, tmp_path / "nowhere"))
    assert guard.context() is second
    guard.apply(ListenerSecurity())
    assert guard.mode_for(client("127.0.0.1")) == "off"


def test_certificates_that_are_broken_before_the_first_handshake_leave_those_of_the_start_in_force(
    pki, tmp_path
):
    authority, server = pki
    folder = shutil.copytree(server, tmp_path / "gw")
    guard = guard_of(security(authority, folder), FakeLoop(FakeClock()))
    (folder / "server-key.pem").write_text("half of a file")
    with capture_logs() as lines:
        assert guard.context() is guard.context()
    assert [line["event"] for line in lines] == ["certificates-unusable"]
    assert "stay in force" in lines[0]["text"]


def test_certificates_that_are_unusable_at_the_start_are_said_then_and_used_once_they_are_there(
    pki, tmp_path
):
    authority, server = pki
    with capture_logs() as lines:
        guard = guard_of(security(authority, tmp_path / "gw"), FakeLoop(FakeClock()))
    ((event, text),) = [(line["event"], line["text"]) for line in lines]
    assert event == "certificates-unusable"
    assert "no client gets TLS" in text
    shutil.copytree(server, tmp_path / "gw")
    assert guard.context() is guard.context()


def test_certificates_replaced_while_settings_are_applied_are_read_again(pki, tmp_path, monkeypatch):
    authority, server = pki
    folder = shutil.copytree(server, tmp_path / "gw")
    guard = guard_of(ListenerSecurity(), FakeLoop(FakeClock()))

    def replaced_meanwhile(settings, plane):
        made = server_context(settings, plane)
        (folder / "server-key.pem").write_text("another")
        return made

    monkeypatch.setattr(listeners, "server_context", replaced_meanwhile)
    guard.apply(security(authority, folder))
    monkeypatch.undo()
    with capture_logs() as lines:
        guard.context()
    assert [line["event"] for line in lines] == ["certificates-unusable"]


def test_without_usable_certificates_from_the_start_each_client_is_told_so(pki, tmp_path):
    guard = guard_of(security(pki[0], tmp_path), FakeLoop(FakeClock()))
    for _ in range(2):
        with pytest.raises(ConfigError, match="tls_certificate"):
            guard.context()


def test_a_revocation_list_is_checked_as_the_other_files_are(pki, tmp_path):
    authority, server = pki
    crl = tmp_path / "crl.pem"
    settings = security(authority, server, client_crl=str(crl))
    with pytest.raises(ConfigError, match=r"nbd-0 client_crl: .*crl.pem cannot be used: No such file"):
        settings.check("nbd-0")
    crl.write_bytes(authority.file.read_bytes())
    with pytest.raises(ConfigError, match="there is no revocation list in it"):
        settings.check("nbd-0")
    crl.write_bytes(authority.revocation_list())
    settings.check("nbd-0")
    with pytest.raises(ValidationError, match='client_certificates = "none" asks no client'):
        security(authority, server, client_crl=str(crl), client_certificates="none")
    with pytest.raises(ValidationError, match='client_crl is set, and tls is "off"'):
        ListenerSecurity(client_crl=str(crl))


def test_a_revocation_list_that_lets_nobody_in_is_refused_with_what_to_do(pki, tmp_path):
    authority, server = pki
    crl = tmp_path / "crl.pem"
    settings = security(authority, server, client_crl=str(crl))
    other = NbdAuthority(tmp_path / "other")
    crl.write_bytes(authority.revocation_list() + other.revocation_list())
    with pytest.raises(ConfigError, match=r"a list of CN=authority of other, which client_ca does not have"):
        settings.check("nbd-0")
    crl.write_bytes(authority.revocation_list() + other.file.read_bytes())
    with pytest.raises(
        ConfigError, match=r"there is a certificate in it, whose holder could certify clients"
    ):
        settings.check("nbd-0")
    crl.write_bytes(authority.revocation_list() + authority.file.read_bytes())
    settings.check("nbd-0")  # that authority is in client_ca all the same
    crl.write_bytes(authority.revocation_list(age_days=2))
    settings.check("nbd-0")  # it will be renewed, and nothing else depends on it


EXPORT = ExportConfig(volume="vol-1", backend="disk", upstream="nbd://127.0.0.1/x")


class Connected:
    def __init__(self, certificate, client=None, export=EXPORT):
        client = client or ClientIdentity("uid-0", None)
        self.identity = replace(client, certificate=certificate, is_secure=certificate is not None)
        self.export, self.reasons = export, []

    def close(self, reason):
        self.reasons.append(reason)


def der_of(folder):
    return ssl.PEM_cert_to_DER_cert((folder / "client-cert.pem").read_text())


def test_clients_that_are_connected_are_ended_when_their_certificate_is_on_the_list(tmp_path):
    authority = NbdAuthority(tmp_path / "pki")
    server, crl = authority.issue("server", "gw"), tmp_path / "crl.pem"
    good, gone = authority.issue("client", "host-a"), authority.issue("client", "host-b")
    connected = [Connected(der_of(good)), Connected(der_of(gone)), Connected(None)]
    loop, called = FakeLoop(FakeClock(unix_us=now_us())), []

    def on_lists():
        called.append(guard.problem)
        guard.end_refused(connected)

    crl.write_bytes(authority.revocation_list())
    guard = guard_of(security(authority, server, client_crl=str(crl)), loop, on_lists)
    loop.fire(60)
    assert called == [], "the same list"
    crl.write_bytes(authority.revocation_list(gone))
    with capture_logs() as logs:
        loop.fire(LISTS_NS / 1e9)
    assert [each.reasons for each in connected] == [[], ["its certificate was revoked"], []]
    assert [entry["event"] for entry in logs] == ["revoked-clients-ended"]
    assert (called, guard.turned_away) == ([""], {"revoked": 1})
    crl.write_bytes(b"half a li")
    with capture_logs() as logs:
        loop.fire(10)
    assert [entry["event"] for entry in logs] == ["certificates-unusable"], "said once; the former one holds"
    assert guard.is_revoked(der_of(gone))
    guard.apply(security(authority, server))
    loop.fire(10)
    assert not guard.is_revoked(der_of(gone))
    assert loop.timers.keys() <= {guard}, "nothing is looked at any more"


def test_a_certificate_that_cannot_be_compared_with_a_list_keeps_no_revoked_client_connected(tmp_path):
    authority = NbdAuthority(tmp_path / "pki")
    server, gone, crl = authority.issue("server", "gw"), authority.issue("client", "a"), tmp_path / "crl.pem"
    crl.write_bytes(authority.revocation_list(gone))
    guard = guard_of(security(authority, server, client_crl=str(crl)), FakeLoop(FakeClock()))
    connected = [Connected(b"no certificate"), Connected(der_of(gone))]
    guard.end_refused(connected)
    assert [len(each.reasons) for each in connected] == [1, 1]


def test_a_list_that_has_expired_is_said_once_and_what_to_do(tmp_path):
    authority = NbdAuthority(tmp_path / "pki")
    server, crl, said = authority.issue("server", "gw"), tmp_path / "crl.pem", []
    crl.write_bytes(authority.revocation_list())
    loop = FakeLoop(FakeClock(unix_us=now_us()))
    guard = guard_of(
        security(authority, server, client_crl=str(crl)), loop, lambda: said.append(guard.problem)
    )
    with capture_logs() as logs:
        loop.clock.advance(2 * 86_400)
        loop.fire(60)
    assert [entry["event"] for entry in logs] == ["revocation-list-expired"]
    assert len(said) == 1
    assert "the list of CN=authority of pki has expired" in said[0]
    crl.write_bytes(authority.revocation_list(age_days=-2))
    loop.fire(10)
    assert said[1:] == [""]


def named(*names):
    return ClientIdentity("10.0.0.7", ipaddress.ip_address("10.0.0.7"), names)


ALLOWED = EXPORT.model_copy(update={"allow_names": ("db-*",), "allow_networks": ("10.0.0.0/24",)})
PLAIN_TOO = {"tls": "offer", "plain_networks": PLAIN} | FILES


@pytest.mark.parametrize(
    ("settings", "connected", "kind"),
    [
        (PLAIN_TOO, Connected(None, client("10.0.0.7")), None),
        ({"plain_networks": PLAIN}, Connected(b"c", client("10.0.0.7")), None),
        ({"tls": "offer"} | FILES, Connected(None, client("10.0.0.7")), "tls-required"),
        ({"tls": "require"} | FILES, Connected(None, client("127.0.0.1")), "tls-required"),
        ({"tls": "require"} | FILES, Connected(None, client(None)), None),
        ({}, Connected(None, client("10.0.0.7")), "plain-network"),
        ({}, Connected(b"c", client("10.0.0.7")), "plain-network"),
        (PLAIN_TOO, Connected(b"c", named("db-1"), ALLOWED), None),
        (PLAIN_TOO, Connected(b"c", named("web-1"), ALLOWED), "not-allowed"),
        (PLAIN_TOO, Connected(None, named(), ALLOWED), "not-allowed"),
        ({}, Connected(None, client(None), ALLOWED), "not-allowed"),
        ({}, Connected(None, client(None), None), None),
    ],
)
def test_a_client_that_is_connected_and_would_not_be_let_in_now_is_ended_and_counted(
    settings, connected, kind, monkeypatch
):
    monkeypatch.setattr(listeners, "_load", lambda *_: (ssl.create_default_context(), None))
    guard = guard_of(ListenerSecurity(**settings), FakeLoop(FakeClock()))
    with capture_logs() as lines:
        guard.end_refused([connected])
    assert guard.turned_away == ({kind: 1} if kind else {})
    assert len(connected.reasons) == len(guard.turned_away)
    assert all("it was connected to vol-1" in line["reason"] for line in lines)


def test_a_client_without_a_certificate_is_ended_where_one_is_required_now(monkeypatch):
    monkeypatch.setattr(listeners, "_load", lambda *_: (ssl.create_default_context(), None))
    secure = Connected(None)
    secure.identity = replace(client("10.0.0.7"), is_secure=True)
    guard = guard_of(
        ListenerSecurity(tls="require", client_certificates="optional", **FILES), FakeLoop(FakeClock())
    )
    guard.end_refused([secure])
    assert secure.reasons == []
    guard.apply(ListenerSecurity(plain_networks=PLAIN))
    guard.end_refused([secure])
    assert secure.reasons == [], "it may come without TLS now, so it needs no certificate"
    guard.apply(ListenerSecurity(tls="require", **FILES))
    guard.end_refused([secure])
    assert secure.reasons == ["it would not be let in now: it shows no certificate"]

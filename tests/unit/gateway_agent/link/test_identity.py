"""The agent's certificate: what is refused at start, and its renewal, on a fake clock."""

import pytest

from gateway_agent.errors import NotEnrolled, StateFileBroken
from gateway_agent.link.identity import CA, CREDENTIAL, RETRY_S, Identity, write_credential
from pmdaemon.pki import certificates
from pmdaemon.pki.authority import DAY_S, Authority
from pmdaemon.pki.certificates import credential_of_der
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.link import GATEWAY, Bench, FakePlane

OTHER = "22222222-2222-3333-4444-555555555555"


class Enrolled:
    """A state_dir with a certificate of 90 days, and the authority behind it."""

    def __init__(self, directory, clock):
        self.clock, self.state_dir = clock, directory / "state"
        self.tls = self.state_dir / "tls"
        self.tls.mkdir(parents=True, mode=0o700)
        self.authority = Authority(directory / "ca", 90 * DAY_S, clock)
        self.authority.init()
        (self.tls / CA).write_bytes(self.authority.store.read("ca.crt"))
        self.put(GATEWAY, "gw-a")

    def put(self, gateway_id, name):
        key = certificates.make_key()
        der = self.authority.issue(certificates.make_request(key, name), gateway_id, name)
        write_credential(self.tls, key, der)

    def open(self, name="gw-a"):
        return Identity(self.state_dir, GATEWAY, name, self.clock)

    def until_due(self, identity):
        self.clock.advance((identity.credential.renew_at_us - self.clock.unix_us()) / 1e6)


@pytest.fixture
def enrolled(tmp_path):
    return Enrolled(tmp_path, FakeClock())


def test_without_a_certificate_it_says_how_to_get_one(tmp_path):
    with pytest.raises(NotEnrolled, match="sla ca token NAME"):
        Identity(tmp_path, GATEWAY, "gw-a", FakeClock())


def test_what_is_not_ours_is_refused(enrolled):
    with pytest.raises(StateFileBroken, match=r"is for gw-a .*; this gateway is gw-b"):
        enrolled.open("gw-b")
    enrolled.put(OTHER, "gw-a")
    with pytest.raises(StateFileBroken, match=OTHER):
        enrolled.open()
    (enrolled.tls / CREDENTIAL).write_text("junk")
    with pytest.raises(StateFileBroken, match="holds no certificate"):
        enrolled.open()


def test_the_file_is_private(enrolled):
    assert (enrolled.tls / CREDENTIAL).stat().st_mode & 0o777 == 0o600
    assert enrolled.open().context().get_ca_certs()


def test_renewal_is_asked_for_at_two_thirds_and_not_too_often(enrolled):
    identity = enrolled.open()
    assert identity.request() is None
    enrolled.until_due(identity)
    assert identity.request() is not None
    assert identity.request() is None
    enrolled.clock.advance(RETRY_S)
    assert identity.request() is not None
    assert not identity.is_urgent
    enrolled.clock.advance(25 * DAY_S)
    assert identity.is_urgent


def test_a_renewed_certificate_replaces_key_and_certificate(enrolled):
    identity = enrolled.open()
    before, old = (enrolled.tls / CREDENTIAL).read_bytes(), identity.credential
    enrolled.until_due(identity)
    request = identity.request()
    assert identity.store(enrolled.authority.renew(old, request)) == ""
    assert identity.credential.serial != old.serial
    assert (enrolled.tls / CREDENTIAL).read_bytes() != before
    assert enrolled.open().credential == identity.credential
    assert identity.request() is None, "the new one is not due"


@pytest.mark.parametrize("which", ["unasked", "junk", "other-key", "other-gateway", "other-authority"])
def test_a_wrong_certificate_is_not_taken(enrolled, tmp_path, which):
    identity = enrolled.open()
    before = (enrolled.tls / CREDENTIAL).read_bytes()
    enrolled.until_due(identity)
    request = (
        identity.request() if which != "unasked" else certificates.make_request(certificates.make_key(), "x")
    )
    match which:
        case "junk":
            der = b"junk"
        case "other-key":
            der = enrolled.authority.issue(
                certificates.make_request(certificates.make_key(), "x"), GATEWAY, "gw-a"
            )
        case "other-gateway":
            der = enrolled.authority.issue(request, OTHER, "gw-a")
        case "other-authority":
            stranger = Authority(tmp_path / "other", clock=enrolled.clock)
            stranger.init()
            der = stranger.issue(request, GATEWAY, "gw-a")
        case _:
            der = enrolled.authority.issue(request, GATEWAY, "gw-a")
    assert identity.store(der)
    assert (enrolled.tls / CREDENTIAL).read_bytes() == before


def test_the_link_renews_within_its_session(enrolled, tmp_path):
    plane = FakePlane(clock=enrolled.clock)
    identity = enrolled.open()
    bench = Bench(tmp_path, plane, identity=identity)
    bench.connect_server()
    bench.poll()
    bench.pass_time(1.0)
    assert Kind.RENEW not in bench.server.headers
    enrolled.until_due(identity)
    bench.core.server_data(bench.server.poll())  # it was silent that long
    bench.pass_time(1.0)
    request = bench.server.last(Kind.RENEW)["csr"]
    made = enrolled.authority.renew(identity.credential, request)
    bench.say(frame.encode(Kind.CERTIFICATE, {"cert": made, "ca": b""}))
    assert identity.credential.serial == credential_of_der(made).serial
    bench.say(frame.encode(Kind.CERTIFICATE, {"cert": made, "ca": b""}))
    alert = bench.server.last(Kind.ALERT)
    assert alert["kind"] == "certificate-not-renewed"
    assert "not asked for" in alert["text"]

"""The authority on a fake clock: tokens, identities, renewal, revocation, files."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given, settings
from hypothesis import strategies as st

from pmdaemon.pki import certificates
from pmdaemon.pki.authority import DAY_S, Authority
from pmdaemon.pki.errors import (
    CredentialRefused,
    NoAuthority,
    NothingToRevoke,
    PkiError,
    StateUnusable,
)
from pmdaemon.runtime.clock import FakeClock

KEY = certificates.make_key()
REQUEST = certificates.make_request(KEY, "gw-a")
ROOT = certificates.make_authority(KEY, 1_800_000_000_000_000, 1e6)
GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
OTHER = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0002"


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def authority(tmp_path: Path, clock: FakeClock) -> Authority:
    made = Authority(tmp_path / "ca", 90 * DAY_S, clock)
    made.init()
    return made


def request(name: str = "gw-a") -> bytes:
    return certificates.make_request(certificates.make_key(), name)


def enrol(authority: Authority, name: str = "gw-a", gateway_id: str = GATEWAY) -> certificates.Credential:
    token = authority.token(name, 60.0)[0]
    return certificates.credential_of_der(authority.enrol(token, request(), gateway_id))


def refused(code: str) -> pytest.RaisesExc[CredentialRefused]:
    return pytest.raises(CredentialRefused, check=lambda exc: exc.code == code)


def test_files_are_private_and_a_second_init_is_refused(authority: Authority) -> None:
    directory = authority.store.directory
    authority.ensure_server()
    assert directory.stat().st_mode & 0o777 == 0o700
    for item in directory.rglob("*"):
        assert item.stat().st_mode & 0o077 == 0, item
    before = (directory / "ca.key").read_bytes()
    with pytest.raises(PkiError, match="move the directory away"):
        authority.init()
    assert (directory / "ca.key").read_bytes() == before


def test_the_fingerprint_is_of_the_certificate(authority: Authority) -> None:
    loaded = x509.load_pem_x509_certificate((authority.store.directory / "ca.crt").read_bytes())
    assert authority.fingerprint() == certificates.fingerprint(certificates.der(loaded))
    assert len(authority.fingerprint()) == 64


def test_no_authority_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NoAuthority, match="sla ca init"):
        Authority(tmp_path / "none").token("gw-a", 60.0)
    (tmp_path / "empty").mkdir(mode=0o700)
    with pytest.raises(NoAuthority, match="sla ca init"):
        Authority(tmp_path / "empty").fingerprint()


def test_a_directory_or_key_that_others_can_read_is_refused(authority: Authority) -> None:
    directory = authority.store.directory
    (directory / "ca.key").chmod(0o640)
    with pytest.raises(PkiError, match=r"chmod 0600 .*ca\.key"):
        enrol(authority)
    (directory / "ca.key").chmod(0o600)
    directory.chmod(0o750)
    with pytest.raises(PkiError, match="chmod 0700"):
        authority.fingerprint()


def test_a_damaged_key_is_named(authority: Authority) -> None:
    (authority.store.directory / "ca.key").write_text("junk")
    with pytest.raises(StateUnusable, match=r"ca\.key: is no private key"):
        enrol(authority)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda key: key.write_text(""), "is no private key"),
        (lambda key: key.unlink(), "is missing"),
        (
            lambda key: key.write_bytes(certificates.key_pem(certificates.make_key())),
            "is not the key of ca.crt beside it",
        ),
    ],
    ids=["empty", "missing", "another"],
)
def test_a_key_that_cannot_sign_is_found_before_a_certificate_is_asked_for(
    authority: Authority, damage: Callable[[Path], object], said: str
) -> None:
    authority.check_key()
    damage(authority.store.directory / "ca.key")
    authority.fingerprint()  # the certificate is as it was
    with pytest.raises(StateUnusable, match=said):
        authority.check_key()


@pytest.mark.parametrize("text", [b"junk", b"[" * 50_000])
def test_a_file_that_is_not_json_is_named(authority: Authority, text: bytes) -> None:
    authority.store.write("a.json", text)
    with pytest.raises(StateUnusable, match=r"a\.json: is not JSON"):
        authority.store.read_json("a.json")


def test_enrolment_binds_id_and_name(authority: Authority, clock: FakeClock) -> None:
    held = enrol(authority)
    assert (held.gateway_id, held.name) == (GATEWAY, "gw-a")
    assert held.not_before_us <= clock.unix_us() < held.not_after_us
    assert held.not_after_us == clock.unix_us() + round(90 * DAY_S * 1e6)
    assert clock.unix_us() < held.renew_at_us < held.not_after_us
    [entry] = authority.entries()
    assert (entry.serial, entry.how, entry.state(clock.unix_us())) == (held.serial, "token", "valid")
    assert entry.state(held.not_after_us) == "expired"


def test_a_name_longer_than_a_common_name(authority: Authority) -> None:
    name = "g" * 128
    assert enrol(authority, name).name == name


def test_token_unknown_expired_used(authority: Authority, clock: FakeClock) -> None:
    with refused("token-unknown"):
        authority.enrol("no-such-token", request(), GATEWAY)
    with refused("token-unknown"):
        authority.enrol("x" * 5000, request(), GATEWAY)
    token = authority.token("gw-a", 60.0)[0]
    clock.advance(60.0)
    with refused("token-expired"):
        authority.enrol(token, request(), GATEWAY)
    token = authority.token("gw-a", 60.0)[0]
    authority.enrol(token, request(), GATEWAY)
    with refused("token-used"):
        authority.enrol(token, request(), GATEWAY)
    assert authority.waiting_tokens() == []


def test_a_token_is_not_on_disk(authority: Authority) -> None:
    token = authority.token("gw-a", 60.0)[0]
    for item in authority.store.directory.rglob("*"):
        assert token not in item.name
        assert item.is_dir() or token.encode() not in item.read_bytes()
    [waiting] = authority.waiting_tokens()
    assert waiting.name == "gw-a"
    authority.enrol(token, request(), GATEWAY)
    assert authority.waiting_tokens() == []


def test_a_bad_request_does_not_spend_the_token(authority: Authority) -> None:
    token = authority.token("gw-a", 60.0)[0]
    good = request()
    for bad in (b"", b"junk", good[:-5], good[:-1] + bytes([good[-1] ^ 1]), b"x" * 3000):
        with refused("bad-request"):
            authority.enrol(token, bad, GATEWAY)
    assert authority.enrol(token, good, GATEWAY)


def test_of_many_with_one_token_one_succeeds(authority: Authority) -> None:
    token = authority.token("gw-a", 60.0)[0]
    results: list[str] = []
    start = threading.Barrier(8)

    def attempt() -> None:
        mine = Authority(authority.store.directory, clock=FakeClock())
        start.wait()
        try:
            mine.enrol(token, request(), GATEWAY)
            results.append("enrolled")
        except CredentialRefused as exc:
            results.append(exc.code)

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["enrolled"] + ["token-used"] * 7
    assert len(authority.entries()) == 1


def test_an_identity_belongs_to_one_name_while_valid(authority: Authority, clock: FakeClock) -> None:
    held = enrol(authority)
    with refused("identity-taken"):
        enrol(authority, "gw-b")
    enrol(authority, "gw-a")  # the same gateway again
    enrol(authority, "gw-b", OTHER)
    authority.revoke("gw-a", "")
    assert enrol(authority, "gw-b").name == "gw-b"
    clock.advance((held.not_after_us - clock.unix_us()) / 1e6 + 1)
    assert enrol(authority, "gw-c").name == "gw-c"


def test_renewal(authority: Authority, clock: FakeClock) -> None:
    held = enrol(authority)
    clock.advance(60 * DAY_S)
    new = certificates.credential_of_der(authority.renew(held, request("anything")))
    assert (new.gateway_id, new.name) == (held.gateway_id, held.name)
    assert new.serial != held.serial
    assert new.not_after_us > held.not_after_us
    with refused("bad-request"):
        authority.renew(held, b"junk")
    clock.advance(31 * DAY_S)
    with refused("expired"):
        authority.renew(held, request())


def test_revoking_by_name_ends_all_and_forbids_renewal(authority: Authority, clock: FakeClock) -> None:
    held = enrol(authority)
    new = certificates.credential_of_der(authority.renew(held, request()))
    other = enrol(authority, "gw-b", OTHER)
    assert {entry.serial for entry in authority.revoke("gw-a", "stolen")[0]} == {held.serial, new.serial}
    assert authority.revoked() == {held.serial, new.serial}
    with refused("revoked"):
        authority.renew(new, request())
    states = {entry.serial: (entry.state(clock.unix_us()), entry.reason) for entry in authority.entries()}
    assert states == {
        held.serial: ("revoked", "stolen"),
        new.serial: ("revoked", "stolen"),
        other.serial: ("valid", ""),
    }
    assert [entry.serial for entry in authority.revoke(other.serial, "")[0]] == [other.serial]
    for who in ("gw-a", "nobody", other.gateway_id):
        with pytest.raises(NothingToRevoke, match="sla ca list"):
            authority.revoke(who, "")


def valid(authority: Authority, clock: FakeClock) -> set[str]:
    return {entry.serial for entry in authority.entries() if entry.state(clock.unix_us()) == "valid"}


def test_enrolling_again_ends_the_older_certificates(authority: Authority, clock: FakeClock) -> None:
    held = enrol(authority)
    renewed = certificates.credential_of_der(authority.renew(held, request()))
    other = enrol(authority, "gw-b", OTHER)
    again = enrol(authority)
    assert valid(authority, clock) == {again.serial, other.serial}
    assert {entry.reason for entry in authority.entries() if entry.state(clock.unix_us()) == "revoked"} == {
        f"superseded by {again.serial}"
    }
    for former in (held, renewed):
        with refused("revoked"):
            authority.renew(former, request())


@pytest.mark.parametrize("step_s", [10.0, -10 * DAY_S])
def test_a_renewed_certificate_ends_the_older_one_when_it_is_used(
    authority: Authority, clock: FakeClock, step_s: float
) -> None:
    """Whatever the server's clock did between the two."""
    held = enrol(authority)
    clock.step_wall(step_s)
    lost = certificates.credential_of_der(authority.renew(held, request()))  # its answer never arrived
    new = certificates.credential_of_der(authority.renew(held, request()))
    assert authority.supersede(held) == []
    assert valid(authority, clock) == {held.serial, lost.serial, new.serial}
    assert {entry.serial for entry in authority.supersede(new)} == {held.serial, lost.serial}
    assert valid(authority, clock) == {new.serial}
    assert authority.supersede(new) == []
    assert authority.supersede(held) == []  # revoked itself


def test_revoking_withdraws_waiting_tokens(authority: Authority) -> None:
    enrol(authority, "gw-b", OTHER)
    token = authority.token("gw-a", 60.0)[0]
    again = authority.token("gw-b", 60.0)[0]
    revoked, withdrawn = authority.revoke("gw-a", "")
    assert (revoked, [item.name for item in withdrawn]) == ([], ["gw-a"])
    with refused("token-unknown"):
        authority.enrol(token, request(), GATEWAY)
    revoked, withdrawn = authority.revoke(OTHER, "")  # by its id: the tokens of its name go, too
    assert ([item.name for item in revoked], [item.name for item in withdrawn]) == (["gw-b"], ["gw-b"])
    with refused("token-unknown"):
        authority.enrol(again, request(), OTHER)
    with pytest.raises(NothingToRevoke):
        authority.revoke("gw-a", "")


CURVES = {
    "P-256": (ec.SECP256R1, True),
    "P-384": (ec.SECP384R1, True),
    "P-521": (ec.SECP521R1, False),
    "secp256k1": (ec.SECP256K1, False),
    "brainpool": (ec.BrainpoolP256R1, False),
}


@pytest.mark.parametrize("name", CURVES)
def test_curves(authority: Authority, name: str) -> None:
    curve, is_accepted = CURVES[name]
    token = authority.token("gw-a", 60.0)[0]
    asked = certificates.make_request(ec.generate_private_key(curve()), "gw-a")
    if is_accepted:
        assert authority.enrol(token, asked, GATEWAY)
        return
    with refused("bad-request"):
        authority.enrol(token, asked, GATEWAY)
    assert [item.name for item in authority.waiting_tokens()] == ["gw-a"]


ODD = {
    "unknown curve": (
        b"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x07",
        b"\x06\x08\x2a\x86\x48\xce\x3d\x03\x01\x7f",
    ),
    "unknown key type": (b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x01", b"\x06\x07\x2a\x86\x48\xce\x3d\x02\x7f"),
    "version": (b"\x02\x01\x00", b"\x02\x01\x7f"),
}


@pytest.mark.parametrize("what", ODD)
def test_odd_requests_are_refused_in_our_own_words(authority: Authority, what: str) -> None:
    token = authority.token("gw-a", 60.0)[0]
    good = request()
    odd = good.replace(*ODD[what], 1)
    assert odd != good
    with refused("bad-request") as caught:
        authority.enrol(token, odd, GATEWAY)
    assert "PKCS 10" in str(caught.value)
    assert authority.enrol(token, good, GATEWAY)


@settings(max_examples=300)
@given(data=st.data())
def test_any_damaged_request_is_refused_or_read(data: st.DataObject) -> None:
    damaged = bytearray(REQUEST)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CredentialRefused):
        key = certificates.public_key_of_request(bytes(damaged))
        assert isinstance(key.curve, certificates.CURVES)


# Not positive: cryptography warns, and reads it.
@pytest.mark.filterwarnings("ignore:Parsed a serial number")
@settings(max_examples=300)
@given(data=st.data())
def test_any_damaged_certificate_is_refused_or_read(data: st.DataObject) -> None:
    """The agent reads what a hostile server sends."""
    damaged = bytearray(certificates.der(ROOT))
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CredentialRefused):
        certificates.credential_of_der(bytes(damaged))
    with contextlib.suppress(ValueError):
        certificates.issued(bytes(damaged), KEY, certificates.pem(ROOT))


def test_what_ended_long_ago_is_forgotten(authority: Authority, clock: FakeClock) -> None:
    enrol(authority)
    authority.revoke("gw-a", "")
    clock.advance(90 * DAY_S)
    authority.sweep()
    assert len(authority.entries()) == 1
    clock.advance(31 * DAY_S)
    authority.sweep()
    assert authority.entries() == []
    assert authority.revoked() == frozenset()
    assert authority.store.names("tokens/used") == []


def test_the_servers_certificate_is_renewed_after_two_thirds(authority: Authority, clock: FakeClock) -> None:
    first = authority.ensure_server().read_bytes()
    clock.advance(59 * DAY_S)
    assert authority.ensure_server().read_bytes() == first
    clock.advance(2 * DAY_S)
    second = authority.ensure_server().read_bytes()
    assert second != first
    made = certificates.certificate_in(second)
    assert certificates.uris(made) == [certificates.SERVER_URI]
    assert certificates.unix_us(made.not_valid_after_utc) > clock.unix_us()
    with refused("no-identity"):
        certificates.credential(made)


def test_nothing_outlives_the_authority(tmp_path: Path, clock: FakeClock) -> None:
    short = Authority(tmp_path / "ca", 90 * DAY_S, clock)
    short.init(lifetime_s=10 * DAY_S)
    held = enrol(short)
    assert held.not_after_us <= clock.unix_us() + round(10 * DAY_S * 1e6)
    clock.advance(11 * DAY_S)
    with refused("authority-expired"):
        enrol(short)


def test_a_received_certificate_must_fit_key_and_authority(authority: Authority, tmp_path: Path) -> None:
    key = certificates.make_key()
    made = authority.issue(certificates.make_request(key, "gw-a"), GATEWAY, "gw-a")
    ca_pem = (authority.store.directory / "ca.crt").read_bytes()
    assert certificates.issued(made, key, ca_pem)
    with pytest.raises(ValueError, match="another key"):
        certificates.issued(made, certificates.make_key(), ca_pem)
    other = Authority(tmp_path / "other")
    other.init()
    with pytest.raises(ValueError, match="pinned authority"):
        certificates.issued(made, key, (tmp_path / "other" / "ca.crt").read_bytes())


def test_a_tokens_list_of_volumes_is_in_the_certificate_and_in_those_that_renew_it(
    authority: Authority,
) -> None:
    listed = ("vol-1*", "pool-1/db_?")
    token, _ = authority.token("gw-a", 60.0, listed)
    assert [waiting.volumes for waiting in authority.waiting_tokens()] == [listed]
    held = certificates.credential_of_der(authority.enrol(token, request(), GATEWAY))
    renewed = certificates.credential_of_der(authority.renew(held, request()))
    by_hand = certificates.credential_of_der(authority.issue(request(), GATEWAY, "gw-a", listed))
    assert held.volumes == renewed.volumes == by_hand.volumes == listed
    assert {entry.volumes for entry in authority.entries()} == {listed}
    assert certificates.credential_of_der(authority.issue(request(), GATEWAY, "gw-a")).volumes == ()

"""The inbound thread with TLS and the certificate worker, step by step: fake clock, no threads."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.poller import admission
from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.quotas import LIMITS
from pmdaemon.poller.timeouts import HANDSHAKE_NS
from pmdaemon.runtime.transport import TlsTransport, WantRead
from pmdaemon.wire import frame
from pmdaemon.wire.frame import Frame, FrameReader
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import hello, register, schema
from tests.support.pair import PairRig

GATEWAY = "6f1dc7b2-8d2e-4c0e-9d53-0a4c6a1f0001"
SECOND = 10**9


class Far:
    """An agent's end, driven by hand. ``tls`` is None while it has said nothing."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.tls: TlsTransport | None = None
        self._reader = FrameReader()
        self._buffer = memoryview(bytearray(1 << 17))

    def read(self) -> list[Frame]:
        assert self.tls is not None
        received = b""
        try:
            while size := self.tls.recv_into(self._buffer):
                received += self._buffer[:size]
        except WantRead:
            pass
        return list(self._reader.feed(received))

    @property
    def is_closed(self) -> bool:
        """Whether the other side has closed: read to the end of what the kernel holds."""
        raw = socket.socket(fileno=self.sock.fileno() if self.tls is None else self.tls.fileno())
        try:
            raw.setblocking(False)
            while raw.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return True
        finally:
            raw.detach()
        return True

    def close(self) -> None:
        (self.tls or self.sock).close()


class TlsRig(PairRig):
    """A pair with TLS; what it has of ``PairRig`` for plain agents is not used."""

    def __init__(self, directory: Path) -> None:
        # OpenSSL looks at the real clock, so the authority does, too.
        self.real = Authority(directory / "real")
        self.real.init()
        self.worker = CertificateWorker(self.real, lambda news: self.to_inbound.put(news), Counter())  # noqa: PLW0108  # made below
        super().__init__(certificate_worker=self.worker)
        self.fars: list[Far] = []

    def connect(self) -> Far:
        near, sock = socket.socketpair()
        far = Far(sock)
        self.inbound.adopt(near, f"peer-{len(self.fars)}")
        self.fars.append(far)
        return far

    def secure(self, far: Far, own: Path | None = None) -> Far:
        """Do the whole handshake."""
        context = contexts.agent(self.real.store.path("ca.crt"), own)
        far.tls = TlsTransport(far.sock, context, server_side=False)
        for _ in range(4):
            done = far.tls.handshake() is None
            self.inbound.step(0)
        assert done
        return far

    def keys(self, *volumes: str) -> Path:
        key = certificates.make_key()
        made = self.real.issue(certificates.make_request(key, "gw-a"), GATEWAY, "gw-a", volumes)
        path = self.real.store.path("agent.pem")
        path.write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))
        return path

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.inbound.step(0)

    def close(self) -> None:
        super().close()
        for far in self.fars:
            far.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[TlsRig]:
    made = TlsRig(tmp_path)
    yield made
    made.close()


def test_a_slow_handshake_is_ended_and_others_are_served(rig: TlsRig) -> None:
    silent, slow = rig.connect(), rig.connect()
    slow.sock.send(b"\x16\x03\x01")  # the beginning of a handshake, and no more
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.pass_time(4.4)
    assert not silent.is_closed
    rig.pass_time(1.2)
    assert silent.is_closed
    assert slow.is_closed
    assert rig.counters["refusal_slow"] == 2
    assert [item.kind for item in good.read()] == [Kind.WELCOME, Kind.REGISTERED]
    assert rig.inbound.connections == 1


def test_a_peer_that_secures_and_says_nothing_is_ended(rig: TlsRig) -> None:
    idle = rig.secure(rig.connect(), rig.keys())
    rig.pass_time(HANDSHAKE_NS / SECOND - 1)
    assert not idle.is_closed
    rig.pass_time(1.6)
    assert idle.is_closed


def test_a_peer_that_vanishes_in_the_handshake_is_counted(rig: TlsRig) -> None:
    far = rig.connect()
    far.sock.send(b"\x16\x03\x01\x02\x00")
    rig.inbound.step(0)
    far.sock.close()
    rig.inbound.step(0)
    assert rig.counters["refusal_closed"] == 1
    assert rig.inbound.connections == 0


def test_handshakes_have_a_bounded_share_of_a_round(rig: TlsRig) -> None:
    fars = [rig.connect() for _ in range(10)]
    context = contexts.agent(rig.real.store.path("ca.crt"), None)
    for far in fars:
        far.tls = TlsTransport(far.sock, context, server_side=False)
        far.tls.handshake()

    def answered() -> int:
        return sum(far.tls is not None and far.tls.handshake() is None for far in fars)

    rig.inbound.step(0)
    assert answered() == admission.HANDSHAKES_A_ROUND
    for _ in range(6):
        rig.inbound.step(0)
    assert answered() == 10


def test_a_flood_of_strangers_is_bounded(rig: TlsRig, monkeypatch: pytest.MonkeyPatch) -> None:
    # A limit of 8 instead of half of the descriptors, which follows from the process's own limit.
    monkeypatch.setattr(rig.inbound._admission, "unregistered", admission.UnregisteredConnections(limit=8))
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    flood = [rig.connect() for _ in range(40)]
    assert rig.inbound.connections == 1 + 8
    assert rig.counters["strangers_turned_away"] == 32
    assert not good.is_closed
    rig.pass_time(2.1)
    late = rig.connect()
    assert rig.counters["strangers_evicted"] == 1
    assert flood[0].is_closed
    assert not late.is_closed
    assert rig.inbound.connections == 1 + 8


def test_revocation_is_reread_and_ends_the_session(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    assert len(good.read()) == 2
    rig.worker.reread()
    rig.inbound.step(0)
    assert good.read() == [], "nothing was revoked"
    rig.real.revoke("gw-a", "test")
    rig.worker.reread()
    rig.inbound.step(0)
    [last] = good.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "revoked")
    rig.pass_time(1.6)
    assert rig.inbound.connections == 0


def test_a_session_ends_with_its_certificate(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    good.read()
    held = next(iter(rig.connections)).credential
    assert held is not None
    rig.clock.step_wall((held.not_after_us - rig.clock.unix_us()) / 1e6 - 1)
    rig.pass_time(0.6)
    assert good.read() == []
    rig.pass_time(1.0)
    [last] = good.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "certificate-expired")


def test_enrolment_is_answered_by_the_clerk_not_by_the_thread(rig: TlsRig) -> None:
    far = rig.secure(rig.connect())
    assert far.tls is not None
    token = rig.real.token("gw-n", 60.0)[0]
    key = certificates.make_key()
    body = {"token": token, "gw": GATEWAY, "csr": certificates.make_request(key, "x")}
    far.tls.send(frame.encode(Kind.ENROL, body))
    rig.inbound.step(0)
    assert far.read() == [], "it waits for the clerk"
    rig.worker.serve()
    rig.inbound.step(0)
    [answer] = far.read()
    assert answer.kind == Kind.CERTIFICATE
    assert certificates.issued(answer.header["cert"], key, certificates.pem_of_der(answer.header["ca"]))


def test_a_renewal_prolongs_the_session(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    good.read()
    [conn] = rig.connections
    first = conn.credential
    good.tls.send(frame.encode(Kind.RENEW, {"csr": certificates.make_request(certificates.make_key(), "x")}))
    rig.inbound.step(0)
    rig.worker.serve()
    rig.inbound.step(0)
    assert [item.kind for item in good.read()] == [Kind.CERTIFICATE]
    assert first is not None
    assert conn.credential is not None
    assert conn.credential.serial != first.serial
    assert conn.credential.gateway_id == first.gateway_id
    rig.real.revoke(conn.credential.serial, "")
    rig.worker.reread()
    rig.inbound.step(0)
    assert [item.header["code"] for item in good.read()] == ["revoked"]


def test_asking_twice_at_once_is_refused(rig: TlsRig) -> None:
    far = rig.secure(rig.connect())
    assert far.tls is not None
    body = {"token": "t", "gw": GATEWAY, "csr": b"x"}
    far.tls.send(frame.encode(Kind.ENROL, body) * 2)
    rig.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "asked-twice"
    rig.worker.serve()  # the answer to the first finds the connection draining
    rig.inbound.step(0)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token": "t", "gw": "no-uuid", "csr": b"x"},
        {"token": 5, "gw": GATEWAY, "csr": b"x"},
        {"token": "t" * 101, "gw": GATEWAY, "csr": b"x"},
        {"token": "t", "gw": GATEWAY, "csr": "text"},
        {"token": "t", "gw": GATEWAY, "csr": b"x" * 2049},
    ],
)
def test_a_malformed_enrolment(rig: TlsRig, body: dict[str, object]) -> None:
    far = rig.secure(rig.connect())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.ENROL, body))
    rig.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "malformed"
    assert rig.counters["refusal_malformed"] == 1


@pytest.mark.parametrize(
    "kind", [Kind.HELLO, Kind.SCHEMA, Kind.REGISTER, Kind.CUT, Kind.BYE, Kind.ERROR, 50, 200]
)
def test_without_a_certificate_nothing_but_enrolment_is_decoded(
    rig: TlsRig, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    decoded: list[bytes] = []
    original = frame._unpack_header  # what has been decoded shows nowhere else
    monkeypatch.setattr(
        frame, "_unpack_header", lambda view, **how: decoded.append(bytes(view)) or original(view, **how)
    )
    far = rig.secure(rig.connect())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.CA_QUERY, {}) + frame.encode(kind, {"text": "x", "reason": "y"}))
    rig.inbound.step(0)
    assert decoded == [b"\x80"]
    assert [item.kind for item in far.read()] == [Kind.CA_CERT, Kind.ERROR]
    assert rig.counters["refusal_not_enrolled"] == 1


def test_a_large_frame_of_a_peer_without_a_certificate_is_not_waited_for(rig: TlsRig) -> None:
    far = rig.secure(rig.connect())
    assert far.tls is not None
    far.tls.send(hello(GATEWAY, name="gw-a")[:8])  # the prefix alone
    rig.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "not-enrolled"


def test_a_revoked_peer_is_refused_before_its_hello_is_read(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    rig.real.revoke("gw-a", "test")
    rig.worker.reread()
    rig.to_inbound.drain()
    good.tls.send(frame.encode(Kind.HELLO, {"gw": 5}))
    rig.inbound.step(0)
    assert [item.header.get("code") for item in good.read()] == ["revoked"]


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), RecursionError(), MemoryError(), Panic("in Rust")]
)
def test_whatever_a_request_brings_about_the_clerk_goes_on(
    rig: TlsRig, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    token = rig.real.token("gw-n", 60.0)[0]
    key = certificates.make_key()
    body = {"token": token, "gw": GATEWAY, "csr": certificates.make_request(key, "x")}

    def fails(*_args: object) -> bytes:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Authority, "enrol", fails)
        far = rig.secure(rig.connect())
        assert far.tls is not None
        far.tls.send(frame.encode(Kind.ENROL, body))
        rig.inbound.step(0)
        rig.worker.serve()
        rig.inbound.step(0)
    [last] = far.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "authority-unusable")
    assert "defect" not in last.header["text"]
    far = rig.secure(rig.connect())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.ENROL, body))
    rig.inbound.step(0)
    rig.worker.serve()
    rig.inbound.step(0)
    assert [item.kind for item in far.read()] == [Kind.CERTIFICATE]


def test_a_certificate_ends_the_older_ones_when_it_is_first_used(rig: TlsRig) -> None:
    """Also a copy that somebody holds: the renewed certificate is used, the older one of the copy ends."""
    copied = rig.keys()
    older = copied.read_bytes()
    first = rig.secure(rig.connect(), copied)
    assert first.tls is not None
    first.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    rig.worker.serve()
    rig.worker.reread()
    rig.inbound.step(0)
    assert [item.kind for item in first.read()] == [Kind.WELCOME, Kind.REGISTERED]
    [before] = rig.real.entries()
    second = rig.secure(rig.connect(), rig.keys())  # issued by hand: both are valid
    assert second.tls is not None
    second.tls.send(hello(GATEWAY, name="gw-a"))
    rig.inbound.step(0)
    rig.worker.serve()
    rig.worker.reread()
    rig.inbound.step(0)
    assert rig.real.revoked() == {before.serial}
    assert [item.header["code"] for item in first.read()] == ["revoked"]
    assert [item.kind for item in second.read()] == [Kind.WELCOME]
    copied.write_bytes(older)
    third = rig.secure(rig.connect(), copied)
    assert third.tls is not None
    third.tls.send(hello(GATEWAY, name="gw-a"))
    rig.inbound.step(0)
    assert [item.header["code"] for item in third.read()] == ["revoked"]


def test_renewals_have_a_quota(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    good.read()
    codes: list[str] = []
    asked = frame.encode(Kind.RENEW, {"csr": certificates.make_request(certificates.make_key(), "x")})
    for _ in range(LIMITS["renewals"].burst + 1):
        good.tls.send(asked)
        rig.inbound.step(0)
        rig.worker.serve()
        rig.inbound.step(0)
        codes += [str(item.header.get("code", "made")) for item in good.read()]
    assert codes == ["made"] * LIMITS["renewals"].burst + ["over-limit"]


def test_the_volumes_in_the_certificate_are_announced(rig: TlsRig) -> None:
    good = rig.secure(rig.connect(), rig.keys("vol-1*", "pool-1/db"))
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    rig.inbound.step(0)
    for who in ("services", "dbmanager"):
        assert rig.mailbox.to(who, Kind.GATEWAY)[-1].header["volumes"] == ["vol-1*", "pool-1/db"]

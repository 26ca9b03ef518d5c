"""The inbound thread with TLS and the clerk, step by step: fake clock, socket pairs, no threads."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.poller import admission
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.certificates import CertificateWorker
from pmdaemon.poller.frame_handlers import FrameHandlers
from pmdaemon.poller.gateway import Registry
from pmdaemon.poller.inbound import Hint, Inbound
from pmdaemon.poller.publisher import CutPublisher
from pmdaemon.poller.quotas import LIMITS
from pmdaemon.poller.timeouts import HANDSHAKE_NS, TimeoutPolicy
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.thread_inbox import ThreadInbox
from pmdaemon.runtime.transport import TlsTransport, WantRead
from pmdaemon.wire import frame
from pmdaemon.wire.frame import Frame, FrameReader
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import FakeMailbox, hello, register, schema

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


class Bench:
    """The receiving half of a pair with TLS."""

    def __init__(self, directory: Path) -> None:
        self.clock = FakeClock()
        # OpenSSL looks at the real clock, so the authority does, too.
        self.real = Authority(directory / "real")
        self.real.init()
        self.counters: Counter[str] = Counter()
        self.hints: ThreadInbox[Hint] = ThreadInbox()
        self.clerk = CertificateWorker(self.real, self.hints.put, Counter())
        self.registered: ThreadInbox[str] = ThreadInbox()
        registry, box = Registry(CatchUp(1 << 40, 10**9)), FakeMailbox()
        courier = CutPublisher(box, 0, registry.refused)
        reception = FrameHandlers(
            registry,
            courier,
            self.clock,
            interval_us=1_000_000,
            on_registered=self.registered.put,
            counters=self.counters,
            desk=self.clerk,
        )
        self.inbound = Inbound(
            registry,
            reception,
            courier,
            self.clock,
            TimeoutPolicy.for_interval(SECOND),
            hints=self.hints,
            mover=None,
            counters=self.counters,
            clerk=self.clerk,
            thread_time_ns=lambda: 0,
        )
        self.fars: list[Far] = []

    def dial(self) -> Far:
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

    def keys(self) -> Path:
        key = certificates.make_key()
        made = self.real.issue(certificates.make_request(key, "gw-a"), GATEWAY, "gw-a")
        path = self.real.store.path("agent.pem")
        path.write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))
        return path

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds * 10)):
            self.clock.advance(0.1)
            self.inbound.step(0)

    def close(self) -> None:
        self.inbound.shut("test over")
        for far in self.fars:
            far.close()
        for handover in (self.hints, self.registered):
            handover.close()
        self.clerk.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def test_a_slow_handshake_is_ended_and_others_are_served(bench: Bench) -> None:
    silent, slow = bench.dial(), bench.dial()
    slow.sock.send(b"\x16\x03\x01")  # the beginning of a handshake, and no more
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.pass_time(4.4)
    assert not silent.is_closed
    bench.pass_time(1.2)
    assert silent.is_closed
    assert slow.is_closed
    assert bench.counters["refusal_slow"] == 2
    assert [item.kind for item in good.read()] == [Kind.WELCOME, Kind.REGISTERED]
    assert bench.inbound.connections == 1


def test_a_peer_that_secures_and_says_nothing_is_ended(bench: Bench) -> None:
    idle = bench.secure(bench.dial(), bench.keys())
    bench.pass_time(HANDSHAKE_NS / SECOND - 1)
    assert not idle.is_closed
    bench.pass_time(1.6)
    assert idle.is_closed


def test_a_peer_that_vanishes_in_the_handshake_is_counted(bench: Bench) -> None:
    far = bench.dial()
    far.sock.send(b"\x16\x03\x01\x02\x00")
    bench.inbound.step(0)
    far.sock.close()
    bench.inbound.step(0)
    assert bench.counters["refusal_closed"] == 1
    assert bench.inbound.connections == 0


def test_handshakes_have_a_bounded_share_of_a_round(bench: Bench) -> None:
    fars = [bench.dial() for _ in range(10)]
    context = contexts.agent(bench.real.store.path("ca.crt"), None)
    for far in fars:
        far.tls = TlsTransport(far.sock, context, server_side=False)
        far.tls.handshake()

    def answered() -> int:
        return sum(far.tls is not None and far.tls.handshake() is None for far in fars)

    bench.inbound.step(0)
    assert answered() == admission.HANDSHAKES_A_ROUND
    for _ in range(6):
        bench.inbound.step(0)
    assert answered() == 10


def test_a_flood_of_strangers_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.inbound._door, "strangers", admission.UnregisteredConnections(limit=8))
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    flood = [bench.dial() for _ in range(40)]
    assert bench.inbound.connections == 1 + 8
    assert bench.counters["strangers_turned_away"] == 32
    assert not good.is_closed
    bench.pass_time(2.1)
    late = bench.dial()
    assert bench.counters["strangers_evicted"] == 1
    assert flood[0].is_closed
    assert not late.is_closed
    assert bench.inbound.connections == 1 + 8


def test_revocation_is_reread_and_ends_the_session(bench: Bench) -> None:
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    assert len(good.read()) == 2
    bench.clerk.look()
    bench.inbound.step(0)
    assert good.read() == [], "nothing was revoked"
    bench.real.revoke("gw-a", "test")
    bench.clerk.look()
    bench.inbound.step(0)
    [last] = good.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "revoked")
    bench.pass_time(1.6)
    assert bench.inbound.connections == 0


def test_a_session_ends_with_its_certificate(bench: Bench) -> None:
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    good.read()
    held = next(iter(bench.inbound._connections)).credential
    assert held is not None
    bench.clock.step_wall((held.not_after_us - bench.clock.unix_us()) / 1e6 - 1)
    bench.pass_time(0.6)
    assert good.read() == []
    bench.pass_time(1.0)
    [last] = good.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "certificate-expired")


def test_enrolment_is_answered_by_the_clerk_not_by_the_thread(bench: Bench) -> None:
    far = bench.secure(bench.dial())
    assert far.tls is not None
    token = bench.real.token("gw-n", 60.0)[0]
    key = certificates.make_key()
    body = {"token": token, "gw": GATEWAY, "csr": certificates.make_request(key, "x")}
    far.tls.send(frame.encode(Kind.ENROL, body))
    bench.inbound.step(0)
    assert far.read() == [], "it waits for the clerk"
    bench.clerk.serve()
    bench.inbound.step(0)
    [answer] = far.read()
    assert answer.kind == Kind.CERTIFICATE
    assert certificates.issued(answer.header["cert"], key, certificates.pem_of_der(answer.header["ca"]))


def test_a_renewal_prolongs_the_session(bench: Bench) -> None:
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    good.read()
    [conn] = bench.inbound._connections
    first = conn.credential
    good.tls.send(frame.encode(Kind.RENEW, {"csr": certificates.make_request(certificates.make_key(), "x")}))
    bench.inbound.step(0)
    bench.clerk.serve()
    bench.inbound.step(0)
    assert [item.kind for item in good.read()] == [Kind.CERTIFICATE]
    assert first is not None
    assert conn.credential is not None
    assert conn.credential.serial != first.serial
    assert conn.credential.gateway_id == first.gateway_id
    bench.real.revoke(conn.credential.serial, "")
    bench.clerk.look()
    bench.inbound.step(0)
    assert [item.header["code"] for item in good.read()] == ["revoked"]


def test_asking_twice_at_once_is_refused(bench: Bench) -> None:
    far = bench.secure(bench.dial())
    assert far.tls is not None
    body = {"token": "t", "gw": GATEWAY, "csr": b"x"}
    far.tls.send(frame.encode(Kind.ENROL, body) * 2)
    bench.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "asked-twice"
    bench.clerk.serve()  # the answer to the first finds the connection draining
    bench.inbound.step(0)


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
def test_a_malformed_enrolment(bench: Bench, body: dict[str, object]) -> None:
    far = bench.secure(bench.dial())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.ENROL, body))
    bench.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "malformed"
    assert bench.counters["refusal_malformed"] == 1


@pytest.mark.parametrize(
    "kind", [Kind.HELLO, Kind.SCHEMA, Kind.REGISTER, Kind.CUT, Kind.BYE, Kind.ERROR, 50, 200]
)
def test_without_a_certificate_nothing_but_enrolment_is_decoded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    decoded: list[bytes] = []
    original = frame._unpack_header
    monkeypatch.setattr(frame, "_unpack_header", lambda view: decoded.append(bytes(view)) or original(view))
    far = bench.secure(bench.dial())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.CA_QUERY, {}) + frame.encode(kind, {"text": "x", "reason": "y"}))
    bench.inbound.step(0)
    assert decoded == [b"\x80"]
    assert [item.kind for item in far.read()] == [Kind.CA_CERT, Kind.ERROR]
    assert bench.counters["refusal_not_enrolled"] == 1


def test_a_large_frame_of_a_peer_without_a_certificate_is_not_waited_for(bench: Bench) -> None:
    far = bench.secure(bench.dial())
    assert far.tls is not None
    far.tls.send(hello(GATEWAY, name="gw-a")[:8])  # the prefix alone
    bench.inbound.step(0)
    [last] = far.read()
    assert last.header["code"] == "not-enrolled"


def test_a_revoked_peer_is_refused_before_its_hello_is_read(bench: Bench) -> None:
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    bench.real.revoke("gw-a", "test")
    bench.clerk.look()
    bench.hints.drain()
    good.tls.send(frame.encode(Kind.HELLO, {"gw": 5}))
    bench.inbound.step(0)
    assert [item.header.get("code") for item in good.read()] == ["revoked"]


class Panic(BaseException):
    """As pyo3's PanicException: no Exception."""


@pytest.mark.parametrize(
    "error", [RuntimeError("a defect"), RecursionError(), MemoryError(), Panic("in Rust")]
)
def test_whatever_a_request_brings_about_the_clerk_goes_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    token = bench.real.token("gw-n", 60.0)[0]
    key = certificates.make_key()
    body = {"token": token, "gw": GATEWAY, "csr": certificates.make_request(key, "x")}

    def fails(*_args: object) -> bytes:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Authority, "enrol", fails)
        far = bench.secure(bench.dial())
        assert far.tls is not None
        far.tls.send(frame.encode(Kind.ENROL, body))
        bench.inbound.step(0)
        bench.clerk.serve()
        bench.inbound.step(0)
    [last] = far.read()
    assert (last.kind, last.header["code"]) == (Kind.ERROR, "authority-unusable")
    assert "defect" not in last.header["text"]
    far = bench.secure(bench.dial())
    assert far.tls is not None
    far.tls.send(frame.encode(Kind.ENROL, body))
    bench.inbound.step(0)
    bench.clerk.serve()
    bench.inbound.step(0)
    assert [item.kind for item in far.read()] == [Kind.CERTIFICATE]


def test_a_certificate_ends_the_older_ones_when_it_is_first_used(bench: Bench) -> None:
    """Also a copy that somebody holds: the renewed certificate is used, the older one of the copy ends."""
    copied = bench.keys()
    older = copied.read_bytes()
    first = bench.secure(bench.dial(), copied)
    assert first.tls is not None
    first.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    bench.clerk.serve()
    bench.clerk.look()
    bench.inbound.step(0)
    assert [item.kind for item in first.read()] == [Kind.WELCOME, Kind.REGISTERED]
    [before] = bench.real.entries()
    second = bench.secure(bench.dial(), bench.keys())  # issued by hand: both are valid
    assert second.tls is not None
    second.tls.send(hello(GATEWAY, name="gw-a"))
    bench.inbound.step(0)
    bench.clerk.serve()
    bench.clerk.look()
    bench.inbound.step(0)
    assert bench.real.revoked() == {before.serial}
    assert [item.header["code"] for item in first.read()] == ["revoked"]
    assert [item.kind for item in second.read()] == [Kind.WELCOME]
    copied.write_bytes(older)
    third = bench.secure(bench.dial(), copied)
    assert third.tls is not None
    third.tls.send(hello(GATEWAY, name="gw-a"))
    bench.inbound.step(0)
    assert [item.header["code"] for item in third.read()] == ["revoked"]


def test_renewals_have_a_quota(bench: Bench) -> None:
    good = bench.secure(bench.dial(), bench.keys())
    assert good.tls is not None
    good.tls.send(b"".join((hello(GATEWAY, name="gw-a"), schema(), register())))
    bench.inbound.step(0)
    good.read()
    codes: list[str] = []
    asked = frame.encode(Kind.RENEW, {"csr": certificates.make_request(certificates.make_key(), "x")})
    for _ in range(LIMITS["renewals"].burst + 1):
        good.tls.send(asked)
        bench.inbound.step(0)
        bench.clerk.serve()
        bench.inbound.step(0)
        codes += [str(item.header.get("code", "made")) for item in good.read()]
    assert codes == ["made"] * LIMITS["renewals"].burst + ["over-limit"]

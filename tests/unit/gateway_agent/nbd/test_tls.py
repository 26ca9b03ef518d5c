import os
import random
import ssl

import pytest

from gateway_agent.nbd import tls
from gateway_agent.nbd.buffers import ReplyBuffer
from gateway_agent.nbd.listeners import server_context
from gateway_agent.nbd.loop import IN
from gateway_agent.nbd.payload_pipe import PipePool
from gateway_agent.nbd.tls import OPENING_LIMIT_NS, TlsConnection, TlsOpening
from pmdaemon.runtime.clock import FakeClock
from tests.support.nbd import FakeLoop, FakeSocket
from tests.support.nbd_certificates import NbdAuthority
from tests.support.nbd_tls import InlineEngine, TlsPeer, client_context, guard_of, security


@pytest.fixture(scope="module")
def pki(tmp_path_factory):
    authority = NbdAuthority(tmp_path_factory.mktemp("pki"))
    server, client = authority.issue("server", "gw"), authority.issue("client", "host-a", "a.example")
    return server_context(security(authority, server), "nbd-0"), client_context(authority, client), authority


class Talk:
    """A client before a connection of ours."""

    def __init__(self, pki, context=None, engine=None, on_ready=None):
        self.loop = engine.loop if engine else FakeLoop(FakeClock())
        self.engine = engine or InlineEngine(self.loop)
        self.sock = FakeSocket()
        self.near = TlsConnection(self.loop, self.sock, pki[0])
        self.peer = TlsPeer(self.sock, context or pki[1])
        self.outcome = None
        ready = on_ready or (lambda: self._set("ready"))
        self.opening = TlsOpening(self.engine, self.near, ready, self._set)

    def _set(self, outcome):
        assert self.outcome is None, "exactly one of the two is called"
        self.outcome = outcome

    @property
    def fd(self):
        return self.sock.fileno()

    def turn(self):
        """Let everything that is under way arrive."""
        if self.sock.incoming and self.loop.masks.get(self.fd, 0) & IN:
            self.loop.handlers[self.fd](IN)
        self.loop.turn()

    def shake(self, behind=b""):
        while self.outcome is None:
            if self.peer.shake() and behind:
                last, records = self.sock.incoming.pop(), self.peer.say(behind)
                self.sock.incoming[-1], behind = last + records, b""
            self.turn()
        return self

    def read(self, size=1 << 20):
        view = memoryview(bytearray(size))
        return bytes(view[: self.near.recv_into(view)])


def test_bytes_pass_both_ways_and_the_certificate_is_known(pki):
    talk = Talk(pki).shake()
    assert talk.outcome == "ready"
    assert talk.loop.masks == {}
    assert talk.loop.timers == {}
    assert talk.near.peer_certificate()["subjectAltName"] == (("DNS", "a.example"),)
    assert talk.near.version() == "TLSv1.3"
    talk.peer.heard()
    assert talk.near.send(b"hello") == 5
    assert talk.peer.heard() == b"hello"
    talk.peer.say(b"and back")
    assert talk.read() == b"and back"
    with pytest.raises(BlockingIOError):
        talk.read()


def test_what_came_with_the_end_of_the_handshake_is_readable_at_once(pki):
    talk = Talk(pki).shake(behind=b"first words")
    assert talk.loop.buffered == {talk.fd}
    assert talk.near.recv(100) == b"first words"
    assert talk.loop.buffered == set()


def test_bytes_that_epoll_cannot_see_are_announced_until_they_are_taken(pki):
    talk = Talk(pki).shake()
    data = os.urandom(100_000)
    talk.peer.say(data)
    found = b""
    while len(found) < len(data):
        found += talk.read(7_000)
        assert (talk.fd in talk.loop.buffered) == (len(found) < len(data))
    assert found == data


def test_many_records_arrive_in_one_receive(pki):
    talk = Talk(pki).shake()
    talk.sock.incoming.append(b"".join(talk.peer.say(b"%028d" % number) for number in range(50)))
    for _ in range(50):
        talk.sock.incoming.popleft()
    assert len(talk.read()) == 50 * 28


def test_tiny_records_are_decrypted_in_several_turns(pki, monkeypatch):
    monkeypatch.setattr(tls, "MOST_RECORDS", 10)
    talk = Talk(pki).shake()
    talk.sock.incoming.append(b"".join(talk.peer.say(b"%d" % (number % 10)) for number in range(25)))
    for _ in range(25):
        talk.sock.incoming.popleft()
    found = []
    while talk.loop.buffered or not found:
        found.append(talk.read())
    assert found == [b"0123456789", b"0123456789", b"01234"]


@pytest.mark.parametrize("seed", range(4))
def test_a_socket_that_takes_little_gets_every_byte_once_and_in_order(pki, seed):
    rng, talk = random.Random(seed), Talk(pki).shake()
    talk.peer.heard()
    out, said, heard = ReplyBuffer(talk.near, PipePool()), b"", b""
    for _ in range(30):
        data = rng.randbytes(rng.choice((1, 16, 4112, 70_000, 600_000)))
        said += data
        talk.sock.window = rng.choice((0, 1, 5_000, 300_000, 1 << 40))
        out.send(data)
        heard += talk.peer.heard()
        assert said.startswith(heard)
        if out.is_empty:
            assert heard == said, "what counts as sent has left"
    talk.sock.window = 1 << 40
    assert out.flush()
    assert heard + talk.peer.heard() == said


@pytest.mark.parametrize("how", ["farewell", "cut"])
def test_the_end_comes_behind_the_last_bytes(pki, how):
    talk = Talk(pki).shake()
    talk.peer.say(b"last")
    if how == "farewell":
        talk.peer.end()
        talk.sock.incoming[0] += talk.sock.incoming.pop()
    talk.sock.is_ended = True
    assert talk.read() == b"last"
    assert talk.read() == b""
    assert talk.fd in talk.loop.buffered, "an end is announced, also where epoll sees none"
    talk.near.close()
    assert talk.loop.buffered == set()


def test_records_that_are_none_end_the_connection(pki):
    talk = Talk(pki).shake()
    talk.sock.incoming.append(bytes(100))
    with pytest.raises(OSError, match=r"(?i)wrong.version"):
        talk.read()


def test_a_peer_that_asks_without_reading_is_dropped(pki, monkeypatch):
    talk = Talk(pki).shake()
    monkeypatch.setattr(tls, "MAX_ANSWER_BYTES", 0)
    talk.sock.window = 3
    talk.near.send(b"x")
    talk.near._sealed.write(b"an alert")  # OpenSSL makes them in TLS 1.2 only, for renegotiations
    talk.peer.say(b"y")
    with pytest.raises(ConnectionAbortedError, match="takes no answers"):
        talk.read()


def test_shutdown_says_farewell_and_drops_what_still_comes(pki):
    talk = Talk(pki).shake()
    talk.peer.heard()
    talk.near.shutdown(1)
    assert talk.sock.is_shut
    talk.peer.pump()
    assert talk.peer.tls.read(1) == b"", "an end, and not nothing yet"
    talk.sock.incoming.append(b"whatever")
    with pytest.raises(BlockingIOError):
        talk.near.recv(100)  # ciphertext, which nobody may take for a reply
    talk.sock.is_ended = True
    assert talk.read() == b""


@pytest.mark.parametrize("said", [bytes(40), b"IHAVEOPT" * 8])
def test_bytes_that_are_no_tls_fail_the_handshake(pki, said):
    talk = Talk(pki)
    talk.sock.incoming.append(said)
    talk.turn()
    assert "wrong version" in talk.outcome
    assert talk.loop.masks == {}


def test_without_a_certificate_the_handshake_fails_with_the_reason_and_the_peer_is_told(pki):
    talk = Talk(pki, client_context(pki[2])).shake()
    assert "peer did not return a certificate" in talk.outcome
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
        talk.peer.heard()


def test_a_certificate_of_another_authority_fails_the_handshake(pki, tmp_path):
    other = NbdAuthority(tmp_path / "other")
    talk = Talk(pki, client_context(pki[2], other.issue("client", "host-x"))).shake()
    assert "certificate verify failed" in talk.outcome


def test_a_peer_that_leaves_or_is_silent_or_does_not_read_is_given_up(pki):
    gone, silent, deaf = Talk(pki), Talk(pki), Talk(pki)
    gone.sock.is_ended = True
    gone.loop.handlers[gone.fd](IN)
    assert "left during" in gone.outcome
    silent.loop.fire(OPENING_LIMIT_NS / 1e9)
    assert "within 10 s" in silent.outcome
    deaf.sock.window = 10
    deaf.peer.shake()
    deaf.turn()
    assert "does not take" in deaf.outcome
    for each in (gone, silent, deaf):
        assert (each.loop.masks, each.loop.timers, each.engine._openings) == ({}, {}, {})


def test_what_goes_wrong_behind_a_handshake_ends_that_connection_and_not_the_turn(pki):
    def broken():
        raise ValueError("a name in its certificate is none")

    talk = Talk(pki, on_ready=broken).shake()
    assert talk.outcome == "a name in its certificate is none"
    assert (talk.loop.masks, talk.loop.timers) == ({}, {})


def test_one_that_is_cancelled_while_it_is_computed_calls_nothing(pki):
    talk = Talk(pki)
    talk.peer.shake()
    talk.loop.handlers[talk.fd](IN)
    talk.opening.cancel()
    talk.loop.turn()
    assert talk.outcome is None
    assert talk.loop.masks == {}


def test_beyond_the_limit_the_oldest_that_waits_for_its_peer_is_given_up(pki):
    loop = FakeLoop(FakeClock())
    engine = InlineEngine(loop, most=2)
    busy = Talk(pki, engine=engine)
    busy.peer.shake()
    loop.handlers[busy.fd](IN)  # being computed
    idle, fresh = Talk(pki, engine=engine), Talk(pki, engine=engine)
    more = Talk(pki, engine=engine)
    loop.turn()
    assert (busy.outcome, more.outcome) == (None, None)
    assert idle.outcome == fresh.outcome == "too many TLS handshakes at a time"
    assert busy.shake().outcome == more.shake().outcome == "ready"


def test_a_client_of_tls_1_2_is_served_and_an_older_one_is_not(pki):
    older = client_context(pki[2], pki[2].folder / "host-a")
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    talk = Talk(pki, older).shake()
    assert talk.near.version() == "TLSv1.2"
    talk.near.send(b"hello")
    assert talk.peer.heard() == b"hello"
    assert pki[0].minimum_version is ssl.TLSVersion.TLSv1_2


def test_a_client_on_the_revocation_list_is_not_let_in_also_when_the_list_is_replaced(pki, tmp_path):
    authority = NbdAuthority(tmp_path / "pki")
    server = authority.issue("server", "gw")
    good, gone = authority.issue("client", "host-a"), authority.issue("client", "host-b")
    crl = tmp_path / "crl.pem"
    crl.write_bytes(authority.revocation_list(gone))
    guard = guard_of(security(authority, server, client_crl=str(crl)), FakeLoop(FakeClock()))

    def outcome(client):
        return Talk((guard.context(),), client_context(authority, client)).shake().outcome

    assert outcome(good) == "ready"
    assert "revoked" in outcome(gone)
    crl.write_bytes(authority.revocation_list(good, gone) + b"\n")
    assert "revoked" in outcome(good)
    crl.write_bytes(authority.revocation_list())
    assert outcome(gone) == "ready"
    crl.write_bytes(authority.revocation_list(age_days=2) + b"\n\n")
    assert "expired" in outcome(good), "what nobody has renewed says nothing of today"
    crl.write_bytes(NbdAuthority(tmp_path / "other").revocation_list())
    assert "crl" in outcome(good).lower(), "nor does a list of another authority"

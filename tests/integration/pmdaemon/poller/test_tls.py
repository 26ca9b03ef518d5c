"""The real daemon with TLS on loopback: enrolment, sessions, revocation, and peers that must be refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway_agent import enrol as enrolment
from gateway_agent.errors import EnrolmentFailed
from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.clock import Deadline, FakeClock
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.daemon import Server
from tests.support.gateways import DEADLINE_S, Agent, hello
from tests.support.ports import free_port

DAY_S = 86_400.0


class Keys(NamedTuple):
    """What an agent holds after its enrolment."""

    gateway_id: str
    name: str
    directory: Path


class TlsServer(Server):
    """The daemon with TLS and the authority beside it."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.authority = Authority(directory / "ca")
        self.fingerprint = self.authority.init()
        self.log_from = 0
        self.port = self.start(**{"tls.enabled": True, "tls.state_dir": str(directory / "ca")})
        self.watermarks()

    def token(self, name: str, lifetime_s: float = 60.0) -> str:
        return self.authority.token(name, lifetime_s)[0]

    def enrol(self, token: str, gateway_id: str, **over: str) -> Keys:
        directory = self.directory / f"agent-{gateway_id}"
        pin = over.get("fingerprint", self.fingerprint)
        held = enrolment.enrol(directory, gateway_id, ("127.0.0.1", self.port), token, pin)
        return Keys(gateway_id, held.name, directory / "tls")

    def new_gateway(self, name: str) -> Keys:
        return self.enrol(self.token(name), str(uuid.uuid4()))

    def forged(self, authority: Authority, name: str, gateway_id: str) -> Keys:
        """A certificate that never went through our enrolment."""
        directory = self.directory / f"forged-{uuid.uuid4()}"
        directory.mkdir(mode=0o700)
        key = certificates.make_key()
        made = authority.issue(certificates.make_request(key, name), gateway_id, name)
        (directory / "gateway.pem").write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))
        (directory / "ca.crt").write_bytes((self.directory / "ca" / "ca.crt").read_bytes())
        return Keys(gateway_id, name, directory)

    def dial(self, keys: Keys) -> Agent:
        context = contexts.agent(keys.directory / "ca.crt", keys.directory / "gateway.pem")
        return Agent(self.wrap(context), keys.gateway_id)

    def dial_without_certificate(self) -> Agent:
        return Agent(self.wrap(contexts.agent(self.directory / "ca" / "ca.crt", None)), str(uuid.uuid4()))

    def wrap(self, context: ssl.SSLContext) -> ssl.SSLSocket:
        return context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), DEADLINE_S))

    def event(self, kind: str) -> dict[str, Any]:
        """The first event of this kind that was given to dbmanager."""
        record = self.until("dbmanager", lambda item: item.kind == Kind.RECORD and kind in str(item.header))
        [[_table, row]] = [row for row in record.header["rows"] if row[0] == "events"]
        assert row["kind"] == kind
        return dict(row)

    def new_log(self) -> str:
        return self.log.read_bytes()[self.log_from :].decode()

    def until_logged(self, *texts: str, agent: Agent | None = None) -> None:
        """Until one of the texts is logged; meanwhile ``agent`` answers: a silent one is lost after 10 s."""
        deadline = Deadline(DEADLINE_S)
        while not any(text in (logged := self.new_log()) for text in texts):
            assert not deadline.passed, f"none of {texts} is in:\n{logged}"
            if agent is None:
                threading.Event().wait(0.02)
            else:
                agent.answer(agent.expect(Kind.POLL))

    def greet(self, keys: Keys, **over: Any) -> Agent:
        """A whole registration; HELLO with the certificate's own name unless told otherwise."""
        agent = self.dial(keys)
        agent.send(hello(agent.gateway_id, agent.epoch, **({"name": keys.name} | over)))
        return agent

    def up(self, keys: Keys) -> Agent:
        agent = self.dial(keys)
        agent.register(name=keys.name)
        return agent


@contextlib.contextmanager
def answering(agent: Agent) -> Iterator[None]:
    """The agent answers each poll meanwhile, in a thread: one that is silent for 10 s is lost."""
    ending = threading.Event()

    def answer() -> None:
        with contextlib.suppress(EOFError, OSError):  # what its session should be is asserted afterwards
            while not ending.is_set():
                agent.answer(agent.expect(Kind.POLL))

    thread = threading.Thread(target=answer, name="answering")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsServer]:
    directory = tmp_path_factory.mktemp("tls")
    directory.chmod(0o700)
    made = TlsServer(directory)
    yield made
    made.close()


@pytest.fixture
def server(shared: TlsServer) -> TlsServer:
    """One daemon for all tests here; each uses gateways of its own and reads the log from its own start."""
    shared.log_from = shared.log.stat().st_size
    return shared


@pytest.fixture
def name() -> str:
    return f"gw-{uuid.uuid4().hex[:8]}"


def refusal(agent: Agent) -> dict[str, Any]:
    """The ERROR that ends a session."""
    while (received := agent.read()).kind != Kind.ERROR:
        pass
    with pytest.raises(EOFError):
        agent.read()
    agent.close()
    return received.header


def test_enrol_and_be_polled(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    assert keys.name == name
    assert (keys.directory / "gateway.pem").stat().st_mode & 0o777 == 0o600
    assert keys.directory.stat().st_mode & 0o777 == 0o700
    agent = server.up(keys)
    assert agent.sock.version() == "TLSv1.3"
    assert server.state(keys.gateway_id, "up").header["name"] == name
    for _ in range(3):
        agent.answer(agent.expect(Kind.POLL))
    server.until_seq(keys.gateway_id, 3)
    agent.close()
    server.state(keys.gateway_id, "lost")


def test_a_large_backlog_passes_through_tls(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    agent = server.up(keys)
    for _ in range(600):  # 200 KB: many TLS records in one write
        agent.make()
    agent.answer(agent.expect(Kind.POLL))
    server.until_seq(keys.gateway_id, 601)
    assert server.seqs(keys.gateway_id) == list(range(1, 602))
    agent.close()


def test_tokens_are_good_once(server: TlsServer, name: str) -> None:
    token = server.token(name)
    server.enrol(token, str(uuid.uuid4()))
    with pytest.raises(EnrolmentFailed, match=r"used already.*token-used"):
        server.enrol(token, str(uuid.uuid4()))
    server.until_logged("token-used")
    assert server.event("gateway-enrolled")["severity"] == "info"
    assert server.event("enrolment-refused")["details"]["code"].startswith("token-")
    with pytest.raises(EnrolmentFailed, match="token-unknown"):
        server.enrol("x" * 43, str(uuid.uuid4()))
    late = Authority(server.directory / "ca", clock=FakeClock(time.time_ns() // 1000 - 10**9))
    expired = late.token("gw-late", 60.0)[0]
    with pytest.raises(EnrolmentFailed, match=r"sla ca token gw-late.*token-expired"):
        server.enrol(expired, str(uuid.uuid4()))
    assert token not in server.log.read_text()
    assert [entry.name for entry in server.authority.entries()].count(name) == 1


def test_a_wrong_fingerprint_keeps_the_token_back(server: TlsServer, name: str) -> None:
    token = server.token(name)
    gateway_id = str(uuid.uuid4())
    with pytest.raises(EnrolmentFailed, match="the token was not sent"):
        server.enrol(token, gateway_id, fingerprint="0" * 64)
    server.enrol(token, gateway_id)  # it is still good


def test_a_failed_enrolment_leaves_the_former_identity(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    pinned = keys.directory / "ca.crt"
    pinned.write_text(pinned.read_text() + "# of another server\n")
    before = {path: path.read_bytes() for path in (pinned, pinned.with_name("gateway.pem"))}
    with pytest.raises(EnrolmentFailed, match="token-unknown"):
        server.enrol("x" * 43, keys.gateway_id)
    assert {path: path.read_bytes() for path in before} == before


def test_an_identity_is_not_taken_over_with_another_token(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    with pytest.raises(EnrolmentFailed, match="identity-taken"):
        server.enrol(server.token(f"{name}-2"), keys.gateway_id)
    assert server.enrol(server.token(name), keys.gateway_id).name == name


def test_who_may_not_speak_is_told_why_and_others_go_on(server: TlsServer, name: str) -> None:
    keys, other = server.new_gateway(name), server.new_gateway(f"{name}-2")
    good = server.up(keys)
    with answering(good):
        stranger = server.dial_without_certificate()
        stranger.send(hello(stranger.gateway_id))
        assert refusal(stranger)["code"] == "not-enrolled"
        assert refusal(server.greet(other, gw=keys.gateway_id))["code"] == "wrong-identity"
        told = refusal(server.greet(other, name=name))
        assert told["code"] == "wrong-name"
        assert "127.0.0.1:" in told["text"]
        server.authority.revoke(f"{name}-2", "test")
        server.until_logged("revocations")
        assert refusal(server.greet(other))["code"] == "revoked"
    server.until(
        "dbmanager",
        lambda item: (
            item.kind == Kind.GATEWAY
            and item.header["gw"] == other.gateway_id
            and item.header["state"] == "refused"
            and "revoked" in item.header["reason"]
        ),
    )
    good.answer(good.expect(Kind.POLL))
    good.answer(good.expect(Kind.POLL))
    server.until_seq(keys.gateway_id, good.next_seq - 1)
    good.close()


@pytest.mark.parametrize(
    ("which", "code", "seen"),
    [
        ("expired", "certificate-expired", "expired"),
        ("other-authority", "unknown-authority", "unknown ca"),
    ],
)
def test_certificates_that_fail_the_handshake(server: TlsServer, which: str, code: str, seen: str) -> None:
    good = server.up(server.new_gateway("gw-good"))
    gateway_id = str(uuid.uuid4())
    if which == "expired":
        before = FakeClock(time.time_ns() // 1000 - round(2 * DAY_S * 1e6))
        issuer = Authority(server.directory / "ca", DAY_S, before)
    else:
        issuer = Authority(server.directory / "other")
        issuer.init()
    with answering(good):
        agent = server.dial(server.forged(issuer, "gw-x", gateway_id))
        with pytest.raises(OSError, match=f"(?i){seen}"):
            agent.read()  # TLS 1.3: the client hears of it when it reads
        agent.close()
        server.until_logged(code)
    good.answer(good.expect(Kind.POLL))
    server.until_seq(good.gateway_id, good.next_seq - 1)
    good.close()


def test_a_servers_certificate_is_no_gateways(server: TlsServer) -> None:
    ca = server.directory / "ca"
    agent = Agent(server.wrap(contexts.agent(ca / "ca.crt", ca / "server.pem")))
    with pytest.raises(OSError, match=r"(?i)certificate"):
        agent.read()
    agent.close()
    server.until_logged("wrong-certificate")


def test_revocation_ends_a_live_session(server: TlsServer, name: str) -> None:
    keys, other = server.new_gateway(name), server.new_gateway(f"{name}-2")
    agent, bystander = server.up(keys), server.up(other)
    agent.answer(agent.expect(Kind.POLL))
    server.authority.revoke(name, "stolen")
    with answering(bystander):
        assert refusal(agent)["code"] == "revoked"
        assert "revoked" in server.state(keys.gateway_id, "lost").header["reason"]
    bystander.answer(bystander.expect(Kind.POLL))
    server.until_seq(other.gateway_id, bystander.next_seq - 1)
    bystander.close()


def test_renewal_within_the_session(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    agent = server.up(keys)
    key = certificates.make_key()
    agent.send(frame.encode(Kind.RENEW, {"csr": certificates.make_request(key, "x")}))
    made = agent.expect(Kind.CERTIFICATE).header
    ca_pem = (keys.directory / "ca.crt").read_bytes()
    certificates.issued(made["cert"], key, ca_pem)
    agent.send(frame.encode(Kind.RENEW, {"csr": b"junk"}))
    told = refusal(agent)
    assert told["code"] == "bad-request"
    assert [entry.how for entry in server.authority.entries(keys.gateway_id)] == ["token", "renewal"]


def test_newer_session_wins_and_is_an_event(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    first = server.up(keys)
    second = server.up(keys)
    assert refusal(first)["code"] == "superseded"
    second.answer(second.expect(Kind.POLL))
    assert server.event("gateway-superseded")["subject"] == name
    second.close()


def test_what_is_not_tls_is_refused(server: TlsServer, name: str) -> None:
    good = server.up(server.new_gateway(name))
    for said in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", hello(), os.urandom(300)):
        with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as plain:
            plain.sendall(said)
            received = b""
            try:
                while data := plain.recv(4096):
                    received += data
            except ConnectionResetError:
                pass
            assert len(received) < 100  # at most a TLS alert, never a frame
    server.until_logged("not-tls", agent=good)
    good.answer(good.expect(Kind.POLL))
    good.close()


def test_old_tls_is_refused(server: TlsServer) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        server.wrap(context)
    server.until_logged("tls-version")


def test_tls_without_an_authority_says_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        f'runtime_dir = "{tmp_path}"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n'
        f'tls = {{enabled = true, state_dir = "{tmp_path}/none"}}\n'
    )
    command = [sys.executable, "-m", "pmdaemon", "run", "--config", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 78
    assert "sla ca init" in done.stderr


def resident_mb(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1024


def test_a_flood_of_half_open_handshakes_costs_bounded_memory_and_delays_nobody(
    server: TlsServer, name: str
) -> None:
    good = server.up(server.new_gateway(name))
    good.answer(good.expect(Kind.POLL))
    pair = server.pair_pid()
    before_mb = resident_mb(pair)
    half = b"\x16\x03\x01\x01\x00\x01\x00\x00\xfc\x03\x03"  # the beginning of a ClientHello
    flood: list[socket.socket] = []
    deadline = Deadline(2 * DEADLINE_S)
    figures = server.directory / "metrics" / "pmdaemon.prom"

    def beyond() -> float:
        """How many were turned away or evicted; of so many lines of the log some are left out."""
        names = ("sla_pmdaemon_strangers_turned_away_total", "sla_pmdaemon_strangers_evicted_total")
        found = text_string_to_metric_families(figures.read_text() if figures.exists() else "")
        return sum(sample.value for family in found for sample in family.samples if sample.name in names)

    before = beyond()
    try:
        # Beyond 1,024: turned away, or the oldest is evicted, if it has had its 2 s already. All come again
        # where the first have had their 5 s before the last come, as on a machine that stands still.
        while beyond() == before:
            assert not deadline.passed, server.new_log()
            while flood:
                flood.pop().close()
            for number in range(1500):
                sock = socket.create_connection(("127.0.0.1", server.port), DEADLINE_S)
                sock.sendall(half)
                flood.append(sock)
                if number % 100 == 0:
                    good.answer(good.expect(Kind.POLL))
            server.until_logged("turned-away", "evicted", "no TLS handshake within 5 s", agent=good)
            for _ in range(20):  # two seconds: the figures are written once a second
                good.answer(good.expect(Kind.POLL))
        grown_mb = resident_mb(pair) - before_mb
        assert grown_mb < 200, f"{grown_mb:.0f} MB for 1,024 handshakes under way"
        server.until_logged("no TLS handshake within 5 s", agent=good)
        late = server.up(server.new_gateway(f"{name}-2"))
        for agent in (good, late):
            agent.answer(agent.expect(Kind.POLL))
            agent.close()
    finally:
        for sock in flood:
            sock.close()


def until_told(server: TlsServer, port: int, reason: str) -> dict[str, str]:
    """What the daemon tells about its dialling of this port, once that names the reason."""
    path, deadline = server.directory / "metrics" / "dialled.json", Deadline(DEADLINE_S)
    while True:
        rows = [row for row in json.loads(path.read_text()) if row["address"].endswith(f":{port}")]
        if rows and reason in rows[0]["reason"]:
            return dict(rows[0])
        assert not deadline.passed, f"{reason!r} is not told: {rows}\n{server.new_log()}"
        threading.Event().wait(0.02)


def test_a_listed_gateway_that_is_wrong_is_told_with_its_reason(server: TlsServer, name: str) -> None:
    keys = server.new_gateway(name)
    other = Authority(server.directory / f"other-{name}")
    other.init()
    forged = server.forged(other, name, str(uuid.uuid4()))
    with socket.create_server(("127.0.0.1", 0)) as door:
        door.settimeout(DEADLINE_S)
        port = door.getsockname()[1]

        def answer(held: Keys) -> Agent:
            context = contexts.agent(held.directory / "ca.crt", held.directory / "gateway.pem")
            accepted, _ = door.accept()
            accepted.settimeout(DEADLINE_S)
            return Agent(context.wrap_socket(accepted), held.gateway_id)

        (server.directory / "gateways.json").write_text(
            f'[{{"name": "{name}", "address": "127.0.0.1:{port}"}}]'
        )
        try:
            with answer(forged).sock as sock, pytest.raises(OSError, match=r"(?i)unknown ca"):
                sock.recv(1)
            row = until_told(server, port, "unknown-authority")
            assert row["name"] == name
            agent = answer(keys)
            agent.send(hello(keys.gateway_id, name="another"))
            assert refusal(agent)["code"] == "wrong-name"
            assert until_told(server, port, "wrong-name")["state"] in ("waiting", "dialling")
            plain, _ = door.accept()
            plain.sendall(b"SSH-2.0-x\r\n")
            until_told(server, port, "not-tls")
            plain.close()
            agent = answer(keys)
            agent.register(name=name)
            agent.answer(agent.expect(Kind.POLL))
        finally:
            (server.directory / "gateways.json").unlink()
    agent.close()


def test_a_listed_gateway_is_dialled_and_again_after_the_link_or_the_pair_died(
    server: TlsServer, name: str
) -> None:
    keys = server.new_gateway(name)
    port = free_port()
    directory = keys.directory.parent
    (directory / "gateway_id").write_text(keys.gateway_id)
    path = directory / "agent.toml"
    path.write_text(
        f'name = "{name}"\nstate_dir = "{directory}"\nruntime_dir = "{directory}"\ntls = true\n'
        f'listen = "127.0.0.1:{port}"\n[host]\nenabled = true\ndevices = []\n'
    )
    command = [sys.executable, "-m", "gateway_agent.link.main", "--config", str(path)]

    def changes(state: str) -> int:
        return sum(
            item.kind == Kind.GATEWAY
            and (item.header["gw"], item.header["state"]) == (keys.gateway_id, state)
            for item in server.taken["services"]
        )

    def until(state: str, times: int) -> None:
        server.until("services", lambda _item: changes(state) >= times)

    log = (server.directory / "link.log").open("ab")
    links = [subprocess.Popen(command, stderr=log)]
    try:
        # As dbmanager does it for the table gateway_list.
        (server.directory / "gateways.json").write_text(
            f'[{{"name": "{name}", "address": "127.0.0.1:{port}"}}]'
        )
        until("up", 1)
        # A stranger at the agent's door neither speaks nor ends the session.
        with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as stranger:
            stranger.sendall(os.urandom(200))
            with contextlib.suppress(ConnectionResetError):
                while stranger.recv(4096):
                    pass
        assert changes("lost") == 0
        links[0].kill()
        links[0].wait()
        until("lost", 1)
        links.append(subprocess.Popen(command, stderr=log))
        until("up", 2)
        os.kill(server.pair_pid(), signal.SIGKILL)
        until("up", 3)
    finally:
        (server.directory / "gateways.json").unlink(missing_ok=True)
        for link in links:
            link.kill()
            link.wait()
        log.close()

"""Clients on other hosts: TLS with other people's programs, on loopback and between two network namespaces.

Every wait is for an event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.tls import MOST_OPENINGS
from tests.fuzz.nbd_clients import exactly, negotiate
from tests.support.nbd_certificates import NbdAuthority, ProductAuthority
from tests.support.nbd_tls import TlsTunnel, client_context, start_tls, tls_settings
from tests.support.planes import DEADLINE_S, SIZE, Processes, upstream, wait_for
from tests.support.ports import free_port

pytestmark = pytest.mark.e2e


class Setup:
    """A folder of certificates and a plane that needs them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = Processes(folder)
        self.authority = ProductAuthority(folder / "pki")
        self.server = self.authority.issue("server", "gw", "127.0.0.1")
        self.client = self.authority.issue("client", "host-a.example")
        self.settings: dict[str, object] = dict(tls_settings(self.authority, self.server))
        self.port = 0
        with open(folder / "disk.img", "wb") as file:
            file.write(os.urandom(3 << 20))
            file.truncate(SIZE)

    def file(self, volume: str = "vol-1", **more: object) -> dict[str, object]:
        return {"volume": volume, "backend": "disk", "file": f"{self.folder}/disk.img"} | more

    def plane(self, *exports: dict[str, object], rule: str = "tls-name", **more: object) -> None:
        listen = ["tcp:127.0.0.1:0", f"unix:{self.folder}/gw.sock"]
        self.run.plane(list(exports), listen, rule, **self.settings | more)
        self.find_port()

    def find_port(self) -> None:
        self.link = self.run.link()
        self.port = int(str(self.link.hello.header["listening"][0]).rpartition(":")[2])

    def uri(self, volume: str = "vol-1", client: Path | None = None, host: str = "127.0.0.1") -> str:
        return f"nbds://{host}:{self.port}/{volume}?tls-certificates={client or self.client}"

    def qemu(self, volume: str = "vol-1") -> list[str]:
        """Options that make an image of QEMU."""
        where = f"driver=nbd,host=127.0.0.1,port={self.port},export={volume},tls-creds=tls"
        return ["--object", f"tls-creds-x509,id=tls,dir={self.client},endpoint=client", "--image-opts", where]

    def connect(self) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", self.port), DEADLINE_S)
        self.run._sockets.append(sock)
        return sock


def call(*command: str, status: int = 0, cwd: Path | None = None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=cwd)
    assert (done.returncode == 0) == (status == 0), f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def is_open(port: int) -> bool:
    with socket.socket() as sock:
        return not sock.connect_ex(("127.0.0.1", port))


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    made = Setup(tmp_path)
    with made.run:
        yield made


def test_other_peoples_clients_speak_tls_with_files_and_with_upstreams(setup: Setup) -> None:
    setup.run.nbdkit(setup.folder / "up.sock", "memory", str(SIZE))
    setup.plane(setup.file(), upstream(setup.folder, "vol-2"))
    image, out = setup.folder / "in.img", setup.folder / "out.img"
    image.write_bytes(os.urandom(5 << 20) + bytes(2 << 20) + os.urandom(SIZE - (7 << 20)))
    assert "with TLS" in call("nbdinfo", setup.uri())
    listed = call("nbdinfo", "--list", "--json", setup.uri())
    assert [each["export-name"] for each in json.loads(listed)["exports"]] == ["vol-1", "vol-2"]
    for volume in ("vol-1", "vol-2"):
        call("nbdcopy", "--flush", "--connections=4", "--requests=32", str(image), setup.uri(volume))
        call("nbdcopy", "--connections=4", setup.uri(volume), str(out))
        assert out.read_bytes() == image.read_bytes()
        call("qemu-img", "compare", *setup.qemu(volume), f"driver=raw,file.filename={image}")
    written = call(
        "qemu-io", *setup.qemu(), "-c", "write -P 7 512 1M", "-c", "read -P 7 512 1M", "-c", "flush"
    )
    assert "Pattern verification failed" not in written
    names = {client for _, client in setup.link.totals()}
    assert names == {"host-a.example"}, "they are counted by the name in their certificate"


def test_fio_verifies_by_tls_and_its_counts_are_ours_exactly(setup: Setup) -> None:
    # fio gives libnbd no certificates: the gateway's is not looked at, and there is none of the client.
    setup.plane(setup.file(), rule="address", client_certificates="none")
    uri = f"nbds://127.0.0.1:{setup.port}/vol-1?tls-verify-peer=false"
    shown = call(
        "fio", "--name=job", "--ioengine=nbd", f"--uri={uri}", "--rw=randrw", "--iodepth=32", "--size=6m",
        "--bsrange=4k-64k", "--bs_unaligned=1", "--verify=crc32c", "--verify_fatal=1", "--thread",
        "--output-format=json", cwd=setup.folder,
    )  # fmt: skip
    job = json.loads(shown[shown.index("{") :])["jobs"][0]
    ours = setup.link.totals()["vol-1", "127.0.0.1"]
    assert (ours["reads"], ours["writes"]) == (job["read"]["total_ios"], job["write"]["total_ios"])
    assert (ours["read_bytes"], ours["write_bytes"]) == (job["read"]["io_bytes"], job["write"]["io_bytes"])


def test_clients_without_tls_or_a_certificate_of_ours_are_refused_and_counted(setup: Setup) -> None:
    setup.plane(setup.file(), setup.file("vol-2", allow_names=["host-b"]))
    other = NbdAuthority(setup.folder / "other")
    stranger = other.issue("client", "host-x")
    (stranger / "ca-cert.pem").write_bytes(setup.authority.file.read_bytes())
    call("nbdinfo", f"nbd://127.0.0.1:{setup.port}/vol-1", status=1)
    call("nbdinfo", setup.uri(client=stranger), status=1)
    call("nbdinfo", setup.uri("vol-2"), status=1)
    assert "vol-2" not in call("nbdinfo", "--list", setup.uri())
    assert "certificate" in call("nbdinfo", setup.uri(host="localhost"), status=1), "it is for 127.0.0.1"
    assert "with TLS" in call("nbdinfo", setup.uri()), "the plane serves on"
    logs = setup.run.logs()
    for reason in ("requires TLS", "certificate verify failed", "allow_names has no name"):
        assert reason in logs


def test_a_connected_client_that_is_revoked_is_ended_and_the_others_go_on(setup: Setup) -> None:
    authority, crl = NbdAuthority(setup.folder / "private"), setup.folder / "crl.pem"
    server = authority.issue("server", "gw-1", "127.0.0.1")
    good, gone = authority.issue("client", "host-a"), authority.issue("client", "host-b")
    crl.write_bytes(authority.revocation_list())
    setup.settings = dict(tls_settings(authority, server))
    setup.plane(setup.file(), client_crl=str(crl))
    near = {}
    for folder in (good, gone):
        near[folder] = TlsTunnel(setup.connect(), client_context(authority, folder)).near
        near[folder].settimeout(DEADLINE_S)
        negotiate(near[folder], "vol-1")

    def reads(folder: Path, cookie: int) -> bool:
        near[folder].sendall(p.request(p.Cmd.READ, cookie, 0, 512))
        head = near[folder].recv(16 + 512, socket.MSG_WAITALL)
        return head[:16] == p.simple_reply(cookie)

    assert reads(good, 1)
    assert reads(gone, 1)
    crl.write_bytes(authority.revocation_list(gone))
    assert near[gone].recv(1) == b"", "without a new handshake, and without a command"
    assert reads(good, 2)
    assert "revoked" in call("nbdinfo", setup.uri(client=gone), status=1).lower() + setup.run.logs()
    assert "with TLS" in call("nbdinfo", setup.uri(client=good))
    assert "revoked-clients-ended" in setup.run.logs()
    for sock in near.values():
        sock.close()


def test_handshakes_that_hang_hold_up_no_client_and_are_bounded(setup: Setup) -> None:
    setup.plane(setup.file())
    context = client_context(setup.authority, setup.client)
    near = TlsTunnel(setup.connect(), context).near
    near.settimeout(DEADLINE_S)
    negotiate(near, "vol-1")
    silent = [setup.connect() for _ in range(MOST_OPENINGS + 20)]
    for number, sock in enumerate(silent):
        exactly(sock, p.GREETING.size)
        sock.sendall(p.CLIENT_FLAGS.pack(3) + p.option(p.Opt.STARTTLS))
        assert exactly(sock, p.OPTION_REPLY.size) == p.option_reply(p.Opt.STARTTLS, p.Rep.ACK)
        if number % 50 == 0:
            near.sendall(p.request(p.Cmd.READ, number, 0, 512))
            assert exactly(near, 16)[:8] == p.simple_reply(number)[:8]
            exactly(near, 512)
    for sock in silent[:20]:
        assert sock.recv(1) == b"", "the oldest were given up for the newest"
    assert "with TLS" in call("nbdinfo", setup.uri())
    near.close()


def test_a_client_may_send_its_first_words_with_the_end_of_its_handshake(setup: Setup) -> None:
    """One segment holds the client's Finished and its option, so epoll reports it once."""
    setup.plane(setup.file())
    sock = setup.connect()
    exactly(sock, p.GREETING.size)
    sock.sendall(p.CLIENT_FLAGS.pack(3) + p.option(p.Opt.STARTTLS))
    exactly(sock, p.OPTION_REPLY.size)
    received, sealed = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_context(setup.authority, setup.client).wrap_bio(received, sealed)
    while True:
        try:
            tls.do_handshake()
            break
        except ssl.SSLWantReadError:
            sock.sendall(sealed.read())
            received.write(sock.recv(65_536))
    tls.write(p.option(p.Opt.LIST))
    sock.sendall(sealed.read())
    received.write(sock.recv(65_536))
    assert tls.read(20)[8:16] == (3).to_bytes(4, "big") + (2).to_bytes(4, "big")


def test_plain_words_behind_starttls_are_not_answered_by_a_plane(setup: Setup) -> None:
    setup.plane(setup.file(), tls="offer")
    sock = setup.connect()
    exactly(sock, p.GREETING.size)
    sock.sendall(p.CLIENT_FLAGS.pack(3) + p.option(p.Opt.STARTTLS) + p.option(p.Opt.LIST))
    assert sock.recv(1) == b"", "not even an acknowledgement"
    sock = setup.connect()
    exactly(sock, p.GREETING.size)
    sock.sendall(p.CLIENT_FLAGS.pack(3) + p.option(p.Opt.STARTTLS))
    exactly(sock, p.OPTION_REPLY.size)
    sock.sendall(p.option(p.Opt.LIST))
    assert sock.recv(1 << 16)[:1] in (b"", b"\x15"), "an alert of TLS at most"
    _, tls = start_tls(setup.connect(), client_context(setup.authority, setup.client))
    tls.sendall(p.option(p.Opt.ABORT))
    assert tls.recv(20) == p.option_reply(p.Opt.ABORT, p.Rep.ACK)
    assert tls.recv(1) == b""
    tls.close()


def test_an_upstream_by_tls_serves_and_one_that_is_not_who_it_should_be_is_refused(setup: Setup) -> None:
    port, shared = free_port(), ["-i", "127.0.0.1", "--tls=require", "--tls-verify-peer"]
    setup.run.start(
        "nbdkit", "-f", *shared, "-p", str(port), f"--tls-certificates={setup.server}", "memory", str(SIZE)
    )  # fmt: skip
    wait_for("nbdkit listens", lambda: is_open(port))
    common = {
        "upstream": f"nbds://127.0.0.1:{port}/",
        "upstream_ca": str(setup.authority.file),
        "upstream_certificate": f"{setup.client}/client-cert.pem",
        "upstream_key": f"{setup.client}/client-key.pem",
        "backend": "b",
    }
    setup.plane(
        {"volume": "good"} | common,
        {"volume": "misnamed", "upstream_name": "array-2"} | common,
        {"volume": "misissued"} | common | {"upstream_ca": str(NbdAuthority(setup.folder / "other").file)},
    )
    image, out = setup.folder / "in.img", setup.folder / "out.img"
    image.write_bytes(os.urandom(SIZE))
    for uri in (setup.uri("good"), f"nbd+unix:///good?socket={setup.folder}/gw.sock"):
        call("nbdcopy", "--flush", "--connections=3", str(image), uri)
        call("nbdcopy", "--connections=3", "--requests=64", uri, str(out))
        assert out.read_bytes() == image.read_bytes()
    for volume, reason in (("misnamed", "Hostname mismatch"), ("misissued", "certificate verify failed")):
        call("nbdinfo", setup.uri(volume), status=1)
        assert reason in setup.run.logs()


class Namespaces:
    """A gateway's host (10.211.7.1) and a client's (10.211.7.2), with a cable between them."""

    def __init__(self) -> None:
        self.gateway, self.client = (f"sla-{os.getpid()}-{which}" for which in "ab")
        self._made: list[str] = []

    def make(self) -> None:
        for name in (self.gateway, self.client):
            call("ip", "netns", "add", name)
            self._made.append(name)
        ends = (f"v{os.getpid()}a", f"v{os.getpid()}b")
        call("ip", "link", "add", ends[0], "netns", self.gateway, "type", "veth", "peer", "name", ends[1],
             "netns", self.client)  # fmt: skip
        for name, end, host in ((self.gateway, ends[0], 1), (self.client, ends[1], 2)):
            call("ip", "-n", name, "addr", "add", f"10.211.7.{host}/24", "dev", end)
            call("ip", "-n", name, "link", "set", end, "up")
            call("ip", "-n", name, "link", "set", "lo", "up")

    def within(self, name: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", name)

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def namespaces() -> Iterator[Namespaces]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2: it makes network namespaces")
    made = Namespaces()
    try:
        try:
            made.make()
        except AssertionError as exc:
            pytest.skip(f"this machine lets root make no network namespaces: {exc}")
        yield made
    finally:
        made.remove()


def test_clients_of_another_host_by_tls_and_plain_where_its_network_is_named(
    setup: Setup, namespaces: Namespaces
) -> None:
    far, here = namespaces.within(namespaces.client), namespaces.within(namespaces.gateway)
    server = setup.authority.issue("server", "gw-2", "10.211.7.1")
    setup.run.start(*far, "nbdkit", "-f", "-i", "10.211.7.2", "-p", "10810", "memory", str(SIZE))
    probe = [*far, "nbdinfo", "nbd://10.211.7.2:10810"]
    wait_for("nbdkit listens", lambda: not subprocess.run(probe, capture_output=True, check=False).returncode)
    upstream_there = {"upstream": "nbd://10.211.7.2:10810/", "plain_networks": ["10.211.7.2"]}
    setup.run.plane(
        [
            setup.file("by-name", allow_names=["*.example"]),
            setup.file("by-address", allow_networks=["10.211.7.2"]),
            setup.file("elsewhere", allow_networks=["10.99.0.0/16", "unix"]),
            {"volume": "far", "backend": "b"} | upstream_there,
        ],
        ["tcp:10.211.7.1:0", f"unix:{setup.folder}/gw.sock"],
        "tls-name",
        prefix=here,
        **tls_settings(setup.authority, server) | {"tls": "offer", "plain_networks": ["10.211.7.2"]},
    )
    setup.find_port()
    plain, secure = f"nbd://10.211.7.1:{setup.port}/", setup.uri("", host="10.211.7.1")

    def names(where: tuple[str, ...], uri: str) -> list[str]:
        listed = json.loads(call(*where, "nbdinfo", "--list", "--json", uri))
        return [each["export-name"] for each in listed["exports"]]

    assert names(far, plain) == ["by-address", "far"]
    assert names(far, secure) == ["by-name", "by-address", "far"]
    assert names(here, secure) == ["by-name", "far"]
    call(*here, "nbdinfo", plain + "far", status=1)  # its address is not in plain_networks
    image, out = setup.folder / "in.img", setup.folder / "out.img"
    image.write_bytes(os.urandom(SIZE))
    for uri in (secure.replace("/?", "/far?"), plain + "far"):
        call(*far, "nbdcopy", "--connections=2", str(image), uri)
        call(*far, "nbdcopy", "--connections=2", uri, str(out))
        assert out.read_bytes() == image.read_bytes()
    system = (*far, "env", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")  # nbdsh is of the system's own Python
    files = [f"-cacertfile={setup.client}/ca-cert.pem", f"-certfile={setup.client}/client-cert.pem"]
    files += [f"-keyfile={setup.client}/client-key.pem", "-tlshostname=10.211.7.1", "-enable-tls"]
    for options, expected in (([], ["by-address", "far"]), (files, ["by-name", "by-address", "far"])):
        said = call(*system, "nbd-client", "-l", "10.211.7.1", str(setup.port), *options)
        assert [line for line in said.splitlines() if line in (*expected, "elsewhere", "by-name")] == expected
    tls = f"tls-creds-x509,id=tls,dir={setup.client},endpoint=client"
    disk = f"driver=nbd,host=10.211.7.1,port={setup.port},export=by-name,tls-creds=tls"
    image_of_qemu = ["--object", tls, "--image-opts", disk]
    call(*far, "qemu-io", *image_of_qemu, "-c", "write -P 7 1M 64k", "-c", "flush", "-c", "read -P 7 1M 64k")
    connect = f"h.set_uri_allow_local_file(True); h.connect_uri({setup.uri('by-name', host='10.211.7.1')!r})"
    script = "assert h.pread(65536, 1 << 20) == b'\\7' * 65536; h.pwrite(b's' * 512, 0); h.flush()"
    call(*system, "nbdsh", "-c", connect, "-c", script)
    script = "assert h.pread(512, 0) == b's' * 512"
    call(*system, "nbdsh", "-u", f"nbd://10.211.7.1:{setup.port}/by-address", "-c", script)
    assert {client for _, client in setup.link.totals()} == {"host-a.example", "10.211.7.2"}

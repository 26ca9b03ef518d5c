"""What one agent can hold: exports, names, and clients in negotiation."""

import errno
import socket

import pytest

from gateway_agent.config import (
    EXPORT_OVERHEAD_BYTES,
    MAX_EXPORT_BYTES,
    AgentConfig,
    ExportConfig,
    PlaneConfig,
)
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.plane import Plane
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.config import load
from tests.support.planes import Processes


@pytest.fixture
def agent(tmp_path):
    def made(name="gw-a", exports=1, volume="v", host="false"):
        path = tmp_path / "agent.toml"
        path.write_text(
            f'name = "{name}"\nstate_dir = "{tmp_path}/s"\nruntime_dir = "{tmp_path}/r"\n'
            f'[host]\nenabled = {host}\n[[plane]]\nname = "nbd-0"\nlisten = "unix:{tmp_path}/nbd.sock"\n'
            + "".join(
                f'[[export]]\nvolume = "{volume}{number}"\nbackend = "{volume}"\nfile = "/dev/zero"\n'
                for number in range(exports)
            )
        )
        return load(AgentConfig, path)

    return made


def test_exports_that_no_message_can_name_are_refused_at_the_start(agent):
    assert len(agent(exports=512).export) == 512
    with pytest.raises(ConfigError, match=r"513 .* 512 at most"):
        agent(exports=513)
    with pytest.raises(ConfigError, match="60000 that one message"):
        agent(exports=300, volume="n" * 100)


def test_a_name_too_long_for_volumes_of_the_host_is_refused(agent):
    assert agent(name="n" * 91).name
    assert agent(name="n" * 90, host="true").host.enabled
    with pytest.raises(ConfigError, match=r"91 characters; .* 90 at most"):
        agent(name="n" * 91, host="true")


def test_a_plane_with_all_its_exports_and_streams_can_say_hello(tmp_path):
    exports = [
        ExportConfig(volume=f"{number:022}", backend="b" * 25, file=str(tmp_path / "no"))
        for number in range(512)
    ]
    listen, control = f"unix:{tmp_path}/nbd.sock", f"{tmp_path}/control.sock"
    plane = Plane(PlaneConfig("nbd-0", [listen], control, exports))
    for export in exports[:320]:
        plane._cuts.table.get(export, "host-a", plane._cuts.thresholds)
    assert 512 * (EXPORT_OVERHEAD_BYTES + 47) <= MAX_EXPORT_BYTES, "the configuration allows this"
    assert plane.hello().encode()
    plane.close()


def test_strangers_that_say_nothing_are_few_and_the_plane_serves_the_next(tmp_path):
    export = ExportConfig(volume="v", backend="b", file=str(tmp_path / "disk.img"))
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    plane = Plane(PlaneConfig("nbd-0", [f"unix:{tmp_path}/nbd.sock"], f"{tmp_path}/control.sock", [export]))
    plane._negotiations._most = 4
    clients = []
    for _ in range(12):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(f"{tmp_path}/nbd.sock")
        sock.settimeout(60)
        clients.append(sock)
        plane.step()
    assert len(plane._negotiations) == 4
    assert [bool(sock.recv(18)) and not sock.recv(1) for sock in clients[:8]] == [True] * 8, "greeted, let go"
    clients[-1].sendall(p.CLIENT_FLAGS.pack(p.FLAG_FIXED_NEWSTYLE) + p.option(p.Opt.GO, p.go_data("v", ())))
    plane.step()
    assert len(clients[-1].recv(18)) == 18
    assert p.OPTION_REPLY.unpack(clients[-1].recv(20))[2] == p.Rep.INFO
    assert len(plane._negotiations) == 3
    for sock in clients:
        sock.close()
    plane.close()


def test_without_descriptors_a_plane_accepts_no_client_for_a_second(tmp_path):
    export, clock, tries = (
        ExportConfig(volume="v", backend="b", file=str(tmp_path / "disk.img")),
        FakeClock(),
        [],
    )
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    text = f"unix:{tmp_path}/nbd.sock"
    plane = Plane(PlaneConfig("nbd-0", [text], f"{tmp_path}/control.sock", [export]), clock)
    listener = plane._listeners[text]

    class Exhausted:
        """As the listener, in a process without descriptors."""

        def accept(self):
            tries.append(clock.monotonic_ns())
            raise OSError(errno.EMFILE, "Too many open files")

        def __getattr__(self, name):
            return getattr(listener, name)

    plane._loop.forget(listener.fileno())
    plane._watch(text, Exhausted())
    first_ns = clock.monotonic_ns()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{tmp_path}/nbd.sock")
        for second in range(2):
            for _ in range(20):
                plane._loop.at("turn", clock.monotonic_ns(), lambda _now: None)  # the step does not wait
                plane.step()
            assert tries == [first_ns + number * 10**9 for number in range(second + 1)]
            clock.advance(1.0)
    plane.close()


def test_a_plane_serves_more_clients_than_the_limit_of_descriptors_that_it_was_started_with(tmp_path):
    (tmp_path / "disk.img").write_bytes(bytes(4096))
    export = {"volume": "v", "backend": "b", "file": str(tmp_path / "disk.img")}
    with Processes(tmp_path) as run:
        run.plane([export], prefix=("prlimit", "--nofile=256:1024"))
        clients = [run.client("v") for _ in range(300)]
        for cookie, client in enumerate(clients):
            client.sock.sendall(p.request(p.Cmd.READ, cookie, 0, 512))
        for cookie, client in enumerate(clients):
            assert client.exactly(16 + 512) == p.simple_reply(cookie) + bytes(512)

"""Debian's qemu-storage-daemon, asked and limited by QMP while clients do I/O through its NBD export.

A virtual machine's drives, which no storage daemon has, are tried against the scripted QEMU of
``tests.support.qemu`` behind a real socket.
"""

from __future__ import annotations

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from gateway_agent import qmp
from gateway_agent.cli import cli
from gateway_agent.enforcers.qemu import LimitedPlace
from gateway_agent.errors import QemuUnusable
from gateway_agent.link.caps import LeasedCaps
from gateway_agent.link.qemu_client import QemuClient
from gateway_agent.qemu import Command, Limits, QmpAnswer, QmpConnected, QmpEvent, QmpLost, ThrottleGroup
from gateway_agent.qmp import QmpThread
from pmdaemon.runtime.clock import SystemClock
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.rates import NO_CAPS
from tests.support.qemu import Disk, FakeQemu
from tests.support.storage_daemon import StorageDaemon

GROUP, DRIVE = "throttle-group:gw:vol0", "qemu:gw:root"
NONE = {"ops_per_s": None, "bytes_per_s": None, "cost_per_s": None}
WAIT_S = 180.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StorageDaemon]:
    with StorageDaemon(tmp_path) as running:
        yield running


def test_without_descriptors_a_monitor_is_one_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread, and with it the link, would end of it, and all other monitors with them."""

    def exhausted(*_args: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    async def ask() -> None:
        with monkeypatch.context() as patch:  # the loop has its own sockets by now
            patch.setattr(socket, "socket", exhausted)
            await qmp.connect("/nowhere/qmp.sock")

    with pytest.raises(QemuUnusable, match="Too many open files"):
        asyncio.run(ask())


class Monitor:
    """A client on a real thread; ``turn`` is what the link's loop does."""

    def __init__(self, path: Path, place: LimitedPlace) -> None:
        self.clock = SystemClock()
        self.thread = QmpThread({"qemu:x": str(path)}, self.clock)
        send = lambda request: self.thread.post("qemu:x", request)  # noqa: E731
        self.client = QemuClient("qemu:x", str(path), [place], {place.volume: "pool"}, send, self.clock)
        self.place = place
        self.caps = LeasedCaps([self.client.enforcer])
        self.events: list[QmpEvent] = []
        self.thread.start()

    def turn(self) -> None:
        for event in self.thread.inbox.drain():
            self.events.append(event)
            match event:
                case QmpConnected():
                    self.client.connected(event.daemon)
                case QmpAnswer():
                    now_ns = self.clock.monotonic_ns()
                    if self.client.answered(event) and not self.caps.enforcer_connected(
                        self.client.enforcer, now_ns
                    ):
                        self.client.enforcer.lapsed()
                case QmpLost():
                    self.client.lost(event.reason, is_off=event.is_off)

    def until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < end_s, (self.events[-5:], self.client.record())
            self.turn()
            time.sleep(0.01)

    def set(self, gen: int, **rates: float) -> None:
        entries = ({"volume": self.place.volume, **NONE, **rates},) if rates else ()
        self.caps.replace(CapSet(gen, 600_000_000, entries), self.clock.monotonic_ns())
        self.until(lambda: self.client.enforcer.took == gen)

    def collect(self) -> dict[str, int]:
        """One row of the next sample, by volume and name."""
        self.client.source.ask()
        self.until(lambda: self.client.source.sample is not None)
        sample = self.client.source.sample
        assert sample is not None
        self.client.source.spooled()
        return {key.volume: int(sample.counters[2, row]) for row, key in enumerate(sample.streams)}


@pytest.fixture
def monitors() -> Iterator[Callable[[Path, LimitedPlace], Monitor]]:
    made: list[Monitor] = []

    def make(path: Path, place: LimitedPlace) -> Monitor:
        made.append(Monitor(path, place))
        return made[-1]

    yield make
    for each in made:
        each.thread.stop()


def group_of_daemon() -> LimitedPlace:
    return LimitedPlace(GROUP, "", "tg0", NO_CAPS)


def test_limits_of_a_storage_daemon_are_set_live_and_read_back(daemon: StorageDaemon, monitors) -> None:
    monitor = monitors(daemon.monitor, group_of_daemon())
    monitor.until(lambda: monitor.client.enforcer.reachable)
    reader = daemon.read(depth=16)
    try:
        monitor.set(5, ops_per_s=500.0, bytes_per_s=2e6)
        assert monitor.place.found == Limits(500, 2_000_000)
        assert monitor.collect() == {}, "of an export nothing is counted"
        monitor.set(6, ops_per_s=700.0)
        assert monitor.place.found == Limits(700, None)
        monitor.set(7)
        assert monitor.place.found == Limits()
        assert reader.poll() is None, "its client has noticed nothing"
    finally:
        reader.kill()
        reader.wait()


def test_io_beyond_the_limit_waits(daemon: StorageDaemon, monitors) -> None:
    monitor = monitors(daemon.monitor, group_of_daemon())
    monitor.until(lambda: monitor.client.enforcer.reachable)
    monitor.set(5, ops_per_s=100.0)
    began_s = time.monotonic()
    assert daemon.read(depth=8, times=300).wait(120) == 0
    assert time.monotonic() - began_s > 1.0  # 3 s less what is let through at first; a busy host takes longer


def test_of_a_cap_with_a_burst_the_rate_holds_alone_and_is_confirmed(daemon: StorageDaemon, monitors) -> None:
    monitor = monitors(daemon.monitor, group_of_daemon())
    monitor.until(lambda: monitor.client.enforcer.reachable)
    monitor.set(5, cost_per_s=200.0, burst_s=4.0)  # a burst would let all of the reads below pass at once
    assert monitor.place.found == Limits(100, 6_553_600)
    began_s = time.monotonic()
    assert daemon.read(depth=8, times=300).wait(120) == 0
    assert time.monotonic() - began_s > 1.0


def test_a_daemon_that_was_started_again_gets_its_limits_again(daemon: StorageDaemon, monitors) -> None:
    monitor = monitors(daemon.monitor, group_of_daemon())
    monitor.until(lambda: monitor.client.enforcer.reachable)
    monitor.set(5, ops_per_s=500.0)
    former = [event.daemon for event in monitor.events if isinstance(event, QmpConnected)]
    daemon.stop()
    monitor.until(lambda: not monitor.client.enforcer.reachable)
    monitor.until(lambda: monitor.client.problem == "no QEMU process listens there")
    assert monitor.client.enforcer.volumes == {GROUP}
    daemon.start()
    monitor.until(lambda: monitor.client.enforcer.took == 5)
    assert monitor.place.found == Limits(500, None)
    again = [event.daemon for event in monitor.events if isinstance(event, QmpConnected)]
    assert len(set(again)) == len(set(former)) + 1


def test_a_group_that_the_daemon_does_not_have(daemon: StorageDaemon, monitors) -> None:
    monitor = monitors(daemon.monitor, LimitedPlace(GROUP, "", "tg9", NO_CAPS))
    monitor.until(lambda: monitor.client.enforcer.reachable)
    monitor.set(5, ops_per_s=500.0)
    assert monitor.client.record()["volumes"][0]["problem"].startswith("throttle group tg9: it is not there")


def test_a_monitor_that_another_program_uses_is_not_waited_for(
    daemon: StorageDaemon, monitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(qmp, "CONNECT_S", 0.3)  # 5 s are not waited for here
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(daemon.monitor))
        assert b"QMP" in other.recv(1000)
        monitor = monitors(daemon.monitor, group_of_daemon())
        monitor.until(lambda: "another program may use this monitor" in monitor.client.problem)
        assert monitor.client.enforcer.volumes == frozenset(), "it may serve: no cap of it is confirmed"
    monitor.until(lambda: monitor.client.enforcer.reachable)


def test_a_daemon_that_hangs_is_let_go_of_and_found_again(
    daemon: StorageDaemon, monitors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = monitors(daemon.monitor, group_of_daemon())
    monitor.until(lambda: monitor.client.enforcer.reachable)
    monitor.set(5, ops_per_s=500.0)
    monkeypatch.setattr(qmp, "ANSWER_S", 0.5)  # 5 s are not waited for here
    monkeypatch.setattr(qmp, "CONNECT_S", 0.5)
    daemon.signal(signal.SIGSTOP)
    monitor.client.source.ask()
    monitor.until(lambda: not monitor.client.enforcer.reachable)
    assert not monitor.client.source.awaits_answer, "a collection waits for it no more"
    assert monitor.client.enforcer.volumes == frozenset(), "it may serve: no cap of it is confirmed"
    daemon.signal(signal.SIGCONT)
    monitor.until(lambda: monitor.client.enforcer.took == 5)
    assert len({each.daemon for each in monitor.events if isinstance(each, QmpConnected)}) == 1


def test_release_takes_the_limits_away(daemon: StorageDaemon, tmp_path: Path) -> None:
    limits = Limits(500, None)

    async def carry_out(command: Command) -> Limits:
        client, _ = await qmp.connect(str(daemon.monitor))
        await qmp.execute(client, command)
        found = await qmp.execute(client, ThrottleGroup("tg0").read_command())
        await qmp.close(client)
        return ThrottleGroup("tg0").limits_in(found)

    assert asyncio.run(carry_out(ThrottleGroup("tg0").set_command(limits))) == limits
    path = tmp_path / "agent.toml"
    path.write_text(
        'name = "gw"\n[[qemu]]\nname = "x"\n'
        f'socket = "{daemon.monitor}"\nvolume = [{{name = "v", group = "tg0", backend = "b"}}]\n'
    )
    result = CliRunner().invoke(cli, ["release", "--config", str(path)])
    assert (result.exit_code, result.output) == (0, "no limits are left on 1 QEMU volume\n")
    assert asyncio.run(carry_out(ThrottleGroup("tg0").read_command())) == Limits()
    daemon.stop()
    assert CliRunner().invoke(cli, ["release", "--config", str(path)]).exit_code == 0, "none is no problem"


# -- drives, of a scripted QEMU


def test_a_drive_is_counted_and_limited_over_a_real_socket(tmp_path: Path, monitors) -> None:
    disk = Disk(qdev="/machine/peripheral/disk0/virtio-backend", node="node-1")
    qemu, path = FakeQemu(disk), tmp_path / "vm.qmp"
    monitor = monitors(path, LimitedPlace(DRIVE, "disk0", "", NO_CAPS))
    with qemu.serve(path):
        monitor.until(lambda: monitor.client.enforcer.reachable)
        monitor.set(5, ops_per_s=500.0)
        assert disk.limits["iops"] == 500
        disk.io("rd", 7)
        assert monitor.collect() == {DRIVE: 7}
        assert qmp.release([(str(path), "drive", "disk0")]) == []
        assert disk.limits["iops"] == 0
    monitor.until(lambda: not monitor.client.enforcer.reachable)
    with qemu.serve(path):
        monitor.until(lambda: monitor.client.enforcer.took == 5)
        assert disk.limits["iops"] == 500


def test_what_is_no_qmp_is_said(tmp_path: Path, monitors) -> None:
    path = tmp_path / "other.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        monitor = monitors(path, LimitedPlace(DRIVE, "disk0", "", NO_CAPS))
        sock, _ = listener.accept()
        with sock:
            sock.sendall(b"220 ready\r\n")
            monitor.until(lambda: "does not speak QMP" in monitor.client.problem)
            assert not monitor.client.enforcer.reachable

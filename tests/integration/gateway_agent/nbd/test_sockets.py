"""Listening on a path: what is there already, and how many may wait."""

import contextlib
import grp
import os
import socket
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.nbd import sockets
from gateway_agent.nbd.listeners import ListenerSecurity
from gateway_agent.nbd.plane import Plane
from gateway_agent.nbd.sockets import Address
from pmdaemon.errors import ConfigError


@pytest.fixture
def address(tmp_path):
    return Address(path=str(tmp_path / "gw.sock"))


def test_a_stale_socket_file_is_replaced_and_has_its_mode(address, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.path)
    with sockets.listen_at(address, 0o600) as sock:
        assert sockets.bound_address(sock) == address
        assert stat.S_IMODE((tmp_path / "gw.sock").stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(address.path)
    sockets.unlink_own(address)
    sockets.unlink_own(address)
    assert not (tmp_path / "gw.sock").exists()


def test_a_burst_of_connects_is_queued_and_not_turned_away(address):
    with sockets.listen_at(address, 0o600), contextlib.ExitStack() as clients:
        kernel_limit = int(Path("/proc/sys/net/core/somaxconn").read_text())
        wanted, connected = min(200, kernel_limit), 0
        for _ in range(wanted):
            client = clients.enter_context(socket.socket(socket.AF_UNIX))
            client.setblocking(False)
            client.connect(address.path)  # BlockingIOError when the queue is full
            connected += 1
        assert connected == wanted


def test_a_living_listener_is_left_alone(address):
    with sockets.listen_at(address, 0o600), pytest.raises(ConfigError, match="another process is listening"):
        sockets.listen_at(address, 0o600)


@pytest.fixture
def group():
    """Another group that this process may give its files to."""
    may = [each for each in grp.getgrall() if not os.geteuid() or each.gr_gid in os.getgroups()]
    found = next((each for each in may if each.gr_gid != os.getegid()), None)
    if found is None:
        pytest.skip("needs root, or a user who is in two groups")
    return found


def test_members_of_its_group_may_use_a_unix_socket_also_of_one_that_a_reload_names(tmp_path, group):
    (tmp_path / "disk").write_bytes(bytes(4096))
    export = ExportConfig(volume="v", backend="b", file=str(tmp_path / "disk"))
    first, later = tmp_path / "first", tmp_path / "later"
    config = PlaneConfig("nbd-0", [f"unix:{first}"], f"{tmp_path}/c", [export])
    plane = Plane(config)

    def facts(path):
        return path.stat().st_gid, stat.S_IMODE(path.stat().st_mode)

    assert facts(first) == (os.getegid(), 0o660)
    named = replace(config, security=ListenerSecurity(socket_group=group.gr_name))
    plane.reconfigure(replace(named, listen=[f"unix:{first}", f"unix:{later}"]))
    assert facts(first) == facts(later) == (group.gr_gid, 0o660)
    with pytest.raises(ConfigError, match="no group 'none-such'"):
        plane.reconfigure(replace(config, security=ListenerSecurity(socket_group="none-such")))
    assert facts(first) == (group.gr_gid, 0o660)
    plane.reconfigure(config)
    assert facts(first) == (os.getegid(), 0o660)
    plane.close()
    plane = Plane(named)
    assert facts(first) == (group.gr_gid, 0o660)
    plane.close()

"""An agent whose addresses another program has: it ends at its start and says which, and what has them."""

import os
import socket
import subprocess
import sys
import time

import pytest

from gateway_agent import ports
from gateway_agent.config import load_agent
from gateway_agent.nbd.sockets import parse_listen, taken_by
from gateway_agent.reload import RUNNING
from pmdaemon.errors import ConfigError


def agent_file(folder, listen, top=""):
    image = folder / "a.img"
    image.write_bytes(bytes(4096))
    path = folder / "agent.toml"
    path.write_text(
        f'name = "gw-a"\nstate_dir = "{folder}/s"\nruntime_dir = "{folder}/r"\n{top}'
        f'[[plane]]\nname = "nbd-0"\nlisten = "{listen}"\n'
        f'[[export]]\nvolume = "a"\nbackend = "b"\nfile = "{image}"\n'
    )
    return path


def test_a_taken_port_ends_the_start_with_what_has_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        path = agent_file(tmp_path, f"tcp:127.0.0.1:{port}")
        command = [sys.executable, "-m", "gateway_agent", "run", "--config", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == ConfigError.exit_status
    said = f"[[plane]] nbd-0 listen tcp:127.0.0.1:{port}: cannot listen: the address is in use by process "
    assert f"gateway-agent: {said}{os.getpid()} (" in done.stderr
    assert "Stop that process, or choose another address" in done.stderr
    assert "child-died" not in done.stderr, "no child was started"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_who_has_an_address_is_known(tmp_path, kind):
    text = f"unix:{tmp_path}/x.sock" if kind == "unix" else "tcp:127.0.0.1:0"
    assert taken_by(parse_listen(text)) is None
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family) as other:
        other.bind(f"{tmp_path}/x.sock" if kind == "unix" else ("127.0.0.1", 0))
        other.listen()
        if kind == "tcp":
            text = f"tcp:127.0.0.1:{other.getsockname()[1]}"
        assert taken_by(parse_listen(text)).pid == os.getpid()
        with pytest.raises(ConfigError, match=r"\[\[plane\]\] nbd-0 listen .*in use by process"):
            ports.check_addresses(load_agent(agent_file(tmp_path, text)))
    assert taken_by(parse_listen(text)) is None


def test_the_address_for_the_server_is_looked_at_too(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        top = f'listen = "127.0.0.1:{other.getsockname()[1]}"\n'
        config = load_agent(agent_file(tmp_path, f"unix:{tmp_path}/x.sock", top))
        with pytest.raises(ConfigError, match=r"^listen tcp:127\.0\.0\.1:\d+: cannot listen"):
            ports.check_addresses(config)


def test_planes_of_an_agent_that_was_killed_are_no_other_program(tmp_path):
    path = agent_file(tmp_path, f"unix:{tmp_path}/x.sock")
    config = load_agent(path)
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    script += "sys.stdin.read()"
    words = [sys.executable, "-c", script, f"{tmp_path}/x.sock", str(config.runtime_dir / RUNNING)]
    former = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        end_s = time.monotonic() + 60
        while taken_by(parse_listen(f"unix:{tmp_path}/x.sock")) is None:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        ports.check_addresses(config)
    finally:
        former.communicate(timeout=60)

"""The real daemon and pair as processes on loopback, the real mailbox, and agents that speak the protocol.

The one test file of the daemon with network and processes. Waiting is done on sockets and doorbells with
deadlines, never by sleeping.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.failures import failures
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support import other_user
from tests.support.daemon import Server, redial
from tests.support.gateways import DEADLINE_S, Agent, hello


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o700)
    made = Server(tmp_path)
    yield made
    made.close()


STRANGER = """
import encodings.idna, os, pwd, socket, sys
os.setuid(pwd.getpwnam(sys.argv[2]).pw_uid)
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60) as connection:
    try:
        connection.sendall(sys.stdin.buffer.read())
        print(len(connection.recv(64)))
    except ConnectionError:
        print(0)
"""


def answered_to(port: int, user: str) -> int:
    """How many bytes the daemon answers to the HELLO of a process of this user."""
    command = [sys.executable, "-I", "-S", "-c", STRANGER, str(port), user]
    done = subprocess.run(command, input=hello(), capture_output=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_without_tls_other_users_of_the_machine_are_no_gateways(server: Server) -> None:
    """Review, finding 5: each of them could register, and take another's session."""
    port = server.start()
    assert answered_to(port, "nobody") == 0
    server.until_logged("agent-of-another-user")
    agent = Agent.dial(port)
    agent.register()
    server.state(agent.gateway_id, "up")
    agent.close()
    server.stop()
    for allowed in ("nobody", "*"):
        assert answered_to(server.start(agent_users=[allowed]), "nobody") > 0
        server.stop()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts processes of other users")
def test_without_tls_a_listed_gateway_is_no_process_of_another_user(server: Server) -> None:
    with other_user.listening(accepts=True) as (port, _process):
        listed = [{"name": "host-1", "address": f"127.0.0.1:{port}"}]
        (server.directory / "gateways.json").write_text(json.dumps(listed))
        server.start()
        server.until_logged("who listens there is nobody")
        server.stop()


@pytest.mark.parametrize("settings", [{}, {"pairs": "unified"}], ids=["pair", "unified"])
def test_whole_session(server: Server, settings: dict[str, Any]) -> None:
    port = server.start(**settings)
    agent = Agent.dial(port)
    agent.register()
    up = server.state(agent.gateway_id, "up")
    assert up.header["exports"][0]["volume"] == "vol-0"
    server.state(agent.gateway_id, "up", "dbmanager")
    server.watermarks()
    server.services.post("pair-0", frame.encode(Kind.LEASE, {}))
    first = agent.answer(agent.expect(Kind.POLL))
    assert first["from"] == [7, 1]
    assert first["ack"] == []
    server.until_seq(agent.gateway_id, 1)
    server.until_seq(agent.gateway_id, 1, "services")
    server.durable(agent.gateway_id, 7, 1)
    polls = [agent.answer(agent.expect(Kind.POLL)) for _ in range(3)]
    assert polls[-1]["ack"] == [[7, 1]]
    assert polls[-1]["from"] == [7, 4]
    assert any(poll["lease"] for poll in [first, *polls])
    # another dbmanager, which holds up to 2 only: everything behind it is asked for again
    server.watermarks(incarnation=2, rows=[(agent.gateway_id, 7, 2)])
    while agent.answer(agent.expect(Kind.POLL))["from"] != [7, 3]:
        pass
    server.until_seq(agent.gateway_id, 5)
    kept = server.seqs(agent.gateway_id)
    again = kept.index(3, kept.index(3) + 1)
    assert kept[again:] == list(range(3, 3 + len(kept) - again))
    agent.close()
    server.state(agent.gateway_id, "lost")
    assert server.stop() == 0
    assert not (server.directory / "pmdaemon.port").exists()


def test_caps_and_thresholds_reach_the_gateway_and_caps_again_after_reconnect(server: Server) -> None:
    port = server.start()
    server.watermarks()
    agent = Agent.dial(port)
    agent.register()
    caps = {"gw": agent.gateway_id, "gen": 5, "lease_us": 30_000_000, "caps": []}
    order = {"gw": agent.gateway_id, "version": 3, "entries": []}
    server.services.post("pair-0", frame.encode(Kind.SET_THRESHOLDS, order))
    server.services.post("pair-0", frame.encode(Kind.SET_CAPS, caps))
    assert agent.expect(Kind.THRESHOLDS).header["version"] == 3
    assert agent.expect(Kind.CAPS).header == {"gen": 5, "lease_us": 30_000_000, "caps": []}
    agent.send(frame.encode(Kind.CAPS_ACK, {"gen": 5, "ok": True, "reason": ""}))
    confirmed = server.until(
        "services", lambda item: item.kind == Kind.CAPS_STATE and item.header["state"] == "confirmed"
    )
    assert confirmed.header["gen"] == 5
    agent.close()
    again = Agent.dial(port, agent.gateway_id, epoch=8)
    again.register()
    assert again.expect(Kind.CAPS).header["gen"] == 5
    again.close()


def test_malformed_peer_is_told_why_and_others_go_on(server: Server) -> None:
    port = server.start()
    server.watermarks()
    good = Agent.dial(port)
    good.register()
    for bad_bytes, code in (
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "too-large"),
        (frame.encode(Kind.REPLY, {"poll": 1}), "violation"),
        (hello(gateway_id="not-a-uuid"), "malformed"),
        (hello(proto_min=9, proto_max=9), "violation"),
    ):
        bad = Agent.dial(port)
        bad.send(bad_bytes)
        told = bad.read()
        assert told.kind == Kind.ERROR
        assert told.header["code"] == code
        assert "127.0.0.1:" in told.header["text"]
        with pytest.raises(EOFError):
            bad.read()
        bad.close()
        good.answer(good.expect(Kind.POLL))
    server.until_seq(good.gateway_id, 4)
    good.close()


def test_stalled_peer_is_noticed_and_delays_no_other(server: Server) -> None:
    port = server.start()
    server.watermarks()
    stalled, good = Agent.dial(port), Agent.dial(port)
    stalled.register()
    good.register()
    stalled.expect(Kind.POLL)  # and never answers
    stopping = threading.Event()

    def keep_answering() -> None:
        while not stopping.is_set():
            good.answer(good.expect(Kind.POLL))

    worker = threading.Thread(target=keep_answering)
    worker.start()
    try:
        server.state(stalled.gateway_id, "stalled")
        # The stalled state took 2 s; in it the other was polled every 100 ms. Half of that is asked for.
        server.until_seq(good.gateway_id, 10)
    finally:
        stopping.set()
        worker.join()
    # The first poll was never answered; being stalled it was polled again, and answering recovers it.
    stalled.answer(stalled.expect(Kind.POLL))
    server.state(stalled.gateway_id, "recovered")
    told = [item.header for item in server.taken["services"] if item.kind == Kind.GATEWAY]
    announced = [header["state"] for header in told if header["gw"] == stalled.gateway_id]
    states = [state for state, _ in groupby(announced)]  # WATERMARKS after the registration: "up" again
    assert states[:3] == ["up", "stalled", "recovered"]  # it answers no further poll, and may stall again
    good.close()
    stalled.close()


def test_pair_killed_agents_reconnect(server: Server) -> None:
    port = server.start()
    server.watermarks()
    agent = Agent.dial(port)
    agent.register()
    agent.answer(agent.expect(Kind.POLL))
    server.until_seq(agent.gateway_id, 1)
    os.kill(server.pair_pid(), signal.SIGKILL)
    with pytest.raises((EOFError, ConnectionResetError)):
        agent.expect(Kind.BYE)  # there is none: it was killed
    agent.close()
    again = redial(port, agent)
    server.state(again.gateway_id, "up")
    server.watermarks(incarnation=1)  # dbmanager answers the new pair's GATEWAY up
    poll = again.answer(again.expect(Kind.POLL))
    assert poll["from"] == [7, 1]  # nothing was durable: the same cut is asked for again
    again.close()
    assert server.stop() == 0


def test_second_daemon_on_the_same_port_says_what_to_do(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (tmp_path / "c.toml").write_text(
            f'runtime_dir = "{tmp_path}"\n[pmdaemon]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        )
        command = [sys.executable, "-m", "pmdaemon", "run", "--config", str(tmp_path / "c.toml")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 78
    assert "choose another port" in done.stderr


def test_why_it_cannot_start_is_noted(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        file = tmp_path / "server.toml"
        file.write_text(f'runtime_dir = "{tmp_path}"\n[pmdaemon]\nlisten = "{address}"\n')
        command = [sys.executable, "-m", "pmdaemon", "run", "--config", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 78, done.stderr
    assert address in failures(tmp_path)["pmdaemon"]

"""The daemon as a process on loopback, with the real mailbox, for tests that are its agents and its server.

Waiting is done on sockets and doorbells with deadlines, never by sleeping.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from pmdaemon.mailbox import Layout, Mailbox, Route, attach, create_segment
from pmdaemon.runtime.clock import Deadline
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.gateways import DEADLINE_S, Agent
from tests.support.pairs import pair_pids

MIB = 1 << 20


class Server:
    """The daemon under test, and the two parts that face it: dbmanager and services."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        names = ("pmdaemon", "services", "dbmanager", "pair-0")
        routes = (
            Route("pair-0", "services", 4 * MIB),
            Route("pair-0", "dbmanager", 4 * MIB),
            Route("services", "pair-0", MIB),
            Route("dbmanager", "pair-0", MIB),
        )
        create_segment(
            directory / "main.mbx", Layout(participants=names, routes=routes, slots_per_sender=512)
        )
        self.services = attach(directory / "main.mbx", "services")
        self.dbmanager = attach(directory / "main.mbx", "dbmanager")
        self.process: subprocess.Popen[bytes] | None = None
        self.taken: dict[str, list[frame.Frame]] = {"services": [], "dbmanager": []}
        self.log = directory / "daemon.log"
        self._log_file = self.log.open("wb")

    def configure(self, **settings: Any) -> Path:
        """Write the configuration; returns its path."""
        table = {"listen": "127.0.0.1:0", "interval_s": 0.1} | settings
        lines = [f"runtime_dir = {json.dumps(str(self.directory))}", "[pmdaemon]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]  # keys may be dotted
        config = self.directory / "server.toml"
        config.write_text("\n".join(lines))
        return config

    def start(self, **settings: Any) -> int:
        """Start the daemon; returns its port."""
        config = self.configure(**settings)
        command = [sys.executable, "-m", "pmdaemon", "run", "--config", str(config)]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("SLA_")}
        self.process = subprocess.Popen(command, stderr=self._log_file, env=environment)
        port_file, deadline = self.directory / "pmdaemon.port", Deadline(DEADLINE_S)
        while not port_file.exists():
            assert not deadline.passed, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            threading.Event().wait(0.01)  # no descriptor tells of a rename
        return int(port_file.read_text())

    def watermarks(self, incarnation: int = 1, rows: Any = ()) -> None:
        header = {"inc": incarnation, "hw": [list(row) for row in rows]}
        self.dbmanager.post("pair-0", frame.encode(Kind.WATERMARKS, header))

    def durable(self, gateway_id: str, epoch: int, seq: int, incarnation: int = 1) -> None:
        header = {"inc": incarnation, "hw": [[gateway_id, epoch, seq]]}
        self.dbmanager.post("pair-0", frame.encode(Kind.DURABLE, header))

    def until(self, who: str, condition: Any) -> frame.Frame:
        """Take mail for ``who`` until a frame meets the condition, in what was or will be taken."""
        mailbox: Mailbox = getattr(self, who)
        deadline = Deadline(DEADLINE_S)
        seen = 0
        while True:
            for item in self.taken[who][seen:]:
                if condition(item):
                    return item
            seen = len(self.taken[who])
            assert not deadline.passed, self.log.read_text()
            mailbox.wait(0.05)
            self.taken[who] += [frame.decode(message.payload) for message in mailbox.take()]

    def state(self, gateway_id: str, state: str, who: str = "services") -> frame.Frame:
        return self.until(
            who,
            lambda item: (
                item.kind == Kind.GATEWAY
                and item.header["gw"] == gateway_id
                and item.header["state"] == state
            ),
        )

    def seqs(self, gateway_id: str, who: str = "dbmanager") -> list[int]:
        """Seqs of one gateway's cuts, in the order taken so far."""
        found = []
        for item in self.taken[who]:
            if item.kind == Kind.CUTS:
                headers = [frame.decode(raw).header for raw in frame.split(item.blob)]
                found += [
                    header["seq"] for header in headers if header["gw"].hex() == gateway_id.replace("-", "")
                ]
        return found

    def until_seq(self, gateway_id: str, seq: int, who: str = "dbmanager") -> None:
        self.until(who, lambda _item: seq in self.seqs(gateway_id, who))

    def until_logged(self, words: str) -> None:
        deadline = Deadline(DEADLINE_S)
        while words not in self.log.read_text():
            assert not deadline.passed, self.log.read_text()
            threading.Event().wait(0.01)

    def pair_pid(self) -> int:
        assert self.process is not None
        [pid] = pair_pids(self.process.pid)
        return pid

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(DEADLINE_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.services.close()
        self.dbmanager.close()
        self._log_file.close()


def redial(port: int, agent: Agent) -> Agent:
    """Dial until a living pair registers us, as an agent's backoff loop does."""
    deadline = Deadline(DEADLINE_S)
    while True:
        fresh = Agent.dial(port, agent.gateway_id, agent.epoch)
        fresh.cuts, fresh.next_seq = agent.cuts, agent.next_seq
        try:
            fresh.register()
        except (EOFError, OSError):
            fresh.close()
            assert not deadline.passed
            continue
        return fresh

"""Nodes as the product runs them: processes ``sla-server node``, and ``sla cluster`` beside them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from pmdaemon.runtime.clock import Deadline
from sla_server.cli.main import cli
from tests.support.cluster import READY_S


def sla(path: Path, *words: str, answer: str = "") -> Result:
    """Run ``sla cluster`` as the node of this file."""
    return CliRunner().invoke(cli, ["--config", str(path), "cluster", *words], input=answer)


def done(path: Path, *words: str) -> str:
    """What it prints, as it succeeds."""
    result = sla(path, *words)
    assert result.exit_code == 0, result.output
    return result.output


def make_members(paths: list[Path]) -> None:
    """Make the first the first member, and let it invite the others."""
    done(paths[0], "init")
    for path in paths[1:]:
        name = path.parent.name
        invitation = path.parent / "invitation"
        done(paths[0], "invite", name, str(invitation))
        assert invitation.stat().st_mode & 0o777 == 0o600
        done(path, "join", str(invitation))


def status(path: Path) -> dict[str, Any]:
    """For programs; empty if no node answers."""
    result = sla(path, "status", "-o", "json")
    return dict(json.loads(result.stdout)) if result.exit_code in (0, 1) else {}


class Nodes:
    """Processes ``sla-server node``, one a file."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        path = next(path for path in self.paths if path.parent.name == name)
        command = [sys.executable, "-m", "sla_server", "node", "--config", str(path)]
        with (path.parent / "log").open("ab") as log:
            self.processes[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def wait_well(self, asked: int = 0) -> dict[str, Any]:
        """What a node says of the cluster once it is well; a single answer may lack one that was slow."""
        deadline = Deadline(READY_S)
        while True:
            state = status(self.paths[asked])
            if state.get("is_well") and len(state["nodes"]) == len(self.processes):
                return state
            assert not deadline.passed, state

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes.pop(name)
        process.send_signal(number)
        return process.wait(READY_S)

    def close(self) -> None:
        for name in list(self.processes):
            self.end(name, signal.SIGKILL)

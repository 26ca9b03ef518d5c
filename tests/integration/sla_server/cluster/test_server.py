"""A server with ``[cluster]`` runs its node as a part: first to start, last to stop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from pmdaemon.runtime.clock import Deadline
from sla_server.cli.main import cli
from tests.support.cluster import READY_S, configurations


def test_a_server_starts_watches_and_stops_its_node(tmp_path: Path) -> None:
    [path] = configurations(tmp_path, 1)
    path.write_text(path.read_text() + '[api]\nlisten = "127.0.0.1:0"\n[pmdaemon]\nlisten = "127.0.0.1:0"\n')

    def sla(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(cli, ["--config", str(path), "cluster", *words])
        return result.exit_code, result.output

    def server(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "sla_server", *words, "--config", str(path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    refused = server("start")
    assert refused.returncode == 78
    assert "has no credentials of a cluster" in refused.stdout + refused.stderr
    assert sla("init")[0] == 0
    started = server("start", "--background")
    try:
        # One that is slow to get ready goes on; what it says then is no matter of this test.
        assert started.returncode in (0, 75), started.stderr
        deadline = Deadline(READY_S)
        while (found := sla("status"))[0] != 0:
            assert not deadline.passed, found
        while True:
            status = server("status", "-o", "json")
            rows = json.loads(status.stdout)["processes"] if status.stdout else []
            if "cluster" in [row["name"] for row in rows if row["state"] == "running"]:
                break
            assert not deadline.passed, status
    finally:
        stopped = server("stop")
    assert stopped.returncode == 0, stopped.stderr
    assert sla("status")[0] == 69

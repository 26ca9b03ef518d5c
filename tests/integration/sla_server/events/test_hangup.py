"""SIGHUP to the process delivery: a file that another program has renamed is let go of at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pmdaemon.reserve.raising import EventRaiser
from pmdaemon.runtime.clock import Deadline
from sla_server.agreements.load import load_documents
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable
from tests.support.deliveries import event

LIMIT_S = 60.0
DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {name: log}
spec: {file: {path: out.jsonl}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {name: all}
spec: {recipients: [log]}
"""


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = Deadline(LIMIT_S)
    while not is_so():
        assert not deadline.passed, what
        time.sleep(0.02)


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def test_a_renamed_file_is_let_go_of_at_the_signal(tmp_path: Path) -> None:
    reserves = tmp_path / "data" / "events" / "reserve"
    for folder in (reserves, tmp_path / "run"):
        folder.mkdir(parents=True, mode=0o700)
    held = [NotificationInForce(each.document, 1, 0) for each in load_documents(DOCUMENTS, 60)]
    assert RoutingFile(tmp_path / "data").publish(RoutingTable.of(held, {}))
    config = tmp_path / "server.toml"
    config.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    command = [sys.executable, "-m", "sla_server.process", "delivery", "--config", str(config)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])})
    raiser = EventRaiser(reserves, "services")
    try:
        raiser.initialized()
        raiser.record(event(1).row())
        until(lambda: bool(list(tmp_path.rglob("out.jsonl"))), "the file is there")
        (path,) = tmp_path.rglob("out.jsonl")
        until(lambda: lines(path) == 1, "the first event is in it")
        moved = path.rename(path.with_name("moved"))
        state = tmp_path / "run" / "metrics" / "delivery.json"
        until(lambda: state.exists() and '"confirmed": 1' in state.read_text(), "it is confirmed")
        process.send_signal(signal.SIGHUP)
        until(lambda: not is_open(process.pid, moved), "the renamed file is let go of")
        raiser.record(event(2).row())
        until(lambda: lines(path) == 1, "the next event is in a new file")
        assert (lines(moved), process.poll()) == (1, None)
    finally:
        raiser.close()
        process.terminate()
        assert process.wait(LIMIT_S) == 0


def is_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(link.readlink())
        except FileNotFoundError:
            continue
    return path in found

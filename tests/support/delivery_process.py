"""The process delivery by itself, with documents in force; and waiting for what it does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pmdaemon.runtime.clock import Deadline
from sla_server.agreements.load import load_documents
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable

LIMIT_S = 120.0
ALL_TO_A_WEBHOOK = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: outside}}
spec: {{webhook: {{url: "{url}"}}, timeout: 50s}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [outside]}}
"""


def put_in_force(folder: Path, documents: str) -> None:
    """These documents from now on, as ``sla apply`` does."""
    held = [NotificationInForce(each.document, 1, 0) for each in load_documents(documents, 60)]
    assert RoutingFile(folder / "data").publish(RoutingTable.of(held, {}))


@contextmanager
def delivering(folder: Path, documents: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run it until the end of the block; its data are in ``folder/data``, its state in ``folder/run``."""
    for part in (folder / "data" / "events" / "reserve", folder / "run"):
        part.mkdir(parents=True, mode=0o700, exist_ok=True)
    put_in_force(folder, documents)
    config = folder / "server.toml"
    config.write_text(f'data_dir = "{folder}/data"\nruntime_dir = "{folder}/run"\n')
    command = [sys.executable, "-m", "sla_server.process", "delivery", "--config", str(config)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    try:
        yield process
    finally:
        process.terminate()
        status = process.wait(LIMIT_S)
    assert status == 0


def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    deadline = Deadline(LIMIT_S)
    while not is_so():
        assert not deadline.passed, what
        time.sleep(0.02)

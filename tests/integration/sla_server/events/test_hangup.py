"""SIGHUP to the process delivery: a file that another program has renamed is let go of at once."""

from __future__ import annotations

import signal
from pathlib import Path

from pmdaemon.reserve.raising import EventRaiser
from tests.support.deliveries import event
from tests.support.delivery_process import delivering, until

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


def lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def is_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found.append(link.readlink())
        except FileNotFoundError:
            continue
    return path in found


def test_a_renamed_file_is_let_go_of_at_the_signal(tmp_path: Path) -> None:
    with delivering(tmp_path, DOCUMENTS) as process:
        raiser = EventRaiser(tmp_path / "data" / "events" / "reserve", "services")
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
        raiser.close()

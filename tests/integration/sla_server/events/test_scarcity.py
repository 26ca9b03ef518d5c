"""Events while the machine has no room, no memory or no descriptors left: still recorded, still delivered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pmdaemon.reserve.raising import EventRaiser
from pmdaemon.reserve.reader import ReserveReader
from sla_server.agreements.load import load_documents
from sla_server.events.event import parse
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable
from tests.support.deliveries import event
from tests.support.forks import Children
from tests.support.receivers import HttpReceiver
from tests.support.small_disk import SmallDisk

EMFILE = """
import os, resource, sys
from pathlib import Path
from pmdaemon.reserve import attach_reserves, initialized, raise_event
attach_reserves("hurt", Path(sys.argv[1]))
initialized()
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError as exc:
    problem = exc.strerror
ROW = {"at_us": 5, "kind": "process-stalled", "severity": "critical", "element": "server", "subject": "hurt",
       "text": problem, "details": {}}
assert all(raise_event({**ROW, "event_id": f"e{n}", "subject": str(n)}) for n in range(20))
"""
ENOMEM = """
import resource, sys
from pathlib import Path
from pmdaemon.reserve import attach_reserves, initialized, raise_event
attach_reserves("hurt", Path(sys.argv[1]))
initialized()
used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used, used))
held, size, problem = [], 1 << 20, ""
while size >= 512:
    try:
        held.append(bytearray(size))
    except MemoryError:
        size //= 2
ROW = {"at_us": 5, "kind": "process-stalled", "severity": "critical", "element": "server", "subject": "hurt",
       "text": "Cannot allocate memory", "details": {}}
assert all(raise_event({**ROW, "event_id": "e%d" % n, "subject": "%d" % n}) for n in range(20))
"""


@pytest.mark.parametrize(
    ("program", "text"), [(EMFILE, "Too many open files"), (ENOMEM, "Cannot allocate memory")]
)
def test_a_process_without_descriptors_or_memory_records_its_events(
    program: str, text: str, tmp_path: Path
) -> None:
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [parse(each.payload) for each in ReserveReader(tmp_path / "hurt.normal.reserve").take(99)]
    assert [event.event_id for event in found] == [f"e{number}" for number in range(20)]
    assert {event.text for event in found} == {text}


DOCUMENTS = """
apiVersion: storage-sla/v1
kind: Recipient
metadata: {{name: outside}}
spec: {{webhook: {{url: "{url}"}}}}
---
apiVersion: storage-sla/v1
kind: Route
metadata: {{name: all}}
spec: {{recipients: [outside]}}
"""


def fill(path: Path) -> None:
    """Write until nothing fits any more, not even a byte."""
    with path.open("wb", buffering=0) as file:
        size = 1 << 20
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2


def test_on_a_full_disk_events_are_recorded_and_delivered() -> None:
    with (
        SmallDisk(80 << 20) as disk,
        HttpReceiver() as receiver,
        Children("tests.support.event_deaths") as children,
    ):
        data, reserves = disk.path / "data", disk.path / "data" / "events" / "reserve"
        for folder in (reserves, disk.path / "run"):
            folder.mkdir(parents=True, mode=0o700)
        held = [
            NotificationInForce(each.document, 1, 0)
            for each in load_documents(DOCUMENTS.format(url=receiver.url), 60)
        ]
        assert RoutingFile(data).publish(RoutingTable.of(held, {}))
        raiser = EventRaiser(reserves, "services")
        raiser.initialized()
        children.run("deliver", str(disk.path), 4.0)
        fill(disk.path / "filled")
        for number in range(50):
            assert raiser.record(event(number, subject=str(number)).row()) is not None
        children.run("deliver", str(disk.path), 5.0)
        got = [
            alert["delivery"]["event"]
            for _, _, _, body in receiver.requests
            for alert in json.loads(body)["alerts"]
        ]
        own = "event-state-not-written"  # delivery itself is met by the full disk, too
        identities = dict.fromkeys(each["event_id"] for each in got if each["kind"] != own)
        assert list(identities) == [f"e{number}" for number in range(50)]
        raiser.close()

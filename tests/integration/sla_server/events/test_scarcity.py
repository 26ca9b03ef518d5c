"""Events while the machine has no room, no memory or no descriptors left: still recorded, still delivered."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pmdaemon.reserve.raising import EventRaiser
from pmdaemon.runtime.clock import Deadline
from sla_server.agreements.load import load_documents
from sla_server.events.routing import NotificationInForce, RoutingFile, RoutingTable
from tests.support.deliveries import event
from tests.support.delivery_process import ALL_TO_A_WEBHOOK, delivering, until
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
os.write(1, b".")
os.read(0, 1)
"""
ENOMEM = """
import os, resource, sys
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
os.write(1, b".")
os.read(0, 1)
"""


@pytest.mark.parametrize(
    ("program", "text"), [(EMFILE, "Too many open files"), (ENOMEM, "Cannot allocate memory")]
)
def test_events_of_a_process_without_descriptors_or_memory_are_recorded_and_delivered(
    program: str, text: str, tmp_path: Path
) -> None:
    reserves = tmp_path / "data" / "events" / "reserve"
    reserves.mkdir(parents=True, mode=0o700)
    with HttpReceiver() as receiver, delivering(tmp_path, ALL_TO_A_WEBHOOK.format(url=receiver.url)):
        state = tmp_path / "run" / "metrics" / "delivery.json"
        until(lambda: state.exists() and '"outside"' in state.read_text(), "the recipient is known")
        hurt = subprocess.Popen(
            [sys.executable, "-c", program, str(reserves)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])},
        )  # fmt: skip
        with hurt:
            assert hurt.stdout is not None
            assert hurt.stdout.read(1) == b"."  # it has raised them, and is as it was
            wanted = [f"e{number}" for number in range(20)]
            until(lambda: [each["event_id"] for each in receiver.events()] == wanted, "all in their order")
            assert hurt.poll() is None
        assert hurt.returncode == 0
    assert {each["text"] for each in receiver.events()} == {text}


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
            for each in load_documents(ALL_TO_A_WEBHOOK.format(url=receiver.url), 60)
        ]
        assert RoutingFile(data).publish(RoutingTable.of(held, {}))
        raiser = EventRaiser(reserves, "services")
        raiser.initialized()
        state = disk.path / "run" / "metrics" / "delivery.json"
        live(children, disk.path, lambda: state.exists() and '"outside"' in state.read_text())
        fill(disk.path / "filled")
        for number in range(50):
            assert raiser.record(event(number, subject=str(number)).row()) is not None
        own = "event-state-not-written"  # delivery itself is met by the full disk, too

        def identities() -> list[str]:
            return list(dict.fromkeys(each["event_id"] for each in receiver.events() if each["kind"] != own))

        live(children, disk.path, lambda: len(identities()) >= 50)
        assert identities() == [f"e{number}" for number in range(50)]
        raiser.close()


def live(children: Children, folder: Path, until_so: Callable[[], bool]) -> None:
    """Lives of the process delivery, each killed after some seconds, until one has got so far."""
    deadline, seconds = Deadline(300), 4.0
    while True:
        children.run("deliver", str(folder), seconds)
        if until_so():
            return
        assert not deadline.passed
        seconds *= 2

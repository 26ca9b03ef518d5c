"""What tests/crash/test_delivery_kills runs in children that are killed: recording, and the process delivery.

``tests.support.forks`` calls ``main``; nothing is started at import.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pmdaemon.reserve.reader import ReserveReader
from pmdaemon.reserve.writer import ReserveWriter
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.stop import Stop
from sla_server.events import delivery
from sla_server.events.config import EventsConfig
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice
from sla_server.events.recipients.config import NotifyConfig
from sla_server.events.sql_link import RecordRecipient, SqlLink
from tests.support.killing import Deadly, Fate

RESERVES = ("a.normal.reserve", "a.initial.reserve")
SLOTS = 4
EVENTS = 14


@dataclass
class DeliveryFile:
    """The configuration of a delivery process."""

    data_dir: Path
    runtime_dir: Path
    events: EventsConfig = field(
        default_factory=lambda: EventsConfig(
            poll_interval_s=0.005, retry_first_s=0.01, retry_max_s=0.05, queue_bytes=32 << 20
        )
    )
    notify: NotifyConfig = field(default_factory=NotifyConfig)
    runbook_url: str = "https://sla.example/runbook"


def main(mode: str, folder: str, *arguments: float) -> None:
    """One child's life."""
    match mode:
        case "record":
            record(Path(folder), Fate(int(arguments[0])), is_initial=bool(arguments[1]))
        case "deliver":
            deliver(Path(folder), arguments[0])


def record(folder: Path, fate: Fate, *, is_initial: bool) -> None:
    """Record and take in turns; every store into the reserve, one of either period, counts.

    ``noticed`` gets a line before each event is recorded, ``accepted`` after it, ``taken`` what was taken
    before it is released.
    """
    path = folder / RESERVES[is_initial]
    writer, reader = ReserveWriter(path, SLOTS, synced=is_initial), ReserveReader(path)
    for side in (writer._file, reader._file):
        mortal: Any = side
        mortal.words, mortal.bytes = Deadly(fate, side.words), Deadly(fate, side.bytes)
    noticed, accepted, taken = (append_to(folder / name) for name in ("noticed", "accepted", "taken"))
    for number in range(1, EVENTS + 1):
        kind = "b" if number % 5 == 0 else "a"
        payload = json.dumps({"number": number, "kind": kind}).encode()
        noticed(number)
        writer.record(payload, event_id=str(number), subject="x", kind=kind, at_us=number)
        accepted(number)
        if number % 4 == 0:
            take(reader, taken)
    print(fate.stores)


def take(reader: ReserveReader, taken: Callable[[int], None]) -> None:
    """As intake does; ``taken`` gets the number of events, one line each."""
    more, counts, records = reader.take_more(), reader.take_counts(), reader.take(SLOTS - 1)
    events = [record.events for record in (*more, *records)] + [count.events for count in counts]
    for each in events:
        taken(each)
    reader.release_more(more)
    reader.release(records)
    reader.release_counts(counts)


class RecordsAtOnce(SqlLink):
    """SQL that has each event at once."""

    def recipient(self) -> RecordRecipient:
        return ConfirmsAtOnce(self)


class ConfirmsAtOnce(RecordRecipient):
    """See ``RecordsAtOnce``."""

    def deliver(self, _notices: Sequence[Notice], _deadline: Deadline) -> Answer:
        return CONFIRMED


def append_to(path: Path) -> Callable[[int], None]:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    return lambda number: [os.write(fd, b"%d\n" % number), None][1]


def deliver(folder: Path, seconds: float) -> None:
    """The process delivery, killed after so many seconds (0: at its end, with SIGTERM)."""
    if seconds:
        signal.setitimer(signal.ITIMER_REAL, seconds)  # SIGALRM is not handled: it kills as SIGKILL does
    stop = Stop()
    stop.install_signals()
    # Without dbmanager nothing would ever be deleted: no death would meet a deletion, and each life would
    # begin with all events of those before.
    vars(delivery)["SqlLink"] = RecordsAtOnce
    delivery.run(DeliveryFile(folder / "data", folder / "run"), stop)

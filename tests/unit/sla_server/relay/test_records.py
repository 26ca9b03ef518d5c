"""The memory of identities: kept over restarts, bounded, and enough to drop what comes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.runtime.clock import Deadline, FakeClock
from sla_server.events.intake import EventIntake
from sla_server.events.queue import EventQueue, QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Notice, Outcome
from sla_server.relay.records import IdentityMemory, IdentityRecipient, RelayRecords
from tests.support.deliveries import QUEUE_BYTES, event
from tests.support.faulty_disk import FaultDisk


class Remembering:
    """Memory and queue of a relay on one disk."""

    def __init__(self, folder: Path, most: int = 1000) -> None:
        self.folder = folder
        self.most = most
        self.disk = FaultDisk()
        self.failed: list[str] = []
        self.open()

    def open(self) -> None:
        def storage(name: str) -> tuple[object, object]:
            return self.disk.open(name), self.disk.open(f"{name}.index")

        clock = FakeClock()
        self.memory = IdentityMemory(self.folder, self.most, storage("identities"))  # type: ignore[arg-type]
        self.queue = EventQueue(self.folder, "main", QUEUE_BYTES, storage("main"), clock)  # type: ignore[arg-type]
        initial = EventQueue(self.folder, "initial", QUEUE_BYTES, storage("initial"), clock)  # type: ignore[arg-type]
        self.records = RelayRecords(self.memory, QUEUE_BYTES, self.most, self.failed.append, lambda: None)
        known, most_ids = self.records.known, self.records.most_ids
        self.intake = EventIntake(self.folder, initial, self.queue, clock, known=known, most_ids=most_ids)

    def restart(self) -> None:
        self.disk = self.disk.after_kill()
        self.open()

    def post(self, *numbers: int) -> int:
        return self.intake.accept([QueuedEvent(event(number)) for number in numbers])

    def confirm(self, *numbers: int) -> None:
        """As the engine: the lane of records confirms, and the queue forgets."""
        notices = [Notice(event(number), "@sql", number) for number in numbers]
        assert self.records.recipient().deliver(notices, Deadline(1)) == CONFIRMED
        self.queue.delete_through(self.queue.newest_seq)


def test_what_was_delivered_is_dropped_after_a_restart(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    assert rig.post(1, 2) == 2
    rig.confirm(1, 2)
    rig.queue.close()  # else the deletion is not on disk
    rig.restart()
    assert rig.queue.read(0)[0] == []
    assert (rig.post(1, 2, 3), rig.intake.repeated) == (1, 2)


def test_what_waits_in_the_queue_is_known_from_there(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    rig.post(1)
    rig.restart()
    assert (rig.memory.known, rig.post(1)) == ([], 0)


def test_a_reminder_is_another_identity_and_known_too(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    rig.post(1)
    reminder = QueuedEvent(event(1), reminder=1)
    assert (rig.intake.accept([reminder]), rig.intake.accept([reminder])) == (1, 0)
    rig.restart()
    assert (rig.post(1), rig.intake.accept([reminder])) == (0, 0)


def test_an_escalation_is_another_identity_and_known_too(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    rig.post(1)
    escalation = QueuedEvent(event(1), escalated=True)
    assert (rig.intake.accept([escalation]), rig.intake.accept([escalation])) == (1, 0)
    rig.restart()
    assert (rig.post(1), rig.intake.accept([escalation])) == (0, 0)
    notices = [Notice(event(1), "@sql", 1), Notice(event(1), "@sql", 2, escalated=True)]
    assert rig.records.recipient().deliver(notices, Deadline(1)) == CONFIRMED
    rig.queue.delete_through(rig.queue.newest_seq)
    rig.queue.close()  # else the deletion is not on disk
    rig.restart()
    assert rig.queue.read(0)[0] == []
    assert (rig.post(1), rig.intake.accept([escalation])) == (0, 0)


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    rig = Remembering(tmp_path, most=1000)
    for number in range(1200):
        rig.memory.record([f"e{number}"])
    rig.restart()
    assert rig.intake.accept([QueuedEvent(event(1199))]) == 0
    assert rig.intake.accept([QueuedEvent(event(199))]) == 1
    assert rig.intake.accept([QueuedEvent(event(200))]) == 0


def test_long_identities_make_room_for_themselves(tmp_path: Path) -> None:
    rig = Remembering(tmp_path, most=1000)
    for number in range(3000):
        rig.memory.record([f"e{number}" + "x" * 1000])
    rig.restart()
    kept = len(rig.memory._records)
    assert 300 < kept <= 1000
    assert rig.memory._records[-1][1] == 1


def test_a_disk_that_fails_ends_the_process_and_confirms_nothing(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    rig.memory.close()
    recipient = IdentityRecipient(rig.memory, rig.failed.append)
    answer = recipient.deliver([Notice(event(1), "@sql", 1)], Deadline(1))
    assert answer.outcome is Outcome.RETRY
    assert len(rig.failed) == 1


def test_a_batch_that_is_recorded_twice_is_harmless(tmp_path: Path) -> None:
    rig = Remembering(tmp_path)
    rig.post(1)
    rig.confirm(1)
    rig.confirm(1)
    rig.restart()
    assert rig.post(1) == 0


@pytest.mark.parametrize("kept", [1, 3])
def test_a_relay_has_no_inbox(tmp_path: Path, kept: int) -> None:
    assert Remembering(tmp_path).records.store([{}] * kept, Deadline(1)) == "a relay has no inbox"

"""The state file of delivery: what is damaged, of another release or missing loses no event."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.files import write_whole
from sla_server.events.lane import LaneSettings
from sla_server.events.queue import QueuedEvent
from sla_server.events.recipients.base import CONFIRMED, Notice, retry
from tests.support.deliveries import InlineSender, Rig, ToAll, event

DAMAGED = [
    b"",
    b'{"lanes',
    b"\xff",
    b"{}",
    b"7",
    b"[" * 100_000,
    b'{"lanes":[]}',
    b'{"lanes":{}}',
    b'{"queues":{},"lanes":{"r":7}}',
    b'{"queues":{},"lanes":{"r":{"cursors":[],"number":0,"firing":[]}}}',
    b'{"queues":{},"lanes":{"r":{"cursors":{"main":"2"},"number":0,"firing":[]}}}',
    b'{"queues":{},"lanes":{"r":{"cursors":{"main":-2},"number":0,"firing":[]}}}',
    b'{"queues":{},"lanes":{"r":{"cursors":{},"number":0,"firing":[[["a"],"x",1]]}}}',
    b'{"queues":[],"lanes":{}}',
]


@pytest.mark.parametrize("content", [*DAMAGED, None], ids=lambda content: repr(content)[:60])
def test_without_a_state_that_can_be_read_the_backlog_comes_again(
    tmp_path: Path, content: bytes | None
) -> None:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    opened = event(1, "violation-opened", severity="critical")
    rig.add(opened, event(2, "violation-closed"))
    rig.run()
    path = tmp_path / "state.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    sender.batches.clear()
    sender.answer = CONFIRMED
    rig.restart()
    rig.run()
    assert sender.got() == ["e1", "e2"]
    aside = tmp_path / "state.json.unreadable"
    assert (aside.read_bytes() if aside.exists() else None) == content
    sender.batches.clear()
    rig.restart()
    rig.run()
    assert sender.got() == []


def test_the_state_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bool] = []

    def note(_path: Path, _content: str, *, synced: bool = False, found: list[bool] = synced) -> None:
        found.append(synced)

    monkeypatch.setattr("sla_server.events.lane.write_whole", note)
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    rig.add(event(1))
    rig.run()
    assert synced[:2] == [False, True]  # which batch is handed over; what was confirmed, before it is deleted


@pytest.mark.parametrize("left", [b"", b"{", None], ids=["empty", "torn", "missing"])
def test_a_power_cut_that_takes_what_was_not_synced_leaves_the_rest(
    tmp_path: Path, left: bytes | None
) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1), event(2))
    rig.run()
    sender.answer = None  # a batch is under way when the power goes
    rig.add(event(3))
    rig.run()
    rig.main.append([QueuedEvent(event(4))])  # and the queue has not deleted what was confirmed
    sent = tmp_path / "state-sent.json"
    assert json.loads(sent.read_bytes())["lanes"]["r"]["sent"] == ["main", 3]
    sent.unlink()
    if left is not None:
        sent.write_bytes(left)
    rig.restart()
    assert rig.engine.lanes["r"].cursors["main"] == 2
    assert rig.engine.lanes["r"].number == 2
    sender.answer = CONFIRMED
    rig.run()
    assert sender.got() == ["e1", "e2", "e3", "e3", "e4"]


class Broken:
    """``Path.read_bytes``, which no real disk makes fail on demand, for one file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, code: int) -> None:
        read = Path.read_bytes

        def fail(path: Path) -> bytes:
            if path.name == name:
                raise OSError(code, os.strerror(code))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", fail)


@pytest.mark.parametrize("name", ["state.json", "state-sent.json"])
def test_a_state_that_the_disk_does_not_give_back_does_not_keep_delivery_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    sender = InlineSender("r", None)
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1), event(2))
    rig.run()
    sender.answer = CONFIRMED
    sender.batches.clear()
    with monkeypatch.context() as patch:
        Broken(patch, name, errno.EIO)
        rig.restart()
    rig.run()
    assert sender.got() == ["e1", "e2"]
    assert (tmp_path / "state.json.unreadable").exists() == (name == "state.json")


def test_what_could_not_be_read_once_is_never_the_newer_file_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    rig.add(event(1), event(2))
    rig.run()
    content = json.loads((tmp_path / "state.json").read_bytes())
    content["generation"] += 7  # a batch that was handed over again and again
    content["lanes"]["r"]["number"] = 0
    (tmp_path / "state-sent.json").write_text(json.dumps(content))
    with monkeypatch.context() as patch:
        Broken(patch, "state-sent.json", errno.EIO)
        rig.restart()
    assert rig.engine.lanes["r"].number == 2
    rig.engine.close()  # writes what it knows
    rig.restart()
    assert rig.engine.lanes["r"].number == 2


def test_a_state_that_may_be_read_later_is_not_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path, ToAll("r"), [InlineSender("r")])
    rig.add(event(1))
    rig.run()
    Broken(monkeypatch, "state.json", errno.EMFILE)
    with pytest.raises(OSError, match="Too many open files"):
        rig.restart()
    assert (tmp_path / "state.json").exists()


def test_of_the_two_files_the_newer_one_holds(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1))
    rig.run()
    before = (tmp_path / "state-sent.json").read_bytes()  # as it was handed over: nothing is confirmed
    rig.add(event(2))
    rig.run()
    (tmp_path / "state-sent.json").write_bytes(before)
    rig.restart()
    assert rig.engine.lanes["r"].cursors["main"] == 2
    rig.add(event(3))
    rig.run()
    rig.restart()
    assert rig.engine.lanes["r"].cursors["main"] > 2
    rig.run()
    assert sender.got() == ["e1", "e2", "e3"]


def as_a_former_release(path: Path) -> None:
    """It writes the same file, but counts no generations."""
    content = json.loads(path.read_bytes())
    del content["generation"]
    path.write_text(json.dumps(content))


def test_a_file_left_from_before_a_former_release_ran_is_never_the_newer_one(tmp_path: Path) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    for number in range(1, 5):
        rig.add(event(number))
        rig.run()
    left = (tmp_path / "state-sent.json").read_bytes()
    rig.add(event(5))
    rig.run()
    rig.engine.close()
    (tmp_path / "state-sent.json").write_bytes(left)
    as_a_former_release(tmp_path / "state.json")
    assert json.loads(left)["lanes"]["r"]["number"] < 5
    for _ in range(2):
        rig.restart()
        assert rig.engine.lanes["r"].number == 5
        rig.run()  # no batch is handed over: the other file stays as it is


def test_a_lane_that_only_the_lost_file_knew_begins_with_what_the_queues_hold(tmp_path: Path) -> None:
    rig = Rig(tmp_path, ToAll("r", "s"), [InlineSender("r")])
    rig.add(event(1))
    rig.run()
    late = InlineSender("s", retry("away"))
    rig.senders["r"].answer = retry("away")
    rig.add(event(2))
    rig.run()
    (tmp_path / "state.json").write_bytes(b"")  # the file beside it knows of no s
    rig.senders["s"] = late
    rig.restart()
    assert rig.engine.lanes["s"].cursors["main"] < 2


def failing(tmp_path: Path) -> tuple[Rig, InlineSender]:
    sender = InlineSender("r", retry("away"))
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1), event(2))
    rig.run()
    sender.batches.clear()
    return rig, sender


def test_a_start_without_documents_loses_no_backlog(tmp_path: Path) -> None:
    rig, sender = failing(tmp_path)
    before = (tmp_path / "state.json").read_bytes()
    rig.senders.clear()
    rig.unknown = None  # nothing was read yet
    rig.restart()
    rig.run()
    rig.engine.close()
    assert (tmp_path / "state.json").read_bytes() == before
    assert len(rig.main.read(0)[0]) == 2
    rig.unknown = ()
    rig.senders["r"] = sender
    sender.answer = CONFIRMED
    rig.restart()
    rig.run()
    assert sender.got() == ["e1", "e2"]


def test_documents_that_come_late_after_a_lost_state_bring_the_backlog(tmp_path: Path) -> None:
    rig, sender = failing(tmp_path)
    (tmp_path / "state.json").unlink()
    rig.senders.clear()
    rig.unknown = None
    rig.restart()
    rig.run()
    sender.answer = CONFIRMED
    rig.senders["r"] = sender
    rig.engine.set_recipients([LaneSettings("r", sender)])
    rig.run()
    assert sender.got() == ["e1", "e2"]
    assert rig.main.fullness_ratio == 0


def test_what_waits_for_a_recipient_whose_document_cannot_be_read_waits_on(tmp_path: Path) -> None:
    rig, sender = failing(tmp_path)
    rig.engine.set_recipients([], unknown=["r"])
    rig.add(event(3))
    rig.run()
    rig.senders.clear()
    rig.unknown = ["r"]
    rig.restart()
    rig.run()
    rig.senders["r"] = sender
    sender.answer = CONFIRMED
    rig.engine.set_recipients([LaneSettings("r", sender)])
    rig.run()
    assert sender.got() == ["e1", "e2", "e3"]
    assert rig.main.fullness_ratio == 0


def test_what_waits_for_a_recipient_that_has_ended_waits_no_longer(tmp_path: Path) -> None:
    rig, sender = failing(tmp_path)
    rig.engine.set_recipients([], unknown=["r"])
    rig.engine.set_recipients([])
    rig.run()
    assert rig.main.fullness_ratio == 0
    sender.answer = CONFIRMED
    rig.engine.set_recipients([LaneSettings("r", sender)])
    rig.run()
    assert sender.got() == []


def test_a_recipient_whose_document_cannot_be_read_does_not_fill_the_queue(tmp_path: Path) -> None:
    rig, _sender = failing(tmp_path)
    rig.engine.set_recipients([], unknown=["r"])
    number = 3
    while rig.main.fullness_ratio < 0.8:
        rig.add(*[event(each, text="x" * 2000) for each in range(number, number + 20)])
        number += 20
    for _ in range(100):
        rig.run()
    assert rig.main.fullness_ratio < 0.8
    assert rig.main.read(0)[0]
    assert rig.raised.count(("delivery-failed", "r")) == 1


def test_without_any_documents_a_queue_that_is_nearly_full_takes_events_on(tmp_path: Path) -> None:
    rig, _sender = failing(tmp_path)
    rig.senders.clear()
    rig.unknown = None
    rig.restart()
    while rig.main.fullness_ratio < 0.8:
        rig.add(*[event(each, text="x" * 2000) for each in range(20)])
    for _ in range(100):
        rig.run()
    assert rig.main.fullness_ratio < 0.8
    assert rig.raised == [("delivery-failed", "r")]


def test_answers_that_come_together_are_written_together_and_deleted_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders = [InlineSender(f"r{number}", None) for number in range(10)]
    rig = Rig(tmp_path, ToAll(*(sender.name for sender in senders)), senders)
    writes: list[int] = []

    def slow(path: Path, content: str, *, synced: bool) -> None:
        rig.clock.advance(0.02)
        writes.append(len(content))
        write_whole(path, content, synced=synced)

    monkeypatch.setattr("sla_server.events.lane.write_whole", slow)
    monkeypatch.setattr("sla_server.events.lane.LARGE_BYTES", 100)
    rig.add(event(1))
    rig.run()
    writes.clear()
    for sender in senders:
        rig.engine.answered(sender.reply(CONFIRMED))
        assert 0 < rig.engine.step() <= 0.2
    assert writes == []
    assert len(rig.main.read(0)[0]) == 1
    rig.clock.advance(0.2)
    rig.engine.step()
    assert len(writes) == 1
    assert rig.main.read(0)[0] == []


def test_firing_conditions_come_back_and_are_made_text_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender = InlineSender("r")
    rig = Rig(tmp_path, ToAll("r"), [sender])
    rig.add(event(1, "violation-opened", severity="critical"))
    rig.run()
    made: list[str] = []
    dumps = strict_json.dumps

    def counted(value: object) -> str:
        text = dumps(value)
        made.extend([text] if "violation" in text else [])
        return text

    monkeypatch.setattr("sla_server.events.lane.strict_json.dumps", counted)
    rig.add(event(2))
    rig.run()
    assert made == []
    monkeypatch.undo()
    rig.restart()
    rig.add(event(3, "violation-opened", severity="critical"))
    rig.run()
    assert sender.got() == ["e1", "e2"]
    assert rig.engine.lanes["r"].firing


def test_batches_of_all_lanes_are_written_once_and_before_any_recipient_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Noting(InlineSender):
        def start(self, token: int, notices: Sequence[Notice], timeout_s: float) -> bool:
            done.append("sent")
            return super().start(token, notices, timeout_s)

    senders = [Noting(f"r{number}", None) for number in range(10)]
    rig = Rig(tmp_path, ToAll(*(sender.name for sender in senders)), senders)

    def write(path: Path, content: str, *, synced: bool) -> None:
        done.append("synced" if synced else "written")
        write_whole(path, content, synced=synced)

    monkeypatch.setattr("sla_server.events.lane.write_whole", write)
    rig.engine.step()
    done.clear()
    rig.add(event(1))
    rig.engine.step()
    assert done == ["written"] + ["sent"] * 10  # there is nothing to delete yet
    assert [sender.got() for sender in senders] == [["e1"]] * 10
    rig.restart()
    assert [lane.sent for lane in rig.engine.lanes.values()] == [("main", 1)] * 10

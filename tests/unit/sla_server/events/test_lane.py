"""The state file of delivery: what is damaged, of another release or missing loses no event."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.events.recipients.base import CONFIRMED, retry
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
    assert synced
    assert all(synced)

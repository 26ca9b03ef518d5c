"""Recipients of documents: kept while their document stays, tried again when not made; heartbeats."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.agreements.load import load_documents
from sla_server.events.documents import RecipientDocument
from sla_server.events.outlets import Outlets
from sla_server.events.recipients.base import Notice, Outcome
from sla_server.events.recipients.build import RecipientBuilder
from sla_server.events.stages.send import GRACE_S, SentBatch
from tests.support.deliveries import event
from tests.support.receivers import HttpReceiver, hang, status

LIMIT_S = 60.0
Documents = dict[str, RecipientDocument]


def documents(**specs: str) -> Documents:
    head = "apiVersion: storage-sla/v1\nkind: Recipient\nmetadata: {{name: {}}}\nspec: {}\n"
    text = "---\n".join(head.format(name, spec) for name, spec in specs.items())
    found = [each.document for each in load_documents(text, 60)] if specs else []
    return {each.name: each for each in found if isinstance(each, RecipientDocument)}


class Served:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = FakeClock()
        self.back: queue.Queue[SentBatch] = queue.Queue()
        self.threads = ThreadGroup()
        builder = RecipientBuilder(folder / "secrets", folder / "commands", folder / "notices")
        self.outlets = Outlets(builder, self.threads, self.back.put, self.clock)

    def answer(self) -> SentBatch:
        return self.back.get(timeout=LIMIT_S)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[[], Served]]:
    made: list[Served] = []

    def make() -> Served:
        made.append(Served(tmp_path))
        return made[-1]

    yield make
    for each in made:
        for lane in each.outlets.lanes({}):
            lane.sender.close()
        each.outlets.close()
        each.threads.join(LIMIT_S)


def test_a_recipient_is_made_again_only_if_its_document_changed(served: Callable[[], Served]) -> None:
    outlets = served().outlets
    before = {
        lane.name: lane for lane in outlets.lanes(documents(a="{inbox: {}}", b="{inbox: {}, batch: 7}"))
    }
    assert (before["b"].most_notices, before["a"].per_minute) == (7, 0.0)
    after = {
        lane.name: lane
        for lane in outlets.lanes(documents(a="{inbox: {}}", b="{inbox: {}, batch: 8, per_minute: 3}"))
    }
    assert after["a"].sender is before["a"].sender
    assert after["b"].sender is not before["b"].sender
    assert (after["b"].most_notices, after["b"].per_minute) == (8, 3.0)
    assert [lane.name for lane in outlets.lanes(documents(b="{inbox: {}, batch: 8, per_minute: 3}"))] == ["b"]


def test_a_recipient_without_its_secret_is_tried_again_until_it_is_there(
    served: Callable[[], Served], tmp_path: Path
) -> None:
    rig = served()
    (tmp_path / "secrets").mkdir(mode=0o700)
    with HttpReceiver() as receiver:
        spec = f'{{webhook: {{url: "{receiver.url}", secret_file: key}}}}'
        (lane,) = rig.outlets.lanes(documents(hook=spec))
        assert lane.sender.start(1, [Notice(event(1), "hook", 1)], lane.timeout_s)
        first = rig.answer().answer
        assert (first.outcome, receiver.requests) == (Outcome.RETRY, [])
        (tmp_path / "secrets" / "key").write_text("secret")
        (tmp_path / "secrets" / "key").chmod(0o600)
        assert lane.sender.start(2, [Notice(event(1), "hook", 1)], lane.timeout_s)
        assert rig.answer().answer.outcome is Outcome.CONFIRMED
        lane.sender.close()


def test_a_heartbeat_is_sent_at_its_interval_and_left_out_when_delivery_stands_still(
    served: Callable[[], Served],
) -> None:
    rig = served()
    with HttpReceiver() as receiver:
        spec = f'{{heartbeat: {{url: "{receiver.url}", interval: 60s}}}}'
        assert rig.outlets.lanes(documents(beat=spec)) == []
        assert rig.outlets.beat(is_well=True) > 0
        assert rig.outlets.answered(rig.answer())
        assert rig.outlets.beat(is_well=True) == 60.0
        rig.clock.advance(60)
        rig.outlets.beat(is_well=False)
        assert (len(receiver.requests), rig.outlets.pulses["beat"].left_out) == (1, 1)
        rig.clock.advance(60)
        rig.outlets.beat(is_well=True)
        assert rig.outlets.answered(rig.answer())
        assert len(receiver.requests) == 2
        (row,) = rig.outlets.pulse_rows()
        assert (row["name"], row["state"], row["confirmed"], row["left_out"]) == ("beat", "ok", 2, 1)


def test_heartbeats_do_not_wait_for_one_that_hangs(served: Callable[[], Served]) -> None:
    rig = served()
    with HttpReceiver(hang) as hung, HttpReceiver(status(200)) as other:
        spec = '{{heartbeat: {{url: "{}", interval: 10s}}, timeout: 50s}}'
        rig.outlets.lanes(documents(hung=spec.format(hung.url), other=spec.format(other.url)))
        rig.outlets.beat(is_well=True)
        assert rig.answer().lane == "other"
        rig.clock.advance(50 + GRACE_S)
        rig.outlets.beat(is_well=True)
        assert rig.outlets.pulses["hung"].last_answer == "no answer within 50 s"
        hung.released.set()

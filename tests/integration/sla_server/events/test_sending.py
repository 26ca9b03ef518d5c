"""The threads of recipients: answers come back, what hangs or raises harms no one else."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.recipients.base import CONFIRMED, Answer, Notice, Outcome
from sla_server.events.stages.send import MOST_LEFT_BEHIND, SentBatch, ThreadSender
from tests.support.deliveries import event

LIMIT_S = 60.0


class Scripted:
    """A recipient that waits for ``release`` while it hangs, and counts."""

    name, kind, timeout_s, most_notices = "r", "test", 5.0, 10

    def __init__(self) -> None:
        self.release = threading.Event()
        self.hangs = self.raises = self.closed = False
        self.entered = threading.Event()

    def deliver(self, notices: Sequence[Notice], deadline: Deadline) -> Answer:
        if self.raises:
            raise RuntimeError("a mistake in the recipient")
        if self.hangs:
            self.entered.set()
            assert self.release.wait(LIMIT_S)
        return CONFIRMED

    def close(self) -> None:
        self.closed = True


class Sending:
    def __init__(self) -> None:
        self.made: list[Scripted] = []
        self.next = Scripted()
        self.back: queue.Queue[SentBatch] = queue.Queue()
        self.threads = ThreadGroup()
        self.sender = ThreadSender("r", self.make, self.back.put, self.threads)

    def make(self) -> Scripted:
        self.made.append(self.next)
        self.next = Scripted()
        self.next.hangs = self.made[-1].hangs
        return self.made[-1]

    def send(self, token: int) -> bool:
        return self.sender.start(token, [Notice(event(token), "r", token)], 5.0)


@pytest.fixture
def sending() -> Iterator[Sending]:
    found = Sending()
    yield found
    for recipient in found.made:
        recipient.release.set()
    found.sender.close()
    found.threads.join(LIMIT_S)
    assert all(recipient.closed for recipient in found.made)


def test_the_answer_comes_back_with_its_token(sending: Sending) -> None:
    assert sending.send(7)
    assert sending.back.get(timeout=LIMIT_S) == SentBatch("r", 7, CONFIRMED)
    assert sending.send(8)
    assert sending.back.get(timeout=LIMIT_S).token == 8
    assert len(sending.made) == 1


def test_what_a_recipient_raises_is_a_retry_and_its_thread_goes_on(sending: Sending) -> None:
    sending.next.raises = True
    sending.send(1)
    answer = sending.back.get(timeout=LIMIT_S).answer
    assert (answer.outcome, answer.reason) == (
        Outcome.RETRY,
        "a fault of the server: RuntimeError; its log says where (recipient-failed)",
    )  # its text may repeat a secret
    sending.made[0].raises = False
    sending.send(2)
    assert sending.back.get(timeout=LIMIT_S).answer == CONFIRMED


def test_so_many_calls_may_hang_and_then_the_recipient_waits_for_one_to_return(sending: Sending) -> None:
    sending.next.hangs = True
    for token in range(MOST_LEFT_BEHIND):
        assert sending.send(token)
        assert sending.made[-1].entered.wait(LIMIT_S)
        sending.sender.abandon()
    assert not sending.send(9)
    sending.made[0].release.set()
    assert sending.back.get(timeout=LIMIT_S).token == 0  # of no use to the lane, which went on
    sending.next.hangs = False
    while not sending.send(10):  # its thread ends at once
        threading.Event().wait(0.01)
    assert sending.back.get(timeout=LIMIT_S) == SentBatch("r", 10, CONFIRMED)

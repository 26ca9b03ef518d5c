"""apprise, the real package, against a service on loopback."""

from __future__ import annotations

import json
import queue
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.threads import ThreadGroup
from sla_server.events.documents import AppriseSpec
from sla_server.events.recipients.apprise_services import AppriseServices
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome
from sla_server.events.stages.send import SentBatch, ThreadSender
from tests.support import receivers
from tests.support.notices import closed, notice
from tests.support.receivers import HttpReceiver, status

pytestmark = pytest.mark.filterwarnings(
    "ignore:'imghdr' is deprecated:DeprecationWarning"
)  # apprise imports it


def _services(tmp_path: Path, addresses: str, **arguments: Any) -> AppriseServices:
    path = tmp_path / "addresses"
    path.write_text(addresses)
    path.chmod(0o600)
    spec = AppriseSpec.model_validate({"url_file": "addresses"})
    return AppriseServices("chat", spec, tmp_path, timeout_s=60, most_notices=100, **arguments)


def test_every_address_of_the_file_gets_the_notices(tmp_path: Path) -> None:
    with HttpReceiver() as receiver:
        address = receiver.url.replace("http://", "json://")
        target = _services(tmp_path, f"# two of them\n{address}/a\n\n{address}/b\n")
        assert target.deliver([notice(1), closed(2)], Deadline(60)) == CONFIRMED
    assert sorted(path for _, path, _, _ in receiver.requests) == ["/a", "/b"]
    found = json.loads(receiver.requests[0][3])
    assert found["type"] == "success"
    assert found["title"] == "RESOLVED: erp-gold/latency: broken, number 2 (and 1 more)"
    assert "identity: event-1" in found["message"]


def test_a_service_that_refuses_is_tried_again(tmp_path: Path) -> None:
    with HttpReceiver(status(500), status(200)) as receiver:
        target = _services(tmp_path, receiver.url.replace("http://", "json://"))
        assert target.deliver([notice(1)], Deadline(60)).outcome is Outcome.RETRY
        assert target.deliver([notice(1)], Deadline(60)) == CONFIRMED


@pytest.mark.parametrize("addresses", ["nothing-of-this-kind", "# none\n"])
def test_an_address_that_apprise_does_not_know_is_not_repeated(tmp_path: Path, addresses: str) -> None:
    answer = _services(tmp_path, addresses).deliver([notice(1)], Deadline(60))
    assert (answer.outcome, answer.after_s) == (Outcome.RETRY, 60.0)
    assert "nothing-of-this-kind" not in answer.reason


def test_a_service_that_hangs_is_left_behind_and_not_called_twice(tmp_path: Path) -> None:
    with HttpReceiver(receivers.hang, status(200)) as receiver:
        target = _services(tmp_path, receiver.url.replace("http://", "json://"))
        assert target.deliver([notice(1)], Deadline(0)) == Answer(Outcome.RETRY, "no answer in time")
        busy = Answer(Outcome.RETRY, "the service has not answered the notices before")
        assert target.deliver([notice(1)], Deadline(0)) == busy
        receiver.released.set()
        assert target.deliver([notice(1)], Deadline(60)) == CONFIRMED
        assert len(receiver.requests) == 2
    assert threading.active_count() < 50


def test_without_the_package_the_answer_says_what_to_install(tmp_path: Path) -> None:
    def missing() -> Any:
        raise ImportError("no apprise")

    answer = _services(tmp_path, "json://a", load=missing).deliver([notice(1)], Deadline(60))
    assert answer.reason == "apprise is not installed: pip install storage-sla-server[notify]"


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_the_package_raises_is_an_answer_that_says_so(tmp_path: Path) -> None:
    class Services(list[str]):
        def add(self, address: str) -> bool:
            self.append(address)
            return True

        def notify(self, **_arguments: str) -> bool:
            raise TypeError("https://chat.example/token")

    module = types.SimpleNamespace(Apprise=Services)
    answers, threads = queue.SimpleQueue[SentBatch](), ThreadGroup(lambda _name, _exc: None)
    sender = ThreadSender(
        "chat", lambda: _services(tmp_path, "json://a", load=lambda: module), answers.put, threads
    )
    assert sender.start(1, [notice(1)], 60)
    answer = answers.get(timeout=60).answer
    sender.close()
    threads.join(60)
    assert answer.outcome is Outcome.RETRY
    assert "TypeError" in answer.reason
    assert "token" not in answer.reason

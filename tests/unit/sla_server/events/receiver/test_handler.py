"""Decisions about posts: in which order, and that nothing is taken of what is not let in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from pmdaemon.diskqueue.errors import QueueFull
from pmdaemon.runtime.clock import FakeClock
from sla_server.events.queue import QueuedEvent
from sla_server.events.receiver.handler import MOST_HOSTS, PostHandler, PostLimits
from sla_server.events.recipients.webhook import MOST_AGE_S, body, signature
from tests.support.notices import notice

PATH = "/events/site-a"
CONTENT = json.dumps(body("relay", [notice(1), notice(2)])).encode()


class Handled:
    """A handler, and what it handed on."""

    def __init__(self, folder: Path) -> None:
        self.key = folder / "key"
        self.key.write_text("shared")
        self.key.chmod(0o600)
        self.clock = FakeClock()
        self.taken: list[str] = []
        self.is_full = False
        self.is_confirmed = True
        self.handler = PostHandler(
            {"site-a": self.key}, PostLimits(1000, 2.0), self.accept, self.confirmed, self.clock
        )

    def accept(self, items: Sequence[QueuedEvent]) -> int:
        if self.is_full:
            raise QueueFull("main", "bytes", 1, 0)
        new = [item.identity for item in items if item.identity not in self.taken]
        self.taken += new
        return len(new)

    def confirmed(self, items: Sequence[QueuedEvent]) -> bool:
        assert all(item.identity in self.taken for item in items)
        return self.is_confirmed

    def signed(self, content: bytes = CONTENT, age_s: int = 0, secret: str = "shared") -> str:
        return signature(secret, self.clock.unix_us() // 1_000_000 - age_s, content)

    def post(self, content: bytes = CONTENT, signed: str | None = None, path: str = PATH) -> int:
        return self.handler.answer(path, self.signed(content) if signed is None else signed, content).status


@pytest.fixture
def rig(tmp_path: Path) -> Handled:
    return Handled(tmp_path)


def test_a_signed_body_is_taken_once(rig: Handled) -> None:
    assert [rig.post(), rig.post()] == [200, 200]
    assert rig.taken == ["event-1", "event-2"]
    (sender,) = rig.handler.figures()["senders"]
    assert {key: sender[key] for key in ("name", "confirmed", "taken", "repeated")} == {
        "name": "site-a", "confirmed": 2, "taken": 2, "repeated": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    "at", ["", "t=,v1=", "t=x,v1=y", "v1=00", "t=1", "nonsense", "t=1e9,v1=0", "t=٣,v1=é"]
)
def test_what_is_not_signed_is_not_taken(rig: Handled, at: str) -> None:
    assert (rig.post(signed=at), rig.taken) == (401, [])


def test_the_signature_is_of_secret_body_and_time(rig: Handled) -> None:
    assert rig.post(signed=rig.signed(secret="other")) == 401
    assert rig.post(signed=rig.signed(CONTENT + b" ")) == 401
    assert rig.post(signed=rig.signed(age_s=MOST_AGE_S + 1)) == 401
    assert rig.post(signed=rig.signed(age_s=-MOST_AGE_S - 1)) == 401
    assert rig.post(signed=rig.signed().replace("t=1", "t=2")) == 401
    assert rig.taken == []
    assert rig.post(signed=rig.signed(age_s=MOST_AGE_S)) == 200


def test_names_cannot_be_guessed_by_the_answer(rig: Handled) -> None:
    wrong = rig.handler.answer(PATH, "t=1,v1=0", CONTENT)
    unknown = rig.handler.answer("/events/nobody", rig.signed(), CONTENT)
    assert wrong == unknown
    assert unknown.status == 401


def test_a_new_secret_counts_at_once_and_one_that_cannot_be_read_is_our_trouble(rig: Handled) -> None:
    rig.key.write_text("new")
    assert (rig.post(), rig.post(signed=rig.signed(secret="new"))) == (401, 200)
    rig.key.unlink()
    answer = rig.handler.answer(PATH, rig.signed(secret="new"), CONTENT)
    assert (answer.status, str(rig.key) in answer.text) == (503, False)


def test_a_body_is_parsed_after_its_signature_was_checked(rig: Handled) -> None:
    assert rig.post(b"no json", signed="t=1,v1=0") == 401
    assert rig.post(b"no json") == 400
    assert rig.taken == []


def test_a_full_queue_asks_to_come_again(rig: Handled) -> None:
    rig.is_full = True
    answer = rig.handler.answer(PATH, rig.signed(), CONTENT)
    assert (answer.status, answer.after_s > 0) == (503, True)
    (sender,) = rig.handler.figures()["senders"]
    assert (sender["confirmed"], sender["taken"]) == (0, 0)


def test_what_is_not_confirmed_by_all_is_no_success(rig: Handled) -> None:
    rig.is_confirmed = False
    answer = rig.handler.answer(PATH, rig.signed(), CONTENT)
    assert (answer.status, answer.after_s > 0, rig.taken) == (503, True, ["event-1", "event-2"])
    rig.is_confirmed = True
    assert (rig.post(), rig.taken) == (200, ["event-1", "event-2"])


@pytest.mark.parametrize(
    ("method", "target", "length", "status"),
    [
        ("POST", "/", 10, 404),
        ("GET", "/events/", 0, 404),
        ("POST", "/events/a/b", 10, 404),
        ("POST", "/events/../x", 10, 404),
        ("GET", PATH, 0, 405),
        ("POST", PATH, None, 411),
        ("POST", PATH, 1001, 413),
    ],
)
def test_what_is_refused_before_its_body_is_read(
    rig: Handled, method: str, target: str, length: int | None, status: int
) -> None:
    answer = rig.handler.admit(method, target, "192.0.2.1", length)
    assert answer is not None
    assert answer.status == status
    assert rig.handler.admit("POST", PATH, "192.0.2.1", 1000) is None


def test_a_host_has_its_rate_and_others_have_theirs(rig: Handled) -> None:
    def admitted(host: str) -> int:
        return sum(rig.handler.admit("POST", PATH, host, 10) is None for _ in range(10))

    assert (admitted("192.0.2.1"), admitted("192.0.2.2")) == (3, 3)  # a second's worth, and one
    refused = rig.handler.admit("POST", PATH, "192.0.2.1", 10)
    assert refused is not None
    assert (refused.status, refused.after_s) == (429, 1)
    rig.clock.advance(1)
    assert admitted("192.0.2.1") == 2


def test_rates_of_so_many_hosts_are_kept(rig: Handled) -> None:
    for number in range(MOST_HOSTS + 10):
        rig.handler.admit("POST", PATH, f"host-{number}", 10)
    assert len(rig.handler._rates) == MOST_HOSTS  # bounded memory is the point

"""What the connection asks the library for, what it keeps and what it says; no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import ParseResult, urlparse

import nats.aio.client
import nats.errors
import nats.js.errors
import pytest
import structlog.testing

from sla_server.cluster.errors import ClusterRefused
from sla_server.cluster.messages import link as links
from sla_server.cluster.messages.errors import BadSettings, NotConfirmed
from sla_server.cluster.messages.link import EngineLink, Trouble, classify, size_bytes


class FakeClient:
    """Records how it is asked to connect."""

    max_payload = 1 << 20

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}
        self.published: list[str] = []
        self.has_lost_message = False
        self.problems: list[Exception] = []
        self.requested: list[str] = []
        self._pending = [b"PUB a 1\r\n"]
        self._pending_data_size = 9

    @property
    def connected_url(self) -> ParseResult:
        return urlparse("nats://sla:password@127.0.0.1:4222")

    async def connect(self, urls: list[str], **options: Any) -> None:
        self.options = {"urls": urls, **options}

    def jetstream(self, **_options: Any) -> FakeClient:
        return self

    async def publish(self, subject: str, *_more: Any, **_options: Any) -> SimpleNamespace:
        self.published.append(subject)
        if self.problems:
            raise self.problems.pop(0)
        if self.has_lost_message:
            raise nats.js.errors.APIError(
                code=409, err_code=10158, description="duplicate message id is in process"
            )
        return SimpleNamespace(seq=len(self.published))

    async def request(self, subject: str, *_more: Any, **_options: Any) -> None:
        self.requested.append(subject)
        await asyncio.sleep(0)  # an answer comes later than what others ask meanwhile
        self.has_lost_message = False

    async def close(self) -> None:
        pass


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineLink]:
    monkeypatch.setattr(nats.aio.client, "Client", FakeClient)  # the only door to the network
    link = EngineLink(["nats://sla:password@127.0.0.1:4222"], "test")
    yield link
    link.close()


def fake(link: EngineLink) -> FakeClient:
    assert isinstance(link.client, FakeClient)
    return link.client


def test_a_reconnection_is_logged_without_the_password(link: EngineLink) -> None:
    with structlog.testing.capture_logs() as lines:
        link.run(fake(link).options["reconnected_cb"]())
    assert [line["node"] for line in lines] == ["127.0.0.1:4222"]
    assert "password" not in str(lines)
    assert link.reconnections == 1


def test_nodes_that_are_learned_are_connected_to_with_the_same_user(link: EngineLink) -> None:
    assert (fake(link).options["user"], fake(link).options["password"]) == ("sla", "password")


def test_nothing_is_kept_for_the_next_node(link: EngineLink) -> None:
    """It might be sent when the engine has forgotten the identities of what it has stored."""
    assert fake(link).options["pending_size"] == 0
    link.run(fake(link).options["disconnected_cb"]())
    assert not fake(link)._pending  # the library shows its size only
    assert fake(link)._pending_data_size == 0


def test_headers_count(link: EngineLink) -> None:
    """The engine counts them, and the library closes the connection for good when it refuses."""
    headers = {"Kind": "film"}
    assert size_bytes(b"12", headers) == len(b"12" + b"Kind: film\r\n")
    link.check_size(b"x" * (link.limit_bytes - 12), headers)
    with pytest.raises(nats.errors.MaxPayloadError):
        link.check_size(b"x" * (link.limit_bytes - 11), headers)
    with pytest.raises(ClusterRefused, match="maximum payload"):
        link.run(link.store("a", b"x" * link.limit_bytes, headers, stream="S", what="a", limit_s=60))
    assert fake(link).published == []
    assert classify(nats.errors.BadHeaderError("a b")) is Trouble.FINAL


def test_a_primary_that_never_ends_storing_a_message_is_replaced(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a node's death it may say so of a message that it has lost; the next one stores it."""
    monkeypatch.setattr(links, "STUCK_S", 0.0)
    fake(link).has_lost_message = True
    link.run(link.store("a", b"", {}, stream="S", what="a", limit_s=60))
    assert fake(link).published == ["a", "a"]
    assert fake(link).requested == ["$JS.API.STREAM.LEADER.STEPDOWN.S"]


def test_a_primary_is_replaced_once_for_all_that_is_stuck_at_it(
    link: EngineLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each one would else take the lead from the primary that has just got it, with what that one stores."""
    monkeypatch.setattr(links, "STUCK_S", 0.0)
    fake(link).has_lost_message = True

    async def store() -> list[int]:
        return await asyncio.gather(
            *(link.store(name, b"", {}, stream="S", what=name, limit_s=60) for name in "abc")
        )

    assert len(link.run(store())) == 3
    assert fake(link).requested == ["$JS.API.STREAM.LEADER.STEPDOWN.S"]


FULL = nats.js.errors.APIError(code=503, err_code=10077, description="maximum bytes exceeded")


@pytest.mark.parametrize("first", [TimeoutError(), nats.errors.ConnectionClosedError(), OSError("reset")])
def test_full_is_not_said_of_a_message_that_may_still_be_on_its_way(
    link: EngineLink, first: Exception
) -> None:
    """A node that hangs sends it on when it goes on; by then there may be room."""
    fake(link).problems = [first, FULL]
    with pytest.raises(NotConfirmed, match="had no answer, and the next one: maximum bytes"):
        link.run(link.store("a", b"", {}, stream="S", what="a", limit_s=60))


@pytest.mark.parametrize("first", [nats.js.errors.NoStreamResponseError(), FULL])
def test_full_is_final_where_no_try_is_on_its_way(link: EngineLink, first: Exception) -> None:
    fake(link).problems = [first, FULL]
    with pytest.raises(ClusterRefused, match="maximum bytes"):
        link.run(link.store("a", b"", {}, stream="S", what="a", limit_s=60))


def test_errors_from_the_inside_of_the_library_pass(link: EngineLink) -> None:
    """One is seen when a connection breaks in the middle of a call; and those of buckets lack their codes."""
    problems: list[Exception] = [
        AttributeError("'NoneType' object has no attribute 'write'"),
        nats.js.errors.KeyNotFoundError(),
        nats.js.errors.NotFoundError(code=404, err_code=10059, description="stream not found"),
    ]

    async def attempt() -> str:
        if problems:
            raise problems.pop()
        return "done"

    assert link.run(link.retry(attempt, "it", 60)) == "done"


def test_what_the_message_system_refuses_itself_is_final(link: EngineLink) -> None:
    async def attempt() -> None:
        raise BadSettings("batch", 0, "too few")

    with pytest.raises(BadSettings):
        link.run(link.retry(attempt, "it", 60))

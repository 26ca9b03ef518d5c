"""Which of the engine's consumers are subscribers of a topic, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, engine_name
from sla_server.cluster.messages.errors import SubscriberRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.subscribers import SubscriberRow, end, row_of, rows

NEWS = Destination("news.eu", DestinationKind.TOPIC, domain="news")
OTHER = Destination("news.us", DestinationKind.TOPIC, domain="news")


def _consumer(topic: Destination, name: str, **figures: int) -> dict[str, Any]:
    return {"name": engine_name(topic, name), "config": {"filter_subject": topic.subject}, **figures}


@pytest.mark.parametrize("name", ["reader", "a-b", "a.b_c", "news.eu", "-news_deu"])
def test_a_subscriber_has_the_name_that_its_program_gave(name: str) -> None:
    found = row_of(NEWS, _consumer(NEWS, name, num_pending=4, num_ack_pending=2, num_waiting=1))
    assert found == SubscriberRow("news.eu", name, 4, 2, is_receiving=True)
    assert row_of(NEWS, _consumer(OTHER, name)) is None
    assert row_of(NEWS, {"name": "x7Kq", "config": {"ack_policy": "flow_control"}}) is None  # a mirror's


class FakeLink:
    """Has these consumers; the answer to a removal is lost once."""

    def __init__(self, *consumers: dict[str, Any]) -> None:
        self.consumers = {each["name"]: each for each in consumers}
        self.removals = 0

    async def retry(self, attempt: Any, _what: str, _limit_s: float) -> Any:
        while True:
            try:
                return await attempt()
            except TimeoutError:
                continue

    async def ask(self, subject: str, _body: object) -> dict[str, Any]:
        if subject.startswith("CONSUMER.LIST."):
            return {"consumers": list(self.consumers.values()), "total": len(self.consumers)}
        self.removals += 1
        if self.consumers.pop(subject.rpartition(".")[2], None) is None:
            import nats.js.errors

            raise nats.js.errors.NotFoundError(code=404, err_code=10014, description="consumer not found")
        raise TimeoutError


class FakeCatalogue:
    async def get(self, name: str) -> Destination:
        return {"news.eu": NEWS, "news.us": OTHER}.get(name, Destination(name))


def test_a_subscriber_is_ended_though_the_answer_is_lost_and_no_other_one_with_it() -> None:
    link = FakeLink(
        _consumer(NEWS, "gone", num_pending=3), _consumer(OTHER, "gone"), _consumer(NEWS, "b", num_waiting=1)
    )

    def ended(topic: str, name: str) -> SubscriberRow:
        return asyncio.run(end(cast(EngineLink, link), cast(Catalogue, FakeCatalogue()), topic, name))

    assert ended("news.eu", "gone").waiting == 3
    assert link.removals == 2
    there = asyncio.run(rows(cast(EngineLink, link), cast(Catalogue, FakeCatalogue()), "news.eu"))
    assert [row.name for row in there] == ["b"]
    assert engine_name(OTHER, "gone") in link.consumers
    for topic, name, problem in (
        ("news.eu", "gone", "no subscriber 'gone'; there are b"),
        ("news.eu", "b", "End it first"),
        ("orders", "b", "is a queue"),
    ):
        with pytest.raises(SubscriberRefused, match=problem):
            ended(topic, name)

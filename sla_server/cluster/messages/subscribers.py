"""Subscribers of topics: who they are, what waits for each, and how one ends that does not come back (C9).

A topic keeps a message until each of its subscribers has acknowledged it, so one whose program was given up
fills the topic in the end: it refuses its producers, and the other subscribers get nothing more. The engine
remembers a subscriber as a durable consumer, under its name; ``end`` removes that. What only this one had not
acknowledged goes with it. It comes back under its name as a new one, which begins with what is there.

Nothing is stored here. Thread: the link's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import nats.js.errors

from sla_server.cluster.access import decoded
from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, engine_name
from sla_server.cluster.messages.errors import SubscriberRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_records import consumers_of

LIMIT_S: Final = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class SubscriberRow:
    """One subscriber of one topic.

    Attributes:
        name: of the consumer, as its program has named it.
        waiting: messages that it has not been handed.
        held: messages that it has in hand, or had when it died.
        is_receiving: whether a session asks for messages under this name now.
    """

    topic: str
    name: str
    waiting: int
    held: int
    is_receiving: bool


async def rows(link: EngineLink, catalogue: Catalogue, name: str) -> tuple[SubscriberRow, ...]:
    """Of a topic, by name.

    Raises:
        DestinationMissing: there is no such destination.
        SubscriberRefused: it is a queue.
        NotConfirmed: the cluster has no majority.
    """
    topic = await _topic(catalogue, name)

    async def attempt() -> tuple[SubscriberRow, ...]:
        if (found := await consumers_of(link, topic.stream)) is None:
            raise TimeoutError("not all of its consumers answer")
        listed = [row_of(topic, info) for info in found]
        return tuple(sorted((row for row in listed if row is not None), key=lambda row: row.name))

    return await link.retry(attempt, f"subscribers of {name}", LIMIT_S)


async def end(link: EngineLink, catalogue: Catalogue, name: str, subscriber: str) -> SubscriberRow:
    """Have a topic keep nothing more for a subscriber; what it was.

    Raises:
        DestinationMissing: there is no such destination.
        SubscriberRefused: there is no such subscriber, it receives now, or ``name`` is a queue.
        NotConfirmed: perhaps it has ended; repeat it.
    """
    topic = await _topic(catalogue, name)
    there = await rows(link, catalogue, name)
    row = next((row for row in there if row.name == subscriber), None)
    if row is None:
        known = ", ".join(each.name for each in there) or "none"
        raise SubscriberRefused(f"{name} has no subscriber {subscriber!r}; there are {known}")
    if row.is_receiving:
        raise SubscriberRefused(
            f"a program receives from {name} as {subscriber}, and would begin again at once. End it first"
        )

    async def attempt() -> None:
        try:
            await link.ask(f"CONSUMER.DELETE.{topic.stream}.{engine_name(topic, subscriber)}", {})
        except nats.js.errors.NotFoundError:
            return  # a try before this one was heard

    await link.retry(attempt, f"end of subscriber {subscriber} of {name}", LIMIT_S)
    return row


async def _topic(catalogue: Catalogue, name: str) -> Destination:
    names.check_name(name)
    found = await catalogue.get(name)
    if found.kind is not DestinationKind.TOPIC:
        raise SubscriberRefused(f"{name} is a queue: its messages wait for any consumer, for no subscriber")
    return found


def row_of(topic: Destination, info: Mapping[str, Any]) -> SubscriberRow | None:
    """A consumer of the engine as a subscriber; None: one of another destination, or of a copy. Pure."""
    token, colon, rest = str(info["name"]).partition(f"-{names.encode(topic.name)}")
    subject = str(info["config"].get("filter_subject") or "")
    if subject != topic.subject or not colon or rest:
        return None
    return SubscriberRow(
        topic.name,
        decoded(token),
        int(info.get("num_pending", 0)),
        int(info.get("num_ack_pending", 0)),
        bool(info.get("num_waiting", 0)),
    )

"""Documents of destinations, and what the engine is asked to make of them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import cast

import nats.js.api
import nats.js.errors
import pytest
from nats.aio.client import Client

from sla_server.cluster.agent import read_destinations
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, stream_config
from sla_server.cluster.messages.errors import BadName, BadSettings
from sla_server.cluster.messages.fragments import STREAM
from sla_server.cluster.messages.link import EngineLink


def test_a_document_comes_back_whole_and_later_fields_are_left_out() -> None:
    destination = Destination(
        "news.eu", DestinationKind.TOPIC, domain="news", replicas=1, max_bytes=5, max_messages=7
    )
    assert Destination.parse(destination.encode()) == destination
    later = json.dumps(json.loads(destination.encode()) | {"colour": "red"}).encode()
    assert Destination.parse(later) == destination
    assert destination.differences(Destination("news.eu", DestinationKind.TOPIC, "news", 1, 5, 8)) == {
        "max_messages": (7, 8)
    }


def test_a_destination_without_a_domain_is_its_own() -> None:
    alone, shared = Destination("a.b"), Destination("a.b", domain="shop")
    assert (alone.stream, alone.subject) == ("SLA_a_db", "sla.d.a_db.a.b")
    assert (shared.stream, shared.subject) == ("SLA_shop", "sla.d.shop.a.b")


def test_full_destinations_refuse_what_is_new() -> None:
    config = stream_config(Destination("a", max_bytes=5), has_batches=False)
    assert config.discard is nats.js.api.DiscardPolicy.NEW
    assert (config.max_bytes, config.num_replicas, config.allow_atomic) == (5, 3, None)
    assert config.retention is nats.js.api.RetentionPolicy.WORK_QUEUE
    topic = stream_config(Destination("a", DestinationKind.TOPIC), has_batches=True)
    assert (topic.retention, topic.allow_atomic) == (nats.js.api.RetentionPolicy.INTEREST, True)


@pytest.mark.parametrize("wrong", [{"replicas": 6}, {"replicas": 0}, {"max_bytes": 0}, {"max_messages": -2}])
def test_settings_that_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadSettings, match=next(iter(wrong))):
        Destination("a", **wrong).check()  # type: ignore[arg-type]


def test_reserved_names_are_refused() -> None:
    with pytest.raises(BadName, match="reserved"):
        Destination("_mine").check()
    with pytest.raises(BadName, match="domain"):
        Destination("a", domain="_mine").check()
    assert Destination("FRAGMENTS").stream == STREAM
    with pytest.raises(BadName, match="destination 'FRAGMENTS': the message system has a stream"):
        Destination("FRAGMENTS").check()
    with pytest.raises(BadName, match="domain 'FRAGMENTS'"):
        Destination("a", domain="FRAGMENTS").check()
    Destination("FRAGMENTS", domain="a").check()


class FakeBucket:
    """The bucket's leader."""

    def __init__(self, documents: dict[str, bytes]) -> None:
        self.stream = self
        self.documents = documents
        self.read: list[str] = []

    async def key_value(self, _bucket: str) -> FakeBucket:
        return self

    async def stream_info(self, _name: str, subjects_filter: str) -> SimpleNamespace:
        subjects = {subjects_filter.removesuffix(">") + key: 1 for key in self.documents}
        return SimpleNamespace(state=SimpleNamespace(subjects=subjects or None))

    async def get(self, key: str) -> SimpleNamespace:
        self.read.append(key)
        if not self.documents[key]:
            raise nats.js.errors.KeyNotFoundError(None, "DEL")
        return SimpleNamespace(value=self.documents[key])


def test_neither_a_strange_document_nor_a_listener_keeps_others_from_being_found() -> None:
    later = json.dumps({"name": "b", "kind": "of a later release"}).encode()
    bucket = FakeBucket(
        {"a": Destination("a").encode(), "b": later, "c": b"[]", "d": Destination("d").encode()}
    )
    found: list[str] = []

    def fails(_destination: Destination) -> None:
        raise RuntimeError("a bug")

    async def run() -> None:
        catalogue = Catalogue(cast(EngineLink, bucket), 3)
        catalogue.listen(fails)
        catalogue.listen(lambda destination: found.append(destination.name))
        await catalogue.refresh()
        await catalogue.refresh()

    asyncio.run(run())
    assert found == ["a", "d"]
    assert bucket.read == ["a", "b", "c", "d"]  # each once


@pytest.mark.parametrize(
    "document",
    [
        b"[" * 100_000,
        b"null",
        b'{"name": "b"}',
        b'{"name": ["b"], "kind": "queue"}',
        b'{"name": "other", "kind": "queue"}',
        b'{"name": "b", "kind": "queue", "domain": 5}',
        b'{"name": "b", "kind": "queue", "domain": "TRANSACTIONS"}',
        b'{"name": "b", "kind": "queue", "domain": "a b"}',
        b'{"name": "b", "kind": "queue", "replicas": []}',
        b'{"name": "b", "kind": "queue", "replicas": 9}',
        b'{"name": "b", "kind": "queue", "max_bytes": 1e999}',
        b'{"name": "b", "kind": "queue", "max_messages": true}',
    ],
    ids=lambda document: document[:60].decode(),
)
def test_no_document_keeps_sessions_or_nodes_from_those_behind_it(document: bytes) -> None:
    """Any account with the role admin may write it; nodes make permissions of all that they read."""
    documents = {"a": Destination("a").encode(), "b": document, "c": Destination("c").encode()}
    bucket, nodes = FakeBucket(documents), FakeBucket(documents)

    async def run() -> None:
        catalogue = Catalogue(cast(EngineLink, bucket), 3)
        found: list[str] = []
        catalogue.listen(lambda destination: found.append(destination.name))
        await catalogue.refresh()
        await catalogue.refresh()
        assert found == ["a", "c"]
        client = cast(Client, SimpleNamespace(jetstream=lambda **_options: nodes))
        assert sorted(await read_destinations(client, {})) == ["a", "c"]

    asyncio.run(run())
    assert bucket.read == ["a", "b", "c"]  # each once


def test_a_document_that_was_removed_by_hand_keeps_none_behind_it_from_being_found() -> None:
    """The engine keeps a mark in its place, and goes on to say that there is such a key."""
    bucket = FakeBucket({"a": b"", "b": Destination("b").encode()})
    found: list[str] = []

    async def run() -> None:
        catalogue = Catalogue(cast(EngineLink, bucket), 3)
        catalogue.listen(lambda destination: found.append(destination.name))
        await catalogue.refresh()
        bucket.documents["a"] = Destination("a").encode()  # made again
        await catalogue.refresh()

    asyncio.run(run())
    assert found == ["b", "a"]


def test_an_identity_is_known_by_destination_where_several_share_a_stream() -> None:
    first, second = Destination("a.b", domain="d"), Destination("a.c", domain="d")
    known = [first.engine_identity("x:1"), second.engine_identity("x:1")]
    assert known == ["a.b:x:1", "a.c:x:1"]
    assert [first.own_identity(known[0]), second.own_identity(known[1])] == ["x:1", "x:1"]
    assert first.own_identity("x:1") == "x:1"  # of a former release
    alone = Destination("a.b")
    assert alone.engine_identity("a.b:1") == alone.own_identity("a.b:1") == "a.b:1"

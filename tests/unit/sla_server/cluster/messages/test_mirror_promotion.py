"""What a promotion says is missing, and how far one has come that was interrupted."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import pytest

from sla_server.cluster.messages import mirror_promotion
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind
from sla_server.cluster.messages.errors import MirrorRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_promotion import (
    MARGIN,
    MARK,
    Promotion,
    Stage,
    _config,
    _final,
    _next_sequence,
    _stage_of,
    plan,
    promote,
)
from sla_server.cluster.messages.mirror_records import BUCKET, ConsumerRecord, MirrorRecord
from sla_server.cluster.messages.mirror_streams import PROMOTED_LAST, promoted_last
from tests.support.mirrored import Died, StreamsLink

QUEUE = Destination("orders", replicas=1)
SEEN = MirrorRecord(1_000_000, 125, 30, 120, (ConsumerRecord("queue-orders", "sla.d.orders.orders", 95),))


def _promotion(last: int, seen: MirrorRecord | None) -> Promotion:
    return Promotion(QUEUE, "SLA_orders_mn3", "n3", Stage.LOST, 25, last, seen)


def test_a_record_comes_back_whole_and_a_strange_one_is_none() -> None:
    assert MirrorRecord.parse(SEEN.encode()) == SEEN
    for strange in (b"{}", b"[]", b"null", b"{", b'{"consumers": 5}', b'{"consumers": [{}]}'):
        with pytest.raises(ValueError):
            MirrorRecord.parse(strange)


@pytest.mark.parametrize(("last", "missing"), [(120, 5), (118, 5), (125, 0), (130, 0), (123, 2)])
def test_what_is_missing_is_what_the_primary_had_and_the_mirror_never_got(last: int, missing: int) -> None:
    assert _promotion(last, SEEN).missing == missing


def test_the_words_say_what_is_missing_what_comes_again_and_what_is_not_known() -> None:
    assert _promotion(120, SEEN).lines(43_000_000) == [
        "mirror SLA_orders_mn3 on n3 has 25 messages, up to 120",
        "the primary was last seen 42 s ago, with 30 messages, up to 125",
        "missing: of those 5 at most, and all that it stored after that moment",
        "again: what was acknowledged after that moment, or since the mirror was last trimmed, is handed out "
        "once more",
    ]
    first, *others = _promotion(120, None).lines(0)[1:]
    assert first == "it is not known what the primary had; whatever the mirror lacks is missing"
    assert others == _promotion(120, SEEN).lines(62_000_000)[4:]
    assert len(_promotion(120, SEEN).lines(61_000_000)) == 4


def test_the_words_say_who_must_be_restarted_when_the_record_is_old() -> None:
    """What the primary gave since may be more than is passed over."""
    *_, last = _promotion(120, SEEN).lines(62_000_000)
    assert last == (
        "restart first: programs that still hold messages of the lost primary. It may have given more than "
        "the 50,000 sequences that are passed over, and they would acknowledge other messages"
    )


def test_the_words_say_that_the_primary_was_set_back_before_it_was_lost() -> None:
    """Its record is from before."""
    *others, last = _promotion(120, dataclasses.replace(SEEN, is_set_back=True)).lines(43_000_000)
    assert others == _promotion(120, SEEN).lines(43_000_000)
    assert "under sequences that the mirror had is missing" in last


def test_no_sequence_that_the_lost_primary_may_have_given_is_given_again() -> None:
    own = {"state": {"last_seq": 120}}
    assert _next_sequence(_promotion(120, SEEN), own) == 125 + MARGIN + 1
    assert _next_sequence(_promotion(120, None), own) == 120 + MARGIN + 1


@pytest.mark.parametrize("config", [_config, _final])
def test_the_new_stream_says_up_to_where_its_messages_are_those_of_the_lost_primary(config: Any) -> None:
    """While it is filled, and afterwards: feeds read it whenever they make their consumer."""
    made = config(QUEUE, "SLA_orders_mn3", 51)
    assert made["metadata"] == {MARK: "SLA_orders_mn3", PROMOTED_LAST: "50"}
    assert promoted_last({"config": made}) == 50
    assert promoted_last({"config": {}}) == 0
    assert promoted_last({"config": {"metadata": {PROMOTED_LAST: "x"}}}) == 0


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({"mirror": {"name": "SLA_orders_mn3"}}, Stage.COPYING),
        ({"subjects": ["sla.d.orders._passed-over"]}, Stage.NUMBERS),
        ({"subjects": ["sla.d.orders.>"]}, Stage.SERVED),
    ],
)
def test_a_promotion_goes_on_where_it_was_interrupted(config: dict[str, Any], stage: Stage) -> None:
    primary = {"config": config | {"metadata": {MARK: "SLA_orders_mn3"}}, "cluster": {"leader": "n2"}}
    assert _stage_of(primary, "SLA_orders_mn3", {"config": {}}, QUEUE) is stage


@pytest.mark.parametrize("metadata", [{}, {"metadata": {MARK: "SLA_orders_mn2"}}])
def test_a_stream_that_a_program_has_made_in_between_is_not_taken_for_the_promoted_one(
    metadata: dict[str, Any],
) -> None:
    """Else the mirror would be removed, with all that is left of the destination."""
    primary = {"config": {"subjects": ["sla.d.orders.>"]} | metadata, "cluster": {"leader": "n2"}}
    assert _stage_of(primary, "SLA_orders_mn3", {"config": {}}, QUEUE) is Stage.LOST
    promotion = dataclasses.replace(_promotion(120, SEEN), discarded=7)
    assert "discarded: 7 messages of a stream SLA_orders" in promotion.lines(0)[1]


def _stream(last: int, messages: int = 0, **config: Any) -> dict[str, Any]:
    return {"config": config, "state": {"messages": messages, "last_seq": last}}


def _lost(*, last: int = 0, messages: int = 0, record: MirrorRecord | None = None) -> StreamsLink:
    """An engine without the primary, and with its mirror on n3."""
    link = StreamsLink(
        {"SLA_orders_mn3": _stream(last, messages, name="SLA_orders_mn3", mirror={"name": "SLA_orders"})}
    )
    link.answers[f"STREAM.PURGE.KV_{BUCKET}"] = {}
    if record is not None:
        link.record(record.encode())
    return link


def _catalogue(link: StreamsLink, destination: Destination) -> Catalogue:
    found = Catalogue(cast(EngineLink, link), 3)
    found.has_batches = True
    found._add(destination)  # as if it was read
    found.refresh = link.nothing  # type: ignore[method-assign]
    return found


def _plan(link: StreamsLink, destination: Destination = QUEUE) -> Promotion:
    return asyncio.run(plan(cast(EngineLink, link), _catalogue(link, destination), "orders", "n3"))


def test_of_several_mirrors_the_one_that_has_come_furthest_is_promoted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    link = _lost(last=120, messages=25, record=SEEN)
    link.streams["SLA_orders_mn4"] = _stream(123, mirror={"name": "SLA_orders"})
    link.streams["SLA_other_mn4"] = _stream(999, mirror={"name": "SLA_other"})
    with pytest.raises(MirrorRefused, match=r"further, to 123; this one to 120.*--node n4"):
        _plan(link)
    link.streams["SLA_orders_mn4"] = _stream(120, mirror={"name": "SLA_orders"})
    assert _plan(link).silent == ()
    # One that does not answer is named, for people to decide.
    monkeypatch.setattr(mirror_promotion, "SILENT_S", 0.0)  # no test waits for it
    link.answers["STREAM.INFO.SLA_orders_mn4"] = TimeoutError()
    found = _plan(link)
    assert found.silent == ("SLA_orders_mn4",)
    assert "another mirror, SLA_orders_mn4, does not answer" in found.lines(0)[1]


def test_a_topic_of_which_no_subscriber_is_known_is_not_promoted() -> None:
    """As it keeps what they want, it would be emptied."""
    topic = dataclasses.replace(QUEUE, kind=DestinationKind.TOPIC)
    with pytest.raises(MirrorRefused, match=r"who subscribes to orders.*lose all 25 messages"):
        _plan(_lost(last=120, messages=25), topic)
    assert _plan(_lost(last=120, messages=25, record=SEEN), topic).stage is Stage.LOST
    assert _plan(_lost(last=120), topic).stage is Stage.LOST  # there is nothing to lose
    assert _plan(_lost(last=120, messages=25)).stage is Stage.LOST  # a queue gives all of it to whoever comes


@pytest.mark.parametrize("kind", DestinationKind)
def test_a_promotion_of_an_empty_mirror_goes_on_wherever_it_was_killed(kind: DestinationKind) -> None:
    destination = dataclasses.replace(QUEUE, kind=kind)
    consumer = "queue-orders" if kind is DestinationKind.QUEUE else SEEN.consumers[0].name
    stages = set[Stage]()
    for dies_at in range(100):
        link = _lost(last=120, record=SEEN)
        link.dies_at = dies_at

        def attempt(link: StreamsLink = link) -> None:
            catalogue, engine = _catalogue(link, destination), cast(EngineLink, link)

            async def run() -> None:
                await promote(engine, catalogue, await plan(engine, catalogue, "orders", "n3"))

            asyncio.run(run())

        try:
            attempt()
        except Died:
            link.dies_at = -1
            stages.add(_plan(link, destination).stage)
            attempt()
        else:
            break
        assert set(link.streams) == {"SLA_orders"}
        made = link.streams["SLA_orders"]
        assert made["config"]["subjects"] == ["sla.d.orders.>"]
        assert made["config"]["metadata"][MARK] == "SLA_orders_mn3"
        assert made["state"]["last_seq"] == 125 + MARGIN  # the next message has a sequence that is new
        assert link.consumers["SLA_orders"] == {consumer}
        assert link.changes()[-1][0] == f"STREAM.PURGE.KV_{BUCKET}"  # its record, last of all
    assert stages == {Stage.LOST, Stage.NUMBERS, Stage.SERVED}


def test_a_mirror_is_not_promoted_beside_a_primary_that_lives() -> None:
    primary = {"config": {"subjects": ["sla.d.orders.>"]}, "cluster": {"leader": "n2"}}
    own = {"config": {"mirror": {"name": "SLA_orders"}}}
    with pytest.raises(MirrorRefused, match="the primary of orders is not lost: n2 leads"):
        _stage_of(primary, "SLA_orders_mn3", own, QUEUE)

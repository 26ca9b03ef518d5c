"""What a promotion says is missing, and how far one has come that was interrupted."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from sla_server.cluster.messages.catalogue import Destination
from sla_server.cluster.messages.errors import MirrorRefused
from sla_server.cluster.messages.mirror_promotion import (
    MARGIN,
    MARK,
    Promotion,
    Stage,
    _config,
    _final,
    _next_sequence,
    _stage_of,
)
from sla_server.cluster.messages.mirror_records import ConsumerRecord, MirrorRecord
from sla_server.cluster.messages.mirror_streams import PROMOTED_LAST, promoted_last

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
    assert _promotion(120, None).lines(0)[1:] == [
        "it is not known what the primary had; whatever the mirror lacks is missing"
    ]


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


def test_a_mirror_is_not_promoted_beside_a_primary_that_lives() -> None:
    primary = {"config": {"subjects": ["sla.d.orders.>"]}, "cluster": {"leader": "n2"}}
    own = {"config": {"mirror": {"name": "SLA_orders"}}}
    with pytest.raises(MirrorRefused, match="the primary of orders is not lost: n2 leads"):
        _stage_of(primary, "SLA_orders_mn3", own, QUEUE)

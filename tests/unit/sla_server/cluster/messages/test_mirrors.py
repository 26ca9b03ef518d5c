"""Names of mirrors, how far they are behind, what may be trimmed, and what the words say."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import nats.js.errors
import pytest

from sla_server.cluster.messages import names
from sla_server.cluster.messages.catalogue import Catalogue, Destination, DestinationKind, keep_queue
from sla_server.cluster.messages.errors import BadName, MirrorRefused
from sla_server.cluster.messages.link import EngineLink
from sla_server.cluster.messages.mirror_streams import (
    behind,
    holders_of,
    is_served,
    mirror_name,
    parts_of,
    refuse_mirror,
)
from sla_server.cluster.messages.mirrors import MirrorRow, floors, gaps, trim


@pytest.mark.parametrize("name", ["orders", "a.b_c", "_m", "a_mn1", "a__m", "x_", "SLA_orders_mn1"])
@pytest.mark.parametrize("node", ["n1", "m", "a-m", "9"])
def test_a_mirror_says_of_what_it_is_and_where_and_no_domain_has_such_a_name(name: str, node: str) -> None:
    stream = names.stream_name(name)
    assert parts_of(stream) is None
    assert parts_of(mirror_name(stream, node)) == (stream, node)


def test_what_cannot_be_a_mirror_is_refused() -> None:
    with pytest.raises(MirrorRefused, match="is a mirror itself, of SLA_orders"):
        mirror_name("SLA_orders_mn1", "n2")
    with pytest.raises(MirrorRefused, match="Make one of the destination"):
        refuse_mirror("SLA_orders_mn1")
    with pytest.raises(BadName, match="letters, digits and -"):
        mirror_name("SLA_orders", "n_1")
    with pytest.raises(BadName, match="255"):
        mirror_name(f"SLA_{'_d' * 100}", "n" * 60)
    assert parts_of("KV_SLA_MIRRORS") is None


def _state(first: int, last: int, messages: int, deleted: list[int] | None = None) -> dict[str, Any]:
    return {"first_seq": first, "last_seq": last, "messages": messages, "deleted": deleted}


@pytest.mark.parametrize(
    ("primary", "mirror", "expected"),
    [
        (_state(1, 100, 100), _state(0, 0, 0), 100),
        (_state(1, 100, 100), _state(1, 60, 60), 40),
        (_state(91, 100, 10), _state(1, 60, 60), 10),  # the others were acknowledged: nothing lacks them
        (_state(101, 100, 0), _state(1, 60, 60), 0),
        (_state(1, 100, 3), _state(1, 60, 60), 3),
        (_state(1, 100, 100), _state(1, 100, 100), 0),
        (_state(1, 99, 99), _state(1, 100, 100), 0),  # its answer is a moment older
    ],
)
def test_how_many_messages_a_mirror_lacks(primary: Any, mirror: Any, expected: int) -> None:
    assert behind(primary, mirror) == expected


def test_only_gaps_that_the_mirror_still_has_are_trimmed() -> None:
    assert gaps([2, 5, 6, 9, 12], _state(5, 10, 5, [6])) == [5, 9]
    assert gaps([], _state(1, 10, 10)) == []


def test_a_node_with_the_primary_or_a_backup_is_known_also_without_a_leader() -> None:
    cluster = {"leader": "n1", "replicas": [{"name": "n2"}, {"name": "n3", "offline": True}]}
    assert holders_of({"cluster": cluster}) == ("n1", "n2", "n3")
    assert holders_of({"cluster": {"replicas": [{"name": "n2"}]}}) == ("n2",)
    assert holders_of({}) == ()
    assert is_served({"config": {"subjects": ["sla.d.a.>"]}})
    assert not is_served({"config": {"subjects": ["sla.d.a.>"], "mirror": {"name": "SLA_a"}}})
    assert not is_served({"config": {}})


def test_a_mirror_says_that_it_is_asynchronous_and_how_far_behind() -> None:
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1")
    assert row.text == "asynchronous copy, does not run"
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, hears_primary=True, behind_s=0.0)
    assert row.text == "asynchronous copy, 0 messages / 0 s behind"
    row = MirrorRow(
        "SLA_a_mn1", "SLA_a", "n1", is_running=True, hears_primary=True, behind_messages=1234, behind_s=61.4
    )
    assert row.text == "asynchronous copy, 1,234 messages / 61 s behind"
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, behind_messages=7, behind_s=3600.0)
    assert row.text == (
        "asynchronous copy, its primary does not answer: 7 messages behind when it was heard of last, "
        "3,600 s ago"
    )
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True)
    assert "an unknown time ago" in row.text
    row = MirrorRow("SLA_a_mn1", "SLA_a", "n1", is_running=True, is_promoted=True)
    assert "promotion was begun" in row.text


class FakeLink:
    """Answers of the engine by subject, and what was asked."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def ask(self, subject: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((subject, body))
        answer = self.answers.get(subject, nats.js.errors.NotFoundError(code=404, err_code=10059))
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    def changes(self) -> list[tuple[str, dict[str, Any]]]:
        return [(subject, body) for subject, body in self.asked if ".INFO." not in subject]


def _trimmed(primary: Any, own: Any, **config: Any) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the engine beside questions; ``deleted`` counts."""
    for state in (primary, own):
        state["num_deleted"] = len(state["deleted"] or ())
    of_primary = {"name": "SLA_a", "subjects": ["sla.d.a.>"]} | config
    link = FakeLink(
        {
            "STREAM.INFO.SLA_a": {"state": primary, "config": of_primary},
            "STREAM.INFO.SLA_a_mn1": {"state": own, "config": {"mirror": {"name": "SLA_a"}}},
            "STREAM.PURGE.SLA_a_mn1": {"purged": 3},
            "STREAM.MSG.DELETE.SLA_a_mn1": {"success": True},
        }
    )
    asyncio.run(trim(cast(EngineLink, link), "SLA_a_mn1"))
    return link.changes()


def test_what_the_primary_acknowledged_is_removed_from_the_mirror() -> None:
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9)) == [("STREAM.PURGE.SLA_a_mn1", {"seq": 6})]
    assert _trimmed(_state(1, 9, 7, [4, 5]), _state(1, 8, 7, [5])) == [
        ("STREAM.MSG.DELETE.SLA_a_mn1", {"seq": 4, "no_erase": True})
    ]


def test_a_mirror_is_not_emptied_after_a_primary_that_was_made_again_or_is_none() -> None:
    assert _trimmed(_state(0, 0, 0), _state(1, 9, 9)) == []
    assert _trimmed(_state(8, 8, 1), _state(1, 9, 9)) == []  # it has stored less than was copied from it
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9), mirror={"name": "SLA_a_mn1"}) == []
    assert _trimmed(_state(6, 9, 4), _state(1, 9, 9), subjects=[]) == []


def test_a_queue_has_its_consumer_before_a_mirror_could_empty_it_and_a_topic_needs_none() -> None:
    link = FakeLink({"CONSUMER.DURABLE.CREATE.SLA_a.queue-a": {}})
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("a")))
    [(subject, body)] = link.changes()
    assert subject == "CONSUMER.DURABLE.CREATE.SLA_a.queue-a"
    assert body["action"] == "create"
    assert body["config"]["filter_subject"] == "sla.d.a.a"
    link = FakeLink({"CONSUMER.INFO.SLA_a.queue-a": {}})
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("a")))
    asyncio.run(keep_queue(cast(EngineLink, link), Destination("b", DestinationKind.TOPIC)))
    assert link.changes() == []


def test_destinations_of_the_cluster_itself_belong_to_no_domain_of_a_mirror() -> None:
    catalogue = Catalogue(cast(EngineLink, None), 3)
    for found in (Destination("a"), Destination("b", domain="a"), Destination("_DMQ"), Destination("c")):
        catalogue._add(found)  # as if it was read
    assert [found.name for found in catalogue.of_stream("SLA_a")] == ["a", "b"]
    assert catalogue.of_stream(Destination("_DMQ").stream) == []


def test_what_all_consumers_of_a_subject_have_acknowledged_is_kept_for_no_mirror() -> None:
    def consumer(subject: str, floor: int) -> dict[str, Any]:
        return {"config": {"filter_subject": subject}, "ack_floor": {"stream_seq": floor}}

    found = floors([consumer("a", 7), consumer("a", 5), consumer("b", 9), consumer("c", 0), consumer("c", 9)])
    assert found == {"a": 5, "b": 9}

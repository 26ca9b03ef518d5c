"""When a message is dead, and what a consumer remembers."""

from __future__ import annotations

from sla_server.cluster.messages.catalogue import Destination, DestinationKind
from sla_server.cluster.messages.consumer import EXPIRES, Seen, cause_of_death, engine_name


def test_cause_of_death() -> None:
    assert cause_of_death({}, 3, 3, 0) == ""
    assert cause_of_death({}, 4, 3, 0) == "handed out 3 times and never acknowledged"
    assert cause_of_death({EXPIRES: "100"}, 1, 3, 99) == ""
    assert cause_of_death({EXPIRES: "100"}, 1, 3, 100) == "expired"
    assert cause_of_death({EXPIRES: "soon"}, 1, 3, 100) == ""


def test_the_oldest_identity_is_forgotten_first() -> None:
    seen = Seen(2)
    for identity in ("a", "b", "a", "c"):
        seen.add(identity)
    assert [identity in seen for identity in "abc"] == [True, False, True]


def test_consumers_of_a_queue_are_one_to_the_engine() -> None:
    queue, topic = Destination("orders.eu"), Destination("news", DestinationKind.TOPIC)
    assert engine_name(queue, "a") == engine_name(queue, "b") == "queue-orders_deu"
    assert engine_name(topic, "a.b") == "a_db-news" != engine_name(topic, "a_b")

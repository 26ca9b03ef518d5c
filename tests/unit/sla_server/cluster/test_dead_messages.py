"""Dead messages: what is known of one, and with which headers it goes to its origin again."""

from __future__ import annotations

from nats.js.api import RawStreamMsg

from sla_server.cluster.dead_messages import dead_message
from sla_server.cluster.messages.consumer import ORIGIN, REASON
from sla_server.cluster.messages.fragments import FIRST_IDENTITY
from sla_server.cluster.messages.producer import EXPIRES, IDENTITY


def test_a_dead_message_keeps_what_its_sender_gave_it_and_gets_an_identity_of_its_own() -> None:
    raw = RawStreamMsg(
        subject="sla.d.__DMQ._DMQ",
        seq=7,
        data=b"paid",
        headers={
            ORIGIN: "orders.eu",
            REASON: "expired",
            IDENTITY: "dead:orders.eu:x",
            EXPIRES: "5",
            FIRST_IDENTITY: "x",
            "Colour": "red",
        },
    )
    message = dead_message(raw)
    assert (message.sequence, message.origin, message.reason) == (7, "orders.eu", "expired")
    assert message.identity == "dead:orders.eu:x"
    assert message.headers_again == {
        FIRST_IDENTITY: "x",
        "Colour": "red",
        IDENTITY: "again:SLA___DMQ:7",
    }


def test_one_without_headers_or_content_is_one_all_the_same() -> None:
    message = dead_message(RawStreamMsg(subject="s", seq=1))
    assert (message.origin, message.reason, message.data) == ("", "", b"")

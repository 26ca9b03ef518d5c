"""What each of two servers remembers of the other one's deliveries, and how much of it."""

from __future__ import annotations

from typing import Any

from pmdaemon.wire.messages.mirror import MOST_RECIPIENTS, MirrorConfirmed, MirroredQueue
from sla_server.events.pair_ledger import MOST_DELIVERED, PartnerLedger
from sla_server.events.pair_store import PartnerNotes
from sla_server.events.queue import QueuedEvent
from tests.support.deliveries import event

QUEUE = "0123456789abcdef"


def ledger() -> PartnerLedger:
    made = PartnerLedger(PartnerNotes())
    made.greeted([MirroredQueue("main", QUEUE)])
    return made


def taken(event_id: str, seq: int, queue_id: str = QUEUE, **more: Any) -> QueuedEvent:
    """What was taken over from a queue of the partner."""
    return QueuedEvent(event(1, event_id=event_id), origin=queue_id, origin_seq=seq, **more)


def test_recipients_that_the_partner_names_no_more_are_forgotten() -> None:
    known = ledger()
    for turn in range(5):
        known.confirmed(MirrorConfirmed((QUEUE,), {f"r{turn}-{n}": (1,) for n in range(10)}, {QUEUE: 1}))
    assert sorted(known.notes().cursors) == [f"r4-{n}" for n in range(10)]


def test_deliveries_of_the_partner_are_kept_for_so_many_recipients() -> None:
    known = ledger()
    for number in range(MOST_RECIPIENTS + 1):
        known.delivered_there(f"r{number}", ["e1"])
    item = QueuedEvent(event(1, event_id="e1"))
    assert known.decide(item, "r0") is None
    assert known.decide(item, "r1") is not None
    assert known.decide(item, f"r{MOST_RECIPIENTS}") is not None


def test_both_servers_remember_as_many_deliveries() -> None:
    survivor, origin = ledger(), ledger()
    identities = [f"e{number}" for number in range(MOST_DELIVERED + 5)]
    survivor.take(taken(identity, seq) for seq, identity in enumerate(identities, 1))
    survivor.report(
        {"event_id": each, "recipient": "r", "delivery_id": each, "state": "confirmed"} for each in identities
    )
    assert survivor.delivered() == {"r": identities[5:]}
    origin.delivered_there("r", survivor.delivered()["r"])
    again = [each for each in identities if origin.decide(QueuedEvent(event(1, event_id=each)), "r") is None]
    assert again == identities[:5]


def test_nothing_is_left_for_a_partner_that_is_away() -> None:
    known = ledger()
    known.lost()
    identities = [f"e{number}" for number in range(MOST_DELIVERED + 5)]

    def deliver(count: int) -> None:
        known.report(
            {"event_id": each, "recipient": "r", "delivery_id": each, "state": "confirmed"}
            for each in identities[:count]
        )

    known.take(taken(identity, seq) for seq, identity in enumerate(identities, 1))
    deliver(10)
    assert known.unsent() == {}
    assert known.delivered() == {"r": identities[:10]}  # the partner has dialled
    deliver(len(identities))
    assert known.unsent() == {"r": identities[5:]}
    assert known.unsent() == {}
    known.stop_sending()
    deliver(10)
    assert known.unsent() == {}


def test_of_each_reminder_the_partners_own_place_is_remembered() -> None:
    """The first is in its queue of events, the second one is due later: it may lose what it knows of one."""
    known, later_id = PartnerLedger(PartnerNotes()), "fedcba9876543210"
    known.greeted([MirroredQueue("main", QUEUE), MirroredQueue("later", later_id)])
    known.lost()
    first, second = (
        taken("e1", 9, recipient="r", reminder=1),
        taken("e1", 6, later_id, recipient="r", reminder=2),
    )
    known.take([first])
    known.take([second])
    rows = [
        {"event_id": "e1", "recipient": "r", "delivery_id": identity, "state": "confirmed"}
        for identity in (first.identity, second.identity, "e1/3")
    ]
    known.report(rows)
    # The partner, back, has done with the second; where it is in its queue of events it has not reached 9.
    known.confirmed(
        MirrorConfirmed((QUEUE, later_id), {"r": (8, 0)}, {QUEUE: 8}, open_seqs=(), open_through=6)
    )
    known.prune()
    assert known.delivered() == {"r": [first.identity]}, "so that the partner does not send it again"

"""States of transactions as accounts may store them: any account with a role can write any bytes there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from sla_server.cluster.messages import transaction_records
from sla_server.cluster.messages.transaction_records import (
    KEPT_S,
    MOST_MESSAGES,
    LockedMessage,
    Mark,
    Record,
    Staged,
    State,
    lock_subject,
    state_subject,
)
from tests.support.message_engine import Engine, EngineSession

REPLY = "$JS.ACK.SLA_eu.queue-eu.1.7.1.1.0"
TAKEN = LockedMessage("SLA_eu", "queue-eu", 7, REPLY)
SOUND = Record(State.COMMITTED, "o1", "s1", 1_000_000, (Staged("SLA_us", 3, 5),), (TAKEN,))
NEST = "[" * 100_000


def stored(**changes: Any) -> bytes:
    """A sound state with some keys in another form."""
    return json.dumps(json.loads(SOUND.encode()) | changes).encode()


def taken(*changes: tuple[int, Any]) -> list[list[Any]]:
    part: list[Any] = list(TAKEN)
    for place, value in changes:
        part[place] = value
    return [part]


HOSTILE = {
    "no JSON": b"\xff\xfe",
    "nested too deeply": NEST.encode(),
    "no map": b"[]",
    "infinite time": stored().replace(b"1000000", b"1e999"),
    "time of another type": stored(until_unix_us="soon"),
    "time beyond 63 bits": stored(until_unix_us=1 << 63),
    "owner that is a list": stored(owner=[]),
    "owner that is long": stored(owner="x" * 10_000),
    "session that is a number": stored(session=1),
    "staged that is a map": stored(staged={}),
    "staged places that are texts": stored(staged=[["SLA_us", "3", "5"]]),
    "staged places in the wrong order": stored(staged=[["SLA_us", 5, 3]]),
    "staged in another stream": stored(staged=[["KV_SLA_SHARED", 3, 5]]),
    "staged in a subject": stored(staged=[["SLA_us.>", 3, 5]]),
    "too many staged": stored(staged=[["SLA_us", 1, 1]] * (MOST_MESSAGES + 1)),
    "a part too few": stored(staged=[], taken=[["SLA_eu", "queue-eu", 7]]),
    "taken from a wildcard": stored(staged=[], taken=taken((0, ">"))),
    "taken by a wildcard": stored(staged=[], taken=taken((1, "*"))),
    "taken place that is a text": stored(staged=[], taken=taken((2, "7"))),
    "reply that is a destination": stored(staged=[], taken=taken((3, "sla.d.eu.eu"))),
    "reply that is a document of all nodes": stored(staged=[], taken=taken((3, "$KV.SLA_SHARED.accounts"))),
    "reply of another stream": stored(staged=[], taken=taken((3, REPLY.replace("SLA_eu", "SLA_us")))),
    "reply of another consumer": stored(staged=[], taken=taken((3, REPLY.replace("queue-eu", "queue-us")))),
    "reply of another message": stored(staged=[], taken=taken((3, REPLY.replace(".7.", ".8.")))),
    "reply with a line of its own": stored(staged=[], taken=taken((3, REPLY + "\r\nPUB x 0\r\n"))),
}


def test_what_a_session_stores_is_read() -> None:
    assert Record.parse(SOUND.encode()) == SOUND


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_another_form_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        Record.parse(data)


@pytest.fixture
def engine() -> Engine:
    made = Engine(has_batches=False)
    made.add("eu")
    made.add("us")
    return made


@pytest.fixture
def session(engine: Engine) -> Iterator[EngineSession]:
    made = EngineSession(engine)
    made.link.run(made.register.make(5.0))
    yield made
    made.close()


def put(engine: Engine, subject: str, data: bytes) -> None:
    answer = engine.request(subject, data, {"Nats-Msg-Id": subject})
    assert "error" not in answer


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("is_old", [False, True], ids=["young", "old"])
def test_a_state_of_another_form_is_passed_over_and_the_next_is_ended(
    engine: Engine, session: EngineSession, data: bytes, is_old: bool
) -> None:
    put(engine, state_subject("bad"), data)
    record = Record(State.OPEN, "o1", "s1", engine.clock.unix_us() + 1_000_000)
    put(engine, state_subject("left"), record.encode())
    engine.clock.advance(2 * KEPT_S if is_old else 2.0)
    before = len(engine.stored("eu")), len(engine.stored("us"))
    assert session.link.run(session.recovery.recover()).rolled_back == 1
    assert (len(engine.stored("eu")), len(engine.stored("us"))) == before
    assert not engine.acknowledged
    assert not [subject for subject in session.link.asked if "SLA_SHARED" in subject]


def test_a_lock_of_any_bytes_belongs_to_no_transaction(engine: Engine, session: EngineSession) -> None:
    put(engine, lock_subject(*TAKEN[:3]), b"\xff\xfe")
    put(engine, state_subject("done"), SOUND.encode())
    engine.clock.advance(2 * KEPT_S)
    session.link.run(session.recovery.recover())
    assert not session.link.run(session.register.is_taken("SLA_eu", "queue-eu", 7))


def test_no_state_is_open_for_longer_than_a_transaction_can_be(
    engine: Engine, session: EngineSession
) -> None:
    """Else whoever stores one that is open for ever stops the consumers of what bears its mark."""
    put(engine, state_subject("ever"), Record(State.OPEN, "o1", "s1", (1 << 62) - 1).encode())
    mark = Mark("ever", "o1")
    assert session.link.run(session.register.final("ever", 5.0)) is None
    engine.clock.advance(transaction_records.MOST_OPEN_S + 1)
    assert not session.link.run(session.register.is_committed(mark))
    assert session.link.run(session.recovery.recover()).rolled_back == 0

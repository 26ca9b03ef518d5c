"""A node makes the stream of transactions for accounts, which may not, and ends what they have left."""

from __future__ import annotations

from typing import cast

import pytest
from nats.aio.client import Client

from sla_server.cluster import transaction_keeper
from sla_server.cluster.messages.catalogue import Catalogue, Destination
from sla_server.cluster.messages.transaction_recovery import PassResult
from sla_server.cluster.transaction_keeper import TransactionKeeper
from tests.support.message_engine import Died, Engine, EngineSession, Fault, LossyLink


class OnePassDone(Exception):
    """The keeper would wait for the next one now."""


def one_pass(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, has_accounts: bool) -> PassResult:
    results = []

    def note(result: PassResult) -> float:
        results.append(result)
        return 30.0

    async def sleep(_seconds: float) -> None:
        raise OnePassDone

    monkeypatch.setattr(transaction_keeper, "pause_s", note)
    monkeypatch.setattr(transaction_keeper.asyncio, "sleep", sleep)
    link = LossyLink(engine)

    async def create(_catalogue: Catalogue, wanted: Destination) -> Destination:
        return engine.add(wanted.name)

    monkeypatch.setattr(Catalogue, "create", create)
    keeper = TransactionKeeper("n1", 3, lambda: has_accounts, engine.clock)
    with pytest.raises(OnePassDone):
        link.run(keeper.run(cast(Client, link)))
    link.close()
    return results[0]


def test_the_stream_is_made_once_there_are_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(has_batches=True)
    assert one_pass(engine, monkeypatch, has_accounts=False) == PassResult()
    assert "SLA_TRANSACTIONS" not in engine.streams
    one_pass(engine, monkeypatch, has_accounts=True)
    assert list(engine.destinations) == ["_DMQ"]
    assert "SLA_TRANSACTIONS" in engine.streams


def test_what_an_account_has_left_open_is_rolled_back_by_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(has_batches=True)
    engine.add("eu")
    session = EngineSession(
        engine, lambda _step: Fault.DIES_BEFORE if engine.destinations and engine.stored("eu") else None
    )
    transaction = session.transaction("left")
    transaction.send("eu", b"1")
    with pytest.raises(Died):
        transaction.commit()
    session.close()
    engine.clock.advance(100.0)
    assert one_pass(engine, monkeypatch, has_accounts=True).rolled_back == 1


def test_an_account_removes_nothing_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not let it; it would wait for an answer of which there is none."""
    engine = Engine(has_batches=True)
    for name in ("eu", "us"):
        engine.add(name)
    engine.streams["SLA_us"].most = 0
    session = EngineSession(engine)
    session.link._account = "shop"
    transaction = session.transaction()
    for name in ("eu", "us"):
        transaction.send(name, b"1")
    with pytest.raises(Exception, match="maximum messages"):
        transaction.commit()
    assert len(engine.stored("eu")) == 1
    assert not [subject for subject in session.link.asked if "DELETE" in subject]
    assert session.visible("eu") == []
    session.close()

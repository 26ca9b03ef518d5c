"""Credit: what may be under way never exceeds it, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages.credit import PullLedger, PullRequest, ReceiveShares, Unit, Window
from sla_server.cluster.messages.errors import BadSettings


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5), st.integers(1, 60))
def test_a_window_never_exceeds_its_limits(sizes: list[int], messages: int, size_bytes: int) -> None:
    window = Window(messages, size_bytes)
    under_way: list[int] = []
    for size in sizes:
        while not window.has_room(size):
            window.give(under_way.pop(0))
        window.take(size)
        under_way.append(size)
        assert window.messages == len(under_way) <= messages
        assert window.bytes == sum(under_way)
        assert window.bytes <= size_bytes or len(under_way) == 1
    for size in under_way:
        window.give(size)
    assert (window.messages, window.bytes) == (0, 0)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 50))), st.integers(1, 6), st.integers(1, 40))
def test_a_consumer_holds_its_credit_at_most(
    steps: list[tuple[int, int]], credit: int, credit_bytes: int
) -> None:
    """The engine keeps to what was asked for; a message larger than all credit comes alone."""
    ledger = PullLedger(credit, credit_bytes)
    asked: PullRequest | None = None
    held: list[int] = []
    left_bytes = 0
    for step, size in steps:
        if step == 0 and (request := ledger.request()) is not None:
            asked, left_bytes = request, request.bytes or 10**9
            assert request.messages <= credit - len(held)
        elif step == 1 and ledger.requested and size <= left_bytes:
            ledger.deliver(size)
            held.append(size)
            left_bytes -= size
        elif step == 2 and ledger.requested and size > left_bytes and asked is not None:
            ledger.end(asked.number, is_too_large=True)
        elif step == 3 and asked is not None:
            ledger.end(asked.number)
        elif step == 4 and held:
            ledger.release(held.pop(0))
        assert ledger.delivered == len(held) <= credit
        assert ledger.delivered_bytes == sum(held)
        assert sum(held) <= credit_bytes or len(held) == 1
    for size in held:
        ledger.release(size)
    while not ledger.delivered:
        if (request := ledger.request()) is not None:
            asked = request
        assert asked is not None
        if not asked.bytes or asked.bytes >= 100:
            ledger.deliver(100)  # whatever has happened, any message comes in the end
        else:
            ledger.end(asked.number, is_too_large=True)


def test_the_end_of_an_earlier_request_does_not_matter() -> None:
    ledger = PullLedger(3, 100)
    assert ledger.request() == (1, 3, 100)
    ledger.end(1)
    assert ledger.request() == (2, 3, 100)
    ledger.end(1)
    assert ledger.request() is None
    for _ in range(3):
        ledger.deliver(30)
    assert ledger.request() is None
    ledger.release(30)
    assert ledger.request() == (3, 1, 40)


def test_what_is_on_its_way_when_a_request_has_ended_is_waited_for() -> None:
    ledger = PullLedger(5, 100)
    assert ledger.request() == (1, 5, 100)
    ledger.deliver(40)
    ledger.end(1, unserved=3, is_too_large=True)  # one more was sent, and comes after this
    assert ledger.request() is None
    ledger.release(40)
    assert ledger.request() is None
    ledger.deliver(30)
    assert ledger.request() == (2, 4, 70)


def test_a_session_divides_what_it_may_have_in_hand() -> None:
    shares = ReceiveShares(10, 1000)
    ledgers = [PullLedger(100, 400) for _ in range(3)]
    for ledger in ledgers:
        shares.add(ledger)
    assert {(ledger.credit, ledger.credit_bytes) for ledger in ledgers} == {(3, 333)}
    shares.remove(ledgers[0])
    assert (ledgers[1].credit, ledgers[1].credit_bytes) == (5, 400)
    for _ in range(20):
        shares.add(PullLedger(1, 1))
    assert ledgers[1].credit == 1


def test_which_window_is_full() -> None:
    window = Window(2, 100)
    assert window.full_of(200) is None  # alone it passes
    window.take(60)
    assert (window.full_of(40), window.full_of(41)) == (None, Unit.BYTES)
    window.take(40)
    assert window.full_of(1) is Unit.MESSAGES
    ledger = PullLedger(2, 100)
    ledger.deliver(100)
    assert ledger.full_of is Unit.BYTES
    ledger.deliver(0)
    assert ledger.full_of is Unit.MESSAGES


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(BadSettings, match="limit_messages is 0"):
        Window(0, 1)
    with pytest.raises(BadSettings, match="credit is 0"):
        PullLedger(0, 1)
    with pytest.raises(BadSettings, match="credit_bytes is 0"):
        PullLedger(1, 0)
    with pytest.raises(BadSettings, match="received_bytes is 0"):
        ReceiveShares(1, 0)

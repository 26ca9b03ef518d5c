"""Credit: what may be under way never exceeds it, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages.credit import PullLedger, Window
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


@given(st.lists(st.sampled_from(["request", "deliver", "end", "release"])), st.integers(1, 6))
def test_a_consumer_holds_its_credit_at_most(steps: list[str], credit: int) -> None:
    ledger = PullLedger(credit)
    for step in steps:
        if step == "request":
            asked = ledger.request()
            assert asked is None or asked[1] == credit - ledger.delivered
        elif step == "deliver" and ledger.requested:
            ledger.deliver()
        elif step == "end":
            ledger.end(ledger.last_request)
        elif step == "release" and ledger.delivered:
            ledger.release()
        assert 0 <= ledger.delivered + ledger.requested <= credit


def test_the_end_of_an_earlier_request_does_not_matter() -> None:
    ledger = PullLedger(3)
    assert ledger.request() == (1, 3)
    ledger.end(1)
    assert ledger.request() == (2, 3)
    ledger.end(1)
    assert ledger.request() is None
    for _ in range(3):
        ledger.deliver()
    assert ledger.request() is None
    ledger.release()
    assert ledger.request() == (3, 1)


def test_limits_below_one_are_refused() -> None:
    with pytest.raises(BadSettings, match="limit_messages is 0"):
        Window(0, 1)
    with pytest.raises(BadSettings, match="credit is 0"):
        PullLedger(0)

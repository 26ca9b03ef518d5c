"""Names, what they are to the engine, and the three kinds of selector."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sla_server.cluster.messages.errors import BadName, BadSelector
from sla_server.cluster.messages.names import Selector, check_name, encode, stream_name, subject

NAMES = st.from_regex(r"[a-c_]{1,3}(\.[a-c_d]{1,3}){0,3}", fullmatch=True)


@given(NAMES, NAMES)
def test_no_two_names_are_one_token(one: str, other: str) -> None:
    assert (encode(one) == encode(other)) == (one == other)
    assert "." not in encode(one)


def test_names_for_the_engine() -> None:
    assert stream_name("orders.eu_1") == "SLA_orders_deu__1"
    assert subject("orders.eu", "orders.eu") == "sla.d.orders_deu.orders.eu"


@pytest.mark.parametrize("name", ["", "a..b", "a.*", "a b", ".a", "a" * 121, "_DMQ", "_x.y", "ä"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(BadName):
        check_name(name)


def test_reserved_names_are_for_those_who_may() -> None:
    check_name("_DMQ", reserved=True)


@pytest.mark.parametrize(
    ("text", "matching", "others"),
    [
        ("orders.eu", ["orders.eu"], ["orders", "orders.eu.paid", "ordersxeu"]),
        ("orders.*", ["orders.eu"], ["orders", "orders.eu.paid"]),
        ("orders.>", ["orders.eu", "orders.eu.paid"], ["orders", "_orders.eu"]),
        ("*.eu", ["orders.eu"], ["_LOG.eu", "eu"]),
        (">", ["a", "a.b"], ["_DMQ", "_LOG.n1"]),
        ("_DMQ", ["_DMQ"], ["_LOG"]),
        ("_LOG.>", ["_LOG.n1"], ["_LOG"]),
        ("glob:o*.e?", ["orders.eu", "o.x.eu"], ["orders.e", "_o.eu"]),
        ("glob:_*", ["_DMQ"], ["a"]),
        (r"regex:orders\.(eu|us)", ["orders.eu", "orders.us"], ["orders.eux", "x.orders.eu"]),
        ("regex:.*", ["a.b"], ["_DMQ"]),
    ],
)
def test_selectors(text: str, matching: list[str], others: list[str]) -> None:
    selector = Selector(text)
    assert [name for name in matching + others if selector.matches(name)] == matching


@pytest.mark.parametrize("text", ["", "a.>.b", "a*", "a..b", "regex:(", "a b"])
def test_selectors_that_are_refused(text: str) -> None:
    with pytest.raises(BadSelector, match="selector"):
        Selector(text)

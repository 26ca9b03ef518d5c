"""The control book and the watermarks."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.errors import MalformedFrame
from pmdaemon.poller.positions import Watermarks
from pmdaemon.poller.standing_caps import LEASE_FRESH_NS, StandingCaps
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.messages.orders import CapsOrder, ThresholdsOrder
from pmdaemon.wire.messages.server import DurableNotice, WatermarksNotice


def test_newest_caps_are_kept_per_gateway_and_unchanged() -> None:
    book = StandingCaps()
    caps = [{"volume": "v", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 12.5}]
    book.set_caps(CapsOrder.parse({"gw": "a", "gen": 4, "lease_us": 30, "caps": []}))
    order = CapsOrder.parse({"gw": "a", "gen": 5, "lease_us": 30, "caps": caps, "later": 1})
    encoded = book.set_caps(order)
    assert (order.gateway_id, order.gen) == ("a", 5)
    sent = frame.decode(encoded)
    assert sent.kind == Kind.CAPS
    assert sent.header == {"gen": 5, "lease_us": 30, "caps": caps, "later": 1}
    assert book.caps_of("a") == (5, encoded)
    assert book.caps_of("b") is None


def test_more_caps_than_a_header_holds_are_folded_for_the_pair_and_for_the_agent() -> None:
    caps = tuple({"volume": f"v{n}" + "x" * 120, "cost_per_s": 12.5} for n in range(600))
    order = CapsOrder.of("a", CapSet(5, 30, caps))
    passed_on = CapsOrder.parse(frame.unfold(frame.decode(order.encode())).header)
    sent = frame.decode(StandingCaps().set_caps(passed_on))
    assert sent.header.keys() == {"folded"}
    kept = CapSet.parse(frame.unfold(sent).header)
    assert (sent.kind, kept.gen, [cap["volume"] for cap in kept.caps]) == (
        Kind.CAPS,
        5,
        [cap["volume"] for cap in caps],
    )


def test_thresholds_are_passed_on_without_the_gateways_name() -> None:
    entry = {"volume": "v", "client": "*", "io": "any", "threshold_us": 5}
    order = ThresholdsOrder.parse({"gw": "a", "version": 2, "entries": [entry], "later": 1})
    sent = frame.decode(order.thresholds_frame())
    assert (order.gateway_id, sent.kind) == ("a", Kind.THRESHOLDS)
    assert sent.header == {"version": 2, "entries": [entry], "later": 1}


_BAD_CAPS = [{}, {"gw": 1, "gen": 1}, {"gw": "a"}, *({"gw": "a", "gen": gen} for gen in ("1", -1, 1 << 63))]


@pytest.mark.parametrize("header", _BAD_CAPS)
def test_bad_caps(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame):
        CapsOrder.parse(header)


@pytest.mark.parametrize("header", [{}, {"gw": "a"}, {"gw": "a", "version": None}, {"gw": 1, "version": 1}])
def test_bad_thresholds(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame):
        ThresholdsOrder.parse(header)


def test_lease_is_fresh_for_three_seconds() -> None:
    book = StandingCaps()
    assert not book.lease_is_fresh(0)
    book.renew_lease(100)
    assert book.lease_is_fresh(100 + LEASE_FRESH_NS - 1)
    assert not book.lease_is_fresh(100 + LEASE_FRESH_NS)
    book.renew_lease(200)
    assert book.lease_is_fresh(100 + LEASE_FRESH_NS)


def test_watermarks_open_and_learn() -> None:
    marks = Watermarks()
    assert marks.incarnation is None
    assert marks.open(1, [("a", 7, 5), ("a", 8, 2)])
    assert not marks.open(1, [("b", 1, 9)])
    marks.learn([("a", 7, 9), ("a", 8, 1)])
    assert marks.of("a") == {7: 9, 8: 2}
    assert marks.of("b") == {1: 9}
    assert marks.open(2, [("a", 7, 6)])
    assert marks.of("a") == {7: 6}
    assert marks.of("b") == {}


def test_parse_notice() -> None:
    for notice in (WatermarksNotice, DurableNotice):
        parsed = notice.parse({"inc": 3, "hw": [["a", 1, 2]]})
        assert (parsed.incarnation, parsed.rows) == (3, [["a", 1, 2]])


@pytest.mark.parametrize(
    "header",
    [{}, {"inc": "x", "hw": []}, {"inc": 1}, {"inc": 1, "hw": [["a", 1]]}, {"inc": 1, "hw": [[b"a", 1, 2]]}],
)
def test_bad_notice(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame):
        DurableNotice.parse(header)


def test_the_bytes_of_orders_are_those_of_before() -> None:
    """From services to the pair, from it to the agent, and to the pair that gets the shard."""
    entry = {"volume": "v", "ops_per_s": None, "bytes_per_s": None, "cost_per_s": 12.5}
    clients, groups = [entry | {"client": "c"}], [{"group": "g", "ops_per_s": 1.0, "volumes": {"v": 1.0}}]
    caps = CapSet(5, 30, (entry,), tuple(clients), tuple(groups))
    header = {"gen": 5, "lease_us": 30, "caps": [entry], "clients": clients, "groups": groups}
    order = CapsOrder.of("a", caps)
    assert order.encode() == frame.encode(Kind.SET_CAPS, {"gw": "a", **header})
    later = header | {"later": 1}
    passed_on = CapsOrder.parse({"gw": "a", **later})
    assert passed_on.caps_frame() == frame.encode(Kind.CAPS, later)
    assert passed_on.encode() == frame.encode(Kind.SET_CAPS, {"gw": "a", **later})
    assert CapsOrder.parse({"gw": "a", "gen": 1}).caps_frame() == frame.encode(Kind.CAPS, {"gen": 1})

"""Shares of caps are worked out where something changed, and gateways looked at while they are due."""

from __future__ import annotations

import pytest

from pmdaemon.wire.rates import Rates
from sla_server.services.control.cap_shares import CapShares
from sla_server.services.control.decisions import SetCaps
from tests.support.worlds import A, B, Feeder, caps_of, controller, exports, streams

RATES = Rates(cost_per_s=9.0)
USE = (100, 5.0)


def test_a_gateway_is_due_when_what_it_should_hold_may_differ() -> None:
    made = CapShares()
    made.put("v", {A: RATES, B: RATES})
    assert (made.due, made.at(A)) == ({A, B}, {"v": RATES})
    made.due.clear()
    made.put("v", {B: RATES})
    assert (made.due, dict(made.at(A)), made.at(B)) == ({A, B}, {}, {"v": RATES})
    made.put("v", {})
    assert dict(made.at(B)) == {}


def test_a_lease_ends_once() -> None:
    made = CapShares()
    made.lapsing[A] = 5.0
    assert (made.lapsed(4), made.lapsed(5), made.lapsed(6)) == ([], [A], [])


def test_a_quiet_tick_works_out_no_share_and_a_cut_those_of_its_gateway() -> None:
    many = tuple(f"w{n:03}" for n in range(50))
    fed = Feeder(controller(()), (A, ("v1", "v2")), (B, many))
    fed.controller.set_policy_caps(1, dict.fromkeys(("v1", "v2", *many), 900.0))
    shares, gen = fed.controller.policy.shares, 0
    for _ in range(9):
        fed.step((A, {"v1": USE, "v2": USE}, gen), (B, dict.fromkeys(many, USE), gen))
        gen = fed.controller.policy.gen
    assert shares.due == set()
    before = shares.worked_out
    fed.step()
    assert (shares.worked_out - before, shares.due) == (0, set())
    fed.step((A, {"v1": USE, "v2": USE}, gen))
    assert shares.worked_out - before == 2


def test_a_gateway_that_comes_to_carry_a_volume_gets_its_part() -> None:
    fed = Feeder(controller(()), (A, ("v",)))
    fed.controller.set_policy_caps(1, {"v": 100.0})
    found = fed.step((A, {"v": USE}, 0))
    gen = caps_of(found, A).gen
    for _ in range(6):
        assert not [d for d in fed.step((A, {"v": USE}, gen)) if isinstance(d, SetCaps)]
    fed.controller.gateway_up(B, "B", exports("other"), fed.now_ns)
    fed.controller.add_streams(B, streams(B, "v"))
    found = fed.step((A, {"v": USE}, gen), (B, {"v": USE}, 0))
    parts = [caps_of(found, gateway).caps[0]["cost_per_s"] for gateway in (A, B)]
    assert sum(parts) == pytest.approx(100.0)


def test_caps_that_ended_while_a_gateway_was_away_are_taken_back() -> None:
    fed = Feeder(controller(()), (A, ("v",)))
    fed.controller.set_policy_caps(1, {"v": 100.0})
    gen = caps_of(fed.step((A, {"v": USE}, 0)), A).gen
    fed.step((A, {"v": USE}, gen))
    fed.controller.gateway_lost(A, "gone", fed.now_ns)
    fed.controller.set_policy_caps(2, {})
    fed.step()
    fed.controller.gateway_up(A, "A", exports("v"), fed.now_ns)
    assert caps_of(fed.step((A, {"v": USE}, gen)), A).caps == []

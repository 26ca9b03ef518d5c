"""Cuts entered together leave the same state as one after another."""

from __future__ import annotations

import random

import pytest

from sla_server.services.control.arrivals import MOST_CUTS
from sla_server.services.control.controller import Controller
from tests.support.worlds import brain, cut, exports, promise, streams, volume_class

S = 1_000_000_000
GATEWAYS = ("g1", "g2", "g3")


def fed(seed: int, *, together: bool) -> tuple[Controller, list[object]]:
    """Two promises behind one gateway each, one over all; caps go out and are confirmed; some cuts repeat."""
    rng = random.Random(seed)
    made = brain(
        (promise(), promise("wide", volumes=("w-*",)), promise("w-g2", 6)),
        (volume_class(), volume_class("w-g2")),
    )
    for gateway in GATEWAYS[:2]:
        volumes = ("gold", "greedy") if gateway == "g1" else (f"w-{gateway}",)
        made.gateway_up(gateway, gateway, exports(*volumes), 0)
        made.add_streams(gateway, streams(gateway, *volumes))
    decisions: list[object] = []
    gens = dict.fromkeys(GATEWAYS, 0)
    sequence = dict.fromkeys(GATEWAYS, 0)
    for second in range(1, 40):
        if second == 8:  # a third gateway, whose cuts come before its registration
            made.add_streams("g3", streams("g3", "w-g3", "greedy"))
        if second == 20:
            made.gateway_lost("g2", "gone", second * S)
        order = [g for g in GATEWAYS for _ in range(rng.choice((1, 1, 2)))]
        rng.shuffle(order)
        for number, gateway in enumerate(order):
            sequence[gateway] += rng.choice((0, 1, 1, 1))
            ios = {
                "g1": {"gold": (60, rng.choice((2, 30))), "greedy": (200, 30)},
                "g2": {"w-g2": (rng.choice((5, 40)), rng.choice((2, 9)))},
                "g3": {"w-g3": (30, 15), "greedy": (100, 20)},
            }[gateway]
            each = cut(gateway, sequence[gateway] or 1, ios, gen=gens[gateway], held=3, end_s=second)
            made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, second * S + number)
            if not together:
                made.snapshot(0)  # any question enters what waits
        for decision in made.tick(second * S + S // 2, 1_800_000_000_000_000 + second * 1_000_000):
            decisions.append(decision)
            if hasattr(decision, "caps"):
                gens[decision.gateway_id] = decision.gen
    return made, decisions


@pytest.mark.parametrize("seed", range(8))
def test_together_is_as_one_after_another(seed):
    (one, decided), (many, also) = fed(seed, together=False), fed(seed, together=True)
    assert any(hasattr(decision, "caps") for decision in decided)
    assert decided == also
    assert one.snapshot(1) == many.snapshot(1)
    assert {k: vars_of(t) for k, t in one.tables.items()} == {k: vars_of(t) for k, t in many.tables.items()}


def vars_of(table) -> tuple[object, ...]:
    use = {v: (u.cost_per_s, u.peak_cost_per_s, u.held) for v, u in table.use.items()}
    return table.seq, table.epoch, table.ignored, table.state, table.throttle_gen, use


def test_nothing_waits_once_the_state_is_asked_for():
    made = brain()
    made.gateway_up("g1", "g1", exports("gold"), 0)
    made.add_streams("g1", streams("g1", "gold"))
    each = cut("g1", 1, {"gold": (40, 2)})
    made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
    assert made.tables["g1"].seq == 0
    assert made.snapshot(1)["volumes"][0]["iops"] == 40
    assert made.tables["g1"].seq == 1


def test_a_gateway_known_by_its_dropped_cuts_alone_is_measured_like_any_other():
    made = brain()
    made.cuts_dropped("g1", 7)
    made.add_streams("g1", streams("g1", "gold"))
    each = cut("g1", 1, {"gold": (40, 2)})
    made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
    found = made.snapshot(1)
    assert found["gateways"][0]["dropped_cuts"] == 7
    assert found["backends"][0]["cost_per_s"] > 0


def test_a_cut_makes_an_unknown_gateway_known_and_brings_a_lost_one_back():
    made = brain()
    for seq in (1, 2):
        each = cut("g1", seq, {"gold": (40, 2)})
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, seq * S)
        made.tick(seq * S, 1)
        assert (made.tables["g1"].state, made.policy.ports["g1"].up) == ("up", True)
        made.gateway_lost("g1", "gone", seq * S)
        assert not made.policy.ports["g1"].up


def test_many_cuts_do_not_wait_for_a_question_so_that_mail_is_taken_in_between():
    made, ids = brain(), [f"g{number}" for number in range(MOST_CUTS + 1)]
    for gateway in ids:
        made.gateway_up(gateway, gateway, exports("gold"), 0)
        made.add_streams(gateway, streams(gateway, "gold"))
    for count, gateway in enumerate(ids, 1):
        each = cut(gateway, 1, {"gold": (40, 2)})
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
        entered = sum(table.seq for table in made.tables.values())
        assert entered == (MOST_CUTS if count >= MOST_CUTS else 0)

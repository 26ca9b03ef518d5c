"""Cuts: a message's are checked together, those that wait are entered together."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pmdaemon.errors import BadCut, WireError
from pmdaemon.wire import cut as cuts
from pmdaemon.wire import frame
from pmdaemon.wire.cut import COL, HIST_DTYPE, MISSED_DTYPE, Cut
from pmdaemon.wire.kinds import Kind
from sla_server.services.control.controller import Controller
from sla_server.services.control.cut_intake import MOST_CUTS, read_cuts
from tests.support.services import GATEWAY, START_US
from tests.support.worlds import controller, cut, exports, promise, streams, volume_class

ROWS = [[7] + [1] * 17, [8] + [2] * 17]


def small_cut(seq: int, rows: int = 2) -> Cut:
    hist = np.array([(rows - 1, 3, 5)] if rows else [], HIST_DTYPE)
    missed = np.array([(rows - 1, 0, 5_000, 4, 1)] if rows else [], MISSED_DTYPE)
    counters = cuts.rows_array(ROWS[:rows])
    return Cut(GATEWAY, 5, seq, START_US, 1_000_000, 0, 0, counters, hist, missed)


def message(parts: Sequence[bytes], count: int | None = None) -> frame.Frame:
    header = {"n": len(parts) if count is None else count}
    return frame.decode(frame.encode(Kind.CUTS, header, b"".join(parts)))


def read(parts: Sequence[bytes]) -> tuple[list[tuple[int, int]], list[str]]:
    """(position, seq) of the cuts, and what was said of bad ones."""
    bad: list[str] = []
    found = read_cuts(message(parts), lambda error: bad.append(str(error)))
    return [(at, cut.seq) for at, cut in found], bad


def test_cuts_come_as_they_were_sent_the_empty_and_the_large() -> None:
    sent = [small_cut(1), small_cut(2, 0), small_cut(3, 1)]
    found = read_cuts(message([cuts.encode(item) for item in sent]), _unexpected)
    assert [at for at, _ in found] == [0, 1, 2]
    for (_, got), item in zip(found, sent, strict=True):
        for one, other in ((got.counters, item.counters), (got.hist, item.hist), (got.missed, item.missed)):
            assert np.array_equal(one, other)
    assert read([]) == ([], [])


def _unexpected(error: BadCut) -> None:
    raise AssertionError(error)


def wrong(name: str) -> Cut:
    item = small_cut(9)
    counters = item.counters.copy()
    counters[COL["held"], 1] = -1
    changes: dict[str, Any] = {
        # Row 2 does not exist here; row 1 does, so a mixed-up count of rows would not see it.
        "hist row": {"hist": np.array([(2, 3, 5)], HIST_DTYPE)},
        "hist bucket": {"hist": np.array([(1, 60_000, 5)], HIST_DTYPE)},
        "missed row": {"missed": np.array([(2, 0, 5_000, 4, 1)], MISSED_DTYPE)},
        "missed more": {"missed": np.array([(1, 0, 5_000, 4, 5)], MISSED_DTYPE)},
        "io": {"missed": np.array([(1, 3, 5_000, 4, 1)], MISSED_DTYPE)},
        "negative": {"counters": counters},
        "too large": {"counters": np.where(counters == 2, cuts.MAX_COUNTER + 1, abs(counters))},
    }
    return replace(item, **changes[name])


@pytest.mark.parametrize(
    "name", ["hist row", "hist bucket", "missed row", "missed more", "io", "negative", "too large"]
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_with_bad_columns_is_left_out_wherever_it_stands(name: str, place: int) -> None:
    parts = [cuts.encode(small_cut(1)), cuts.encode(small_cut(2, 0))]
    parts.insert(place, cuts.encode(wrong(name)))
    found, bad = read(parts)
    assert [seq for _, seq in found] == [1, 2]
    assert [at for at, _ in found] == [at for at in range(3) if at != place]
    assert len(bad) == 1


def test_one_with_a_bad_header_is_left_out_too() -> None:
    bad_header = frame.encode(Kind.CUT, {"gw": b"short"})
    found, bad = read([cuts.encode(small_cut(1)), bad_header, cuts.encode(small_cut(3))])
    assert found == [(0, 1), (2, 3)]
    assert len(bad) == 1


def test_fewer_cuts_than_announced_are_no_message() -> None:
    with pytest.raises(WireError, match="announces 2"):
        read_cuts(message([cuts.encode(small_cut(1))], 2), _unexpected)


S = 1_000_000_000
GATEWAYS = ("g1", "g2", "g3")


def fed(seed: int, *, together: bool) -> tuple[Controller, list[object]]:
    """Two promises behind one gateway each, one over all; caps go out and are confirmed; some cuts repeat.

    None is silent for three intervals: one that is back is back for all that came with it, in whatever order.
    """
    rng = random.Random(seed)
    made = controller(
        (promise(), promise("wide", volumes=("w-*",)), promise("w-g2", 6)),
        (volume_class(), volume_class("w-g2")),
    )
    for gateway in GATEWAYS[:2]:
        volumes = ("gold", "greedy") if gateway == "g1" else (f"w-{gateway}",)
        made.gateway_up(gateway, gateway, exports(*volumes), 0)
        made.add_streams(gateway, streams(gateway, *volumes))
    decisions: list[object] = []
    gens = dict.fromkeys(GATEWAYS, 0)
    sequence, newest = dict.fromkeys(GATEWAYS, 0), dict.fromkeys(GATEWAYS, 0)
    for second in range(1, 40):
        if second == 8:  # a third gateway, whose cuts come before its registration
            made.add_streams("g3", streams("g3", "w-g3", "greedy"))
        if second == 20:
            made.gateway_lost("g2", "gone", second * S)
        order = [g for g in GATEWAYS for _ in range(rng.choice((1, 1, 2)))]
        rng.shuffle(order)
        for number, gateway in enumerate(order):
            is_new = rng.choice((0, 1, 1, 1)) or second - newest[gateway] > 1
            if is_new:
                sequence[gateway], newest[gateway] = sequence[gateway] + 1, second
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
    made = controller()
    made.gateway_up("g1", "g1", exports("gold"), 0)
    made.add_streams("g1", streams("g1", "gold"))
    each = cut("g1", 1, {"gold": (40, 2)})
    made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
    assert made.tables["g1"].seq == 0
    assert made.snapshot(1)["volumes"][0]["iops"] == 40
    assert made.tables["g1"].seq == 1
    assert made.last_cut_us == each.start_unix_us + each.duration_us


def test_a_gateway_known_by_its_dropped_cuts_alone_is_measured_like_any_other():
    made = controller()
    made.cuts_dropped("g1", 7)
    made.add_streams("g1", streams("g1", "gold"))
    each = cut("g1", 1, {"gold": (40, 2)})
    made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
    found = made.snapshot(1)
    assert found["gateways"][0]["dropped_cuts"] == 7
    assert found["backends"][0]["cost_per_s"] > 0


def test_a_cut_makes_an_unknown_gateway_known_and_brings_a_lost_one_back():
    made = controller()
    for seq in (1, 2):
        each = cut("g1", seq, {"gold": (40, 2)})
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, seq * S)
        made.tick(seq * S, 1)
        assert (made.tables["g1"].state, made.policy.gateways["g1"].up) == ("up", True)
        made.gateway_lost("g1", "gone", seq * S)
        assert not made.policy.gateways["g1"].up


def test_many_cuts_do_not_wait_for_a_question_so_that_mail_is_taken_in_between():
    made, ids = controller(), [f"g{number}" for number in range(MOST_CUTS + 1)]
    for gateway in ids:
        made.gateway_up(gateway, gateway, exports("gold"), 0)
        made.add_streams(gateway, streams(gateway, "gold"))
    for count, gateway in enumerate(ids, 1):
        each = cut(gateway, 1, {"gold": (40, 2)})
        made.add_cut(each, each.start_unix_us + each.duration_us, 0, False, S)
        entered = sum(table.seq for table in made.tables.values())
        assert entered == (MOST_CUTS if count >= MOST_CUTS else 0)

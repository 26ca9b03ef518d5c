"""Which gateway is told what, and when again."""

from __future__ import annotations

from sla_server.agreements.promise import InForce, promises
from sla_server.agreements.thresholds import ThresholdSet
from sla_server.services.threshold_sets import ThresholdSets, left_out_event
from tests.support.agreements import in_force, simple
from tests.support.services import START_US


def agreed(*items: InForce) -> ThresholdSets:
    sets = ThresholdSets()
    sets.set_promises(promises(items))
    return sets


def told(sets: ThresholdSets) -> dict[str, list[tuple[str, int]]]:
    return {g: [(entry.volume, entry.threshold_us) for entry in found.entries] for g, found in sets.take()}


ONE, TWO = in_force(simple("one", volumes="vol-1")), in_force(simple("two", volumes="vol-2", value_ms=3))


def test_each_gateway_is_told_its_own_once() -> None:
    sets = agreed(ONE, TWO)
    assert told(sets) == {}
    sets.announced("a", ["vol-1"])
    sets.announced("b", ["vol-2", "vol-3"])
    assert told(sets) == {"a": [("vol-1", 12_000)], "b": [("vol-2", 3_000)]}
    assert told(sets) == {}
    assert sets.volumes == {"a": {"vol-1"}, "b": {"vol-2", "vol-3"}}


def test_a_gateway_without_anything_to_count_is_told_that() -> None:
    sets = agreed(ONE)
    sets.announced("a", ["vol-9"])
    assert told(sets) == {"a": []}


def test_a_gateway_announced_again_is_told_again_though_nothing_changed() -> None:
    sets = agreed(ONE)
    for _ in range(2):
        sets.announced("a", ["vol-1"])
        assert told(sets) == {"a": [("vol-1", 12_000)]}


def test_a_change_of_one_agreement_sends_one_set() -> None:
    sets = agreed(ONE, TWO)
    for number in range(1, 4):
        sets.announced(f"g{number}", [f"vol-{number}"])
    told(sets)
    sets.set_promises(promises([ONE, in_force(simple("two", volumes="vol-2", value_ms=4), version=2)]))
    assert told(sets) == {"g2": [("vol-2", 4_000)]}
    sets.set_promises(promises([ONE]))
    assert told(sets) == {"g2": []}
    sets.set_promises(promises([ONE, in_force(simple("wide", volumes='"vol-[13]"', value_ms=1))]))
    assert told(sets) == {"g1": [("vol-1", 1_000), ("vol-1", 12_000)], "g3": [("vol-3", 1_000)]}


def test_a_change_that_asks_for_the_same_values_sends_nothing() -> None:
    sets = agreed(ONE)
    sets.announced("a", ["vol-1"])
    told(sets)
    sets.set_promises(promises([in_force(simple("one", volumes="vol-1", target=0.95), version=2)]))
    assert told(sets) == {}


def test_a_stream_of_a_new_volume_is_counted_and_one_of_a_stranger_waits() -> None:
    sets = agreed(ONE, TWO)
    sets.seen("a", ["vol-1"])
    assert told(sets) == {}
    sets.announced("a", ["vol-1"])
    told(sets)
    sets.seen("a", ["vol-1"])
    assert told(sets) == {}
    sets.seen("a", ["vol-2"])
    assert told(sets) == {"a": [("vol-1", 12_000), ("vol-2", 3_000)]}
    sets.announced("a", ["vol-2"])  # its exports now
    assert told(sets) == {"a": [("vol-2", 3_000)]}


def test_many_that_come_at_once_are_told_by_turns() -> None:
    sets = agreed(ONE)
    for number in range(5):
        sets.announced(f"g{number}", ["vol-1"])
    turns = [[gateway_id for gateway_id, _ in sets.take(2)] for _ in range(4)]
    assert turns == [["g0", "g1"], ["g2", "g3"], ["g4"], []]


def test_what_finds_no_room_is_an_event_with_figures() -> None:
    table, row = left_out_event("g-1", ThresholdSet((), left_out=3, wanted_bytes=60_000), START_US)
    assert (table, row["kind"], row["subject"]) == ("events", "thresholds-left-out", "g-1")
    assert row["details"] == {"left_out": 3, "wanted_bytes": 60_000, "limit_bytes": 56_000}
    assert "56000" in row["text"]

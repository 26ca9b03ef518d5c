"""What a gateway has to count: its own volumes' values and nobody else's, within limits."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from sla_server.agreements import thresholds
from sla_server.agreements.errors import DocumentProblem
from sla_server.agreements.promise import InForce, promises
from sla_server.agreements.thresholds import MAX_SET_BYTES, PromiseIndex, Threshold, ThresholdSet, touched_by
from tests.support.agreements import FULL, in_force, simple


def threshold_set(items: Iterable[InForce], volumes: Iterable[str]) -> ThresholdSet:
    return thresholds.threshold_set(PromiseIndex(promises(items)), volumes)


def check(
    items: Iterable[InForce],
    volumes: Collection[str] = (),
    carried: Mapping[str, Collection[str]] | None = None,
) -> list[DocumentProblem]:
    found = promises(items)
    return thresholds.check(found, found, volumes, carried or {})


def test_the_set_has_every_value_of_every_step() -> None:
    entries = threshold_set([in_force(FULL)], ["vol-17"]).entries
    assert entries == (
        Threshold("vol-17", "host-a", "any", 5000),
        Threshold("vol-17", "host-a", "any", 8000),
    )
    assert entries[0].as_dict() == {"volume": "vol-17", "client": "host-a", "io": "any", "threshold_us": 5000}


def test_a_gateway_gets_the_values_of_its_own_volumes_only() -> None:
    items = [in_force(simple(f"s{n}", volumes=f"vol-{n}", value_ms=1 + n)) for n in range(4)]
    found = threshold_set(items, ["vol-2", "vol-0", "nobodys"])
    assert [(entry.volume, entry.threshold_us) for entry in found.entries] == [
        ("vol-0", 1000),
        ("vol-2", 3000),
    ]
    assert (threshold_set(items, []).entries, found.left_out) == ((), 0)


def test_patterns_over_volumes_become_the_gateways_own_names() -> None:
    items = [in_force(simple(volumes='"db-*"')), in_force(simple("other", volumes='"web-?"', value_ms=3))]
    assert threshold_set(items, []).entries == ()
    assert [entry.volume for entry in threshold_set(items, {"db-2", "web-11", "db-1"}).entries] == [
        "db-1",
        "db-2",
    ]


def test_a_volume_named_and_matched_by_one_agreement_counts_once() -> None:
    item = in_force(simple(volumes='vol-1, "vol-*"'))
    assert len(threshold_set([item], ["vol-1"]).entries) == 1
    assert [promise.sla for promise in PromiseIndex(promises([item])).covering("vol-1")] == ["gold"]


def test_equal_values_are_counted_once() -> None:
    both = [in_force(simple("a")), in_force(simple("b", clients="host-a")), in_force(simple("c"))]
    assert threshold_set(both, ["vol-1"]).entries == (Threshold("vol-1", "*", "any", 12_000),)
    other = [in_force(simple("a")), in_force(simple("b", clients="host-a", value_ms=3))]
    assert len(threshold_set(other, ["vol-1"]).entries) == 2


def test_the_version_follows_from_the_entries_alone() -> None:
    one = threshold_set([in_force(simple("a")), in_force(simple("b", value_ms=3))], ["vol-1"])
    same = threshold_set([in_force(simple("z", value_ms=3)), in_force(simple("y"))], ["vol-1", "vol-2"])
    other = threshold_set([in_force(simple("a")), in_force(simple("b", value_ms=4))], ["vol-1"])
    assert one.version == same.version
    assert other.version != one.version
    assert 0 <= one.version < 1 << 63
    # In every process, today and tomorrow: gateways remember the version they were told.
    assert ThresholdSet((Threshold("v", "*", "any", 5000),)).version == 4_512_894_576_564_253_676


def many(count: int, **keys: str) -> list[InForce]:
    return [
        in_force(simple(f"sla-{i}", value_ms=1 + i, priority=keys.get("priority", "gold")))
        for i in range(count)
    ]


def test_eight_values_fit_and_the_ninth_is_refused_naming_all() -> None:
    assert check(many(8)) == []
    (found,) = check(many(9))
    assert "vol-1" in found.problem
    assert "at most 8" in found.problem
    assert all(f"sla-{i}" in found.document for i in range(9))


def test_the_limit_sees_through_patterns() -> None:
    wide = in_force(simple("wide", volumes='"vol-*"', value_ms=100))
    assert check([*many(8), wide])
    added = promises([*many(8), wide]), promises([wide])
    assert thresholds.check(*added, (), {}) == []  # nobody has such a volume yet
    assert thresholds.check(*added, {"vol-1"}, {})


def test_patterns_that_overlap_are_judged_by_the_volumes_known() -> None:
    items = [in_force(simple(f"s{i}", volumes='"vol-*"', value_ms=1 + i)) for i in range(8)]
    items.append(in_force(simple("all", volumes='"*"', value_ms=50)))
    assert check(items) == []  # no volume is known that both cover
    assert check(items, {"vol-9"})


def test_only_what_a_change_touches_is_looked_at() -> None:
    old, new = promises(many(9)), promises([in_force(simple("new", volumes="other"))])
    assert thresholds.check([*old, *new], new, {"vol-1", "other"}, {"g": ["vol-1", "other"]}) == []
    assert touched_by(new, ["vol-1", "other"]) == {"other"}
    assert touched_by(promises([in_force(simple(volumes='"v*1"'))]), ["vol-1", "vol-2"]) == {"vol-1"}


def test_a_pattern_that_comes_to_hold_too_many_keeps_the_higher_priorities() -> None:
    low = [in_force(simple(f"l{i}", volumes='"vol-*"', value_ms=50 + i, priority="bronze")) for i in range(4)]
    values = {entry.threshold_us for entry in threshold_set([*low, *many(6)], {"vol-1"}).entries}
    assert len(values) == 8
    assert {1000 * (1 + i) for i in range(6)} <= values


LONG = [f"volume-with-a-long-name-{'x' * 80}-{i:03}" for i in range(400)]


def test_a_gateway_that_would_get_too_much_refuses_the_agreement_and_says_how_much() -> None:
    item = in_force(simple(volumes='"volume-*"'))
    assert check([item], LONG, {"g-1": LONG[:300], "g-2": LONG[300:]}) == []
    (found,) = check([item], LONG, {"g-1": LONG[:1], "g-2": LONG})
    wanted = 400 * (48 + len(LONG[0]) + 1)
    assert found.field == "spec.scope"
    for word in ("g-2", str(wanted), "400 entries", str(MAX_SET_BYTES)):
        assert word in found.problem


def test_what_finds_no_room_is_of_the_lowest_priority() -> None:
    wide = in_force(simple("wide", volumes='"volume-*"', priority="bronze"))
    gold = [in_force(simple(f"s{i}", volumes=LONG[i], value_ms=3)) for i in (398, 399)]
    found = threshold_set([wide, *gold], LONG)
    assert found.left_out == 402 - len(found.entries) > 0
    assert sum(entry.size_bytes for entry in found.entries) <= MAX_SET_BYTES < found.wanted_bytes
    assert {entry.volume for entry in found.entries if entry.threshold_us == 3000} == set(LONG[398:])


def beside(volumes: str, known: Collection[str] = (), extra: str = "", io: str = "any") -> list[str]:
    """Problems of an agreement over these volumes, by text."""
    text = simple(volumes=volumes).replace("clients:", f"io: {io}, clients:") + extra
    return [each.problem for each in thresholds.check_measurable(in_force(text).all_promises, known)]


def test_what_is_measured_beside_the_io_path_only_has_no_percentile() -> None:
    (problem,) = beside('"host:gw:sda"')
    assert problem == (
        "latency percentiles cannot be measured on host:gw:sda, whose statistics come from beside the I/O "
        "path: latency percentiles need a gateway in the I/O path; mean latency is possible here"
    )
    assert "host:gw:sda and 1 more" in beside('"host:*"', ["host:gw:sda", "host:gw:sdb", "vol-1"])[0]
    assert len(beside('"host:*"')) == 1, "no name is known yet, and only such can follow"
    assert beside('"*"') == beside('"*"', ["host:gw:sda", "vol-1"]) == []
    assert len(beside('"*"', ["host:gw:sda"])) == 1


def test_a_volume_that_is_named_beside_others_and_cannot_be_measured_is_refused() -> None:
    """It was applied, and all of its slices had no data."""
    (problem,) = beside('"host:gw:sda", vol-1')
    assert problem.startswith("latency percentiles cannot be measured on host:gw:sda, whose statistics")
    (promise,) = in_force(simple(volumes='"host:gw:sda", vol-1')).all_promises
    assert thresholds.check_measurable([promise], [], {"gold"}) == [], "labels chose it, nobody named it"


def test_one_that_a_pattern_means_beside_others_is_warned_of() -> None:
    def warned(volumes: str, *known: str) -> list[str]:
        return list(thresholds.warn_unmeasured(in_force(simple(volumes=volumes)).all_promises, known))

    assert warned('"*"', "host:gw:sda", "vol-1") == [
        "gold/latency: host:gw:sda cannot be measured for it, beside the I/O path; while it has I/O there is "
        "no data. Name only volumes that a gateway serves"
    ]
    assert "host:gw:sda and 1 more" in warned('"*"', "host:gw:sdb", "host:gw:sda", "vol-1")[0]
    assert warned('"*"', "vol-1", "qemu:gw:root") == warned('"vol-*"', "host:gw:sda", "vol-1") == []


def test_beside_the_io_path_the_mean_latency_of_all_io_may_be_promised() -> None:
    mean = "demand_curve: [{value_ms: 3}]"
    rest = "budgeting: {target: 0.9}"
    extra = f"  - {{name: mean, indicator: {{metric: mean_latency}}, {mean}, {rest}}}\n"
    extra += f"  - {{name: up, indicator: {{metric: availability}}, outage: 5s, {rest}}}\n"
    assert [text.split(" cannot")[0] for text in beside('"host:gw:sda"', extra=extra)] == [
        "latency percentiles",
        "availability",
    ]
    assert [text.split(" cannot")[0] for text in beside('"host:gw:sda"', extra=extra, io="read")] == [
        "latency percentiles of reads alone",
        "mean latency of reads alone",
        "availability of reads alone",
    ]


def test_of_a_control_group_no_latency_at_all_may_be_promised() -> None:
    rest = "demand_curve: [{value_ms: 3}], budgeting: {target: 0.9}"
    extra = f"  - {{name: mean, indicator: {{metric: mean_latency}}, {rest}}}\n"
    found = beside('"cgroup:gw:batch"', extra=extra)
    assert [text.split(" cannot")[0] for text in found] == ["latency percentiles", "mean latency"]
    assert all(
        text.endswith("the kernel counts I/Os and bytes of a control group, and times nothing")
        for text in found
    )
    mixed = beside('"cgroup:gw:batch", "host:gw:sda"', extra=extra)
    assert [text.split(",")[0] for text in mixed] == [
        "latency percentiles cannot be measured on cgroup:gw:batch and 1 more",
        "mean latency cannot be measured on cgroup:gw:batch",
    ]


def test_of_a_drive_of_qemu_latencies_may_be_promised_and_nothing_that_waits() -> None:
    rest = "budgeting: {target: 0.9}"
    mean = f"demand_curve: [{{value_ms: 3}}], {rest}"
    extra = f"  - {{name: mean, indicator: {{metric: mean_latency}}, {mean}}}\n"
    extra += f"  - {{name: up, indicator: {{metric: availability}}, outage: 5s, {rest}}}\n"
    assert beside('"qemu:gw:root"', extra=extra) == [
        "availability cannot be measured on qemu:gw:root, whose statistics come from beside the I/O path: "
        "QEMU does not say what is outstanding; latency percentiles and mean latency are possible here"
    ]
    found = beside('"throttle-group:gw:scratch"', extra=extra)
    assert [text.split(" cannot")[0] for text in found] == [
        "latency percentiles",
        "mean latency",
        "availability",
    ]
    why = "counts nothing of a throttle group, which can only be slowed down"
    assert all(text.endswith(why) for text in found)
    mixed = beside('"throttle-group:gw:scratch", "qemu:gw:root"', extra=extra)
    assert [text.split(",")[0] for text in mixed] == [
        "latency percentiles cannot be measured on throttle-group:gw:scratch",
        "mean latency cannot be measured on throttle-group:gw:scratch",
        "availability cannot be measured on qemu:gw:root and 1 more",
    ]

"""The back-test: what it replays, what it compares, and when a policy is published."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pmdaemon.wire.cut import IO_KINDS
from sla_server.config import ServerConfig, resolve
from sla_server.db.errors import FileDamaged
from sla_server.db.queries.replay import StoredSlots, TooManyRows
from sla_server.db.queries.replay_cuts import COUNTED
from sla_server.policy_jobs import back_test
from sla_server.policy_jobs.back_test import ReplaySums, backend_plans, by_hour, compare, verdict
from sla_server.policy_jobs.sampling import MOST_VOLUMES
from sla_server.simulate.setup import Contract, contract_of
from tests.support.agreements import ERP, agreement, simple

MINUTE_US = 60_000_000
START_US = 1_795_996_800 * 1_000_000  # a Monday, 00 UTC


def contract() -> Contract:
    return contract_of([agreement(ERP)])


def stored(rates: dict[str, list[int]], missed: int, backends: dict[str, str] | None = None) -> StoredSlots:
    """Minutes of volumes with so many I/Os a second each; ``missed``: of erp in busy minutes."""
    rows: list[dict[str, int]] = []
    late: list[dict[str, int]] = []
    streams: dict[int, dict[str, Any]] = {}
    for number, (volume, minutes) in enumerate(rates.items(), 1):
        backend = (backends or {}).get(volume, "disk")
        streams[number] = {"volume": volume, "client": "c", "backend": backend, "gateway": "gw"}
        for minute, rate in enumerate(minutes):
            ios, slot_us = rate * 60, START_US + minute * MINUTE_US
            busy = sum(each[minute] for each in rates.values()) > 150
            service_us = 40_000 if busy else 6_000
            rows.append(
                {"slot_us": slot_us, "stream_id": number, "arrived": ios, "reads": ios, "writes": 0,
                 "read_bytes": ios * 4096, "write_bytes": 0, "lat_sum_us": ios * service_us,
                 "svc_sum_us": ios * service_us, "delay_sum_us": 0, "held_max": 0,
                 "inflight_max": 32 if busy else 2}
            )  # fmt: skip
            if volume == "erp":
                late.append(
                    {"slot_us": slot_us, "stream_id": number, "io": IO_KINDS["any"], "threshold_us": 20_000,
                     "counted": ios, "missed": missed if busy else 0}
                )  # fmt: skip
    return StoredSlots(60, columns(rows), columns(late), streams)


def columns(rows: list[dict[str, int]]) -> dict[str, Any]:
    return {name: np.array([row[name] for row in rows], np.int64) for name in rows[0]}


BUSY = {"erp": [20] * 12, "batch": [10] * 5 + [180] * 3 + [10] * 4}
BRIEF = {"erp": [20] * 4, "batch": [10, 10, 180, 10]}
"""The same in a third of the time, where it is not chosen among slots: a run simulates 520 I/Os a second."""


def plans(found: StoredSlots, volumes: set[str], most: int = 100_000) -> Any:
    return backend_plans(found, contract(), volumes, START_US, most)


def test_a_cap_on_the_greedy_volume_avoids_broken_promises_at_a_price() -> None:
    (made, left_out) = plans(stored(BRIEF, 900), {"batch"})
    assert ([name for name, _ in made], left_out) == (["disk"], [])
    caps = by_hour([{"volume": "batch", "hour_of_week": 0, "cost_per_s": 40.0}])
    found = compare(made, caps, None)
    none, new = ReplaySums(**found["none"]), ReplaySums(**found["new"])
    assert none.judged == new.judged > 0
    assert new.bad_s < none.bad_s
    assert new.ios < none.ios
    assert new.held_back > none.held_back
    assert verdict(none, new, None, is_empty=False).publish


def test_a_cap_on_an_hour_that_is_not_replayed_changes_nothing() -> None:
    made, _ = plans(stored(BRIEF, 900), {"batch"})
    found = compare(made, by_hour([{"volume": "batch", "hour_of_week": 9, "cost_per_s": 40.0}]), None)
    assert found["new"] == found["none"]
    none, new = ReplaySums(**found["none"]), ReplaySums(**found["new"])
    assert not verdict(none, new, None, is_empty=False).publish


def test_only_backends_with_a_capped_volume_are_replayed_and_within_the_limit() -> None:
    rates = {**BUSY, "other": [5] * 12, "third": [5] * 12}
    found = stored(rates, 900, {"other": "tape", "third": "tape"})
    made, _ = plans(found, {"batch"})
    assert [name for name, _ in made] == ["disk"]
    made, _ = plans(found, {"batch", "third"})
    assert [name for name, _ in made] == ["disk", "tape"], "those with misses first"
    long = {"erp": [20] * 40, "batch": ([10] * 8 + [180] * 2) * 4}
    ((_, whole),), _ = plans(stored(long, 900), {"batch"})
    ((_, part),), _ = plans(stored(long, 900), {"batch"}, 100_000)
    ((_, small),), left_out = plans(stored(long, 900), {"batch"}, 45_000)
    assert len(part.spans) == len(whole.spans) > len(small.spans) > 0
    assert left_out == []
    assert any("Simulated are" in note for note in small.notes)
    made, left_out = plans(stored(long, 900), {"batch"}, 100)
    assert (made, len(left_out)) == ([], 1)
    assert "back_test_ios" in left_out[0]


def test_a_replay_has_the_promises_about_its_backend_alone() -> None:
    """Of a fleet there are tens of thousands, each of which would be compared with each stream."""
    others = [agreement(simple(f"other-{n}", volumes=f'"v{n}", "tape-{n}-*"')) for n in range(20)]
    wide = agreement(simple("wide", volumes='"er*"'))
    found = stored({**BRIEF, "v7": [5] * 4}, 900, {"v7": "tape"})
    fleet = contract_of([agreement(ERP), *others, wide])
    made, _ = backend_plans(found, fleet, {"batch", "v7"}, START_US, 100_000)
    promises = {name: {each.sla for each in plan.contract.promises} for name, plan in made}
    assert promises == {"disk": {"gold", "wide"}, "tape": {"other-7"}}
    whole, _ = backend_plans(found, contract_of([agreement(ERP), wide]), {"batch"}, START_US, 100_000)
    caps = by_hour([{"volume": "batch", "hour_of_week": 0, "cost_per_s": 40.0}])
    assert compare(made[:1], caps, None) == compare(whole, caps, None), "the others change nothing"


def test_fewer_backends_are_replayed_where_no_slot_of_many_is_within_its_share() -> None:
    rates = {"erp": [20] * 12, "batch": [180] * 12, **{f"v{n}": [190] * 12 for n in range(3)}}
    found = stored(rates, 900, {"v0": "b1", "v1": "b2", "v2": "b3"})
    made, left_out = plans(found, {"batch", "v0", "v1", "v2"}, 30_000)
    assert [name for name, _ in made] == ["disk", "b1"], "a slot has 12,000 I/Os at most, a quarter is 7,500"
    assert left_out == [f"backend {name} was not replayed: 2 are" for name in ("b2", "b3")]


@pytest.mark.parametrize(
    ("none", "new", "former", "is_empty", "publish", "words"),
    [
        ((9, 90), (2, 20), None, False, True, "it helps"),
        ((9, 90), (9, 80), None, False, True, "it helps"),
        ((9, 90), (9, 85), None, False, False, "does not help"),
        ((2, 20), (3, 10), None, False, False, "does harm"),
        ((0, 0), (0, 0), None, False, False, "nothing to avoid"),
        ((0, 0), (0, 0), None, True, True, "caps nothing"),
        ((9, 90), (4, 40), (2, 20), False, False, "in force does better"),
        ((9, 90), (9, 90), (2, 20), True, False, "in force does better"),
        ((9, 90), (2, 20), (4, 40), False, True, "it helps"),
        ((9, 90), (2, 20), (2, 20), False, True, "it helps"),
    ],
)
def test_when_a_policy_is_published(
    none: tuple[int, int],
    new: tuple[int, int],
    former: tuple[int, int] | None,
    is_empty: bool,
    publish: bool,
    words: str,
) -> None:
    def run(pair: tuple[int, int], held: int) -> ReplaySums:
        return ReplaySums(judged=20, bad=pair[0], bad_s=pair[1], ios=1000, held_back=held)

    before = None if former is None else run(former, 100)
    found = verdict(run(none, 0), run(new, 110), before, is_empty=is_empty)
    assert found.publish is publish
    assert words in found.reason


def test_as_good_as_the_one_in_force_at_a_much_higher_price_is_not_published() -> None:
    none, former = ReplaySums(bad=9, bad_s=90), ReplaySums(bad=2, bad_s=20, held_back=100)
    dear = ReplaySums(bad=2, bad_s=20, held_back=126)
    assert not verdict(none, dear, former, is_empty=False).publish
    better = ReplaySums(bad=1, bad_s=20, held_back=126)
    assert verdict(none, better, former, is_empty=False).publish, "it avoids more"


AT_EASE = ReplaySums(judged=20, ios=1000)


@pytest.mark.parametrize(
    ("held_back", "held", "lost", "publish", "words"),
    [
        (90, {"batch"}, set[str](), True, "takes the place of the one in force"),
        (120, {"batch"}, set[str](), True, "takes the place of the one in force"),
        (126, {"batch"}, set[str](), False, "holds more back for the same"),
        (90, {"batch"}, {"batch"}, False, "holds back batch, which it would not cap"),
        (0, {f"v{n}" for n in range(5)}, {f"v{n}" for n in range(5)}, False, "v0, v1, v2 and 2 more, which"),
        (90, set[str](), set[str](), False, "nothing to avoid"),
    ],
)
def test_one_in_force_that_held_back_what_is_replayed_is_succeeded_by_one_that_caps_as_many(
    held_back: int, held: set[str], lost: set[str], publish: bool, words: str
) -> None:
    """Else the policy that works would stay for ever, or give way to one learned from what it let through."""
    new, former = replace(AT_EASE, held_back=held_back), replace(AT_EASE, held_back=100)
    found = verdict(AT_EASE, new, former, is_empty=held_back == 0, held=held, lost=lost)
    assert found.publish is publish
    assert words in found.reason


def test_what_still_breaks_a_promise_is_judged_as_ever() -> None:
    none, former = ReplaySums(bad=9, bad_s=90), ReplaySums(bad=2, bad_s=20, held_back=100)
    worse = verdict(none, none, former, is_empty=True, held={"batch"}, lost={"batch"})
    assert "the one in force does better" in worse.reason
    same = replace(former, held_back=110)
    assert "it helps" in verdict(none, same, former, is_empty=False, held={"batch"}, lost={"x"}).reason
    by_chance = replace(AT_EASE, bad=1, bad_s=10), replace(AT_EASE, bad=1, bad_s=12, held_back=100)
    harm = verdict(by_chance[0], by_chance[1], by_chance[0], is_empty=False, held={"batch"})
    assert not harm.publish, harm


def test_held_volumes_are_those_that_a_throttle_let_wait() -> None:
    found = stored({"erp": [20], "batch": [10], "slow": [10], "other": [10]}, 0)
    assert back_test.held_volumes(found, {"erp", "batch", "slow", "other"}) == frozenset()
    found.slots["delay_sum_us"][1], found.slots["held_max"][2] = 5, 1
    assert back_test.held_volumes(found, {"erp", "batch", "slow"}) == {"batch", "slow"}
    assert back_test.held_volumes(found, {"slow", "other"}) == {"slow"}


@pytest.mark.parametrize(
    ("new_caps", "applied_us", "publish", "words"),
    [
        (["batch"], 5, True, "takes the place"),
        ([], 5, False, "holds back batch"),
        ([], 11, True, "takes the place"),  # the promise may be one that is no more
    ],
)
def test_a_load_that_the_policy_in_force_held_back_is_no_sign_that_it_has_no_use(
    new_caps: list[str],
    applied_us: int,
    publish: bool,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class InForce:
        def policy_in_force(self) -> dict[str, Any]:
            return {"version": 3, "state": "in-force"}

        def capped_hours(self, _version: int) -> Iterator[dict[str, Any]]:
            return rows(["batch"])

        def policy(self, version: int) -> dict[str, Any]:
            return {"version": version, "created_us": 10}

        def all_agreements(self) -> Iterator[dict[str, Any]]:
            yield {"name": "erp", "version": 1, "applied_us": applied_us, "ended_us": None}

    def rows(volumes: list[str]) -> Iterator[dict[str, Any]]:
        yield from ({"volume": volume, "hour_of_week": 0, "cost_per_s": 40.0} for volume in volumes)

    def read(*_args: Any) -> StoredSlots:
        found = stored({"erp": [20] * 4, "batch": [5] * 4}, 0)
        found.slots["delay_sum_us"][found.slots["stream_id"] == 2] = 1_000_000
        return found

    monkeypatch.setattr(back_test, "read_slots", read)
    monkeypatch.setattr(back_test, "read_cuts", lambda *_args: NO_CUTS)
    monkeypatch.setattr(back_test, "_contract", lambda *_args: contract())
    config, store = resolve(ServerConfig(data_dir=tmp_path)), SimpleNamespace(reader=InForce())
    now_us = START_US + 4 * MINUTE_US
    tested = back_test.made(store, config, lambda: rows(new_caps), now_us)  # type: ignore[arg-type]
    assert tested["none"]["bad_s"] == tested["former"]["bad_s"], "those of the model itself"
    assert tested["publish"] is publish, tested["reason"]
    assert words in tested["reason"]


def test_it_is_said_in_words() -> None:
    outcome = {"judged": 9, "bad": 1, "bad_s": 2, "ios": 5000, "held_back": 30}
    found = {"reason": "it helps", "none": outcome, "new": {**outcome, "ios": 40, "held_back": 70}}
    assert back_test.describe(found) == [
        "  back-test: it helps",
        "    I/Os: 40 answered, without it 5,000; held back or not made: 70, without it 30",
    ]


NO_CUTS = {name: np.zeros(0, np.int64) for name in ("start_us", *COUNTED)}


class Reader:
    """No policy is in force."""

    def policy_in_force(self) -> None:
        return None


def test_of_a_fleet_that_cannot_be_held_a_sample_is_replayed_and_the_report_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stored(BRIEF, 900)
    others = {
        number: {"volume": f"v{number}", "client": "c", "backend": "disk", "gateway": "gw"}
        for number in range(10, 110)
    }
    limits: list[bool] = []

    def read(_config: Any, _dir: Path, from_us: int, to_us: int, sample: Any = None) -> StoredSlots:
        limits.append(sample is not None)
        if sample is None or to_us - from_us > 4 * 3_600_000_000:
            raise TooManyRows(1)
        assert {1, 2} <= {number for number, instead in sample.instead.items() if number == instead}
        return found

    # What is read of SQL has tests of its own.
    monkeypatch.setattr(back_test, "read_slots", read)
    monkeypatch.setattr(back_test, "read_streams", lambda *_args: {**found.streams, **others})
    monkeypatch.setattr(back_test, "read_cuts", lambda *_args: NO_CUTS)
    monkeypatch.setattr(back_test, "_contract", lambda *_args: contract())
    config = resolve(ServerConfig(data_dir=tmp_path))
    caps = [{"volume": "batch", "hour_of_week": 0, "cost_per_s": 40.0}]
    store = SimpleNamespace(reader=Reader())
    now_us = START_US + 4 * MINUTE_US
    tested = back_test.made(store, config, lambda: caps, now_us, {"batch": 9.0})  # type: ignore[arg-type]
    assert limits == sorted(limits)
    assert tested["publish"], tested["reason"]
    (sampled,) = tested["sampled"]
    assert (sampled["volumes"], sampled["replayed"], sampled["promised"]) == (102, MOST_VOLUMES, 1)
    assert any("102 volumes: 64 are replayed by themselves" in note for note in tested["notes"])
    again = back_test.made(store, config, lambda: iter(caps[::-1]), now_us, {"batch": 9.0})  # type: ignore[arg-type]
    assert again == tested, "the same again"


def test_the_policy_in_force_is_replayed_from_its_rows_which_are_never_held_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a fleet both policies have millions; what is kept of them is that of the volumes replayed."""
    kept: list[set[str]] = []
    read: list[int] = []

    class InForce:
        def policy_in_force(self) -> dict[str, Any]:
            return {"version": 3, "state": "in-force"}

        def capped_hours(self, version: int) -> Iterator[dict[str, Any]]:
            read.append(version)
            yield from rows(80.0)

    def rows(cost_per_s: float) -> Iterator[dict[str, Any]]:
        for volume in ("batch", *(f"elsewhere-{n}" for n in range(100))):
            yield {"volume": volume, "hour_of_week": 0, "cost_per_s": cost_per_s}

    def compared(plans: Any, new: Any, former: Any) -> dict[str, Any]:
        kept.extend({volume for hour in each.caps.values() for volume in hour} for each in (new, former))
        return compare(plans, new, former)

    monkeypatch.setattr(back_test, "read_slots", lambda *_args: stored(BRIEF, 900))
    monkeypatch.setattr(back_test, "read_cuts", lambda *_args: NO_CUTS)
    monkeypatch.setattr(back_test, "_contract", lambda *_args: contract())
    monkeypatch.setattr(back_test, "compare", compared)
    config, store = resolve(ServerConfig(data_dir=tmp_path)), SimpleNamespace(reader=InForce())
    tested = back_test.made(store, config, lambda: rows(40.0), START_US + 4 * MINUTE_US)  # type: ignore[arg-type]
    assert kept == [{"batch"}, {"batch"}]
    assert set(read) == {3}
    assert tested["none"]["bad_s"] > tested["former"]["bad_s"] >= tested["new"]["bad_s"]
    assert tested["none"]["ios"] > tested["former"]["ios"] > tested["new"]["ios"]


def test_a_small_world_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples: list[Any] = []

    def read(_config: Any, _dir: Path, _from_us: int, _to_us: int, sample: Any = None) -> StoredSlots:
        samples.append(sample)
        return stored(BRIEF, 900)

    monkeypatch.setattr(back_test, "read_slots", read)
    monkeypatch.setattr(back_test, "read_cuts", lambda *_args: NO_CUTS)
    monkeypatch.setattr(back_test, "_contract", lambda *_args: contract())
    config = resolve(ServerConfig(data_dir=tmp_path))
    caps = [{"volume": "batch", "hour_of_week": 0, "cost_per_s": 40.0}]
    store = SimpleNamespace(reader=Reader())
    tested = back_test.made(store, config, lambda: caps, START_US + 4 * MINUTE_US)  # type: ignore[arg-type]
    assert tested["publish"]
    assert (samples, "sampled" in tested) == ([None], False)

    def damaged(*_args: Any) -> Any:
        raise FileDamaged("cuts/2026-11-28/1-2.parquet", "the file is missing")

    monkeypatch.setattr(back_test, "read_cuts", damaged)
    without = back_test.made(store, config, lambda: caps, START_US + 4 * MINUTE_US)  # type: ignore[arg-type]
    assert (without["publish"], without["new"]) == (True, tested["new"])
    assert any("within slots is not known" in note and "1-2.parquet" in note for note in without["notes"])

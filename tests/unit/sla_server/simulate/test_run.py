"""Modes on the same load, and the figures made of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from sla_server.agreements.promise import CurveStep, Priority
from sla_server.services.control.decisions import SetCaps
from sla_server.services.control.simulation import Simulation
from sla_server.simulate import figures
from sla_server.simulate.device import DeviceModel
from sla_server.simulate.figures import cap_history, figures_of, most_within, turns
from sla_server.simulate.loads import Arrival, Load
from sla_server.simulate.run import MODES, GeneratedFeed, ModeRun, Plan, TraceFeed, hour_of_week, run_mode
from sla_server.simulate.setup import Contract, Stream
from tests.support.worlds import promise, volume_class

of_promise = figures._of_promise
LOADS = (
    Load(volume="gold", iops=60, gateway="A", read_fraction=0.5),
    Load(volume="greedy", depth=16, from_s=3, gateway="B"),
)


def plan(*loads: Load, length_s: float = 20.0, **over) -> Plan:
    values = {
        "contract": Contract([promise(slice_s=10)], [volume_class()]),
        "feeds": [GeneratedFeed(load) for load in loads or LOADS],
        "devices": {"disk": DeviceModel(spread=0)},
        "spans": [(0.0, length_s)],
        **over,
    }
    return Plan(**values)


@pytest.fixture(scope="module")
def three() -> dict[str, ModeRun]:
    return {mode: run_mode(plan(), mode) for mode in MODES}


def latencies(run: ModeRun, volume: str) -> list[float]:
    return [x for stream, log in run.logs.items() if stream.volume == volume for x in log.latency]


def arrived(run: ModeRun, volume: str) -> list[float]:
    return [x for stream, log in run.logs.items() if stream.volume == volume for x in log.at]


def test_observe_does_what_off_does_and_enforce_protects(three):
    assert latencies(three["off"], "gold") == latencies(three["observe"], "gold")
    assert arrived(three["off"], "gold") == arrived(three["enforce"], "gold"), "the same load in each mode"
    assert not three["off"].decisions
    assert not [d for _, d in three["observe"].decisions if isinstance(d, SetCaps)]
    off = figures_of(plan(), three["off"], None)
    observe, enforce = (figures_of(plan(), three[mode], off) for mode in MODES[1:])
    assert observe.would == {("greedy", "gold/latency"): 1}
    assert [f.promises[0].bad_s for f in (off, observe)] == [17, 17]
    assert enforce.promises[0].bad_s < 8
    gold, greedy = enforce.volumes
    assert (gold.caps, greedy.below_floor) == ([], 0)
    assert 0.4 < greedy.kept_ratio < 1
    assert off.promises[0].slices == {"bad": 2}
    assert off.promises[0].compliance == 0.0


def test_the_same_seed_gives_the_same_world_and_another_one_not(three):
    again = run_mode(plan(), "enforce")
    assert latencies(again, "greedy") == latencies(three["enforce"], "greedy")
    assert again.decisions == three["enforce"].decisions
    other = run_mode(plan(seed=2), "enforce")
    assert latencies(other, "greedy") != latencies(three["enforce"], "greedy")


def trace(volume: str, *ios: tuple[float, bool]) -> TraceFeed:
    return TraceFeed(Stream(volume), [Arrival(at, is_write, 4096) for at, is_write in ios])


def test_a_trace_is_judged_by_kind_by_curve_and_to_its_end():
    made = plan(
        contract=Contract([promise("v", 3, io="read", curve=(CurveStep(2, 3_000), CurveStep(3, 9_000)))]),
        # Second 0: two reads of 2 and 4 ms wait for one another. Second 1: three, under the second step.
        # Second 2: five reads, above the curve. Second 3: a read that is never answered.
        feeds=[
            trace("v", *[(0.1, False)] * 2, *[(1.1, False)] * 3, *[(2.1, False)] * 5, (3.5, False)),
            trace("w", (3.499, True)),
        ],
        devices={"disk": DeviceModel.model_validate({"spread": 0, "write": [{"kib": 4, "ms": 60_000}]})},
        spans=[(0.0, 5.0)],
    )
    figures = figures_of(made, run_mode(made, "off"), None)
    (found,) = figures.promises
    assert (found.ios, found.judged_s, found.above_s) == (11, 3, 1)
    assert list(found.bad_at) == [0, 3]
    assert found.slices == {}
    assert (found.compliance, found.coverage) == (None, None)
    v, w = figures.volumes
    assert (v.ios, w.ios) == (10, 0)


def test_a_policy_acts_by_the_hour_in_enforce_only():
    hour = hour_of_week(plan().start_unix_us)
    policy = {hour: {"greedy": 200.0}}
    contract = Contract([], [])
    capped = plan(contract=contract, policy=policy, length_s=10.0)
    runs = {mode: run_mode(capped, mode) for mode in ("observe", "enforce")}
    assert cap_history(runs["observe"], "greedy", 1.0625) == []
    assert [cost for _, cost in cap_history(runs["enforce"], "greedy", 1.0625)] == [200.0]
    other = dataclasses.replace(capped, policy={(hour + 1) % 168: {"greedy": 200.0}})
    assert cap_history(run_mode(other, "enforce"), "greedy", 1.0625) == []


def test_a_burst_of_a_policy_passes_and_then_its_rate_holds():
    """Idle for five seconds, then as much as it can: at once ten seconds of the cap, afterwards the cap."""
    hour = hour_of_week(plan().start_unix_us)
    load = Load(volume="greedy", depth=32, from_s=5.0)

    def ios_by_second(bursts):
        made = plan(
            load,
            contract=Contract([], []),
            policy={hour: {"greedy": 106.25}},
            bursts={hour: bursts},
            length_s=25.0,
        )
        (log,) = run_mode(made, "enforce").logs.values()
        done_s = log.arrays()["at"] + log.arrays()["latency"]
        return np.bincount(done_s[np.isfinite(done_s)].astype(np.int64), minlength=25)

    burst, plain = ios_by_second({"greedy": 10.0}), ios_by_second({})
    # 100 I/Os of 4 KiB a second are 106.25 cost units.
    assert plain[5:8].sum() == pytest.approx(300, abs=40)
    assert burst[5:8].sum() == pytest.approx(1300, abs=60)
    assert burst[10:25].sum() == pytest.approx(1500, rel=0.05), "the rate, once the burst is used"
    assert plain[10:25].sum() == pytest.approx(1500, rel=0.05)


def test_an_agreed_cap_of_iops_is_held():
    made = plan(
        Load(volume="v", depth=8),
        contract=Contract([], [volume_class("v", Priority.SILVER, cap_iops=100.0)]),
        length_s=15.0,
    )
    (volume,) = figures_of(made, run_mode(made, "enforce"), None).volumes
    assert volume.caps[0][1] == pytest.approx(106.25)
    assert volume.iops == pytest.approx(100, rel=0.2)
    assert volume.priority == "silver"


def test_spans_are_worlds_of_their_own_and_backends_do_not_disturb_each_other():
    loads = (LOADS[0], LOADS[1].model_copy(update={"backend": "other", "from_s": 0.0}))
    made = plan(
        *loads,
        devices={"disk": DeviceModel(spread=0), "other": DeviceModel(spread=0)},
        spans=[(0.0, 4.0), (10.0, 16.0)],
    )
    run = run_mode(made, "enforce")
    assert not [d for _, d in run.decisions if isinstance(d, SetCaps)]
    times = arrived(run, "greedy")
    assert {math.floor(at) for at in times} == {0, 1, 2, 3, 10, 11, 12, 13, 14, 15}
    figures = figures_of(made, run, None)
    assert figures.promises[0].bad_s == 0
    assert figures.volumes[1].iops == pytest.approx(500, rel=0.02)


def test_turns_of_a_cap():
    history = [(1.0, 100.0), (2.0, 120.0), (3.0, 130.0), (4.0, 90.0), (70.0, None)]
    assert turns(history) == [2.0, 4.0, 70.0]
    assert most_within([2.0, 4.0, 70.0], 60.0) == 2
    assert most_within([], 60.0) == 0


def test_hours_of_the_week_begin_on_monday():
    monday_us = 4 * 86_400_000_000  # 1970-01-05
    assert [hour_of_week(monday_us + h * 3_600_000_000) for h in (0, 1, 167, 168)] == [0, 1, 167, 0]


def on_erp(**over) -> Plan:
    """Two clients of one volume; db-1's use of it was promised a latency."""
    contract = Contract(
        [promise("erp", clients=("db-1",), slice_s=10)],
        [volume_class("erp", clients=("db-1",), floor_iops=40)],
    )
    loads = (
        Load(volume="erp", client="db-1", iops=60, gateway="A"),
        Load(volume="erp", client="job", depth=16, from_s=3, gateway="A"),
        Load(volume="plain", iops=5, gateway="A"),
    )
    return plan(*loads, contract=contract, **over)


def test_caps_of_clients_are_simulated_as_they_would_be_enforced():
    made = on_erp()
    off = figures_of(made, run_mode(made, "off"), None)
    observe, enforce = (figures_of(made, run_mode(made, mode), off) for mode in MODES[1:])
    assert observe.would == {("erp/job", "erp/latency"): 1}
    assert enforce.promises[0].bad_s < 8 < off.promises[0].bad_s
    assert [each.volume for each in enforce.users] == ["erp", "erp/db-1", "erp/job", "plain"]
    erp, promised, job, _ = enforce.users
    assert (erp.caps, promised.caps) == ([], [])
    assert job.least_cost < 425
    assert erp.ios == promised.ios + job.ios
    assert 0.4 < job.kept_ratio < 1
    assert (promised.floor_cost, job.floor_cost) == pytest.approx((42.5, 53.125))
    assert (erp.below_floor, job.below_floor) == (0, None)


def test_gateways_that_cap_whole_volumes_only_are_sent_no_caps_of_clients():
    def disturb(sim: Simulation) -> None:
        for each in sim.gateways.values():
            each.caps_clients = False
            sim.announce(each)

    run = run_mode(on_erp(length_s=10.0), "enforce", disturb)
    assert not [d for _, d in run.decisions if isinstance(d, SetCaps)]


def test_an_agreement_keeps_its_own_mode_in_both(three):
    """As on the server, ``control`` takes precedence over the mode."""
    contract = plan().contract
    watched = plan(contract=dataclasses.replace(contract, modes={"gold": "observe"}))
    acting = plan(contract=dataclasses.replace(contract, modes={"gold": "enforce"}))
    observed, enforced = run_mode(watched, "enforce"), run_mode(acting, "observe")
    assert not [d for _, d in observed.decisions if isinstance(d, SetCaps)]
    assert latencies(observed, "gold") == latencies(three["off"], "gold")
    assert latencies(enforced, "gold") == latencies(three["enforce"], "gold")


def test_promises_alike_have_the_same_figures_under_their_own_names(three, monkeypatch):
    """Many agreements on one volume often promise the same: it is judged once."""
    made = []
    monkeypatch.setattr(figures, "_of_promise", lambda *given: made.append(given[1]) or of_promise(*given))
    alike = [promise(slice_s=10), dataclasses.replace(promise(slice_s=10), sla="other")]
    other = dataclasses.replace(promise(slice_s=10), sla="third", percentile=90.0)
    contract = dataclasses.replace(plan().contract, promises=[*alike, other])
    gold, same, third = figures_of(plan(contract=contract), three["off"], None).promises
    assert [each.sla for each in made] == ["gold", "third"]
    assert dataclasses.replace(same, sla="gold") == gold
    assert (same.sla, third.percentile) == ("other", 90.0)

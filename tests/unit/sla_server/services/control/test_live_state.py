from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from pmdaemon.wire.cut import FAILED, MISSED_DTYPE
from sla_server.agreements.promise import CurveStep
from sla_server.services.control.live_state import LiveState
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.signal import STATES
from sla_server.services.control.simulation import UNIX_0_US
from sla_server.services.control.verdicts import NO_FIGURES, NOTHING, Signal
from tests.support.worlds import (
    KEY,
    A,
    B,
    Feeder,
    controller,
    cut,
    events_of,
    exports,
    promise,
    streams,
    volume_class,
)

BAD, GOOD = {"gold": (100, 30)}, {"gold": (100, 2)}


def feeder(calm_s: float = 0.0, **over) -> Feeder:
    made = controller((promise(**over),), mode="observe", episode_calm_s=calm_s)
    return Feeder(made, (A, ("gold",)))


def state(made: Feeder) -> str:
    return made.controller.live[KEY].state


def run(made: Feeder, *ios: dict[str, tuple[int, float]]) -> list[str]:
    return [e.kind for each in ios for e in events_of(made.step((A, each, 0))) if e.element == "sla"]


def test_no_data_before_the_first_window_and_when_cuts_stop():
    made = feeder()
    made.step()
    assert state(made) == "no-data"
    run(made, GOOD)
    assert state(made) == "ok"
    for _ in range(4):
        made.step()
    assert state(made) == "no-data"


def test_old_figures_go_after_three_intervals_without_news():
    made = feeder()
    run(made, GOOD, GOOD)
    assert made.controller.live[KEY].signal.windows == 2
    for _ in range(3):
        made.step()
    assert made.controller.live[KEY].signal.windows == 2
    made.step()
    assert made.controller.live[KEY].signal is NOTHING
    (row,) = made.controller.snapshot(0)["slas"]
    assert (row["state"], row["latency_us"], row["u"]) == ("no-data", None, 0.0)


def test_one_bad_window_is_noise_two_are_a_violation_told_once():
    made = feeder()
    assert run(made, GOOD, GOOD, BAD) == []
    assert state(made) == "ok"
    assert run(made, BAD, BAD, BAD) == ["violation-opened"]
    assert state(made) == "violating"


def test_it_closes_when_no_window_is_over():
    made = feeder()
    run(made, BAD, BAD, BAD)
    assert run(made, GOOD, GOOD) == []
    assert run(made, GOOD, GOOD) == ["violation-closed"]
    assert state(made) == "ok"


def test_the_episode_closes_when_the_promise_was_kept_for_a_while_and_the_state_before():
    made = feeder(calm_s=20)
    run(made, BAD, BAD, BAD)
    assert run(made, *[GOOD] * 4) == []
    assert state(made) == "ok"
    assert made.controller.promise_states([KEY])[KEY]["is_open"]
    assert run(made, *[GOOD] * 10, BAD, BAD, *[GOOD] * 22) == []  # the same episode: not calm for 20 s
    assert run(made, GOOD) == ["violation-closed"]


def test_no_data_is_not_calm():
    made = feeder(calm_s=20)
    run(made, BAD, BAD, *[GOOD] * 10)
    for _ in range(60):
        assert events_of(made.step()) == []
    assert run(made, *[GOOD] * 19) == []
    assert "violation-closed" in run(made, *[GOOD] * 4)


class NoisyRow:
    """Windows of which some are over by chance; what a LiveState asks of its row."""

    idle = False

    def is_partial(self, now_ns: int) -> bool:
        return False

    def breaks_slices(self) -> None:
        return None

    def spoke_since(self, since_ns: int) -> bool:
        return True

    def __init__(self, seed: int) -> None:
        self._random, self._over, self.last_piece_ns = random.Random(seed), [False] * 3, 0

    def second(self, now_ns: int) -> None:
        self._over, self.last_piece_ns = [*self._over[1:], self._random.random() < 0.3], now_ns

    def signal(self) -> Signal:
        over = sum(self._over)
        return Signal(3, 100.0, 12_000, over * 2.0, 0.5, 6_000.0, over, over, False)


@pytest.mark.parametrize("seed", range(5))
def test_an_hour_of_noise_is_few_episodes(seed):
    """A machine on which three seconds of ten are bad by chance: 2 of 3 windows over some 700 times."""
    row = NoisyRow(seed)
    made, kinds = LiveState(ControlSettings(), promise(), row), []
    for second in range(1, 3601):
        row.second(second * 1_000_000_000)
        if event := made.update(second * 1_000_000_000):
            kinds.append(event.kind)
    assert kinds[:3:2] == ["violation-opened"] * len(kinds[:3:2])
    assert 1 <= len(kinds) <= 24
    assert kinds == (["violation-opened", "violation-closed"] * 12)[: len(kinds)]


def test_an_episode_that_comes_after_a_long_calm_closes_as_the_first_did():
    made = feeder(calm_s=20)
    assert run(made, BAD, BAD, *[GOOD] * 30) == ["violation-opened", "violation-closed"]
    assert run(made, BAD, BAD, *[GOOD] * 30) == ["violation-opened"]  # soon: 40 s this time
    assert run(made, *[GOOD] * 20) == ["violation-closed"]
    run(made, *[GOOD] * 600)
    assert run(made, BAD, BAD, *[GOOD] * 30) == ["violation-opened", "violation-closed"]


def test_at_risk_is_between():
    made = feeder()
    run(made, *[{"gold": (100, 11.8)}] * 3)
    assert state(made) == "at-risk"


def test_idle_closes_a_violation():
    made = feeder()
    run(made, BAD, BAD)
    kinds = run(made, *[{}] * 6)
    assert kinds == ["violation-closed"]
    assert state(made) == "idle"


def test_no_data_neither_opens_nor_closes():
    made = feeder()
    run(made, BAD, BAD)
    assert [e for _ in range(10) for e in events_of(made.step())] == []
    assert state(made) == "no-data"
    assert run(made, BAD, BAD, BAD) == []
    assert state(made) == "violating"


def test_demand_above_the_curve_promises_nothing():
    made = feeder(curve=(CurveStep(50, 12_000),))
    assert run(made, BAD, BAD, BAD) == []
    assert state(made) == "out-of-curve"


def test_the_event_has_the_figures():
    made = feeder()
    (event,) = [e for _ in range(2) for e in events_of(made.step((A, BAD, 0)), "violation-opened")]
    assert event.subject == "gold/latency"
    assert event.details["u"] == 20.0
    assert event.details["threshold_us"] == 12_000
    assert "100 IOPS" in event.text


def test_the_event_tells_the_windows_that_were_over_not_all_of_them():
    """Two small windows are over; with a large good one between, all together keep the promise."""
    made = feeder()
    small, large = {"gold": (25, 30)}, {"gold": (2000, 2)}
    made.step((A, small, 0))
    made.step((A, large, 0))
    (event,) = events_of(made.step((A, small, 0)), "violation-opened")
    assert made.controller.live[KEY].signal.u < 1
    assert (event.details["u"], event.details["windows_over"], event.details["windows"]) == (20.0, 2, 3)
    assert event.details["latency_us"] > 12_000
    assert "in 2 of the last 3 windows, 20.00 times the misses allowed, p95 3" in event.text
    assert "25 IOPS" in event.text


def test_the_end_of_a_violation_is_said_in_words_of_the_page():
    made = feeder()
    run(made, BAD, BAD)
    (event,) = [e for _ in range(60) for e in events_of(made.step((A, GOOD, 0)), "violation-closed")]
    assert event.text.startswith("gold/latency is kept again: ")
    assert event.text.endswith(" IOPS offered")


def test_the_end_of_a_violation_by_silence_tells_no_figures_of_before():
    made = feeder()
    run(made, BAD, BAD)
    (event,) = [e for _ in range(6) for e in events_of(made.step((A, {}, 0)), "violation-closed")]
    assert event.text == "gold/latency is no longer violated: there is no I/O any more"


HANGS = {"gold": (0, 1.0)}


def hang(made: Feeder, seconds: int, old_agent: bool, after_ms: float = 900) -> list[list[str]]:
    """Storage answers nothing with 32 I/Os outstanding; the kinds of events of each second."""
    found = []
    for second in range(seconds):
        kinds = made.step(
            (A, HANGS, 0),
            waiting={"gold": (32, after_ms + second * 1000)},
            overdue={"gold": (32, 0)} if second == 0 else {},
            old_agent=old_agent,
        )
        found.append([e.kind for e in events_of(kinds)])
    return found


@pytest.mark.parametrize("old_agent", [False, True])
def test_a_hang_of_182_seconds_is_a_violation_within_three_windows_and_stays_one(old_agent):
    made = feeder()
    run(made, *[GOOD] * 5)
    made.step((A, GOOD, 0), waiting={"gold": (32, 1)}, old_agent=old_agent)
    kinds = hang(made, 182, old_agent)
    assert [second for second, each in enumerate(kinds) if "violation-opened" in each] == [1]
    assert not any("violation-closed" in each for each in kinds)
    signal = made.controller.live[KEY].signal
    assert (state(made), signal.stalled, signal.u) == ("violating", 3, pytest.approx(20))
    assert signal.latency_us >= 178e6  # not the p95 of before
    assert "no I/O completed for 18" in made.controller.live[KEY]._figures_text(signal, NO_FIGURES)


def test_what_was_overdue_and_completes_is_not_counted_again():
    made = feeder()
    made.step((A, GOOD, 0), waiting={"gold": (32, 1)})
    hang(made, 6, old_agent=False)
    # 32 of them complete at last, and 500 are quick: 6 % missed would be over, and they were missed before.
    made.step((A, {"gold": (32, 6000)}, 0), overdue={"gold": (0, 32)})
    newest = made.controller.live[KEY].row
    table = made.controller.scopes.table.windows
    slot = int(table.pos[newest.row] - 1) % table.depth * len(table.pos) + newest.row
    assert table.w_stall_us[slot] > 0  # nothing new to count: the window goes on
    made.step((A, {"gold": (500, 2)}, 0))
    slot = int(table.pos[newest.row] - 1) % table.depth * len(table.pos) + newest.row
    assert (table.w_counted[slot, 0], table.w_missed[slot, 0]) == (500, 0)


@pytest.mark.parametrize("old_agent", [False, True])
def test_storage_that_fails_every_io_is_in_violation_however_fast(old_agent):
    made = feeder()
    run(made, GOOD, GOOD)
    kinds = [
        e.kind
        for _ in range(3)
        for e in events_of(made.step((A, GOOD, 0), failed={"gold": 100}, old_agent=old_agent))
    ]
    assert "violation-opened" in kinds
    signal = made.controller.live[KEY].signal
    assert (signal.u, signal.failed_ratio, signal.at_risk) == (pytest.approx(20), 1.0, False)


def test_failed_ios_do_not_count_where_the_agreement_says_so():
    made = feeder(counts_errors=False)
    for _ in range(4):
        made.step((A, GOOD, 0), failed={"gold": 30})
    signal = made.controller.live[KEY].signal
    assert (state(made), signal.u, signal.failed_ratio) == ("ok", 0.0, 0.0)


def host_controller(mode: str = "observe"):
    made = controller((promise(),), (volume_class(),), mode)
    made.gateway_up(A, "A", [{"volume": "gold", "backend": "disk", "source": "host"}], 0)
    made.add_streams(A, streams(A, "gold"))
    return made


@pytest.mark.parametrize("announced", [True, False])
def test_a_stream_without_latencies_has_no_data_and_says_why(announced):
    made = host_controller()
    if not announced:  # its cuts tell, too
        made.gateway_up(A, "A", exports("gold"), 0)
    world = Feeder(made)
    for second in range(1, 12):
        each = cut(A, second, {"gold": (100, 900.0)}, thresholds_us=())
        bare = dataclasses.replace(each, hist=each.hist[:0])
        made.add_cut(bare, UNIX_0_US + second * 1_000_000, 0, False, second * 1_000_000_000)
        assert events_of(made.tick(second * 1_000_000_000, UNIX_0_US)) == []
    assert state(world) == "no-data"
    (row,) = made.snapshot(0)["slas"]
    assert row["latency_us"] is None
    wanted = "beside the I/O path" if announced else "no statistics with latencies have come yet"
    assert wanted in row["reason"]
    assert made.snapshot(0)["volumes"][0]["iops"] == 100


def test_why_there_is_no_data():
    made = feeder()
    assert made.controller.snapshot(0)["slas"][0]["reason"] == "no statistics with latencies have come yet"
    run(made, GOOD)
    assert made.controller.snapshot(0)["slas"][0]["reason"] == ""
    empty = controller((promise(),), mode="observe")
    assert empty.snapshot(0)["slas"][0]["reason"] == "no client has used its volumes yet"


def test_what_a_gateway_refuses_is_its_clients_own_error():
    made = feeder()
    made.step((A, GOOD, 0), waiting={"gold": (1, 1)})  # an agent that says what failed
    for second in range(2, 6):
        each = cut(A, second, GOOD, failed={"gold": 50}, old_agent=True)
        made.controller.add_cut(each, UNIX_0_US + second * 1_000_000, 0, False, (second + 1) * 1_000_000_000)
        made.controller.tick((second + 1) * 1_000_000_000, UNIX_0_US)
    assert (state(made), made.controller.live[KEY].signal.failed_ratio) == ("ok", 0.0)


@pytest.mark.parametrize("old_agent", [False, True])
def test_a_flush_that_takes_long_is_no_stall_of_reads_and_writes(old_agent):
    made = feeder()
    run(made, GOOD, GOOD)
    for second in range(4):
        each = cut(A, 3 + second, HANGS, waiting={"gold": (1, 900 + second * 1000)}, old_agent=old_agent)
        made.controller.add_cut(each, each.start_unix_us + 1_000_000, 0, False, (4 + second) * 1_000_000_000)
        made.controller.tick((4 + second) * 1_000_000_000, UNIX_0_US)
    assert (state(made), made.controller.live[KEY].signal.stalled) == ("ok", 0)


def test_storage_that_is_gone_is_in_violation_though_there_is_no_io():
    """Its clients were disconnected, and are refused while it is away."""
    made = feeder()
    run(made, GOOD, GOOD)
    kinds = []
    for second in range(3, 40):
        each = cut(A, second, HANGS)
        entries = np.array([(0, FAILED, 0, 2, 0)], MISSED_DTYPE)
        made.controller.add_cut(
            dataclasses.replace(each, missed=entries),
            each.start_unix_us + 1_000_000,
            0,
            False,
            second * 1_000_000_000,
        )
        kinds += [e.kind for e in events_of(made.controller.tick(second * 1_000_000_000, UNIX_0_US))]
    assert kinds == ["violation-opened"]
    assert (state(made), made.controller.live[KEY].signal.failed_ratio) == ("violating", 1.0)


def test_a_broken_window_before_a_pause_counts_with_the_first_one_after_it():
    made = feeder(calm_s=1)
    assert run(made, GOOD, BAD, *[{}] * 8) == []
    assert (state(made), made.controller.live[KEY].signal) == ("idle", NOTHING)
    assert run(made, BAD) == ["violation-opened"]


def test_a_broken_window_before_a_pause_breaks_nothing_by_itself():
    made = feeder(calm_s=1)
    assert run(made, BAD, BAD, BAD, *[{}] * 8) == ["violation-opened", "violation-closed"]
    assert run(made, {"gold": (5, 2)}) == []  # the window is open, and nothing of now is known
    assert state(made) == "no-data"
    assert run(made, {"gold": (100, 2)}, GOOD) == []
    assert state(made) == "ok"


@pytest.mark.parametrize(("pause_s", "wanted"), [(50, ["violation-opened"]), (65, [])])
def test_it_is_forgotten_after_the_length_of_a_slice(pause_s, wanted):
    made = feeder(calm_s=1)
    run(made, GOOD, BAD, *[{}] * pause_s)
    assert run(made, BAD) == wanted


def test_a_few_ios_before_a_pause_are_judged_before_it_begins():
    made = feeder(calm_s=1)
    few = {"gold": (3, 30)}
    assert run(made, few, *[{}] * 9, few, *[{}] * 8) == []
    assert run(made, {}) == ["violation-opened"]
    assert run(made, *[{}] * 4) == []
    assert run(made, *[{}] * 3) == ["violation-closed"]


def test_slowing_neighbours_down_ends_with_a_pause_as_ever():
    made = feeder()
    run(made, GOOD, BAD, *[{}] * 5)
    (scope,) = made.controller.scopes.on_backend("disk")
    table = made.controller.scopes.table.windows
    assert scope.row.idle
    assert (table.count[scope.row.row], table.kept[scope.row.row]) == (0, 0)


def two_gateways(calm_s: float = 0.0, **over) -> Feeder:
    made = controller((promise(volumes=("gold",), **over),), mode="observe", episode_calm_s=calm_s)
    return Feeder(made, (A, ("gold/x",)), (B, ("gold/y",)))


def both(made: Feeder, count: int, of_a: tuple[int, float], of_b: tuple[int, float] | None) -> list[str]:
    """Seconds in which B says something, or is silent: the kinds of events."""
    found = []
    for _ in range(count):
        cuts = [(A, {"gold/x": of_a}, 0), *([(B, {"gold/y": of_b}, 0)] if of_b else [])]
        found += [e.kind for e in events_of(made.step(*cuts)) if e.element == "sla"]
    return found


FAST, SLOW = (100, 2.0), (100, 30.0)


def test_it_has_no_data_while_one_of_its_gateways_is_silent_and_says_which():
    made = two_gateways()
    assert both(made, 5, FAST, FAST) == []
    assert (both(made, 3, FAST, None), state(made)) == ([], "ok")
    assert (both(made, 10, FAST, None), state(made)) == ([], "no-data")
    (row,) = made.controller.snapshot(0)["slas"]
    assert row["reason"] == f"no statistics of gateway {B[:4]} for 13 s: what the others measure is no proof"
    made.controller.gateway_lost(B, "gone", made.now_ns)
    assert (both(made, 3, FAST, None), state(made)) == ([], "no-data")
    assert (both(made, 3, (0, 0.0), None), state(made)) == ([], "no-data")
    both(made, 2, FAST, FAST)
    assert state(made) == "ok"
    assert made.controller.snapshot(0)["slas"][0]["reason"] == ""


def test_the_death_of_a_gateway_closes_no_violation_that_was_seen_through_it():
    made = two_gateways(calm_s=20)
    kinds = both(made, 10, FAST, SLOW) + both(made, 100, FAST, None)
    assert (kinds, state(made)) == (["violation-opened"], "no-data")
    assert made.controller.promise_states([KEY])[KEY]["is_open"]
    assert both(made, 20, FAST, FAST) == []
    assert both(made, 4, FAST, FAST) == ["violation-closed"]


def test_nor_does_its_end_before_polls_are_so_late_that_it_is_silent():
    settings = {"episode_calm_s": 20.0, "poll_interval_s": 10.0}
    slow = controller((promise(volumes=("gold",)),), mode="observe", **settings)
    made = Feeder(slow, (A, ("gold/x",)), (B, ("gold/y",)))
    kinds = both(made, 10, FAST, SLOW)
    made.controller.gateway_lost(B, "gone", made.now_ns)
    kinds += both(made, 100, FAST, None)
    assert (kinds, state(made)) == (["violation-opened"], "no-data")
    assert made.controller.promise_states([KEY])[KEY]["is_open"]
    assert both(made, 24, FAST, FAST)[-1:] == ["violation-closed"]


def test_what_the_others_measure_can_still_break_it():
    made = two_gateways()
    both(made, 5, FAST, FAST)
    assert both(made, 10, SLOW, None) == ["violation-opened"]
    assert state(made) == "violating"
    assert (both(made, 10, FAST, None), state(made)) == ([], "no-data")


def test_one_that_never_spoke_is_waited_for_like_the_others():
    made = two_gateways()
    assert (both(made, 3, FAST, None), state(made)) == ([], "ok")
    both(made, 3, FAST, None)
    (row,) = made.controller.snapshot(0)["slas"]
    assert row["state"] == "no-data"
    assert row["reason"].startswith(f"no statistics of gateway {B[:4]} have come yet")


def test_a_gateway_that_is_silent_for_a_day_is_no_longer_waited_for():
    made = two_gateways()
    both(made, 5, FAST, FAST)
    both(made, 5, FAST, None)
    assert state(made) == "no-data"
    made.second += 86_400
    both(made, 2, FAST, None)
    assert state(made) == "ok"


def test_a_gateway_that_was_lost_before_the_server_started_is_waited_for_too():
    made = Feeder(controller((promise(volumes=("gold",)),), mode="observe"), (A, ("gold/x",)))
    made.controller.gateway_away(B, "gw-b", streams(B, "gold/y"))
    both(made, 5, FAST, None)
    assert state(made) == "no-data"
    assert made.controller.snapshot(0)["slas"][0]["reason"].startswith("no statistics of gateway gw-b have")
    both(made, 2, FAST, FAST)
    assert state(made) == "ok"
    assert made.controller.snapshot(0)["gateways"][1]["state"] == "up"


def test_a_promise_of_which_all_that_is_known_is_broken_is_not_called_kept() -> None:
    """A volume with an I/O a second has its second window after 20 s."""
    made, seen = feeder(), list[str]()
    for _ in range(21):
        made.step((A, {"gold": (1, 400)}, 0))
        row = made.controller.live[KEY].row
        assert STATES[made.controller.scopes.table.code[row.row]] == made.controller.live[KEY].state
        seen.append(made.controller.live[KEY].state)
    assert list(dict.fromkeys(seen)) == ["no-data", "at-risk", "violating"]
    made = feeder()
    for _ in range(12):
        made.step((A, {"gold": (1, 2)}, 0))
    assert made.controller.live[KEY].state == "ok"


EXCLUDING = {
    "latency": {},
    "mean latency": {"metric": "mean_latency", "percentile": 0.0},
    "iops": {"metric": "iops", "percentile": 0.0, "curve": (), "promised": 50.0},
    "throughput": {"metric": "throughput", "percentile": 0.0, "curve": (), "promised": 200_000.0},
}


@pytest.mark.parametrize("over", EXCLUDING.values(), ids=EXCLUDING)
def test_where_all_io_fails_and_is_excluded_windows_of_before_are_no_proof(over):
    """It stayed ok for ever: a cut with I/O is no pause, and no window closed with any that counts."""
    made = feeder(counts_errors=False, **over)
    for _ in range(8):
        made.step((A, GOOD, 0))
    assert state(made) == "ok"
    for _ in range(12):
        made.step((A, GOOD, 0), failed={"gold": 100})
    assert state(made) == "no-data"
    for _ in range(4):
        made.step((A, GOOD, 0))
    assert state(made) == "ok"


def test_a_violation_does_not_end_because_all_io_fails_and_is_excluded():
    made = feeder(counts_errors=False)
    for _ in range(8):
        made.step((A, BAD, 0))
    assert state(made) == "violating"
    for _ in range(30):
        made.step((A, GOOD, 0), failed={"gold": 100})
    assert made.controller.live[KEY].violating


def test_of_two_gateways_of_which_all_io_fails_and_is_excluded_nothing_is_known_either():
    made = Feeder(controller((promise(counts_errors=False),), mode="observe"), (A, ("gold",)), (B, ("gold",)))
    for _ in range(8):
        made.step((A, GOOD, 0), (B, GOOD, 0))
    assert state(made) == "ok"
    for _ in range(14):
        made.step((A, GOOD, 0), (B, GOOD, 0), failed={"gold": 100})
    assert state(made) == "no-data"

"""Feed-forward step by step: what is watched, when C is set ahead of a burst, and when not.

The world is made by hand, a second at a time: greedy wants 400 I/O/s in its bursts and gets its cap; gold has
2 ms while both together use less than ``BREAKS`` weighted IOPS, else 30 ms of 12 allowed. Bins of 2 s, a
burst of 7 s every 20: the pattern is known after four of them, the fifth is left alone. What comes of it on
storage that queues is in ``test_feed_forward_worlds``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from pmdaemon.wire.cut import Cut
from pmdaemon.wire.messages.agent import CLIENT_CAPS
from sla_server.agreements.promise import CurveStep, Priority
from sla_server.services.control import feed_forward
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.controller import Controller
from sla_server.services.control.decision_log import LoopBefore
from sla_server.services.control.decisions import Reason, RecordDecision, RecordThrottle, SetCaps
from sla_server.services.control.feed_forward import FeedForward
from sla_server.services.control.feed_forward_trial import Burst
from sla_server.services.control.feed_forward_watch import Watched
from sla_server.services.control.loop_step import LoopStep, Phase
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US
from tests.support.worlds import controller, cut, exports, promise, streams, volume_class

S = 1_000_000_000
BREAKS = 300.0
IO_COST = 1.0625
REASON = Reason.RECURRING_BURST
PERIOD = 20
KNOWN = 130
"""Second by which one cap was set ahead."""
FAST = {"bin_s": 2.0, "backoff_s": 300.0}


def forward(made: Controller) -> FeedForward:
    return made.loops.forward


def square(
    period: int = PERIOD, length: int = 7, until: int = 1 << 30, quiet: float = 10.0
) -> Callable[[int], float]:
    return lambda second: 400.0 if second % period < length and second < until else quiet


class World:
    """See the module.

    Attributes:
        wanted: of greedy, I/Os a second by second.
        quiet_held: I/Os of greedy held back at the end of a cut in which it got all that it wanted.
        hangs: no I/O of either completes.
    """

    def __init__(
        self,
        wanted: Callable[[int], float],
        *,
        mode: str = "enforce",
        breaks: float = BREAKS,
        promises: tuple[Any, ...] = (promise(),),
        classes: tuple[Any, ...] = (volume_class(),),
        own: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        settings = {"demand_memory_s": 5.0, "feed_forward": {**FAST, **(own or {})}, **settings}
        self.controller = controller(promises, classes, mode, **settings)
        self.wanted, self.breaks, self.second = wanted, breaks, 0
        self.gold = 60
        self.quiet_held, self.hangs, self.was_hanging = 0, False, False
        self.caps: dict[str, float] = {}
        self.gens = {"A": 0, "B": 0}
        self.bad: list[int] = []
        self.decisions: list[tuple[int, dict[str, Any]]] = []
        self.throttles: dict[str, dict[str, Any]] = {}
        self._connect()

    def _connect(self) -> None:
        for gateway, volume in (("A", "gold"), ("B", "greedy")):
            self.controller.gateway_up(gateway, gateway, exports(volume), S)
            self.controller.add_streams(gateway, streams(gateway, volume))

    def run(self, until: int) -> World:
        while self.second < until:
            self._pass()
        return self

    def _pass(self) -> None:
        wanted = self.wanted(self.second)
        self.second += 1
        done = min(wanted, self.caps.get("greedy", 1e9) / IO_COST)
        slow = (done + self.gold) * IO_COST > self.breaks
        if slow:
            self.bad.append(self.second)
        now_ns, unix_us = (1 + self.second) * S, UNIX_0_US + self.second * 1_000_000
        held = 8 if done < wanted else self.quiet_held
        for each in self._cuts(30.0 if slow else 2.0, round(done), held):
            self.controller.add_cut(each, unix_us, 0, False, now_ns)
        for decision in self.controller.tick(now_ns, unix_us):
            if isinstance(decision, SetCaps):
                self.gens[decision.gateway_id] = decision.gen
                self._take(decision)
            elif isinstance(decision, RecordDecision):
                self.decisions.append((self.second, decision.row))
            elif isinstance(decision, RecordThrottle):
                self.throttles[decision.row["throttle_id"]] = decision.row

    def _cuts(self, gold_ms: float, done: int, held: int) -> list[Cut]:
        if self.hangs:
            waiting = {"A": {"gold": (8, 5_000.0)}, "B": {"greedy": (8, 5_000.0)}}
            ios = {"A": {"gold": (0, 0.0)}, "B": {"greedy": (0, 0.0)}}
            new = dict.fromkeys(("gold", "greedy"), 8) if not self.was_hanging else {}
            self.was_hanging = True
            return [
                cut(g, self.second, ios[g], gen=self.gens[g], waiting=waiting[g], arriving=new) for g in "AB"
            ]
        return [
            cut("A", self.second, {"gold": (self.gold, gold_ms)}, gen=self.gens["A"]),
            cut("B", self.second, {"greedy": (done, 2.0)}, gen=self.gens["B"], held=held),
        ]

    def _take(self, decision: SetCaps) -> None:
        if decision.gateway_id == "B":
            self.caps = {cap["volume"]: cap["cost_per_s"] for cap in decision.caps}

    def of(self, kind: str, since: int = 0) -> list[tuple[int, dict[str, Any]]]:
        return [(at, row) for at, row in self.decisions if row["kind"] == kind and at >= since]

    def bad_in(self, start: int, end: int) -> int:
        return sum(start < at <= end for at in self.bad)


def figures(world: World) -> dict[str, int]:
    return forward(world.controller).figures()


@pytest.fixture(scope="module")
def known_once() -> World:
    return World(square()).run(KNOWN)


@pytest.fixture
def known(known_once: World) -> World:
    """A pattern is known, and one cap was set ahead: a copy, as it takes a while to come so far."""
    return copy.deepcopy(known_once)


def test_what_is_set_is_what_the_loop_found_and_why_is_written_down(known: World) -> None:
    ((at, row),) = known.of("pre-position")
    assert (at, at % PERIOD) == (118, 18)
    raised = [each["figures"] for _, each in known.of("increase") if each["at_us"] < row["at_us"]]
    assert row["figures"]["c_after"] == raised[-1]["c_before"], "what it raised C from was kept"
    assert (row["reason"], row["backend"], row["victim"]) == ("recurring-burst", "disk", "gold/latency")
    assert row["figures"]["throttled"] == ["greedy"]
    assert row["text"].startswith("ahead of time for gold/latency: a burst is expected in 3 s, as every 20 s")
    caps = [each for _, each in known.of("cap-set") if each["at_us"] == row["at_us"]]  # again when confirmed
    assert {(cap["volume"], cap["reason"]) for cap in caps} == {("greedy", "recurring-burst")}
    assert known.controller.snapshot(UNIX_0_US)["feed_forward"] == figures(known)
    found = figures(known)
    assert (found["expected"], found["left_alone"], found["ahead"]) == (2, 1, 1)
    assert (found["watched"], found["recurring"], found["looks"]) == (1, 1, 64)


def test_bad_windows_are_counted_with_and_without(known: World) -> None:
    known.run(197)
    found = figures(known)
    assert (found["ahead"], found["left_alone"], found["came"], found["missed"]) == (3, 2, 5, 0)
    assert (found["bad_ahead"], found["bad_alone"]) == (3, 6)
    assert known.bad_in(100, 120) == known.bad_in(160, 180) == 3
    assert known.bad_in(120, 140) == known.bad_in(140, 160) == known.bad_in(180, 200) == 1
    assert forward(known.controller).backends["disk"].trial(REASON).helps


def test_switched_off_by_the_setting_it_does_nothing() -> None:
    world = World(square(), own={"enabled": False}).run(KNOWN)
    assert world.of("start")
    assert world.of("pre-position") == []
    assert set(figures(world).values()) == {0}


def test_expected_bursts_that_do_not_come_switch_it_off() -> None:
    """Whenever the pattern is known, it pauses."""
    world = World(lambda second: square()(second) if second % 140 < 100 else 10.0, own={"most_missed": 1})
    world.run(240)
    ((at, row),) = world.of("ahead-off")
    assert (row["reason"], row["backend"]) == ("ahead-no-burst", "disk")
    assert 100 < at <= 106
    assert "1 bursts that were expected did not come" in row["text"]
    assert (figures(world)["missed"], figures(world)["switched_off"], figures(world)["off"]) == (1, 1, 1)
    assert world.caps == {}


def test_where_it_does_not_help_it_is_off_and_neighbours_are_not_held_lower_each_time() -> None:
    world = World(square(length=6)).run(90)
    while world.second < 275:
        # Gold is slow in the first seconds of each burst whatever is capped.
        world.breaks = 50.0 if world.second % PERIOD < 3 else BREAKS
        world.run(world.second + 1)
    ((at, row),) = world.of("ahead-off")
    assert row["reason"] == "ahead-no-help"
    assert (row["figures"]["off_s"], row["figures"]["kind"]) == (300, "recurring-burst")
    assert (row["figures"]["bad_ahead"], row["figures"]["bad_alone"]) == ([3, 3, 3], [3, 3, 3])
    assert world.of("pre-position", since=at + 1) == []
    assert figures(world)["off"] == 1
    reacted = [each["figures"]["c_after"] for _, each in (*world.of("start"), *world.of("decrease"))]
    assert all(each["figures"]["c_after"] >= min(reacted) for _, each in world.of("pre-position"))


def test_observe_sets_nothing_ahead(known: World) -> None:
    known.controller.set_mode("observe")
    known.run(170)
    assert len(known.of("pre-position")) == 1
    assert known.caps == {}
    watching = World(square(), mode="observe").run(30)
    assert figures(watching)["watched"] == 0


@pytest.mark.parametrize("metric", ["latency", "iops"])
def test_a_neighbour_with_a_promise_of_its_own_is_left_to_the_loop(metric: str) -> None:
    own = promise("greedy", ms=500, priority=Priority.BEST_EFFORT)
    if metric == "iops":
        own = promise("greedy", priority=Priority.BEST_EFFORT, metric=metric, curve=(), promised=10.0)
    classes = (volume_class(), volume_class("greedy", Priority.BEST_EFFORT))
    world = World(square(), promises=(promise(), own), classes=classes).run(KNOWN)
    assert len(world.of("start")) >= 6
    assert world.of("pre-position") == []
    assert figures(world)["recurring"] == 1


def test_an_idle_victim_needs_no_cap_ahead(known: World) -> None:
    known.gold = 0
    known.run(180)
    assert len(known.of("pre-position")) == 1
    assert figures(known)["recurring"] == 1


def test_a_victim_above_its_curve_gets_no_cap_ahead() -> None:
    world = World(square(), promises=(promise(curve=(CurveStep(100.0, 12_000),)),)).run(110)
    world.gold = 150
    world.run(160)
    assert world.of("pre-position") == []
    assert figures(world)["recurring"] == 1


def test_the_policy_of_the_coming_hour_is_put_in_force_before_it_begins() -> None:
    """The first burst teaches; the second one comes at the beginning of an hour that the policy knows."""
    world = World(lambda second: 400.0 if second < 10 or 50 <= second < 65 else 10.0).run(40)
    world.controller.set_coming_caps({"greedy": 150.0, "other": 5.0}, UNIX_0_US + 50 * 1_000_000)
    trial = forward(world.controller).backends["disk"].trial(Reason.POLICY_AHEAD)
    trial.add(Burst(False, 3))
    world.run(55)
    world.controller.set_policy_caps(1, {"greedy": 150.0})  # services look every ten seconds
    world.run(70)
    ((at, row),) = world.of("pre-position")
    assert at == 47
    assert (row["reason"], row["figures"]["c_after"]) == ("policy-ahead", 150.0)
    assert "the policy has lower caps from the hour on that begins in 3 s" in row["text"]
    assert world.bad_in(45, 70) == 0
    assert (figures(world)["ahead"], figures(world)["came"]) == (1, 1)


def test_a_policy_that_allows_no_less_than_now_is_no_reason() -> None:
    world = World(lambda second: 400.0 if second < 10 else 10.0).run(30)
    world.controller.set_policy_caps(1, {"greedy": 150.0})
    world.controller.set_coming_caps({"greedy": 150.0}, UNIX_0_US + 40 * 1_000_000)
    world.run(50)
    assert figures(world)["expected"] == 0


def test_a_cap_ahead_is_not_below_the_floors_of_now(known: World) -> None:
    floor = volume_class("greedy", Priority.BEST_EFFORT, floor_iops=215.0)
    known.controller.set_agreements([promise()], [volume_class(), floor])
    known.run(139)
    (_, first), (_, second) = known.of("pre-position")
    assert first["figures"]["c_after"] < 215 * IO_COST
    assert second["figures"]["c_after"] == pytest.approx(215 * IO_COST, abs=0.1)


def test_a_cause_elsewhere_is_forgotten(known: World) -> None:
    known.breaks = 0.0  # gold is slow whatever is capped: the loop finds no effect
    known.wanted = lambda _second: 400.0
    known.run(KNOWN + 40)
    assert known.of("unattributed")
    assert forward(known.controller).backends == {}


def test_the_backend_whose_loop_acted_longest_ago_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_forward, "MOST_WATCHED", 2)
    found, settings = forward(controller()), ControlSettings()
    for second, name in enumerate(("a", "b", "a", "c")):
        control = BackendControl(settings, name)
        before = LoopBefore.of(control)
        control.phase, control.allowed, control.start, control.ceiling = Phase.DECREASE, 200.0, 400.0, 400.0
        found.learn(control, LoopStep(changed=True), before, second * S)
    assert found.backends.keys() == {"a", "c"}


def test_what_was_met_in_a_burst_with_a_cap_ahead_fades_in_those_left_alone() -> None:
    watched, control = Watched(), BackendControl(ControlSettings(), "disk")

    parked = control.settings.park_ratio * 320

    def moved(allowed: float, ceiling: float, reason: Reason, before: float) -> float:
        control.phase, control.allowed, control.start, control.ceiling = Phase.HOLD, allowed, 400.0, ceiling
        seen = LoopBefore(before > 0, before, {}, None, ())
        watched.learn(control, LoopStep(True, reason), seen, 0)
        return watched.allowed

    assert moved(200, 400, Reason.PROMISE_VIOLATED, 0) == 200
    assert moved(300, 400, Reason.RECOVERY, 200) == 200, "what it is raised to is not known yet"
    assert moved(340, 400, Reason.RECOVERY, 300) == 300
    watched.is_ahead = True
    assert moved(280, 320, Reason.PROMISE_VIOLATED, 300) == 280
    assert moved(150, 320, Reason.PROMISE_VIOLATED, 280) == 200, "half of C0: what a first cut comes to"
    assert moved(400, 320, Reason.RECOVERY, 390) == pytest.approx(parked), "parked below the ceiling"
    watched.is_ahead = False
    assert moved(200, 400, Reason.PROMISE_VIOLATED, 0) == pytest.approx(parked), "still known"
    assert watched.ceiling == 320 + 400 / 16


def test_caps_are_no_longer_set_ahead_once_the_storage_is_faster(known: World) -> None:
    """The need has gone: a burst or two with caps that were not needed, then none."""
    known.run(320)
    assert forward(known.controller).backends["disk"].trial(REASON).helps
    before = len(known.of("pre-position"))
    known.breaks = 1e9
    known.run(500)
    assert len(known.of("pre-position")) - before <= 2, "of 9 bursts"
    ((at, row),) = known.of("ahead-off")
    assert row["reason"] == "ahead-no-help"
    assert "the last 2 bursts without caps ahead of them broke no promise" in row["text"]
    assert known.of("pre-position", since=at) == []
    assert (figures(known)["discarded"], figures(known)["switched_off"]) == (1, 1)
    assert forward(known.controller).backends["disk"].allowed == 0, "the loop has to find C again"


def evidence(world: World) -> tuple[list[int], list[int]]:
    return forward(world.controller).backends["disk"].trial(REASON).bad()


def test_evidence_of_another_mode_is_none(known: World) -> None:
    assert evidence(known) != ([], [])
    known.controller.set_mode("enforce")
    assert evidence(known) != ([], []), "the same mode"
    known.controller.set_backend_modes({"elsewhere": "observe"})
    assert evidence(known) != ([], []), "of another backend"
    known.controller.set_agreement_modes({"gold": "observe"})
    assert evidence(known) == ([], [])
    known.controller.set_agreement_modes({})
    assert figures(known)["discarded"] == 1
    alone, ahead = figures(known)["left_alone"], figures(known)["ahead"]
    known.run(150)
    assert (figures(known)["left_alone"], figures(known)["ahead"]) == (alone + 1, ahead), "from the beginning"


def test_a_burst_during_which_the_mode_changed_is_no_evidence(known: World) -> None:
    known.run(142)
    assert forward(known.controller).backends["disk"].expected is not None
    known.controller.set_mode("observe")
    known.run(144)
    known.controller.set_mode("enforce")
    known.run(154)
    assert evidence(known) == ([], [])


def test_evidence_about_other_promises_is_none(known: World) -> None:
    known.controller.set_agreements([promise()], [volume_class(), volume_class("other", Priority.SILVER)])
    assert evidence(known) != ([], []), "the promises are the same"
    known.controller.set_agreements([promise(ms=24)], [volume_class()])
    assert evidence(known) == ([], [])


def test_after_a_fault_of_the_storage_it_is_learned_again(known: World) -> None:
    known.hangs = True
    known.run(KNOWN + 10)
    assert known.controller.faults.kind_of("disk") == "hangs"
    watched = forward(known.controller).backends["disk"]
    assert (evidence(known), watched.allowed) == (([], []), 0.0)
    known.hangs = False
    known.run(KNOWN + 20)
    count = figures(known)["expected"]
    known.run(300)
    assert figures(known)["expected"] > count, "once its loop has acted again"
    first = min(at for at, _ in known.of("pre-position", since=KNOWN + 6))
    assert known.of("start", since=KNOWN + 6)[0][0] < first


@pytest.mark.parametrize("count", [1, 70])
def test_every_promise_of_the_backend_counts(known: World, count: int) -> None:
    others = [promise("gold", sla=f"gold-{number}") for number in range(count - 1)]
    known.controller.set_agreements([promise(ms=12.5), *others], [volume_class()])
    before = figures(known)["bad_alone"]
    known.run(152)
    assert figures(known)["bad_alone"] - before == 3 * count


def test_c_is_not_set_ahead_where_it_would_hold_back_what_is_no_burst() -> None:
    world = World(square(quiet=200.0)).run(142)
    assert len(world.of("start")) >= 6
    assert figures(world)["recurring"] == 1
    assert forward(world.controller).backends["disk"].allowed < 200 * IO_COST / 0.9
    assert (world.of("pre-position"), figures(world)["expected"]) == ([], 0)


def test_io_that_a_cap_ahead_holds_back_is_no_burst_by_itself(known: World) -> None:
    known.run(137)
    known.wanted, known.quiet_held = square(quiet=10.0, until=0), 1
    known.run(150)
    assert len(known.of("pre-position")) == 2
    assert (figures(known)["missed"], figures(known)["came"]) == (1, 2)


def test_a_burst_seen_only_by_what_a_cap_ahead_held_back_is_not_proven(known: World) -> None:
    watched = forward(known.controller).backends["disk"]
    known.run(145)
    assert watched.expected is not None
    assert (watched.expected.came, watched.expected.is_proven) == (True, False)
    known.run(152)
    (left_alone,), (_, newest) = (
        [entry.burst for entry in entries]
        for entries in (watched.trials[REASON].alone, watched.trials[REASON].ahead)
    )
    assert left_alone.is_proven, "it did the I/O of a burst"
    assert newest.is_proven, "the loop raised C, and they used it"


class Divided(World):
    """The same load from two clients of one volume, of which one is promised something."""

    def _connect(self) -> None:
        self.controller.set_features("A", (CLIENT_CAPS,))
        self.controller.gateway_up("A", "A", exports("erp"), S)
        self.controller.add_streams("A", streams("A", "erp/db", "erp/job"))

    def _cuts(self, gold_ms: float, done: int, held: int) -> list[Cut]:
        ios = {"erp/db": (self.gold, gold_ms), "erp/job": (done, 2.0)}
        return [cut("A", self.second, ios, gen=self.gens["A"], held=held)]

    def _take(self, decision: SetCaps) -> None:
        found = {cap["client"]: cap["cost_per_s"] for cap in decision.clients}
        self.caps = {"greedy": found["job"]} if "job" in found else {}


def test_bursts_of_one_client_of_a_volume_are_met_ahead_too() -> None:
    agreed = promise("erp", clients=("db",))
    world = Divided(square(), promises=(agreed,), classes=(volume_class("erp", clients=("db",)),)).run(KNOWN)
    assert forward(world.controller).backends["disk"].volumes == ("erp/job",)
    ((at, row),) = world.of("pre-position")
    assert (at, row["victim"], row["figures"]["throttled"]) == (118, "erp/latency", ["erp/job"])
    assert world.caps["greedy"] > 0
    assert world.bad_in(120, 140) < world.bad_in(100, 120)


def test_a_client_with_a_promise_of_its_own_is_left_to_the_loop() -> None:
    both = (promise("erp", clients=("db",)),
            promise("erp", sla="job", clients=("job",), priority=Priority.BEST_EFFORT, ms=500))  # fmt: skip
    classes = (
        volume_class("erp", clients=("db",)),
        volume_class("erp", Priority.BEST_EFFORT, clients=("job",)),
    )
    world = Divided(square(), promises=both, classes=classes).run(KNOWN)
    assert len(world.of("start")) >= 5
    assert world.of("pre-position") == []


def test_its_text_names_a_few_of_many_targets(known: World) -> None:
    made = forward(known.controller)
    watched = SimpleNamespace(pattern=SimpleNamespace(period_bins=10, strength=0.9))
    targets = dict.fromkeys(f"vol/{'c' * 100}{n:04}" for n in range(1000))
    lead = SimpleNamespace(name="gold/latency")
    text = made._text(watched, Reason.RECURRING_BURST, 130.0, lead, targets, 100.0)
    assert "and 990 more to 100 weighted IOPS" in text


def in_turn(*sizes: float) -> Callable[[int], float]:
    return lambda second: sizes[second // PERIOD % len(sizes)] if second % PERIOD < 7 else 10.0


@pytest.mark.parametrize("sizes", [(400.0, 560.0), (360.0, 500.0, 420.0, 600.0)])
def test_bursts_of_other_sizes_are_no_other_storage(sizes: tuple[float, ...]) -> None:
    alike, found = (World(in_turn(*each)).run(520) for each in (sizes[:1], sizes))
    assert figures(found)["discarded"] == figures(found)["switched_off"] == 0
    assert figures(found)["ahead"] >= figures(alike)["ahead"] - 2
    assert found.bad_in(KNOWN, 520) <= alike.bad_in(KNOWN, 520) + 3 * 3


def other_storage(starts: list[float], short_at: int = -1, volumes: list[str] | None = None) -> list[bool]:
    """Whether it is seen in each of some bursts without C ahead; C fell short just before one of them."""
    watched, control = Watched(), BackendControl(ControlSettings(), "disk")
    neighbour: Any = None
    found = []
    for number, start in enumerate(starts):
        before = LoopBefore.of(control)
        watched.short = 100.0 * (number == short_at)
        now = copy.copy(control)
        now.phase, now.allowed, now.start, now.ceiling = Phase.DECREASE, start / 2, start, start
        now.managed = dict.fromkeys([volumes[number] if volumes else "greedy"], neighbour)
        found.append(watched.learn(now, LoopStep(True, Reason.PROMISE_VIOLATED), before, 0))
    return found


def test_two_bursts_in_a_row_on_the_same_side_show_another_storage() -> None:
    assert other_storage([400, 410, 200, 210, 205, 390, 400]) == [False] * 3 + [True, False, False, True]
    assert other_storage([400, 200, 600, 200, 600, 400]) == [False] * 6, "no two on one side"
    assert other_storage([400, 600, 400, 600, 590]) == [False] * 5, "a size that is known"
    assert other_storage([400, 200, 400, 190], volumes=["a", "b", "a", "b"]) == [False] * 4, "of others"


def test_one_lower_burst_is_enough_where_c_that_was_kept_fell_short() -> None:
    assert other_storage([400, 200, 210], short_at=1) == [False, True, False]
    assert other_storage([400, 600, 620], short_at=1) == [False, False, True], "higher: no shortage"


def test_a_shortage_that_bursts_explain_is_a_hint_once() -> None:
    watched, control = Watched(), BackendControl(ControlSettings(), "disk")
    before = LoopBefore.of(control)
    control.phase, control.start, control.ceiling = Phase.DECREASE, 400.0, 400.0

    def falls_short(allowed: float) -> bool:
        watched.is_ahead, watched.set_ahead, control.allowed = True, 280.0, allowed
        return watched.fell_short(control)

    control.allowed = 280.0
    watched.learn(control, LoopStep(True, Reason.PROMISE_VIOLATED), before, 0)
    assert [falls_short(allowed) for allowed in (250, 140, 200)] == [False, True, True]
    assert not watched.learn(control, LoopStep(True, Reason.PROMISE_VIOLATED), before, 0), "the same storage"
    assert [falls_short(allowed) for allowed in (140, 200, 100)] == [False, False, True]

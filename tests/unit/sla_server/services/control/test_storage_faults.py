"""Storage that hangs or fails: it is said, and nobody is slowed down for it."""

from __future__ import annotations

import pytest

from sla_server.services.control.decisions import RecordDecision, SetCaps
from sla_server.services.control.simulation import UNIX_0_US
from tests.support.worlds import A, B, Feeder, caps_of, controller, cut, events_of, promise, volume_class

GOOD, GREEDY = (100, 2.0), (400, 30.0)
NOTHING = (0, 1.0)


def world(mode: str = "enforce", **settings: float) -> Feeder:
    made = controller((promise(),), (volume_class(),), mode, **settings)
    return Feeder(made, (A, ("gold",)), (B, ("greedy",)))


class Run:
    """Seconds of a world; what was decided in them."""

    def __init__(self, made: Feeder) -> None:
        self.made, self.gen, self.decided = made, {A: 0, B: 0}, list[tuple[int, object]]()

    def second(self, gold: tuple[int, float], greedy: tuple[int, float], **more: object) -> None:
        cuts = ((A, {"gold": gold}, self.gen[A]), (B, {"greedy": greedy}, self.gen[B]))
        for decision in self.made.step(*cuts, **more):
            self.decided.append((self.made.second, decision))
            if hasattr(decision, "caps"):
                self.gen[decision.gateway_id] = decision.gen

    def kinds(self, element: str) -> list[str]:
        return [e.kind for e in events_of([d for _, d in self.decided]) if e.element == element]

    @property
    def caps(self) -> list[object]:
        return [d for _, d in self.decided if hasattr(d, "caps")]


ALL_WAIT = {"gold": (32, 900.0), "greedy": (64, 900.0)}


@pytest.mark.parametrize("old_agent", [False, True])
def test_nobody_is_slowed_down_while_the_whole_backend_hangs(old_agent: bool) -> None:
    run = Run(world())
    for _ in range(5):
        run.second(GOOD, (400, 2.0), waiting=ALL_WAIT, old_agent=old_agent)
    for _ in range(60):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT, old_agent=old_agent)
    assert (run.caps, run.kinds("backend")) == ([], ["storage-fault"])
    assert run.kinds("sla") == ["violation-opened"]
    view = run.made.controller.snapshot(0)["backends"][0]
    assert (view["fault"], view["phase"]) == ("hangs", "idle")
    # What had waited completes at last, a minute late: that is no reason to slow anybody down either.
    run.second((32, 60_000.0), (64, 60_000.0))
    for _ in range(25):
        run.second(GOOD, (400, 2.0))
    assert (run.caps, run.kinds("backend")) == ([], ["storage-fault"])
    assert run.made.controller.snapshot(0)["backends"][0]["fault"] == ""
    for _ in range(35):
        run.second(GOOD, (400, 2.0))
    assert (run.caps, run.kinds("backend")) == ([], ["storage-fault", "storage-recovered"])
    assert run.kinds("sla") == ["violation-opened", "violation-closed"]
    assert run.made.controller.snapshot(0)["backends"][0]["fault"] == ""


def test_a_hang_of_one_volume_while_others_complete_may_be_load_and_is_treated_so() -> None:
    run = Run(world())
    for _ in range(3):
        run.second(GOOD, (400, 2.0), waiting=ALL_WAIT)
    for _ in range(6):
        run.second(NOTHING, GREEDY, waiting=ALL_WAIT)
    assert run.kinds("backend") == []
    (first, *_) = run.caps
    assert caps_of([first], B).caps[0]["volume"] == "greedy"


def test_volumes_that_all_fail_are_a_fault_and_one_that_fails_alone_is_none() -> None:
    run = Run(world())
    for _ in range(10):
        run.second(GOOD, (400, 2.0), failed={"gold": 100, "greedy": 390})
    assert (run.caps, run.kinds("backend")) == ([], ["storage-fault"])
    run = Run(world())
    for _ in range(10):
        run.second(GOOD, (400, 2.0), failed={"gold": 100})
    assert (run.caps, run.kinds("backend"), run.kinds("sla")) == ([], [], ["violation-opened"])


def test_a_neighbour_whose_ios_fail_cannot_keep_control_from_helping() -> None:
    run = Run(world())
    for _ in range(6):
        run.second((100, 30.0), GREEDY, failed={"greedy": 400})
    assert run.caps
    assert run.kinds("backend") == []


def test_caps_stay_through_a_short_hang_and_go_when_it_lasts_a_lease() -> None:
    run = Run(world(lease_s=10))
    for _ in range(5):
        run.second((100, 30.0), GREEDY, waiting=ALL_WAIT)
    before = len(run.caps)
    assert before
    for _ in range(8):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
    assert len(run.caps) == before
    for _ in range(6):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
    (released,) = [d for _, d in run.decided if getattr(d, "kind", "") == "throttle-released"]
    assert released.details["ended"] == "storage-fault"


def test_a_gateway_that_is_silent_or_lost_says_nothing_of_its_backend() -> None:
    run = Run(world())
    run.second(GOOD, (400, 2.0), waiting=ALL_WAIT)
    for _ in range(2):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
    assert run.made.controller.faults.kind_of("disk") == "hangs"
    for _ in range(20):
        run.made.step()
    assert run.made.controller.faults.kind_of("disk") == ""


def test_storage_that_stutters_is_one_fault() -> None:
    run = Run(world())
    for _ in range(10):
        for _ in range(6):
            run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
        for _ in range(10):
            run.second(GOOD, (400, 2.0), waiting=ALL_WAIT)
    assert (run.caps, run.kinds("backend")) == ([], ["storage-fault"])


@pytest.mark.parametrize("missing", [0, 1, 5])
def test_a_hang_is_seen_by_a_server_that_starts_or_misses_cuts_meanwhile(missing: int) -> None:
    run = Run(world())
    if missing:
        run.second(GOOD, (400, 2.0))
    run.made.second += missing
    run.made._waited = {"gold": 32, "greedy": 64}  # all of it arrived before, or in the cuts that are missing
    for _ in range(8):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT, old_agent=True)
    assert run.kinds("backend") == ["storage-fault"]
    assert run.kinds("sla") == ["violation-opened"]


@pytest.mark.parametrize("does_hang", [True, False])
@pytest.mark.parametrize("cut_s", [0.998, 1.0])
@pytest.mark.parametrize("apart_s", [0.0, 0.3, 0.7])
def test_a_neighbours_cut_of_before_is_no_proof_that_storage_completes(
    apart_s: float, cut_s: float, does_hang: bool
) -> None:
    made, gen, capped = world(), {A: 0, B: 0}, list[float]()
    cuts = [(n * cut_s - apart_s * (gateway == B), n, gateway) for n in range(1, 16) for gateway in (A, B)]
    for end_s, seq, gateway in sorted(cuts):  # from 10.4 s on the storage hangs, or gold alone waits
        volume = {A: "gold", B: "greedy"}[gateway]
        waits_s = max(end_s - 10.4, 0.0)
        is_stuck = waits_s >= cut_s and (does_hang or volume == "gold")
        slow_ms = 30.0 if waits_s and not does_hang else 2.0
        ios = (0, 1.0) if is_stuck else (400 if volume == "greedy" else 100, slow_ms)
        waiting = {volume: (32, 1000 * (waits_s or 0.002))}
        overdue = {volume: (32, 0)} if waits_s and (does_hang or volume == "gold") else {}
        made_cut = cut(
            gateway, seq, {volume: ios}, end_s=end_s, duration_s=cut_s, waiting=waiting, overdue=overdue,
            arriving={volume: 0 if is_stuck else 32}, gen=gen[gateway],
        )  # fmt: skip
        now_ns, unix_us = round((1 + end_s) * 1e9), UNIX_0_US + round(end_s * 1e6)
        made.controller.add_cut(made_cut, unix_us, 0, False, now_ns)
        for decision in made.controller.tick(now_ns, unix_us):
            if isinstance(decision, SetCaps):
                gen[decision.gateway_id] = decision.gen
                capped.append(end_s)
    assert bool(capped) is not does_hang


def test_a_hang_shows_in_a_poll_that_is_a_little_shorter_than_the_others() -> None:
    """Else, of one of two seconds, every other one would be taken for load."""
    run = Run(world())
    for _ in range(3):
        run.second(GOOD, (400, 2.0), waiting=ALL_WAIT, duration_s=0.98)
    run.second(NOTHING, NOTHING, waiting=ALL_WAIT, duration_s=0.98)
    assert run.made.controller.faults.kind_of("disk") == "hangs"


def test_what_is_left_of_a_poll_after_a_cut_that_caps_have_ended_is_no_hang() -> None:
    """A busy neighbour may complete nothing in it."""
    run = Run(world())
    for _ in range(3):
        run.second(GOOD, (400, 2.0), waiting=ALL_WAIT)
    made, capped = run.made.controller, list[object]()
    for second in (4, 5, 6):
        now_ns, unix_us, seq = (1 + second) * 10**9, UNIX_0_US + second * 10**6, 2 * second
        waiting = {"gold": ALL_WAIT["gold"]}
        made.add_cut(cut(A, second, {"gold": NOTHING}, waiting=waiting), unix_us, 0, False, now_ns)
        for part, ios, end_s, lasts_s in ((0, GREEDY, second - 0.05, 0.95), (1, NOTHING, second, 0.05)):
            waiting = {"greedy": ALL_WAIT["greedy"]}
            found = cut(
                B, seq + part, {"greedy": ios}, end_s=end_s, duration_s=lasts_s, waiting=waiting,
            )  # fmt: skip
            made.add_cut(found, unix_us, 0, False, now_ns)
        capped += [d for d in made.tick(now_ns, unix_us) if isinstance(d, SetCaps)]
        assert not made.faults.kind_of("disk")
        assert not made.faults.may_hang("disk")
    assert capped


def test_a_busy_volume_that_completes_nothing_in_a_short_poll_is_no_hang() -> None:
    """Two large I/Os a second, and four polls: beside it gold waits for seconds."""
    made = controller((promise(),), (volume_class(),), "enforce", poll_interval_s=0.25)
    Feeder(made, (A, ("gold",)), (B, ("greedy",)))
    for seq in range(1, 60):
        end_s, busy = seq / 4, {"greedy": (1, 400.0) if seq % 2 else NOTHING}
        now_ns, unix_us = round((1 + end_s) * 1e9), UNIX_0_US + round(end_s * 1e6)
        for gateway, ios in ((A, {"gold": NOTHING}), (B, busy)):
            volume = next(iter(ios))
            found = cut(gateway, seq, ios, end_s=end_s, duration_s=0.25, waiting={volume: (8, 250 * seq)})
            made.add_cut(found, unix_us, 0, False, now_ns)
        made.tick(now_ns, unix_us)
        assert not made.faults.kind_of("disk")


def test_an_idle_backend_has_no_fault() -> None:
    run = Run(world())
    for _ in range(20):
        run.second(NOTHING, NOTHING)
    assert run.kinds("backend") == []


def test_what_a_fault_ended_is_a_decision_of_the_loop_and_rests_end_with_it() -> None:
    run = Run(world(lease_s=10))
    for _ in range(5):
        run.second((100, 30.0), GREEDY, waiting=ALL_WAIT)
    control = run.made.controller.loops.controls["disk"]
    control.quiet_until_ns = 1 << 60
    for _ in range(14):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
    rows = [d.row for _, d in run.decided if isinstance(d, RecordDecision)]
    (released,) = [row for row in rows if row["kind"] == "release"]
    assert (released["reason"], released["victim"]) == ("storage-fault", "gold/latency")
    for _ in range(6):
        run.second(GOOD, (400, 2.0))
    assert control.quiet_until_ns == 0


@pytest.mark.parametrize("goes_on_s", [0, 70])
def test_a_fault_that_a_process_before_has_reported_ends_with_an_event(goes_on_s: int) -> None:
    run = Run(world())
    run.made.controller.faults.restore({"disk": "hangs"}, 0)
    for _ in range(goes_on_s):
        run.second(NOTHING, NOTHING, waiting=ALL_WAIT)
    assert run.kinds("backend") == [], "it was reported before"
    for _ in range(70):
        run.second(GOOD, (400, 2.0))
    assert run.kinds("backend") == ["storage-recovered"]


def test_a_fault_of_a_process_before_keeps_nothing_from_the_loop() -> None:
    run = Run(world())
    run.made.controller.faults.restore({"disk": "hangs"}, 0)
    run.second(GOOD, (400, 2.0))
    assert run.made.controller.faults.kind_of("disk") == ""

"""What counts as evidence that caps ahead of bursts help, what makes it old, and what switches them off."""

from __future__ import annotations

import pytest

from sla_server.services.control.decisions import Reason
from sla_server.services.control.feed_forward_trial import KEPT, Burst, Trial
from sla_server.services.control.settings import FeedForwardSettings

S = 1_000_000_000
SETTINGS = FeedForwardSettings()
WEEK_S = SETTINGS.evidence_max_s


def live(
    trial: Trial,
    bursts: int,
    *,
    ahead: int,
    alone: int,
    r: float = 0.0,
    every_s: float = 60.0,
    from_s: float = 0.0,
) -> tuple[str, Reason | None]:
    """Bursts with so many bad windows each; which had caps ahead ("a", else "-"), and why it must end."""
    turns = ""
    for number in range(bursts):
        at_s = from_s + number * every_s
        is_ahead = trial.is_ahead(SETTINGS, at_s)
        turns += "a" if is_ahead else "-"
        trial.add(Burst(is_ahead, ahead if is_ahead else alone, at_s, r if is_ahead else 0.0))
        reason = trial.why_off(SETTINGS)
        if reason is not None:
            return turns, reason
    return turns, None


def helped(**more: float) -> Trial:
    """After 10 bursts: of the next ones every eighth is left alone."""
    trial = Trial()
    assert live(trial, 10, ahead=1, alone=6, **more) == ("-aa-aaaa-a", None)  # type: ignore[arg-type]
    assert trial.helps
    return trial


def test_the_first_is_left_alone_and_then_every_third_until_it_has_helped() -> None:
    assert live(Trial(), 18, ahead=1, alone=6) == ("-aa-aaaa-aaaaaaa-a", None)


@pytest.mark.parametrize(("ahead", "alone"), [(6, 6), (5, 6), (9, 6)])
def test_without_fewer_bad_windows_it_is_off_after_five_bursts(ahead: int, alone: int) -> None:
    assert live(Trial(), 20, ahead=ahead, alone=alone) == ("-aa-a", Reason.AHEAD_NO_HELP)


def test_where_bursts_left_alone_break_nothing_no_cap_is_set_at_all() -> None:
    trial = Trial()
    assert live(trial, 20, ahead=0, alone=0) == ("--", Reason.AHEAD_NO_HELP)
    assert trial.nothing_to_save


def test_what_helped_once_is_judged_by_its_newest_bursts() -> None:
    turns, reason = live(helped(), 3 * KEPT, ahead=6, alone=6)
    assert reason is Reason.AHEAD_NO_HELP
    assert len(turns) <= KEPT


def test_once_a_burst_left_alone_breaks_nothing_former_evidence_is_none() -> None:
    """The storage became faster: evidence of the slow one must not keep the caps for 38 of 52 bursts."""
    trial = helped()
    assert live(trial, 200, ahead=0, alone=0) == ("aaaaaa--", Reason.AHEAD_NO_HELP)
    trial = helped()
    while trial.is_ahead(SETTINGS, 700):
        trial.add(Burst(True, 0, 700))
    assert trial.add(Burst(False, 0, 700)), "what was known is discarded"
    assert trial.bad() == ([], [0])
    assert not trial.add(Burst(False, 4, 760)), "one that broke nothing may have been a small one"
    assert trial.why_off(SETTINGS) is None
    assert trial.is_ahead(SETTINGS, 820)


def test_a_burst_in_which_victims_were_far_better_off_has_the_next_one_left_alone() -> None:
    trial = helped(r=0.8)
    assert live(trial, 3, ahead=0, alone=0, r=0.4) == ("a--", Reason.AHEAD_NO_HELP)
    trial = helped(r=0.8)
    assert live(trial, 4, ahead=1, alone=6, r=0.4) == ("a-aa", None), "once: what it needs is as before"


def test_evidence_is_as_old_as_three_comparisons() -> None:
    trial = helped()
    live(trial, 62, ahead=1, alone=6)
    assert trial.turn == 72
    assert trial.is_ahead(SETTINGS, 4_000) is False
    assert [entry.turn for entry in trial.alone] == [48, 56, 64]


def test_evidence_of_longer_ago_than_a_week_is_none() -> None:
    trial = helped()
    assert trial.is_ahead(SETTINGS, 479 + WEEK_S), "the newest left alone is the ninth, at 480 s"
    assert not trial.is_ahead(SETTINGS, 481 + WEEK_S)
    assert not trial.helps
    weekly = Trial()
    assert live(weekly, 6, ahead=0, alone=6, every_s=WEEK_S + 1) == ("------", None), "never compared"
    nightly = Trial()
    assert live(nightly, 6, ahead=1, alone=6, every_s=86_400)[0] == "-aa-aa"
    assert nightly.helps


def test_bursts_that_do_not_come_end_it_and_one_that_comes_forgives() -> None:
    trial = Trial()
    trial.miss()
    assert trial.why_off(SETTINGS) is None
    assert not trial.is_ahead(SETTINGS, 0), "a prediction has to come true first"
    trial.add(Burst(False, 4))
    trial.miss()
    assert trial.why_off(SETTINGS) is None
    trial.miss()
    assert trial.why_off(SETTINGS) is Reason.AHEAD_NO_BURST


def test_what_only_a_cap_ahead_held_back_proves_no_burst() -> None:
    trial = Trial()
    trial.add(Burst(False, 4))
    trial.miss()
    trial.add(Burst(True, 0, is_proven=False))
    trial.miss()
    assert trial.why_off(SETTINGS) is Reason.AHEAD_NO_BURST


def test_off_lasts_twice_as_long_each_time_until_it_has_helped() -> None:
    trial = Trial()
    lasted = [trial.switch_off(SETTINGS, 0) for _ in range(7)]
    assert lasted == [1800, 3600, 7200, 14_400, 28_800, 28_800, 28_800]
    assert trial.off_until_ns == 28_800 * S
    assert not trial.is_ahead(SETTINGS, 0), "and begins with one that is left alone"
    live(trial, 9, ahead=1, alone=6)
    assert trial.switch_off(SETTINGS, 0) == 1800


def test_what_is_discarded_leaves_a_trial_as_new_but_for_its_time_off() -> None:
    trial = helped()
    trial.switch_off(SETTINGS, 5 * S)
    assert not trial.discard(), "nothing was known"
    trial = helped()
    trial.off_until_ns = 7
    assert trial.discard()
    assert (trial.turn, trial.missed, trial.helps, trial.off_until_ns) == (0, 0, False, 7)
    assert live(trial, 4, ahead=1, alone=6) == ("-aa-", None)

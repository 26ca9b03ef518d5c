"""What counts as evidence that caps ahead of bursts help, and what switches them off."""

from __future__ import annotations

import pytest

from sla_server.services.control.decisions import Reason
from sla_server.services.control.feed_forward_trial import KEPT, Trial
from sla_server.services.control.settings import FeedForwardSettings

S = 1_000_000_000
SETTINGS = FeedForwardSettings()


def live(trial: Trial, bursts: int, *, ahead: int, alone: int) -> tuple[str, Reason | None]:
    """Bursts with so many bad windows each; which had caps ahead ("a", else "-"), and why it must end."""
    turns = ""
    for _ in range(bursts):
        is_ahead = trial.is_ahead(SETTINGS)
        turns += "a" if is_ahead else "-"
        trial.enter(True, is_ahead, ahead if is_ahead else alone)
        reason = trial.why_off(SETTINGS)
        if reason is not None:
            return turns, reason
    return turns, None


def test_the_first_is_left_alone_and_then_every_third_until_it_has_helped() -> None:
    assert live(Trial(), 18, ahead=1, alone=6) == ("-aa-aaaa-aaaaaaa-a", None)


@pytest.mark.parametrize(("ahead", "alone"), [(6, 6), (5, 6), (9, 6), (0, 0), (3, 0)])
def test_without_fewer_bad_windows_it_is_off_after_five_bursts(ahead: int, alone: int) -> None:
    assert live(Trial(), 20, ahead=ahead, alone=alone) == ("-aa-a", Reason.AHEAD_NO_HELP)


def test_what_helped_once_is_judged_by_its_newest_bursts() -> None:
    trial = Trial()
    assert live(trial, 9, ahead=1, alone=6)[1] is None
    turns, reason = live(trial, 3 * KEPT, ahead=6, alone=6)
    assert reason is Reason.AHEAD_NO_HELP
    assert len(turns) <= KEPT


def test_bursts_that_do_not_come_end_it_and_one_that_comes_forgives() -> None:
    trial = Trial()
    trial.enter(False, False, 0)
    assert trial.why_off(SETTINGS) is None
    assert not trial.is_ahead(SETTINGS), "a prediction has to come true first"
    trial.enter(True, False, 4)
    trial.enter(False, True, 0)
    assert trial.why_off(SETTINGS) is None
    trial.enter(False, True, 0)
    assert trial.why_off(SETTINGS) is Reason.AHEAD_NO_BURST


def test_off_lasts_twice_as_long_each_time_until_it_has_helped() -> None:
    trial = Trial()
    lasted = [trial.switch_off(SETTINGS, 0) for _ in range(7)]
    assert lasted == [1800, 3600, 7200, 14_400, 28_800, 28_800, 28_800]
    assert trial.off_until_ns == 28_800 * S
    assert not trial.is_ahead(SETTINGS), "and begins with one that is left alone"
    live(trial, 9, ahead=1, alone=6)
    assert trial.switch_off(SETTINGS, 0) == 1800

from __future__ import annotations

import pytest
from pydantic import ValidationError

from docs.reference import meanings
from sla_server.services.control.settings import ControlSettings


def test_hold_down_is_two_polls_and_drain_but_at_least_a_second():
    assert ControlSettings().hold_down_s == 2.25
    assert ControlSettings(poll_interval_s=0.1).hold_down_s == 1.0


def test_every_number_says_why():
    assert ControlSettings.model_fields.keys() == meanings(ControlSettings).keys()


@pytest.mark.parametrize(
    "wrong",
    [
        {"at_risk_windows": 4},
        {"decrease_min": 0.95},
        {"clear_r": 0.9},
        {"decrease_max": 1.0},
        {"no_such_number": 1},
    ],
)
def test_numbers_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(ValidationError):
        ControlSettings(**wrong)


@pytest.mark.parametrize("name", ["at_risk_u", "r_on", "clear_u", "far_clear_r", "far_clear_u", "park_r"])
def test_a_share_that_was_written_as_a_percentage_is_refused_by_name(name):
    """Above 1 a promise is broken already: nothing would be done before."""
    with pytest.raises(ValidationError, match=rf"{name}\n.*less than or equal to 1"):
        ControlSettings(**{name: 70})

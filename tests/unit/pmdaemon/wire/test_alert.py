"""An ALERT is five checked keys or a refusal, whatever an agent sends."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.errors import MalformedFrame
from pmdaemon.wire.messages.alerts import ALERT_CHARACTERS, ALERT_CLOCK_US, ALERT_KINDS, DETAILS_BYTES, Alert
from tests.unit.pmdaemon.poller.test_hostile import VALUES

NOW_US = 1_800_000_000_000_000
RIGHT: dict[str, Any] = {
    "kind": "plane-died",
    "severity": "critical",
    "text": "nbd-0 is gone",
    "at_us": NOW_US - 7,
    "details": {"subject": "nbd-0", "restarts": 3, "ratio": 0.5, "again": True},
}


def parsed(header: dict[str, Any], now_us: int) -> dict[str, Any]:
    return Alert.parse(header, now_us).header()


def test_what_our_agent_says_passes_as_it_is() -> None:
    assert parsed({**RIGHT, "later": 1}, NOW_US) == RIGHT
    assert parsed({**RIGHT, "details": None}, NOW_US)["details"] == {}


@pytest.mark.parametrize("kind", ["mode-changed", "gateway-lost", "hold-limit"])
def test_other_kinds_get_a_prefix(kind: str) -> None:
    assert parsed({**RIGHT, "kind": kind}, NOW_US)["kind"] == f"agent-{kind}"
    assert parsed({**RIGHT, "kind": f"agent-{kind}"}, NOW_US)["kind"] == f"agent-{kind}"


@pytest.mark.parametrize("length", [1, 52, 53, 58])
def test_what_a_pair_accepts_services_accept_as_it_is(length: int) -> None:
    """The prefix makes a kind longer; the second check, in services, must not refuse it for that."""
    passed_on = parsed({**RIGHT, "kind": "x" * length}, NOW_US)
    assert passed_on["kind"] == "agent-" + "x" * length
    assert parsed(passed_on, NOW_US) == passed_on


@pytest.mark.parametrize("off_us", [ALERT_CLOCK_US + 1, -ALERT_CLOCK_US - 1, 1 << 62, -(1 << 62)])
def test_a_time_that_is_a_day_off_becomes_ours(off_us: int) -> None:
    assert parsed({**RIGHT, "at_us": NOW_US + off_us}, NOW_US)["at_us"] == NOW_US


def test_texts_are_cut_and_printable() -> None:
    made = parsed({**RIGHT, "text": "\x1b]0;pwned\x07 \x9b31m\u202e" + "x" * 65_300}, NOW_US)
    assert len(made["text"]) == ALERT_CHARACTERS
    assert made["text"].isprintable()
    made = parsed({**RIGHT, "details": {"a": "\x1b[2J" + "x" * 900}}, NOW_US)
    assert made["details"]["a"].isprintable()


WRONG: dict[str, Any] = {
    "kind": [None, 5, "", "Upper", "a b", "x" * 59, "agent-" + "x" * 59, "\x1b", ["a"]],
    "severity": [None, "error", 1, ["info"]],
    "text": [None, 5, b"x", ["x"]],
    "at_us": ["x", 1.5, True, None, [1]],
    "details": [
        5,
        [1],
        {b"k": 1},
        {"b": b"bytes"},
        {"n": math.nan},
        {"n": math.inf},
        {"n": 1 << 63},
        {"n": None},
        {"n": [1]},
        {"n": {"a": 1}},
        {"": 1},
        {"a b": 1},
        {"x" * 41: 1},
        {f"key{number}": "x" * 100 for number in range(11)},
        {f"key{number}": number for number in range(200)},
    ],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in WRONG.items() for value in values]
)
def test_wrong_types_are_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(MalformedFrame, match=f"'{key}'|detail '"):
        parsed({**RIGHT, key: value}, NOW_US)


@given(changes=st.dictionaries(st.sampled_from(sorted(RIGHT)), VALUES, max_size=5))
def test_any_value_is_refused_or_harmless(changes: dict[str, Any]) -> None:
    try:
        made = parsed(RIGHT | changes, NOW_US)
    except MalformedFrame as exc:
        said = str(exc)
    else:
        said = ""
    assert len(said) < 400
    assert said.isprintable()
    if said:
        return
    assert set(made) == set(RIGHT)
    assert abs(made["at_us"] - NOW_US) <= ALERT_CLOCK_US
    assert made["kind"] in ALERT_KINDS or made["kind"].startswith("agent-")
    assert len(json.dumps(made, allow_nan=False)) < 12 * (ALERT_CHARACTERS + DETAILS_BYTES) + 400

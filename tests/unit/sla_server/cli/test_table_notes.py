"""Which time a table of promises is of, and what is said below it."""

from __future__ import annotations

import pytest

from tests.support import api
from tests.support.cli import Terminal


@pytest.mark.parametrize(
    ("command", "is_of_period"),
    [
        ("get slas", True),
        ("get slas -o wide", True),
        ("get promises", False),
        ("get promises -o wide", False),
        ("get promises --sort budget", True),
        ("get promises --sort burn -o wide", True),
        ("top --once", False),
        ("top --once --sort compliance", True),
    ],
)
def test_a_row_about_a_promise_is_of_one_time_and_says_which(
    sla: Terminal, command: str, is_of_period: bool
) -> None:
    sla.context.live.put(api.snapshot())
    said = sla(*command.split()).output
    (head,) = (line.split() for line in said.splitlines() if line.startswith(("AGREEMENT", "PROMISE")))
    of_period = {"COMPLIANCE", "COVER", "BUDGET", "BURN", "LEFT"} & set(head)
    assert (bool(of_period), "NOW" in head) == (is_of_period, not is_of_period), head
    assert ("his period so far" in said) == is_of_period
    assert max(map(len, said.splitlines())) <= 80 or "wide" in command


def test_what_is_excluded_or_without_data_says_why(sla: Terminal) -> None:
    snapshot = sla.context.live.newest().snapshot
    rows = [{**snapshot["slas"][0], "state": "excluded", "reason": "maintenance move: " + "new disks " * 9}]
    sla.context.live.put({**snapshot, "slas": rows})
    lines = sla("get", "slas").output.splitlines()
    assert lines[-2].startswith("erp-gold/latency: maintenance move: new disks")
    assert max(map(len, lines)) <= 80

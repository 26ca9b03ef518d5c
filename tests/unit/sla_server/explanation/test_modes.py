"""The mode that holds, of an agreement, a backend or the server, in words."""

from __future__ import annotations

from typing import Any

import pytest

from sla_server.explanation import explain
from tests.support.explanations import CAP, PROMISE, agreement, said, volume


def mode(mode: str, of: str = "server", name: str = "") -> dict[str, str]:
    return {"mode": mode, "of": of, "name": name}


def test_the_mode_that_holds_is_named_with_whose_it_is() -> None:
    """Of an agreement, else of a backend, else of the server: only the last was looked at."""
    risky = {**PROMISE, "state": "at-risk"}
    row = {**CAP, "kind": "observed", "mode": "observe"}
    own = explain(volume(decisions=[row], protected=risky, mode_here=mode("enforce"),
                         mode_for=mode("observe", "agreement", "erp-gold")))  # fmt: skip
    assert own.status == "observed"
    assert "batch is not throttled: the mode of agreement erp-gold is observe. Mode enforce" in own.headline
    there = explain(volume(mode="observe", mode_here=mode("enforce", "backend", "disk-0")))
    assert said(there, "Why") == "", "the loop acts here, whatever the server does elsewhere"
    here = explain(volume(mode_here=mode("observe", "backend", "disk-0"),
                          own_modes=[{"name": "erp-gold", "mode": "enforce"}]))  # fmt: skip
    assert said(here, "Why") == (
        "The mode of backend disk-0 is observe: the loop and the policies only log; what is set by hand "
        "acts. The loop acts for those with mode enforce: erp-gold."
    )
    some = explain(volume(own_modes=[{"name": "erp-gold", "mode": "observe"}]))
    assert said(some, "Why") == "For agreements with mode observe the loop only logs: erp-gold."


@pytest.mark.parametrize(
    ("modes", "text"),
    [
        ([mode("enforce")], ""),
        ([mode("observe")], ": the mode is observe"),
        ([mode("observe", "agreement", "erp-gold")] * 2, ": the mode of agreement erp-gold is observe"),
        ([mode("observe", "backend", "a"), mode("enforce")], ", and the mode of backend a is observe"),
        ([mode("observe", "backend", "a"), mode("observe", "backend", "b")],
         ": the mode of backend a, the mode of backend b are observe"),
    ],
)  # fmt: skip
def test_nothing_is_throttled_for_a_promise_because_of_its_mode(modes: list[Any], text: str) -> None:
    for server in ("observe", "enforce"):
        found = explain(agreement(mode=server, modes=modes, promises=[{**PROMISE, "state": "at-risk"}]))
        assert found.headline == f"erp-gold/latency is at risk. Nothing is throttled for it{text}."

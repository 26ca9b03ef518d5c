"""What is delivered of a promised rate shows over the newest slice, its state over the live windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sla_server.services.snapshot import Shown

KEY = ("gold", "rate")
LIVE = {"name": "gold", "objective": "rate", "metric": "iops", "state": "violating", "promised": 80.0}


def standing_of(shown: dict[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        shown=shown,
        snapshot=lambda: {"compliance": 1.0},
        target=0.99,
        burn_1h=0.0,
        alerts=(),
        judged_us=(60_000_000, 0),
    )


def shown_of(standings: dict[tuple[str, str], Any], *live: dict[str, Any]) -> list[dict[str, Any]]:
    view = {"slas": list(live), "totals": {"slas": {"violating": len(live)}}}
    return Shown((), 1).compose(view, "observe", standings, None, 1)["slas"]


def test_a_live_rate_has_its_figure_of_the_newest_slice() -> None:
    assert shown_of({}, LIVE)[0]["measured"] is None
    by_slice = {**LIVE, "state": "ok", "measured": 79.5}
    standing = standing_of(by_slice)
    (row,) = shown_of({KEY: standing}, LIVE)
    assert (row["state"], row["measured"], row["compliance"]) == ("violating", 79.5, 1.0)


def test_an_objective_left_out_of_the_live_ones_is_shown_by_its_newest_slice() -> None:
    standing = standing_of({**LIVE, "measured": 79.5})
    (row,) = shown_of({KEY: standing})
    assert row["measured"] == 79.5

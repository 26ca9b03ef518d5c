"""A set of thresholds that cannot be applied is refused as a whole, in few words."""

from typing import Any

import pytest

from pmdaemon.errors import BadCaps
from pmdaemon.wire.messages.agent import CapSet
from pmdaemon.wire.messages.plane_sets import PlaneCaps, PlaneThresholds
from pmdaemon.wire.rates import Rates

GOOD = {"volume": "vol-1", "client": "*", "io": "read", "threshold_us": 5000}
LONG = ["\x1b[2J" * 10_000, *range(1000)]


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ({"version": LONG, "entries": []}, "the list of entries is not well-formed"),
        ({"version": 1, "entries": LONG}, "is not a map"),
        ({"version": 1, "entries": [{**GOOD, "volume": LONG}]}, "lacks volume, client or a known io kind"),
        ({"version": 1, "entries": [{**GOOD, "io": LONG}]}, "lacks volume, client or a known io kind"),
        ({"version": 1, "entries": [{**GOOD, "threshold_us": LONG}]}, "expected 1 to 2"),
    ],
)
def test_a_set_that_is_not_well_formed_is_refused_and_quoted_in_short(
    header: dict[str, Any], problem: str
) -> None:
    assert PlaneThresholds.parse({"version": 1, "entries": [GOOD]}).limits_for("vol-1", "a") == ((1, 5000),)
    with pytest.raises(BadCaps, match=problem) as caught:
        PlaneThresholds.parse(header)
    text = str(caught.value)
    assert len(text) < 300
    assert text.isprintable()


def test_a_burst_with_a_peak_may_be_long_and_another_may_not() -> None:
    """From the message of the server to what a plane puts in force."""
    rates = Rates(ops_per_s=100.0, burst_s=3_600.0, peak_ops_per_s=5_000.0)
    caps = CapSet.parse({"gen": 1, "lease_us": 1, "caps": [rates.entry("vol-1")]})
    assert PlaneCaps.parse({"gen": 1, "caps": list(caps.caps)}).volumes == {"vol-1": rates}
    with pytest.raises(BadCaps, match=r"burst is 0\.001 to 300 s"):
        PlaneCaps.parse({"gen": 1, "caps": [Rates(ops_per_s=100.0, burst_s=301.0).entry("vol-1")]})

"""A set of thresholds that cannot be applied is refused as a whole, in few words."""

from typing import Any

import pytest

from pmdaemon.errors import BadCaps
from pmdaemon.wire.messages.plane_sets import PlaneThresholds

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

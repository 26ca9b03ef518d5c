"""Rollups as the judge reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from pmdaemon.wire.histogram import BUCKETS
from sla_server.services.judging.inputs import SliceRows
from sla_server.services.judging.track import JudgedStream
from tests.support.judged import inputs_of

T0 = 1_800_000_000_000_000
MINUTE_US = 60_000_000


def test_drives_of_qemu_are_known_by_the_names_of_their_volumes() -> None:
    nothing = np.zeros(BUCKETS, dtype=np.int64)
    rows: list[dict[str, Any]] = [
        {"slot_us": T0, "stream_id": number, "reads": 1, "hist_read": nothing, "hist_write": nothing}
        for number in (1, 2)
    ]
    inputs = SliceRows(inputs_of(rows))
    scope = [JudgedStream(1, "g", 0, "qemu:gw-a:root"), JudgedStream(2, "g", 0, "vol-1")]
    numbers = inputs.pairs([scope], np.array([T0]), np.array([T0 + MINUTE_US]))[2]
    found = inputs.is_beside(numbers, [scope])
    assert found is not None
    assert found.tolist() == [True, False]
    assert inputs.is_beside(numbers, [scope[1:]]) is None, "the usual case costs nothing"

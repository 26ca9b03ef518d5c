"""I/Os that caps held back for longer than the gateway's ``max_hold_s``: key ``late`` of DP_CUT and CUT.

    late    {volume: [ios, longest_us]}, the worst ``MOST`` volumes, absent when there is none

``ios`` were let through in this cut after such a delay; ``longest_us`` is the longest one, also of an I/O
that is still held at the cut's end (``ios`` may then be 0). The rate is kept all the same: the figure says
that more is outstanding than the caps let through, so that a client may time out. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from pmdaemon.wire.names import is_name

MOST: Final = 16
"""Volumes named: 2.4 KB beside the names of all streams in a header of 64 KB."""
_MOST_COUNT: Final = 1 << 53
Late = dict[str, tuple[int, int]]


def worst(late: Late) -> Late:
    """At most ``MOST`` of them: those with the longest delay."""
    return dict(sorted(late.items(), key=lambda item: -item[1][1])[:MOST])


def joined(parts: Iterable[Late]) -> Late:
    """Several samples as one: sums of I/Os, the longest delay."""
    result: Late = {}
    for part in parts:
        for volume, (ios, longest_us) in part.items():
            before = result.get(volume, (0, 0))
            result[volume] = (before[0] + ios, max(before[1], longest_us))
    return worst(result)


def parse(value: Any) -> Late:
    """What a header's key says; entries that cannot be are left out, as the figure only informs."""
    result: Late = {}
    for volume, figures in list(value.items())[:MOST] if isinstance(value, dict) else ():
        match figures:
            case [int(ios), int(longest_us)] if 0 <= ios < _MOST_COUNT and 0 <= longest_us < _MOST_COUNT:
                if isinstance(volume, str) and is_name(volume):
                    result[volume] = (ios, longest_us)
    return result

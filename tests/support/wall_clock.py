"""Local time the slow way, for oracles: every minute of some days, and what a clock on the wall shows at it.

Nothing here asks the product when a local time is. A local time that comes twice is its first, one that is
skipped is the next that exists: the first minute at which the clock has shown that time or a later one.
Offsets are whole minutes in every zone (since 1972).
"""

from __future__ import annotations

from bisect import bisect_left
from datetime import date, datetime, time, timedelta
from functools import lru_cache
from itertools import accumulate
from zoneinfo import ZoneInfo

MINUTE_US = 60_000_000
DAY = timedelta(days=1)


class WallClock:
    """What the clock of a zone shows at ``minutes`` minutes from ``from_us`` on; numbers are of minutes."""

    def __init__(self, tz: str, from_us: int, minutes: int) -> None:
        zone, first = ZoneInfo(tz), from_us // MINUTE_US * 60
        self.shows = [
            datetime.fromtimestamp(first + 60 * number, zone).replace(tzinfo=None)
            for number in range(minutes)
        ]
        self._reached = list(accumulate(self.shows, max))

    def first(self, at: datetime) -> int:
        """The first minute at which it has shown this; 0 for what was before, the end for what is after."""
        return bisect_left(self._reached, at)

    def midnight(self, day: date) -> int:
        """When this day begins."""
        return self.first(datetime.combine(day, time.min))

    @property
    def days(self) -> list[date]:
        """Days of which some minute may be inside."""
        first, last = self.shows[0].date(), self.shows[-1].date()
        return [first + number * DAY for number in range((last - first).days + 2)]


@lru_cache(maxsize=64)
def wall_clock(tz: str, from_us: int, minutes: int) -> WallClock:
    """The same, made once."""
    return WallClock(tz, from_us, minutes)

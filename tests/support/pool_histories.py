"""Generated histories of pools whose day is known, and how often the forecast's interval has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sla_server.storage_resources.forecast import DAY_US, Floats, forecast

SIZE = 1000
FIRST = 20_000


@dataclass(frozen=True)
class Covered:
    """Of ``histories``, those of which a day was ``named``, and of these those whose day is ``within``."""

    histories: int
    named: int
    within: int


def generated(number: int) -> tuple[Floats, float]:
    """A history of 10 to 89 days, and the day (from its end) on which its pool is full."""
    rng = np.random.default_rng((7, number))
    count, slope, start = int(rng.integers(10, 90)), rng.uniform(1, 8), rng.uniform(100, 400)
    days = np.arange(count)
    true, noise = start + slope * days, slope * rng.uniform(0.2, 3)
    full = (SIZE - start) / slope - (count - 1)
    match number % 5:
        case 0:
            return true + rng.normal(0, noise, count), full
        case 1:  # a rhythm of a week
            rhythm = noise * np.sin(2 * np.pi * (days + rng.integers(7)) / 7)
            return true + rhythm + rng.normal(0, noise / 3, count), full
        case 2:  # what is above the line today is so tomorrow
            off = np.zeros(count)
            for day in range(1, count):
                off[day] = 0.6 * off[day - 1] + rng.normal(0, noise)
            return true + off, full
        case 3:  # outliers
            return true + rng.normal(0, noise, count) + 10 * noise * (rng.random(count) < 0.08), full
    steps = rng.normal(slope, slope * rng.uniform(0.5, 1.5), 5000)  # each day's growth is another one
    path = start + np.cumsum(steps)
    return path[:count], float(np.argmax(path >= SIZE) - (count - 1))


def covered(histories: int) -> Covered:
    """The first so many histories."""
    named = within = 0
    for number in range(histories):
        used, full = generated(number)
        days, end_us = (FIRST + np.arange(len(used))) * DAY_US, (FIRST + len(used)) * DAY_US
        found = forecast(days, used, SIZE, end_us)
        if full <= 0 or found.full_us is None or found.earliest_us is None:
            continue
        named += 1
        latest = float("inf") if found.latest_us is None else (found.latest_us - end_us) / DAY_US
        within += (found.earliest_us - end_us) / DAY_US <= full <= latest
    return Covered(histories, named, within)

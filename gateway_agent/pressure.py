"""Pressure of I/O (PSI): the share of time in which tasks waited for it, as the kernel averages it.

    some avg10=0.02 avg60=0.14 avg300=0.36 total=1508938616     one task at least waited
    full avg10=0.01 avg60=0.09 avg300=0.22 total=359592245      all that could have run waited

Of the host in /proc/pressure/io, of a control group of v2 in its io.pressure. It says that something waits
for storage, not for which device; so it is shown, and nothing is judged by it.

Source: the kernel's Documentation/accounting/psi.rst.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

HOST: Final = Path("/proc/pressure/io")


class IoPressure(NamedTuple):
    """Percent of the last 10 and 60 seconds; ``some_total_us`` since the boot, or the group's beginning."""

    some_10s: float
    some_60s: float
    full_10s: float
    full_60s: float
    some_total_us: int

    def record(self) -> dict[str, float]:
        """As JSON."""
        return self._asdict()


def read_pressure(path: Path = HOST) -> IoPressure | None:
    """What the kernel says now; None where it does not (off by ``psi=0``, or a group of v1)."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
        found = {line[0]: dict(pair.split("=", 1) for pair in line[1:]) for line in lines if line}
        some, full = found["some"], found.get("full", {})
        return IoPressure(
            float(some["avg10"]),
            float(some["avg60"]),
            float(full.get("avg10", 0)),
            float(full.get("avg60", 0)),
            int(some["total"]),
        )
    except (OSError, ValueError, KeyError):
        return None


def waited_us() -> int | None:
    """Since the boot, of this host: what a cut says of it (``wire.cut``, key ``psi``)."""
    found = read_pressure()
    return None if found is None else found.some_total_us

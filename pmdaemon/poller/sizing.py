"""How many thread pairs serve n gateways (P11), as pure functions.

    pairs = Roundup(n / ((T_thr * 1000) / T_ptmax))

T_thr is the thread's time quantum in milliseconds, T_ptmax the longest processing time of one gateway's
message in microseconds: a pair should get through all its gateways within one quantum. With the defaults
(10 ms, 200 us) that is 50 gateways a pair. The formula counts pairs by need; more than one a processor
gains nothing (one interpreter lock a process), so the answer is clamped to the processors.

T_ptmax is measured as thread CPU time, so other load on the machine does not count, and held as a decaying
maximum: one slow message raises it at once, and it fades with a half-life of 60 s.
"""

from __future__ import annotations

from typing import Final

T_THR_MS: Final = 10.0
T_PTMAX_US: Final = 200.0
T_PTMAX_MIN_US: Final = 20.0  # below, the clock's own cost and resolution are most of what is measured
T_PTMAX_MAX_US: Final = 2000.0  # above, it was a page fault or a collection of garbage, not a message
HALF_LIFE_NS: Final = 60 * 10**9


def pairs_by_formula(n: int, t_thr_ms: float = T_THR_MS, t_ptmax_us: float = T_PTMAX_US) -> int:
    """The formula alone, without regard to processors; 0 for no gateways.

    Raises:
        ValueError: a time that is not positive, or fewer than no gateways.
    """
    if t_thr_ms <= 0 or t_ptmax_us <= 0 or n < 0:
        raise ValueError(f"pairs for {n} gateways, T_thr {t_thr_ms} ms, T_ptmax {t_ptmax_us} us")
    # Roundup in integers of nanoseconds: 150 / (10000 / 200) must be 3, whatever floats say.
    return -(-n * round(t_ptmax_us * 1000) // round(t_thr_ms * 1_000_000))


def pairs_needed(n: int, t_thr_ms: float, t_ptmax_us: float, cpus: int, fixed: int | None = None) -> int:
    """Pairs to run: ``fixed`` if given, else the formula's answer between 1 and ``cpus``."""
    if fixed is not None:
        return fixed
    return max(1, min(pairs_by_formula(n, t_thr_ms, t_ptmax_us), max(cpus, 1)))


class DecayingMax:
    """T_ptmax of one pair: a maximum that fades by half every 60 s, clipped to 20..2000 us.

    Thread: ``add`` by one thread; ``value_us`` may be read by any.
    """

    def __init__(self) -> None:
        self._value_us = 0.0
        self._at_ns = 0

    def add(self, sample_us: float, now_ns: int) -> None:
        """One message took ``sample_us`` of thread CPU time."""
        faded_us = self._value_us * 0.5 ** ((now_ns - self._at_ns) / HALF_LIFE_NS) if self._value_us else 0.0
        self._value_us = max(sample_us, faded_us)
        self._at_ns = now_ns

    @property
    def value_us(self) -> float:
        """The clipped maximum; the formula's default while nothing was measured."""
        if not self._value_us:
            return T_PTMAX_US
        return min(max(self._value_us, T_PTMAX_MIN_US), T_PTMAX_MAX_US)

"""One processor a pair: which one, and whether at all.

A pair's threads share one interpreter lock, so a pair uses one processor; on its own it does not wander and
its caches stay warm. But a pinned process cannot step aside when something else runs there, so ``auto`` pins
only where there is room for both: several pairs, and ``ROOMY_CPUS`` processors or more. What this process is
allowed is all that counts: a container's cpuset, ``taskset``, systemd's ``CPUAffinity``.

Source: P10-P12; DESIGN.md 3 ("Pinning is a setting: auto, from 4 CPUs").
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Final, Literal

import structlog

ROOMY_CPUS: Final = 4
Pinning = Literal["auto", "on", "off"]
log = structlog.get_logger("pinning")


def cpu_for(pair: int, pairs: int, setting: Pinning, allowed: Collection[int]) -> int | None:
    """The processor of a pair, or None to let it run on any.

    Args:
        pair: its number.
        pairs: how many there may be.
        setting: of the configuration.
        allowed: processors this process may use.
    """
    if setting == "off" or not allowed:
        return None
    if setting == "auto" and (pairs < 2 or len(allowed) < ROOMY_CPUS):
        return None
    return sorted(allowed)[pair % len(allowed)]


def pin(pair: int, pairs: int, setting: Pinning) -> int | None:
    """Bind this process, before it starts threads; returns the processor, or None if it is not bound."""
    cpu = cpu_for(pair, pairs, setting, os.sched_getaffinity(0))
    if cpu is None:
        return None
    try:
        os.sched_setaffinity(0, {cpu})
    except OSError as exc:  # forbidden here (seccomp), or the cpuset has changed since we looked
        log.warning("not-pinned", pair=pair, cpu=cpu, error=exc.strerror)
        return None
    log.info("pinned", pair=pair, cpu=cpu)
    return cpu

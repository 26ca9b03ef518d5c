"""Statistics of control groups: what the kernel counts of each on its device (``gateway_agent.cgroups``).

One row a group: volume ``cgroup:<gateway>:<name>``, client ``cgroup``. I/Os and bytes are exact; the kernel
times nothing by group, so latency sums are 0 and nothing about latency may be promised of such a volume.
``held`` is 1 while a limit was used in full, when I/Os wait for it, how many is not known.

A group that is not there does no I/O: it has no row, and the time counts as covered. What is the same for all
sources of this kind: ``counted``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gateway_agent.cgroups import IoCounts
from gateway_agent.enforcers.cgroup import CLIENT, CgroupEnforcer, LimitedGroup
from gateway_agent.sources.counted import Reading, ReadSource, export_of
from pmdaemon.runtime.clock import Clock


class CgroupSource(ReadSource[IoCounts]):
    """See ``StatisticsSource`` and ``ReadSource``. Thread: the link's loop only.

    State: time of the last count, and the groups that used a limit in full before it.

    Args:
        backends: by volume.
        enforcer: whose generation a sample names.
        size_of: bytes of a volume's device, 0 if not known.
    """

    def __init__(
        self,
        clock: Clock,
        groups: Sequence[LimitedGroup],
        backends: dict[str, str],
        enforcer: CgroupEnforcer,
        size_of: Callable[[str], int] = lambda _volume: 0,
    ) -> None:
        super().__init__("cgroup", CLIENT, clock)
        self._groups = groups
        self._backends = backends
        self._enforcer = enforcer
        self._size_of = size_of
        self._counted_ns = clock.monotonic_ns()
        self._full = frozenset[str]()
        self.begin(self.read())

    def read(self) -> Reading[IoCounts]:
        """See ``ReadSource``."""
        now_ns, gen = self._clock.monotonic_ns(), self._enforcer.gen
        elapsed_s, self._counted_ns = (now_ns - self._counted_ns) / 1e9, now_ns
        found = {group.volume: group.count(elapsed_s) for group in self._groups}
        counts = {volume: count for volume, count in found.items() if count is not None}
        self._full = frozenset(group.volume for group in self._groups if group.is_full)
        return Reading(now_ns, self._clock.unix_us(), counts, gen)

    def backend_of(self, volume: str) -> str:
        """See ``CountedSource``."""
        return self._backends[volume]

    def more(self, volume: str, step: IoCounts) -> dict[str, int]:
        """See ``CountedSource``."""
        return {"held": int(volume in self._full)}

    def exports(self) -> list[dict[str, Any]]:
        """See ``StatisticsSource``: one a group, also while it is not there."""
        return [
            export_of(group.volume, self._backends[group.volume], "cgroup", self._size_of(group.volume))
            for group in self._groups
        ]

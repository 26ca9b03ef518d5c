"""The threshold set of every gateway: compiled when something about it may have changed, sent when it did.

State: what is promised, the volumes of each gateway announced, the version each was sent last, and which are
*due*: to be compiled again. A gateway that is announced is sent its set in any case: its pair keeps no sets,
and what the agent remembers may be old. After a restart of agent, pair or services it is announced again, and
so sent its set again.

Belongs to the main loop.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Final

from sla_server.agreements.promise import Promise
from sla_server.agreements.thresholds import (
    MAX_SET_BYTES,
    PromiseIndex,
    ThresholdSet,
    threshold_set,
    touched_by,
)
from sla_server.rows import Row
from sla_server.services.rows import event_row

MOST_SETS: Final = 512
"""Sets compiled between two ticks: some 60 ms, so a fleet that registers at once has its sets within 2 s."""


class ThresholdSets:
    """See the module. ``volumes``: of each gateway announced, by its id."""

    def __init__(self) -> None:
        self._promises: dict[tuple[str, str], Promise] = {}
        self._index = PromiseIndex(())
        self._volumes: dict[str, set[str]] = {}
        self._told: dict[str, int] = {}
        self._due: dict[str, None] = {}  # a set that keeps its order

    @property
    def volumes(self) -> Mapping[str, Collection[str]]:
        """Gateway to the names of its exports and of its streams' volumes."""
        return self._volumes

    def set_promises(self, promises: Sequence[Promise]) -> None:
        """What is promised now, complete."""
        old, self._promises = self._promises, {promise.key: promise for promise in promises}
        self._index = PromiseIndex(promises)
        changed = [*_not_in(old, self._promises), *_not_in(self._promises, old)]
        if not changed:
            return
        touched = touched_by(changed, {name for volumes in self._volumes.values() for name in volumes})
        for gateway_id, volumes in self._volumes.items():
            if not touched.isdisjoint(volumes):
                self._due[gateway_id] = None

    def announced(self, gateway_id: str, volumes: Iterable[str]) -> None:
        """A gateway registered, or its pair says again that it is there; ``volumes``: of all its exports."""
        self._volumes[gateway_id] = set(volumes)
        self._told.pop(gateway_id, None)
        self._due[gateway_id] = None

    def seen(self, gateway_id: str, volumes: Iterable[str]) -> None:
        """Streams of these volumes are there; a gateway not announced yet will be."""
        known = self._volumes.get(gateway_id)
        if known is not None and not known.issuperset(volumes):
            known.update(volumes)
            self._due[gateway_id] = None

    def take(self, most: int = MOST_SETS) -> Iterator[tuple[str, ThresholdSet]]:
        """Gateways to tell now, and their sets; looks at ``most`` that are due, the oldest first."""
        for gateway_id in list(islice(self._due, most)):
            del self._due[gateway_id]
            found = threshold_set(self._index, self._volumes[gateway_id])
            if self._told.get(gateway_id) != found.version:
                self._told[gateway_id] = found.version
                yield gateway_id, found


def _not_in(
    ones: Mapping[tuple[str, str], Promise], others: Mapping[tuple[str, str], Promise]
) -> Iterator[Promise]:
    for key, promise in ones.items():
        other = others.get(key)
        if other is not promise and other != promise:
            yield promise


def left_out_event(gateway_id: str, found: ThresholdSet, now_us: int) -> tuple[str, Row]:
    """That a gateway cannot be sent all that it should count."""
    text = (
        f"{found.left_out} latency thresholds of this gateway find no room in its set: all would take "
        f"{found.wanted_bytes} bytes, the limit is {MAX_SET_BYTES}. Agreements of the lowest priority are "
        "judged from histogram edges there; name fewer volumes or clients, or use fewer curve steps"
    )
    details = {"left_out": found.left_out, "wanted_bytes": found.wanted_bytes, "limit_bytes": MAX_SET_BYTES}
    return event_row("thresholds-left-out", "warning", "gateway", gateway_id, text, now_us, details)

"""Notes at apply: caps of agreements below what is promised of the same volumes.

What a cap holds back waits, and the wait counts against the promise. An operator's throttle is refused for
that without ``--force`` (``control.manual``); of documents it is said, as the parties may have agreed so.
A cap of named clients is compared with its own agreement's promises alone: others may be to other clients. Of
a promise in bytes the size of its I/Os would have to be known.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final

from pmdaemon.wire.rates import Rates
from sla_server.agreements.document import Agreement
from sla_server.agreements.promise import InForce
from sla_server.agreements.selectors import is_pattern, matches
from sla_server.agreements.volume_labels import LabelBook
from sla_server.services.control.manual import effect

EVERYONE: Final = "*"
MOST_NAMED: Final = 5
"""Agreements that the notes about one cap name; the others are counted."""
MOST_PAIRS: Final = 1000
"""Caps and promises that are compared: some milliseconds."""
MOST_MATCHES: Final = 500_000
"""Names that patterns are tried on, half a second: what is left of a very large site is not looked at."""
AGAINST: Final = "I/Os that it holds back count against the promise"


def own_cap(agreement: Agreement, volumes: Collection[str], book: LabelBook) -> Iterable[str]:
    """A cap below what the agreement itself promises; it is of each volume, and of each client named."""
    clients = set(agreement.spec.scope.clients)
    clients = {EVERYONE} if EVERYONE in clients else clients
    cap = agreement.spec.cap
    if cap is None or (clients != {EVERYONE} and any(map(is_pattern, clients))):
        return
    item = InForce(agreement, 0, 0).with_labels(book)
    if not _broken(item, cap.max_iops, 1):
        return  # nearly always, and there may be very many volumes to count
    count = max(len(_Meant(volumes).by(item) or ()), 1) * len(clients)
    if broken := _broken(item, cap.max_iops, count):
        problem = f"is below what is promised: {'; '.join(broken)}"
        yield f"{agreement.name}: its own cap, {cap.max_iops:g} IOPS, {problem}. {AGAINST}"


def other_caps(new: Sequence[InForce], items: Sequence[InForce], volumes: Collection[str]) -> Iterator[str]:
    """Caps of whole volumes below what other agreements promise there, where one of the two is new.

    Args:
        new: agreements that are being applied and are not as they were.
        items: all that would be in force, these among them.
        volumes: all names known, for patterns.
    """
    found, meant = dict[str, list[str]](), _Meant(volumes)
    for cap, promising, volume in islice(_pairs(new, items, meant), MOST_PAIRS):
        rate = _rate(cap)
        held_iops = max(rate, promising.agreement.spec.guarantee.floor_iops)
        if not _broken(promising, held_iops, 1):
            continue
        own = meant.by(promising)
        if own is None:
            break
        if broken := _broken(promising, held_iops, max(len(own), 1)):
            what = f"holds on {volume}, too, which is below what is promised there: {'; '.join(broken)}"
            found.setdefault(cap.name, []).append(f"its cap, {rate:g} IOPS, {what}. {AGAINST}")
    for name, notes in found.items():
        yield from (f"{name}: {note}" for note in notes[:MOST_NAMED])
        if (more := len(notes) - MOST_NAMED) > 0:
            yield f"{name}: its cap is below what {more} other agreements promise, too"


def _pairs(
    new: Sequence[InForce], items: Sequence[InForce], meant: _Meant
) -> Iterator[tuple[InForce, InForce, str]]:
    """(with a cap, with a promise, a volume of both), each pair once."""
    seen = set[tuple[str, str]]()
    for is_one, is_other, is_turned in ((_caps, _promises, False), (_promises, _caps, True)):
        ones = [item for item in new if is_one(item)]
        others = _ByVolume(item for item in items if ones and is_other(item))
        for one in ones if others.has_any else ():
            for volume in meant.by(one) or ():
                if not meant.may_try(others.patterned):
                    return
                for other in others.covering(volume):
                    cap, promising = (other, one) if is_turned else (one, other)
                    if one is not other and (cap.name, promising.name) not in seen:
                        seen.add((cap.name, promising.name))
                        yield cap, promising, volume


class _Meant:
    """Volumes in scope that are named or known; of patterns as long as ``MOST_MATCHES`` allows."""

    def __init__(self, volumes: Collection[str]) -> None:
        self._volumes = volumes
        self._left = MOST_MATCHES
        self._known: dict[tuple[str, ...], list[str]] = {}

    def may_try(self, count: int) -> bool:
        """Whether that many more names may be looked at; they are then taken for looked at."""
        is_allowed, self._left = self._left > 0, self._left - count
        return is_allowed

    def by(self, item: InForce) -> list[str] | None:
        """Those of an agreement, in order; None: too many names were looked at before."""
        patterns = tuple(filter(is_pattern, item.volumes))
        named = [name for name in item.volumes if not is_pattern(name)]
        if patterns and patterns not in self._known:
            if not self.may_try(len(patterns) * len(self._volumes)):
                return None
            self._known[patterns] = [name for name in self._volumes if matches(name, patterns)]
        return sorted({*named, *self._known.get(patterns, ())})


def _rate(item: InForce) -> float:
    """Of its cap, I/Os a second; without one infinite."""
    cap = item.agreement.spec.cap
    return math.inf if cap is None else cap.max_iops


def _caps(item: InForce) -> bool:
    spec = item.agreement.spec
    return spec.cap is not None and EVERYONE in spec.scope.clients


def _promises(item: InForce) -> bool:
    return bool(item.agreement.spec.objectives)


class _ByVolume:
    """Agreements by the volumes that they mean."""

    def __init__(self, items: Iterable[InForce]) -> None:
        self._naming: dict[str, list[InForce]] = {}
        self._patterned: list[tuple[Collection[str], InForce]] = []
        for item in items:
            for name in dict.fromkeys(item.volumes):
                if not is_pattern(name):
                    self._naming.setdefault(name, []).append(item)
            if patterns := tuple(filter(is_pattern, item.volumes)):
                self._patterned.append((patterns, item))
        self._tries = 1 + sum(len(patterns) for patterns, _ in self._patterned)

    @property
    def has_any(self) -> bool:
        """Whether there is an agreement."""
        return bool(self._naming or self._patterned)

    @property
    def patterned(self) -> int:
        """Patterns that ``covering`` tries, and one for the names."""
        return self._tries

    def covering(self, volume: str) -> Iterator[InForce]:
        """Those about this volume; one may come twice."""
        yield from self._naming.get(volume, ())
        for patterns, item in self._patterned:
            if matches(volume, patterns):
                yield item


def _broken(item: InForce, most_iops: float, count: int) -> tuple[str, ...]:
    """Promises of which each of ``count`` volumes would need more than this."""
    promised = [(each, count) for each in item.all_promises if each.metric != "throughput"]
    rates = Rates(ops_per_s=most_iops)
    return effect(rates, rates, 1.0, promised).broken

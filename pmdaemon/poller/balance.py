"""Shards, and the decision how many pairs there are and which pair has which shard, as pure functions.

A gateway belongs to one of 256 shards, for ever: the first byte of a hash of its id. A *map* says which pair
has which shard; only the parent changes it. Theory of operation, once a second:

    number of pairs   grows when the formula (``sizing``) has asked for more for GROW_NS, shrinks when it has
                      asked for fewer for SHRINK_NS. The pair with the highest number goes: all its shards
                      move, then it is stopped.
    which shard where  when a pair's load has been above ``OVERLOADED`` times the mean for SETTLE_NS, shards
                      move from the fullest to the emptiest pair, the largest that fit first, until the
                      fullest is below ``BALANCED`` times the mean; at most MOVES_AT_ONCE with gateways in one
                      decision, and none again for HOLD_NS. Two thresholds and two times: load that swings
                      moves nothing. While there is no gateway, nothing swings: shards move at once.

Load is CPU time where a pair uses more than ``BUSY`` of a core, else gateways, plus a little for an empty
shard, so that a fleet that dials in later is spread too.

Source: P11, P12; DESIGN.md 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

SHARDS: Final = 256
OVERLOADED: Final = 1.15
BALANCED: Final = 1.05
BUSY: Final = 0.5
EMPTY_SHARD: Final = 0.05
SETTLE_NS: Final = 3 * 10**9  # registrations of a reconnecting fleet come within a second or two
HOLD_NS: Final = 5 * 10**9  # after a move the reports need two rounds to show what it did
GROW_NS: Final = 5 * 10**9
SHRINK_NS: Final = 60 * 10**9  # the half-life of T_ptmax: one slow message must not start and stop pairs
MOVES_AT_ONCE: Final = 64
HUNG_LOOKS: Final = 10  # looks of the parent, a second apart, without progress of a thread
Map = tuple[int, ...]


def shard_of(gateway_id: str) -> int:
    """The shard of a gateway, 0 <= shard < SHARDS."""
    return hashlib.blake2b(gateway_id.encode(), digest_size=1).digest()[0]


class PairLoad(NamedTuple):
    """What a pair has told last.

    Attributes:
        pair: its number.
        busy_ratio: CPU time of its process by wall time.
        gateways: gateways with a session, by shard.
    """

    pair: int
    busy_ratio: float
    gateways: Mapping[int, int]


class Balance(NamedTuple):
    """What the decision remembers: since when a condition holds (monotonic ns), None while it does not."""

    overloaded_ns: int | None = None
    short_ns: int | None = None
    surplus_ns: int | None = None
    moved_ns: int | None = None


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        owners: the new map; the same object as before when nothing moves.
        pairs: how many pairs there shall be.
        moves: shards that change their pair.
    """

    owners: Map
    pairs: int
    moves: int


def decide(
    balance: Balance, owners: Map, running: int, wanted: int, loads: Sequence[PairLoad], now_ns: int
) -> tuple[Balance, Decision]:
    """One look.

    Args:
        balance: as returned by the last look.
        owners: the map in force.
        running: pairs there are (the last one may be on its way out).
        wanted: pairs the formula or the configuration asks for.
        loads: of the pairs that run and have reported, or have shards: any other loses its shards.
        now_ns: monotonic.
    """
    short = _since(wanted > running, balance.short_ns, now_ns)
    surplus = _since(wanted < running, balance.surplus_ns, now_ns)
    pairs = running
    if short is not None and now_ns - short >= GROW_NS:
        pairs, short = wanted, None
    elif surplus is not None and now_ns - surplus >= SHRINK_NS:
        pairs = running - 1  # stays due: the next goes when this one has gone
    staying = [load for load in loads if load.pair < min(pairs, running)]
    weights = shard_weights(owners, loads)
    following = evacuate(owners, [load.pair for load in staying], weights)
    uneven = _since(is_uneven(following, staying, weights), balance.overloaded_ns, now_ns)
    settled = balance.moved_ns is None or now_ns - balance.moved_ns >= HOLD_NS
    settle_ns = SETTLE_NS if any(load.gateways for load in loads) else 0
    if uneven is not None and settled and now_ns - uneven >= settle_ns:
        following, uneven = level(following, [load.pair for load in staying], weights), None
    moves = sum(before != after for before, after in zip(owners, following, strict=True))
    moved_ns = now_ns if moves else balance.moved_ns
    return Balance(uneven, short, surplus, moved_ns), Decision(following if moves else owners, pairs, moves)


def _since(holds: bool, since_ns: int | None, now_ns: int) -> int | None:
    if not holds:
        return None
    return now_ns if since_ns is None else since_ns


def shard_weights(owners: Map, loads: Sequence[PairLoad]) -> list[float]:
    """Load of each shard; shape (SHARDS,). CPU time as soon as one pair is busy, else gateways."""
    weights = [EMPTY_SHARD] * SHARDS
    by_cpu = any(load.busy_ratio >= BUSY for load in loads)
    for load in loads:
        total = sum(load.gateways.values())
        # CPU in thousandths of a core, so that an empty shard stays the little that it is.
        share = 1000 * load.busy_ratio / total if by_cpu and total else 1.0
        for shard, count in load.gateways.items():
            weights[shard] += count * share
    return weights


def loads_of(owners: Map, pairs: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    """Load of each pair under a map."""
    sums = dict.fromkeys(pairs, 0.0)
    for shard, owner in enumerate(owners):
        if owner in sums:
            sums[owner] += weights[shard]
    return sums


def is_uneven(owners: Map, loads: Sequence[PairLoad], weights: Sequence[float]) -> bool:
    """Whether a pair has more than ``OVERLOADED`` times the mean and a shard could leave it."""
    sums = loads_of(owners, [load.pair for load in loads], weights)
    if len(sums) < 2:
        return False
    mean = sum(sums.values()) / len(sums)
    fullest = max(sums, key=lambda pair: sums[pair])
    gap = sums[fullest] - min(sums.values())
    fits = any(owner == fullest and weight < gap for owner, weight in zip(owners, weights, strict=True))
    return sums[fullest] > OVERLOADED * mean and fits


def evacuate(owners: Map, pairs: Sequence[int], weights: Sequence[float]) -> Map:
    """Give every shard of a pair that is not among ``pairs`` to the emptiest that is, the heaviest first."""
    if not pairs:
        return owners
    sums = loads_of(owners, pairs, weights)
    following = list(owners)
    homeless = [shard for shard, owner in enumerate(owners) if owner not in sums]
    for shard in sorted(homeless, key=lambda shard: -weights[shard]):
        emptiest = min(sums, key=lambda pair: (sums[pair], pair))
        following[shard] = emptiest
        sums[emptiest] += weights[shard]
    return tuple(following)


def level(owners: Map, pairs: Sequence[int], weights: Sequence[float]) -> Map:
    """Move shards from the fullest to the emptiest pair until they are even, MOVES_AT_ONCE at most.

    Those without gateways do not count: nothing has to move with them.
    """
    sums = loads_of(owners, pairs, weights)
    following = list(owners)
    mean = sum(sums.values()) / len(sums)
    moves = 0
    while moves < MOVES_AT_ONCE:
        fullest = max(sums, key=lambda pair: (sums[pair], pair))
        emptiest = min(sums, key=lambda pair: (sums[pair], pair))
        gap = sums[fullest] - sums[emptiest]
        # Moving w changes the gap by 2w: anything up to gap makes it no worse, up to half is best.
        fitting = [s for s, owner in enumerate(following) if owner == fullest and weights[s] <= gap / 2]
        if not fitting or sums[fullest] <= BALANCED * mean:
            break
        chosen = max(fitting, key=lambda shard: (weights[shard], shard))
        following[chosen] = emptiest
        moves += weights[chosen] > EMPTY_SHARD
        sums[fullest] -= weights[chosen]
        sums[emptiest] += weights[chosen]
    return tuple(following)


class HangDetector:
    """Notices a pair whose threads live and do nothing.

    Counts *looks*, not time: a parent that was itself suspended has not looked, and blames nobody.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._idle: dict[str, int] = {}

    def look(self, steps: Mapping[str, int]) -> str:
        """One look at the steps each thread has made; names what hangs, or nothing."""
        for name, made in steps.items():
            self._idle[name] = self._idle.get(name, 0) + 1 if self._steps.get(name) == made else 0
            self._steps[name] = made
        hung = [name for name, idle in self._idle.items() if idle >= HUNG_LOOKS]
        return f"its {' and '.join(sorted(hung))} made no progress for {HUNG_LOOKS} s" if hung else ""

"""Shards and pairs: how many pairs there are, which pair has which shard, and whose turn it is.

Pure functions, decided by the parent once a second. A gateway belongs to one of 256 shards, for ever: the
first byte of a hash of its id. A *map* says which pair has which shard; only the parent changes it.

    number of pairs   Roundup(n / ((T_thr * 1000) / T_ptmax)). T_thr is a thread's time quantum in
                      milliseconds, T_ptmax the longest processing time of one message in microseconds: a pair
                      should get through all its gateways within one quantum. With the defaults (10 ms,
                      200 us) that is 50 gateways a pair. More pairs than processors gain nothing (one
                      interpreter lock a process), so the answer is clamped. The number grows when the formula
                      has asked for more for GROW_NS, and shrinks when it has asked for fewer for SHRINK_NS.
                      The pair with the highest number goes: all its shards move, then it is stopped.
    which shard where when a pair's load has been above ``OVERLOADED`` times the mean for SETTLE_NS, shards
                      move from the fullest to the emptiest pair, the largest that fit first, until the
                      fullest is below ``BALANCED`` times the mean; at most MOVES_AT_ONCE with gateways in one
                      decision, and none again for HOLD_NS. A move ends a session and costs a handshake, so
                      two thresholds, two times and a mean over COST_HALF_LIFE_NS: load that swings moves
                      nothing. While there is no gateway, nothing swings: shards move at once.
    whose turn        within a pair, many gateways that are due at once are served shard by shard
                      (``interleave``), so that a full shard does not hold up the others.

Load is gateways, each at the mean CPU time of its pair's gateways where a pair uses more than ``BUSY`` of a
core, plus a little for an empty shard, so that a fleet that dials in later is spread too.

T_ptmax is measured as thread CPU time, so other load on the machine does not count, and held as a decaying
maximum: one slow message raises it at once, and it fades with a half-life of 60 s.

Source: P11, P12; DESIGN.md 3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple, TypeVar

SHARDS: Final = 256
OVERLOADED: Final = 1.25
BALANCED: Final = 1.05
BUSY: Final = 0.5
EMPTY_SHARD: Final = 0.05
FEW: Final = 0.25  # of the mean: so few gateways do not show what one costs beside what the process costs
COST_HALF_LIFE_NS: Final = 20 * 10**9  # a round of PostgreSQL or of other processes lasts seconds
SETTLE_NS: Final = 10 * 10**9  # a reconnecting fleet registers within seconds, at worst
HOLD_NS: Final = 15 * 10**9  # after a move its sessions dial again, and the cost of a gateway must show
GROW_NS: Final = 5 * 10**9
SHRINK_NS: Final = 60 * 10**9  # the half-life of T_ptmax: one slow message must not start and stop pairs
MOVES_AT_ONCE: Final = 64
HUNG_CHECKS: Final = 10  # checks by the parent, a second apart, without progress of a thread
Map = tuple[int, ...]
T_THR_MS: Final = 10.0
T_PTMAX_US: Final = 200.0
T_PTMAX_MIN_US: Final = 20.0  # below, the clock's own cost and resolution are most of what is measured
T_PTMAX_MAX_US: Final = 2000.0  # above, it was a page fault or a collection of garbage, not a message
HALF_LIFE_NS: Final = 60 * 10**9
SHARE: Final = 8  # gateways of a shard in one turn: some 100 us, a hundredth of the thread's quantum


def shard_of(gateway_id: str) -> int:
    """The shard of a gateway, 0 <= shard < SHARDS."""
    return hashlib.blake2b(gateway_id.encode(), digest_size=1).digest()[0]


class PairLoad(NamedTuple):
    """What a pair has reported last.

    Attributes:
        pair: its number.
        busy_ratio: CPU time of its process by wall time.
        gateways: gateways with a session, by shard.
    """

    pair: int
    busy_ratio: float
    gateways: Mapping[int, int]


class Balance(NamedTuple):
    """What the decision remembers: since when a condition holds (monotonic ns), None while it does not.

    Attributes:
        costs: CPU time of one gateway by wall time, by pair: a mean that fades by half in COST_HALF_LIFE_NS.
            By gateway, as that stays true of a pair when shards leave it.
        at_ns: of that mean.
    """

    overloaded_ns: int | None = None
    short_ns: int | None = None
    surplus_ns: int | None = None
    moved_ns: int | None = None
    costs: Mapping[int, float] = MappingProxyType({})
    at_ns: int = 0


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        owners: the new map; the same object as before when nothing moves.
        pairs: how many pairs there should be.
        moves: shards that change their pair.
    """

    owners: Map
    pairs: int
    moves: int


def decide(
    balance: Balance, owners: Map, running: int, wanted: int, loads: Sequence[PairLoad], now_ns: int
) -> tuple[Balance, Decision]:
    """One review.

    Args:
        balance: as returned by the last review.
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
    costs = gateway_costs(balance, loads, now_ns)
    weights = shard_weights(loads, costs)
    following = evacuate(owners, [load.pair for load in staying], weights)
    uneven = _since(is_uneven(following, staying, weights), balance.overloaded_ns, now_ns)
    settled = balance.moved_ns is None or now_ns - balance.moved_ns >= HOLD_NS
    settle_ns = SETTLE_NS if any(load.gateways for load in loads) else 0
    if uneven is not None and settled and now_ns - uneven >= settle_ns:
        following, uneven = level(following, [load.pair for load in staying], weights), None
    moves = sum(before != after for before, after in zip(owners, following, strict=True))
    moved_ns = now_ns if moves else balance.moved_ns
    following = following if moves else owners
    return Balance(uneven, short, surplus, moved_ns, costs, now_ns), Decision(following, pairs, moves)


def _since(holds: bool, since_ns: int | None, now_ns: int) -> int | None:
    if not holds:
        return None
    return now_ns if since_ns is None else since_ns


def gateway_costs(balance: Balance, loads: Sequence[PairLoad], now_ns: int) -> dict[int, float]:
    """The mean cost of one gateway, by pair; of all pairs together for one with FEW gateways."""
    totals = {load.pair: sum(load.gateways.values()) for load in loads}
    gateways = sum(totals.values())
    if not gateways:
        return {}
    common = sum(load.busy_ratio for load in loads) / gateways
    old = 0.5 ** ((now_ns - balance.at_ns) / COST_HALF_LIFE_NS)
    costs = {}
    for load in loads:
        total = totals[load.pair]
        cost = load.busy_ratio / total if total > FEW * gateways / len(loads) else common
        costs[load.pair] = cost + old * (balance.costs.get(load.pair, cost) - cost)
    return costs


def shard_weights(loads: Sequence[PairLoad], costs: Mapping[int, float]) -> list[float]:
    """Load of each shard; shape (SHARDS,). By the costs of gateways once a pair is busy, else gateways."""
    weights = [EMPTY_SHARD] * SHARDS
    expected = [costs.get(load.pair, 0.0) * sum(load.gateways.values()) for load in loads]
    by_cpu = any(busy_ratio >= BUSY for busy_ratio in expected)
    for load in loads:
        # CPU in thousandths of a core, so that an empty shard stays the little that it is.
        weight = 1000 * costs[load.pair] if by_cpu else 1.0
        for shard, count in load.gateways.items():
            weights[shard] += count * weight
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


Item = TypeVar("Item")


def interleave(gateways: Iterable[Item], shard_of: Callable[[Item], int], share: int = SHARE) -> list[Item]:
    """Every gateway once, shards in the order of their first gateway, ``share`` of a shard in a turn.

    Within a shard the order is kept. With s shards waiting, the k-th gateway of a shard is served after those
    before it in its own shard and ceil(k / share) * (s - 1) * share others at most, however many the other
    shards have; plain order would make it wait for all that were due before it.
    """
    queues: dict[int, list[Item]] = {}
    for gateway in gateways:
        shard = shard_of(gateway)
        if (queue := queues.get(shard)) is None:
            queues[shard] = [gateway]
        else:
            queue.append(gateway)
    ordered: list[Item] = []
    served = 0
    waiting = list(queues.values())
    while waiting:
        for queue in waiting:
            ordered += queue[served : served + share]
        served += share
        waiting = [queue for queue in waiting if len(queue) > served]
    return ordered


class HangDetector:
    """Notices a pair whose threads live and do nothing.

    Counts *checks*, not time: a parent that was itself suspended has not checked, and blames no pair.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}
        self._idle: dict[str, int] = {}

    def check(self, steps: Mapping[str, int]) -> str:
        """One check of the steps each thread has made; names what hangs, or nothing."""
        for name, made in steps.items():
            self._idle[name] = self._idle.get(name, 0) + 1 if self._steps.get(name) == made else 0
            self._steps[name] = made
        hung = [name for name, idle in self._idle.items() if idle >= HUNG_CHECKS]
        return f"its {' and '.join(sorted(hung))} made no progress for {HUNG_CHECKS} s" if hung else ""

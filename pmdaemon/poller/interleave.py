"""Serving shards in turn, a bounded share each (P11).

When many gateways are due at once, they are served shard by shard: ``SHARE`` gateways of one shard, then of
the next. Within a shard the order is kept. So with s shards waiting, the k-th gateway of a shard is served
those before it in its own shard and ceil(k / SHARE) * (s - 1) * SHARE others at most, however many the
other shards have; plain order would make it wait for all that were due before it.

Pure; no clock. Source: P11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, TypeVar

Item = TypeVar("Item")

SHARE: Final = 8  # gateways of a shard in one turn: some 100 us, a hundredth of the thread's quantum


def in_turn(gateways: Iterable[Item], shard_of: Callable[[Item], int], share: int = SHARE) -> list[Item]:
    """Every gateway once, shards in the order of their first gateway, ``share`` of a shard in a turn."""
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

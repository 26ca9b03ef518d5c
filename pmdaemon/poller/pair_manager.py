"""What the parent does for its pairs: their number, the map of shards, and passing sessions and mail on.

A pair is added only if there is room for its mailbox (``has_room``); those that run go on without it.

State: the children in order of their numbers, the map, and which pair has which registered gateway (only
while there is more than one pair). Each second ``look`` asks ``shards.decide`` and carries the answer out:
it starts pairs, tells the map, and retires the last pair: its shards move away, and when it serves nobody
any more, or after ``RETIRE_NS``, it is stopped. A pair that hangs (``shards.Watch``) is killed; a pair that
has died loses its shards to the others at once, if there are others.

The map is told *before* anything is passed on under it, on the same channel, so a pair's map is never older
than what reaches it. The parent looks at no byte of an agent: it passes descriptors and memory files on
unopened.

Thread: the parent's main thread.

Source: P11, P12, P14; DESIGN.md 3.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.poller.balance import SHARDS, Balance, Map, PairLoad, decide, evacuate, shard_weights
from pmdaemon.poller.channel import Parcel
from pmdaemon.poller.children import PairChild
from pmdaemon.poller.config import PmConfig
from pmdaemon.poller.sizing import T_PTMAX_US, pairs_by_formula, pairs_needed
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.stop import ParentPipe

RETIRE_NS: Final = 30 * 10**9
NO_ROOM_NS: Final = 60 * 10**9  # until it is tried again: somebody has to make room first
log = structlog.get_logger("traffic")


class PairManager:
    """See the module.

    Attributes:
        children: by number.
        moves: shards that have changed their pair.
        passed_on: sessions and messages passed from pair to pair.
        lost: sessions and messages for which no pair was running; agents dial again.
    """

    def __init__(
        self,
        settings: PmConfig,
        config_path: Path | None,
        pipe: ParentPipe,
        clock: Clock,
        cpus: int,
        has_room: Callable[[int], bool] = lambda _index: True,
    ) -> None:
        self.children: list[PairChild] = []
        self.owners: Map = (0,) * SHARDS
        self.moves = 0
        self.passed_on = 0
        self.lost = 0
        self.t_ptmax_us = T_PTMAX_US
        self.needed = 0
        self._settings = settings
        self._config_path = config_path
        self._pipe = pipe
        self._clock = clock
        self._cpus = cpus
        self._balance = Balance()
        self._where: dict[str, int] = {}
        self._retire_until_ns = 0
        self._has_room = has_room
        self._grow_again_ns = 0

    # -- once a second

    def look(self) -> None:
        """Decide on the number of pairs and on the map."""
        now_ns = self._clock.monotonic_ns()
        for child in self.children:
            if reason := child.hangs():
                child.kill(reason)
        if self._retire(now_ns):
            return
        wanted = self._wanted()
        if not self.children or self._settings.fixed_pairs is not None:
            self._grow(wanted)  # a fixed number needs no hysteresis, and the first pair no reason
        # One that runs and has not reported yet (a slow start) takes no shards, but keeps those it has.
        loads = [
            PairLoad(child.index, child.last.busy_ratio, {row[0]: row[1] for row in child.last.shards})
            for child in self.children
            if child.is_running and (child.has_reported or child.index in self.owners)
        ]
        running = len(self.children)
        self._balance, decision = decide(self._balance, self.owners, running, wanted, loads, now_ns)
        self._grow(decision.pairs)
        if decision.pairs < running:
            self.children[-1].is_retiring = True
            self._retire_until_ns = now_ns + RETIRE_NS
            log.info("pair-retires", pair=self.children[-1].index)
        if decision.moves:
            self._set_map(decision.owners, decision.moves)

    def _wanted(self) -> int:
        settings = self._settings
        gateways = sum(child.last.gateways for child in self.children)
        self.t_ptmax_us = max((child.last.t_ptmax_us for child in self.children), default=0.0) or T_PTMAX_US
        needed = pairs_needed(
            gateways, settings.thread_quantum_ms, self.t_ptmax_us, self._cpus, settings.fixed_pairs
        )
        wanted = min(needed, settings.most_pairs)
        if needed != self.needed:
            self.needed = needed
            formula = pairs_by_formula(gateways, settings.thread_quantum_ms, self.t_ptmax_us)
            log.info(
                "sizing",
                gateways=gateways,
                t_ptmax_us=round(self.t_ptmax_us),
                formula=formula,
                needed=needed,
                pairs=max(wanted, len(self.children)),
            )
        return wanted

    def _grow(self, pairs: int) -> None:
        """Add pairs, as far as there is room for their mailboxes."""
        if len(self.children) < pairs and self._clock.monotonic_ns() < self._grow_again_ns:
            return
        while len(self.children) < pairs:
            index = len(self.children)
            if not self._has_room(index) and index:  # without any pair there is nothing: it may wait for room
                self._grow_again_ns = self._clock.monotonic_ns() + NO_ROOM_NS
                return
            self.children.append(PairChild(index, self._config_path, self._pipe, self._clock))

    def _retire(self, now_ns: int) -> bool:
        """Stop a retiring pair when it serves nobody; True while one is on its way out."""
        child = self.children[-1] if self.children else None
        if child is None or not child.is_retiring:
            return False
        if child.is_running and child.last.connections and now_ns < self._retire_until_ns:
            return True
        self.children.pop()
        child.stop()
        log.info("pair-retired", pair=child.index)
        return False

    def _set_map(self, owners: Map, moves: int) -> None:
        self.owners = owners
        self.moves += moves
        counts = ",".join(str(owners.count(child.index)) for child in self.children)
        log.info("shards-moved", moves=moves, shards_by_pair=counts)
        for child in self.children:
            self.tell_map(child)

    def tell_map(self, child: PairChild) -> None:
        """Tell a pair who owns what."""
        if child.control is not None:
            child.control.send({"op": "map", "owners": list(self.owners)})

    # -- births and deaths

    def started(self, child: PairChild) -> None:
        """It runs: tell it the map, unless it has everything, which it assumes."""
        if len(self.children) > 1 or self.owners.count(child.index) < SHARDS:
            self.tell_map(child)

    def died(self, child: PairChild) -> None:
        """Its shards go to those that run; its gateways dial again."""
        self._where = {gateway_id: pair for gateway_id, pair in self._where.items() if pair != child.index}
        living = [item.index for item in self.children if item.is_running and not item.is_retiring]
        if living and child.index in self.owners:
            following = evacuate(self.owners, living, shard_weights(self.owners, []))
            moves = sum(a != b for a, b in zip(self.owners, following, strict=True))
            self._set_map(following, moves)

    # -- passing on

    def new(self, sock: socket.socket, address: str, *, is_dialled: bool = False) -> PairChild | None:
        """Give a new connection to the pair with the fewest; None if none can take it."""
        running = [child for child in self.children if child.is_running and not child.is_retiring]
        ordered = sorted(running, key=lambda child: child.load)
        return next((child for child in ordered if child.offer(sock, address, is_dialled)), None)

    def pass_on(self, sender: PairChild, parcels: list[Parcel]) -> None:
        """What a pair has sent for others."""
        for parcel in parcels:
            if parcel.op == "up":
                self._note(sender.index, parcel.header["gw"], parcel.header["address"])
            else:
                self._to_owner(parcel)
            parcel.close()

    def _note(self, pair: int, gateway_id: str, address: str) -> None:
        """A gateway has registered; if another pair serves it too, that session is the older one."""
        older = self._where.get(gateway_id)
        self._where[gateway_id] = pair
        if older is not None and older != pair and older < len(self.children):
            control = self.children[older].control
            if control is not None:
                control.send({"op": "elsewhere", "gw": gateway_id, "address": address})

    def _to_owner(self, parcel: Parcel) -> None:
        owner = self.owners[parcel.header["shard"]]
        control = self.children[owner].control if owner < len(self.children) else None
        if control is None:
            self.lost += 1
            log.warning("not-passed-on", op=parcel.op, shard=parcel.header["shard"], pair=owner)
            return
        self.passed_on += 1
        control.send(parcel.header, parcel.descriptors)
        parcel.descriptors = []  # the channel closes them when they are sent

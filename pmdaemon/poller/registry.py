"""All gateways of a pair, and the watermarks they start from.

Lock ``lock`` guards the map and ``watermarks``. It is taken before a gateway's own lock, never after.
Story of the race it prevents: a gateway registers (inbound) while WATERMARKS of a new dbmanager arrive
(outbound). Either the gateway is in the map before, and is rewound with the others; or it reads the new
watermarks when it registers. Without the lock it could start from the old ones and never be rewound.

What is durable of an epoch stands in one place: in the gateway's record while that holds the epoch, else in
``watermarks``. Whoever needs both, before a record begins anew or leaves, asks ``_gather``.

Source: DESIGN.md 4 (watermarks before polls).
"""

from __future__ import annotations

import threading

from pmdaemon.poller.balance import SHARDS
from pmdaemon.poller.catch_up import CatchUp
from pmdaemon.poller.gateway import Gateway
from pmdaemon.poller.peer import AgentPeer
from pmdaemon.poller.watermarks import Watermarks
from pmdaemon.wire.messages.agent import Hello, Registration
from pmdaemon.wire.messages.server import HighWaters


class Registry:
    """Gateways by id. A record outlives its sessions, until the gateway moves to another pair or makes room.

    Attributes:
        catch_up: the pair's budget for backlog.
        get: a gateway that registered at least once, by its id, or None.
    """

    def __init__(self, catch_up: CatchUp) -> None:
        self.catch_up = catch_up
        self.lock = threading.Lock()
        self.watermarks = Watermarks()
        self._gateways: dict[str, Gateway] = {}
        self.get = self._gateways.get

    @property
    def has_watermarks(self) -> bool:
        """Whether dbmanager has said what it holds; before that nobody is polled."""
        return self.watermarks.incarnation is not None

    def all(self) -> list[Gateway]:
        """Every gateway known, in order of first registration."""
        with self.lock:
            return list(self._gateways.values())

    def has_session(self, gateway_id: str) -> bool:
        """Whether a gateway is there now."""
        gateway = self.get(gateway_id)
        return gateway is not None and gateway.conn is not None

    def register(self, conn: AgentPeer, hello: Hello, registration: Registration) -> Gateway:
        """Begin a session. Thread: inbound."""
        with self.lock:
            gateway = self._gateways.get(hello.gateway_id) or Gateway(hello.gateway_id)
            self._gateways[hello.gateway_id] = gateway
            gateway.begin(conn, hello, registration, self._gather(gateway))
        return gateway

    def take_in(self, gateway: Gateway, incarnation: int | None, notice: HighWaters) -> None:
        """A gateway has moved here from another pair, with what that pair knew of its durable cuts.

        What the other pair posted last may reach dbmanager after what we post: the record is rewound, so
        everything behind the durable is asked for again, and dbmanager drops what it has.
        """
        with self.lock:
            self._gateways[gateway.gateway_id] = gateway
            mine = self.watermarks.incarnation
            if mine is None or mine == incarnation:
                self.watermarks.learn(notice)
                with gateway.lock:
                    gateway.record.rewind()
            else:
                with gateway.lock:
                    gateway.record.restart(self.watermarks.of(gateway.gateway_id))

    def give_away(self, gateway_id: str) -> tuple[int | None, HighWaters]:
        """Forget a gateway that moves away or makes room; returns what is known of its durable cuts."""
        with self.lock:
            gateway = self._gateways.pop(gateway_id, None)
            known = self.watermarks.of(gateway_id) if gateway is None else self._gather(gateway)
            return self.watermarks.incarnation, [(gateway_id, epoch, seq) for epoch, seq in known.items()]

    def open(self, incarnation: int, notice: HighWaters, now_ns: int) -> bool:
        """WATERMARKS arrived; True if dbmanager is another one than before. Thread: outbound."""
        with self.lock:
            is_new = self.watermarks.open(incarnation, notice)
            if not is_new:
                self._enter(notice, now_ns)
                return False
            for gateway in self._gateways.values():
                with gateway.lock:
                    gateway.record.restart(self.watermarks.of(gateway.gateway_id))
        return True

    def advance(self, incarnation: int, notice: HighWaters, now_ns: int) -> bool:
        """DURABLE arrived; False if it is of another incarnation. Thread: outbound."""
        with self.lock:
            if incarnation != self.watermarks.incarnation:
                return False
            self.watermarks.learn(self._enter(notice, now_ns))
        return True

    def refused(self, gateway_ids: set[str], now_ns: int) -> None:
        """A batch of these gateways was refused: what is not durable is asked for again. Any thread."""
        self.catch_up.refused(now_ns)
        for gateway_id in gateway_ids:
            if (gateway := self.get(gateway_id)) is not None:
                with gateway.lock:
                    gateway.record.refused(now_ns, gateway.shard / SHARDS)

    def _enter(self, notice: HighWaters, now_ns: int) -> HighWaters:
        """Enter what is durable where a record holds it; returns the other rows."""
        others = []
        for row in notice:
            gateway_id, epoch, seq = row
            if (gateway := self.get(gateway_id)) is not None:
                with gateway.lock:
                    if gateway.record.durable(epoch, seq, now_ns):
                        continue
            others.append(row)
        return others

    def _gather(self, gateway: Gateway) -> dict[int, int]:
        """Epoch to high water, from both places."""
        with gateway.lock:
            held = gateway.record.high_water()
        self.watermarks.learn([(gateway.gateway_id, epoch, seq) for epoch, seq in held])
        return self.watermarks.of(gateway.gateway_id)

"""The daemon with two pairs, and a fleet of agents that answer every poll.

Real processes on loopback and the real mailbox (``daemon``); waiting is on descriptors.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pmdaemon.mailbox import Layout, Route, attach, create_segment
from pmdaemon.poller.balance import shard_of
from pmdaemon.runtime.clock import Deadline
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.daemon import MIB, Server
from tests.support.gateways import DEADLINE_S, Agent

PAIRS = ("pair-0", "pair-1")
GATEWAYS = 24


class TwoPairs(Server):
    """The daemon with room for two pairs, and a dbmanager that acknowledges what it takes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.services.close()
        self.dbmanager.close()
        (directory / "main.mbx").unlink()
        routes = [
            Route(sender, recipient, 4 * MIB)
            for pair in PAIRS
            for sender, recipient in (
                (pair, "services"),
                (pair, "dbmanager"),
                ("services", pair),
                ("dbmanager", pair),
            )
        ]
        names = ("pmdaemon", "services", "dbmanager", *PAIRS)
        layout = Layout(participants=names, routes=tuple(routes), slots_per_sender=512)
        create_segment(directory / "main.mbx", layout)
        self.services = attach(directory / "main.mbx", "services")
        self.dbmanager = attach(directory / "main.mbx", "dbmanager")
        self.stored: dict[str, int] = {}
        self.holes: list[tuple[str, int, int]] = []
        self.served_by: dict[str, str] = {}
        self.greeted: set[str] = set()

    def greet(self, *pairs: str) -> None:
        """WATERMARKS, as dbmanager sends them to each pair it hears of for the first time."""
        for pair in set(pairs or PAIRS) - self.greeted:
            marks = [[gateway_id, 7, seq] for gateway_id, seq in self.stored.items()]
            self.dbmanager.post(pair, frame.encode(Kind.WATERMARKS, {"inc": 1, "hw": marks}))
            self.greeted.add(pair)

    def store(self) -> None:
        """Take what has arrived like dbmanager: repeats are dropped, holes not taken, notices sent."""
        self.dbmanager.wait(0.02)
        for message in self.dbmanager.take():
            taken = frame.decode(message.payload)
            if taken.kind == Kind.GATEWAY and taken.header["state"] == "up":
                self.served_by[taken.header["gw"]] = message.sender
                self.greet(message.sender)
            if taken.kind != Kind.CUTS:
                continue
            for raw in frame.split(taken.blob):
                header = frame.decode(raw).header
                gateway_id, seq = str(uuid.UUID(bytes=header["gw"])), header["seq"]
                high = self.stored.get(gateway_id, 0)
                if seq == high + 1:
                    self.stored[gateway_id] = seq
                elif seq > high:
                    self.holes.append((gateway_id, high, seq))
                notice = {"inc": 1, "hw": [[gateway_id, 7, self.stored.get(gateway_id, 0)]]}
                self.dbmanager.post(message.sender, frame.encode(Kind.DURABLE, notice))
        for message in self.services.take():
            self.taken["services"].append(frame.decode(message.payload))

    def judged(self) -> list[tuple[int, bytes, int]]:
        """(pair, gateway, seq) of every cut that services was given.

        What two pairs gave it, before and after a move, it takes once (``services.control.usage``).
        """
        return [
            (item.header["pair"], header["gw"], header["seq"])
            for item in self.taken["services"]
            if item.kind == Kind.CUTS
            for header in (frame.decode(raw).header for raw in frame.split(item.blob))
        ]


def any_names() -> list[str]:
    """Ids of gateways, of which both pairs have some."""
    return [new_name() for _ in range(GATEWAYS)]


def names_of_first_pair() -> list[str]:
    """Ids of gateways that all begin with pair-0, which has every second shard at first: some must move."""
    return list(itertools.islice((name for name in iter(new_name, "") if shard_of(name) % 2 == 0), GATEWAYS))


def new_name() -> str:
    return str(uuid.uuid4())


class Fleet:
    """Agents that answer every poll, each in a thread, and dial again after BYE; what they are sent is kept.

    Attributes:
        goodbyes: how often each was told BYE.
        ended: the ERROR each was sent.
    """

    def __init__(self, dials: Mapping[str, Callable[[], Agent]]) -> None:
        self._dials = dials
        self._closing = threading.Event()
        self.agents = [dial() for dial in dials.values()]
        self.polls: dict[str, int] = {}
        self.ended: dict[str, str] = {}
        self.goodbyes: Counter[str] = Counter()
        self.caps: dict[str, int] = {}
        for agent in self.agents:
            agent.register()
        self.threads = [threading.Thread(target=self._serve, args=(at,)) for at in range(len(self.agents))]
        for thread in self.threads:
            thread.start()

    @classmethod
    def plain(cls, port: int, names: Iterable[str]) -> Fleet:
        """Without TLS."""
        return cls({name: partial(Agent.dial, port, name) for name in names})

    def _serve(self, at: int) -> None:
        try:
            while True:
                self._answer(self.agents[at])
                self.agents[at] = self._dial_again(self.agents[at])
        except (EOFError, OSError):
            return

    def _answer(self, agent: Agent) -> None:
        """Until it is told BYE; EOFError at any other end."""
        while True:
            received = agent.read()
            if received.kind == Kind.POLL:
                agent.answer(received)
                self.polls[agent.gateway_id] = self.polls.get(agent.gateway_id, 0) + 1
            elif received.kind == Kind.CAPS:
                self.caps[agent.gateway_id] = received.header["gen"]
            elif received.kind == Kind.ERROR:
                self.ended[agent.gateway_id] = str(received.header)
            elif received.kind == Kind.BYE:
                self.goodbyes[agent.gateway_id] += 1
                return

    def _dial_again(self, former: Agent) -> Agent:
        former.close()
        deadline = Deadline(DEADLINE_S)
        while True:
            agent = self._dials[former.gateway_id]()
            agent.cuts, agent.next_seq = former.cuts, former.next_seq
            try:
                agent.register()
            except (EOFError, OSError):
                agent.close()
                if deadline.passed or self._closing.is_set():
                    raise
                continue
            return agent

    def close(self) -> None:
        self._closing.set()
        for agent in self.agents:
            with contextlib.suppress(OSError):  # its pair was killed
                agent.sock.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for agent in self.agents:
            agent.close()


def until(server: TwoPairs, condition: Any) -> None:
    deadline = Deadline(2 * DEADLINE_S)
    while not condition():
        assert not deadline.passed, server.log.read_text()[-4000:]
        server.store()

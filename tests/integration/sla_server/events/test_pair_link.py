"""Places at the pair's listener, with connections from several addresses of the loopback network."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pmdaemon.diskqueue.errors import QueuePoisoned
from pmdaemon.runtime.clock import server_clock
from pmdaemon.runtime.threads import ThreadInbox
from sla_server.events.config import EventPairConfig
from sla_server.events.pair_link import MOST_CANDIDATES, PairLink
from tests.support.partners import Partners

LIMIT_S = 60.0
PARTNER, STRANGER = "127.0.0.1", "127.0.0.2"


class Listening:
    """One server's link, and clients that connect and say nothing."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # Candidates would otherwise end on a slow machine because they say nothing.
        monkeypatch.setattr("sla_server.events.pair_link.PROVE_S", 600.0)
        config = EventPairConfig(
            enabled=True, name="a", partner="b", listen="127.0.0.1:0", address=f"{PARTNER}:1"
        )
        self.inbox: ThreadInbox[None] = ThreadInbox()
        core = Partners(folder).a.core
        self.link = PairLink(config, core, lambda _: self.context, self.inbox, server_clock())
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.clients: list[socket.socket] = []
        self.link.turn(0.0)

    def connect(self, host: str) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", self.link.port), source_address=(host, 0))
        client.setblocking(False)
        self.clients.append(client)
        return client

    def turn_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < deadline, [is_closed(each) for each in self.clients]
            self.link.turn(0.01)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.link.close()


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.fixture
def listening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listening]:
    made = Listening(tmp_path, monkeypatch)
    yield made
    made.close()


def test_strangers_of_another_host_do_not_take_the_partners_place(listening: Listening) -> None:
    partner = listening.connect(PARTNER)
    strangers = [listening.connect(STRANGER) for _ in range(3 * MOST_CANDIDATES)]
    left = MOST_CANDIDATES // 2
    listening.turn_until(lambda: is_closed(strangers[-left - 1]))
    assert [is_closed(each) for each in strangers] == [True] * (len(strangers) - left) + [False] * left
    assert not is_closed(partner)


def test_the_partners_host_has_all_places_that_are_free(listening: Listening) -> None:
    clients = [listening.connect(PARTNER) for _ in range(MOST_CANDIDATES + 1)]
    listening.turn_until(lambda: is_closed(clients[0]))
    assert [is_closed(each) for each in clients] == [True] + [False] * MOST_CANDIDATES


def test_a_fault_of_ours_ends_the_connection_that_met_it_and_no_other(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_connection: object) -> None:
        raise RecursionError("a defect")

    other = listening.connect(PARTNER)
    client = listening.connect(PARTNER)
    listening.turn_until(lambda: len(listening.link._candidates) == 2)
    monkeypatch.setattr(listening.link, "_secure", fails)
    client.send(b"x")
    listening.turn_until(lambda: is_closed(client))
    assert not is_closed(other)
    assert "fault" in listening.link.last_failure


def test_a_disk_that_fails_ends_the_link(listening: Listening, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_connection: object) -> None:
        raise QueuePoisoned("partner", "EIO")

    client = listening.connect(PARTNER)
    listening.turn_until(lambda: len(listening.link._candidates) == 1)
    monkeypatch.setattr(listening.link, "_secure", fails)
    client.send(b"x")
    with pytest.raises(QueuePoisoned):
        listening.turn_until(lambda: is_closed(client))

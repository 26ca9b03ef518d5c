"""Two real pairs with TLS: a connection is passed on before its handshake, to the owning pair."""

from __future__ import annotations

import re
import socket
import ssl
import uuid
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from pmdaemon.pki import certificates, contexts
from pmdaemon.pki.authority import Authority
from pmdaemon.poller.balance import shard_of
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.sni import name_of
from tests.support.gateways import DEADLINE_S, Agent
from tests.support.two_pairs import GATEWAYS, Fleet, TwoPairs, names_of_first_pair, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TwoPairs]:
    tmp_path.chmod(0o700)
    made = TwoPairs(tmp_path)
    yield made
    made.close()


class Site:
    """The authority, and agents with certificates of it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "ca"
        self.authority = Authority(self.directory)
        self.authority.init()

    def context(self, gateway_id: str) -> ssl.SSLContext:
        key = certificates.make_key()
        name = "gw-" + gateway_id[-4:]
        made = self.authority.issue(certificates.make_request(key, name), gateway_id, name)
        path = self.directory / f"{gateway_id}.pem"
        path.write_bytes(certificates.key_pem(key) + certificates.pem_of_der(made))
        return contexts.agent(self.directory / "ca.crt", path)

    def dial(self, port: int, gateway_id: str, context: ssl.SSLContext) -> Agent:
        plain = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        return Agent(context.wrap_socket(plain, server_hostname=name_of(gateway_id)), gateway_id)


def test_each_gateway_lands_at_its_owner_and_stays(server: TwoPairs) -> None:
    site = Site(server.directory)
    port = server.start(pairs=2, **{"tls.enabled": True, "tls.state_dir": str(site.directory)})
    server.greet()
    ids = [str(uuid.uuid4()) for _ in range(GATEWAYS)]
    agents = [site.dial(port, gateway_id, site.context(gateway_id)) for gateway_id in ids]
    for agent in agents:
        agent.register()
    for _ in range(5):
        for agent in agents:
            received = agent.expect(Kind.POLL)
            agent.answer(received)
        server.store()
    until(server, lambda: len(server.served_by) == GATEWAYS)
    assert set(server.served_by.values()) == {"pair-0", "pair-1"}, "both pairs serve some"
    owners: dict[int, set[str]] = {}
    for gateway_id, pair in server.served_by.items():
        owners.setdefault(shard_of(gateway_id), set()).add(pair)
    assert all(len(pairs) == 1 for pairs in owners.values())
    for agent in agents:
        agent.close()
    assert server.stop() == 0
    passed = [int(found) for found in re.findall(r"moves_by_reconnect=(\d+)", server.log.read_text())]
    assert not any(passed), "nobody was told to dial again"
    assert "peer-refused" not in server.log.read_text()


def fleet_of(site: Site, port: int, names: Iterable[str]) -> Fleet:
    return Fleet({name: partial(site.dial, port, name, site.context(name)) for name in names})


def test_a_shard_moves_by_reconnect_under_load_and_no_cut_is_lost(server: TwoPairs) -> None:
    site = Site(server.directory)
    port = server.start(pairs=2, **{"tls.enabled": True, "tls.state_dir": str(site.directory)})
    server.greet()
    fleet = fleet_of(site, port, names_of_first_pair())
    try:
        until(server, lambda: len(server.stored) == GATEWAYS)
        until(server, lambda: set(server.served_by.values()) == {"pair-0", "pair-1"})
        before = dict(server.stored)
        until(server, lambda: all(server.stored[name] > before[name] + 5 for name in before))
        assert fleet.goodbyes, "sessions were told to dial again"
        assert max(fleet.goodbyes.values()) <= 3, "and stay where they arrive"
        assert fleet.ended == {}
        assert server.holes == [], "dbmanager takes every cut, in order: none is missing, repeats are dropped"
        owners = {shard_of(name): pair for name, pair in server.served_by.items()}
        assert all(owners[shard_of(name)] == pair for name, pair in server.served_by.items())
        figures = server.directory / "metrics" / "pmdaemon.prom"
        until(server, lambda: 'moves_by_reconnect_total{pair="0"}' in figures.read_text())
    finally:
        fleet.close()
    assert server.stop() == 0

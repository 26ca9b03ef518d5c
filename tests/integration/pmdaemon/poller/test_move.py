"""Two real pairs: shards move between them under load, nothing is lost or doubled, duplicates are noticed.

Real processes on loopback and the real mailbox; waiting is on descriptors.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.poller.balance import SHARDS, shard_of
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from tests.support.daemon import redial
from tests.support.gateways import Agent
from tests.support.pairs import pair_pids
from tests.support.two_pairs import (
    GATEWAYS,
    PAIRS,
    Fleet,
    TwoPairs,
    any_names,
    names_of_first_pair,
    until,
)

# What issue 5 asks to be told, of each pair and of the parent.
FIGURES = (
    *("polls", "replies", "late_replies", "overruns", "received_bytes", "sent_bytes", "cpu_seconds"),
    *(
        "cpu_seconds_a_poll",
        "t_ptmax_seconds",
        "shards",
        "moved_in",
        "moved_out",
        "connections",
        "registrations",
    ),
    "moves_by_reconnect",
    *("connections_open", "gateways_up", "gateways_stalled", "gateways_lost", "lost_sessions", "stalls"),
)
PARENTS_FIGURES = ("pairs", "pairs_needed", "shards_moved", "passed_on", "refused_connections")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[TwoPairs]:
    tmp_path.chmod(0o700)
    made = TwoPairs(tmp_path)
    yield made
    made.close()


def pinned_to(server: TwoPairs) -> list[set[int]]:
    """Processors each pair process may use."""
    assert server.process is not None
    return [os.sched_getaffinity(pid) for pid in pair_pids(server.process.pid)]


def families_of(figures: Path) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(figures.read_text())}


def says_all(figures: Path) -> bool:
    """Whether the file, which is written once a second, has every figure of both pairs after the move."""
    families = families_of(figures)
    if not {f"sla_pmdaemon_{name}" for name in (*FIGURES, *PARENTS_FIGURES)} <= set(families):
        return False
    moved = families["sla_pmdaemon_moves_by_reconnect"].samples
    return (
        all(
            {sample.labels["pair"] for sample in families[f"sla_pmdaemon_{name}"].samples} == {"0", "1"}
            for name in FIGURES
        )
        and sum(sample.value for sample in moved) > 0
        and sum(sample.value for sample in families["sla_pmdaemon_shards"].samples) == SHARDS
    )


def has_settled(server: TwoPairs, fleet: Fleet) -> bool:
    """Whether each that was told to dial again has arrived, and nobody is still to be told."""
    figures = families_of(server.directory / "metrics" / "pmdaemon.prom")["sla_pmdaemon_moves_by_reconnect"]
    arrived = [name for name in fleet.goodbyes if server.served_by[name] == "pair-1"]
    return 0 < sum(fleet.goodbyes.values()) == len(arrived) == sum(item.value for item in figures.samples)


def test_shards_move_under_load_and_nothing_is_lost_or_doubled(server: TwoPairs) -> None:
    port = server.start(pairs=2, pinning="on")
    server.greet()
    fleet = Fleet.plain(port, names_of_first_pair())
    try:
        until(server, lambda: len(server.stored) == GATEWAYS)
        until(server, lambda: "pair-1" in server.served_by.values())
        before = dict(server.stored)
        until(server, lambda: all(server.stored[name] > before[name] + 3 for name in before))
        until(server, lambda: has_settled(server, fleet))
        assert max(fleet.goodbyes.values()) <= 3, "they stay where they arrive"
        assert fleet.ended == {}
        assert server.holes == []
        # An order to the pair that had the gateway before is passed on to the one that has it now.
        moved = next(name for name, pair in server.served_by.items() if pair == "pair-1")
        caps = {"gw": moved, "gen": 5, "lease_us": 1_000_000, "caps": []}
        server.services.post("pair-0", frame.encode(Kind.SET_CAPS, caps))
        until(server, lambda: fleet.caps == {moved: 5})
        owners = {shard_of(name): pair for name, pair in server.served_by.items()}
        assert all(owners[shard_of(name)] == pair for name, pair in server.served_by.items())
        allowed = sorted(os.sched_getaffinity(0))
        assert sorted(pinned_to(server), key=sorted) == sorted(
            ({allowed[pair % len(allowed)]} for pair in range(2)), key=sorted
        )
        figures = server.directory / "metrics" / "pmdaemon.prom"
        until(server, lambda: says_all(figures))
        families = families_of(figures)
        assert all(family.documentation and family.type != "unknown" for family in families.values())
    finally:
        fleet.close()
    cuts = server.judged()
    assert len(cuts) == len(set(cuts))  # no pair judged one twice
    assert server.stop() == 0


def test_the_same_gateway_on_another_connection_supersedes_whichever_pair_has_it(server: TwoPairs) -> None:
    port = server.start(pairs=2)
    server.greet()
    fleet = Fleet.plain(port, any_names())
    try:
        until(server, lambda: len(server.stored) == len(server.served_by) == GATEWAYS)
        assert set(server.served_by.values()) == set(PAIRS)
        assert not fleet.goodbyes
        again = {}
        for agent in fleet.agents[:8]:
            again[agent.gateway_id] = Agent.dial(port, agent.gateway_id, epoch=8)
            again[agent.gateway_id].register()
        until(server, lambda: set(again) <= set(fleet.ended))
        assert all("superseded" in fleet.ended[name] for name in again)
        for agent in again.values():
            agent.answer(agent.expect(Kind.POLL))
            agent.close()
    finally:
        fleet.close()


def test_a_killed_pair_loses_its_shards_and_its_gateways_come_back(server: TwoPairs) -> None:
    port = server.start(pairs=2)
    server.greet()
    fleet = Fleet.plain(port, any_names())
    try:
        until(server, lambda: len(server.stored) == len(server.served_by) == GATEWAYS)
        assert set(server.served_by.values()) == set(PAIRS)
        assert not fleet.goodbyes
        server.served_by.clear()
        assert server.process is not None
        os.kill(pair_pids(server.process.pid)[1], signal.SIGKILL)
        until(server, lambda: any(not thread.is_alive() for thread in fleet.threads))
        orphans = [
            agent for agent, thread in zip(fleet.agents, fleet.threads, strict=True) if not thread.is_alive()
        ]
        assert 0 < len(orphans) < GATEWAYS
        back = redial(port, orphans[0])
        poll = back.expect(Kind.POLL)
        assert poll.header["from"][1] <= server.stored[back.gateway_id] + 1
        back.close()
    finally:
        fleet.close()

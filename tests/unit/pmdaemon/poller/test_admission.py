"""Unregistered connections: how many may wait, which goes first."""

from __future__ import annotations

import resource
import socket

import pytest

from pmdaemon.poller.admission import (
    GRACE_NS,
    MAX_UNREGISTERED,
    MAX_UNREGISTERED_PLAIN,
    UnregisteredConnections,
    limit_for,
)
from tests.support.pair import OTHER, PairRig


def test_room_then_the_oldest_that_had_its_time_then_nobody() -> None:
    strangers: UnregisteredConnections[str] = UnregisteredConnections(limit=2)
    assert strangers.admit(0) == (True, None)
    strangers.add("a", 0)
    strangers.add("b", 10)
    assert strangers.admit(GRACE_NS - 1) == (False, None), "a storm: the newcomer goes"
    assert strangers.admit(GRACE_NS) == (True, "a"), "a slow-loris: the oldest goes"
    strangers.remove("a")
    strangers.remove("a")  # again does no harm
    assert strangers.admit(GRACE_NS) == (True, None)
    assert len(strangers) == 1


@pytest.mark.parametrize(
    ("files", "tls", "plain"),
    [
        (256, 128, 128),
        (16384, MAX_UNREGISTERED, MAX_UNREGISTERED_PLAIN),
        (resource.RLIM_INFINITY, MAX_UNREGISTERED, MAX_UNREGISTERED_PLAIN),
    ],
)
def test_half_of_the_descriptors_is_left_to_gateways(
    monkeypatch: pytest.MonkeyPatch, files: int, tls: int, plain: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (files, files))
    assert (limit_for(tls=True), limit_for(tls=False)) == (tls, plain)


def test_a_flood_of_strangers_without_tls_is_bounded_too(
    rig: PairRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.watermarks()
    good = rig.up()
    # A limit of 8 instead of half of the descriptors, which follows from the process's own limit.
    monkeypatch.setattr(rig.inbound._admission, "unregistered", UnregisteredConnections(limit=8))
    for _ in range(40):
        rig.dial()
    assert rig.inbound.connections == 1 + 8
    assert rig.counters["strangers_turned_away"] == 32
    near, far = socket.socketpair()
    with near.dup(), far:
        assert rig.inbound.adopt(near, "dialled") is None
        assert far.recv(1) == b"", "ended for good, though the parent has a duplicate"
    rig.pass_time(2.1)
    late = rig.up(OTHER)
    assert rig.counters["strangers_evicted"] == 1
    rig.pass_time(1)
    for agent in (good, late):
        agent.answer(rig.polls(agent)[-1])
    rig.pass_time(0.1)
    assert rig.counters["replies"] == 2

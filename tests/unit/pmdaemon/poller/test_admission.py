"""Unregistered connections: how many may wait, which goes first."""

from __future__ import annotations

import resource

import pytest

from pmdaemon.poller.admission import (
    MAX_PLAIN,
    MAX_STRANGERS,
    PATIENCE_NS,
    UnregisteredConnections,
    limit_for,
)


def test_room_then_the_oldest_that_had_its_time_then_nobody() -> None:
    strangers: UnregisteredConnections[str] = UnregisteredConnections(limit=2)
    assert strangers.admit(0) == (True, None)
    strangers.add("a", 0)
    strangers.add("b", 10)
    assert strangers.admit(PATIENCE_NS - 1) == (False, None), "a storm: the newcomer goes"
    assert strangers.admit(PATIENCE_NS) == (True, "a"), "a slow-loris: the oldest goes"
    strangers.remove("a")
    strangers.remove("a")  # again does no harm
    assert strangers.admit(PATIENCE_NS) == (True, None)
    assert len(strangers) == 1


@pytest.mark.parametrize(
    ("files", "tls", "plain"),
    [(256, 128, 128), (16384, MAX_STRANGERS, MAX_PLAIN), (resource.RLIM_INFINITY, MAX_STRANGERS, MAX_PLAIN)],
)
def test_half_of_the_descriptors_is_left_to_gateways(
    monkeypatch: pytest.MonkeyPatch, files: int, tls: int, plain: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (files, files))
    assert (limit_for(tls=True), limit_for(tls=False)) == (tls, plain)

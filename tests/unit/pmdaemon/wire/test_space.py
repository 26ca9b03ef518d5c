"""SPACE: round trips, what a session allows, what the server refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import Welcome
from pmdaemon.wire.messages.space import MAX_SPACE_VOLUMES, SPACE, SPACE_CLOCK_US, GatewaySpace, Space
from pmdaemon.wire.session import SEND, TABLE, SessionState, Side

NOW_US = 1_800_000_000_000_000
VOLUME = {"name": "vg/lv1", "size_bytes": 50, "used_bytes": None, "volume": "vol-1", "in_use": True}
POOL = Space("data", "lvm", "disk-1", 100, 60, 0.25, 50, 1, (VOLUME,), NOW_US)


def test_a_reading_travels_to_services_in_the_same_keys() -> None:
    sent = frame.decode(POOL.encode())
    assert sent.kind == Kind.SPACE
    read = Space.parse(sent.header, NOW_US)
    assert read == POOL
    passed_on = frame.decode(GatewaySpace(read, "gw").encode())
    assert passed_on.kind == Kind.GATEWAY_SPACE
    assert GatewaySpace.parse(passed_on.header, NOW_US) == GatewaySpace(POOL, "gw")


def test_the_most_volumes_with_the_longest_names_fit_a_frame() -> None:
    volume = {**VOLUME, "volume": "v" * 128, "size_bytes": 1 << 62, "used_bytes": 1 << 62}
    volumes = tuple({**volume, "name": f"{number:03}" + "x" * 125} for number in range(MAX_SPACE_VOLUMES))
    read = Space.parse(frame.decode(replace(POOL, volumes=volumes).encode()).header, NOW_US)
    assert read.volumes == volumes
    with pytest.raises(FrameTooLarge):
        Space.parse({**POOL.header(), "volumes": [VOLUME] * (MAX_SPACE_VOLUMES + 1)}, NOW_US)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("pool", "a b", "'pool'"),
        ("kind", "floppy", "expected one of path, lvm"),
        ("backend", "a/b", "'backend'"),
        ("size_bytes", -1, "'size_bytes'"),
        ("used_bytes", 101, "more than size_bytes 100"),
        ("other_ratio", 1.5, "'other_ratio'"),
        ("other_ratio", float("nan"), "'other_ratio'"),
        ("volume_count", "1", "'volume_count'"),
        ("at_us", None, "'at_us'"),
        ("volumes", [{**VOLUME, "name": ""}], "a volume's name"),
        ("volumes", [{**VOLUME, "volume": "a b"}], "is served as"),
        ("volumes", [{**VOLUME, "in_use": 1}], "in_use of"),
        ("volumes", [{**VOLUME, "used_bytes": 1.5}], "'used_bytes'"),
        ("volumes", ["x"], "expected maps"),
    ],
)
def test_what_is_wrong_is_named(key: str, value: Any, problem: str) -> None:
    with pytest.raises(MalformedFrame) as caught:
        Space.parse({**POOL.header(), key: value}, NOW_US)
    assert problem in str(caught.value)


def test_a_time_far_from_ours_becomes_ours() -> None:
    near, far = NOW_US - SPACE_CLOCK_US, NOW_US - SPACE_CLOCK_US - 1
    assert Space.parse({**POOL.header(), "volumes": [], "at_us": near}, NOW_US).at_us == near
    assert Space.parse({**POOL.header(), "volumes": [], "at_us": far}, NOW_US).at_us == NOW_US


def test_what_runs_out_first_counts() -> None:
    assert POOL.full_ratio == 0.6
    assert replace(POOL, other_ratio=0.9).full_ratio == 0.9
    assert replace(POOL, size_bytes=0, used_bytes=0, other_ratio=None).full_ratio == 1.0


def test_a_session_takes_it_once_registered_and_the_link_sends_it_while_polled() -> None:
    allowed = {state for state, side, kind in TABLE if side is Side.AGENT and kind is Kind.SPACE}
    assert allowed == {SessionState.REGISTERED, SessionState.POLLING}
    assert {state for state in SessionState if Kind.SPACE in SEND[state]} == {SessionState.POLLING}


def test_welcome_tells_agents_that_the_server_takes_it() -> None:
    welcome = Welcome(1, (SPACE,), "s", 1_000_000, 5)
    assert Welcome.parse(frame.decode(welcome.encode()).header).features == (SPACE,)

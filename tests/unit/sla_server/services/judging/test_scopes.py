from __future__ import annotations

from typing import Any

from sla_server.services.judging.scopes import JudgeScopes
from sla_server.services.judging.track import Track
from tests.support.agreements import in_force, simple
from tests.support.services import GATEWAY, START_US

OTHER = "99999999-2222-3333-4444-555555555555"


def row(number: int, volume: str, gateway: str = GATEWAY, client: str = "c") -> dict[str, Any]:
    return {
        "stream_id": number,
        "gateway_id": gateway,
        "volume": volume,
        "client": client,
        "first_seen_us": number,
    }


def track(*volumes: str) -> Track:
    item = in_force(simple(), applied_us=START_US)
    spec = item.agreement.spec
    scope = spec.scope.model_copy(update={"volumes": list(volumes)})
    agreement = item.agreement.model_copy(update={"spec": spec.model_copy(update={"scope": scope})})
    made = type(item)(agreement, item.version, item.applied_us)
    return Track(made, made.agreement.judged[0])


def test_names_and_patterns_find_their_streams_once() -> None:
    scopes = JudgeScopes()
    assert scopes.streams == -1
    scopes.set_streams(
        [row(1, "vol-1"), row(2, "vol-2", OTHER), row(3, "x"), row(4, "vol-1", client="d")], 1 << 62
    )
    tracks = {
        ("named", "latency", 1): track("vol-1", "nowhere"),
        ("all", "latency", 1): track("vol-*", "vol-2"),
    }
    scopes.set_tracks(tracks)
    assert scopes.streams == 4
    assert sorted(s.stream_id for s in scopes.of(("named", "latency", 1))) == [1, 4]
    assert sorted(s.stream_id for s in scopes.of(("all", "latency", 1))) == [1, 2, 4]
    assert scopes.of(("gone", "latency", 1)) == ()
    assert set(scopes.at(GATEWAY)) == set(tracks)
    assert list(scopes.at(OTHER)) == [("all", "latency", 1)]
    assert scopes.gateways() == [GATEWAY, OTHER]


def test_other_tracks_replace_those_before() -> None:
    scopes = JudgeScopes()
    scopes.set_streams([row(1, "vol-1")], 1 << 62)
    scopes.set_tracks({("a", "latency", 1): track("vol-1")})
    scopes.set_tracks({("b", "latency", 1): track("vol-1")})
    assert scopes.of(("a", "latency", 1)) == ()
    assert list(scopes.at(GATEWAY)) == [("b", "latency", 1)]

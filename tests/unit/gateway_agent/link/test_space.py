"""Space on its way from the thread that reads it to the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway_agent.config import AgentConfig
from gateway_agent.link.space import exported_paths
from pmdaemon.space.watcher import SourceBack, SourceFailed
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.space import SPACE, Space
from pmdaemon.wire.session import SessionState
from tests.support.link import EPOCH, Bench, FakePlane


def space(used: int = 5, pool: str = "data") -> Space:
    return Space(pool, "path", "", 10, used, None, 0, 0, (), 7)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, FakePlane())


def sent(bench: Bench) -> list[int]:
    return [header["used_bytes"] for header in bench.server.headers.get(Kind.SPACE, [])]


def test_the_newest_reading_of_each_pool_waits_for_polls(bench: Bench) -> None:
    bench.server.features = (SPACE,)
    for used in (1, 2, 3):
        bench.core.space.take(space(used))
    bench.core.space.take(space(4, "other"))
    bench.core.tick()
    bench.connect_server()
    bench.core.tick()
    assert bench.core.session.state is SessionState.REGISTERED
    assert sent(bench) == []
    bench.poll(start=(EPOCH, 1))
    bench.core.tick()
    bench.carry()
    assert sent(bench) == [3, 4]
    bench.core.tick()
    bench.carry()
    assert sent(bench) == [3, 4], "each once"


def test_a_server_that_does_not_know_it_is_sent_none(bench: Bench) -> None:
    bench.connect_server()
    bench.poll(start=(EPOCH, 1))
    bench.core.space.take(space())
    bench.core.tick()
    bench.carry()
    assert sent(bench) == []


def test_a_source_that_fails_and_comes_back_is_an_alert_each(bench: Bench) -> None:
    bench.connect_server()
    bench.poll(start=(EPOCH, 1))
    bench.core.space.take(SourceFailed("data", "no disk"))
    bench.core.space.take(SourceBack("data"))
    bench.core.tick()
    bench.carry()
    said = [(each["kind"], each["severity"], each["text"]) for each in bench.server.headers[Kind.ALERT]]
    assert said == [
        ("space-source-failed", "warning", "the space of data cannot be read: no disk"),
        ("space-source-back", "info", "the space of data can be read again"),
    ]


def test_files_of_exports_are_volumes_of_pools() -> None:
    config = AgentConfig.model_validate(
        {
            "name": "gw",
            "plane": [{"name": "nbd-0", "listen": ["tcp:127.0.0.1:0"]}],
            "export": [
                {"volume": "a", "backend": "b", "file": "/dev/vg/a"},
                {"volume": "u", "backend": "b", "upstream": "nbd+unix:///u?socket=/run/u.sock"},
            ],
            "space": {"source": [{"name": "vg", "kind": "lvm", "group": "vg"}]},
        }
    )
    assert exported_paths(config) == {"/dev/vg/a": "a"}


def test_an_agent_may_do_nothing_but_read_space() -> None:
    source = {"name": "vg", "kind": "lvm", "group": "vg"}
    assert AgentConfig.model_validate({"name": "gw", "space": {"source": [source]}}).space.interval_s == 60
    with pytest.raises(ValueError, match="nothing to do"):
        AgentConfig.model_validate({"name": "gw", "space": {}})

"""What a server does as one of several: it follows the lease that the node has published."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import boot_ns
from pmdaemon.runtime.stop import Stop
from sla_server import config as configuration
from sla_server.acting_file import ActingFile, ActingParts
from sla_server.db.errors import ServerStandsBy
from sla_server.db.fence import Fence, acting_fence
from sla_server.db.process import own_fence
from sla_server.lease_file import FENCE, LeaseFile, LeaseState
from sla_server.nodes_file import FRESH_US, RunningNode, read_nodes, write_nodes
from sla_server.reports import job as report_job
from sla_server.supervisor import Supervisor, imported
from sla_server.topology import ACTING, PARTS, STANDBY, parts_of

LONG_NS = 3_600 * 10**9


def _config(folder: Path, *, enabled: bool = True) -> configuration.ResolvedConfig:
    cluster = {"node": "n1", "takeover": {"enabled": enabled}}
    server = configuration.ServerConfig.model_validate(
        {
            "data_dir": folder / "data",
            "runtime_dir": folder,
            "cluster": cluster,
            "database": {"url": "postgresql+psycopg:///none", "parquet_dir": folder / "parquet"},
        }
    )
    return configuration.resolve(server)


class Watched(Supervisor):
    """Starts and ends no process; ``done`` is what it would have done."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.done: list[str] = []
        self.stops: list[tuple[str, ...]] = []
        self._segments = self  # type: ignore[assignment]  # a segment takes 100 MB of tmpfs

    def renew(self, name: str) -> None:
        self.done.append(f"renew {name}")

    def _start(self, part: Any) -> None:
        self.done.append(f"start {part.name}")

    def _stop_all(self, names: Any) -> dict[str, int]:
        self.stops.append(tuple(names))
        self.done += [f"stop {name}" for name in reversed(names) if self.parts.pop(name, None)]
        return {}

    def _attach(self) -> None:
        """No mailboxes."""


def _publish(folder: Path, holder: str, fence: int, until_ns: int) -> None:
    LeaseState("n1", holder, fence, until_ns, 6.0, boot_ns()).write(folder)


def test_parts_that_act_run_while_the_lease_is_held_and_with_its_fence(tmp_path: Path) -> None:
    supervisor = Watched(_config(tmp_path), None, Stop())
    supervisor._follow_lease()  # what each step does; ``run`` would start processes
    _publish(tmp_path, "n2", 7, 0)
    supervisor._follow_lease()
    assert supervisor.done == []
    _publish(tmp_path, "n1", 8, boot_ns() + LONG_NS)
    for _ in range(3):
        supervisor._follow_lease()
    assert supervisor.done == [f"start {name}" for name in ACTING]
    assert supervisor.parts["dbmanager"]._env[FENCE] == "8"  # what the process will have
    assert supervisor.parts["pmdaemon"]._env["SLA__PMDAEMON__DURABLE_LAG_S"] == "120.0"
    supervisor.done.clear()
    _publish(tmp_path, "n2", 9, 0)
    supervisor._follow_lease()
    stopped = [f"stop {name}" for name in reversed(ACTING)]
    renewed = ["renew main.mbx", "renew app.mbx"]
    started = [f"start {name}" for name in PARTS if name not in ACTING] + [f"start {STANDBY}"]
    assert supervisor.done == [*stopped, *renewed, *started]
    assert supervisor.stops == [
        (STANDBY,),
        ACTING,
        PARTS,
    ]  # what writes and polls does not wait for the page's end
    supervisor.done.clear()
    _publish(tmp_path, "n1", 10, boot_ns() + LONG_NS)
    supervisor._follow_lease()  # the port of agents is free, and nobody else writes the documents, before
    assert supervisor.done == [f"stop {STANDBY}", *(f"start {name}" for name in ACTING)]
    supervisor._pipe.close()


def test_it_says_when_the_parts_that_act_have_ended_and_which_end_again_and_again(tmp_path: Path) -> None:
    supervisor, said = Watched(_config(tmp_path), None, Stop()), ActingFile(tmp_path)
    _publish(tmp_path, "n1", 8, boot_ns() + LONG_NS)
    supervisor._follow_lease()
    assert said.read() == ActingParts(8)
    for name in ("services", "services", "services", "delivery", "delivery", "delivery"):
        part = supervisor.parts.get(name) or supervisor.add(name, [])
        part._started_ns = supervisor.clock.monotonic_ns()  # as of a process that ended at once
        supervisor._plan_restart(part, "exit status 1", 1)
    supervisor._publish_acting()
    parts = said.read()
    assert parts is not None
    assert [(part.name, part.ends, part.reason) for part in parts.failing] == [
        ("services", 3, "exit status 1")
    ]
    seen: list[ActingParts | None] = []
    stop_all = supervisor._stop_all

    def stop(names: Any) -> dict[str, int]:
        seen.append(said.read())
        return stop_all(names)

    supervisor._stop_all = stop  # type: ignore[method-assign]  # what is said as each of them begins
    _publish(tmp_path, "n1", 8, 0)  # the node gives it up
    supervisor._follow_lease()
    assert [found.fence if found else None for found in seen] == [8, None]
    assert said.read() == ActingParts()
    supervisor._pipe.close()


def test_a_lease_that_nobody_renews_ends_by_itself_and_another_term_has_its_own_fence(tmp_path: Path) -> None:
    supervisor = Watched(_config(tmp_path), None, Stop())
    _publish(tmp_path, "n1", 8, boot_ns() + LONG_NS)
    supervisor._follow_lease()
    _publish(tmp_path, "n1", 8, boot_ns() - 1)
    supervisor._follow_lease()
    assert "renew main.mbx" in supervisor.done
    supervisor.done.clear()
    for fence in (9, 11):  # 10 was another server's, between two looks
        _publish(tmp_path, "n1", fence, boot_ns() + LONG_NS)
        supervisor._follow_lease()
    assert supervisor.done.count("start dbmanager") == 2
    assert supervisor.parts["dbmanager"]._env[FENCE] == "11"
    supervisor._pipe.close()


def test_a_server_that_is_alone_follows_no_lease_and_has_no_fence(tmp_path: Path) -> None:
    config = _config(tmp_path, enabled=False)
    supervisor = Watched(config, None, Stop())
    _publish(tmp_path, "n2", 9, 0)
    supervisor._follow_lease()
    assert supervisor.done == []
    assert FENCE not in supervisor.add("dbmanager", [])._env
    assert own_fence(config) is None
    assert own_fence(configuration.resolve(configuration.ServerConfig())) is None
    assert parts_of(config) == ("cluster", *PARTS)
    assert parts_of(config, is_acting=False) == ("cluster", "delivery", "appserver", "standby")
    supervisor._pipe.close()


def test_what_a_takeover_would_wait_for_is_imported_before_it(tmp_path: Path) -> None:
    alone, together = imported(_config(tmp_path, enabled=False)), imported(_config(tmp_path))
    assert {"psycopg", "sla_server.db.archive.files"} <= {*together}
    assert "sla_server.db.archive.files" not in alone
    on_sqlite = imported(configuration.resolve(configuration.ServerConfig()))
    assert not {"psycopg", "sla_server.db.archive.files"} & {*on_sqlite}


def test_a_writer_that_was_started_without_a_lease_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FENCE, "12")
    fence = own_fence(_config(tmp_path))
    assert fence is not None
    assert (fence.number, fence.server) == (12, "n1")
    monkeypatch.delenv(FENCE)
    with pytest.raises(ConfigError, match="the environment has no SLA_FENCE"):
        own_fence(_config(tmp_path))


def test_a_job_or_a_command_that_writes_is_refused_where_the_server_stands_by(tmp_path: Path) -> None:
    config = _config(tmp_path)
    for holder, said in (("n2", "Run this on n2"), ("", "no server acts just now"), ("n1", "no server acts")):
        _publish(tmp_path, holder, 7, 0)
        with pytest.raises(ServerStandsBy, match=said) as caught:
            acting_fence(config)
        assert caught.value.exit_status == 69
    _publish(tmp_path, "n1", 8, boot_ns() + LONG_NS)
    assert acting_fence(config) == Fence(8, "n1", config.cluster.takeover.lease_s if config.cluster else 0)
    assert acting_fence(_config(tmp_path, enabled=False)) is None


@pytest.mark.parametrize("module", ["policy_jobs.job", "policy_jobs.back_test_job", "policy_jobs.rollup_job"])
def test_each_job_asks_for_the_fence_first(tmp_path: Path, module: str) -> None:
    job = importlib.import_module(f"sla_server.{module}")
    config = _config(tmp_path)
    _publish(tmp_path, "n2", 7, 0)
    with pytest.raises(ServerStandsBy, match="the server of node n2 acts"):
        job.run(config, "test")


def test_the_report_job_asks_for_the_fence_first(tmp_path: Path) -> None:
    config = _config(tmp_path)
    _publish(tmp_path, "n2", 7, 0)
    with pytest.raises(ServerStandsBy, match="the server of node n2 acts"):
        report_job.run(config, "test", 1)


def test_whoever_acted_long_ago_is_not_said_to_act(tmp_path: Path) -> None:
    """As of a server that has lost the cluster, and knows no more than what it heard last."""
    for heard_s, acting in ((5, "n2"), (11, "n2"), (13, ""), (3600, "")):
        LeaseState("n1", "n2", 7, 0, 6.0, boot_ns() - heard_s * 10**9).write(tmp_path)
        assert LeaseFile(tmp_path).read().acting == acting, heard_s
        with pytest.raises(ServerStandsBy, match="Run this on n2" if acting else "no server acts just now"):
            acting_fence(_config(tmp_path))
    assert LeaseState("n1", "n2", 7, 0).acting == ""  # it has heard nothing


def test_a_lease_file_that_is_damaged_or_gone_holds_nothing(tmp_path: Path) -> None:
    file = LeaseFile(tmp_path)
    assert file.read() == LeaseState()
    _publish(tmp_path, "n1", 8, boot_ns() + LONG_NS)
    assert file.read().held_fence == 8
    for text in ("", "{}", "[]", '{"node": "n1", "holder": "n1", "fence": "x", "until_ns": 1}'):
        (tmp_path / "lease.json").write_text(text)
        assert LeaseFile(tmp_path).read().held_fence is None
    file = LeaseFile(tmp_path)
    for fence in (9, 10):  # within a step of the clock of files
        _publish(tmp_path, "n1", fence, boot_ns() + LONG_NS)
        os.utime(tmp_path / "lease.json", ns=(1, 1))
        assert file.read().fence == fence
    file.remove()
    assert file.read().held_fence is None


def test_nodes_are_known_while_their_file_is_fresh(tmp_path: Path) -> None:
    assert read_nodes(tmp_path, 5) == {}
    node = RunningNode("n1", "berlin", "2.15.1")
    write_nodes(tmp_path, [node], 1_000)
    assert read_nodes(tmp_path, 1_000) == {"n1": node}
    assert read_nodes(tmp_path, 1_000 + FRESH_US) == read_nodes(tmp_path, 999) == {}
    (tmp_path / "nodes.json").write_text("{}")
    assert read_nodes(tmp_path, 1_000) == {}

"""A throttle group of Debian's qemu-storage-daemon through the whole server: limited, confirmed, let go."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from gateway_agent import qmp
from gateway_agent.qemu import NO_LIMITS, Limits, ThrottleGroup
from tests.e2e.conftest import one_gateway
from tests.support.stage import Stage
from tests.support.storage_daemon import StorageDaemon

VOLUME = "throttle-group:gateway-a:scratch"
AGENT = """
[[qemu]]
name = "store"
socket = "{monitor}"
[[qemu.volume]]
name = "scratch"
group = "tg0"
backend = "disk-1"
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageDaemon]:
    with StorageDaemon(tmp_path_factory.mktemp("qsd")) as running:
        yield running


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, daemon: StorageDaemon) -> Iterator[Stage]:
    extra = AGENT.format(monitor=daemon.monitor)
    with one_gateway(tmp_path_factory.mktemp("qemu"), extra) as running:
        yield running


def limits_now(daemon: StorageDaemon) -> Limits:
    """Read past the agent, whose link is not there now."""

    async def read() -> Limits:
        client, _ = await qmp.connect(str(daemon.monitor))
        try:
            return ThrottleGroup("tg0").limits_in(
                await qmp.execute(client, ThrottleGroup("tg0").read_command())
            )
        finally:
            await qmp.close(client)

    return asyncio.run(read())


def link(stage: Stage) -> dict[str, Any]:
    """What the link of the agent says of itself."""
    return dict(json.loads((stage.sockets / "gateway-a" / "link.json").read_text()))


def monitor(stage: Stage) -> dict[str, Any]:
    """What `gateway-agent status` shows of the daemon."""
    return dict(link(stage)["qemu"]["qemu:store"])


def iops(stage: Stage) -> int | None:
    limit = monitor(stage)["volumes"][0]["limits"].get("iops")
    return None if limit is None else int(limit)


def test_limits_hold_over_an_upgrade_while_the_server_is_away(stage: Stage, daemon: StorageDaemon) -> None:
    stage.sla("throttle", "set", VOLUME, "--iops", "200", "--for", "10m", "--reason", "test")
    stage.wait(lambda: iops(stage) == 200, "the limits, read back")
    stage.wait(lambda: [each["state"] for each in stage.snapshot()["throttles"]] == ["confirmed"], "the cap")
    former = link(stage)
    (server,) = stage.running("server")
    stage.stop("server", server)

    command = [sys.executable, "-m", "gateway_agent", "upgrade"]
    subprocess.run([*command, "--config", str(stage.folder / "gateway-a.toml")], check=True, timeout=600)
    stage.wait(lambda: link(stage)["pid"] != former["pid"], "the next link")

    def found_again() -> dict[str, Any] | None:
        """What the next link says as soon as it has the limits: all of one moment of their lease."""
        said = link(stage)
        store = said["qemu"]["qemu:store"]
        return said if store["is_connected"] and store["volumes"][0]["limits"].get("iops") else None

    said = stage.wait(found_again, "the limits, found again")
    assert said["qemu"]["qemu:store"]["volumes"][0]["limits"]["iops"] == 200
    assert said["caps"]["generation"] == former["caps"]["generation"]
    stage.wait(lambda: link(stage)["caps"] is None, "the end of their lease")
    stage.wait(lambda: iops(stage) is None, "the end of the limits")

    stage.start_server()
    stage.wait(lambda: iops(stage) == 200, "the limits again")
    stage.sla("throttle", "release", VOLUME)
    stage.wait(lambda: iops(stage) is None, "no limits")


def test_a_throttle_group_is_limited_confirmed_and_let_go(stage: Stage, daemon: StorageDaemon) -> None:
    stage.sla("throttle", "set", VOLUME, "--iops", "300", "--for", "10m", "--reason", "test")
    stage.wait(lambda: iops(stage) == 300, "the limits, read back")
    stage.wait(lambda: [each["state"] for each in stage.snapshot()["throttles"]] == ["confirmed"], "the cap")

    daemon.stop()
    stage.wait(lambda: monitor(stage)["problem"] == "no QEMU process listens there", "the daemon, missed")
    daemon.start()
    stage.wait(lambda: iops(stage) == 300, "the limits of the new daemon")

    (agent,) = stage.running("gateway-a")
    stage.stop("gateway-a", agent)
    assert limits_now(daemon) == NO_LIMITS


def test_nothing_is_promised_of_a_throttle_group(stage: Stage) -> None:
    path = stage.folder / "promise.yaml"
    path.write_text(
        "apiVersion: storage-sla/v1\nkind: SLA\nmetadata: {name: scratch-mean}\nspec:\n"
        f"  scope: {{clients: ['*'], volumes: ['{VOLUME}'], io: any}}\n  priority: gold\n  objectives:\n"
        "  - name: mean\n    indicator: {metric: mean_latency}\n"
        "    demand_curve:\n    - {up_to_iops: 150, value_ms: 10}\n"
        "    budgeting: {method: timeslices, slice: 10s, target: 0.95}\n"
    )
    refused = stage.sla("apply", "-f", str(path), check=False)
    assert refused.returncode != 0
    assert "QEMU counts nothing of a throttle group" in " ".join((refused.stdout + refused.stderr).split())

"""A control group through the whole server: its I/O is counted, a throttle holds it, nothing stays behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from typing import Any

import pytest

from gateway_agent.cgroups import Group, IoLimits, find_group
from tests.e2e.conftest import one_gateway
from tests.support.control_group import ControlGroup, control_group, why_not
from tests.support.stage import Stage, StageError

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there is one")
VOLUME = "cgroup:gateway-a:batch"
CAP_IOPS = 40
AGENT = """
[[cgroup]]
name = "batch"
group = "{group}"
device = "{device}"
backend = "disk-1"
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlGroup]:
    with control_group(tmp_path_factory.mktemp("disk")) as made:
        yield made


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, real: ControlGroup) -> Iterator[Stage]:
    extra = AGENT.format(group=real.path, device=real.device)
    with one_gateway(tmp_path_factory.mktemp("cgroup"), extra) as running:
        yield running


@pytest.fixture
def reader(real: ControlGroup) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the group that reads as fast as it may."""
    process = real.read()
    yield process
    process.kill()
    process.wait()


def row(stage: Stage) -> dict[str, Any]:
    return next((each for each in stage.live().get("volumes", []) if each["volume"] == VOLUME), {})


def wait_held(stage: Stage, group: Group, what: str) -> None:
    """Until the kernel holds the cap; a failure says what it holds, and what the server knows of it."""
    try:
        stage.wait(lambda: in_all(group.limits()) == CAP_IOPS, what)
    except StageError as exc:
        exc.add_note(f"{group.limits()}, {stage.snapshot()['throttles']}")
        raise


def test_a_greedy_group_is_counted_and_held(
    stage: Stage, real: ControlGroup, reader: subprocess.Popen[bytes]
) -> None:
    group = find_group(str(real.path), real.device)
    stage.wait(lambda: (row(stage).get("iops") or 0) > CAP_IOPS, "the rate of the group")
    stage.sla("throttle", "set", VOLUME, "--iops", str(CAP_IOPS), "--for", "10m", "--reason", "test")
    wait_held(stage, group, "the limits of the kernel")
    stage.wait(
        lambda: [each["state"] for each in stage.snapshot()["throttles"]] == ["seen"], "the cap, seen to hold"
    )
    began_s, before = time.monotonic(), group.counts()  # however long this process waits between the two
    stage.wait(lambda: group.counts().reads > before.reads + 4 * CAP_IOPS, "reads under the cap")
    done, took_s = group.counts().reads - before.reads, time.monotonic() - began_s
    assert done <= 2 * CAP_IOPS * (took_s + 1)  # a change of limits gives the kernel's credit again

    (link,) = stage.kill("gateway_agent.link")  # SIGKILL; its successor finds the limits, and gets the cap
    stage.wait(lambda: stage.pids("gateway_agent.link") not in ([], [link]), "another link")
    wait_held(stage, group, "the limits again")
    assert reader.poll() is None

    (agent,) = stage.running("gateway-a")
    stage.stop("gateway-a", agent)
    assert group.limits() == IoLimits()


def in_all(limits: IoLimits) -> int:
    return (limits.read_iops or 0) + (limits.write_iops or 0)


def test_nothing_of_latency_is_promised_of_a_group(stage: Stage) -> None:
    path = stage.folder / "promise.yaml"
    path.write_text(
        "apiVersion: storage-sla/v1\nkind: SLA\nmetadata: {name: batch-mean}\nspec:\n"
        f"  scope: {{clients: ['*'], volumes: ['{VOLUME}'], io: any}}\n  priority: gold\n  objectives:\n"
        "  - name: mean\n    indicator: {metric: mean_latency}\n"
        "    demand_curve:\n    - {up_to_iops: 150, value_ms: 10}\n"
        "    budgeting: {method: timeslices, slice: 10s, target: 0.95}\n"
    )
    refused = stage.sla("apply", "-f", str(path), check=False)
    assert refused.returncode != 0
    assert "the kernel counts I/Os and bytes of a control group, and times nothing" in " ".join(
        (refused.stdout + refused.stderr).split()
    )

"""Processes whose log cannot be written work on: full device, pipe without reader, pipe that is not read."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Driver
from tests.support.stage import Agent, Stage

LIMIT_S = 180.0
FULL, DEAD, UNREAD = "full device", "pipe without reader", "pipe that is not read"


@dataclass
class DeafStage(Stage):
    """A stage whose processes write their log where nothing arrives: ``outputs`` by name."""

    outputs: dict[str, int] = field(default_factory=dict)

    def spawn(self, name: str, *arguments: str, **how: Any) -> subprocess.Popen[bytes]:
        """See ``Stage``."""
        return super().spawn(name, *arguments, **{**how, "output": self.outputs[name]})


@contextlib.contextmanager
def output(kind: str) -> Iterator[int]:
    """A descriptor of that kind, for the stderr of processes."""
    with contextlib.ExitStack() as stack:
        if kind == FULL:
            descriptor = os.open("/dev/full", os.O_WRONLY)
        else:
            read_end, descriptor = os.pipe()
            if kind == DEAD:
                os.close(read_end)
            else:
                stack.callback(os.close, read_end)
                os.set_blocking(descriptor, False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        os.write(descriptor, bytes(4096))
                os.set_blocking(descriptor, True)
        stack.callback(os.close, descriptor)
        yield descriptor


def is_replaced(stage: Stage, fragment: str, before: list[int]) -> bool:
    """Whether the processes of ``before`` are gone and others run."""
    now = stage.pids(fragment)
    return bool(now) and not set(now) & set(before)


@pytest.mark.parametrize(("server", "a", "b"), [(FULL, DEAD, UNREAD), (UNREAD, FULL, DEAD)])
def test_no_process_dies_of_its_log(tmp_path: Path, driver: Driver, server: str, a: str, b: str) -> None:
    with output(server) as of_server, output(a) as of_a, output(b) as of_b:
        outputs = {"server": of_server, "gateway-a": of_a, "gateway-b": of_b}
        with DeafStage(tmp_path / "stage", outputs=outputs) as stage:
            stage.start_server()
            for name in ("gateway-a", "gateway-b"):
                image = stage.folder / f"{name}.img"
                image.write_bytes(bytes(1 << 20))
                stage.start_agent(Agent(name, {f"vol-{name}": str(image)}))
            stage.wait(stage.gateways_up, "both gateways", limit_s=LIMIT_S)
            lasting = ("-m sla_server start", "-m gateway_agent run", "gateway_agent.nbd.plane")

            def pids() -> dict[str, list[int]]:
                return {fragment: sorted(stage.pids(fragment)) for fragment in lasting}

            def just_these() -> dict[str, list[int]] | None:
                """Until it is another program, a process that one of them starts has its name."""
                found = pids()
                return found if [len(each) for each in found.values()] == [1, 2, 2] else None

            before = stage.wait(just_these, "one server, two agents, two planes")
            # Each of these deaths, and each new client, is worth a line to every process that sees it.
            for fragment in ("gateway_agent.link.main", "sla_server.process services", "-m pmdaemon pair"):
                killed = stage.kill(fragment)
                assert killed
                stage.wait(
                    lambda fragment=fragment, killed=killed: is_replaced(stage, fragment, killed),
                    f"{fragment} again",
                    limit_s=LIMIT_S,
                )
            loads = [
                driver.start(agent.socket(stage), f"vol-{agent.name}", rate_iops=50.0)
                for agent in stage.agents
            ]
            stage.wait(
                lambda: all(len(load.done) >= 20 for load in loads), "I/O of new clients", limit_s=LIMIT_S
            )
            stage.wait(stage.gateways_up, "both gateways again", limit_s=LIMIT_S)
            for load in loads:
                driver.stop(load)
                assert load.errors == 0
            stage.wait(lambda: pids() == before, "the same processes as before")

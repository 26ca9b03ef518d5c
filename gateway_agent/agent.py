"""The agent's parent process: identity, files for the children, the children.

    1. private directories, a lock on both      a second agent with the same identity or sockets is refused
    2. state_dir/gateway_id                     made at the first start
    3. runtime_dir/running.toml                 the copy of the agent's file that the children read
    4. nbd-N planes, then the link              restarted when they die, each on its own

A dead link does not touch the planes: application I/O goes on, counters are kept there until the next link
collects them. Stop: the planes first, which close their clients and hand their last counts to the link; then
the link.

``runtime_dir/agent.json`` says to scripts what runs: ``{gateway_id, pid, children: {name: pid | null},
restarts}``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import structlog

from gateway_agent import cgroups
from gateway_agent.config import AgentConfig, load_agent
from gateway_agent.link import state_files
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.children import Child, ChildKind, describe_status, stop_together, wait_for_any
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.stop import ParentPipe, Stop
from pmdaemon.runtime.watchdog import CHECK_S, EachSecond

log = structlog.get_logger("agent")

LINK: Final = "link"
CHILDREN: Final = ChildKind("child", stop_s=12.0)
"""A plane drains for 2 s and waits 5 s for its writes; systemd kills after 30 s."""
RUNNING: Final = "running.toml"


def run(config: AgentConfig, path: Path) -> None:
    """Run the agent until SIGTERM or SIGINT, or until the process that started it with a parent pipe is gone.

    Raises:
        AlreadyRunning: another agent uses this state_dir or runtime_dir.
        StateFileBroken: a directory or the identity cannot be used.
        ConfigError: certificates cannot be used, or the children's copy of the file cannot be written.
    """
    config.check_certificates()
    stop = Stop()
    stop.install_signals()
    stop.watch_parent()
    state_files.make_private_directory(config.state_dir)
    state_files.make_private_directory(config.runtime_dir)
    with contextlib.ExitStack() as locks:
        # runtime_dir too: the link of another identity would take our planes' counts by their sockets.
        for directory in sorted({config.state_dir.resolve(), config.runtime_dir.resolve()}):
            locks.callback(os.close, state_files.lock_directory(directory))
        gateway_id = state_files.gateway_id(config.state_dir)
        commands = child_commands(config, path)
        log.info("agent-starts", name=config.name, gateway_id=gateway_id, planes=len(config.plane))
        Agent(config, gateway_id, commands, stop, SystemClock()).run()


def child_commands(config: AgentConfig, path: Path) -> dict[str, Sequence[str]]:
    """Copy the agent's file for its children; return the commands: planes first, so that the link finds them.

    A child that is started again reads what the others run with, also while an operator edits the file.

    Raises:
        ConfigError: the file cannot be read any more, or runtime_dir is not writable.
    """
    copy = config.runtime_dir / RUNNING
    if not path.is_file():
        raise ConfigError(
            "--config", f"{path} is not a regular file", "The children read it again: give a file"
        )
    try:
        write_whole(copy, path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            "runtime_dir", f"{path} cannot be copied to {copy}: {exc.strerror}", "Choose another"
        ) from exc
    if load_agent(copy) != config:
        raise ConfigError("--config", f"{path} was changed while the agent started", "Start it again")

    def command(module: str, *more: str) -> tuple[str, ...]:
        return (sys.executable, "-m", module, "--config", str(copy), *more)

    planes = {plane.name: command("gateway_agent.nbd.plane", "--plane", plane.name) for plane in config.plane}
    return {**planes, LINK: command("gateway_agent.link.main")}


class Agent:
    """The loop that keeps the children running. Thread: the process's only one.

    At the end it takes away the limits of control groups, which outlive the link that set them.
    """

    def __init__(
        self,
        config: AgentConfig,
        gateway_id: str,
        commands: Mapping[str, Sequence[str]],
        stop: Stop,
        clock: Clock,
    ) -> None:
        self._config = config
        self._gateway_id = gateway_id
        self._stop = stop
        self._clock = clock
        self._pipe = ParentPipe()
        self._second = EachSecond()
        # A plane carries application I/O and is never killed: the link reports one that does not answer.
        self.children = [
            Child(CHILDREN, name, command, self._pipe, clock, has_pulse=name == LINK)
            for name, command in commands.items()
        ]

    def run(self) -> None:
        """Keep the children running until the stop, then stop the planes and after them the link."""
        while not self._stop.is_set():
            self._step()
            wait_for_any(self._stop, self.children, CHECK_S)
        log.info("stopping", reason=self._stop.reason)
        stop_together([child for child in self.children if child.name != LINK], self._clock)
        stop_together(self.children, self._clock)
        for problem in cgroups.release((each.group, each.device) for each in self._config.cgroup):
            log.warning("limits-stay", problem=problem)
        self._pipe.close()
        self.publish()

    def _step(self) -> None:
        """Notice children that have ended, start those that are due, look for one that hangs."""
        has_changed = False
        for child in self.children:
            if child.is_running and (status := child.wait(0)) is not None:
                child.died(f"it {child.hung} and was killed" if child.hung else how_it_ended(status), status)
                has_changed = True
            if child.is_due and child.start():
                has_changed = True
        if has_changed:
            self.publish()
        if self._second.is_due():
            for child in self.children:
                child.check_progress()

    def publish(self) -> None:
        """Write ``runtime_dir/agent.json``."""
        value = {
            "gateway_id": self._gateway_id,
            "pid": os.getpid(),
            "children": {child.name: child.pid for child in self.children},
            "restarts": {child.name: child.restarts for child in self.children},
        }
        try:
            state_files.write_json(self._config.runtime_dir / "agent.json", value, synced=False)
        except OSError as exc:
            log.warning("cannot-publish", reason=str(exc))


def how_it_ended(status: int) -> str:
    """An exit status as ``subprocess`` gives it (negative: a signal) in words."""
    return f"it ended with status {status}" if status >= 0 else f"it was {describe_status(status)}"

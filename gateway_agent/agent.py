"""The agent's parent process: identity, files for the children, the children.

    1. private directories, a lock on both      a second agent with the same identity or sockets is refused
    2. state_dir/gateway_id                     made at the first start
    3. runtime_dir/running.toml                 the copy of the agent's file that the children read
    4. nbd-N planes, then the link              restarted when they die, each on its own

A dead link does not touch the planes: application I/O goes on, counters are kept there until the next link
collects them. Stop: the planes first, which close their clients and hand their last counts to the link; then
the link.

``runtime_dir/agent.json`` tells scripts who runs: ``{gateway_id, pid, children: {name: pid | null},
restarts}``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import structlog

from gateway_agent.children import Children, ChildSpec
from gateway_agent.config import AgentConfig
from gateway_agent.link import state_files
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.clock import SystemClock
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.stop import Stop

log = structlog.get_logger("agent")

LINK = "link"
RUNNING = "running.toml"


def run(config: AgentConfig, path: Path) -> None:
    """Run the agent until SIGTERM or SIGINT, or until whoever started it with a parent pipe is gone.

    Raises:
        AlreadyRunning: another agent uses this state_dir or runtime_dir.
        StateFileBroken: a directory or the identity cannot be used.
        ConfigError: the children's copy of the file cannot be written.
    """
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
        specs = child_specs(config, path)
        log.info("agent-starts", name=config.name, gateway_id=gateway_id, planes=len(config.plane))
        children = Children(specs, stop, SystemClock(), lambda: publish(config, gateway_id, children))
        children.run()


def child_specs(config: AgentConfig, path: Path) -> list[ChildSpec]:
    """Copy the agent's file for its children; return what to run, planes first, so that the link finds them.

    A child that is started again reads what the others run with, also while an operator edits the file.

    Raises:
        ConfigError: the file cannot be read any more, or runtime_dir is not writable.
    """
    copy = config.runtime_dir / RUNNING
    try:
        write_whole(copy, path.read_bytes())
    except OSError as exc:
        raise ConfigError(
            "runtime_dir", f"{path} cannot be copied to {copy}: {exc.strerror}", "Choose another"
        ) from exc

    def command(module: str, *more: str) -> tuple[str, ...]:
        return (sys.executable, "-m", module, "--config", str(copy), *more)

    planes = [
        ChildSpec(plane.name, command("gateway_agent.nbd.plane", "--plane", plane.name))
        for plane in config.plane
    ]
    return [*planes, ChildSpec(LINK, command("gateway_agent.link.main"), has_pulse=True, stops_last=True)]


def publish(config: AgentConfig, gateway_id: str, children: Children) -> None:
    """Write ``runtime_dir/agent.json``."""
    value = {
        "gateway_id": gateway_id,
        "pid": os.getpid(),
        "children": {child.spec.name: child.pid for child in children.all},
        "restarts": {child.spec.name: max(child.policy.restarts, 0) for child in children.all},
    }
    try:
        state_files.write_json(config.runtime_dir / "agent.json", value, synced=False)
    except OSError as exc:
        log.warning("cannot-publish", reason=str(exc))

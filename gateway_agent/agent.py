"""The agent's parent process: identity, files for the children, the children.

    1. private directories, a lock on both      a second agent with the same identity or sockets is refused
    2. state_dir/gateway_id                     made at the first start
    3. runtime_dir/*.config.json                one a child
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


def run(config: AgentConfig) -> None:
    """Run the agent until SIGTERM or SIGINT, or until whoever started it with a parent pipe is gone.

    Raises:
        AlreadyRunning: another agent uses this state_dir or runtime_dir.
        StateFileBroken: a directory or the identity cannot be used.
        ConfigError: the children's files cannot be written.
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
        specs = write_child_configs(config, gateway_id)
        log.info("agent-starts", name=config.name, gateway_id=gateway_id, planes=len(config.plane))
        children = Children(specs, stop, SystemClock(), lambda: publish(config, gateway_id, children))
        children.run()


def write_child_configs(config: AgentConfig, gateway_id: str) -> list[ChildSpec]:
    """Write every child's file and return what to run: planes first, so that the link finds them.

    Raises:
        ConfigError: runtime_dir is not writable.
    """
    specs = []
    for plane in config.plane_configs():
        path = _write(config.runtime_dir / f"{plane.plane}.config.json", plane.model_dump_json(indent=1))
        argv = ("-m", "gateway_agent.nbd.plane", "--config", str(path), "--plane", plane.plane)
        specs.append(ChildSpec(plane.plane, (sys.executable, *argv)))
    link = config.link_config(gateway_id)
    path = _write(config.runtime_dir / f"{LINK}.config.json", link.model_dump_json(indent=1))
    of_link = (sys.executable, "-m", "gateway_agent.link.main", "--config", str(path))
    specs.append(ChildSpec(LINK, of_link, has_pulse=True, stops_last=True))
    return specs


def _write(path: Path, text: str) -> Path:
    try:
        write_whole(path, text + "\n")
    except OSError as exc:
        raise ConfigError(
            "runtime_dir", f"{path} cannot be written: {exc.strerror}", "Choose another"
        ) from exc
    return path


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

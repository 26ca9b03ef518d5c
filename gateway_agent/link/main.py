"""``python -m gateway_agent.link.main --config FILE``: the link process, started by the agent's parent.

Everything it holds can be lost: what must survive is stored in the spool, in small files of state_dir, in the
planes and at the server. So it may be killed, reloaded or upgraded at any moment without touching application
I/O.
"""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import functools
import os
import random
import secrets
import socket
from importlib.metadata import version
from pathlib import Path

import click
import structlog

from gateway_agent.cgroups import find_group, size_bytes
from gateway_agent.clock import agent_clock
from gateway_agent.config import AgentConfig, load_agent, parse_server
from gateway_agent.enforcers.base import Enforcer
from gateway_agent.enforcers.cgroup import CgroupEnforcer, GroupCap, LimitedGroup
from gateway_agent.link import state_files
from gateway_agent.link.caps import ThresholdStore
from gateway_agent.link.collection import StreamNames
from gateway_agent.link.core import AgentFacts, LinkCore
from gateway_agent.link.identity import Identity
from gateway_agent.link.loop import LinkLoop
from gateway_agent.link.plane_client import PlaneClient
from gateway_agent.link.spool import Spool
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.cgroup import CgroupSource
from gateway_agent.sources.host import HostSource
from pmdaemon.errors import ConfigError
from pmdaemon.runtime import logs
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.children import restarts_of_this_process
from pmdaemon.runtime.clock import Clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.failures import outermost
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import set_os_thread_name, watch

log = structlog.get_logger("link")


def draw_epoch() -> int:
    """A random u64, never 0: the identity of this link process in all its cuts."""
    return secrets.randbits(64) or 1


def build(
    config: AgentConfig, gateway_id: str, clock: Clock, identity: Identity | None = None
) -> tuple[LinkCore, Spool]:
    """Open what is on disk and put the core together.

    Raises:
        SpoolUnusable, SourceReadFailed: this host cannot run the link as configured.
    """
    spool = Spool(config.state_dir / "spool", config.spool_bytes)
    stream_names = StreamNames(gateway_id, config.state_dir / "streams.json")
    thresholds = ThresholdStore(config.state_dir / "thresholds.json")
    planes = []
    for plane in config.plane:
        volumes = [export.volume for export in config.plane_config(plane.name).exports]
        planes.append(PlaneClient(plane.name, spool.marks.get(plane.name, 0), volumes))
    sources: list[StatisticsSource] = []
    if config.host.enabled:
        sources.append(HostSource(clock, config.name, config.host.devices, config.host.backends))
    enforcers: list[Enforcer] = []
    if config.cgroup:
        source, enforcer = cgroups_of(config, clock)
        sources.append(source)
        enforcers.append(enforcer)
    software = f"gateway-agent {version('storage-sla-server')}"
    facts = AgentFacts(gateway_id, config.name, draw_epoch(), software)
    core = LinkCore(facts, spool, stream_names, thresholds, clock, planes, sources, identity, enforcers)
    return core, spool


def limited_groups(config: AgentConfig) -> list[LimitedGroup]:
    """What ``[[cgroup]]`` names; a group need not be there yet."""
    return [
        LimitedGroup(
            each.volume(config.name),
            functools.partial(find_group, each.group, each.device),
            GroupCap.of(each.cap.model_dump()) if each.cap is not None else GroupCap(),
        )
        for each in config.cgroup
    ]


def cgroups_of(config: AgentConfig, clock: Clock) -> tuple[CgroupSource, CgroupEnforcer]:
    """The two faces of the control groups; limits that a killed link has left are taken away."""
    groups = limited_groups(config)
    enforcer = CgroupEnforcer(groups)
    backends = {each.volume(config.name): each.backend for each in config.cgroup}
    sizes = {each.volume(config.name): each.device for each in config.cgroup}
    return CgroupSource(clock, groups, backends, enforcer, lambda volume: size_bytes(sizes[volume])), enforcer


def publish_planes(config: AgentConfig, core: LinkCore) -> None:
    """Write ``runtime_dir/link.json``: this pid, and where the planes really listen (port 0 means any)."""
    planes = {
        name: {"pid": plane.pid, "listening": plane.listening, "connected": plane.source.can_be_asked}
        for name, plane in core.planes.items()
    }
    try:
        state_files.write_json(
            config.runtime_dir / "link.json", {"pid": os.getpid(), "planes": planes}, synced=False
        )
    except OSError as exc:
        log.warning("cannot-publish", reason=str(exc))


def run(config: AgentConfig, stop: Stop) -> None:
    """Serve until the stop.

    Raises:
        SlaError: this host cannot run the link; the parent starts it again with backoff.
    """
    clock = agent_clock()
    set_os_thread_name("link-loop")
    gateway_id = state_files.gateway_id(config.state_dir, may_make=False)
    identity = Identity(config.state_dir, gateway_id, config.name, clock) if config.tls else None
    core, spool = build(config, gateway_id, clock, identity)
    restarts, reason = restarts_of_this_process()
    if restarts:
        core.restarted(restarts, reason)
    core.on_planes_changed = lambda: publish_planes(config, core)
    core.on_planes_changed()
    reconnect = config.reconnect
    chance = random.Random()  # noqa: S311 - spreads retries, guards nothing
    backoff = Backoff(reconnect.first_s, reconnect.max_s, reconnect.jitter_ratio, chance)
    sockets = {plane.name: config.control_socket(plane.name) for plane in config.plane}
    listen = parse_address(config.listen) if config.listen else None
    server = None if listen else resolve_server(config.server)
    loop = LinkLoop(core, server, sockets, backoff, stop, clock, identity, listen)
    if loop.listener is not None:
        log.info("listening", port=loop.listener.port)
    loop.run()
    spool.close()


def resolve_server(text: str) -> tuple[str, int]:
    """Host and port of the PMDaemon; the name is looked up once, at the start, because that may block.

    Raises:
        ConfigError: the name is not known now; the link is started again with backoff.
    """
    host, port = parse_server(text)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise ConfigError(
            "server", f"{host!r} cannot be looked up: {exc.strerror}", "Correct it, or DNS"
        ) from exc
    return str(found[0][4][0]), port


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
def main(path: Path) -> None:
    """Run the link process."""
    logs.configure("link")
    with outermost("link", lambda text: log.error("link-stopped", problem=text)):
        config = load_agent(path)
        stop = Stop()
        stop.install_signals()
        stop.watch_parent()
        watch(stop)
        run(config, stop)


if __name__ == "__main__":
    main()

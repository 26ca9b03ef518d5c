"""``python -m gateway_agent.link.main --config FILE``: the link process, started by the agent's parent.

Everything it holds can be lost: what must survive is stored in the spool, in small files of state_dir, in the
planes and at the server. So it may be killed, reloaded or upgraded at any moment without touching application
I/O.
"""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import contextlib
import functools
import os
import random
import secrets
import socket
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import structlog

from gateway_agent.cgroups import find_group
from gateway_agent.config import AgentConfig, load_agent, parse_server
from gateway_agent.devices import size_bytes
from gateway_agent.enforcers.base import Enforcer
from gateway_agent.enforcers.cgroup import CgroupEnforcer, LimitedGroup
from gateway_agent.enforcers.qemu import LimitedPlace
from gateway_agent.errors import StateFileBroken
from gateway_agent.host_config import QemuEntry
from gateway_agent.link import conditions, state_files
from gateway_agent.link.caps import CostStore, KeptCaps, ThresholdStore
from gateway_agent.link.collection import StreamNames
from gateway_agent.link.core import AgentFacts, LinkCore
from gateway_agent.link.identity import Identity
from gateway_agent.link.loop import LinkLoop
from gateway_agent.link.plane_client import PlaneClient
from gateway_agent.link.qemu_client import QemuClient
from gateway_agent.link.server_users import ServerUsers
from gateway_agent.link.space import exported_paths
from gateway_agent.link.spool import Spool
from gateway_agent.pressure import read_pressure, waited_us
from gateway_agent.qemu import QmpRequest
from gateway_agent.sources.base import StatisticsSource
from gateway_agent.sources.cgroup import CgroupSource
from gateway_agent.sources.host import HostSource
from pmdaemon.errors import ConfigError
from pmdaemon.runtime import logs
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.children import restarts_of_this_process
from pmdaemon.runtime.clock import Clock, wall_clock
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.failures import failure_recorded, outermost
from pmdaemon.runtime.hangup import Hangup
from pmdaemon.runtime.stop import Stop
from pmdaemon.runtime.threads import ThreadInbox, set_os_thread_name, watch
from pmdaemon.space.watcher import COMMANDS_A_SOURCE, SpaceWatcher, local_sources
from pmdaemon.wire.rates import NO_CAPS

if TYPE_CHECKING:
    from gateway_agent.qmp import QmpThread

log = structlog.get_logger("link")

FACTS_EVERY_NS: Final = 10**9


def draw_epoch() -> int:
    """A random u64, never 0: the identity of this link process in all its cuts."""
    return secrets.randbits(64) or 1


def _no_monitor(_name: str, _request: QmpRequest) -> None:
    """Without ``[[qemu]]`` there is none to ask."""


class Built(NamedTuple):
    """The core, and the parts of it that are asked directly."""

    core: LinkCore
    spool: Spool
    groups: Sequence[LimitedGroup]


def build(
    config: AgentConfig,
    gateway_id: str,
    clock: Clock,
    identity: Identity | None = None,
    post: Callable[[str, QmpRequest], None] = _no_monitor,
) -> Built:
    """Open what is on disk and put the core together; ``post`` sends a request to a monitor of QEMU.

    Raises:
        GatewayError: this host cannot run the link as configured.
    """
    spool = spool_of(config, gateway_id)
    stream_names = StreamNames(gateway_id, config.state_dir / "streams.json")
    thresholds = ThresholdStore(config.state_dir / "thresholds.json")
    planes = []
    for name, volumes in volumes_of_planes(config).items():
        planes.append(PlaneClient(name, spool.marks.get(name, 0), volumes))
    sources: list[StatisticsSource] = []
    if config.host.enabled:
        sources.append(HostSource(clock, config.name, config.host.devices, config.host.backends))
    enforcers: list[Enforcer] = []
    groups = limited_groups(config)
    if groups:
        source, enforcer = cgroups_of(config, groups, clock)
        sources.append(source)
        enforcers.append(enforcer)
    software = f"gateway-agent {version('storage-sla-server')}"
    facts = AgentFacts(gateway_id, config.name, draw_epoch(), software)
    qemu = qemu_clients(config, clock, post)
    core = LinkCore(
        facts,
        spool,
        stream_names,
        thresholds,
        clock,
        planes,
        sources,
        identity,
        enforcers,
        qemu,
        waited_us,
        KeptCaps(config.state_dir / "caps.json"),
        CostStore(config.state_dir / "costs.json"),
        config.state_dir / conditions.FILE,
    )
    core.space.keep_only([each.name for each in config.space.source])
    core.labels = config.labels()
    return Built(core, spool, groups)


def spool_of(config: AgentConfig, gateway_id: str) -> Spool:
    """Open this gateway's spool.

    Raises:
        StateFileBroken: its cuts are of another gateway: gateway_id was damaged, copied or deleted.
        GatewayError: it cannot be used.
    """
    spool = Spool(config.state_dir / "spool", config.spool_bytes)
    owner = spool.owner_beside(gateway_id)
    if not owner:
        return spool
    spool.close()
    raise StateFileBroken(
        str(config.state_dir / "gateway_id"),
        f"it says {gateway_id}, but the cuts in {config.state_dir / 'spool'} are of gateway {owner}",
        f"Write {owner} into it; or, to go on under a new identity, delete that directory and its cuts, too",
    )


def limited_groups(config: AgentConfig) -> list[LimitedGroup]:
    """What ``[[cgroup]]`` names; a group need not be there yet."""
    taken: dict[tuple[str, str], str] = {}
    return [
        LimitedGroup(
            each.volume(config.name),
            functools.partial(find_group, each.group, each.device),
            each.cap.rates if each.cap is not None else NO_CAPS,
            taken,
        )
        for each in config.cgroup
    ]


def cgroups_of(
    config: AgentConfig, groups: Sequence[LimitedGroup], clock: Clock
) -> tuple[CgroupSource, CgroupEnforcer]:
    """The two faces of the control groups; limits that a killed link has left are taken away."""
    enforcer = CgroupEnforcer(groups)
    backends = {each.volume(config.name): each.backend for each in config.cgroup}
    sizes = {each.volume(config.name): each.device for each in config.cgroup}
    return CgroupSource(clock, groups, backends, enforcer, lambda volume: size_bytes(sizes[volume])), enforcer


def qemu_clients(
    config: AgentConfig, clock: Clock, post: Callable[[str, QmpRequest], None]
) -> list[QemuClient]:
    """What ``[[qemu]]`` names; no process need be there yet."""
    found = []
    for entry in config.qemu:
        name = monitor_name(entry)
        places = [
            LimitedPlace(
                each.volume(config.name),
                each.drive,
                each.group,
                each.cap.rates if each.cap is not None else NO_CAPS,
            )
            for each in entry.volume
        ]
        backends = {each.volume(config.name): each.backend for each in entry.volume}
        send = functools.partial(post, name)
        found.append(QemuClient(name, entry.socket, places, backends, send, clock))
    return found


def monitor_name(entry: QemuEntry) -> str:
    """Its name among the sources; no plane has it."""
    return f"qemu:{entry.name}"


class LinkFacts:
    """Writes ``runtime_dir/link.json``: what the planes said of themselves, the session, the spool, the caps.

    At once when a plane or the session has changed, else once a second while there is something to do.
    """

    def __init__(
        self, config: AgentConfig, core: LinkCore, clock: Clock, groups: Sequence[LimitedGroup] = ()
    ) -> None:
        self._config = config
        self._groups = groups
        self._core = core
        self._clock = clock
        self._state, self._since_unix_us = core.session.state, clock.unix_us()
        self._due_ns = 0

    def poll(self) -> None:
        """Write it if it is time, or the session has changed."""
        if self._core.session.state is not self._state:
            self._state, self._since_unix_us = self._core.session.state, self._clock.unix_us()
        elif self._clock.monotonic_ns() < self._due_ns:
            return
        self.publish()

    def publish(self) -> None:
        """Write it."""
        self._due_ns = self._clock.monotonic_ns() + FACTS_EVERY_NS
        try:
            state_files.write_json(self._config.runtime_dir / "link.json", self._facts(), synced=False)
        except OSError as exc:
            log.warning("cannot-publish", reason=str(exc))

    def _facts(self) -> dict[str, Any]:
        core, config = self._core, self._config
        planes = {
            name: {
                "pid": plane.pid,
                "listening": plane.listening,  # really: port 0 means any
                "connected": plane.source.can_be_asked,
                "config": plane.config,
                "problems": list(plane.problems),
            }
            for name, plane in core.planes.items()
        }
        caps = core.caps_in_force
        pressure = read_pressure()
        return {
            "pid": os.getpid(),
            "at_unix_us": self._clock.unix_us(),
            "planes": planes,
            "server": {
                "address": f"listens on {config.listen}" if config.listen else ", ".join(config.servers),
                "tls": config.tls,
                "state": self._state.value,
                "since_unix_us": self._since_unix_us,
                "polled_unix_us": core.polled_unix_us,
            },
            "spool": core.spool_facts | {"limit_bytes": config.spool_bytes},
            "caps": None if caps is None else {"generation": caps[0], "lease_left_s": caps[1]},
            "cgroups": [group.record() for group in self._groups],
            "qemu": {client.name: client.record() for client in core.qemu.values()},
            "pressure": pressure.record() if pressure is not None else None,
        }


def take_reload(path: Path, core: LinkCore, loop: LinkLoop, identity: Identity | None) -> None:
    """SIGHUP: follow the planes, report what came of a reload, use another certificate.

    The parent has checked the file; where settings of the link itself differ, it is started again instead.
    """
    try:
        config = load_agent(path)
        said = state_files.read_json(config.runtime_dir / "agent.json", "")
    except (ConfigError, StateFileBroken) as exc:
        log.error("reload-not-taken", problem=str(exc))
        return
    said = said if isinstance(said, dict) else {}
    record = said.get("reload", {})
    core.reload_ended(record)
    core.follow_former(*former_of(said))
    if record.get("state") == "refused":
        return
    core.replan(volumes_of_planes(config), config.labels())
    loop.add_planes({plane.name: config.control_socket(plane.name) for plane in config.plane})
    if identity is not None and identity.has_other_on_disk():
        loop.dial_again("another certificate was obtained")


def planes_before(runtime_dir: Path) -> dict[str, int]:
    """Pids of the planes as the link before this one, of the same parent, knew them: by its ``link.json``."""
    try:
        said = state_files.read_json(runtime_dir / "link.json", "")
    except StateFileBroken:
        return {}
    planes = said.get("planes") if isinstance(said, dict) else None
    rows = planes.items() if isinstance(planes, dict) else ()
    return {name: row["pid"] for name, row in rows if isinstance(row, dict) and type(row.get("pid")) is int}


def former_of(said: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Processes that have handed over to another one, and those that will, by the parent's ``agent.json``."""
    return list(said.get("leaving", [])), list(said.get("handing_over", []))


def volumes_of_planes(config: AgentConfig) -> dict[str, list[str]]:
    """Volumes by plane."""
    return {
        plane.name: [export.volume for export in config.plane_config(plane.name).exports]
        for plane in config.plane
    }


def run(
    config: AgentConfig, stop: Stop, path: Path, hangup: Hangup, said_of_parent: ThreadInbox[str]
) -> None:
    """Serve until the stop; ``path`` is read again at each ``hangup``; ``said_of_parent``: see ``watch``.

    Raises:
        SlaError: this host cannot run the link; the parent starts it again with backoff.
    """
    clock = wall_clock()
    set_os_thread_name("link-loop")
    gateway_id = state_files.gateway_id(config.state_dir, may_make=False)
    identity = Identity(config.state_dir, gateway_id, config.name, clock) if config.tls else None
    qmp = qmp_thread(config, clock, stop) if config.qemu else None
    post = qmp.post if qmp is not None else _no_monitor
    core, spool, groups = build(config, gateway_id, clock, identity, post)
    with contextlib.suppress(StateFileBroken):  # another program's doing; SIGHUP brings it
        core.follow_former(*former_of(state_files.read_json(config.runtime_dir / "agent.json", "") or {}))
    restarts, reason = restarts_of_this_process()
    if restarts:
        core.restarted(restarts, reason, planes_before(config.runtime_dir))
    facts = LinkFacts(config, core, clock, groups)
    core.on_planes_changed = facts.publish
    facts.publish()
    reconnect = config.reconnect
    chance = random.Random()  # noqa: S311 - spreads retries, guards nothing
    backoff = Backoff(reconnect.first_s, reconnect.max_s, reconnect.jitter_ratio, chance)
    sockets = {plane.name: config.control_socket(plane.name) for plane in config.plane}
    listen = parse_address(config.listen) if config.listen else None
    servers = [] if listen else resolve_servers(config.servers)
    users = ServerUsers.named(config.server_users)
    loop = LinkLoop(core, servers, sockets, backoff, stop, clock, identity, listen, hangup, users)
    loop.on_turn = facts.poll
    loop.add_inbox(said_of_parent, core.parent_stalled)
    loop.on_hangup = lambda: take_reload(path, core, loop, identity)
    if qmp is not None:
        loop.add_inbox(qmp.inbox, core.qemu_event)
        qmp.start()
    watcher = None
    if config.space.source:
        exported, space = exported_paths(config), config.space
        watcher = SpaceWatcher(
            lambda stopping: local_sources(space, exported, stopping),
            space.interval_s,
            COMMANDS_A_SOURCE * space.timeout_s,
            clock,
            lambda name, exc: stop.set(f"thread {name} died: {exc}"),
        )
        loop.add_inbox(watcher.inbox, core.space.take)
        watcher.start()
    if loop.listener is not None:
        log.info("listening", port=loop.listener.port)
    loop.run()
    if qmp is not None:
        qmp.stop()
    if watcher is not None:
        watcher.stop()
    spool.close()


def qmp_thread(config: AgentConfig, clock: Clock, stop: Stop) -> QmpThread:
    """The thread that speaks to the monitors; the link ends with it, and is started again.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        from gateway_agent.qmp import QmpThread  # asyncio, which other links need not have
    except ImportError as exc:
        problem = f"the Python package qemu.qmp cannot be used: {exc}"
        raise ConfigError("qemu", problem, "Install it: pip install qemu.qmp") from exc
    sockets = {monitor_name(entry): entry.socket for entry in config.qemu}
    return QmpThread(sockets, clock, lambda name, exc: stop.set(f"thread {name} died: {exc}"))


def resolve_servers(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Their addresses; names that cannot be looked up are left out, as long as one can.

    Raises:
        ConfigError: none can.
    """
    found, problems = [], list[ConfigError]()
    for text in texts:
        try:
            found.append(resolve_server(text))
        except ConfigError as exc:
            problems.append(exc)
    if not found:
        raise problems[0]
    for problem in problems:
        log.warning("server-left-out", problem=str(problem))
    return found


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
        hangup = Hangup()
        hangup.install()
        stop.watch_parent()
        said_of_parent = ThreadInbox[str]()
        watch(stop, on_parent=said_of_parent.put)
        with failure_recorded(config.runtime_dir, "link"):
            run(config, stop, path, hangup, said_of_parent)


if __name__ == "__main__":
    main()

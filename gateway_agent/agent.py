"""The agent's parent process: identity, files for the children, the children, and reloads.

    1. private directories, a lock on both      a second agent with the same identity or sockets is refused
    2. state_dir/gateway_id                     made at the first start
    3. runtime_dir/running.toml                 the copy of the agent's file that the children read
    4. nbd-N planes, then the link              restarted when they die, each on its own

A dead link does not touch the planes: application I/O goes on, counters are kept there until the next link
collects them. Stop: the planes first, which close their clients and hand their last counts to the link; then
the link.

Reload (``reload`` checks the file): running.toml is replaced; every plane gets its part (``nbd.part``) and
SIGHUP. A new plane is started; a removed one gets a part without exports, lets its clients go and ends. Then
the link gets SIGHUP, or, if its own settings differ, is started again behind the planes that end, so that it
has their last counts. A child that dies meanwhile reads running.toml at its next start, and is right.

Upgrade (``upgrade`` says how): this process becomes the new program by exec, and finds its children and
locks again (``ParentState``). Of each plane there are two processes then, the next and the former one, until
the former one has let its clients go.

``runtime_dir/agent.json`` says to scripts what runs: ``{gateway_id, name, pid, config, since_unix_us,
children: {name: pid | null}, restarts, reload, upgrade, leaving: [name], handing_over: [name]}``. What the
planes made of a reload is read from the link's ``link.json``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import structlog

from gateway_agent import cgroups, upgrade
from gateway_agent.config import AgentConfig, load_agent
from gateway_agent.difference import digest, plane_part
from gateway_agent.errors import BackingFileError, StateFileBroken, UpgradeFailed
from gateway_agent.link import state_files
from gateway_agent.nbd.part import part_file
from gateway_agent.ports import check_addresses
from gateway_agent.reload import (
    PENDING_S,
    RUNNING,
    ConfigFile,
    ReloadPlan,
    ReloadRecord,
    ReloadState,
    in_words,
    prepare,
)
from gateway_agent.upgrade import ParentState, Takeovers, UpgradeRecord
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.children import Child, ChildKind, describe_status, stop_together, wait_for_any
from pmdaemon.runtime.clock import Clock, SystemClock
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.hangup import Hangup, blocked
from pmdaemon.runtime.stop import PARENT_FD_VARIABLE, ParentPipe, Stop
from pmdaemon.runtime.watchdog import CHECK_S, EachSecond

log = structlog.get_logger("agent")

LINK: Final = "link"
CHILDREN: Final = ChildKind("child", stop_s=12.0)
"""A plane drains for 2 s and waits 5 s for its writes; systemd kills after 30 s."""
FOLLOW_S: Final = 0.05  # between looks at what the planes made of a reload
RETIRED_NS: Final = 30 * 10**9
"""A removed plane lets its clients go (15 s at most), then stops by itself. Later it is asked to stop."""


def run(config: AgentConfig, path: Path, left: ParentState | None = None) -> None:
    """Run the agent until SIGTERM or SIGINT, or until the process that started it with a parent pipe is gone.

    Args:
        config: from ``path``, or as the program before has left it.
        path: the operator's file.
        left: by the program before, at an upgrade.

    Raises:
        AlreadyRunning: another agent uses this state_dir or runtime_dir.
        StateFileBroken: a directory or the identity cannot be used.
        ConfigError: certificates cannot be used, another program has an address, or the children's copy of
            the file cannot be written.
    """
    if left is None:
        config.check_certificates()
    stop = Stop()
    stop.install_signals()
    hangup = Hangup()
    hangup.install()
    asked = Hangup(signal.SIGUSR2)
    asked.install()
    upgrade.take_signals()
    parent_fd = os.environ.get(PARENT_FD_VARIABLE, "")
    stop.watch_parent()
    state_files.make_private_directory(config.state_dir)
    state_files.make_private_directory(config.runtime_dir)
    with contextlib.ExitStack() as locks:
        # runtime_dir too: the link of another identity would take our planes' counts by their sockets.
        held = list(left.locks) if left is not None else []
        directories = sorted({config.state_dir.resolve(), config.runtime_dir.resolve()})
        for directory in directories if left is None else ():
            held.append(state_files.lock_directory(directory))
        for fd in held:
            os.set_inheritable(fd, False)
            locks.callback(os.close, fd)
        if left is None:
            check_addresses(config)
        gateway_id = state_files.gateway_id(config.state_dir)
        state_files.write_json(  # `status` and `reload` find it also when the file has another place by then
            config.state_dir / state_files.PLACE, {"runtime_dir": str(config.runtime_dir)}, synced=False
        )
        file = ConfigFile(path)
        commands = child_commands(config, path if left is None else None)

        def become(state: ParentState) -> None:
            others = {PARENT_FD_VARIABLE: int(parent_fd)} if parent_fd.isdigit() else {}
            upgrade.exec_program(replace(state, locks=held), others)

        log.info("agent-starts", name=config.name, gateway_id=gateway_id, planes=len(config.plane))
        Agent(
            config, gateway_id, commands, stop, SystemClock(), file, hangup, asked, become=become, left=left
        ).run()


def child_commands(config: AgentConfig, path: Path | None) -> dict[str, Sequence[str]]:
    """Copy the agent's file for its children; return the commands: planes first, so that the link finds them.

    A child that is started again reads what the others run with, also while an operator edits the file.
    Without a path the copy is there: the program before has left it.

    Raises:
        ConfigError: the file cannot be read any more, or runtime_dir is not writable.
    """
    if path is not None:
        _copy(config, path)
    return {name: child_command(config, name) for name in (*(plane.name for plane in config.plane), LINK)}


def _copy(config: AgentConfig, path: Path) -> None:
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


def child_command(config: AgentConfig, name: str) -> Sequence[str]:
    """What to run for a data plane, or for the link."""
    copy = str(config.runtime_dir / RUNNING)
    if name == LINK:
        return (sys.executable, "-m", "gateway_agent.link.main", "--config", copy)
    return (sys.executable, "-m", "gateway_agent.nbd.plane", "--config", copy, "--plane", name)


class Agent:
    """The loop that keeps the children running. Thread: the process's only one.

    At the end it takes away the limits of control groups and of QEMU, which outlive the link that set them.

    State: the configuration in force, the children, those that end for good (``_retiring``: when they are
    asked to stop), whether the link must be started again, the newest reload and the newest upgrade, with the
    processes that take over and those that let their clients go (``Takeovers``).

    Args:
        file: what reloads read; None for no reloads.
        hangup: what asks for one.
        asked: what asks for an upgrade.
        become: replaces this program; raises OSError if it cannot.
        left: by the program before.
    """

    def __init__(
        self,
        config: AgentConfig,
        gateway_id: str,
        commands: Mapping[str, Sequence[str]],
        stop: Stop,
        clock: Clock,
        file: ConfigFile | None = None,
        hangup: Hangup | None = None,
        asked: Hangup | None = None,
        *,
        become: Callable[[ParentState], None] | None = None,
        left: ParentState | None = None,
    ) -> None:
        self._config = config
        self._gateway_id = gateway_id
        self._stop = stop
        self._clock = clock
        self._file = file
        self._hangup = hangup or Hangup()
        self._asked = asked or Hangup(signal.SIGUSR2)
        self._become = become
        self._pipe = ParentPipe(left.pipe if left is not None else ())
        self._second = EachSecond()
        self._since_unix_us = clock.unix_us()
        self._retiring: dict[Child, int] = {}
        self._link_is_outdated = False
        self._record = ReloadRecord()
        self._record_ends_ns = 0
        self._parts: dict[str, str] = {}
        self._groups_left: set[tuple[str, str]] = set()  # the link that runs still limits them
        self._places_left: set[tuple[str, str, str]] = set()  # of QEMU processes, the same
        self._left_undone = ""  # of the newest reload, if it met a fault on its way
        self._upgrade = UpgradeRecord()
        self._release_name = upgrade.release()  # of now: what is installed may be another one later
        self._is_asked_to_reload = False
        self._takeovers = Takeovers(config.runtime_dir, clock)
        self.children = [self._child(name, command) for name, command in commands.items()]
        if left is not None:
            self._inherit(left)

    def _child(self, name: str, command: Sequence[str]) -> Child:
        # A plane carries application I/O and is never killed: the link reports one that does not answer.
        return Child(CHILDREN, name, command, self._pipe, self._clock, has_pulse=name == LINK)

    def run(self) -> None:
        """Keep the children running until the stop, then stop the planes and after them the link."""
        self.publish()  # before the link reads it
        while not self._stop.is_set():
            self._step()
            is_busy = "pending" in (self._record.state, self._upgrade.state)
            limit_s = FOLLOW_S if is_busy else CHECK_S
            wait_for_any(self._stop, self.children, limit_s, self._hangup.fileno(), self._asked.fileno())
        log.info("stopping", reason=self._stop.reason)
        stop_together([child for child in self.children if child.name != LINK], self._clock)
        stop_together(self.children, self._clock)
        self._release(_groups(self._config) | self._groups_left)
        self._release_qemu(_places(self._config) | self._places_left)
        self._pipe.close()
        self.publish()

    @staticmethod
    def _release(groups: Iterable[tuple[str, str]]) -> None:
        for group in groups:
            try:
                problems = cgroups.release([group])
            except (OSError, ValueError) as exc:  # a path that is too long, or no path
                problems = [f"{group[0]} on {group[1]}: {exc}"]
            for problem in problems:
                log.warning("limits-stay", problem=problem)

    @staticmethod
    def _release_qemu(places: Iterable[tuple[str, str, str]]) -> None:
        chosen = sorted(places)
        if not chosen:
            return
        try:
            from gateway_agent import qmp  # asyncio, which other agents need not have

            problems = qmp.release(chosen)
        except (ImportError, OSError) as exc:
            problems = [f"QEMU cannot be asked: {exc}"]
        for problem in problems:
            log.warning("limits-stay", problem=problem)

    def _release_left(self) -> None:
        """Take away limits of what left the file, once no link runs that would set them again."""
        if not any(child.name == LINK and child.is_running for child in self.children):
            self._release(self._groups_left)
            self._release_qemu(self._places_left)
            self._groups_left.clear()
            self._places_left.clear()

    def _step(self) -> None:
        """Notice children that have ended, start those that are due, look for one that hangs, reload."""
        has_changed = False
        for child in tuple(self.children):
            if child.is_running and (status := child.wait(0)) is not None:
                self._ended(child, status)
                has_changed = True
        for child in self.children:
            if child.is_due and self._start(child):
                has_changed = True
        if has_changed:
            self.publish()
        self._is_asked_to_reload |= self._hangup.take()
        if self._is_asked_to_reload and not self._takeovers.under_way:
            self._is_asked_to_reload = False
            self.reload("SIGHUP")
        if self._asked.take():
            self.upgrade()
        if self._second.is_due():
            self._each_second()
        if self._upgrade.state == "pending":
            self._follow_upgrade()
        if self._record.state == "pending":
            self._follow()

    def _start(self, child: Child) -> bool:
        if child.name == LINK and not self._retiring:
            self._link_is_outdated = False  # it reads the settings of now
        with blocked():  # the child takes SIGHUP when it can
            return child.start()

    def _ended(self, child: Child, status: int) -> None:
        self._release_left()
        if self._takeovers.ended(child, how_it_ended(status)):
            self.children.remove(child)
            self.publish()
            self._signal_link()
        elif child in self._retiring:
            del self._retiring[child]
            self.children.remove(child)
            log.info("plane-removed", plane=child.name, status=status)
        elif child.name == LINK and self._link_is_outdated and not self._retiring:
            self._link_is_outdated = False
            self.children[self.children.index(child)] = self._child(LINK, child.command)
            log.info("link-starts-again", reason="its settings were changed")
        else:
            child.died(f"it {child.hung} and was killed" if child.hung else how_it_ended(status), status)

    def _each_second(self) -> None:
        for child in self.children:
            child.check_progress()
        if self._file is not None and not self._takeovers.under_way and self._file.has_changed():
            self.reload("the file was changed")
        if self._record.state == "incomplete":
            self._follow()
        for child, due_ns in self._retiring.items():
            if self._clock.monotonic_ns() >= due_ns:
                child.signal(signal.SIGTERM)
        self._restart_link()

    def publish(self) -> None:
        """Write ``runtime_dir/agent.json``."""
        value = {
            "gateway_id": self._gateway_id,
            "name": self._config.name,
            "pid": os.getpid(),
            "config": str(self._file.path) if self._file is not None else "",
            "since_unix_us": self._since_unix_us,
            "children": {child.name: child.pid for child in self.children},
            "restarts": {child.name: child.restarts for child in self.children},
            "reload": asdict(self._record),
            "upgrade": asdict(self._upgrade),
            "leaving": [child.name for child in self._takeovers.leaving],
            "handing_over": [each.former.name for each in self._takeovers.under_way],
        }
        try:
            state_files.write_json(self._config.runtime_dir / "agent.json", value, synced=False)
        except OSError as exc:
            log.warning("cannot-publish", reason=str(exc))

    # -- reloads

    def reload(self, cause: str) -> None:
        """Read the agent's file again, and apply it if it is right."""
        if self._file is None:
            return
        former, in_force = self._record, self._config
        self._record = ReloadRecord(former.number + 1, self._clock.unix_us(), cause)
        self._left_undone = ""
        try:
            plan = prepare(self._file, self._config)
            self._apply(plan, former)
        except (ConfigError, BackingFileError) as exc:
            log.warning("reload-refused", cause=cause, problem=str(exc))
            self._refused(in_words(exc))
            return
        except Exception as exc:  # application I/O does not end for a fault of ours
            log.exception("reload-failed", cause=cause)
            problem = f"this is a fault of the agent, see its log: {type(exc).__name__}: {exc}"
            if self._config is in_force:
                self._refused(f"{problem}. Nothing was changed; what was in force stays so")
            else:
                self._left_undone = f"{problem}. Some of it is in force; restart the agent"
                self._conclude(self._record.ended("incomplete", self._left_undone))
                self._signal_link()
            return
        log.info(
            "reload", cause=cause, changes=self._record.changes, needs_restart=self._record.needs_restart
        )

    def _refused(self, text: str) -> None:
        self._record = self._record.ended("refused", text)
        self.publish()
        self._signal_link()  # which makes an alert of it

    def _apply(self, plan: ReloadPlan, former: ReloadRecord) -> None:
        """Give every process its part of a configuration that was found right.

        Raises:
            ConfigError: runtime_dir cannot be written; nothing was changed.
        """
        difference, runtime_dir = plan.difference, self._config.runtime_dir
        names = [plane.name for plane in plan.config.plane]
        parts = {name: plane_part(plan.config, name) for name in (*names, *difference.planes.removed)}
        try:
            for name, part in parts.items():
                state_files.write_json(part_file(runtime_dir, name), part, synced=False)
            (runtime_dir / f"{RUNNING}.new").replace(runtime_dir / RUNNING)
        except OSError as exc:
            raise ConfigError("runtime_dir", f"{exc.filename} cannot be written: {exc.strerror}") from exc
        self._groups_left |= _groups(self._config)
        self._groups_left -= _groups(plan.config)
        self._places_left |= _places(self._config)
        self._places_left -= _places(plan.config)
        self._config = plan.config
        self._parts = {name: digest(parts[name]) for name in names}
        self._change_planes(plan)
        self._link_is_outdated |= bool(difference.link)
        # What the agent found by itself is the answer to a command that comes right behind the editor, too.
        changes = difference.lines() or former.recent_changes(self._clock.unix_us())
        # Also without any: what was incomplete stays so until the planes say that they have all of it.
        self._record = replace(
            self._record, state="pending", changes=changes, needs_restart=list(difference.agent)
        )
        self._record_ends_ns = self._clock.monotonic_ns() + round(PENDING_S * 1e9)
        self.publish()
        self._release_left()
        self._restart_link()
        self._signal_link()

    def _change_planes(self, plan: ReloadPlan) -> None:
        planes = plan.difference.planes
        for child in tuple(self.children):
            if child.name == LINK or child in self._retiring:
                continue
            if child.name not in planes.removed:
                child.signal(signal.SIGHUP)  # also one whose part is the same: it reads its credentials again
            elif child.is_running:
                child.signal(signal.SIGHUP)
                self._retiring[child] = self._clock.monotonic_ns() + RETIRED_NS
            else:
                self.children.remove(child)
        added = [self._child(name, child_command(plan.config, name)) for name in planes.added]
        self.children[-1:-1] = added  # the link stays the last

    def _signal_link(self) -> None:
        for child in self.children:
            if child.name == LINK:
                child.signal(signal.SIGHUP)

    def _restart_link(self) -> None:
        """Ask a link with settings of before to end, once it has the last counts of planes that go."""
        if self._link_is_outdated and not self._retiring:
            for child in self.children:
                if child.name == LINK:
                    child.signal(signal.SIGTERM)

    def _follow(self) -> None:
        """Find what the planes made of the newest reload."""
        try:
            said = state_files.read_json(self._config.runtime_dir / "link.json", "") or {}
        except StateFileBroken:  # written whole, so this is another program's doing
            said = {}
        late, problems = planes_behind(self._parts, said)
        if self._left_undone:
            problems.append(self._left_undone)
        if not late and not problems:
            is_change = bool(self._record.changes or self._record.needs_restart)
            done: tuple[ReloadState, str] = (
                ("applied", "") if is_change else ("unchanged", "the file says what is in force")
            )
            self._conclude(self._record.ended(*done))
        elif not late or self._clock.monotonic_ns() >= self._record_ends_ns:
            waits = [f"{name} has not confirmed its part" for name in late]
            self._conclude(self._record.ended("incomplete", "; ".join([*waits, *problems])))

    def _conclude(self, record: ReloadRecord) -> None:
        if record == self._record:
            return
        self._record = record
        write = log.info if record.state == "applied" else log.warning
        write(f"reload-{record.state}", number=record.number, problem=record.text)
        self.publish()

    # -- upgrades

    def upgrade(self) -> None:
        """SIGUSR2: let the program that is installed now take the place of this one; see ``upgrade``."""
        if self._become is None or self._upgrade.state == "pending":
            return
        running = str(self._config.runtime_dir / RUNNING)
        record = UpgradeRecord(
            self._upgrade.number + 1, self._clock.unix_us(), "pending", former=self._release_name
        )
        try:
            if self._retiring:
                raise UpgradeFailed("planes that were removed still let their clients go; try again in 30 s")
            upgrade.check_program(Path(running))
            self._upgrade = record
            self.publish()
            stop_together([child for child in self.children if child.name == LINK], self._clock)
            self._release_left()
            if not self._stop.is_set():
                log.info("upgrade", former=self._release_name)
                self._become(self._left(running))
        except (UpgradeFailed, OSError) as exc:
            problem = str(exc) if isinstance(exc, UpgradeFailed) else f"exec: {exc.strerror}"
            log.warning("upgrade-refused", problem=problem)
            self._upgrade = record.ended("refused", f"{problem}. Nothing was changed; what ran goes on")
            self.publish()

    def _left(self, running: str) -> ParentState:
        gone = self._takeovers.leaving
        leaving = {child.name: child.pid for child in gone if child.pid is not None}
        planes = {
            child.name: child.pid
            for child in self.children
            if child.name != LINK and child not in gone and child.pid is not None
        }
        self._is_asked_to_reload |= self._hangup.take()
        return ParentState(
            self._upgrade,
            self._since_unix_us,
            running,
            [],
            self._pipe.descriptors,
            planes,
            leaving,
            self._record.number,
            self._is_asked_to_reload,
        )

    def _inherit(self, left: ParentState) -> None:
        """The children of the program before: each plane that serves gets a next process."""
        self._since_unix_us = left.since_unix_us
        self._upgrade = replace(left.record, state="pending", release=self._release_name)
        self._record = ReloadRecord(left.reloads)
        self._is_asked_to_reload = left.is_asked_to_reload
        former = [self._adopted(name, pid) for name, pid in left.leaving.items()]
        found = [child for child in former if child is not None]
        self._takeovers.leaving += found
        for new in self.children:
            pid = left.planes.get(new.name)
            serves = self._adopted(f"{new.name}.{pid}", pid) if pid is not None else None
            if serves is not None:
                self._takeovers.begin(new, serves)
                found.append(serves)
        self.children[-1:-1] = found  # the link stays the last

    def _adopted(self, name: str, pid: int) -> Child | None:
        child = self._child(name, child_command(self._config, name.rpartition(".")[0]))
        try:
            child.adopt(pid, self._clock.unix_us())
        except OSError:  # it has ended: its next process starts as at any start
            return None
        return child

    def _follow_upgrade(self) -> None:
        """Start the planes' next processes once the link is there; see which of them have taken over."""
        link = next((child for child in self.children if child.name == LINK), None)
        if self._takeovers.follow(link.pid if link is not None else None):
            self.publish()
            self._signal_link()
        if not self._takeovers.under_way:
            text = "; ".join(self._takeovers.problems)
            self._upgrade = self._upgrade.ended("incomplete" if text else "done", text)
            log.info("upgraded", **asdict(self._upgrade))
            self.publish()
            if self._file is not None and self._file.differs_from(self._config.runtime_dir / RUNNING):
                self.reload("the upgrade")


def _groups(config: AgentConfig) -> set[tuple[str, str]]:
    return {(each.group, each.device) for each in config.cgroup}


def _places(config: AgentConfig) -> set[tuple[str, str, str]]:
    return {place for entry in config.qemu for place in entry.places()}


def planes_behind(parts: Mapping[str, str], said: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Planes that do not run with their part yet, and what is wrong at the others.

    Args:
        parts: digest of each plane's part.
        said: the link's ``link.json``.
    """
    planes = said.get("planes", {})
    late = [name for name, wanted in parts.items() if planes.get(name, {}).get("config") != wanted]
    problems = [
        f"{name}: {text}" for name in parts if name not in late for text in planes[name].get("problems", [])
    ]
    return late, problems


def how_it_ended(status: int) -> str:
    """An exit status as ``subprocess`` gives it (negative: a signal) in words."""
    return f"it ended with status {status}" if status >= 0 else f"it was {describe_status(status)}"

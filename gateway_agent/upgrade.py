"""An upgrade under load: every process of the agent is replaced by one of the program that is installed now.

    SIGUSR2 ──► the new program checks the configuration in force ── wrong ──► refused: nothing changes
      1. the link ends; the planes keep their counts
      2. exec: the new program in the parent's own process. Its id, the locks, the pipe that its children
         watch and the children themselves stay, so that a service manager sees no restart
      3. a link of the new program; it collects from the planes there are
      4. for each plane a process of the new program, which takes over the sockets (``nbd.takeover``). The
         former one is called NAME.PID from then on, lets its clients go, and ends

If a new plane ends before it has taken over, the former one serves on: the upgrade is *incomplete*, and
says why. ``ParentState`` is what the program before leaves to the next one, in the environment; readers
ignore keys that they do not know. What a crash leaves: a parent that dies, at whatever step, ends its
children, as ever.

Thread: the parent's only one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import structlog

from gateway_agent.errors import StateFileBroken, UpgradeFailed
from gateway_agent.link import state_files
from pmdaemon.runtime.children import Child
from pmdaemon.runtime.clock import Clock

log = structlog.get_logger("upgrade")

VARIABLE: Final = "SLA_AGENT_LEFT"
PROBE: Final = "--can-be-upgraded-to"
"""Option of ``run`` that does nothing: a release that does not know it cannot find what is left to it."""
CHECK_S: Final = 60.0
"""The check takes a second; it opens the files of exports, which may wait for a storage."""
LINK_WAIT_NS: Final = 10 * 10**9
"""The former plane tells the link of the change. Without a link, the next one finds it in ``agent.json``."""
TAKEOVER_NS: Final = 120 * 10**9
"""A new process takes over within a second; one that has not by then is killed, and the former serves on."""
UpgradeState = Literal["none", "pending", "done", "refused", "incomplete"]
_SIGNALS: Final = {signal.SIGHUP, signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}


@dataclass(frozen=True, slots=True)
class UpgradeRecord:
    """The newest upgrade, as in ``agent.json``.

    Attributes:
        number: counts the upgrades since the agent was started.
        state: ``pending`` until every plane has a new process; ``incomplete`` if one has not.
        text: why it was refused, or what is incomplete.
        former: release of the program before.
        release: of this one.
    """

    number: int = 0
    at_unix_us: int = 0
    state: UpgradeState = "none"
    text: str = ""
    former: str = ""
    release: str = ""

    def ended(self, state: UpgradeState, text: str = "") -> UpgradeRecord:
        """The same upgrade with its result."""
        return replace(self, state=state, text=text)


@dataclass(frozen=True, slots=True)
class ParentState:
    """What the program before leaves to the next one.

    Attributes:
        record: of this upgrade.
        since_unix_us: when the agent was started.
        running: the configuration in force, which it has checked.
        locks: descriptors of the locks on its directories.
        pipe: descriptors of the pipe that the children watch.
        planes: process ids of the planes that serve, by name.
        leaving: of those that have handed over in an upgrade before, by name.
        reloads: how many there were; `gateway-agent reload` waits for a greater number.
        is_asked_to_reload: one came while the program was replaced.
    """

    record: UpgradeRecord
    since_unix_us: int
    running: str
    locks: list[int]
    pipe: list[int]
    planes: dict[str, int] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    reloads: int = 0
    is_asked_to_reload: bool = False

    def encode(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> ParentState:
        """What ``encode`` has made, perhaps in another release.

        Raises:
            ValueError, KeyError, TypeError: it is something else.
        """
        said: dict[str, Any] = json.loads(text)
        record = {key: value for key, value in said["record"].items() if key in UpgradeRecord.__slots__}
        planes, leaving = (
            {str(name): int(pid) for name, pid in said[key].items()} for key in ("planes", "leaving")
        )
        locks, pipe = ([int(fd) for fd in said[key]] for key in ("locks", "pipe"))
        since_us, running = int(said["since_unix_us"]), str(said["running"])
        # An earlier release does not say these.
        reloads, is_asked = int(said.get("reloads", 0)), bool(said.get("is_asked_to_reload", False))
        return cls(
            UpgradeRecord(**record), since_us, running, locks, pipe, planes, leaving, reloads, is_asked
        )


def left_by_former() -> ParentState | None:
    """What the program before has left, once; None at an ordinary start."""
    text = os.environ.pop(VARIABLE, "")
    return ParentState.parse(text) if text else None


def check_program(running: Path) -> None:
    """Let the program that is installed now check the configuration in force.

    Args:
        running: the children's copy of the agent's file.

    Raises:
        UpgradeFailed: it cannot be started, or cannot run with this configuration.
    """
    options = ("--config", str(running), "--check-config", PROBE)
    command = [sys.executable, "-m", "gateway_agent", "run", *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise UpgradeFailed(f"the new program cannot check the configuration: {exc}") from exc
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        problem = said[-1] if said else f"it ended with status {done.returncode}"
        raise UpgradeFailed(f"the new program refuses to start: {problem}")


def exec_program(state: ParentState, others: Mapping[str, int]) -> NoReturn:
    """Become the program that is installed now, with the arguments of this one.

    Args:
        state: what it finds.
        others: more descriptors that it keeps, by the variable of the environment that names each.

    Raises:
        OSError: it cannot be executed; this program goes on.
    """
    kept = [*state.locks, *state.pipe, *others.values()]
    environment = {**os.environ, VARIABLE: state.encode()}
    environment |= {name: str(fd) for name, fd in others.items()}
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, _SIGNALS
    )  # one that comes now waits for the new program
    try:
        for fd in kept:
            os.set_inheritable(fd, True)
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)  # noqa: S606 - no shell is wanted
    finally:  # not executed
        for fd in kept:
            with contextlib.suppress(OSError):
                os.set_inheritable(fd, False)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def take_signals() -> None:
    """The handlers are installed: what came while the program was replaced is delivered now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def release() -> str:
    """Of this program."""
    return version("storage-sla-server")


@dataclass(frozen=True, slots=True)
class Takeover:
    """One plane whose next process is to take over from the former one.

    Attributes:
        new: the next process; started when the link is there, or after ``LINK_WAIT_NS``.
        former: the one that serves; already called what it will be called then, NAME.PID.
        command: what ``new`` is started with when it has taken over.
        path: control socket of the former from then on; that it is there says that it has handed over.
        ends_ns: when the next one is given up.
    """

    new: Child
    former: Child
    command: Sequence[str]
    path: Path
    ends_ns: int

    @property
    def is_done(self) -> bool:
        """Whether the former process has handed over."""
        return self.path.exists()


class Takeovers:
    """The planes that are still to be taken over, and the former processes that let their clients go.

    Attributes:
        under_way: the first.
        leaving: the second.
        problems: of those that did not take over, in words.

    Args:
        runtime_dir: where the control sockets are.
        clock: of the parent.
    """

    def __init__(self, runtime_dir: Path, clock: Clock) -> None:
        self.under_way: list[Takeover] = []
        self.leaving: list[Child] = []
        self.problems: list[str] = []
        self._runtime_dir = runtime_dir
        self._clock = clock

    def begin(self, new: Child, former: Child) -> None:
        """``new`` has not been started, ``former`` serves."""
        path = self._runtime_dir / f"{former.name}.sock"
        path.unlink(missing_ok=True)  # of another life
        due_ns = self._clock.monotonic_ns() + LINK_WAIT_NS
        self.under_way.append(Takeover(new, former, new.command, path, due_ns + TAKEOVER_NS))
        new.command, new.due_ns = (*new.command, "--take-over"), due_ns

    def follow(self, link_pid: int | None) -> bool:
        """Start next processes once the link is there; returns whether one has taken over meanwhile."""
        now_ns, has_changed = self._clock.monotonic_ns(), False
        for each in tuple(self.under_way):
            if each.is_done:
                self.under_way.remove(each)
                self.leaving.append(each.former)
                each.new.command = each.command
                has_changed = True
                log.info("plane-taken-over", plane=each.new.name, former=each.former.name)
            elif now_ns >= each.ends_ns:
                log.error("takeover-hangs", plane=each.new.name)
                each.new.signal(signal.SIGKILL)
            elif not each.new.starts and self._is_linked(each.new.name, link_pid):
                each.new.due_ns = min(each.new.due_ns, now_ns)
        return has_changed

    def _is_linked(self, plane: str, link_pid: int | None) -> bool:
        """Whether the link of now is connected to a plane, which can tell it of the next process."""
        try:
            said = state_files.read_json(self._runtime_dir / "link.json", "") or {}
        except StateFileBroken:  # written whole, so this is another program's doing
            return False
        return said.get("pid") == link_pid and bool(said.get("planes", {}).get(plane, {}).get("connected"))

    def ended(self, child: Child, how: str) -> bool:
        """A child was reaped; returns whether that is all: it is not to be started again.

        Args:
            child: any of the parent's.
            how: in words.
        """
        if child in self.leaving:
            self.leaving.remove(child)
            (self._runtime_dir / f"{child.name}.sock").unlink(missing_ok=True)
            log.info("former-plane-ended", plane=child.name, reason=how)
            return True
        found = next((each for each in self.under_way if child in (each.new, each.former)), None)
        if found is None or (child is found.new and found.is_done):
            return False
        self.under_way.remove(found)
        if child is found.former:  # it has let all its clients go since the parent looked; or has died
            log.info("former-plane-ended", plane=child.name, reason=how)
            found.new.command = found.command
            found.new.due_ns = min(found.new.due_ns, self._clock.monotonic_ns())
            return True
        found.former.name = child.name
        log.error("plane-not-upgraded", plane=child.name, reason=how)
        self.problems.append(
            f"{child.name}: its new process did not take over, {how}; the former one serves on"
        )
        return True

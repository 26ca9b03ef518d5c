"""Reload of the agent's file, as the parent does it: watch the file, check it whole, say what came of it.

    SIGHUP ──────────────────────────────┐
    the file changed, and is at rest ────┴─► prepare ──► ReloadPlan ──► the parent applies it (``agent``)
                                                └─ wrong ──► refused: nothing changes

``ConfigFile`` looks at the file once a second and waits until it has been the same for a second: an editor
may write it in pieces, or beside and rename. The same content is not tried twice by itself.

``prepare`` checks what ``--check-config`` checks, and that what is new can be listened on. The checked bytes
are those that the children will read (``running.toml.new``, renamed when the plan is applied).

``ReloadRecord`` is what ``agent.json`` says of the newest reload; the link makes an alert of it,
``gateway-agent reload`` and ``status`` show it.

Thread: the parent's only one.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal, NamedTuple

from pydantic import ValidationError

from gateway_agent.config import AgentConfig, ExportConfig, load_agent
from gateway_agent.difference import Difference, compare, in_force
from gateway_agent.errors import BackingFileError
from gateway_agent.nbd.sockets import collide, listen_at, parse_listen, unlink_own
from pmdaemon.errors import ConfigError
from pmdaemon.runtime.config import describe, show
from pmdaemon.runtime.files import write_whole

RUNNING: Final = "running.toml"
PENDING_S: Final = 10.0
"""A plane takes its part within milliseconds; one that takes longer is stopped, or overloaded."""
RECENT_S: Final = 60.0
_CLIENT_MODE: Final = 0o660
ReloadState = Literal["none", "pending", "applied", "unchanged", "refused", "incomplete"]


@dataclass(frozen=True, slots=True)
class ReloadRecord:
    """The newest reload.

    Attributes:
        number: counts the reloads of this agent's life.
        cause: what asked for it.
        state: ``pending`` until every data plane has taken its part; ``incomplete`` if one has not, or not
            all of it.
        text: why it was refused, or what is incomplete.
        changes: what took effect, a line for each kind of change.
        needs_restart: keys that differ, and are not in force before the agent is started again.
    """

    number: int = 0
    at_unix_us: int = 0
    cause: str = ""
    state: ReloadState = "none"
    text: str = ""
    changes: list[str] = field(default_factory=list)
    needs_restart: list[str] = field(default_factory=list)

    def ended(self, state: ReloadState, text: str = "") -> ReloadRecord:
        """The same reload with its result."""
        return replace(self, state=state, text=text)

    def recent_changes(self, now_unix_us: int) -> list[str]:
        """What it changed, wholly or in part, if that was within the last ``RECENT_S``."""
        is_recent = now_unix_us - self.at_unix_us < RECENT_S * 1e6
        return self.changes if is_recent and self.state in ("pending", "applied", "incomplete") else []


class ReloadPlan(NamedTuple):
    """A file that was found right.

    Attributes:
        config: what will be in force: the file, without what needs a restart.
        difference: to what is in force now.
    """

    config: AgentConfig
    difference: Difference


class ConfigFile:
    """See the module docstring.

    State: the file's last signature and whether it is at rest, and the content that was dealt with last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last = self._at_rest = self._signature()
        self._tried = self._content()

    def _signature(self) -> tuple[int, int, int] | None:
        try:
            found = self.path.stat()
        except OSError:  # between an editor's two steps, or away: what is in force stays so
            return None
        if not stat.S_ISREG(found.st_mode):  # to read a pipe would wait for its other end
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _content(self) -> bytes | None:
        try:
            return self.path.read_bytes()
        except OSError:
            return None

    def has_changed(self) -> bool:
        """Once a second: whether there is other content, which has been at rest since the last call."""
        signature = self._signature()
        if signature is None or signature == self._at_rest:
            return False
        if signature != self._last:
            self._last = signature
            return False
        self._at_rest = signature
        return self._content() not in (None, self._tried)

    def differs_from(self, other: Path) -> bool:
        """Whether the file has other content than ``other``, which must be there."""
        return self._content() not in (None, other.read_bytes())

    def read(self) -> bytes:
        """The content now; from here on it is the one that was dealt with.

        Raises:
            ConfigError: the file cannot be read.
        """
        try:
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise ConfigError(str(self.path), "is not a regular file", "Put it back")
            self._tried = self.path.read_bytes()
        except OSError as exc:
            raise ConfigError(str(self.path), f"cannot be read: {exc.strerror}", "Put it back") from exc
        return self._tried


def prepare(file: ConfigFile, current: AgentConfig) -> ReloadPlan:
    """Check the file whole, and leave the children's copy of it as ``running.toml.new``.

    Raises:
        ConfigError: names the key, the value and what is expected.
        BackingFileError: a file of an export that is new or changed cannot be served.
    """
    fresh = current.runtime_dir / f"{RUNNING}.new"
    try:
        write_whole(fresh, file.read())
    except OSError as exc:
        raise _unwritable(fresh, exc) from exc
    try:
        wanted = load_agent(fresh)
        config = in_force(current, wanted)
    except ConfigError as exc:
        where = str(file.path) if exc.where == str(fresh) else exc.where
        raise ConfigError(where, exc.problem, exc.fix) from exc
    except ValidationError as exc:
        raise ConfigError(str(file.path), f"{describe(exc)} (before the agent is restarted)") from exc
    difference = compare(current, wanted)
    touched = {*difference.exports.added, *difference.exports.changed}
    config.check_certificates()
    check_files(export for export in config.export if export.volume in touched)
    _check_addresses(current, config)
    if config is not wanted:
        try:
            _rewrite(fresh, config)
        except OSError as exc:
            raise _unwritable(fresh, exc) from exc
    return ReloadPlan(config, difference)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "runtime_dir", f"{path} cannot be written: {error.strerror}", "See that its disk has room"
    )


def _rewrite(fresh: Path, config: AgentConfig) -> None:
    """What needs a restart must not reach a child that is started again before it."""
    write_whole(fresh, show(config))
    if load_agent(fresh) != config:  # a secret in an address, which is not shown
        raise ConfigError(
            "--config", "what needs a restart cannot be kept apart from the rest", "Restart the agent"
        )


def check_files(exports: Iterable[ExportConfig]) -> None:
    """See that every file of file mode can be served as its export says. Opens and closes them, no more.

    Raises:
        BackingFileError: the first that cannot.
    """
    from gateway_agent.nbd.storage import VolumeStorage  # ctypes, which a running agent need not have

    for export in exports:
        if export.file is not None:
            VolumeStorage(export.volume, export.file, read_only=export.read_only).release()


def files_in_use(exports: Iterable[ExportConfig]) -> list[str]:
    """What to warn of, for people: block devices to be written to that this host uses itself."""
    from gateway_agent.nbd.storage import IN_USE, is_in_use  # see check_files

    written = [(export.volume, export.file) for export in exports if export.file and not export.read_only]
    return [f"export {volume}: {path}: {IN_USE}" for volume, path in written if is_in_use(path)]


def _check_addresses(current: AgentConfig, wanted: AgentConfig) -> None:
    """See that what is new can be listened on: bind it and let it go.

    Raises:
        ConfigError: the first address that cannot.
    """
    known = {text: parse_listen(text) for plane in current.plane for text in plane.listen}
    for plane in wanted.plane:
        for text in plane.listen:
            if text in known:
                continue
            address = parse_listen(text)
            if any(collide(address, own) for own in known.values()):
                # Ours until the planes take their parts; they close before they listen. Try the host alone.
                if address.path:
                    continue
                address = replace(address, port=0)
            listen_at(address, _CLIENT_MODE, f"[[plane]] {plane.name} listen").close()
            unlink_own(address)


def in_words(error: ConfigError | BackingFileError) -> str:
    """Why a file was refused, for people."""
    return f"{error}. Nothing was changed; what was in force stays so"

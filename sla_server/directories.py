"""The two directories of a server: data, which one server locks, and runtime, with the mailbox segments.

*Data.* One server holds it, by ``flock`` on ``<data_dir>/lock``, which also has its pid. The descriptor is
close-on-exec, so no child keeps the lock: it ends with the supervisor, however that ends. ``identity`` is a
random name that the directory gets at the first start in it.

*Runtime.* Mailbox segments, port files, the page's login address; no other user may enter it. The default is
in ``/dev/shm/sla-UID``. Any user can make a directory of that name before us, and its owner can rename what
we make in it and put something else there; so it has to be ours, too, and closed.

*Segments.* The supervisor holds the lock of the data directory, so both are its own. At its start each is
*probed* (``mailbox.inspect``): what is in order is kept, because its untaken messages are wanted, and
what is damaged, or of another layout, is made again. Messages are wanted by the data directory for which they
were posted: if it was deleted, or another one is in its place, the segments that a killed server left are
made again (``bind``; ``data.id`` in the runtime directory is the identity they are for). While parts run, the
one that meets damage marks the segment; the supervisor sees the mark (``damaged``), ends the parts that use
it, and makes it again (``renew``). What an orderly stop leaves was taken and processed before, so it is
removed (``remove``). Segments of other servers of this user whose processes are all gone are swept: nothing
else removes what a server leaves that was killed and is not started again.

Thread: the supervisor's one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
import time
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import (
    Layout,
    Segment,
    create_segment,
    default_runtime_dir,
    ensure_private_dir,
    probe,
    sweep_stale,
    take_ownership,
)
from pmdaemon.mailbox.errors import MailboxCorrupt, SegmentUnsafe
from pmdaemon.runtime.clock import Deadline
from pmdaemon.runtime.files import close_directory, make_directory, write_whole
from sla_server.errors import ServerRunning
from sla_server.events.recipients.config import NotifyDirectories
from sla_server.topology import app_layout, later_pairs, main_layout

log = structlog.get_logger("segments")
MAIN: Final = "main.mbx"
APP: Final = "app.mbx"
IDENTITY: Final = "identity"
DATA_ID: Final = "data.id"
USERS: Final = {
    MAIN: ("pmdaemon", "services", "dbmanager", "delivery"),
    APP: ("appserver", "services", "dbmanager"),
}
"""The parts that are attached to each, in the order in which they are ended."""


def prepare_data_dir(data_dir: Path) -> None:
    """Make the data directory (mode 0700), or see that the one that is there is closed to others.

    Raises:
        ConfigError: it is open to others, and is not known to be a data directory.
        OSError: it cannot be made or examined.
    """
    make_directory(data_dir, 0o700)
    close_directory(data_dir, "data_dir", is_ours=(data_dir / "lock").exists())


def prepare_notify_dirs(found: NotifyDirectories, data_dir: Path) -> None:
    """Make the directories of recipients' secrets and programs (mode 0700), for people to put files in.

    One that the configuration puts outside of the data directory is its operator's to make. A server without
    them runs; a recipient that misses a file says so.
    """
    for path in (found.secrets, found.commands):
        if not path.is_relative_to(data_dir):
            continue
        try:
            make_directory(path, 0o700)
        except OSError as exc:
            log.warning("directory-not-made", path=str(path), problem=str(exc))


def lock_data_dir(data_dir: Path) -> int:
    """Create and lock the data directory; returns the descriptor that holds the lock.

    Raises:
        ServerRunning: another process holds it; names its pid.
        ConfigError: it is open to others.
        OSError: it cannot be made or written.
    """
    prepare_data_dir(data_dir)
    fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError as exc:
        holder = _pid_in(fd)
        os.close(fd)
        raise ServerRunning(data_dir, holder or None) from exc
    except OSError:
        os.close(fd)
        raise
    return fd


def data_identity(data_dir: Path) -> tuple[str, bool]:
    """The identity of a locked data directory, and whether nothing was stored in it before.

    "" where none can be read or written, as on a full disk: the next start tries again.
    """
    path = data_dir / IDENTITY
    made = secrets.token_hex(16)
    try:
        if path.exists() and (known := path.read_text(errors="replace").strip()):
            return known, False
        write_whole(path, f"{made}\n", synced=True)
    except OSError as exc:
        log.warning("no-identity", data_dir=str(data_dir), problem=str(exc))
        return "", False
    # One of an earlier release has no identity yet, but its queue.
    return made, not (data_dir / "queue").exists()


def running_pid(data_dir: Path) -> int | None:
    """Pid of the server that holds the data directory, 0 if it is unknown, None without a server.

    Raises:
        OSError: the directory cannot be used.
    """
    try:
        fd = os.open(data_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(fd)
    finally:
        os.close(fd)
    return None


def _pid_in(fd: int) -> int:
    text = os.pread(fd, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdecimal() else 0


def wait_stopped(data_dir: Path, limit_s: float) -> bool:
    """Wait until no process holds the data directory; False after the limit."""
    deadline = Deadline(limit_s)
    while running_pid(data_dir) is not None:
        if deadline.passed:
            return False
        time.sleep(0.05)
    return True


def prepare_runtime_dir(runtime_dir: Path) -> None:
    """Make the directory (mode 0700) if it is missing, with that of the user around it.

    Raises:
        SegmentUnsafe: one of both belongs to another user, is a link, or is open to others.
        OSError, SegmentError: it cannot be made.
    """
    home = default_runtime_dir()
    if runtime_dir.parent == home and not os.environ.get("RUNTIME_DIRECTORY"):  # that one is systemd's
        close_home(home)
    ensure_private_dir(runtime_dir)


def remove_runtime_dir(runtime_dir: Path) -> None:
    """Remove figures, notes and ports of an ended server, and the directories that are empty then."""
    metrics = runtime_dir / "metrics"
    names = ("gateways.json", "api.port", "login.url", "clock", "lease.json", "nodes.json", DATA_ID)
    leftovers = [runtime_dir / name for name in names]
    for path in (*leftovers, *runtime_dir.glob("*.failed"), *metrics.glob("*.prom"), *metrics.glob("*.json")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # something else is in it, or it is not there
        metrics.rmdir()
    leave_runtime_dir(runtime_dir)


def close_home(home: Path) -> None:
    """Make ``home`` with mode 0700, or give it that mode: earlier releases left it open to readers.

    Its parent is sticky, so one that is ours cannot be replaced by others between check and change.

    Raises:
        SegmentUnsafe: it belongs to another user, or is no directory.
    """
    with contextlib.suppress(FileExistsError):
        home.mkdir(mode=0o700)
    status = os.lstat(home)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        what = "no directory" if not stat.S_ISDIR(status.st_mode) else "not this user's"
        raise SegmentUnsafe(
            home,
            f"is {what}; user {status.st_uid} made it",
            "Have root remove it, or set runtime_dir to a directory that only this user can enter",
        )
    if status.st_mode & 0o077:
        home.chmod(0o700)


def leave_runtime_dir(runtime_dir: Path) -> None:
    """Remove the directory, and that of the user around it, if they are empty."""
    with contextlib.suppress(OSError):
        runtime_dir.rmdir()
        if runtime_dir.parent == default_runtime_dir():
            runtime_dir.parent.rmdir()


class Segments:
    """The segments of one server; see the module.

    Args:
        runtime_dir: private directory in which they lie; it exists.
        pairs: how many pairs there may be.
    """

    def __init__(self, runtime_dir: Path, pairs: int) -> None:
        self._runtime_dir = runtime_dir
        self._layouts = {MAIN: (main_layout(pairs), later_pairs(pairs)), APP: (app_layout(), ())}
        self._watched: dict[str, Segment] = {}

    def path(self, name: str) -> Path:
        """Where the segment lies."""
        return self._runtime_dir / name

    def bind(self, identity: str, *, is_empty: bool) -> bool:
        """Drop what was posted for another data directory; whether there was any. Before ``prepare``.

        If we die between the removal and the note, the next start finds no segment, and removes nothing.

        Args:
            identity: of the data directory.
            is_empty: nothing was stored in it before; then no message can be for it.

        Raises:
            OSError: a file cannot be removed or written.
        """
        if not identity:
            return False
        note = self._runtime_dir / DATA_ID
        bound = note.read_text(errors="replace").strip() if note.exists() else ""
        is_foreign = bound != identity if bound else is_empty
        found = is_foreign and any(self.path(name).exists() for name in self._layouts)
        if is_foreign:
            self.remove()
        if bound != identity:
            write_whole(note, f"{identity}\n")
        return found

    def prepare(self) -> dict[str, str]:
        """Have both in order; what was found damaged, and how.

        Raises:
            SegmentNoSpace: there is no room for one.
            MailboxError: one cannot be made or used.
        """
        found = {}
        for name, (layout, later) in self._layouts.items():
            if problem := ensure_segment(self.path(name), layout, later):
                found[name] = problem
            self._watched[name] = Segment(self.path(name), writable=False)
        self._sweep_others()
        return found

    def damaged(self) -> dict[str, str]:
        """Segments in which a part has met damage, and which part that was."""
        return {name: segment.damaged_by for name, segment in self._watched.items() if segment.is_damaged}

    def renew(self, name: str) -> None:
        """Make a segment again, with no message in it; no process may be attached.

        Raises:
            MailboxError: it cannot be made.
        """
        self._watched.pop(name).close()  # its memory is free when no process maps it any more
        self.path(name).unlink(missing_ok=True)
        layout, later = self._layouts[name]
        create_segment(self.path(name), layout, later)
        self._watched[name] = Segment(self.path(name), writable=False)

    def close(self) -> None:
        """Let go of them; the files stay."""
        for segment in self._watched.values():
            segment.close()
        self._watched.clear()

    def remove(self) -> None:
        """Remove both and their doorbells."""
        self.close()
        for name in self._layouts:
            for path in (self.path(name), *self._runtime_dir.glob(f"{name}.*.bell")):
                path.unlink(missing_ok=True)

    def _sweep_others(self) -> None:
        home = default_runtime_dir()
        if self._runtime_dir.parent != home:
            return  # a directory of one's own, beside which are no other servers
        for directory in sorted(home.iterdir()):
            try:
                removed = sweep_stale(directory) if directory.is_dir() else []
            except (MailboxError, OSError) as exc:  # not ours to judge, or just gone
                log.info("not-swept", directory=str(directory), problem=str(exc))
                continue
            if removed:
                log.info("swept", paths=[str(path) for path in removed])
                with contextlib.suppress(OSError):  # something else is in it
                    directory.rmdir()


def ensure_segment(path: Path, layout: Layout, later: tuple[str, ...] = ()) -> str:
    """Keep a segment of the same layout that is in order, else make it again; says what was damaged."""
    problem = ""
    try:
        if path.exists():
            segment = Segment(path, writable=False)
            segment.close()
            if segment.layout == layout:
                probe(path)
                take_ownership(path)
                return ""
    except MailboxCorrupt as exc:
        problem = str(exc)
        log.error("segment-damaged", path=str(path), problem=problem)
    except MailboxError as exc:
        log.warning("segment-recreated", path=str(path), reason=str(exc))
    path.unlink(missing_ok=True)
    create_segment(path, layout, later)
    return problem

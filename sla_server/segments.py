"""The two mailbox segments of a server: made, kept, made anew when damaged, removed at the end.

The supervisor holds the lock of the data directory, so both are its own. At its start each is *probed*
(``pmdaemon.mailbox.inspect``): what is in order is kept, because its untaken messages are wanted, and what is
damaged, or of another layout, is made anew. While parts run, whoever meets damage marks the segment; the
supervisor sees the mark (``damaged``), ends the parts that use it, and makes it anew (``renew``). What an
orderly stop leaves was taken and processed before, so it is removed (``remove``).

Segments of other servers of this user whose processes are all gone are swept: nothing else removes what a
server leaves that was killed and is not started again.

Thread: the supervisor's one.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import MailboxError
from pmdaemon.mailbox import (
    Layout,
    Segment,
    create_segment,
    default_runtime_dir,
    probe,
    sweep_stale,
    take_ownership,
)
from pmdaemon.mailbox.errors import MailboxCorrupt
from sla_server.topology import app_layout, later_pairs, main_layout

log = structlog.get_logger("segments")
MAIN: Final = "main.mbx"
APP: Final = "app.mbx"
USERS: Final = {
    MAIN: ("pmdaemon", "services", "dbmanager"),
    APP: ("appserver", "services", "dbmanager"),
}
"""The parts that are attached to each, in the order in which they are ended."""


class Segments:
    """See the module.

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
        """Make a segment anew, with no message in it; nobody may be attached.

        Raises:
            MailboxError: it cannot be made.
        """
        self._watched.pop(name).close()  # its memory is free when nobody maps it any more
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
    """Keep a segment of the same layout that is in order, else make it anew; says what was damaged."""
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

"""Which of the server's own sources of space people know to have failed, over restarts of ``services``.

The thread that reads them begins with nothing: it says that a source fails, and not that one which failed
before can be read. Nor is a source that was taken out of the file ever read again.

A source is in the file before the event is raised, and until after that of its end: a crash repeats an event
that recipients know, and swallows none. On a full disk the file is as it was, and tried again.

Owner: the main loop of ``services``.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.runtime import strict_json
from pmdaemon.runtime.files import write_whole

log = structlog.get_logger("space")
FILE: Final = "failed-space-sources.json"


class FailedSources:
    """See the module.

    Args:
        path: of the file; None keeps nothing.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._ended: set[str] = set()
        self._is_unwritten = False
        self._failed = self._read()

    @property
    def names(self) -> Collection[str]:
        """Sources that have failed, as people know it."""
        return self._failed - self._ended

    def add(self, name: str) -> None:
        """It fails; the event follows."""
        self._ended.discard(name)
        if name not in self._failed:
            self._failed.add(name)
            self._write()

    def end(self, name: str) -> bool:
        """It can be read; whether an event has to say so."""
        is_known = name in self.names
        if is_known:
            self._ended.add(name)
        return is_known

    def raised(self) -> None:
        """All events of before are raised."""
        if self._ended:
            self._failed -= self._ended
            self._ended.clear()
            self._is_unwritten = True
        if self._is_unwritten:
            self._write()

    def _read(self) -> set[str]:
        if self._path is None:
            return set()
        try:
            found = strict_json.loads(self._path.read_text())
        except FileNotFoundError:
            return set()
        except (OSError, ValueError) as exc:
            log.warning("failed-sources-unreadable", path=str(self._path), problem=str(exc))
            return set()
        return {name for name in found if isinstance(name, str)} if isinstance(found, list) else set()

    def _write(self) -> None:
        if self._path is None:
            self._is_unwritten = False
            return
        try:
            write_whole(self._path, strict_json.dumps(sorted(self._failed)), synced=True)
        except OSError as exc:
            if not self._is_unwritten:
                log.warning("failed-sources-not-kept", path=str(self._path), problem=str(exc))
            self._is_unwritten = True
        else:
            self._is_unwritten = False

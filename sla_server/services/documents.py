"""The thread that reads YAML: a text of 60 KB takes a second, and control and leases must not wait for it.

Shared with the main loop: two queues. The thread takes a text, and puts back what to call with its result;
the main loop calls it at its next tick (``deliver``). At most ``MAX_WAITING`` texts wait.

A text is a stranger's: whatever reading it raises, also a mistake of ours, is logged with its traceback and
answered as a problem of that text. It ends neither the thread nor the process, which judges and controls.

The thread also looks for the files that recipients need: a directory that hangs holds up no control.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import replace
from typing import Final

import structlog

from pmdaemon.runtime import watchdog
from pmdaemon.runtime.stop import Stop
from sla_server.agreements.errors import AgreementsRefused, DocumentProblem
from sla_server.agreements.load import Loaded, load_documents
from sla_server.events.documents import RecipientDocument
from sla_server.events.recipients.config import NotifyDirectories
from sla_server.events.recipients.missing import missing

log = structlog.get_logger("documents")
MAX_WAITING: Final = 16
WAKE_S: Final = 0.5  # how long a stop may take
Then = Callable[[list[Loaded], list[DocumentProblem]], None]


class DocumentReader:
    """See the module.

    Args:
        directories: in which recipients' files are looked for; None: they are not.
    """

    def __init__(self, directories: NotifyDirectories | None = None) -> None:
        self._directories = directories
        self._texts: queue.Queue[tuple[str, int, Then]] = queue.Queue(MAX_WAITING)
        self._results: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def submit(self, text: str, rollup_s: int, then: Then) -> bool:
        """Read a text; ``then(documents, problems)`` is called by ``deliver``. False if too many wait."""
        try:
            self._texts.put_nowait((text, rollup_s, then))
        except queue.Full:
            return False
        return True

    def deliver(self) -> None:
        """Call back for what has been read. Thread: the main loop."""
        while not self._results.empty():
            self._results.get_nowait()()

    def step(self, wait_s: float = 0.0) -> bool:
        """Read one text if there is one."""
        try:
            text, rollup_s, then = self._texts.get(timeout=wait_s) if wait_s else self._texts.get_nowait()
        except queue.Empty:
            return False
        self._results.put(_read(text, rollup_s, then, self._directories))
        return True

    def run(self, stop: Stop) -> None:
        """The thread ``sv-documents``."""
        while not stop.is_set():
            watchdog.beat()
            self.step(WAKE_S)


def _read(text: str, rollup_s: int, then: Then, directories: NotifyDirectories | None) -> Callable[[], None]:
    try:
        documents = [_noted(each, directories) for each in load_documents(text, rollup_s)]
    except AgreementsRefused as exc:
        problems = exc.problems
        return lambda: then([], problems)
    except Exception as exc:
        log.exception("document-unreadable", size_bytes=len(text.encode(errors="replace")))
        kind = type(exc).__name__
        what = f"the document could not be read, by a mistake of the server ({kind})"
        problem = DocumentProblem(
            0, "", what, "Its log has the details; report them, and try a simpler document"
        )
        return lambda: then([], [problem])
    return lambda: then(documents, [])


def _noted(loaded: Loaded, directories: NotifyDirectories | None) -> Loaded:
    """A recipient with notes of what it needs and does not find."""
    if directories is None or not isinstance(loaded.document, RecipientDocument):
        return loaded
    return replace(loaded, notes=tuple(missing(loaded.document.spec, directories)))

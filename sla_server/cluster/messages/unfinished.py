"""Large messages that a program is sending, so that its next start removes what its death has left of them.

::

    DIRECTORY/sending/IDENTITY     "BOOT DEVICE INODE", and " early" of a message that consumers know already

The file is there before the first fragment is stored, and gone before the record is sent that makes a whole
message of the fragments: the manifest, or the end of an early one. So what a dead process has left a file of
is no message yet, and never will be. The directory is one process's at a time (``identifiers`` holds its
lock), so whoever finds a file as it opens the directory knows that its sender is dead, however slow it was.

A file is believed in the boot and the directory that it was made in. A power cut may bring back one that was
removed, a restored or copied disk has those of another time or machine, whose message may be whole or still
be sent. Fragments of those go by their age, as do those of a program that does not come back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import structlog

from pmdaemon.runtime.clock import boot_id
from pmdaemon.runtime.files import make_directory
from sla_server.cluster.messages.identifiers import Identifier

log = structlog.get_logger("messages")
FOLDER: Final = "sending"
_EARLY: Final = " early"


class UnfinishedSends:
    """See the module. Thread: any; the methods for one identity, one after the other.

    Args:
        directory: of the session, which has its lock; None: nothing is written down.

    Attributes:
        left: identities that a dead process was sending, and whether consumers know of them.
    """

    def __init__(self, directory: Path | None) -> None:
        self._folder: Path | None = None
        self._mark = ""
        self.left: dict[str, bool] = {}
        boot = boot_id()
        if directory is None or not boot:
            return
        folder = directory / FOLDER
        try:
            make_directory(folder, 0o700)
            status = folder.stat()
            self._mark = f"{boot} {status.st_dev} {status.st_ino}"
            for path in folder.iterdir():
                self._take(path)
        except OSError as exc:
            log.warning("sends-not-noted", directory=str(folder), error=str(exc))
            return
        self._folder = folder

    def _take(self, path: Path) -> None:
        said = path.read_bytes()
        try:
            Identifier.parse(path.name)
        except ValueError:  # of no send; as a pattern of subjects it would be that of others
            return
        if said in (self._mark.encode(), (self._mark + _EARLY).encode()):
            self.left[path.name] = said.endswith(_EARLY.encode())
        else:
            path.unlink()

    def begin(self, identity: str, *, is_early: bool = False) -> None:
        """Before the first fragment. Without the file they go by their age, so a full disk stops no send."""
        if self._folder is not None:
            try:
                (self._folder / identity).write_text(self._mark + (_EARLY if is_early else ""))
            except OSError as exc:
                log.warning("sends-not-noted", directory=str(self._folder), error=str(exc))

    def end(self, identity: str) -> None:
        """Before what makes a message of the fragments, or when they are removed.

        Raises:
            OSError: the file is still there: the next start would remove them.
        """
        if self._folder is not None:
            (self._folder / identity).unlink(missing_ok=True)
        self.left.pop(identity, None)

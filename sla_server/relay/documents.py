"""Documents of a relay: files in a folder, in the place of ``sla apply``.

The folder is looked at each second. When a file has changed, all of them are read and checked as ``sla
apply`` checks them, and what is right is published for delivery in ``routing.json`` (``events.routing``).
While one of them is wrong, those of before stay in force, also over a restart: the log and an event say what
is wrong.

Thread: one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import structlog

from pmdaemon.errors import ConfigError
from sla_server.agreements.errors import AgreementsRefused, double_named
from sla_server.agreements.load import Loaded, load_documents
from sla_server.events.documents import RecipientDocument
from sla_server.events.routing import (
    NOTIFICATION_KINDS,
    NotificationInForce,
    RoutingFile,
    RoutingTable,
)
from sla_server.services.notifications import check
from sla_server.services.plans import Plans

log = structlog.get_logger("relay")
SUFFIXES: Final = (".yaml", ".yml")
MOST_FILES: Final = 200
ROLLUP_S: Final = 60
"""Of agreements, of which a relay has none; the reader of documents asks for it."""
Version = tuple[tuple[str, int, int, int], ...]


def document_files(place: Path) -> list[Path]:
    """The files of a folder, by name; or the one that is given.

    Raises:
        ConfigError: there is nothing, or too much.
    """
    found = (
        [place] if place.is_file() else sorted(each for each in _entries(place) if each.suffix in SUFFIXES)
    )
    if not found:
        fix = "Put documents of recipients and routes there, see docs/operations/recipients.md"
        raise ConfigError("documents", f"there is no *.yaml in {place}", fix)
    if len(found) > MOST_FILES:
        raise ConfigError("documents", f"{place} has {len(found)} files, at most {MOST_FILES} are read")
    return found


def _entries(place: Path) -> Iterator[Path]:
    try:
        yield from (each for each in place.iterdir() if each.is_file() and not each.name.startswith("."))
    except OSError as exc:
        raise ConfigError("documents", f"{place} cannot be read: {exc.strerror}") from exc


def read_documents(place: Path) -> RoutingTable:
    """The documents of a folder, checked.

    Raises:
        ConfigError: names the file, and in it line, field and what to do.
    """
    given: list[tuple[Path, Loaded]] = []
    for path in document_files(place):
        try:
            loaded = load_documents(path.read_text(), ROLLUP_S)
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(str(path), f"cannot be read: {exc}") from exc
        except AgreementsRefused as exc:
            raise ConfigError(str(path), str(exc)) from exc
        for each in loaded:
            _check_kind(path, each)
        given += [(path, each) for each in loaded]
    _check_names(given)
    held = tuple(
        NotificationInForce(each.document, 1, path.stat().st_mtime_ns // 1000) for path, each in given
    )
    try:
        check([each for _, each in given], Plans(notifications=held))
    except AgreementsRefused as exc:
        raise ConfigError(str(place), str(exc)) from exc
    return RoutingTable.of(held, {})


def _check_kind(path: Path, loaded: Loaded) -> None:
    document = loaded.document
    where = f"{path}: line {loaded.line}, {document.name}"
    if document.kind not in NOTIFICATION_KINDS:
        kinds = ", ".join(NOTIFICATION_KINDS)
        raise ConfigError(where, f"kind {document.kind} is for a server", f"A relay takes {kinds}")
    if isinstance(document, RecipientDocument) and document.spec.inbox is not None:
        raise ConfigError(where, "spec.inbox: a relay has no page", "Use a recipient of kind file")


def _check_names(given: list[tuple[Path, Loaded]]) -> None:
    def key(item: tuple[Path, Loaded]) -> tuple[str, str]:
        return item[1].document.kind, item[1].document.name

    for _, group in itertools.groupby(sorted(given, key=key), key):
        (first, one), *more = group
        for path, other in more:
            document = other.document
            problem = double_named(document.kind, document.name, other.line, one.line)
            raise ConfigError(str(path), f"{problem}" + (f" (in {first})" if first != path else ""))


class DocumentFolder:
    """See the module.

    Args:
        place: folder or file.
        data_dir: where ``routing.json`` is.
        wrong: called with a text when documents cannot be taken, once for each state of the files.
    """

    def __init__(self, place: Path, data_dir: Path, wrong: Callable[[str], None]) -> None:
        self._place = place
        self._file = RoutingFile(data_dir)
        self._wrong = wrong
        self._seen: Version | None = None

    def poll(self) -> bool:
        """Take up what has changed; whether documents were published."""
        version = self._version()
        if version == self._seen:
            self._file.retry()
            return False
        self._seen = version
        try:
            table = read_documents(self._place)
        except (ConfigError, OSError) as exc:
            log.error("documents-not-taken", problem=str(exc))
            self._wrong(str(exc))
            return False
        log.info("documents-taken", recipients=len(table.recipients), routes=len(table.routes))
        return self._file.publish(table)

    def _version(self) -> Version:
        try:
            found = [(path, path.stat()) for path in document_files(self._place)]
        except (ConfigError, OSError):
            return ()
        return tuple((str(path), each.st_mtime_ns, each.st_ino, each.st_size) for path, each in found)

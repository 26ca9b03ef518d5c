"""Documents about delivery that are in force, as one value, and the file that brings them to ``delivery``.

The services process owns the documents (SQL, table ``documents``). It writes those in force to one file at
its start and after every change, so that delivery goes on with what it knows while the database is away, also
after a restart. The file is replaced whole; the last one written is always complete.

``DocumentRouter`` is the only implementation of routing and silences: delivery and the preview (``sla notify
route``) use it alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import structlog
from pydantic import ValidationError

from pmdaemon.runtime.files import write_whole
from sla_server.agreements.fields import Document, DocumentInForce
from sla_server.events.documents import RecipientDocument, RouteDocument, SilenceDocument
from sla_server.events.event import Event
from sla_server.events.recipients.base import Held, Routed
from sla_server.events.stages.fallback import with_fallback
from sla_server.events.stages.route import route
from sla_server.events.stages.silence import SilenceInForce, held
from sla_server.rows import Row

log = structlog.get_logger("routing")
FILE: Final = "routing.json"
"""In the data directory."""
Notification = RecipientDocument | RouteDocument | SilenceDocument
NOTIFICATION_KINDS: Final[dict[str, type[Document]]] = {
    "Recipient": RecipientDocument,
    "Route": RouteDocument,
    "Silence": SilenceDocument,
}


@dataclass(frozen=True, slots=True)
class NotificationInForce(DocumentInForce[Document]):
    """One version of a document about delivery."""


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All that routing depends on.

    Attributes:
        recipients: by name.
        of_agreements: name of an agreement to the recipients that it names.
        unreadable: names of recipients that are in force and whose documents this release cannot read.
    """

    recipients: Mapping[str, RecipientDocument] = field(default_factory=lambda: MappingProxyType({}))
    routes: tuple[RouteDocument, ...] = ()
    silences: tuple[SilenceInForce, ...] = ()
    of_agreements: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))
    unreadable: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, held: Iterable[NotificationInForce], of_agreements: Mapping[str, Sequence[str]]
    ) -> RoutingTable:
        """From what is in force; what has ended is left out."""
        recipients: dict[str, RecipientDocument] = {}
        routes: list[RouteDocument] = []
        silences: list[SilenceInForce] = []
        for item in held:
            document = item.document
            if item.ended_us is not None:
                continue
            if isinstance(document, RecipientDocument):
                recipients[document.name] = document
            elif isinstance(document, RouteDocument):
                routes.append(document)
            elif isinstance(document, SilenceDocument):
                silences.append(SilenceInForce(document, item.applied_us, item.author))
        return cls(
            MappingProxyType(recipients),
            tuple(sorted(routes, key=lambda each: each.name)),
            tuple(sorted(silences, key=lambda each: each.document.name)),
            MappingProxyType(dict(of_agreements)),
        )

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {
            "documents": [
                *(each.spec_json() for each in self.recipients.values()),
                *(each.spec_json() for each in self.routes),
                *({**each.document.spec_json(), "applied_us": each.applied_us} for each in self.silences),
                *({"kind": "Recipient", "metadata": {"name": name}} for name in sorted(self.unreadable)),
            ],
            "of_agreements": {name: list(names) for name, names in self.of_agreements.items()},
        }

    @classmethod
    def from_json(cls, content: Any) -> RoutingTable:
        """From ``as_json``; a document of another release is left out, and the log says so.

        Raises:
            ValueError: it is nothing that ``as_json`` has written.
        """
        rows = content.get("documents") if isinstance(content, dict) else None
        named = (content.get("of_agreements") or {}) if isinstance(content, dict) else None
        if not isinstance(rows, list) or not isinstance(named, dict):
            raise ValueError("it is no list of documents")
        if not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in named.values()
        ):
            raise ValueError("the recipients of an agreement are no list of names")
        items, unreadable = [], set()
        for row in rows:
            kind, name = _identity(row)
            members = {key: value for key, value in row.items() if key != "applied_us"}
            try:
                document = NOTIFICATION_KINDS[kind].from_json(members)
            except (KeyError, ValidationError):
                log.warning("document-unreadable", kind=kind[:40], name=name[:128])
                if kind == "Recipient":
                    unreadable.add(name)
                continue
            items.append(NotificationInForce(document, 0, row.get("applied_us", 0)))
        return replace(cls.of(items, named), unreadable=frozenset(unreadable))


def _identity(row: Any) -> tuple[str, str]:
    """Kind and name of a document of any release; only the name of a kind of recipient has to be there.

    Raises:
        ValueError: it is no document.
    """
    kind = row.get("kind") if isinstance(row, dict) else None
    if not isinstance(kind, str) or not isinstance(row.get("applied_us", 0), int):
        raise ValueError("a document has no kind, or no time")
    metadata = row.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if not isinstance(name, str):
        if kind == "Recipient":
            raise ValueError("a recipient has no name")
        name = ""
    return kind, name


def stored_table(documents: Iterable[Row], agreements: Iterable[Row]) -> RoutingTable:
    """From rows of SQL in force; documents of another release are left out, as delivery does.

    What waits for such a recipient waits on (``unreadable``): servers are upgraded one after the other.
    """
    held, unreadable = [], set()
    for row in documents:
        if row["kind"] in NOTIFICATION_KINDS:
            try:
                document = NOTIFICATION_KINDS[row["kind"]].from_json(row["spec"])
            except ValidationError:
                if row["kind"] == "Recipient":
                    unreadable.add(str(row["name"]))
                continue
            author = str(row.get("applied_by") or "")
            held.append(NotificationInForce(document, row["version"], row["applied_us"], author=author))
    named = {
        row["name"]: names
        for row in agreements
        if (names := (((row.get("spec") or {}).get("spec") or {}).get("parties") or {}).get("recipients"))
    }
    return replace(RoutingTable.of(held, named), unreadable=frozenset(unreadable))


class DocumentRouter:
    """A ``Router`` made of documents. Any thread: it is immutable."""

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        routes = [route.spec for route in table.routes if route.spec.escalate is not None]
        self._escalating = frozenset(name for spec in routes for name in spec.recipients)

    def route(self, event: Event) -> Sequence[Routed]:
        """See ``Router``."""
        table = self.table
        routed = route(event, table.routes, table.recipients, table.of_agreements)
        return with_fallback(event, routed, table.recipients, table.routes, table.of_agreements)

    def held(self, event: Event, recipient: str, now_us: int) -> Held | None:
        """See ``Router``."""
        return held(event, recipient, self.table.silences, now_us)

    def escalates(self, recipient: str) -> bool:
        """See ``Router``."""
        return recipient in self._escalating


class RoutingFile:
    """The writer of the file. Thread: one.

    Durability: a table is on disk when ``publish`` returns True. Where the disk takes nothing the table stays
    to be written, and delivery goes on with the one before.
    """

    def __init__(self, data_dir: Path, write: Callable[..., None] = write_whole) -> None:
        self._path = data_dir / FILE
        self._write = write
        self._left: RoutingTable | None = None

    def publish(self, table: RoutingTable) -> bool:
        """Write a table in place of the one before; False: it could not be, ``retry`` tries again."""
        self._left = table
        return self.retry()

    def retry(self) -> bool:
        """Write what is left to be written."""
        if self._left is None:
            return True
        try:
            self._write(self._path, json.dumps(self._left.as_json()), synced=True)
        except OSError as exc:
            log.warning("routing-not-written", path=str(self._path), problem=str(exc))
            return False
        self._left = None
        return True


class RoutingReader:
    """Reads the file again when it has changed. Thread: one.

    Args:
        data_dir: where the file is.
        copy: where to keep the last content that could be read. It takes the place of the file at a start
            at which that cannot be read; None: nothing does.

    Attributes:
        router: of the newest content that could be read; without documents before the first.
    """

    def __init__(self, data_dir: Path, copy: Path | None = None) -> None:
        self._path = data_dir / FILE
        self._copy = copy
        self._seen: tuple[int, int, int] | None = None
        self._is_read = False
        self._problem = ""
        self.router = DocumentRouter(RoutingTable())

    def poll(self) -> bool:
        """Whether ``router`` is a new one now; a file that cannot be read leaves the one before."""
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino, status.st_size
            if seen == self._seen:
                return False
            content = self._take(self._path)
        except (OSError, ValueError, RecursionError) as exc:
            return self._is_as_before(exc)
        self._seen, self._problem = seen, ""
        if self._copy is not None:
            try:
                write_whole(self._copy, content, synced=True)
            except OSError as exc:
                log.warning("routing-not-kept", path=str(self._copy), problem=str(exc))
        return True

    def _take(self, path: Path) -> bytes:
        content = path.read_bytes()
        self.router = DocumentRouter(RoutingTable.from_json(json.loads(content)))
        self._is_read = True
        return content

    def _is_as_before(self, exc: Exception) -> bool:
        """Whether the copy was read, because the file was never read: its problem is logged once."""
        problem = f"{type(exc).__name__}: {exc}"
        if problem != self._problem and not isinstance(exc, FileNotFoundError):
            log.warning("routing-not-read", path=str(self._path), problem=problem)
        self._problem = problem
        if self._is_read or self._copy is None:
            return False
        try:
            self._take(self._copy)
        except (OSError, ValueError, RecursionError):
            return False
        log.warning("routing-of-before", path=str(self._copy), problem=problem)
        return True

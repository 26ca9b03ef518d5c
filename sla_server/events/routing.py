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
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import structlog
from pydantic import ValidationError

from pmdaemon.runtime.files import write_whole
from sla_server.agreements.fields import Document
from sla_server.events.documents import RecipientDocument, RouteDocument, SilenceDocument
from sla_server.events.event import Event
from sla_server.events.recipients.base import Held, Routed
from sla_server.events.stages.route import route
from sla_server.events.stages.silence import SilenceInForce, held

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
class NotificationInForce:
    """One version of a document about delivery."""

    document: Document
    version: int
    applied_us: int
    ended_us: int | None = None
    author: str = ""

    @property
    def name(self) -> str:
        """The document's name."""
        return self.document.name


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All that routing depends on.

    Attributes:
        recipients: by name.
        of_agreements: name of an agreement to the recipients that it names.
    """

    recipients: Mapping[str, RecipientDocument] = field(default_factory=lambda: MappingProxyType({}))
    routes: tuple[RouteDocument, ...] = ()
    silences: tuple[SilenceInForce, ...] = ()
    of_agreements: Mapping[str, Sequence[str]] = field(default_factory=lambda: MappingProxyType({}))

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
                silences.append(SilenceInForce(document, item.applied_us))
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
            ],
            "of_agreements": {name: list(names) for name, names in self.of_agreements.items()},
        }

    @classmethod
    def from_json(cls, content: Any) -> RoutingTable:
        """From ``as_json``; a document of another release is left out, and the log says so."""
        if not isinstance(content, dict):
            content = {}
        items = []
        for row in content.get("documents") or ():
            members = {key: value for key, value in row.items() if key != "applied_us"}
            try:
                document = NOTIFICATION_KINDS[members.get("kind", "")].from_json(members)
            except (KeyError, ValidationError):
                log.warning("document-unreadable", kind=str(members.get("kind"))[:40])
                continue
            items.append(NotificationInForce(document, 0, row.get("applied_us", 0)))
        return cls.of(items, content.get("of_agreements") or {})


class DocumentRouter:
    """A ``Router`` made of documents. Any thread: it is immutable."""

    def __init__(self, table: RoutingTable) -> None:
        self.table = table

    def route(self, event: Event) -> Sequence[Routed]:
        """See ``Router``."""
        return route(event, self.table.routes, self.table.recipients, self.table.of_agreements)

    def held(self, event: Event, recipient: str, now_us: int) -> Held | None:
        """See ``Router``."""
        return held(event, recipient, self.table.silences, now_us)


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
    """Reads the file again when it has changed. Thread: one."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE
        self._seen: tuple[int, int, int] | None = None
        self.router = DocumentRouter(RoutingTable())

    def poll(self) -> bool:
        """Whether ``router`` is a new one now; a file that cannot be read leaves the one before."""
        try:
            status = self._path.stat()
            seen = status.st_mtime_ns, status.st_ino, status.st_size
            if seen == self._seen:
                return False
            content = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return False
        except (OSError, ValueError) as exc:
            log.warning("routing-not-read", path=str(self._path), problem=str(exc))
            return False
        self._seen = seen
        self.router = DocumentRouter(RoutingTable.from_json(content))
        return True

"""Documents that all nodes share, as one node has them: acquirable parameters and accounts (C14, C15).

Each has a revision, one higher with each change, and a file of mode 0600 in the node's directory. What is
taken is on disk before it holds; a crash leaves the former one. ``documents`` has what brings them here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog

from pmdaemon.runtime.files import write_whole
from sla_server.cluster.errors import UNREADABLE, DocumentDamaged

log = structlog.get_logger("cluster")
NAMES: Final = ("parameters", "accounts")


@dataclass(frozen=True, slots=True)
class SharedDocument:
    """One document.

    Attributes:
        revision: 0: it was never changed.
        body: of JSON.
    """

    revision: int = 0
    body: Mapping[str, Any] = field(default_factory=dict)

    def encode(self) -> str:
        """As text."""
        return json.dumps({"revision": self.revision, "body": dict(self.body)}, indent=1, sort_keys=True)

    @classmethod
    def parse(cls, text: str | bytes) -> SharedDocument:
        """What ``encode`` has made.

        Raises:
            ValueError: it is none.
        """
        try:
            found = json.loads(text)
            revision, body = found["revision"], found["body"]
        except UNREADABLE as exc:
            raise ValueError(f"no shared document: {exc!r}") from exc
        if not isinstance(revision, int) or revision < 0 or not isinstance(body, dict):
            raise ValueError("no shared document: it has a revision and a body")
        return cls(revision, body)


class NodeDocuments:
    """What holds on this node: the files.

    Args:
        directory: of the node.

    Thread: the one that starts the node, then the agent's.

    Raises:
        DocumentDamaged: a file cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._found = {name: self._load(name) for name in NAMES}

    def get(self, name: str) -> SharedDocument:
        """The document that holds here."""
        return self._found[name]

    def take(self, name: str, document: SharedDocument) -> bool:
        """Keep it if it is newer; whether it was.

        Durability: it is on disk on return.

        Raises:
            OSError: it cannot be written; the former one holds.
        """
        if name not in self._found or document.revision <= self._found[name].revision:
            return False
        write_whole(self._path(name), document.encode() + "\n", synced=True)
        self._found[name] = document
        log.info("cluster-document-taken", document=name, revision=document.revision)
        return True

    def take_all(self, answers: Iterable[Mapping[str, Any]]) -> None:
        """Take what is newer of what other nodes have, as from their ``encoded``."""
        for answer in answers:
            for name in NAMES:
                with contextlib.suppress(KeyError, ValueError):  # it has none, or is of another release
                    self.take(name, SharedDocument.parse(answer[name]))

    def encoded(self) -> dict[str, str]:
        """All of them, as texts."""
        return {name: document.encode() for name, document in self._found.items()}

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    def _load(self, name: str) -> SharedDocument:
        path = self._path(name)
        try:
            return SharedDocument.parse(path.read_bytes())
        except FileNotFoundError:
            return SharedDocument()
        except ValueError as exc:
            raise DocumentDamaged(path, str(exc)) from exc

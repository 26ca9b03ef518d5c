"""Which volumes stored agreements are about, those chosen by labels included; for handlers.

State: labels as SQL has them, read when an agreement first needs them; an object serves one request. Most
agreements name their volumes, and then nothing is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from sla_server.agreements.selectors import matches
from sla_server.agreements.volume_labels import KIND, LabelBook, label_book, volumes_in_scope
from sla_server.rows import Row

if TYPE_CHECKING:
    from sla_server.db.queries.pages import PageQueries


class LabelSource(Protocol):
    """What is asked of SQL."""

    @property
    def pages(self) -> PageQueries:
        """Has the labels."""

    def documents(self, kind: str | None = None, in_force: bool = False) -> list[Row]:
        """Those that label volumes, in all versions."""


class ScopeVolumes:
    """See the module; ``read`` gives the labels of all volumes."""

    def __init__(self, read: Callable[[], LabelBook]) -> None:
        self._read = read

    @cached_property
    def _book(self) -> LabelBook:
        return self._read()

    def of(self, row: Mapping[str, Any]) -> Sequence[str]:
        """Names and patterns that an agreement means, by a row of ``agreements``; of labels, names."""
        scope = ((row.get("spec") or {}).get("spec") or {}).get("scope") or {}
        if not scope.get("volume_labels"):
            found: Sequence[str] = scope.get("volumes") or ()
            return found
        return volumes_in_scope(scope, self._book)

    def has(self, row: Mapping[str, Any], volume: str) -> bool:
        """Whether the agreement means this volume, whatever its clients."""
        return matches(volume, self.of(row))


def read_book(source: LabelSource, at_us: int | None = None) -> LabelBook:
    """The labels of all volumes, now or by the documents of then; of agents what they announce now."""
    announced, in_force = source.pages.label_rows()
    return label_book(announced, in_force if at_us is None else source.documents(KIND), at_us)

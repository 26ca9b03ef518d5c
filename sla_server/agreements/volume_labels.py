"""Labels of volumes: what agents announce, what documents say instead, and which volumes a selector means.

Agents announce labels with their exports. A document of ``kind: VolumeLabels`` gives volumes labels by name
or pattern, and takes those away to which it gives no value. Of one key what is said nearest to the volume
holds: a document that names it, before one whose pattern matches it, before its agent; of two such documents
that whose name is the later one in the alphabet.

A *label book* is all of it at one moment. Agreements choose by it (``scope.volume_labels``); what they choose
is worked out when the book changes, so that control and judging know names alone. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import translate
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator

from pmdaemon.wire.labels import (
    KEY_RULE,
    MAX_LABELS,
    VALUE_RULE,
    is_label_key,
    is_label_value,
    known_labels,
)
from sla_server.agreements.fields import Document, DocumentInForce, Pattern, Strict, refuse, shown
from sla_server.agreements.selectors import LabelSelector, is_pattern, matches, parse_labels, selects
from sla_server.rows import Row

if TYPE_CHECKING:
    from sla_server.agreements.document import AgreementScope

KIND: Final = "VolumeLabels"
Labels = Mapping[str, str]
NO_LABELS: Final[Labels] = MappingProxyType({})


class VolumeLabelsSpec(Strict):
    """Which volumes have which labels."""

    volumes: list[Pattern] = Field(min_length=1, max_length=500)
    """Names or patterns (*, ?, [...]) of volumes."""
    labels: dict[str, str | None] = Field(min_length=1, max_length=MAX_LABELS)
    """Key to value, such as tier: gold; null takes the label away that their agent gives them."""

    @field_validator("labels")
    @classmethod
    def _are_labels(cls, value: dict[str, str | None]) -> dict[str, str | None]:
        for key, text in value.items():
            if not is_label_key(key):
                raise refuse(f"{shown(key)} is no key of a label", f"Use {KEY_RULE}")
            if text is not None and not is_label_value(text):
                raise refuse(f"{shown(text)} is no value of the label {key}", f"Use {VALUE_RULE}", key=key)
        return value


class VolumeLabelsDocument(Document):
    """One ``kind: VolumeLabels`` document."""

    kind: Literal["VolumeLabels"]
    """Labels of volumes."""
    spec: VolumeLabelsSpec
    """Which volumes have which labels."""


@dataclass(frozen=True, slots=True)
class VolumeLabelsInForce(DocumentInForce[VolumeLabelsDocument]):
    """One version of a document, and the time it was in force."""


PatternRule = tuple[re.Pattern[str], VolumeLabelsDocument]
"""Which volumes the patterns of a document match, and the document."""


@dataclass(frozen=True)
class LabelBook:
    """The labels of all volumes at one moment; immutable.

    Attributes:
        announced: labels by agents, of the volumes that have some.
        documents: in force.
        volumes: all names known.
    """

    announced: Mapping[str, Labels] = field(default_factory=lambda: MappingProxyType({}))
    documents: tuple[VolumeLabelsInForce, ...] = ()
    volumes: frozenset[str] = frozenset()

    @cached_property
    def _rules(self) -> tuple[list[PatternRule], dict[str, list[VolumeLabelsDocument]]]:
        """Documents with patterns, and by name those that name a volume; both by their own name."""
        patterned: list[PatternRule] = []
        named: dict[str, list[VolumeLabelsDocument]] = {}
        for held in sorted(self.documents, key=lambda held: held.name):
            if patterns := list(filter(is_pattern, held.document.spec.volumes)):
                # All in one expression: 500 patterns are tried on each of very many volumes.
                patterned.append((re.compile("|".join(map(translate, patterns))), held.document))
            for name in dict.fromkeys(held.document.spec.volumes):
                if not is_pattern(name):
                    named.setdefault(name, []).append(held.document)
        return patterned, named

    def of(self, volume: str) -> dict[str, str]:
        """The labels that a volume has."""
        patterned, named = self._rules
        said: dict[str, str | None] = dict(self.announced.get(volume, NO_LABELS))
        for pattern, document in patterned:
            if pattern.match(volume):
                said.update(document.spec.labels)
        for document in named.get(volume, ()):
            said.update(document.spec.labels)
        return {key: value for key, value in said.items() if value is not None}

    @cached_property
    def _index(self) -> dict[str, dict[str, set[str]]]:
        """Key to value to the volumes that have it."""
        found: dict[str, dict[str, set[str]]] = {}
        names = self.volumes if self._rules[0] else self.announced.keys() | self._rules[1].keys()
        for volume in names:
            for key, value in self.of(volume).items():
                found.setdefault(key, {}).setdefault(value, set()).add(volume)
        return found

    def in_scope(self, scope: AgreementScope) -> Sequence[str]:
        """Names and patterns that a scope means now; of one with labels, names."""
        if scope.volume_labels is None:
            return scope.volumes
        return self.selected(parse_labels(scope.volume_labels), scope.volumes)

    def selected(self, selector: LabelSelector, patterns: Collection[str]) -> tuple[str, ...]:
        """Volumes known whose labels a selector means, and whose names one of the patterns; in order."""
        names: Collection[str] = self.volumes
        for one in selector:
            if one.is_negated:
                continue
            values = self._index.get(one.key, {})
            chosen = values if one.values is None else {v: values[v] for v in one.values if v in values}
            having = set[str]().union(*chosen.values())
            names = having if names is self.volumes else having.intersection(names)
        if any(one.is_negated for one in selector):
            names = [name for name in names if selects(selector, self.of(name))]
        return tuple(sorted(name for name in names if name in self.volumes and matches(name, patterns)))


def label_book(volumes: Iterable[Row], documents: Iterable[Row], at_us: int | None = None) -> LabelBook:
    """The book by rows of SQL: ``volumes`` with ``labels``, and ``documents`` of any kind.

    A document that this release cannot read labels nothing.

    Args:
        volumes: with what their agents announce now.
        documents: those in force, or more.
        at_us: by the documents in force then; None: now.
    """
    held = list[VolumeLabelsInForce]()
    for row in documents:
        if row["kind"] == KIND and _is_in_force(row, at_us):
            try:
                document = VolumeLabelsDocument.from_json(row["spec"])
            except ValidationError:
                continue
            held.append(VolumeLabelsInForce(document, row["version"], row["applied_us"]))
    labels = {row["volume"]: stored_labels(row.get("labels")) for row in volumes}
    announced = {volume: found for volume, found in labels.items() if found}
    return LabelBook(MappingProxyType(announced), tuple(held), frozenset(labels))


def _is_in_force(row: Row, at_us: int | None) -> bool:
    ended_us: int | None = row["ended_us"]
    if at_us is None:
        return ended_us is None
    return bool(row["applied_us"] <= at_us) and (ended_us is None or ended_us > at_us)


def stored_labels(value: Any) -> dict[str, str]:
    """Labels as table ``volumes`` has them: JSON, or "" for none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value else {}
        except ValueError:
            return {}
    return known_labels(value)


def volumes_in_scope(scope: Mapping[str, Any], book: LabelBook) -> Sequence[str]:
    """Names and patterns that the scope of a stored agreement means now; of one with labels, names."""
    patterns: list[str] = list(scope.get("volumes") or ())
    text = scope.get("volume_labels")
    if not text:
        return patterns
    try:
        return book.selected(parse_labels(text), patterns)
    except ValueError:  # of another release: nothing is chosen, never everything
        return ()

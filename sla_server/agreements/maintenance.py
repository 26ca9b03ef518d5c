"""Maintenance as documents of its own: ``kind: Maintenance``, whose scope is agreements or volumes.

A document in force is an ``AnnouncedWork``. It excuses nothing that happened before it was applied, nor after
it was ended: its occurrences are limited to [applied_us, ended_us), so that no slice is excused after the
fact. How much of it an agreement accepts (``maintenance.notice``, ``max_per_period``) is the agreement's own
rule (``periods.is_excluded``). Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import Field, model_validator

from sla_server.agreements.document import Agreement
from sla_server.agreements.fields import Document, DocumentInForce, Pattern, Strict, refuse
from sla_server.agreements.periods import PlannedWindow, Span, occurrences
from sla_server.agreements.selectors import can_meet, has_labels, matches

FOREVER_US = 1 << 62


class MaintenanceScope(Strict):
    """Agreements by name or label, or everything that is promised of some volumes."""

    agreements: list[Pattern] = Field(default_factory=list, max_length=200)
    """Names or patterns of agreements."""
    labels: dict[str, str] = Field(default_factory=dict, max_length=32)
    """All of them; with ``agreements``: both must fit."""
    volumes: list[Pattern] = Field(default_factory=list, max_length=200)
    """Names or patterns of volumes, in place of agreements and labels."""

    @model_validator(mode="after")
    def _one_kind(self) -> MaintenanceScope:
        of_agreements = bool(self.agreements or self.labels)
        if of_agreements == bool(self.volumes):
            raise refuse(
                "the scope is either agreements (by name or label) or volumes",
                'Give agreements: ["*"], agreements: [NAME], labels: {KEY: VALUE} or volumes: [NAME]',
            )
        return self

    def covers(self, agreement: Agreement, promised: Collection[str]) -> bool:
        """Whether the work is about this agreement, which promises something of these volumes."""
        if self.volumes:
            return any(can_meet(selector, volume) for selector in self.volumes for volume in promised)
        is_named = not self.agreements or matches(agreement.name, self.agreements)
        return is_named and has_labels(agreement.metadata.labels, self.labels)

    def text(self) -> str:
        """For people: ``erp-*``, ``customer=acme``, ``volumes vol-1, vol-2``."""
        if self.volumes:
            return f"volumes {', '.join(self.volumes)}"
        return " ".join([*self.agreements, *(f"{key}={value}" for key, value in self.labels.items())])


class MaintenanceSpec(PlannedWindow):
    """When, why, and what it is about."""

    scope: MaintenanceScope
    """What the work is about."""
    author: str | None = Field(default=None, min_length=1, max_length=100)
    """Default: who applied the document."""


class MaintenanceDocument(Document):
    """One ``kind: Maintenance`` document."""

    kind: Literal["Maintenance"]
    """Announced work."""
    spec: MaintenanceSpec
    """When, why and what about."""


@dataclass(frozen=True)
class AnnouncedWork(DocumentInForce[MaintenanceDocument]):
    """One version of a Maintenance document, and the time it was in force."""

    @property
    def tz(self) -> str:
        """Zone of its times."""
        return self.document.spec.tz or "UTC"

    @property
    def reason(self) -> str:
        """For people."""
        return f"maintenance {self.name}: {self.document.spec.reason}"

    def covers(self, agreement: Agreement, promised: Collection[str]) -> bool:
        """Whether it is about this agreement, which promises something of these volumes."""
        return self.document.spec.scope.covers(agreement, promised)

    @cached_property
    def _bounds(self) -> Span:
        """Between which instants it can excuse anything."""
        spec, end_us = self.document.spec, FOREVER_US if self.ended_us is None else self.ended_us
        begin_us, over_us = spec.span(spec.start, self.tz)
        return max(begin_us, self.applied_us), end_us if spec.rrule is not None else min(over_us, end_us)

    def announced_us(self, versions: Iterable[AnnouncedWork]) -> int:
        """When its times were announced first: an edit of the reason alone begins no other notice.

        ``versions``: of any document, in whose scope the agreement is that asks.
        """
        since_us = self.applied_us
        for earlier in sorted(versions, key=lambda each: -each.applied_us):
            is_before = earlier.name == self.name and earlier.ended_us == since_us
            if is_before and earlier.times == self.times:
                since_us = earlier.applied_us
        return since_us

    @property
    def times(self) -> tuple[object, ...]:
        """What says when."""
        spec = self.document.spec
        return spec.start, spec.end, spec.duration, spec.rrule, self.tz

    def spans(self, from_us: int, to_us: int, since_us: int = 0) -> Iterator[Span]:
        """What it excuses of [from_us, to_us), in order; nothing before ``since_us``."""
        first_us, last_us = self._bounds
        first_us = max(first_us, since_us)
        if first_us >= to_us or last_us <= from_us:
            return  # nearly always
        for begin_us, end_us in occurrences(self.document.spec, from_us, to_us, self.tz):
            begin_us, end_us = max(begin_us, first_us), min(end_us, last_us)
            if begin_us < end_us and begin_us < to_us and end_us > from_us:
                yield begin_us, end_us

    def is_past(self, now_us: int) -> bool:
        """Whether it excuses nothing any more."""
        return self._bounds[1] <= now_us

    def next_span(self, now_us: int, ahead_us: int) -> Span | None:
        """The occurrence under way, or the next that begins within ``ahead_us``; None: there is none."""
        return next(self.spans(now_us, now_us + ahead_us), None)

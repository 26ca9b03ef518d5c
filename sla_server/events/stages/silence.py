"""Silence: whether an event is held back from a recipient now. Pure.

A silence holds back what it matches during its occurrences: once, or again and again (quiet hours). With
catch-up the event is looked at again when the silence ends; without, it is not delivered at all, which its
state of delivery says. Of several silences the one that holds longest counts, and one without catch-up before
all others. A silence ends no condition: what was held back keeps its order.

An event is held back by what holds when it is looked at, not when it was raised. Tests are never held back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

from sla_server.agreements.periods import Span, occurrences
from sla_server.events.documents import SilenceDocument
from sla_server.events.event import Event
from sla_server.events.recipients.base import Held
from sla_server.events.stages.route import ASKED_FOR, mismatch


@dataclass(frozen=True, slots=True)
class SilenceInForce:
    """A silence, when it was applied (it holds nothing back before), and by whom, where that is known."""

    document: SilenceDocument
    applied_us: int = 0
    applied_by: str = field(default="", compare=False)

    @property
    def author(self) -> str:
        """Who is behind it, for people."""
        return self.document.spec.author or self.applied_by

    def span_at(self, at_us: int) -> Span | None:
        """The occurrence that an instant is in; of several the one that ends last."""
        spec = self.document.spec
        if at_us < self.applied_us:
            return None
        spans = [span for span in occurrences(spec, at_us, at_us + 1, spec.tz or "UTC") if span[0] <= at_us]
        return max(spans, key=lambda span: span[1], default=None)

    def next_span(self, now_us: int, ahead_us: int) -> Span | None:
        """The occurrence under way, or the next that begins within ``ahead_us``."""
        spec = self.document.spec
        return next(occurrences(spec, now_us, now_us + ahead_us, spec.tz or "UTC"), None)


def held(event: Event, recipient: str, silences: Iterable[SilenceInForce], now_us: int) -> Held | None:
    """Whether silences keep an event back from a recipient now."""
    if event.kind in ASKED_FOR:
        return None
    return max(
        _each(event, recipient, silences, now_us),
        key=lambda one: (not one.until_us, one.until_us),
        default=None,
    )


def _each(event: Event, recipient: str, silences: Iterable[SilenceInForce], now_us: int) -> Iterator[Held]:
    for silence in silences:
        spec = silence.document.spec
        if (spec.recipients and recipient not in spec.recipients) or mismatch(spec.match, event):
            continue
        span = silence.span_at(now_us)
        if span is not None:
            until = datetime.fromtimestamp(span[1] / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
            after = f"until {until}" if spec.catch_up else f"until {until}, without catch-up"
            by = f" (by {silence.author})" if silence.author else ""
            yield Held(
                f"silence {silence.document.name} {after}: {spec.reason}{by}", span[1] if spec.catch_up else 0
            )

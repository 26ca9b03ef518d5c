"""Named calendars: ``kind: Calendar`` documents with weekly hours and holidays, for service hours.

An agreement says ``service_hours: {calendar: NAME}``; each slice asks the version of the calendar that was in
force at its start. ``always`` and ``business`` are built in and cannot be redefined. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from typing import Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from sla_server.agreements.fields import (
    CalendarDate,
    ClockTime,
    Document,
    DocumentInForce,
    Metadata,
    Strict,
    TimeZone,
    clock_text,
    refuse,
)

DAYS: Final = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
Day = Literal["mon", "tue", "wed", "thu", "fri", "sat", "sun"]
BUILT_IN: Final = ("always", "business")
Opening = tuple[time, time]
"""First instant of service, and the first after it, local; ``time.max`` is midnight."""


class WeeklyHours(Strict):
    """Hours of some days of each week."""

    days: list[Day] = Field(min_length=1, max_length=7)
    """Days of the week."""
    opens: ClockTime = Field(alias="from")
    """When it opens, local time."""
    closes: ClockTime = Field(alias="to")
    """When it closes; 24:00 is the end of the day."""

    @model_validator(mode="after")
    def _ordered(self) -> WeeklyHours:
        if self.opens >= self.closes:
            raise refuse(
                f"'from', {clock_text(self.opens)}, is not before 'to', {clock_text(self.closes)}",
                'For hours over midnight, give two entries, one to "24:00"',
            )
        return self


class CalendarSpec(Strict):
    """When a service is open."""

    tz: TimeZone = "UTC"
    """Zone of hours and holidays."""
    hours: list[WeeklyHours] = Field(min_length=1, max_length=50)
    """When it is open in a week."""
    holidays: list[CalendarDate] = Field(default_factory=list, max_length=1000)
    """Closed all day, local."""

    @model_validator(mode="after")
    def _apart(self) -> CalendarSpec:
        for index, entry in enumerate(self.hours):
            for before, earlier in enumerate(self.hours[:index]):
                common = [day for day in entry.days if day in earlier.days]
                if common and entry.opens < earlier.closes and earlier.opens < entry.closes:
                    raise refuse(
                        f"hours[{index}] and hours[{before}] overlap on {common[0]}", "Make one entry of them"
                    )
        return self

    def openings(self, day: date) -> list[Opening]:
        """Of one local day; none on holidays."""
        if day in self.holidays:
            return []
        name = DAYS[day.weekday()]
        return [(entry.opens, entry.closes) for entry in self.hours if name in entry.days]


class CalendarMetadata(Metadata):
    """Who the calendar is; the built-in names are taken."""

    @field_validator("name")
    @classmethod
    def _free(cls, value: str) -> str:
        if value in BUILT_IN:
            raise refuse(f"the calendar {value!r} is built in", "Choose another name")
        return value


class CalendarDocument(Document):
    """One ``kind: Calendar`` document."""

    kind: Literal["Calendar"]
    """A calendar."""
    metadata: CalendarMetadata
    """Name and labels."""
    spec: CalendarSpec
    """Its hours and holidays."""


@dataclass(frozen=True, slots=True)
class CalendarInForce(DocumentInForce[CalendarDocument]):
    """One version of a calendar and the time it holds: instants in [applied_us, ended_us)."""


def version_at(versions: Sequence[CalendarInForce], at_us: int) -> CalendarSpec | None:
    """What holds at an instant: the newest version applied by then, else the first; None without any."""
    held = [item for item in versions if item.applied_us <= at_us]
    if held:
        return max(held, key=lambda item: item.applied_us).document.spec
    first: Any = min(versions, key=lambda item: item.applied_us, default=None)
    return first.document.spec if first is not None else None

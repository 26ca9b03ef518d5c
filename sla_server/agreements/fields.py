"""Building blocks of the document's models: strict base, durations, names, patterns, time zones, times.

A validator that refuses a value raises ``refuse(problem, fix)``; ``load`` carries both texts to the user.
Unknown keys, and values of another type ("95" for 95), are refused.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Set
from dataclasses import dataclass
from datetime import date, datetime, time
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from pmdaemon.wire.names import is_name
from sla_server.agreements.numbers import meant_duration
from sla_server.agreements.zones import is_readable, is_zone

UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
FIRST_YEAR: Final = 2000  # rules are followed from their start, occurrence by occurrence
LAST_YEAR: Final = 2199
MAX_SHOWN: Final = 80  # characters of a wrong value that a problem repeats
_DURATION = re.compile(r"([1-9][0-9]{0,5})([smhdw])")
_DATE_FORM = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}(\Z|[T ][0-9:]{5,8}\Z)")
_PATTERN = re.compile(r"[A-Za-z0-9*?\[][A-Za-z0-9._:@*?\[\]!-]{0,127}")


class Strict(BaseModel):
    """Base of every model of the document: no unknown keys, no silent conversions, immutable."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=True
    )


def refuse(problem: str, fix: str = "", key: str = "") -> PydanticCustomError:
    """The error a validator raises; braces of the texts are safe.

    Args:
        problem: what is wrong.
        fix: what to write instead.
        key: the key below the validator's own to which it belongs, for a model's validator.
    """
    return PydanticCustomError("agreement", "{problem}", {"problem": problem, "fix": fix, "key": key})


NEW: Final = {"is_new": True}
"""Context of validation for a document that is to be applied."""


def is_new(info: ValidationInfo) -> bool:
    """Whether the document is to be applied; one that was stored by an earlier release is read as it is."""
    return bool(info.context and info.context.get("is_new"))


def shown(value: Any) -> str:
    """A value of a document as one could write it in YAML, cut short."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, float) and not math.isfinite(value):
        text = ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    else:
        try:
            text = json.dumps(value, ensure_ascii=False, default=_plain_text)
        except RecursionError:
            text = "a value within itself"
        except ValueError as exc:  # a number of thousands of digits is not written out
            text = "a value within itself" if "Circular" in str(exc) else "a very long number"
        except TypeError:  # a map whose keys are lists
            text = "a map"
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _plain_text(value: Any) -> Any:
    """What JSON has no form for: dates and times, sets, and values of strange tags."""
    if isinstance(value, date | time):
        return value.isoformat()
    return sorted(map(str, value)) if isinstance(value, Set) else f"a {type(value).__name__.lower()}"


def parse_duration_s(value: Any) -> int:
    """Seconds from ``30s``, ``1m``, ``6h``, ``30d``, ``4w``.

    Raises:
        PydanticCustomError: anything else.
    """
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        meant = meant_duration(value) if isinstance(value, str) else ""
        fix = f"Write {meant}" if meant else "Write a whole number and a unit: 30s, 1m, 6h, 30d or 4w"
        raise refuse(f"{shown(value)} is not a duration", fix)
    return int(match[1]) * UNITS_S[match[2]]


def format_duration(seconds: int) -> str:
    """The shortest spelling that ``parse_duration_s`` reads back."""
    for unit in ("w", "d", "h", "m"):
        if seconds and seconds % UNITS_S[unit] == 0:
            return f"{seconds // UNITS_S[unit]}{unit}"
    return f"{seconds}s"


def _name(value: Any) -> str:
    if not isinstance(value, str) or not is_name(value):
        raise refuse(
            f"{shown(value)} is not a name",
            "Use letters, digits and . _ : @ - (1 to 128, first a letter or digit)",
        )
    return value


def _pattern(value: Any) -> str:
    if not isinstance(value, str) or _PATTERN.fullmatch(value) is None:
        raise refuse(
            f"{shown(value)} is not a name or pattern",
            "Use a name, or a pattern with * and ? (1 to 128 characters). By label: scope.volume_labels",
        )
    return value


def _time_zone(value: Any, info: ValidationInfo) -> str:
    known = is_zone if is_new(info) else is_readable
    if not isinstance(value, str) or not known(value):
        raise refuse(f"{shown(value)} is not a time zone", "Use an IANA name such as UTC or Europe/Berlin")
    return value


def clock_text(at: time) -> str:
    """A time of day as it is written in a document."""
    return "24:00" if at == time.max else at.isoformat("minutes")


def _clock_time(value: Any) -> time:
    if isinstance(value, time):
        return value
    if value == "24:00":
        return time.max
    try:
        read = time.fromisoformat(value)
    except (TypeError, ValueError) as exc:
        raise refuse(f"{shown(value)} is not a time of day", 'Write it in quotes, as "08:00"') from exc
    if read.tzinfo is not None:
        raise refuse(f"{shown(value)} carries an offset", "Write local time and name the zone in the key tz")
    if read.second or read.microsecond:
        raise refuse(f"{shown(value)} has seconds", 'Write hours and minutes, as "08:00"')
    return read


def _no_time(value: str, what: str, example: str) -> PydanticCustomError:
    if _DATE_FORM.match(value):
        return refuse(f"{shown(value)} does not exist: no such day, hour or minute", f"Write it as {example}")
    return refuse(f"{shown(value)} is not {what}", f"Write it as {example}")


def _local_time(value: Any) -> datetime:
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError as exc:
            raise _no_time(value, "a date and time", "2026-02-01T22:00") from exc
    if isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise refuse(f"{shown(value)} is not a date and time", "Write it as 2026-02-01T22:00")
    if value.tzinfo is not None:
        raise refuse(
            f"{value.isoformat()} carries an offset", "Write local time and name the zone in the key tz"
        )
    if not FIRST_YEAR <= value.year <= LAST_YEAR:
        raise refuse(f"the year {value.year} is not within {FIRST_YEAR} to {LAST_YEAR}")
    # A plain datetime: the YAML reader hands out a subclass of its own.
    return datetime(value.year, value.month, value.day, value.hour, value.minute, value.second)


def _calendar_date(value: Any) -> date:
    if isinstance(value, str):
        try:
            value = date.fromisoformat(value)
        except ValueError as exc:
            raise _no_time(value, "a date", "2026-12-25") from exc
    if not isinstance(value, date) or isinstance(value, datetime):
        raise refuse(f"{shown(value)} is not a date", "Write it as 2026-12-25")
    if not FIRST_YEAR <= value.year <= LAST_YEAR:
        raise refuse(f"the year {value.year} is not within {FIRST_YEAR} to {LAST_YEAR}")
    return date(value.year, value.month, value.day)


def _schema(pattern: str = "", **more: Any) -> WithJsonSchema:
    """What JSON Schema says of a text; the model itself says more."""
    return WithJsonSchema({"type": "string", **({"pattern": pattern} if pattern else {}), **more})


Duration = Annotated[
    int,
    BeforeValidator(parse_duration_s),
    PlainSerializer(format_duration, when_used="json"),
    _schema(f"^{_DURATION.pattern}$", examples=["1m", "30d"]),
]
"""Seconds in memory, ``1m`` in the document and in JSON."""
Name = Annotated[str, BeforeValidator(_name), _schema("^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$")]
"""What an agreement or objective may be called."""
Pattern = Annotated[str, BeforeValidator(_pattern), _schema(f"^{_PATTERN.pattern}$")]
"""A name, or a shell pattern over names (``fnmatch``, case matters)."""
TimeZone = Annotated[str, BeforeValidator(_time_zone), _schema(examples=["UTC", "Europe/Berlin"])]
"""IANA time zone."""
ClockTime = Annotated[
    time,
    BeforeValidator(_clock_time),
    PlainSerializer(clock_text, return_type=str, when_used="json"),
    _schema("^([01][0-9]|2[0-3]):[0-5][0-9]$|^24:00$"),
]
"""Time of day, ``"08:00"``; ``"24:00"`` is the end of the day."""
LocalTime = Annotated[datetime, BeforeValidator(_local_time), _schema(examples=["2026-02-01T22:00"])]
"""Wall-clock time without offset; the zone is a key of its own."""
CalendarDate = Annotated[date, BeforeValidator(_calendar_date), _schema("^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
"""A day, ``2026-12-25``."""


class Metadata(Strict):
    """Who the document is."""

    name: Name
    """Unique among the documents of its kind: letters, digits and . _ : @ -"""
    labels: dict[str, str] = Field(default_factory=dict, max_length=32)
    """For people and selectors, such as customer: acme."""


class Document(Strict):
    """What every kind of document has; ``kind`` and ``spec`` are the subclass's."""

    api_version: Literal["storage-sla/v1"] = Field(alias="apiVersion")
    """Version of the form of documents."""
    kind: str
    metadata: Metadata
    """Name and labels."""

    @property
    def name(self) -> str:
        """The document's name; unique among those of its kind."""
        return self.metadata.name

    def spec_json(self) -> dict[str, Any]:
        """The whole document as JSON values, defaults filled in; equal documents give equal values."""
        return self.model_dump(mode="json", by_alias=True)

    @classmethod
    def from_json(cls, spec: dict[str, Any]) -> Self:
        """Read ``spec_json`` back.

        Raises:
            pydantic.ValidationError: the row was written by an incompatible version.
        """
        return cls.model_validate(spec)


AnyDocument = TypeVar("AnyDocument", bound=Document)


@dataclass(frozen=True, slots=True)
class DocumentInForce(Generic[AnyDocument]):
    """One version of a document, and the time it was in force: [applied_us, ended_us)."""

    document: AnyDocument
    version: int
    applied_us: int
    ended_us: int | None = None
    author: str = ""

    @property
    def name(self) -> str:
        """The document's name."""
        return self.document.name

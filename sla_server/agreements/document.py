"""The agreement document as people write it (docs/formats/agreement.md), as strict immutable models.

Checks that need other documents or the server's settings (threshold limit, rollup interval) are in
``promise`` and ``load``. ``spec_json`` is the form kept in SQL; ``from_spec`` reads it back.
"""

from __future__ import annotations

import json
import math
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator

from sla_server.agreements.fields import (
    Document,
    Duration,
    Name,
    Pattern,
    Strict,
    format_duration,
    is_new,
    refuse,
    shown,
)
from sla_server.agreements.periods import (
    CalendarWindow,
    Maintenance,
    RollingWindow,
    ServiceHours,
    begins_in_service,
)
from sla_server.agreements.selectors import parse_labels

DEFAULT_FLOOR_IOPS = 50.0  # also that of a volume without any agreement (DESIGN.md 4, "Names")


class Parties(Strict):
    """Provider and customer; ``recipients`` get the messages about violations."""

    provider: str = Field(min_length=1, max_length=200)
    """Who provides the storage."""
    customer: str = Field(min_length=1, max_length=200)
    """Who it was agreed with."""
    recipients: list[str] = Field(default_factory=list, max_length=50)
    """Names of Recipient documents that are sent what concerns the agreement."""


class AgreementScope(Strict):
    """Which I/O the agreement is about: any of the volumes, by any of the clients."""

    volumes: list[Pattern] = Field(default_factory=list, min_length=1, max_length=100)
    """Names or patterns (*, ?, [...]) of volumes; needed without volume_labels, else those of all names."""
    volume_labels: str | None = Field(default=None, max_length=1000)
    """Selector of volumes by their labels: tier=gold, env in (prod,stage), backup. With volumes: both fit."""
    clients: list[Pattern] = Field(default_factory=lambda: ["*"], min_length=1, max_length=100)
    """Names or patterns of clients; default: all."""
    io: Literal["any", "read", "write"] = "any"
    """Whether reads, writes or both count."""

    @field_validator("volume_labels")
    @classmethod
    def _is_selector(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                parse_labels(value)
            except ValueError as exc:
                raise refuse(str(exc)) from exc
        return value

    @model_validator(mode="before")
    @classmethod
    def _some_volumes(cls, value: Any) -> Any:
        """With labels, volumes of any name; without, some must be named."""
        if not isinstance(value, dict) or "volumes" in value:
            return value
        if value.get("volume_labels") is not None:
            return {**value, "volumes": ["*"]}
        raise refuse(
            "it names no volumes",
            "Give volumes: [NAME or PATTERN], or volume_labels: KEY=VALUE",
            key="volumes",
        )


class Guarantee(Strict):
    """Never throttled below this."""

    floor_iops: float = Field(default=DEFAULT_FLOOR_IOPS, ge=1, le=1e9)
    """I/Os a second that no throttle goes below."""
    floor_mbps: float = Field(default=0.0, ge=0, le=1e6)
    """MB (10^6 bytes) a second."""


class Cap(Strict):
    """Static limit of the volumes in scope."""

    max_iops: float = Field(gt=0, le=1e9)
    """I/Os a second of each volume; of each client where scope.clients names some."""
    burst_iops: float | None = Field(default=None, gt=0, le=1e9)
    """For a while more than max_iops; goes with burst_s."""
    burst_s: float | None = Field(default=None, gt=0, le=3600)
    """How long a burst lasts; goes with burst_iops."""

    @model_validator(mode="after")
    def _burst(self) -> Cap:
        if (self.burst_iops is None) != (self.burst_s is None):
            given, missing = ("burst_iops", "burst_s") if self.burst_s is None else ("burst_s", "burst_iops")
            raise refuse(f"{given} is given without {missing}", "Give both or neither", key=given)
        if self.burst_iops is not None and self.burst_iops < self.max_iops:
            raise refuse(
                f"{self.burst_iops:g} is below max_iops, {self.max_iops:g}",
                "Raise burst_iops, or lower max_iops",
                key="burst_iops",
            )
        return self


class Penalty(Strict):
    """What is credited when compliance of a period ends below a value."""

    below: float = Field(gt=0, le=1)
    """Compliance of the period below which the credit is owed, such as 0.995."""
    credit: float = Field(gt=0, le=1)
    """Share of the price that is credited, such as 0.10."""


USE_SHORTER_SLICE: Final = "Use a shorter slice, for example 1m: one counts if it begins in the hours"
_SOME_YEAR_US: Final = 1_767_225_600_000_000  # 2026: zones of another year differ little


def never_in_service(slice_s: int, where: str) -> str:
    """The problem of slices that ``begins_in_service`` finds to be never judged."""
    length = format_duration(slice_s)
    return f"slices of {length} begin at 00:00 UTC and every {length} from there: for weeks, never {where}"


Control = Literal["observe", "enforce"]
Window = Annotated[CalendarWindow | RollingWindow, Field(discriminator="type")]


def _month() -> CalendarWindow:
    return CalendarWindow(type="calendar", period="month")


class AgreementSpec(Strict):
    """What was agreed."""

    parties: Parties | None = None
    """Who agreed, and who is sent messages."""
    scope: AgreementScope
    """Which I/O it is about."""
    priority: Literal["gold", "silver", "bronze", "best-effort"]
    """Who is slowed down first: shares are 8, 4, 2 and 1."""
    guarantee: Guarantee = Field(default_factory=Guarantee)
    """What throttles leave in any case."""
    cap: Cap | None = None
    """The most that the volumes themselves may use."""
    objectives: list[Objective] = Field(default_factory=list, max_length=16)
    """May be empty: then the agreement only says how the volumes are treated as neighbours."""
    window: Window = Field(default_factory=_month)
    """Over which time the target holds."""
    service_hours: ServiceHours | None = None
    """When the promise holds; absent: always."""
    maintenance: Maintenance = Field(default_factory=Maintenance)
    """Announced work, and its rules."""
    penalties: list[Penalty] = Field(default_factory=list, max_length=10)
    """What is credited when a period ends below a target, the mildest first."""
    credit_cap: float = Field(default=1.0, gt=0, le=1)
    """The most that is credited for one period, all objectives together."""
    control: Control | None = None
    """Whether neighbours are slowed down for it; absent: as its backend, else the whole server."""

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> AgreementSpec:
        names = [objective.name for objective in self.objectives]
        for name in names:
            if names.count(name) > 1:
                raise refuse(
                    f"two objectives are called {name!r}", "Give each objective of an agreement its own name"
                )
        floor_iops = self.guarantee.floor_iops
        if self.cap is not None and self.cap.max_iops < floor_iops:
            said = (
                "" if "floor_iops" in self.guarantee.model_fields_set else ", which holds where none is given"
            )
            raise refuse(
                f"{self.cap.max_iops:g} is below guarantee.floor_iops, {floor_iops:g}{said}",
                "Raise the cap or lower the floor",
                key="cap.max_iops",
            )
        for index, (mild, severe) in enumerate(
            zip(self.penalties, self.penalties[1:], strict=False), start=1
        ):
            for name, value, limit, is_wrong in (
                ("below", severe.below, mild.below, severe.below >= mild.below),
                ("credit", severe.credit, mild.credit, severe.credit <= mild.credit),
            ):
                if is_wrong:
                    word = "below" if name == "below" else "above"
                    raise refuse(
                        f"{value:g} is not {word} {limit:g}, the {name} of the penalty before it",
                        "List them with 'below' falling and 'credit' rising",
                        key=f"penalties[{index}].{name}",
                    )
        if is_new(info):
            self._check_window()
            self._check_hours()
        return self

    def _check_hours(self) -> None:
        """Refuse slices of which none begins in business hours; those stored by earlier releases stay."""
        for index, objective in enumerate(self.objectives):
            length_s = objective.budgeting.slice_s
            if not begins_in_service(self.service_hours, length_s, _SOME_YEAR_US, self.time_zone):
                raise refuse(
                    never_in_service(length_s, "within service_hours"),
                    USE_SHORTER_SLICE,
                    key=f"objectives[{index}].budgeting.slice",
                )

    def _check_window(self) -> None:
        """Refuse a rolling window that is shorter than a slice; those stored by earlier releases stay."""
        for objective in self.objectives:
            length = objective.budgeting.slice_s
            if isinstance(self.window, RollingWindow) and self.window.duration < length:
                duration = format_duration(self.window.duration)
                raise refuse(
                    f"{duration} is shorter than a slice of {objective.name}, {format_duration(length)}",
                    "Use a longer window, for example 30d, or a shorter slice",
                    key="window.duration",
                )

    @property
    def time_zone(self) -> str:
        """Zone of everything that names none of its own."""
        return self.window.tz if isinstance(self.window, CalendarWindow) else "UTC"


_SHARED: Final = tuple(name for name in AgreementSpec.model_fields if name not in ("scope", "priority"))


class Agreement(Document):
    """One whole ``kind: SLA`` document."""

    kind: Literal["SLA"]
    """An agreement."""
    spec: AgreementSpec
    """What was agreed."""

    @property
    def judged(self) -> list[Objective]:
        """The objectives that this release judges: all."""
        return list(self.spec.objectives)

    @classmethod
    def from_spec(cls, spec: dict[str, Any], known: dict[str, Any] | None = None) -> Agreement:
        """Read ``spec_json`` back.

        Args:
            spec: the JSON value.
            known: parts of agreements read before, kept by the caller. Equal parts become one object: tens of
                thousands of agreements differ in little but their names and volumes.

        Raises:
            pydantic.ValidationError: the row was written by an incompatible version.
        """
        parts = spec.get("spec")
        if known is None or not isinstance(parts, dict):
            return cls.model_validate(spec)
        texts = {name: f"{name} {json.dumps(parts[name])}" for name in _SHARED if name in parts}
        shared = {name: known[text] for name, text in texts.items() if text in known}
        found = cls.model_validate({**spec, "spec": {**parts, **shared}})
        for name, text in texts.items():
            known.setdefault(text, getattr(found.spec, name))
        return found


# -- Models of the objectives: indicator, demand curve, applicability, budgeting.
#
# All of them are judged (``slices``). Gateways count the limits of latency at a percentile.


DAY_S: Final = 86_400
MAX_STEPS: Final = 8  # one threshold each; the gateways count at most 8 a stream (SLA-MODEL.md 2)
MAX_VALUE_MS: Final = 60_000  # top of the latency histogram
NoDataPolicy = Literal["good", "bad", "exclude", "bad_if_ours"]
ErrorPolicy = Literal["bad", "exclude"]


class DemandStep(Strict):
    """Up to this offered rate, latency at the percentile stays at or below the value."""

    up_to_iops: float | None = Field(default=None, gt=0)
    """Offered I/Os a second; absent (or .inf) on the last step means any rate."""
    value_ms: float = Field(ge=0.001, le=MAX_VALUE_MS)
    """The promised latency in milliseconds."""

    @field_validator("up_to_iops")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise refuse(f"{shown(value)} is not a number", "Write a rate, or leave it out: any rate")
        return None if value == math.inf else value

    @property
    def threshold_us(self) -> int:
        """The value as gateways compare it."""
        return max(1, round(self.value_ms * 1000))

    @property
    def limit_iops(self) -> float:
        """``up_to_iops`` with infinity spelled out."""
        return math.inf if self.up_to_iops is None else self.up_to_iops


def _rate_text(step: DemandStep) -> str:
    return "any rate (no up_to_iops)" if step.up_to_iops is None else f"{step.up_to_iops:g}"


class Applicability(Strict):
    """A slice that does not fit these is not_applicable: neither good nor bad."""

    min_ios_per_slice: int = Field(default=100, ge=1, le=10**12)
    """Below this many completed I/Os a percentile says little."""
    max_mean_io_kib: float | None = Field(default=None, gt=0, le=1e9)
    """A slice with larger I/Os on average is not judged."""
    min_read_fraction: float | None = Field(default=None, ge=0, le=1)
    """A slice with fewer reads than this share is not judged."""
    above_curve: Literal["not_applicable"] = "not_applicable"
    """What a slice is in which more was asked for than the curve promises."""


class Budgeting(Strict):
    """How the promise is summed up: the share of time slices that must be good."""

    method: Literal["timeslices"] = "timeslices"
    """Time is judged slice by slice."""
    slice_s: Duration = Field(default=60, alias="slice")
    """Length of a slice; it divides a day and is a multiple of the rollup (1m)."""
    target: float = Field(gt=0, lt=1)
    """0.995: of the slices that count, 99.5 % are good. 1 would leave no budget to divide by."""

    @field_validator("slice_s")
    @classmethod
    def _divides_a_day(cls, value: int) -> int:
        if DAY_S % value:
            raise refuse(
                f"{format_duration(value)} does not divide a day, which a slice must",
                "Use 1m, 5m, 10m, 15m, 1h, ... at most 1d",
            )
        return value


class _Base(Strict):
    name: Name
    """Unique in the document."""
    budgeting: Budgeting
    """How much may be missed."""
    applicability: Applicability = Field(default_factory=Applicability)
    """Which slices are judged at all."""
    no_data: NoDataPolicy = "bad_if_ours"
    """What a slice without data is; bad_if_ours: bad unless the storage had no part in it."""
    errors: ErrorPolicy = "bad"
    """Whether an I/O that failed counts as missed (``bad``) or not at all (``exclude``)."""


class _Curve(_Base):
    demand_curve: list[DemandStep] = Field(min_length=1, max_length=MAX_STEPS)
    """What is promised at which rate, the lowest rate first."""

    @model_validator(mode="after")
    def _rising(self) -> _Curve:
        for index, (low, high) in enumerate(
            zip(self.demand_curve, self.demand_curve[1:], strict=False), start=1
        ):
            if high.limit_iops <= low.limit_iops:
                raise refuse(
                    f"{_rate_text(high)} is not above {_rate_text(low)}, that of the step before it",
                    "List the steps from the lowest rate to the highest",
                    key=f"demand_curve[{index}].up_to_iops",
                )
            if high.value_ms < low.value_ms:
                raise refuse(
                    f"{high.value_ms:g} is below {low.value_ms:g}, that of the step before it",
                    "More demand cannot be promised a shorter latency",
                    key=f"demand_curve[{index}].value_ms",
                )
        return self


class LatencyIndicator(Strict):
    """Latency from arrival at the gateway to completion, at a percentile."""

    metric: Literal["latency"]
    """What is measured."""
    percentile: float = Field(ge=50, le=99.99)
    """Of the I/Os of a slice, such as 95."""


class LatencyObjective(_Curve):
    """Judged: at most (1 - percentile) of a slice's I/Os are slower than the curve's value."""

    indicator: LatencyIndicator
    """What is measured."""


class _Metric(Strict):
    metric: Literal["mean_latency", "iops", "throughput", "availability"]
    """What is measured."""


class MeanLatencyObjective(_Curve):
    """The mean latency of a slice's I/Os is at or below the curve's value."""

    indicator: _Metric
    """What is measured."""


class IopsObjective(_Base):
    """At least this many I/Os a second when asked for."""

    indicator: _Metric
    """What is measured."""
    promised_iops: float = Field(gt=0, le=1e9)
    """I/Os a second that it gets when it asks for them."""


class ThroughputObjective(_Base):
    """At least this many MB (10^6 bytes) a second when asked for."""

    indicator: _Metric
    """What is measured."""
    promised_mbps: float = Field(gt=0, le=1e6)
    """MB (10^6 bytes) a second that it gets when it asks for them."""


class AvailabilityObjective(_Base):
    """Some I/O completes within ``outage`` while any is outstanding."""

    indicator: _Metric
    """What is measured."""
    outage: Duration
    """The longest time without a completed I/O while some are outstanding."""


def _metric_of(value: Any) -> str:
    """Tag of the union; an unknown metric is left to the latency model, whose message lists what it knows."""
    if isinstance(value, _Base):
        return str(getattr(value, "indicator").metric)  # noqa: B009 - every subclass declares it
    indicator = value.get("indicator") if isinstance(value, dict) else None
    metric = indicator.get("metric") if isinstance(indicator, dict) else None
    return metric if metric in METRICS else "latency"


METRICS: Final = ("latency", "mean_latency", "iops", "throughput", "availability")
Objective = Annotated[
    Annotated[LatencyObjective, Tag("latency")]
    | Annotated[MeanLatencyObjective, Tag("mean_latency")]
    | Annotated[IopsObjective, Tag("iops")]
    | Annotated[ThroughputObjective, Tag("throughput")]
    | Annotated[AvailabilityObjective, Tag("availability")],
    Discriminator(_metric_of),
]

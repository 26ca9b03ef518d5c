"""Models of the objectives: indicator, demand curve, applicability, budgeting.

Latency at a percentile is judged in this release. The other indicators are validated and stored, so that
documents need no change later; ``Objective.is_judged`` says which is which.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Final, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from sla_server.agreements.fields import Duration, Name, Strict, refuse

DAY_S: Final = 86_400
MAX_STEPS: Final = 8  # one threshold each; the gateways count at most 8 a stream (SLA-MODEL.md 2)
MAX_VALUE_MS: Final = 60_000  # top of the latency histogram
NoDataPolicy = Literal["good", "bad", "exclude", "bad_if_ours"]


class DemandStep(Strict):
    """Up to this offered rate, latency at the percentile stays at or below the value."""

    up_to_iops: float | None = Field(default=None, gt=0)
    """Offered I/Os a second; absent (or .inf) on the last step means any rate."""
    value_ms: float = Field(ge=0.001, le=MAX_VALUE_MS)

    @field_validator("up_to_iops")
    @classmethod
    def _finite(cls, value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise refuse("is not a number")
        return None if value == math.inf else value

    @property
    def threshold_us(self) -> int:
        """The value as gateways compare it."""
        return max(1, round(self.value_ms * 1000))

    @property
    def limit_iops(self) -> float:
        """``up_to_iops`` with infinity spelled out."""
        return math.inf if self.up_to_iops is None else self.up_to_iops


class Applicability(Strict):
    """A slice that does not fit these is not_applicable: neither good nor bad."""

    min_ios_per_slice: int = Field(default=100, ge=1, le=10**12)
    """Below this many completed I/Os a percentile says little."""
    max_mean_io_kib: float | None = Field(default=None, gt=0, le=1e9)
    min_read_fraction: float | None = Field(default=None, ge=0, le=1)
    above_curve: Literal["not_applicable"] = "not_applicable"


class Budgeting(Strict):
    """How the promise is summed up: the share of time slices that must be good."""

    method: Literal["timeslices"] = "timeslices"
    slice_s: Duration = Field(default=60, alias="slice")
    target: float = Field(gt=0, lt=1)
    """0.995: of the slices that count, 99.5 % are good. 1 would leave no budget to divide by."""

    @field_validator("slice_s")
    @classmethod
    def _divides_a_day(cls, value: int) -> int:
        if DAY_S % value:
            raise refuse("the slice does not divide a day", "Use 1m, 5m, 10m, 15m, 1h, ...")
        return value


class _Base(Strict):
    name: Name
    budgeting: Budgeting
    applicability: Applicability = Field(default_factory=Applicability)
    no_data: NoDataPolicy = "bad_if_ours"


class _Curve(_Base):
    demand_curve: list[DemandStep] = Field(min_length=1, max_length=MAX_STEPS)

    @model_validator(mode="after")
    def _rising(self) -> _Curve:
        for index, (low, high) in enumerate(
            zip(self.demand_curve, self.demand_curve[1:], strict=False), start=1
        ):
            if high.limit_iops <= low.limit_iops:
                raise refuse(
                    f"demand_curve[{index}].up_to_iops does not rise",
                    "List the steps from the lowest rate to the highest",
                )
            if high.value_ms < low.value_ms:
                raise refuse(
                    f"demand_curve[{index}].value_ms falls",
                    "More demand cannot be promised a shorter latency",
                )
        return self


class LatencyIndicator(Strict):
    """Latency from arrival at the gateway to completion, at a percentile."""

    metric: Literal["latency"]
    percentile: float = Field(ge=50, le=99.99)


class LatencyObjective(_Curve):
    """Judged: at most (1 - percentile) of a slice's I/Os are slower than the curve's value."""

    indicator: LatencyIndicator


class _Metric(Strict):
    metric: Literal["mean_latency", "iops", "throughput", "availability"]


class MeanLatencyObjective(_Curve):
    """Stored, not judged in this release."""

    indicator: _Metric


class IopsObjective(_Base):
    """Stored, not judged in this release: at least this many I/Os a second when asked for."""

    indicator: _Metric
    promised_iops: float = Field(gt=0, le=1e9)


class ThroughputObjective(_Base):
    """Stored, not judged in this release: at least this many MB (10^6 bytes) a second when asked for."""

    indicator: _Metric
    promised_mbps: float = Field(gt=0, le=1e6)


class AvailabilityObjective(_Base):
    """Stored, not judged in this release: some I/O completes within ``outage`` while any is outstanding."""

    indicator: _Metric
    outage: Duration


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

"""What a report says, as strict immutable models; docs/formats/report.schema.json is made from them.

Times are microseconds UTC (``*_us``), durations seconds (``*_s``), shares 0 to 1. A value that is not known
is null, never 0. Lists that would be long are cut after ``MOST_LISTED``; ``left_out`` says of which, and how
many. A report is kept as the bytes of ``canonical``, so its digest does not depend on who writes it out.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from sla_server.agreements.document import Penalty

SCHEMA: Final = "storage-sla/report/v1"
MOST_LISTED: Final = 1000


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ReportedAgreement(_Part):
    """Whose promise the report is about, as the version says that held last in the period."""

    name: str
    version: int
    priority: str
    provider: str | None
    customer: str | None
    labels: dict[str, str]
    volumes: list[str]
    clients: list[str]
    io: str
    window: str
    """For example ``calendar month (Europe/Berlin)``."""
    service_hours: str
    in_force_from_us: int
    """Start of the first slice that could be judged in the period."""
    in_force_to_us: int
    """The period's end, or when the agreement ended before it."""


class ReportedPeriod(_Part):
    """The time that is reported: [from_us, to_us) in the agreement's own zone."""

    text: str
    kind: Literal["day", "week", "month", "quarter", "year"]
    tz: str
    from_us: int
    to_us: int


class SliceCounts(_Part):
    """Slices by state. ``no_data_ours`` are among ``no_data``, ``inexact`` among good and bad."""

    good: int = 0
    bad: int = 0
    no_data: int = 0
    not_applicable: int = 0
    excluded: int = 0
    no_data_ours: int = 0
    inexact: int = 0


class TimeAccount(_Part):
    """Where the time of the period went. All but ``unplanned_s`` add up to ``all_s``.

    ``unplanned_s`` is the time that counts as bad: bad slices, and those without data that the agreement
    counts so.
    """

    all_s: int
    """From the agreement's beginning in the period to its end, or to now."""
    good_s: int
    bad_s: int
    not_applicable_s: int
    no_data_s: int
    planned_s: int
    """Excused by announced maintenance."""
    outside_service_s: int
    unjudged_s: int
    """In service hours, and of which no slice is stored."""
    unplanned_s: int


class ReportedBudget(_Part):
    """Bad time that the period allows. ``left_ratio`` is negative when overspent, null without a budget."""

    allowed_s: float
    spent_s: int
    left_s: float
    left_ratio: float | None


class DayFigures(_Part):
    """One local day of one objective."""

    day: str
    from_us: int
    to_us: int
    slices: SliceCounts
    bad_s: int
    due_s: int
    compliance: float | None
    coverage: float | None


class ReasonTotal(_Part):
    """Slices that are not good, by why."""

    state: Literal["bad", "no_data", "not_applicable"]
    reason: str
    text: str
    slices: int
    time_s: int


class ReportedObjective(_Part):
    """One objective over the period; what no version at its end has any more is there with what counted."""

    name: str
    is_agreed: bool
    """Whether the version at the end of the period has it."""
    metric: str
    promise: str
    target: float
    """As agreed last."""
    promised: float | None
    """The share of good time that all its versions promised together, each for what it judged; with one
    version the target; null: nothing was judged that counts."""
    is_kept: bool | None
    """Whether the bad time is within what that leaves room for."""
    compliance: float | None
    """good / (good + bad), by time."""
    compliance_without_exclusions: float | None
    """The same as if no maintenance had excused anything; from the figures that are stored of each slice."""
    coverage: float | None
    slices: SliceCounts
    slice_lengths_s: list[int]
    due_s: int
    time: TimeAccount
    budget: ReportedBudget
    reasons: list[ReasonTotal]
    days: list[DayFigures]


class ObjectiveCreditLine(_Part):
    """What one objective has a credit for."""

    objective: str
    target: float
    compliance: float | None
    credit: float


class CreditedPeriod(_Part):
    """One period of the agreement that ends within the report's, or goes on at its end."""

    from_us: int
    to_us: int
    is_over: bool
    version: int
    objectives: list[ObjectiveCreditLine]
    uncapped: float
    credit: float


class ReportedCredits(_Part):
    """By the penalties of the version that held at the end of each of them: no money, shares of a price."""

    penalties: list[Penalty]
    credit_cap: float
    periods: list[CreditedPeriod]
    note: str
    """Why there are none; else empty."""


class ReportedEpisode(_Part):
    """A violation, from the moment the promise was broken until it was kept again."""

    episode_id: str
    objective: str
    opened_us: int
    closed_us: int | None
    in_period_s: int
    worst_ratio: float | None
    """The most misses against those allowed."""
    slices_bad: int
    """Bad slices of the period that it reaches into."""
    cause: Literal["neighbours", "storage", "overcommitted", "elsewhere", "unknown"]
    cause_text: str
    volumes: list[str]
    """Neighbours that were slowed down for it."""


class ReportedSpan(_Part):
    """Slices of one objective, one after the other, that have one state and one reason."""

    objective: str
    from_us: int
    to_us: int
    slices: int
    reason: str
    text: str
    is_ours: bool = False


class WorstSpan(ReportedSpan):
    """Bad slices in a row; the figures of the worst one of them."""

    n: int
    missed: int
    threshold_us: int | None
    measured: float | None


class ReportedMaintenance(_Part):
    """Work that excused slices of the period, or none (``slices`` 0) for want of notice."""

    from_us: int
    to_us: int
    slices: int
    reason: str
    author: str | None
    announced_us: int | None
    """When its document was applied; null for work that is in the agreement itself."""
    had_notice: bool | None
    """Whether it was announced as long before as was agreed; null: nothing was agreed."""


class VolumeThrottling(_Part):
    """What throttles did to one volume, or one group, in the period."""

    volume: str
    throttles: int
    throttled_s: int
    """Time in which at least one was in force; those at once count once."""
    least_cost_per_s: float | None
    ios: int | None
    """I/Os that it completed in the hours in which it was throttled; null: no longer stored."""
    delayed_s: float | None
    """Time for which throttles held its I/Os back in those hours, added up over the I/Os."""


class ReportedThrottling(_Part):
    """What keeping the promise cost others, and what others cost these volumes."""

    others: list[VolumeThrottling]
    others_throttled_s: int
    others_delayed_s: float | None
    own: list[VolumeThrottling]
    own_throttled_s: int


class ReportedChange(_Part):
    """One field that a new version changed."""

    field: str
    before: Any
    after: Any


class ReportedVersion(_Part):
    """A version of the agreement that held in some of the period; ``changes`` to the one before it."""

    version: int
    from_us: int
    to_us: int | None
    applied_by: str
    changes: list[ReportedChange]


class ReportContent(_Part):
    """The report as it was computed; an issued one is this within ``IssuedReport``."""

    schema_name: Literal["storage-sla/report/v1"] = Field(default="storage-sla/report/v1", alias="schema")
    agreement: ReportedAgreement
    period: ReportedPeriod
    as_of_us: int
    """Computed from what was judged and recorded by then."""
    is_preliminary: bool
    preliminary_because: list[str]
    objectives: list[ReportedObjective]
    credits: ReportedCredits
    episodes: list[ReportedEpisode]
    bad: list[WorstSpan]
    missing: list[ReportedSpan]
    inexact: list[ReportedSpan]
    maintenance: list[ReportedMaintenance]
    throttling: ReportedThrottling
    versions: list[ReportedVersion]
    notes: list[str]
    """What the report could not know."""
    left_out: dict[str, int]
    """List to how many entries of it are not shown."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, serialize_by_alias=True)


class RevisedField(_Part):
    """One figure that a revision says otherwise than the document before it."""

    field: str
    before: Any
    after: Any


class IssuedReport(_Part):
    """A report that never changes: what table ``reports`` keeps, one link of the chain of all of them."""

    number: int
    """Counts up from 1 over all reports of a server."""
    report_id: str
    """``erp-gold-2026-10``, and ``erp-gold-2026-10-r1`` of its first revision."""
    revision: int
    revises: str | None
    """The report that this one takes the place of."""
    revised: list[RevisedField]
    issued_us: int
    issued_by: str
    previous: str
    """Digest of the report with the number before; 64 zeros for the first."""
    content: ReportContent


def plain(value: BaseModel) -> dict[str, Any]:
    """As JSON values."""
    return value.model_dump(mode="json", by_alias=True)


def canonical(value: BaseModel) -> bytes:
    """The one way in which a report is written out: keys in order, no spaces, UTF-8."""
    return json.dumps(
        plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest_of(body: bytes) -> str:
    """SHA-256 of those bytes, in hexadecimal."""
    return hashlib.sha256(body).hexdigest()


def report_schema() -> dict[str, Any]:
    """JSON Schema of an issued report; its ``content`` is what ``sla report -o json`` prints of any other."""
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return {"$schema": dialect, **IssuedReport.model_json_schema(by_alias=True)}


def component_schemas() -> dict[str, Any]:
    """``Report`` and ``IssuedReport`` and what they are made of, by name, for ``components`` of OpenAPI.

    Each part is a schema of its own: generators of clients make a class of each, and refuse two of one name.
    """
    found: dict[str, Any] = {}
    for name, model in (("Report", ReportContent), ("IssuedReportContent", IssuedReport)):
        schema = model.model_json_schema(by_alias=True, ref_template="#/components/schemas/{model}")
        found |= schema.pop("$defs", {})
        found[name] = {**schema, "title": name}
    found["IssuedReport"] = {
        "type": "object",
        "required": ["digest", "report"],
        "properties": {
            "digest": {"type": "string", "description": "SHA-256 of the report, written out canonically"},
            "is_copy": {
                "type": "boolean",
                "description": "Names of others are left out; `digest` is that of the whole report.",
            },
            "report": {"$ref": "#/components/schemas/IssuedReportContent"},
        },
    }
    return found

"""Documents the tests of agreements and of the services shell share."""

from __future__ import annotations

from functools import cache
from typing import Final

from sla_server.agreements.document import Agreement
from sla_server.agreements.load import load_documents
from sla_server.agreements.promise import InForce

FULL = """\
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: erp-gold, labels: {customer: acme}}
spec:
  parties: {provider: storage-team, customer: acme, recipients: [oncall, acme-ops]}
  scope: {clients: [host-a], volumes: [vol-17], io: any}     # selectors
  priority: gold
  guarantee: {floor_iops: 500, floor_mbps: 20}
  cap: {max_iops: 20000, burst_iops: 30000, burst_s: 60}
  objectives:
  - name: latency
    indicator: {metric: latency, percentile: 95}
    demand_curve:
    - {up_to_iops: 3000, value_ms: 5}
    - {up_to_iops: 6000, value_ms: 8}
    applicability: {min_ios_per_slice: 100, max_mean_io_kib: 32, min_read_fraction: 0.3}
    budgeting: {method: timeslices, slice: 1m, target: 0.995}
    no_data: bad_if_ours
  window: {type: calendar, period: month, tz: Europe/Berlin}
  service_hours: {calendar: business}
  maintenance: {notice: 7d, max_per_period: 8h}
  penalties: [{below: 0.995, credit: 0.10}, {below: 0.99, credit: 0.25}, {below: 0.95, credit: 0.50}]
  credit_cap: 0.50
"""

ERP: Final = """
apiVersion: storage-sla/v1
kind: SLA
metadata: {name: gold}
spec:
  parties: {provider: team, customer: acme}
  scope: {volumes: [erp]}
  priority: gold
  objectives:
  - name: latency
    indicator: {metric: latency, percentile: 95}
    demand_curve: [{up_to_iops: 1000, value_ms: 20}]
    budgeting: {slice: 1m, target: 0.99}
"""
"""Of one volume, in minutes: what back-tests replay."""


def simple(
    name: str = "gold",
    *,
    volumes: str = "vol-1",
    clients: str = '"*"',
    value_ms: float = 12.0,
    percentile: float = 95.0,
    slice_text: str = "1m",
    target: float = 0.9,
    priority: str = "gold",
    extra: str = "",
) -> str:
    """A small agreement that applies from 10 I/Os a slice on."""
    return f"""\
apiVersion: storage-sla/v1
kind: SLA
metadata: {{name: {name}}}
spec:
  scope: {{volumes: [{volumes}], clients: [{clients}]}}
  priority: {priority}
  objectives:
  - name: latency
    indicator: {{metric: latency, percentile: {percentile}}}
    demand_curve: [{{up_to_iops: 500, value_ms: {value_ms}}}]
    applicability: {{min_ios_per_slice: 10}}
    budgeting: {{slice: {slice_text}, target: {target}}}
{extra}"""


@cache
def agreement(text: str, rollup_s: int = 60) -> Agreement:
    """The one document of a text; it is immutable, and reading it takes 10 ms."""
    (loaded,) = load_documents(text, rollup_s)
    return loaded.agreement


def in_force(text: str, version: int = 1, applied_us: int = 0, rollup_s: int = 60) -> InForce:
    """The one document of a text, in force."""
    return InForce(agreement(text, rollup_s), version, applied_us)


def maintenance_text(
    name: str = "move",
    *,
    scope: str = "agreements: [gold]",
    when: str = 'start: "2026-02-03T10:00", duration: 4h',
    reason: str = "new disks",
) -> str:
    """A Maintenance document."""
    return f"""\
apiVersion: storage-sla/v1
kind: Maintenance
metadata: {{name: {name}}}
spec: {{scope: {{{scope}}}, {when}, reason: {reason}}}
"""


def calendar_text(name: str = "bank", *, holidays: str = "2026-12-25") -> str:
    """A Calendar document: weekdays with an hour for lunch, nine hours a day in all."""
    days = "days: [mon, tue, wed, thu, fri]"
    return f"""\
apiVersion: storage-sla/v1
kind: Calendar
metadata: {{name: {name}}}
spec:
  tz: Europe/Berlin
  hours:
  - {{{days}, from: "08:00", to: "12:00"}}
  - {{{days}, from: "13:00", to: "18:00"}}
  holidays: [{holidays}]
"""

"""What the controller decides: four kinds of value, and the reasons as an enum.

    Decision
    ├── SetCaps         complete set of caps of one gateway; posted to its pair
    ├── RecordThrottle  a row of table ``throttles`` (docs/formats/sql.md), upserted by throttle_id
    ├── RecordDecision  a row of table ``decisions``: what was decided, from which figures (``decision_log``)
    └── RaiseEvent      one event; the process gives it an identity and records it

Pure data, no behaviour beyond defaults. The order of a list of decisions is the order in which to act.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias


class Reason(StrEnum):
    """Why a throttle was set, changed or released."""

    # set or changed
    PROMISE_VIOLATED = "promise-violated"
    PROMISE_AT_RISK = "promise-at-risk"
    RECOVERY = "recovery-step"
    FAIR_SHARE = "fair-share"
    MANUAL = "manual"
    POLICY = "policy"
    AGREED_CAP = "agreed-cap"
    RECURRING_BURST = "recurring-burst"
    POLICY_AHEAD = "policy-ahead"
    # released
    DEMAND_FITS = "demand-fits"
    VICTIM_IDLE = "victim-idle"
    VICTIM_OUT_OF_CURVE = "victim-out-of-curve"
    VICTIM_NOT_APPLICABLE = "victim-not-applicable"
    VICTIM_EXCLUDED = "victim-excluded"
    VICTIM_GONE = "victim-gone"
    UNATTRIBUTED = "unattributed"
    STORAGE_FAULT = "storage-fault"
    MODE_OBSERVE = "mode-observe"
    MANUAL_RELEASE = "manual-release"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"
    # feed-forward switched off
    AHEAD_NO_HELP = "ahead-no-help"
    AHEAD_NO_BURST = "ahead-no-burst"


class DecisionKind(StrEnum):
    """What a row of ``decisions`` is about."""

    # C of a backend, the cost rate that all its throttled volumes together may have
    START = "start"
    DECREASE = "decrease"
    INCREASE = "increase"
    RELEASE = "release"
    PRE_POSITION = "pre-position"
    # findings of a backend's loop
    UNATTRIBUTED = "unattributed"
    INFEASIBLE = "infeasible"
    OSCILLATION = "control-oscillation"
    AHEAD_OFF = "ahead-off"
    # a volume's cap, of whatever source
    CAP_SET = "cap-set"
    CAP_CHANGED = "cap-changed"
    CAP_RELEASED = "cap-released"
    OBSERVED = "observed"
    NOT_EFFECTIVE = "not-effective"


@dataclass(frozen=True, slots=True)
class SetCaps:
    """Complete set of caps of one gateway (message SET_CAPS).

    Attributes:
        caps: [{volume, ops_per_s, bytes_per_s, cost_per_s}], None where a rate is free.
        clients: the same with ``client``: caps of single clients of a volume, beside its own.
        groups: the same with ``group`` and ``volumes`` (weight by name): caps of several volumes together.
        whole_clients: the same with ``client`` alone: caps of clients over all their volumes.
    """

    gateway_id: str
    gen: int
    lease_us: int
    caps: list[dict[str, Any]]
    clients: list[dict[str, Any]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)
    whole_clients: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RecordThrottle:
    """One row of table ``throttles``, complete."""

    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RecordDecision:
    """One row of table ``decisions``, complete."""

    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RaiseEvent:
    """One event.

    Attributes:
        kind: violation-opened, violation-closed, throttle-set, throttle-released, throttle-not-effective,
            unattributed, infeasible, control-oscillation, neighbour-out-of-reach,
            storage-fault or storage-recovered.
        severity: info, warning or critical.
        element: what it is about: "sla", "volume", "backend" or "gateway".
        subject: its name; an agreement's objective is "agreement/objective".
        details: figures for machines.
    """

    kind: str
    severity: str
    element: str
    subject: str
    text: str
    details: dict[str, Any] = field(default_factory=dict)


Decision: TypeAlias = SetCaps | RecordThrottle | RecordDecision | RaiseEvent

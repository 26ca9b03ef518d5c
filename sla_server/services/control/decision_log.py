"""Decisions as rows that stay: what ``sla why`` answers from (table ``decisions``, docs/formats/sql.md).

Each change of C of a backend, each cap that is set, changed or released, and each finding of a loop (no
effect, infeasible, oscillation) becomes one row with the figures it rested on. A cap's row is completed when
its gateways confirm it and when its rate was measured.

Bounded: a backend has ``BURST_ROWS`` rows at once and ``ROWS_PER_S`` from then on; what exceeds that is left
out, and the next row of that backend says how many were (``figures.left_out``). What did not change makes
no row: its callers record changes only.

State: one account a backend, and which rows of this tick wait. Pure: no clock. Changed only by the
controller's one thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pmdaemon.wire.rates import Rates
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.decisions import DecisionKind, Reason, RecordDecision
from sla_server.services.control.loop_step import LoopStep
from sla_server.services.control.scopes import PromiseScope
from sla_server.services.control.sharing import Neighbour, cost_of, count_of
from sla_server.services.control.targets import client_of
from sla_server.services.control.victims import Victim

ROWS_PER_S: Final = 5.0
"""A loop changes C once in a second at most and has a handful of neighbours; five a second last for hours."""
BURST_ROWS: Final = 1_000
"""Caps of a whole backend set at once: a policy, or a mode that was switched."""
MOST_USERS: Final = 12
"""Volumes listed in a row, those with the most use first; the largest five cause what there is to explain."""
MOST_VICTIMS: Final = 100
"""Promises listed in a row that the step helps; those at risk on one backend at once are a few."""
MOST_TEXT: Final = 600
"""Characters of a row's text: a step's names all volumes of a large backend, and all their caps have it."""
_NAMESPACE: Final = uuid.UUID("b7c5d7a4-3f0d-5b1e-8a52-0c7c2f6a9d31")


@dataclass(slots=True)
class _Account:
    """Rows that a backend may still have now; it fills with time."""

    rows: float = BURST_ROWS
    filled_us: int = 0
    left_out: int = 0


@dataclass(slots=True)
class DecisionLog:
    """See the module.

    Attributes:
        mode_of: of a backend and an agreement; each may have its own.
        server: the node of this server, for ``figures.server``, if it is one of several; "": it is alone.
        left_out: decisions that made no row.
    """

    mode_of: Callable[[str, str], str] = lambda _backend, _agreement: "observe"
    server: str = ""
    left_out: int = 0
    _accounts: dict[str, _Account] = field(default_factory=dict)
    _rows: list[RecordDecision] = field(default_factory=list)

    def add(
        self,
        kind: DecisionKind,
        unix_us: int,
        *,
        backend: str = "",
        volume: str = "",
        victim: str = "",
        reason: str = "",
        text: str = "",
        figures: Callable[[], dict[str, Any]],
    ) -> dict[str, Any] | None:
        """Note a decision; returns its row, or None if the backend has too many (``figures`` not called)."""
        account = self._accounts.setdefault(backend, _Account(filled_us=unix_us))
        gained = max(unix_us - account.filled_us, 0) * 1e-6 * ROWS_PER_S  # a clock set back gains nothing
        account.rows, account.filled_us = min(account.rows + gained, BURST_ROWS), unix_us
        if account.rows < 1:
            account.left_out += 1
            self.left_out += 1
            return None
        account.rows -= 1
        noted = figures()
        if self.server:
            noted["server"] = self.server
        if account.left_out:
            noted["left_out"], account.left_out = account.left_out, 0
        name = "\0".join((kind, backend, volume, victim, str(noted.get("throttle_id", "")), str(unix_us)))
        row = {
            "decision_id": str(uuid.uuid5(_NAMESPACE, name)),
            "at_us": unix_us,
            "kind": kind.value,
            "reason": reason,
            "mode": "observe"
            if kind is DecisionKind.OBSERVED
            else self.mode_of(backend, victim.partition("/")[0]),
            "backend": backend,
            "volume": volume,
            "victim": victim,
            "text": text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 1] + "\u2026",
            "figures": noted,
        }
        self._rows.append(RecordDecision(dict(row)))
        return row

    def confirm(self, row: dict[str, Any], confirmed_us: int | None, seen_us: int | None) -> None:
        """Complete a cap's row, once for each time; the whole row is sent, so that none is ever partial."""
        proof = {"confirmed_us": confirmed_us, "seen_us": seen_us}
        # A time before the row is that of the rate before: nothing was sent yet.
        later = {key: at_us for key, at_us in proof.items() if at_us and at_us >= row["at_us"]}
        if any(not row.get(key) for key in later):
            row.update(later)
            self._rows.append(RecordDecision(dict(row)))

    def take(self) -> list[RecordDecision]:
        """What was noted since the last call, in order."""
        rows, self._rows = self._rows, []
        return rows


@dataclass(frozen=True, slots=True)
class LoopBefore:
    """State of a loop before a step, which a release throws away."""

    active: bool
    allowed: float
    managed: dict[str, Neighbour]
    lead: Victim | None
    victims: tuple[str, ...]

    @classmethod
    def of(cls, control: BackendControl) -> LoopBefore:
        """Of a loop now."""
        names = tuple(sorted("/".join(key) for key in control.victims))
        return cls(control.active, control.allowed, dict(control.managed), control.lead, names)


def step_kind(before: LoopBefore, control: BackendControl, step: LoopStep) -> DecisionKind:
    """What a step that changed C was."""
    if step.reason is Reason.UNATTRIBUTED:
        return DecisionKind.UNATTRIBUTED
    if not control.active:
        return DecisionKind.RELEASE
    if not before.active:
        return DecisionKind.START
    return DecisionKind.INCREASE if control.allowed > before.allowed else DecisionKind.DECREASE


def loop_figures(
    before: LoopBefore,
    control: BackendControl,
    neighbours: Mapping[str, Neighbour],
    shares: Mapping[str, float],
    lead: Victim | None,
    scope: PromiseScope | None,
    helped: Collection[str] = (),
) -> dict[str, Any]:
    """What a step of a backend's loop rested on; rates in cost units a second.

    Args:
        before: the loop before the step.
        control: the loop after it.
        neighbours: all volumes of the backend.
        shares: what each throttled volume gets after it.
        lead: the promise that asked.
        scope: that promise on this backend.
        helped: promises that were at risk, as AGREEMENT/OBJECTIVE, beside those that ever asked.
    """
    managed = control.managed or before.managed
    asked = {"/".join(key) for key in control.victims} if control.active else set(before.victims)
    used = cost_of(neighbours)
    listed = sorted(neighbours.values(), key=lambda n: (-n.cost_per_s, n.volume))[:MOST_USERS]
    figures: dict[str, Any] = {
        "c_before": round(before.allowed if before.active else control.start, 1) or None,
        "c_after": round(control.allowed, 1) if control.active else None,
        "c_start": round(control.start, 1) if control.active else None,
        "backend_cost_per_s": round(used, 1),
        "volumes": count_of(neighbours),
        "throttled": sorted(managed)[:MOST_USERS],
        "victims": sorted(asked.union(helped))[:MOST_VICTIMS],
        "use": [_use(n, used, n.volume in managed, shares.get(n.volume)) for n in listed],
    }
    if lead is not None:
        figures["promise"] = _promise(lead, scope)
    return figures


def _use(n: Neighbour, used: float, is_managed: bool, cap: float | None) -> dict[str, Any]:
    return {
        "volume": n.volume,
        "cost_per_s": round(n.cost_per_s, 1),
        "share_ratio": round(n.cost_per_s / used, 4) if used else 0.0,
        "priority": n.priority.label,
        "floor_cost_per_s": round(n.floor, 1),
        "queueing": n.queueing,
        "throttled": is_managed,
        "cap_cost_per_s": None if cap is None else round(cap, 1),
    }


def _promise(lead: Victim, scope: PromiseScope | None) -> dict[str, Any]:
    signal = lead.signal
    figures: dict[str, Any] = {
        "u": round(signal.u, 4),
        "r": round(signal.r, 4),
        "latency_us": round(signal.latency_us),
        "threshold_us": signal.threshold_us,
        "windows": signal.windows,
        "risky": signal.risky,
        "over": signal.over,
        "offered_iops": round(signal.offered_iops, 1),
        "excused_ratio": round(signal.excused_ratio, 4),
        "stall_us": round(signal.stall_us),
        "failed_ratio": round(signal.failed_ratio, 4),
        "urgency": round(lead.urgency, 3),
        "priority": lead.priority.label,
        "volumes": sorted(lead.volumes)[:MOST_USERS],
    }
    if scope is not None:
        figures["metric"] = scope.promise.metric
        figures["percentile"] = scope.promise.percentile
        curve = scope.promise.curve  # of a promised rate there is none
        end = curve[-1].up_to_iops if curve else float("inf")
        figures["curve_end_iops"] = end if end < float("inf") else None
    return figures


def rates_figures(rates: Rates | None) -> dict[str, float] | None:
    """The rates that are set, by the names of table ``throttles``; None for none at all."""
    if rates is None:
        return None
    return {
        name: round(value, 1)
        for name in ("cost_per_s", "ops_per_s", "bytes_per_s")
        if (value := getattr(rates, name)) is not None
    }


def observed_figures(throttle_id: str, cap: float, neighbour: Neighbour) -> dict[str, Any]:
    """What mode enforce would have set for one volume or client; rates in cost units a second."""
    return {
        "throttle_id": throttle_id,
        "source": "control",
        "before": None,
        "after": {"cost_per_s": round(cap, 1)},
        "use_cost_per_s": round(neighbour.cost_per_s, 1),
        "floor_cost_per_s": round(neighbour.floor, 1),
        **({"client": client} if (client := client_of(neighbour.volume)) else {}),
    }

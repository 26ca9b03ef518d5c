"""Victims: promises with streams on a backend, as its loop sees them.

Pure values; the inventory makes them from the windows of their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from sla_server.agreements.promise import Priority
from sla_server.agreements.verdicts import DELIVERED_RATIO
from sla_server.services.control.decisions import Reason
from sla_server.services.control.sharing import Neighbour, gives_way
from sla_server.services.control.targets import named
from sla_server.services.control.verdicts import Signal

Key = tuple[str, str]


class Need(StrEnum):
    """What a promise asks of the loop."""

    UNKNOWN = "unknown"  # no window yet under the caps in force
    AT_RISK = "at-risk"
    HOLD = "hold"  # neither at risk nor clear: the deadband
    CLEAR = "clear"
    IDLE = "idle"
    OUT_OF_CURVE = "out-of-curve"
    NOT_APPLICABLE = "not-applicable"  # its I/Os are not such as the promise is about
    EXCLUDED = "excluded"  # in maintenance, or outside service hours
    GONE = "gone"  # no statistics for a lease


TOLD_RATIO: Final = 0.1
"""Of the I/Os: below it, that the gateway's host was busy is not worth a word."""
ASKS_NOTHING: Final = frozenset((Need.IDLE, Need.OUT_OF_CURVE, Need.NOT_APPLICABLE, Need.EXCLUDED, Need.GONE))


@dataclass(frozen=True, slots=True)
class Victim:
    """One promise with streams on this backend, as the loop sees it.

    Attributes:
        fresh: it had statistics recently; what they said still holds.
    """

    key: Key
    priority: Priority
    urgency: float
    need: Need
    signal: Signal
    volumes: frozenset[str]
    fresh: bool = True
    metric: str = "latency"

    @property
    def name(self) -> str:
        """agreement/objective."""
        return "/".join(self.key)


_OVER: Final = (
    (Need.OUT_OF_CURVE, Reason.VICTIM_OUT_OF_CURVE, "{names}: the demand is above the curve"),
    (Need.EXCLUDED, Reason.VICTIM_EXCLUDED, "{names}: in maintenance or outside service hours"),
    (
        Need.NOT_APPLICABLE,
        Reason.VICTIM_NOT_APPLICABLE,
        "{names}: the I/Os are none that the promise is about",
    ),
    (Need.IDLE, Reason.VICTIM_IDLE, "{names}: no I/O for {idle_s}"),
)
"""Why a promise asks for nothing, the reason of most weight first."""
_GONE: Final = "{names}: no statistics, or no longer in force"


def why_over(waiting: Sequence[Victim], helped: Set[Key], idle_s: float) -> tuple[Reason, str]:
    """Why none of those that were helped asks for anything now: the reason of most weight, and what each is.

    Args:
        waiting: those of them that are known.
        helped: all of them.
        idle_s: from when on one is idle.
    """
    found = [(reason, text, [v.name for v in waiting if v.need is need]) for need, reason, text in _OVER]
    known = {v.key for v in waiting if v.need is not Need.GONE}
    found.append((Reason.VICTIM_GONE, _GONE, ["/".join(key) for key in helped - known]))
    found = [each for each in found if each[2]]
    text = "; ".join(text.format(names=named(names), idle_s=f"{idle_s:g} s") for _, text, names in found)
    return (found[0][0], text) if found else (Reason.VICTIM_GONE, "no promise is helped any more")


def rank_of(victim: Victim) -> tuple[int, float, float]:
    return int(victim.priority), victim.urgency, victim.signal.u


def helped_with(lead: Victim, at_risk: Iterable[Victim], managed: Mapping[str, Neighbour]) -> list[Victim]:
    """Others at risk that are helped by what is slowed down for the lead: none of it is theirs."""
    return [
        each
        for each in at_risk
        if each is not lead
        and each.volumes.isdisjoint(managed)
        and any(gives_way(each.priority, n) for n in managed.values())
    ]


def figures_of(victim: Victim) -> str:
    """What its windows say, in words that fit its indicator."""
    signal, metric = victim.signal, victim.metric
    limit_ms, aside = (signal.threshold_us or 0) / 1000, ""
    if signal.excused_ratio >= TOLD_RATIO:
        # Its gateway wanted to run and was kept waiting: see ``signal``.
        aside = f", {signal.excused_ratio:.0%} of the I/Os left out: the gateway's own host was busy"
    if metric in ("iops", "throughput"):
        most = 1 - DELIVERED_RATIO
        short = f"{min(signal.u * most, 1.0):.1%} of what was asked for, as far as it was promised"
        return f"{victim.name} at {short}, not delivered, {most:.0%} allowed{aside}"
    if metric == "availability":
        stall = f"{signal.stall_us / 1e6:.1f} s without completion of {limit_ms / 1000:g} s allowed"
        return f"{victim.name} at {stall}, {signal.failed_ratio:.1%} of the I/Os failed{aside}"
    measured = f"{signal.latency_us / 1000:.1f} ms of {limit_ms:g} ms allowed"
    if metric == "mean_latency":
        return f"{victim.name} at a mean latency of {measured}{aside}"
    return f"{victim.name} at {measured} ({signal.u:.2f} times the misses allowed{aside})"

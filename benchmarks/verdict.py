"""Whether the demonstration's cycle closed, and how well: figures, conditions, goals, and their words.

*Conditions* say that the cycle closed: the exit status rests on them. They are generous, so that a busy
laptop passes: what they ask for is there or not there, by a factor. *Goals* (``targets.toml``) say how well;
a run prints its figures beside them, and only ``make bench-demo`` judges.

Pure functions over the load generator's own records and what the demonstration noted; seconds are of the
monotonic clock.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from benchmarks import harness
from benchmarks.fio_load import FioLoad
from tests.support.load import Load, Timed, between, percentile_ms
from tests.support.stage import PROMISE_MS

MOST_BAD_RATIO: Final = 0.5  # held means: more often than not; without control every second is bad
LEAST_KEPT_RATIO: Final = (
    0.25  # its agreed floor is 0.15 of its free rate: below a quarter it is at the floor
)


@dataclass(frozen=True)
class Figures:
    """What one run measured; None where it did not happen.

    Attributes:
        violation_ratio: gold's p95 over its promise while nobody slowed the neighbour down.
        restore_s: from enforcing to the end of the first of two good seconds.
        bad_seconds_ratio: of the seconds after that, those with p95 over the promise.
        neighbour_kept_ratio: the neighbour's rate after that, of its rate without control.
        release_s: from gold's stop to no throttle in force.
        throttled: the server showed a throttle of the neighbour, confirmed by its gateway.
        policy_version: in force at the end.
        io_errors: failed I/Os of both clients.
        policy_s: ``sla policy run``, from its start to its end.
        spark_start_s: of it, until Spark was there.
    """

    violation_ratio: float
    restore_s: float | None
    bad_seconds_ratio: float
    neighbour_kept_ratio: float
    release_s: float | None
    throttled: bool
    policy_version: int | None
    io_errors: int
    policy_s: float | None = None
    spark_start_s: float | None = None


class Condition(NamedTuple):
    """One thing that must be true for the cycle to be closed."""

    name: str
    holds: bool
    wanted: str
    seen: str
    look: str


def conditions(f: Figures) -> list[Condition]:
    """All conditions, in the order of the cycle."""
    back = "never" if f.restore_s is None else f"after {f.restore_s:.1f} s"
    free = "never" if f.release_s is None else f"after {f.release_s:.1f} s"
    policy = "none" if f.policy_version is None else f"version {f.policy_version}"
    return [
        Condition(
            "broken",
            f.violation_ratio > 1,
            "the greedy neighbour breaks gold's promise while the server only observes",
            f"gold's p95 was {f.violation_ratio:.2f} of the promise",
            "disk.log and gateway-b.log: does the neighbour reach the disk?",
        ),
        Condition(
            "throttled",
            f.throttled,
            "the server slows the neighbour down, and the neighbour's gateway confirms it",
            "a confirmed throttle" if f.throttled else "no confirmed throttle",
            "`sla get events` and `sla get throttles`; server.log",
        ),
        Condition(
            "held_again",
            f.restore_s is not None,
            "the promise holds for two seconds on end after enforcing",
            back,
            "`sla get throttles`: is there a cap, and is it `seen`? other load on this machine (`uptime`)",
        ),
        Condition(
            "stays_held",
            f.bad_seconds_ratio <= MOST_BAD_RATIO,
            f"after that at most {MOST_BAD_RATIO:.0%} of the seconds are over the promise",
            f"{f.bad_seconds_ratio:.1%}",
            "the table above: do gold's p95 and the cap move together? other load on this machine (`uptime`)",
        ),
        Condition(
            "not_starved",
            f.neighbour_kept_ratio >= LEAST_KEPT_RATIO,
            f"the neighbour keeps at least {LEAST_KEPT_RATIO:.0%} of its rate without control",
            f"{f.neighbour_kept_ratio:.1%}",
            "`sla get events`: the reason of each decrease says what the gateway saw",
        ),
        Condition(
            "released",
            f.release_s is not None,
            "the neighbour is released after gold has stopped",
            free,
            "`sla get throttles`; server.log",
        ),
        Condition(
            "policy",
            f.policy_version is not None,
            "the policy job publishes a policy and the server puts it in force",
            policy,
            "the job's output above; `sla get policies`",
        ),
        Condition(
            "no_io_errors",
            f.io_errors == 0,
            "no I/O of the two clients fails",
            f"{f.io_errors} failed",
            "gateway-a.log, gateway-b.log and disk.log",
        ),
    ]


def summary(f: Figures) -> dict[str, Any]:
    """The figures, the names of the conditions that do not hold, and ``ok``: the cycle closed."""
    failed = [each.name for each in conditions(f) if not each.holds]
    rounded = {
        name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(f).items()
    }
    return {**rounded, "failed": failed, "ok": not failed}


def told(f: Figures, logs: str) -> str:
    """The verdict in words: each condition, the figures beside their goals, what to look at.

    Args:
        f: figures.
        logs: where the logs are.
    """
    lines = ["did the cycle close?"]
    for each in conditions(f):
        lines.append(f"  {'yes' if each.holds else 'NO ':3}  {each.wanted}: {each.seen}")
        if not each.holds:
            lines.append(f"       look at {each.look}")
    failed = [each.name for each in conditions(f) if not each.holds]
    lines += ["", "how well? (goals are judged by `make bench-demo` on a quiet machine, not here)"]
    values = {name: float(value) for name, value in asdict(f).items() if value is not None}
    for row in harness.rows_for("demo", values):
        sign = "at least" if row["direction"] == "min" else "at most"
        value = "never" if row["value"] is None else f"{row['value']:.2f}"
        goal = "" if row["target"] is None else f" (goal: {sign} {row['target']:g})"
        lines.append(f"  {value:>6} {row['unit']:6} {row['goal']}{goal}")
    lines.append("")
    lines.append(
        f"the cycle did NOT close: {', '.join(failed)}; logs are in {logs}" if failed else "the cycle closed"
    )
    return "\n".join(lines)


# The figures.


def rate(load: Load | FioLoad, start_s: float, end_s: float) -> float:
    """Completed I/Os a second in [start_s, end_s)."""
    span_s = end_s - start_s
    return sum(start_s <= io.end_s < end_s for io in load.done) / span_s if span_s > 0 else 0.0


def keeps(records: list[Timed], start_s: float, end_s: float) -> bool | None:
    """Whether p95 of the I/Os due in [start_s, end_s) keeps the promise; None without any."""
    p95 = percentile_ms(between(records, start_s, end_s), 95)
    return None if p95 is None else p95 <= PROMISE_MS


def time_to_restore(load: Load, enforce_s: float, end_s: float) -> float | None:
    """Seconds from enforcing to the end of the first second that kept the promise, as the next did."""
    step_s = 0.25
    start_s = enforce_s
    records = between(load.done + load.hung, enforce_s, end_s)
    while start_s + 2 <= end_s:
        if keeps(records, start_s, start_s + 1) and keeps(records, start_s + 1, start_s + 2):
            return start_s + 1 - enforce_s
        start_s += step_s
    return None


def bad_seconds_ratio(load: Load, start_s: float, end_s: float) -> float:
    """Share of whole seconds in [start_s, end_s) whose p95 was over the promise; 1.0 for no whole second.

    I/Os that were never answered count as over it, and so does a second without any: the load never pauses.
    """
    kept, records = [], load.done + load.hung
    while start_s + 1 <= end_s:
        kept.append(keeps(records, start_s, start_s + 1))
        start_s += 1
    return 1 - kept.count(True) / len(kept) if kept else 1.0

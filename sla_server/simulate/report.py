"""A simulation's result as rows, CSV, JSON and sentences. Pure; ``page`` makes HTML of it.

CSV has a row for each (mode, agreement's objective, volume or client); a figure that does not apply is empty.
JSON has the same names, with ``schema`` 1. Latencies are in ms, rates a second, ratios 0..1.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from sla_server.events import catalogue
from sla_server.services.control.targets import client_of, volume_of
from sla_server.simulate.figures import ModeFigures, PromiseFigures, VolumeFigures
from sla_server.simulate.run import Plan

SCHEMA: Final = 1
NAMES_MAX: Final = 200
FEW: Final = 20
"""With more promises than this, those that were always kept have no sentence."""
FINDINGS: Final = (
    "storage-fault", "infeasible", "unattributed", "control-oscillation", "throttle-not-effective",
)  # fmt: skip
PROMISE_FIELDS: Final = (
    "ios", "latency_ms", "thresholds_ms", "percentile", "judged_s", "bad_s", "above_s", "excluded_s",
    "compliance", "coverage", "metric", "promised", "measured", "unit",
)  # fmt: skip
VOLUME_FIELDS: Final = (
    "priority", "ios", "iops", "bytes_per_s", "p95_ms", "kept_ratio", "floor_cost", "least_cost",
    "changes", "turns", "turns_a_minute", "below_floor",
)  # fmt: skip
COLUMNS: Final = ("mode", "what", "name", *dict.fromkeys((*PROMISE_FIELDS, *VOLUME_FIELDS)))


@dataclass(frozen=True)
class Result:
    """A plan and what came of it in each mode that was run."""

    plan: Plan
    modes: Sequence[ModeFigures]

    def mode(self, name: str) -> ModeFigures | None:
        """The figures of a mode, if it was run."""
        return next((each for each in self.modes if each.mode == name), None)


def _fields(item: PromiseFigures | VolumeFigures, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def _names(target: str) -> dict[str, str]:
    """A target by its names; without the client for a whole volume."""
    client = client_of(target)
    return {"volume": volume_of(target), **({"client": client} if client else {})}


def as_json(result: Result) -> dict[str, Any]:
    """For programs."""
    plan = result.plan
    return {
        "schema": SCHEMA,
        "loads": plan.title,
        "seconds": plan.seconds,
        "spans": [list(span) for span in plan.spans],
        "seed": plan.seed,
        "poll_interval_s": plan.settings.poll_interval_s,
        "lag_s": plan.lag_s,
        "start_unix_us": plan.start_unix_us,
        "notes": list(plan.notes),
        "devices": {name: device.model_dump() for name, device in plan.devices.items()},
        "faults": [fault.model_dump() for fault in plan.faults],
        "modes": [
            {
                "mode": each.mode,
                "agreements": [
                    {
                        "agreement": p.sla,
                        "objective": p.objective,
                        **_fields(p, PROMISE_FIELDS),
                        "slices": dict(p.slices),
                    }
                    for p in each.promises
                ],
                "volumes": [
                    {
                        "volume": v.volume,
                        **_fields(v, VOLUME_FIELDS),
                        "caps": [{"at_s": at, "cost_per_s": cost} for at, cost in v.caps],
                    }
                    for v in each.volumes
                ],
                "clients": [
                    {
                        **_names(v.volume),
                        **_fields(v, VOLUME_FIELDS),
                        "caps": [{"at_s": at, "cost_per_s": cost} for at, cost in v.caps],
                    }
                    for v in each.clients
                ],
                "events": dict(each.events),
                "would_throttle": [
                    {**_names(target), "victim": victim, "times": times}
                    for (target, victim), times in each.would.items()
                ],
                "left_out": each.left_out,
            }
            for each in result.modes
        ],
    }


def as_csv(result: Result) -> str:
    """For spreadsheets."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for each in result.modes:
        for promise in each.promises:
            row = _fields(promise, PROMISE_FIELDS)
            row["thresholds_ms"] = " ".join(f"{value:g}" for value in promise.thresholds_ms)
            writer.writerow({"mode": each.mode, "what": "agreement", "name": promise.name, **row})
        for found in each.users:
            what = "client" if client_of(found.volume) else "volume"
            row = {"mode": each.mode, "what": what, "name": found.volume}
            writer.writerow({**row, **_fields(found, VOLUME_FIELDS)})
    return text.getvalue()


def promised_text(p: PromiseFigures) -> str:
    """What is promised, for people."""
    if p.promised is not None:
        return f"{p.promised:g} {p.unit}"
    limits = " / ".join(f"{value:g}" for value in p.thresholds_ms)
    if p.metric == "availability":
        return f"no stall of {p.thresholds_ms[0] / 1e3:g} s"
    return f"mean {limits} ms" if p.percentile is None else f"p{p.percentile:g} {limits} ms"


def headline(result: Result) -> list[str]:
    """What was simulated, a line each."""
    plan = result.plan
    spans = "" if len(plan.spans) == 1 else f" in {len(plan.spans)} parts, each from an idle start"
    lines = [f"{plan.title}: {plan.seconds:g} s{spans}, seed {plan.seed}"]
    lines += [f"device {name}: {device.text}" for name, device in plan.devices.items()]
    lines += [fault.text for fault in plan.faults]
    return lines


def verdicts(result: Result) -> list[str]:
    """What the figures say, in sentences."""
    off, observe, enforce = (result.mode(name) for name in ("off", "observe", "enforce"))
    lines = []
    names = ", ".join(user.volume for user in result.modes[0].users)
    for promise in result.modes[0].promises:
        if not promise.ios:
            lines.append(f"{promise.name}: no I/O in its scope; volumes are {_short(names)}")
        if promise.excluded_s:
            lines.append(
                f"{promise.name}: nothing is promised in {promise.excluded_s} of its "
                f"{promise.excluded_s + promise.judged_s + promise.above_s} seconds with I/O "
                f"({promise.excuse}); the simulation begins {_begins(result.plan)}"
            )
    if observe is not None:
        for (volume, victim), times in observe.would.items():
            lines.append(f"observe would have begun to slow down {volume} for {victim} {_times(times)}")
    if off is not None and enforce is not None:
        for before, after in zip(off.promises, enforce.promises, strict=True):
            is_news = len(off.promises) <= FEW or before.bad_s or after.bad_s
            if after.judged_s and is_news:
                lines.append(
                    f"enforce: {after.name} had {_seconds(after.bad_s)} of {after.judged_s}, "
                    f"and {before.bad_s} without control"
                )
        for volume_figures in enforce.users:
            if volume_figures.caps and volume_figures.kept_ratio is not None:
                lines.append(
                    f"enforce: {volume_figures.volume} kept {volume_figures.kept_ratio:.0%} of its "
                    f"throughput; its cap turned {_times(volume_figures.turns)} "
                    f"(at most {volume_figures.turns_a_minute} in a minute)"
                )
    for each in result.modes:
        for kind in FINDINGS:
            if each.events.get(kind):
                text = each.texts.get(kind) or catalogue.KINDS[kind].meaning.rstrip(".")
                lines.append(f"{each.mode}: {text} (event {kind}, {_times(each.events[kind])})")
    return lines


def _seconds(number: int) -> str:
    return f"{number} bad second{'' if number == 1 else 's'}"


def _begins(plan: Plan) -> str:
    at_s = plan.start_unix_us / 1e6 + (plan.spans[0][0] if plan.spans else 0)
    return f"{datetime.fromtimestamp(at_s, UTC):%A %H:%M} UTC"


def _short(text: str) -> str:
    return text if len(text) <= NAMES_MAX else f"{text[:NAMES_MAX]}..."


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"

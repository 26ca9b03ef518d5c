"""Figures of delivery as Prometheus text, which the application server adds to its own.

Pure. Source: E2 (the fill of the reserves is a figure); the text format of Prometheus, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FILE = "delivery.prom"


def render(
    recipients: Iterable[Mapping[str, Any]],
    reserves: Mapping[str, float],
    queues: Mapping[str, float],
    counters: Mapping[str, int],
) -> str:
    """The file.

    Args:
        recipients: rows of ``delivery_state``.
        reserves: name of each to its share in use.
        queues: likewise.
        counters: events taken, by what became of them.
    """
    rows = list(recipients)
    lines: list[str] = []

    def family(name: str, kind: str, about: str, label: str, values: Iterable[tuple[str, float]]) -> None:
        lines.extend((f"# HELP sla_events_{name} {about}", f"# TYPE sla_events_{name} {kind}"))
        lines.extend(f'sla_events_{name}{{{label}="{key}"}} {value:g}' for key, value in values)

    family("reserve_ratio", "gauge", "Share of a process's reserve in use.", "reserve", reserves.items())
    family("queue_ratio", "gauge", "Share of a queue of events in use.", "queue", queues.items())
    family("taken_total", "counter", "Events taken from the reserves.", "as", counters.items())
    for key, name, kind, about in (
        ("waiting", "waiting", "gauge", "Events that a recipient has not passed."),
        ("attempt", "attempts", "gauge", "Tries of what is under way to a recipient."),
        ("confirmed", "confirmed_total", "counter", "Notices that a recipient has confirmed."),
        ("dead_letters", "dead_letters_total", "counter", "Notices that were given up."),
    ):
        family(name, kind, about, "recipient", [(row["name"], row[key]) for row in rows])
    return "\n".join(lines) + "\n"

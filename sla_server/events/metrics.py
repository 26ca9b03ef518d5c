"""Figures of delivery as Prometheus text, which the application server adds to its own.

Pure. Source: E2 (the fill of the reserves is a figure); the text format of Prometheus, version 0.0.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

FILE = "delivery.prom"


def figures_of(pair: Mapping[str, Any]) -> dict[str, float]:
    """Figures of the status of a pair."""
    return {
        "connected": float(pair["mirroring"] and pair["keeping"]),
        "lost": float(pair["state"] == "lost"),
        "behind": float(pair["behind"]),
        "kept": float(pair["kept"]),
        "store_ratio": float(pair["store_fullness"]),
        "taken_over": float(pair["taken_over"]),
    }


def render(
    recipients: Iterable[Mapping[str, Any]],
    reserves: Mapping[str, float],
    queues: Mapping[str, float],
    counters: Mapping[str, int],
    pair: Mapping[str, Any] | None = None,
) -> str:
    """The file.

    Args:
        recipients: rows of ``delivery_state``.
        reserves: name of each to its share in use.
        queues: likewise.
        counters: events taken, by what became of them.
        pair: status of the cooperating pair; None without one.
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
    if pair is not None:
        about = "The partner: connected, lost, our events that it does not have, its events here."
        family("partner", "gauge", about, "figure", figures_of(pair).items())
    return "\n".join(lines) + "\n"

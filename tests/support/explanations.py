"""Facts that explanations are made of."""

from __future__ import annotations

from typing import Any

PROMISE: dict[str, Any] = {
    "sla": "erp-gold",
    "objective": "latency",
    "priority": "gold",
    "metric": "latency",
    "percentile": 95.0,
    "curve": [{"up_to_iops": 150.0, "value_ms": 12.0}],
    "state": "ok",
    "live": None,
    "slice": None,
    "episode": None,
    "last_episode": None,
}
"""A promise that is kept."""

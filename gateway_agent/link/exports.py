"""What a REGISTER says of all exports: those of the sources, with the labels of the agent's file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gateway_agent.sources.base import StatisticsSource

VolumeLabels = Mapping[str, Mapping[str, str]]
"""Volume to its labels; one that is not named has none."""


def exports_of(sources: Iterable[StatisticsSource], labels: VolumeLabels) -> list[dict[str, Any]]:
    """One a volume; of two sources that have it, the later one's."""
    exports = {export["volume"]: export for source in sources for export in source.exports()}
    return [
        {**export, "labels": dict(labels[volume])} if labels.get(volume) else export
        for volume, export in exports.items()
    ]

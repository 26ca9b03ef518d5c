"""What the agent's file says of caps in a data plane: of one volume, and of several together.

Parts of ``config.AgentConfig``, which names the plane of each volume.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from gateway_agent.host_config import Name, StaticCap
from pmdaemon.runtime.config import StrictModel
from pmdaemon.wire.messages.plane_sets import MOST_WEIGHT, VolumeGroupCap
from pmdaemon.wire.rates import LEAST_BURST_S, MOST_BURST_S, Rates


class ExportCap(StaticCap):
    """As of any volume; a data plane knows bursts, too."""

    burst_s: Annotated[float, Field(ge=LEAST_BURST_S, le=MOST_BURST_S)] | None = None
    """So many seconds' worth may pass at once after a pause; null is 0.02."""

    @property
    def rates(self) -> Rates:
        """As enforcers take them."""
        return Rates(self.ops_per_s, self.bytes_per_s, self.cost_per_s, self.burst_s)


class GroupEntry(StrictModel):
    """``[[group]]``: volumes of one plane under one cap, which holds beside their own."""

    name: Name
    """What `gateway-agent status` calls it. Groups of the server are others, also of the same name."""
    volumes: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Exports of one `[[plane]]`; each in one `[[group]]` at most."""
    weights: dict[Name, Annotated[float, Field(gt=0, le=MOST_WEIGHT, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    """Shares of the cap while several volumes wait for it, by volume: ``{db = 3}``; of one that is not named
    1. What a volume does not use, the others have."""
    cap: ExportCap
    """Limits of them together: ``{ops_per_s, bytes_per_s, cost_per_s, burst_s}``, at least one rate."""

    @model_validator(mode="after")
    def _limits_its_volumes(self) -> GroupEntry:
        if len(set(self.volumes)) != len(self.volumes):
            raise ValueError(f"[[group]] {self.name}: a volume is named twice in volumes")
        if unknown := [volume for volume in self.weights if volume not in self.volumes]:
            raise ValueError(f"[[group]] {self.name}: weights names {unknown[0]}, which is not in volumes")
        if self.cap.rates.is_open:
            raise ValueError(
                f"[[group]] {self.name}: cap limits nothing; set ops_per_s, bytes_per_s or cost_per_s"
            )
        return self

    @model_serializer(mode="wrap")
    def _without_unset(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = handler(self)
        return {**values, "cap": {key: rate for key, rate in values["cap"].items() if rate is not None}}

    @property
    def shared(self) -> VolumeGroupCap:
        """As a data plane takes it."""
        return VolumeGroupCap(self.cap.rates, {name: self.weights.get(name, 1.0) for name in self.volumes})


def check_volume_groups(groups: Iterable[GroupEntry], planes: Mapping[str, str]) -> None:
    """See that groups fit the exports.

    Args:
        groups: all of the file.
        planes: plane of each export, by volume.

    Raises:
        ValueError: names the group and the volume.
    """
    names: set[str] = set()
    group_of: dict[str, str] = {}
    for group in groups:
        if group.name in names:
            raise ValueError(f"two [[group]] tables have the name {group.name}")
        names.add(group.name)
        for volume in group.volumes:
            if volume not in planes:
                raise ValueError(f"[[group]] {group.name}: {volume} is the volume of no [[export]]")
            if volume in group_of:
                raise ValueError(
                    f"[[group]] {group.name}: {volume} is in group {group_of[volume]} already; a volume is "
                    "in one at most"
                )
            group_of[volume] = group.name
        if len({planes[volume] for volume in group.volumes}) > 1:
            listed = ", ".join(f"{volume} ({planes[volume]})" for volume in group.volumes)
            raise ValueError(
                f"[[group]] {group.name}: its volumes are served by several planes: {listed}. Each plane "
                "would let through the whole cap. Serve them by one plane, or set the cap at the server "
                "(sla throttle set --group), which divides it"
            )

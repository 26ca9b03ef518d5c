"""Configuration of the storage resource manager: table ``[storage]`` of the server's file."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import Field, model_validator

from pmdaemon.runtime.config import StrictModel

Ratio = Annotated[float, Field(gt=0, le=1)]


class PoolRule(StrictModel):
    """``[[storage.rule]]``: other marks for some pools; the first rule that fits a pool counts."""

    pools: str
    """Pools by name, GATEWAY/POOL; `*` for any letters. The server's own are server/POOL."""
    warn_ratio: Ratio | None = None
    """As in [storage]."""
    critical_ratio: Ratio | None = None
    """As in [storage]."""


class StorageConfig(StrictModel):
    """How full pools of storage may be, and what is done about it."""

    warn_ratio: Ratio = 0.80
    """From here on a pool is filling up: an event."""
    critical_ratio: Ratio = 0.90
    """From here on it is nearly full: a critical event."""
    hysteresis_ratio: Annotated[float, Field(ge=0, le=0.2)] = 0.02
    """A pool must be so far below a mark before it counts as below it."""
    record_s: Annotated[float, Field(ge=1, le=3600)] = 300.0
    """How often a pool's figures are stored, unless its level changes or it grows or shrinks by 1 %."""
    oversubscription_ratio: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Volumes that may grow to more than so many times their pool: an event."""
    orphan_days: Annotated[float, Field(gt=0, le=3650)] = 7.0
    """A volume that no export serves and no process has open is reported after so many days."""
    rule: list[PoolRule] = Field(default_factory=list)
    """Other marks for some pools."""

    @model_validator(mode="after")
    def _are_in_order(self) -> StorageConfig:
        for place, warn, critical in [
            ("", self.warn_ratio, self.critical_ratio),
            *((f"rule {rule.pools}: ", *self.marks_of(rule)) for rule in self.rule),
        ]:
            if warn >= critical:
                raise ValueError(f"{place}warn_ratio {warn} must be below critical_ratio {critical}")
        return self

    def marks_of(self, rule: PoolRule | None) -> tuple[float, float]:
        """Warn and critical marks of the pools that a rule is for."""
        if rule is None:
            return self.warn_ratio, self.critical_ratio
        warn = self.warn_ratio if rule.warn_ratio is None else rule.warn_ratio
        return warn, self.critical_ratio if rule.critical_ratio is None else rule.critical_ratio

    def rule_of(self, name: str) -> PoolRule | None:
        """The first rule that fits a pool."""
        return next((rule for rule in self.rule if fnmatchcase(name, rule.pools)), None)

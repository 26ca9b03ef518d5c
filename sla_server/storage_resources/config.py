"""Configuration of the storage resource manager: table ``[storage]`` of the server's file."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from pmdaemon.runtime.config import StrictModel
from pmdaemon.space.config import Name

Ratio = Annotated[float, Field(gt=0, le=1)]
LABEL_CHARACTERS = 63  # of one part of a host's name


Refusal = Literal["never", "warn", "critical"]


class RestSource(StrictModel):
    """``[[storage.array]]``: a pool of a storage array, asked by REST."""

    name: Name
    """What people call the pool; it is server/NAME."""
    url: str
    """Address that is asked: https, or http on this machine."""
    size: str
    """JSONPath of the pool's size in the answer, as `$.records[0].space.size`."""
    used: str
    """JSONPath of what is used of it."""
    unit_bytes: Annotated[int, Field(ge=1, le=1 << 50)] = 1
    """How many bytes the answer counts as 1."""
    backend: str = ""
    """The backend whose volumes lie in it."""
    authorization_file: Path | None = None
    """File with the value of the header Authorization, closed to others (chmod 600)."""
    ca_file: Path | None = None
    """PEM file with the authority of the array's certificate; default: those of the system."""

    @field_validator("url")
    @classmethod
    def _is_safe(cls, value: str) -> str:
        parts = urlsplit(value)
        if not (value.isascii() and value.isprintable()) or " " in value or not parts.hostname:
            raise ValueError("must be an address of ASCII characters without blanks, with a host")
        if parts.username is not None or parts.password is not None:  # first: what else is wrong quotes it
            raise ValueError("an address with a password; put it into authorization_file")
        if parts.port == 0 or max(map(len, parts.hostname.split("."))) > LABEL_CHARACTERS:
            raise ValueError("has a port of 0, or a part of its host's name is too long")
        if parts.scheme != "https" and not (
            parts.scheme == "http" and parts.hostname in ("127.0.0.1", "::1", "localhost")
        ):
            raise ValueError(f"{value!r} must be https://..., or http:// on this machine")
        return value

    @field_validator("size", "used")
    @classmethod
    def _is_path(cls, value: str) -> str:
        if not value.startswith("$"):
            raise ValueError(f"{value!r} is no JSONPath; it begins with $")
        return value


class StorageCommand(StrictModel):
    """``[[storage.command]]``: a program of the operator's that makes room, by removing snapshots perhaps."""

    name: str = Field(min_length=1, max_length=60)
    """What it is called in events and lists."""
    argv: list[str] = Field(min_length=1)
    """The program, by its path from / on, and its arguments. The pool is in its environment: SLA_POOL,
    SLA_LEVEL, SLA_USED_BYTES, SLA_SIZE_BYTES."""
    pools: str = "*"
    """Pools by name, GATEWAY/POOL; `*` for any letters."""
    at: Literal["warn", "critical"] = "critical"
    """It is run while a pool is at this level, or above."""
    dry_run: bool = True
    """Only say that it would be run."""
    limit_s: Annotated[float, Field(ge=1, le=600)] = 60.0
    """How long it may take; then it is killed."""
    every_s: Annotated[float, Field(ge=60, le=86_400)] = 3600.0
    """How long to wait before it is run for the same pool again."""
    most_a_day: Annotated[int, Field(ge=1, le=1000)] = 4
    """How often it is run in 24 hours, for all pools together."""

    @field_validator("argv")
    @classmethod
    def _is_from_root(cls, value: list[str]) -> list[str]:
        if not value[0].startswith("/"):
            raise ValueError(f"the program {value[0]!r} must be a path from / on")
        return value


class PoolRule(StrictModel):
    """``[[storage.rule]]``: other marks for some pools; the first rule that fits a pool counts."""

    pools: str
    """Pools by name, GATEWAY/POOL; `*` for any letters. The server's own are server/POOL."""
    warn_ratio: Ratio | None = None
    """As in [storage]."""
    critical_ratio: Ratio | None = None
    """As in [storage]."""
    refuse_agreements: Refusal | None = None
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
    forecast_days: Annotated[float, Field(ge=1, le=730)] = 14.0
    """A pool that is expected to be full within so many days: an event."""
    refuse_agreements: Refusal = "never"
    """From which level on a new agreement about volumes of a pool, or of its backend, is refused."""
    array: list[RestSource] = Field(default_factory=list)
    """Pools of storage arrays, asked by REST every `[space] interval_s`."""
    command: list[StorageCommand] = Field(default_factory=list)
    """Programs that make room."""
    rule: list[PoolRule] = Field(default_factory=list)
    """Other marks for some pools."""

    @model_validator(mode="after")
    def _have_names(self) -> StorageConfig:
        names = [each.name for each in self.command]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two [[storage.command]] tables have the name {twice[0]}")
        return self

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

    def refusal_of(self, name: str) -> Refusal:
        """From which level on a pool takes no new agreements."""
        rule = self.rule_of(name)
        if rule is None or rule.refuse_agreements is None:
            return self.refuse_agreements
        return rule.refuse_agreements

    def rule_of(self, name: str) -> PoolRule | None:
        """The first rule that fits a pool."""
        return next((rule for rule in self.rule if fnmatchcase(name, rule.pools)), None)

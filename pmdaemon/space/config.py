"""Sources of space as the operator's file names them: ``[[space.source]]``, on agents and on the server."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from pmdaemon.runtime.config import StrictModel
from pmdaemon.wire.messages.space import MAX_POOLS
from pmdaemon.wire.names import checked_name

LocalKind = Literal["path", "lvm", "thin", "loop", "zfs", "snmp"]
NEEDS: Final[dict[str, tuple[str, ...]]] = {
    "path": ("path",),
    "loop": ("path",),
    "lvm": ("group",),
    "thin": ("device",),
    "zfs": ("dataset",),
    "snmp": ("host", "storage"),
}
"""Keys that a kind of source needs beside those of all."""
OPTIONAL: Final[dict[str, tuple[str, ...]]] = {"lvm": ("device",), "snmp": ("settings",)}
PLACES: Final = ("path", "group", "device", "dataset", "host", "storage", "settings")


Name = Annotated[str, AfterValidator(checked_name)]


class SpaceSource(StrictModel):
    """``[[space.source]]``: one pool of storage."""

    name: Name
    """What people call the pool; the server calls it GATEWAY/NAME."""
    kind: LocalKind
    """What it is: `path` a file system, `loop` one with image files, `lvm` a volume group or a thin pool of
    it, `thin` a thin pool of the device mapper, `zfs` a pool or data set, `snmp` a storage of another host,
    by its table hrStorageTable (HOST-RESOURCES-MIB)."""
    path: str = ""
    """Of `path` and `loop`: a directory of the file system; of `loop` the image files are in it."""
    group: str = ""
    """Of `lvm`: the volume group."""
    device: str = ""
    """Of `thin`: its device-mapper name. Of `lvm`: the thin pool, if that is meant, not the whole group."""
    dataset: str = ""
    """Of `zfs`: POOL or POOL/DATASET."""
    host: str = ""
    """Of `snmp`: the host, as net-snmp takes it: HOST, or udp:HOST:PORT."""
    storage: str = ""
    """Of `snmp`: the storage by its description in the table, often where it is mounted."""
    settings: str = ""
    """Of `snmp`: a directory with an snmp.conf, which has version, community or user (defVersion,
    defCommunity, defSecurityName, ...); default: those of the system and of the agent's user."""
    backend: str = ""
    """The backend whose volumes lie in it: with the action `refuse-agreements` no new agreement is made about
    them while the pool is nearly full."""
    serves: dict[str, Name] = Field(default_factory=dict)
    """Name in the pool to the volume that is served from it, where no `[[export]] file` says so: by an
    upstream NBD server, for example."""

    @field_validator("backend")
    @classmethod
    def _is_backend(cls, value: str) -> str:
        return checked_name(value) if value else value

    @field_validator("path", "settings")
    @classmethod
    def _is_path(cls, value: str) -> str:
        if value and not value.startswith("/"):
            raise ValueError("must be a path from / on")
        return value

    @field_validator("group", "device", "dataset", "host", "storage")
    @classmethod
    def _is_no_option(cls, value: str) -> str:
        if value.startswith("-") or (value and not value.isprintable()):
            raise ValueError("must be printable, and not begin with -")
        return value

    @model_validator(mode="after")
    def _has_its_place(self) -> SpaceSource:
        wanted = NEEDS[self.kind]
        allowed = (*wanted, *OPTIONAL.get(self.kind, ()))
        missing = [key for key in wanted if not getattr(self, key)]
        if missing:
            raise ValueError(f"source {self.name}: set {missing[0]}, which kind = {self.kind!r} needs")
        foreign = [key for key in PLACES if key not in allowed and getattr(self, key)]
        if foreign:
            raise ValueError(
                f"source {self.name}: {foreign[0]} has no use with kind = {self.kind!r}; remove it"
            )
        return self


def check_sources(sources: list[Any]) -> None:
    """See that there are not too many, and no two of one name.

    Raises:
        ValueError: names what is wrong.
    """
    if len(sources) > MAX_POOLS:
        raise ValueError(f"{len(sources)} [[space.source]] tables; {MAX_POOLS} at most")
    names = [each.name for each in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"two [[space.source]] tables have the name {twice[0]}")


class SpaceConfig(StrictModel):
    """``[space]``: how full pools of storage are, read beside the I/O path."""

    interval_s: Annotated[float, Field(ge=1, le=3600)] = 60.0
    """How often each source is read."""
    timeout_s: Annotated[float, Field(ge=0.1, le=60)] = 10.0
    """How long one command of a source may take; then it is killed, and the source counts as failed."""
    source: list[SpaceSource] = Field(default_factory=list)
    """The pools."""

    @model_validator(mode="after")
    def _are_sources(self) -> SpaceConfig:
        check_sources(self.source)
        return self

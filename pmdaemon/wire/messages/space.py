"""SPACE: how full a pool of storage is, as an agent read it, checked for the server.

It is sent for each pool at most every ``[space] interval_s``, and only to servers with the feature
``space`` (WELCOME). The newest reading of a pool counts: one that is lost, or refused as too many, is made
good by the next. The server's own sources make the same dataclass.

Pure. Source: docs/formats/messages.md; P17.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import names
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage, count, name, rows, text

SPACE: Final = "space"
"""Feature of a server: it takes SPACE."""
POOL_KINDS: Final = ("path", "lvm", "thin", "loop", "zfs", "rest", "snmp")
MAX_POOLS: Final = 64  # of one gateway
MAX_SPACE_VOLUMES: Final = 128  # with names of 128 characters the header stays below 64 KiB
VOLUME_NAME_CHARACTERS: Final = 128
SPACE_CLOCK_US: Final = 86_400 * 1_000_000  # a time further from ours is no time
SPACE_VOLUME_FORM: Final = (
    "[{name: str, size_bytes: int, used_bytes: int | nil, volume: str, in_use: bool | nil}]"
)


@dataclass(frozen=True, slots=True)
class Space(WireMessage):
    """How full one pool of storage is, and what lies in it.

    ``size_bytes`` is what can be used, ``used_bytes`` what of it is; ``other_ratio`` how full the thing
    beside bytes is that may run out first (inodes of a file system, metadata of a thin pool), nil for none.
    ``provisioned_bytes`` is what the volumes may grow to, ``volume_count`` how many there are; of those
    the largest 128 are in ``volumes``: ``volume`` is the name of the one that an export serves from it or
    "", ``in_use`` whether any process has it open, nil if that is not known. A time that is more than a day
    off becomes the server's.
    """

    KIND: ClassVar = Kind.SPACE
    pool: str
    kind: Annotated[str, Key(form=" | ".join(f'"{kind}"' for kind in POOL_KINDS))]
    backend: str
    size_bytes: int
    used_bytes: int
    other_ratio: Annotated[float | None, Key(form="float | nil")]
    provisioned_bytes: int
    volume_count: int
    volumes: Annotated[tuple[Header, ...], Key(form=SPACE_VOLUME_FORM)]
    at_us: int

    @property
    def full_ratio(self) -> float:
        """How full the pool is: by its bytes, or by what runs out before them."""
        used = self.used_bytes / self.size_bytes if self.size_bytes else 1.0
        return max(used, self.other_ratio or 0.0)

    @classmethod
    def parse(cls, header: Header, now_us: int) -> Space:
        """Check a header.

        Args:
            header: as received.
            now_us: the server's wall clock.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
            FrameTooLarge: more than ``MAX_SPACE_VOLUMES``.
        """
        kind, at_us = header.get("kind"), header.get("at_us")
        if kind not in POOL_KINDS:
            raise MalformedFrame(
                f"SPACE: key 'kind' is {excerpt(kind)}, expected one of {', '.join(POOL_KINDS)}"
            )
        backend = text(header, "SPACE", "backend")
        if backend and not names.is_name(backend):
            raise MalformedFrame(f"SPACE: key 'backend' is {excerpt(backend)}, expected a name or nothing")
        size, used = count(header, "size_bytes"), count(header, "used_bytes")
        if used > size:
            raise MalformedFrame(f"SPACE: used_bytes {used} are more than size_bytes {size}")
        if type(at_us) is not int:
            raise MalformedFrame(f"SPACE: key 'at_us' is {excerpt(at_us)}, expected microseconds since 1970")
        return cls(
            pool=name(header, "SPACE", "pool"),
            kind=kind,
            backend=backend,
            size_bytes=size,
            used_bytes=used,
            other_ratio=_ratio(header.get("other_ratio")),
            provisioned_bytes=count(header, "provisioned_bytes"),
            volume_count=count(header, "volume_count", 1 << 31),
            volumes=tuple(map(_volume, rows(header, "SPACE", "volumes", MAX_SPACE_VOLUMES))),
            at_us=at_us if abs(at_us - now_us) <= SPACE_CLOCK_US else now_us,
        )


def _ratio(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise MalformedFrame(f"SPACE: key 'other_ratio' is {excerpt(value)}, expected a number from 0 to 1")
    return float(value) if math.isfinite(value) else None


def _volume(entry: Any) -> Header:
    if not isinstance(entry, dict):
        raise MalformedFrame(f"SPACE: key 'volumes' has {excerpt(entry)}, expected maps")
    said, served, in_use = entry.get("name"), text(entry, "SPACE", "volume"), entry.get("in_use")
    if not isinstance(said, str) or not 0 < len(said) <= VOLUME_NAME_CHARACTERS or not said.isprintable():
        raise MalformedFrame(
            f"SPACE: a volume's name is {excerpt(said)}, expected 1 to {VOLUME_NAME_CHARACTERS} "
            "printable characters"
        )
    if served and not names.is_name(served):
        raise MalformedFrame(
            f"SPACE: volume {said!r} is served as {excerpt(served)}, expected a name or nothing"
        )
    if in_use is not None and not isinstance(in_use, bool):
        raise MalformedFrame(f"SPACE: in_use of {said!r} is {excerpt(in_use)}, expected true, false or nil")
    used = None if entry.get("used_bytes") is None else count(entry, "used_bytes")
    return {
        "name": said,
        "size_bytes": count(entry, "size_bytes"),
        "used_bytes": used,
        "volume": served,
        "in_use": in_use,
    }


@dataclass(frozen=True, slots=True)
class GatewaySpace(WireMessage):
    """A SPACE of a gateway, checked: its keys, and ``gw``."""

    KIND: ClassVar = Kind.GATEWAY_SPACE
    space: Annotated[Space, Key("pool, kind, backend, ...", "as in SPACE")]
    gateway_id: Annotated[str, Key("gw")]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {**self.space.header(), "gw": self.gateway_id}

    @classmethod
    def parse(cls, header: Header, now_us: int) -> GatewaySpace:
        """Check a header.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
        """
        return cls(Space.parse(header, now_us), text(header, "GATEWAY_SPACE", "gw"))

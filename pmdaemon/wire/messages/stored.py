"""GATEWAY and STREAMS_SEEN as dbmanager reads them again from its queue.

What is stored cannot be refused any more, and an older release may have written it. Reading is lenient: a
value of another type counts as absent, an entry of a list that is no entry is left out, and text is what
every database can keep. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pmdaemon.wire.labels import known_labels
from pmdaemon.wire.messages.base import Header
from pmdaemon.wire.messages.server import spool_floors

_INT_MAX: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class StoredExport:
    """One of the ``exports`` of a GATEWAY."""

    volume: str
    backend: str
    size_bytes: int = 0
    read_only: bool = False
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StoredStream:
    """One of the ``streams`` of a STREAMS_SEEN."""

    stream_id: int
    volume: str
    client: str
    backend: str


@dataclass(frozen=True, slots=True)
class StoredGateway:
    """A GATEWAY.

    Attributes:
        gateway_id: empty for one that is about ``exports`` alone, not about the gateway's state.
        epoch: as text; empty if it is not named.
        at_us: None if it is not named.
        lost_cuts: those that the agent has dropped and those that neither it nor the server holds.
        exports: None where it does not announce any, as all but ``up``.
        volumes: patterns of its certificate, none of which makes no list; None where it names none.
        floors: see ``spool_floors``.
    """

    gateway_id: str
    name: str = ""
    state: str = ""
    reason: str = ""
    address: str = ""
    software: str = ""
    epoch: str = ""
    at_us: int | None = None
    offset_us: int = 0
    lost_cuts: int = 0
    is_planned: bool = False
    exports: tuple[StoredExport, ...] | None = None
    volumes: tuple[str, ...] | None = None
    floors: tuple[tuple[str, int, int], ...] = ()

    @property
    def shown_name(self) -> str:
        """Its name, or its id while it has none."""
        return self.name or self.gateway_id

    @classmethod
    def read(cls, header: Header) -> StoredGateway:
        """What a header says; nothing is refused."""
        exports, volumes = header.get("exports"), header.get("volumes")
        return cls(
            gateway_id=_text(header, "gw"),
            name=_text(header, "name"),
            state=_text(header, "state"),
            reason=_text(header, "reason"),
            address=_text(header, "address"),
            software=_text(header, "software"),
            epoch=_epoch(header.get("ep", "")),
            at_us=_int(header, "at_us"),
            offset_us=_int(header, "offset_us") or 0,
            lost_cuts=min(_INT_MAX, (_int(header, "dropped") or 0) + (_int(header, "lost_cuts") or 0)),
            is_planned=header.get("planned") is True,
            exports=tuple(map(_export, _maps(header, "exports"))) if isinstance(exports, list) else None,
            volumes=_texts(volumes) if isinstance(volumes, list) else None,
            floors=tuple(spool_floors(header)),
        )


@dataclass(frozen=True, slots=True)
class StoredStreams:
    """A STREAMS_SEEN; ``streams`` are those with a number."""

    gateway_id: str
    streams: tuple[StoredStream, ...]

    @classmethod
    def read(cls, header: Header) -> StoredStreams:
        """What a header says; nothing is refused."""
        rows = ((row.get("id"), row) for row in _maps(header, "streams"))
        return cls(
            _text(header, "gw"),
            tuple(
                StoredStream(stream_id, *(_text(row, key) for key in ("volume", "client", "backend")))
                for stream_id, row in rows
                if type(stream_id) is int and 0 <= stream_id <= _INT_MAX
            ),
        )


def storable(text: str) -> str:
    """Text without NUL, which PostgreSQL cannot store, and without lone surrogates."""
    return text.replace("\0", "\ufffd").encode("utf-8", "replace").decode()


def _export(row: Header) -> StoredExport:
    size_bytes, read_only = _int(row, "size_bytes") or 0, bool(row.get("read_only"))
    labels = tuple(sorted(known_labels(row.get("labels")).items()))
    return StoredExport(_text(row, "volume"), _text(row, "backend"), size_bytes, read_only, labels)


def _text(header: Header, key: str) -> str:
    value = header.get(key, "")
    return storable(value) if isinstance(value, str) else ""


def _epoch(value: Any) -> str:
    """A number, or a text of a release to come."""
    if type(value) is int:
        return str(value) if abs(value).bit_length() <= 64 else ""
    return storable(value) if isinstance(value, str) else ""


def _texts(values: list[Any]) -> tuple[str, ...]:
    return tuple(storable(value) for value in values if isinstance(value, str))


def _int(header: Header, key: str) -> int | None:
    value = header.get(key)
    return value if type(value) is int and abs(value) <= _INT_MAX else None


def _maps(header: Header, key: str) -> list[dict[str, Any]]:
    value = header.get(key)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []

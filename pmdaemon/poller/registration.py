"""Checks what an agent says of itself: HELLO, SCHEMA, REGISTER and STREAMS headers into typed values.

Every length is limited and every name must be one (``names.NAME_RE``), because these values go on into
mailboxes, SQL rows, URLs and selectors. Unknown keys are ignored.

Source: docs/formats/messages.md; P3 (register, notice newly activated access).
"""

from __future__ import annotations

import uuid
from typing import Any, Final, NamedTuple

from pmdaemon.errors import FrameTooLarge, MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import cut, names

MAX_EXPORTS: Final = 512  # bounds the GATEWAY announcement, which must fit a 64 KiB header
MAX_SPOOL_EPOCHS: Final = 256  # agent starts whose cuts are all still unacknowledged
MAX_TEXT: Final = 256
SOURCES: Final = ("nbd", "host", "simulated")


class Hello(NamedTuple):
    """A checked HELLO."""

    gateway_id: str
    name: str
    epoch: int
    proto_min: int
    proto_max: int
    software: str


class Registration(NamedTuple):
    """A checked REGISTER. ``spool`` holds (epoch, first seq, last seq), oldest epoch first."""

    exports: list[dict[str, Any]]
    spool: list[tuple[int, int, int]]


class StreamEntry(NamedTuple):
    """One entry of a checked STREAMS."""

    stream_id: int
    volume: str
    client: str
    backend: str


def parse_hello(header: dict[str, Any]) -> Hello:
    """Check a HELLO header.

    Raises:
        MalformedFrame: names the key, its value and what is expected.
    """
    gateway_id = _text(header, "HELLO", "gw")
    try:
        gateway_id = str(uuid.UUID(gateway_id))
    except ValueError as exc:
        raise MalformedFrame(f"HELLO: key 'gw' is {excerpt(gateway_id)}, expected a UUID") from exc
    return Hello(
        gateway_id=gateway_id,
        name=_name(header, "HELLO", "name"),
        epoch=_integer(header, "HELLO", "ep", 1, (1 << 64) - 1),
        proto_min=_integer(header, "HELLO", "proto_min", 0, 1 << 31),
        proto_max=_integer(header, "HELLO", "proto_max", 0, 1 << 31),
        software=_text(header, "HELLO", "software"),
    )


def check_schema(header: dict[str, Any]) -> None:
    """Accept the one schema this release knows.

    Raises:
        MalformedFrame: another schema, or other columns under its number.
    """
    ours = cut.schema_header()
    if header.get("sch") != ours["sch"]:
        raise MalformedFrame(
            f"SCHEMA {excerpt(header.get('sch'))} is unknown; this server knows {ours['sch']}"
        )
    if header.get("columns") != ours["columns"] or header.get("buckets") != ours["buckets"]:
        raise MalformedFrame(f"SCHEMA {ours['sch']} with other columns or buckets than ours")


def parse_register(header: dict[str, Any]) -> Registration:
    """Check a REGISTER header.

    Raises:
        MalformedFrame: names the key, its value and what is expected.
        FrameTooLarge: more exports or spooled epochs than allowed.
    """
    exports = [_export(item) for item in _list(header, "REGISTER", "exports", MAX_EXPORTS)]
    volumes = [item["volume"] for item in exports]
    if len(set(volumes)) != len(volumes):
        twice = sorted({name for name in volumes if volumes.count(name) > 1})
        raise MalformedFrame(f"REGISTER: exported twice: {', '.join(twice)}")
    spool = []
    for row in _list(header, "REGISTER", "spool", MAX_SPOOL_EPOCHS):
        match row:
            case [epoch, first, last] if (
                all(type(number) is int for number in row)
                and 0 < epoch < 1 << 64
                and 0 < first < 1 << 63
                and first - 1 <= last < 1 << 63
            ):
                spool.append((epoch, first, last))
            case _:
                raise MalformedFrame(
                    f"REGISTER: key 'spool' holds {excerpt(row)}, expected [epoch, first, last]"
                )
    return Registration(exports, spool)


def parse_streams(header: dict[str, Any], gateway_id: str) -> list[StreamEntry]:
    """Check a STREAMS header; each id must be the one computed from the three names.

    Raises:
        MalformedFrame: names the key, its value and what is expected.
        FrameTooLarge: more streams than a cut may have rows.
    """
    streams = []
    for item in _list(header, "STREAMS", "streams", cut.MAX_ROWS):
        if not isinstance(item, dict):
            raise MalformedFrame(f"STREAMS: {excerpt(item)} is not a map")
        stream = StreamEntry(
            stream_id=_integer(item, "STREAMS", "id", 0, (1 << 63) - 1),
            volume=_name(item, "STREAMS", "volume"),
            client=_name(item, "STREAMS", "client"),
            backend=_name(item, "STREAMS", "backend"),
        )
        if stream.stream_id != names.stream_id(gateway_id, stream.volume, stream.client):
            raise MalformedFrame(
                f"STREAMS: id {stream.stream_id} is not that of volume {stream.volume!r} "
                f"and client {stream.client!r} on this gateway"
            )
        streams.append(stream)
    return streams


def _export(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise MalformedFrame(f"REGISTER: export {excerpt(item)} is not a map")
    source = item.get("source")
    if source not in SOURCES:
        raise MalformedFrame(
            f"REGISTER: key 'source' is {excerpt(source)}, expected one of {', '.join(SOURCES)}"
        )
    read_only = item.get("read_only")
    if not isinstance(read_only, bool):
        raise MalformedFrame(f"REGISTER: key 'read_only' is {excerpt(read_only)}, expected true or false")
    return {
        "volume": _name(item, "REGISTER", "volume"),
        "backend": _name(item, "REGISTER", "backend"),
        "size_bytes": _integer(item, "REGISTER", "size_bytes", 0, (1 << 63) - 1),
        "read_only": read_only,
        "source": source,
    }


def _list(header: dict[str, Any], frame: str, key: str, limit: int) -> list[Any]:
    value = header.get(key)
    if not isinstance(value, list):
        raise MalformedFrame(f"{frame}: key {key!r} is {excerpt(value)}, expected a list")
    if len(value) > limit:
        raise FrameTooLarge(f"{frame}: list {key!r} (entries, not bytes)", len(value), limit)
    return value


def _text(header: dict[str, Any], frame: str, key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str) or len(value) > MAX_TEXT or not value.isprintable():
        raise MalformedFrame(
            f"{frame}: key {key!r} is {excerpt(value)}, expected printable text of {MAX_TEXT} at most"
        )
    return value


def _name(header: dict[str, Any], frame: str, key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str) or not names.is_name(value):
        raise MalformedFrame(
            f"{frame}: key {key!r} is {excerpt(value)}, "
            "expected a name (letters, digits and ._:@-, 128 at most)"
        )
    return value


def _integer(header: dict[str, Any], frame: str, key: str, low: int, high: int) -> int:
    value = header.get(key)
    if type(value) is not int or not low <= value <= high:
        raise MalformedFrame(
            f"{frame}: key {key!r} is {excerpt(value)}, expected an integer from {low} to {high}"
        )
    return value

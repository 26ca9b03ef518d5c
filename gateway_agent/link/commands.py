"""What the PMDaemon tells us, checked: headers into typed values. Pure.

Unknown keys are ignored; a key that is missing or of the wrong type raises ``MalformedFrame``, which names
frame, key and value, and closes the session.

Source: docs/formats/messages.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

from gateway_agent.enforcers.base import CapSet
from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire.cut import IO_KINDS

Header = dict[str, Any]
RATES: Final = ("ops_per_s", "bytes_per_s", "cost_per_s")


@dataclass(frozen=True, slots=True)
class Welcome:
    """The server accepts us. ``interval_us``: how often it intends to poll."""

    proto: int
    interval_us: int
    software: str


@dataclass(frozen=True, slots=True)
class Registered:
    """The server took our exports."""


@dataclass(frozen=True, slots=True)
class Poll:
    """Cut now and answer from ``start``; ``ack`` names what may be forgotten."""

    poll: int
    sent_ns: int
    ack: tuple[tuple[int, int], ...]
    start: tuple[int, int] | None
    lease: bool


@dataclass(frozen=True, slots=True)
class Thresholds:
    """A complete threshold set, to be counted against from the next cut on."""

    version: int
    entries: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Certificate:
    """The certificate we asked for with RENEW. ``der``: not checked yet."""

    der: bytes


@dataclass(frozen=True, slots=True)
class Closing:
    """The server ends the session: ERROR or BYE."""

    reason: str


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """The server does not know a kind of frame that we sent."""

    kind: int


Command = Welcome | Registered | Poll | CapSet | Thresholds | Certificate | Closing | NotUnderstood


def _whole(frame: str, header: Header, key: str, low: int = 0, high: int = 1 << 64) -> int:
    value = header.get(key)
    if type(value) is not int or not low <= value < high:
        raise MalformedFrame(
            f"{frame} key {key!r} is {excerpt(value)}, expected an integer in [{low}, {high})"
        )
    return value


def _maps(frame: str, header: Header, key: str) -> tuple[dict[str, Any], ...]:
    value = header.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise MalformedFrame(f"{frame} key {key!r} is no list of maps")
    return tuple(value)


def _position(frame: str, key: str, value: Any) -> tuple[int, int]:
    match value:
        case [int(epoch), int(seq)] if epoch >= 0 and seq >= 0:
            return epoch, seq
    raise MalformedFrame(f"{frame} key {key!r} holds {excerpt(value)}, expected [epoch, seq]")


def welcome(header: Header) -> Welcome:
    """Check WELCOME."""
    return Welcome(
        proto=_whole("WELCOME", header, "proto"),
        interval_us=_whole("WELCOME", header, "interval_us", 1, 1 << 40),
        software=printable(header.get("software", ""), 256),
    )


def poll(header: Header) -> Poll:
    """Check POLL."""
    acks, start = header.get("ack"), header.get("from")
    if not isinstance(acks, list):
        raise MalformedFrame(f"POLL key 'ack' is {excerpt(acks)}, expected a list of [epoch, seq]")
    return Poll(
        poll=_whole("POLL", header, "poll"),
        sent_ns=_whole("POLL", header, "sent_ns"),
        ack=tuple(_position("POLL", "ack", item) for item in acks),
        start=None if not start else _position("POLL", "from", start),
        lease=header.get("lease") is True,
    )


def caps(header: Header) -> CapSet:
    """Check CAPS."""
    entries = _maps("CAPS", header, "caps")
    for entry in entries:
        if not isinstance(entry.get("volume"), str):
            raise MalformedFrame(f"CAPS entry {excerpt(entry)} names no volume")
        for key in RATES:
            rate = entry.get(key)
            if rate is not None and (
                isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < math.inf
            ):
                raise MalformedFrame(
                    f"CAPS key {key!r} of {excerpt(entry['volume'])} is {excerpt(rate)}, "
                    "expected a positive number"
                )
    kept = tuple({"volume": entry["volume"], **{key: entry.get(key) for key in RATES}} for entry in entries)
    return CapSet(
        gen=_whole("CAPS", header, "gen", 0, 1 << 63),
        lease_us=_whole("CAPS", header, "lease_us", 1, 1 << 50),
        caps=kept,
    )


def thresholds(header: Header) -> Thresholds:
    """Check THRESHOLDS."""
    entries = _maps("THRESHOLDS", header, "entries")
    for entry in entries:
        if not isinstance(entry.get("volume"), str) or not isinstance(entry.get("client"), str):
            raise MalformedFrame(f"THRESHOLDS entry {excerpt(entry)} lacks volume or client")
        if not isinstance(entry.get("io"), str) or entry["io"] not in IO_KINDS:
            raise MalformedFrame(
                f"THRESHOLDS entry of {excerpt(entry['volume'])} has io {excerpt(entry.get('io'))}"
            )
        _whole("THRESHOLDS", entry, "threshold_us", 1, 1 << 32)
    keys = ("volume", "client", "io", "threshold_us")
    kept = tuple({key: entry[key] for key in keys} for entry in entries)
    return Thresholds(version=_whole("THRESHOLDS", header, "version", 0, 1 << 63), entries=kept)


def certificate(header: Header) -> Certificate:
    """Check CERTIFICATE."""
    der = header.get("cert")
    if not isinstance(der, bytes) or not der:
        raise MalformedFrame("CERTIFICATE key 'cert' is missing")
    return Certificate(der)


def closing(kind: str, header: Header) -> Closing:
    """ERROR or BYE, read leniently: the session ends anyway."""
    if kind == "BYE":
        return Closing(f"the server said goodbye: {printable(header.get('reason', ''), 300)}")
    code, text = printable(header.get("code", ""), 60), printable(header.get("text", ""), 2000)
    return Closing(f"the server refused us ({code}): {text}")


def not_understood(header: Header) -> NotUnderstood:
    """Check UNSUPPORTED."""
    return NotUnderstood(_whole("UNSUPPORTED", header, "kind", 0, 256))

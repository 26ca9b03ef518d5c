"""What a data plane says of itself to ``gateway-agent status``: DP_REPORT, whose blob is a JSON object.

Keys of the JSON are the fields of these classes. A plane of a release before leaves some out: they have
defaults here. Times are in seconds, rates a second; those of streams are of the newest cut. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, ClassVar, Final, TypeVar

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.base import Header, Key, WireMessage
from pmdaemon.wire.messages.planes import DpHello
from pmdaemon.wire.rates import NO_CAPS, Rates

Entry = TypeVar("Entry")
_SHOWN_RATES: Final = ("ops_per_s", "bytes_per_s", "cost_per_s", "burst_s")
"""Of ``Rates``, in its order."""


@dataclass(frozen=True, slots=True)
class ReportedStream:
    """One stream, and the newest clients that share it; ``member_count`` is how many there are."""

    client: str
    members: tuple[str, ...]
    member_count: int
    connections: int
    reads_per_s: float
    writes_per_s: float
    ios_per_s: float
    bytes_per_s: float
    errors_per_s: float
    latency_us: float | None
    delay_us: float | None
    inflight: int
    held: int
    oldest_s: float | None

    @classmethod
    def parse(cls, found: Header) -> ReportedStream:
        """Check one entry of ``streams``.

        Raises:
            MalformedFrame: names the key and its value.
        """
        return cls(
            client=_text(found, "client"),
            members=_texts(found, "members"),
            member_count=_count(found, "member_count", 0),
            connections=_count(found, "connections"),
            reads_per_s=_number(found, "reads_per_s"),
            writes_per_s=_number(found, "writes_per_s"),
            ios_per_s=_number(found, "ios_per_s"),
            bytes_per_s=_number(found, "bytes_per_s"),
            errors_per_s=_number(found, "errors_per_s"),
            latency_us=_number_or_none(found, "latency_us"),
            delay_us=_number_or_none(found, "delay_us"),
            inflight=_count(found, "inflight"),
            held=_count(found, "held"),
            oldest_s=_number_or_none(found, "oldest_s"),
        )


@dataclass(frozen=True, slots=True)
class ReportedGroup:
    """A group of volumes that a volume is in, and what it is capped to."""

    group: str
    caps: Rates

    @classmethod
    def parse(cls, found: Header) -> ReportedGroup:
        """Check key ``group`` of a volume.

        Raises:
            MalformedFrame: names the key and its value.
        """
        return cls(_text(found, "group"), _rates(found.get("caps")))


@dataclass(frozen=True, slots=True)
class ReportedVolume:
    """One volume, its caps and its streams with connections or activity. No size: it is not known yet.

    ``group`` is the server's; ``configured_group`` that of the agent's file.
    """

    volume: str
    backend: str
    storage: str
    read_only: bool
    size_bytes: int | None
    caps: Rates
    client_caps: Mapping[str, Rates]
    group: ReportedGroup | None
    streams: tuple[ReportedStream, ...]
    configured_group: ReportedGroup | None = None

    @classmethod
    def parse(cls, found: Header) -> ReportedVolume:
        """Check one entry of ``volumes``.

        Raises:
            MalformedFrame: names the key and its value.
        """

        def group_at(key: str) -> ReportedGroup | None:
            return ReportedGroup.parse(_map(found, key)) if found.get(key) is not None else None

        return cls(
            volume=_text(found, "volume"),
            backend=_text(found, "backend"),
            storage=_text(found, "storage"),
            read_only=found.get("read_only") is True,
            size_bytes=None if found.get("size_bytes") is None else _count(found, "size_bytes"),
            caps=_rates(found.get("caps")),
            client_caps={client: _rates(caps) for client, caps in _map(found, "client_caps").items()},
            group=group_at("group"),
            configured_group=group_at("configured_group"),
            streams=_each(found, "streams", ReportedStream.parse),
        )


@dataclass(frozen=True, slots=True)
class ReportedCaps:
    """The set of caps in force: without a lease they are those of the configuration."""

    generation: int
    lease_left_s: float | None


@dataclass(frozen=True, slots=True)
class ReportedCut:
    """How long the newest cut was, and how old it is."""

    seconds: float
    age_s: float


@dataclass(frozen=True, slots=True)
class HandedOver:
    """Another process serves this plane: what stays at this one, and how long it may."""

    connections: int
    drain_left_s: float


@dataclass(frozen=True, slots=True)
class PlaneReport:
    """One plane. ``leaving`` has connections by volume that use what was removed or replaced.

    ``whole_clients`` has what clients are capped to over all volumes of this plane.
    """

    hello: DpHello
    caps: ReportedCaps
    thresholds: int
    cut: ReportedCut
    leaving: Mapping[str, int]
    volumes: tuple[ReportedVolume, ...]
    handed_over: HandedOver | None = None
    whole_clients: Mapping[str, Rates] = field(default_factory=dict)

    def document(self) -> Header:
        """The JSON object: the keys of DP_HELLO, then these; the last two only where there are any."""
        own = {item.name: _plain(getattr(self, item.name)) for item in fields(self) if item.name != "hello"}
        for volume in own["volumes"]:
            if volume["configured_group"] is None:
                del volume["configured_group"]
        if self.handed_over is None:
            del own["handed_over"]
        if not self.whole_clients:
            del own["whole_clients"]
        return self.hello.header() | own

    @classmethod
    def parse(cls, found: Header, plane: str) -> PlaneReport:
        """Check the JSON object of a plane.

        Raises:
            WireError: names the key and its value.
        """
        caps, cut, handed = _map(found, "caps"), _map(found, "cut"), found.get("handed_over")
        return cls(
            hello=DpHello.parse({"exports": [], **found, "plane": plane}, plane),
            caps=ReportedCaps(_count(caps, "generation", 0), _number_or_none(caps, "lease_left_s")),
            thresholds=_count(found, "thresholds", 0),
            cut=ReportedCut(_number(cut, "seconds", 0), _number(cut, "age_s", 0)),
            leaving={volume: _count(_map(found, "leaving"), volume) for volume in _map(found, "leaving")},
            volumes=_each(found, "volumes", ReportedVolume.parse),
            handed_over=_handed_over(_map(found, "handed_over")) if handed is not None else None,
            whole_clients={client: _rates(caps) for client, caps in _map(found, "whole_clients").items()},
        )


@dataclass(frozen=True, slots=True)
class DpReport(WireMessage):
    """The answer to DP_STATUS, for people.

    The blob is a JSON object, and NULs up to the frame's end. Its keys are those of DP_HELLO and the
    fields of ``PlaneReport`` (``pmdaemon.wire.messages.plane_report``).
    """

    KIND: ClassVar = Kind.DP_REPORT
    plane: str
    report: Annotated[PlaneReport, Key("(blob)", "JSON")]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"plane": self.plane}

    def encode(self) -> bytes:
        """The frame.

        Raises:
            FrameTooLarge: there are too many volumes and streams.
        """
        return frame.encode(self.KIND, self.header(), json.dumps(self.report.document()).encode())

    @classmethod
    def parse(cls, received: frame.Frame, plane: str) -> DpReport:
        """Check the frame of the plane that was asked.

        Raises:
            WireError: the blob is no JSON object, or names the key and its value.
        """
        try:
            found = json.loads(bytes(received.blob).rstrip(b"\0"))
        except (ValueError, RecursionError) as exc:
            raise MalformedFrame(f"DP_REPORT: the blob is no JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise MalformedFrame(f"DP_REPORT: the blob is {excerpt(found)}, expected a JSON object")
        return cls(plane, PlaneReport.parse(found, plane))


def _handed_over(found: Header) -> HandedOver:
    return HandedOver(_count(found, "connections"), _number(found, "drain_left_s"))


def _plain(value: Any) -> Any:
    """A value of a field as JSON has it."""
    if isinstance(value, Rates):
        shown = {name: getattr(value, name) for name in _SHOWN_RATES}
        return {name: rate for name, rate in shown.items() if rate is not None}
    if is_dataclass(value):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def _number(found: Header, key: str, default: float | None = None) -> float:
    value = found.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected a number")
    return value


def _count(found: Header, key: str, default: int | None = None) -> int:
    value = found.get(key, default)
    if type(value) is not int or value < 0:
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected an integer of 0 or more")
    return value


def _number_or_none(found: Header, key: str) -> float | None:
    return None if found.get(key) is None else _number(found, key)


def _text(found: Header, key: str) -> str:
    value = found.get(key)
    if not isinstance(value, str):
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected text")
    return value


def _texts(found: Header, key: str) -> tuple[str, ...]:
    value = found.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected a list of texts")
    return tuple(value)


def _map(found: Header, key: str) -> Header:
    value = found.get(key, {})
    if not isinstance(value, dict):
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected a map")
    return value


def _each(found: Header, key: str, parse: Callable[[Header], Entry]) -> tuple[Entry, ...]:
    value = found.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise MalformedFrame(f"DP_REPORT: key {key!r} is {excerpt(value)}, expected a list of maps")
    return tuple(map(parse, value))


def _rates(found: Any) -> Rates:
    if found is None:
        return NO_CAPS
    if not isinstance(found, dict):
        raise MalformedFrame(f"DP_REPORT: caps are {excerpt(found)}, expected a map of rates")
    return Rates(*(_number_or_none(found, name) for name in _SHOWN_RATES))

"""Messages between the server's processes, in the main mailbox segment.

Participants: ``supervisor``, ``pmdaemon``, ``pair-0``..``pair-N``, ``services``, ``dbmanager``. Sender and
reader are processes of one release, so ``parse`` checks what its readers rely on and no more. Pure.

Source: DESIGN.md 3 and 4; docs/formats/messages.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pmdaemon.errors import MalformedFrame, WireError
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import (
    EXPORT_FORM,
    STREAM_FORM,
    features_of,
    refused_volumes,
)
from pmdaemon.wire.messages.alerts import Alert
from pmdaemon.wire.messages.base import Header, Key, WireMessage

# -- what a pair reports


@dataclass(frozen=True, slots=True)
class CutsHeader(WireMessage):
    """Cuts of many gateways. The blob is n CUT frames one behind another.

    ``recv_us`` is the server's wall clock at receipt, ``offset_us`` what to add to the agent's ``t`` to
    correct it. dbmanager gets no live-only cuts. ``poller.cut_batch`` writes it without this class.
    """

    KIND: ClassVar = Kind.CUTS
    pair: int
    cuts: Annotated[int, Key("n")]
    recv_us: list[int]
    offset_us: list[int]
    live: list[bool]

    def encode_with(self, blob: bytes) -> bytes:
        """The frame with its cuts."""
        return frame.encode(self.KIND, self.header(), blob)

    @classmethod
    def parse(cls, header: Header) -> CutsHeader:
        """Check that there are as many of each as cuts; the values are not looked at, one by one.

        Raises:
            MalformedFrame: names the key.
        """
        cuts = header.get("n")
        if type(cuts) is not int or cuts < 0:
            raise MalformedFrame(f"CUTS: key 'n' is {excerpt(cuts)}, expected a number of cuts")
        for key in ("recv_us", "offset_us", "live"):
            column = header.get(key)
            if not isinstance(column, list) or len(column) != cuts:
                raise MalformedFrame(f"CUTS: key {key!r} does not have one value for each of the {cuts} cuts")
        return cls(header.get("pair", 0), cuts, header["recv_us"], header["offset_us"], header["live"])


def cut_times(header: Header) -> tuple[Sequence[int], Sequence[int]]:
    """``recv_us`` and ``offset_us`` of a CUTS that was checked before it was stored."""
    return header.get("recv_us", ()), header.get("offset_us", ())


@dataclass(frozen=True, slots=True)
class GatewayReport(WireMessage):
    """State of a gateway: up, or how its session ended.

    ``exports`` and ``spool`` are as in REGISTER (up only); ``spool`` tells dbmanager where an epoch unknown
    to it begins. detached: the pair itself stops; services raises ``gateway-lost`` and records it as lost if
    the gateway is not back within 60 s. ``dropped`` counts cuts that the agent's spool lost in its life.
    ``planned`` says that the agent said goodbye (lost only): an orderly stop, and no fault.
    ``features`` are those of its HELLO (up only), absent for none.
    ``volumes`` are the patterns in its certificate (``sla ca token --volumes``); absent: it has no list.
    ``lost_cuts`` is added by dbmanager, in its queue only: cuts that neither the agent nor the server holds.
    """

    KIND: ClassVar = Kind.GATEWAY
    gateway_id: Annotated[str, Key("gw")]
    name: str
    state: Annotated[str, Key(form='"up" | "lost" | "detached" | "stalled" | "recovered" | "refused"')]
    reason: str
    address: str
    software: str
    epoch: Annotated[int, Key("ep")]
    at_us: int
    offset_us: int
    dropped: int
    exports: Annotated[list[Header] | None, Key(form=f"[{EXPORT_FORM}]", is_optional=True)] = None
    spool: Annotated[
        Sequence[Sequence[int]] | None, Key(form="[[ep, first_seq, last_seq]]", is_optional=True)
    ] = None
    lost_cuts: Annotated[int | None, Key(form="int", is_optional=True)] = None
    is_planned: Annotated[bool | None, Key("planned", form="true", is_optional=True)] = None
    features: Annotated[tuple[str, ...] | None, Key(form="[str]", is_optional=True)] = None
    listed: Annotated[tuple[str, ...] | None, Key("volumes", form="[str]", is_optional=True)] = None

    @classmethod
    def parse(cls, header: Header) -> GatewayReport:
        """Check what services uses.

        Raises:
            MalformedFrame: names the key and its value.
        """
        gateway_id, state = _text("GATEWAY", header, "gw"), _text("GATEWAY", header, "state")
        exports = header.get("exports")
        if exports is not None and not isinstance(exports, list):
            raise MalformedFrame(f"GATEWAY: key 'exports' is {excerpt(exports)}, expected a list")
        return cls(
            gateway_id=gateway_id,
            name=_text("GATEWAY", header, "name"),
            state=state,
            reason=header.get("reason", state),
            address=header.get("address", ""),
            software=header.get("software", ""),
            epoch=header.get("ep", 0),
            at_us=header.get("at_us", 0),
            offset_us=header.get("offset_us", 0),
            dropped=header.get("dropped", 0),
            exports=exports,
            spool=header.get("spool"),
            lost_cuts=header.get("lost_cuts"),
            is_planned=True if header.get("planned") is True else None,
            features=features_of(header, "GATEWAY") or None,
            listed=_patterns(header.get("volumes")),
        )


def spool_floors(header: Header) -> list[tuple[str, int, int]]:
    """(gateway_id, epoch, first - 1) for each well-formed entry of a GATEWAY's ``spool``, of any release."""
    gateway_id, spool = header.get("gw"), header.get("spool")
    if header.get("state") != "up" or not isinstance(gateway_id, str) or not isinstance(spool, list):
        return []
    floors = []
    for entry in spool:
        if isinstance(entry, list | tuple) and len(entry) >= 2:
            epoch, first = entry[0], entry[1]
            if type(epoch) is int and type(first) is int and 0 < epoch < 1 << 64 and 1 < first < 1 << 63:
                floors.append((gateway_id, epoch, first - 1))
    return floors


@dataclass(frozen=True, slots=True)
class StreamsSeen(WireMessage):
    """Streams of a gateway, as in STREAMS, at most 100 a message."""

    KIND: ClassVar = Kind.STREAMS_SEEN
    gateway_id: Annotated[str, Key("gw")]
    streams: Annotated[list[Header], Key(form=f"[{STREAM_FORM}]")]

    @classmethod
    def parse(cls, header: Header) -> StreamsSeen:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value.
        """
        streams = header.get("streams")
        if not isinstance(streams, list):
            raise MalformedFrame(f"STREAMS_SEEN: key 'streams' is {excerpt(streams)}, expected a list")
        return cls(_text("STREAMS_SEEN", header, "gw"), streams)


@dataclass(frozen=True, slots=True)
class CapsState(WireMessage):
    """What became of a SET_CAPS at its gateway. ``refused`` is as in CAPS_ACK: volumes it cannot cap."""

    KIND: ClassVar = Kind.CAPS_STATE
    gateway_id: Annotated[str, Key("gw")]
    gen: int
    state: Annotated[str, Key(form='"sent" | "confirmed" | "refused"')]
    reason: str
    at_us: int
    refused: Annotated[tuple[str, ...] | None, Key(form="[volume]", is_optional=True)] = None

    @classmethod
    def parse(cls, header: Header, now_us: int) -> CapsState:
        """Check a header; without a time it is that of ``now_us``.

        Raises:
            MalformedFrame: names the key and its value.
            FrameTooLarge: more refused volumes than a set of caps can have.
        """
        gen = header.get("gen")
        if type(gen) is not int:
            raise MalformedFrame(f"CAPS_STATE: key 'gen' is {excerpt(gen)}, expected a generation")
        return cls(
            gateway_id=_text("CAPS_STATE", header, "gw"),
            gen=gen,
            state=_text("CAPS_STATE", header, "state"),
            reason=header.get("reason", ""),
            at_us=header.get("at_us", now_us),
            refused=refused_volumes(header, "CAPS_STATE"),
        )


@dataclass(frozen=True, slots=True)
class GatewayAlert(WireMessage):
    """An ALERT of a gateway, checked: its five keys, and ``gw``."""

    KIND: ClassVar = Kind.GATEWAY_ALERT
    alert: Annotated[Alert, Key("kind, severity, text, at_us, details", "as in ALERT")]
    gateway_id: Annotated[str, Key("gw")]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {**self.alert.header(), "gw": self.gateway_id}

    @classmethod
    def parse(cls, header: Header, now_us: int) -> GatewayAlert:
        """Check a header.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
        """
        return cls(Alert.parse(header, now_us), _text("GATEWAY_ALERT", header, "gw"))


# -- what dbmanager confirms

HighWaters = Sequence[Sequence[Any]]
"""Rows of (gateway_id, epoch, seq)."""
_ROW: Final = (str, int, int)


@dataclass(frozen=True, slots=True)
class WatermarksNotice(WireMessage):
    """What dbmanager has on disk, when it starts or a gateway comes up; a pair polls only after the first.

    ``inc`` is the incarnation of dbmanager.
    """

    KIND: ClassVar = Kind.WATERMARKS
    incarnation: Annotated[int, Key("inc")]
    rows: Annotated[HighWaters, Key("hw", "[[gw, ep, seq]]")]

    @classmethod
    def parse(cls, header: Header) -> WatermarksNotice:
        """Check a header.

        Raises:
            MalformedFrame: a key is missing or of the wrong type.
        """
        return cls(*_notice(header))


@dataclass(frozen=True, slots=True)
class DurableNotice(WireMessage):
    """What has become durable: one notice a sync, only what moved."""

    KIND: ClassVar = Kind.DURABLE
    incarnation: Annotated[int, Key("inc")]
    rows: Annotated[HighWaters, Key("hw", "[[gw, ep, seq]]")]

    @classmethod
    def parse(cls, header: Header) -> DurableNotice:
        """Check a header.

        Raises:
            MalformedFrame: a key is missing or of the wrong type.
        """
        return cls(*_notice(header))


def _notice(header: Header) -> tuple[int, HighWaters]:
    incarnation, rows = header.get("inc"), header.get("hw")
    if type(incarnation) is not int or not isinstance(rows, list):
        raise MalformedFrame(f"a durable notice of incarnation {excerpt(incarnation)}")
    if not _are_sound(rows):
        wrong = next(row for row in rows if type(row) is not list or tuple(map(type, row)) != _ROW)
        raise MalformedFrame(f"a durable notice with the row {excerpt(wrong)}")
    return incarnation, rows


def _are_sound(rows: list[Any]) -> bool:
    """Whether each row is a list of the types of ``_ROW``. By columns: there is a row for each poll."""
    if not rows:
        return True
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {len(_ROW)}:
        return False
    columns = zip(*rows, strict=True)
    return all(set(map(type, column)) == {kind} for column, kind in zip(columns, _ROW, strict=True))


@dataclass(frozen=True, slots=True)
class RecordRows(WireMessage):
    """Rows to upsert by natural key, see docs/formats/sql.md; from any process.

    With ``together`` (absent: false) dbmanager stores all of the message or none.
    """

    KIND: ClassVar = Kind.RECORD
    rows: Annotated[Sequence[Any], Key(form="[[table, row]]")]
    request: Annotated[str | None, Key("req")]
    sender: Annotated[str, Key("from")]
    together: Annotated[bool | None, Key(form="bool", is_optional=True)] = None

    @classmethod
    def parse(cls, header: Header) -> RecordRows:
        """Read leniently, and ``rows`` as they are: a request is answered, also one with wrong rows."""
        request, sender = header.get("req"), header.get("from")
        return cls(
            rows=header.get("rows", ()),
            request=request if isinstance(request, str) else None,
            sender=sender if isinstance(sender, str) else "",
            together=True if header.get("together") is True else None,
        )


@dataclass(frozen=True, slots=True)
class Recorded(WireMessage):
    """What became of a RECORD with ``req``, sent when it is durable."""

    KIND: ClassVar = Kind.RECORDED
    request: Annotated[str, Key("req")]
    ok: bool
    error: str

    @classmethod
    def parse(cls, header: Header) -> Recorded:
        """Check a header.

        Raises:
            MalformedFrame: it does not say which request, or whether it was recorded.
        """
        request, ok = header.get("req"), header.get("ok")
        if request is None or ok is None:
            raise MalformedFrame(f"RECORDED for request {excerpt(request)}, ok {excerpt(ok)}")
        return cls(str(request), bool(ok), str(header.get("error", "")))


# -- what troubles a process

PRESSURE_PERIOD_NS: Final = 2_000_000_000
MOST_PROBLEMS: Final = 16
DAMAGED: Final = "database-damaged"  # a Problem.what that does not end by itself: the server is down
REASON_CHARS: Final = 400  # a header holds 64 KiB, and a person reads one sentence


class Problem(NamedTuple):
    """What a process cannot use just now, while it goes on with everything else.

    Attributes:
        what: ``database``, ``database-damaged``, ``parquet``,
            ``ingest-queue``, or the process's own name when it dies of it.
        since_us: wall clock.
        reason: a sentence for people.
    """

    what: str
    since_us: int
    reason: str


@dataclass(frozen=True, slots=True)
class Pressure(WireMessage):
    """How full is what a process writes to, how often it was refused, and what troubles it.

    ``name`` is the process, ``fullness`` the share in use (0 to 1) of the rings to each recipient and of
    ``ingest-queue``, ``refused`` what was refused or dropped for want of room since that process started,
    ``problems`` what cannot be used now (absent: none). Sent every 2 s, best effort: one that finds no room
    is not sent again. dbmanager also sends it while it waits at its start, and once more when one of its
    threads has died. The supervisor names in ``what`` a part that makes no progress or ends again and again;
    dbmanager a thread whose step takes longer than 60 s.
    """

    KIND: ClassVar = Kind.PRESSURE
    name: str
    at_us: int
    fullness: Annotated[dict[str, float], Key(form="{way: float}")]
    refused: Annotated[dict[str, int], Key(form="{what: int}")]
    problems: Annotated[
        tuple[Problem, ...],
        Key(
            form='[{what: "database" | "database-damaged" | "parquet" | "ingest-queue" | "dbmanager" | ..., '
            "since_us: int, reason: str}]"
        ),
    ] = ()

    def header(self) -> Header:
        """The header as it goes on the wire: ratios are rounded, problems and their texts limited."""
        return {
            "name": self.name,
            "at_us": self.at_us,
            "fullness": {what: round(ratio, 3) for what, ratio in self.fullness.items()},
            "refused": self.refused,
            "problems": [
                {**problem._asdict(), "reason": problem.reason[:REASON_CHARS]}
                for problem in self.problems[:MOST_PROBLEMS]
            ],
        }

    @classmethod
    def parse(cls, header: Header) -> Pressure:
        """Check a header.

        Raises:
            WireError: it does not have the promised form.
        """
        fullness, refused = header.get("fullness"), header.get("refused")
        if not isinstance(header.get("name"), str) or not isinstance(header.get("at_us"), int):
            raise WireError("PRESSURE: name (text) and at_us (whole number) are required")
        if not isinstance(fullness, dict) or not isinstance(refused, dict):
            raise WireError("PRESSURE: fullness and refused must be maps")
        if not all(isinstance(value, int | float) for value in (*fullness.values(), *refused.values())):
            raise WireError("PRESSURE: fullness and refused hold numbers")
        return cls(header["name"], header["at_us"], fullness, refused, _problems(header.get("problems", [])))


def _problems(rows: Any) -> tuple[Problem, ...]:
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise WireError("PRESSURE: problems must be a list of maps")
    found = tuple(Problem(row.get("what"), row.get("since_us"), row.get("reason")) for row in rows)
    for what, since_us, reason in found:
        if not isinstance(what, str) or not isinstance(since_us, int) or not isinstance(reason, str):
            raise WireError("PRESSURE: a problem has what (text), since_us (whole number), reason (text)")
    return found


def _patterns(value: Any) -> tuple[str, ...] | None:
    """Key ``volumes`` of GATEWAY; None when it is absent.

    Raises:
        MalformedFrame: it is no list of texts.
    """
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise MalformedFrame(f"GATEWAY: key 'volumes' is {excerpt(value)}, expected a list of texts")
    return tuple(value)


def _text(frame_name: str, header: Header, key: str) -> str:
    value = header.get(key)
    if not isinstance(value, str):
        raise MalformedFrame(f"{frame_name}: key {key!r} is {excerpt(value)}, expected text")
    return value

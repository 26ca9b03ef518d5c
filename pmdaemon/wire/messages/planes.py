"""Messages between the agent's link and its data planes, on a Unix socket (``DIR/nbd-N.sock``, mode 0600).

The data plane listens, the link connects; a restarted link connects again and I/O never notices. Until a
DP_COLLECT with ``got`` = id arrives, the plane keeps the last DP_CUT and answers with the *same* bytes, so a
link killed between receiving and spooling loses nothing and doubles nothing: each spooled cut carries the
plane ids that went into it (header key ``dp: {plane: id}``), and a restarted link reads the newest from its
spool. Pure.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from pmdaemon.errors import BadCut, ProtocolViolation, WireError
from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.kinds import Kind
from pmdaemon.wire.messages.agent import EXPORT_FORM, PLANE_FEATURES, CapSet
from pmdaemon.wire.messages.base import FoldedMessage, Header, Key, WireMessage
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.thresholds import Thresholds

_NO_GATEWAY: Final = uuid.UUID(int=0).bytes


@dataclass(frozen=True, slots=True)
class DpHello(WireMessage):
    """First frame of a plane. Sent again when its exports have changed, or a size (0 until it is known).

    ``stopping`` says that no client is served any more: collect until this connection ends. ``config`` is the
    digest of the part of the agent's configuration that the plane runs with, nil if it was not given one;
    ``problems`` is what of it is not in force, for people. A plane of before sends neither. ``leaving`` says
    that another process serves this plane from now on, and under which name this one can be found until its
    clients have gone: its control socket is NAME.sock beside the former one. ``features`` are those of HELLO
    that it can do (``client-caps`` and others that are about caps); a plane of before says none.
    """

    KIND: ClassVar = Kind.DP_HELLO
    plane: str
    pid: int
    exports: Annotated[list[Header], Key(form=f"[{EXPORT_FORM}]")]
    listening: list[str]
    is_stopping: Annotated[bool, Key("stopping")]
    config: str | None = None
    problems: Annotated[tuple[str, ...], Key(form="[str]")] = ()
    leaving: Annotated[str | None, Key(is_optional=True)] = None
    features: Annotated[tuple[str, ...], Key(form="[str]")] = PLANE_FEATURES

    @classmethod
    def parse(cls, header: Header, plane: str) -> DpHello:
        """Check a header.

        Args:
            header: as received.
            plane: name of the plane that was dialled.

        Raises:
            WireError: it is another plane, or its exports have no usable form.
        """
        if header.get("plane") != plane:
            raise WireError(
                f"calls itself {excerpt(header.get('plane'))}; its control_socket is another plane's"
            )
        exports = header.get("exports")
        if not isinstance(exports, list):
            raise WireError("announces no list of exports")
        pid, listening = header.get("pid", 0), header.get("listening", [])
        config, problems = header.get("config"), header.get("problems", [])
        leaving, features = header.get("leaving"), header.get("features", [])
        return cls(
            plane=plane,
            pid=pid if isinstance(pid, int) else 0,
            exports=[_export(item) for item in exports],
            listening=[str(item) for item in listening] if isinstance(listening, list) else [],
            is_stopping=header.get("stopping") is True,
            config=config if isinstance(config, str) else None,
            problems=tuple(str(item) for item in problems) if isinstance(problems, list) else (),
            leaving=leaving if isinstance(leaving, str) and names.is_name(leaving) else None,
            features=tuple(map(str, features)) if isinstance(features, list) else (),
        )


def _export(item: Any) -> Header:
    """What REGISTER says of one export: these five keys and no other."""
    if not isinstance(item, dict):
        raise WireError(f"announces {excerpt(item)} as an export")
    volume, backend, size_bytes = item.get("volume"), item.get("backend"), item.get("size_bytes", 0)
    for value in (volume, backend):
        if not isinstance(value, str) or not names.is_name(value):
            raise WireError(f"announces an export with the unusable name {excerpt(value)}")
    return {
        "volume": volume,
        "backend": backend,
        "size_bytes": size_bytes if isinstance(size_bytes, int) and size_bytes > 0 else 0,
        "read_only": item.get("read_only") is True,
        "source": "nbd",
    }


@dataclass(frozen=True, slots=True)
class DpCollect(WireMessage):
    """The request for a DP_CUT. ``got`` is the id of the last one that the link has spooled, 0 for none."""

    KIND: ClassVar = Kind.DP_COLLECT
    got: int

    @classmethod
    def parse(cls, header: Header) -> DpCollect:
        """Check a header.

        Raises:
            ProtocolViolation: ``got`` is no integer.
        """
        got = header.get("got")
        if type(got) is not int:
            raise ProtocolViolation("connected", f"DP_COLLECT with got={excerpt(got)}", "an integer")
        return cls(got)


@dataclass(frozen=True, slots=True)
class DpCut(WireMessage):
    """What a plane counted since its cut before. The blob is that of CUT; the link fills in ``stream_id``.

    ``start_ns`` and ``end_ns`` are monotonic, ``start_us`` is wall clock. ``streams`` names all rows, in row
    order; rows without activity are left out. ``more`` asks to collect again: a threshold switch closed a
    cut. ``st`` counts us of the interval in which the plane wanted to run and got no processor, 0 if the
    kernel does not say. ``late`` and ``sq`` are as in CUT. Ids begin at the plane's start in us, so
    that an id of a former life cannot match.
    """

    KIND: ClassVar = Kind.DP_CUT
    id: int
    start_ns: int
    end_ns: int
    start_us: int
    throttle_gen: Annotated[int, Key("tg")]
    threshold_version: Annotated[int, Key("ts")]
    rows: Annotated[int, Key("n")]
    hist_entries: Annotated[int, Key("h")]
    missed_entries: Annotated[int, Key("m")]
    streams: Annotated[list[Header], Key(form="[{index: int, volume, client, backend: str}]")]
    more: bool
    starved_us: Annotated[int, Key("st")]
    late: Annotated[cut.Late | None, Key(form="{volume: [ios, longest_us]}", is_optional=True)]
    sequential: Annotated[bytes | None, Key("sq", form="u32[n]", is_optional=True)] = None

    def encode_with(self, blob: bytes) -> bytes:
        """The frame with its columns."""
        return frame.encode(self.KIND, self.header(), blob)

    @classmethod
    def parse(cls, received: frame.Frame) -> tuple[DpCut, cut.Cut]:
        """Check a DP_CUT frame; the columns are given as those of a cut of no gateway.

        Raises:
            BadCut: keys are missing or contradict the columns.
        """
        header = received.header
        for key in ("id", "start_ns", "end_ns", "start_us"):
            if type(header.get(key)) is not int or header[key] < 0:
                found = excerpt(header.get(key))
                raise BadCut(f"DP_CUT key {key!r} is {found}, expected a non-negative integer")
        if header["id"] == 0 or header["end_ns"] < header["start_ns"]:
            raise BadCut(
                f"DP_CUT id {header['id']} must be positive, and its interval must not run backwards"
            )
        duration_us = (header["end_ns"] - header["start_ns"]) // 1000
        # The columns are those of CUT, so CUT's own decoder checks them; identity is not known to the plane.
        borrowed = {**header, "gw": _NO_GATEWAY, "ep": 1, "seq": 1, "t": header["start_us"], "d": duration_us}
        columns = cut.decode(received._replace(kind=Kind.CUT, header=borrowed))
        streams = header.get("streams")
        if not isinstance(streams, list) or len(streams) != columns.rows:
            raise BadCut(f"DP_CUT has {columns.rows} rows but does not name as many streams")
        made = cls(
            id=header["id"],
            start_ns=header["start_ns"],
            end_ns=header["end_ns"],
            start_us=header["start_us"],
            throttle_gen=columns.throttle_gen,
            threshold_version=columns.threshold_version,
            rows=columns.rows,
            hist_entries=len(columns.hist),
            missed_entries=len(columns.missed),
            streams=streams,
            more=header.get("more") is True,
            starved_us=columns.starved_us,
            late=cut.parse_late(header.get("late")),
            sequential=columns.sequential or None,
        )
        return made, columns


@dataclass(frozen=True, slots=True)
class DpCaps(CapSet):
    """The caps in force, as in CAPS; ``lease_us`` is what is left of their lease."""

    KIND: ClassVar = Kind.DP_CAPS


@dataclass(frozen=True, slots=True)
class DpThresholds(Thresholds):
    """The threshold set, as in THRESHOLDS; in force from the next cut (the plane ends one at the switch)."""

    KIND: ClassVar = Kind.DP_THRESHOLDS


@dataclass(frozen=True, slots=True)
class DpCosts(Costs):
    """What an I/O costs, as in COSTS; a plane of before answers UNSUPPORTED, and keeps the constants."""

    KIND: ClassVar = Kind.DP_COSTS


@dataclass(frozen=True, slots=True)
class DpLease(WireMessage):
    """The server renewed the lease of all caps."""

    KIND: ClassVar = Kind.DP_LEASE


@dataclass(frozen=True, slots=True)
class DpStatus(WireMessage):
    """The question of another program on this host: `gateway-agent status`. It does not become the link."""

    KIND: ClassVar = Kind.DP_STATUS


@dataclass(frozen=True, slots=True)
class DpTakeOver(WireMessage):
    """The question of a plane's next process at an upgrade: it wants to serve in the place of this one."""

    KIND: ClassVar = Kind.DP_TAKE_OVER


@dataclass(frozen=True, slots=True)
class DpHandOver(FoldedMessage):
    """The answer to DP_TAKE_OVER. No client is accepted until DP_TAKEN, or the connection's end.

    With its first byte come descriptors (SCM_RIGHTS): of the control socket, then of each of ``listeners``,
    which are named as in the agent's file. ``caps`` and ``thresholds`` are the sets in force, as in DP_CAPS
    and DP_THRESHOLDS, ``costs`` what holds of DP_COSTS (absent: the constants); the lease of the caps ends at
    ``lease_end_ns``. The cut in progress began at
    ``start_ns`` (monotonic, as the lease) and ``start_us`` (wall clock). Folded where it is long
    (docs/formats/wire.md).
    """

    KIND: ClassVar = Kind.DP_HAND_OVER
    listeners: list[str]
    caps: Annotated[Header | None, Key(form="DP_CAPS | nil")]
    lease_end_ns: int | None
    thresholds: Annotated[Header | None, Key(form="DP_THRESHOLDS | nil")]
    start_ns: int
    start_us: int
    costs: Annotated[Header | None, Key(form="DP_COSTS", is_optional=True)] = None

    @classmethod
    def parse(cls, header: Header) -> DpHandOver:
        """Check a header.

        Raises:
            WireError: a key is missing or of another type.
        """
        listeners = header.get("listeners")
        if not isinstance(listeners, list) or not all(isinstance(text, str) for text in listeners):
            raise WireError(f"hands over listeners {excerpt(listeners)}, expected a list of addresses")
        caps, thresholds, end_ns = (header.get(key) for key in ("caps", "thresholds", "lease_end_ns"))
        costs = header.get("costs")
        for key, value in (("caps", caps), ("thresholds", thresholds), ("costs", costs)):
            if value is not None and not isinstance(value, dict):
                raise WireError(f"hands over {key} {excerpt(value)}, expected a map")
        if (type(end_ns) is not int) if caps is not None else (end_ns is not None):
            raise WireError(f"hands over caps whose lease ends at {excerpt(end_ns)}, expected nanoseconds")
        for key in ("start_ns", "start_us"):
            if type(header.get(key)) is not int or header[key] < 0:
                raise WireError(f"hands over {key} {excerpt(header.get(key))}, expected 0 or more")
        return cls(listeners, caps, end_ns, thresholds, header["start_ns"], header["start_us"], costs)


@dataclass(frozen=True, slots=True)
class DpTaken(WireMessage):
    """The next process serves. The former one keeps its clients until they go, or are asked to."""

    KIND: ClassVar = Kind.DP_TAKEN

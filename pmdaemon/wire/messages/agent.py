"""Messages between an agent and the PMDaemon, on the gateway's connection.

What an agent says is checked here for the server: every length is limited and every name must be one
(``names.NAME_RE``), because these values go on into mailboxes, SQL rows, URLs and selectors. What the server
says is checked here for the agent. A key that is missing or of the wrong type raises ``MalformedFrame``,
which names message, key and value, and closes the session. Unknown keys are ignored.

Alerts, certificates, costs and the ends of a connection have modules of their own: ``alerts``,
``certificates``, ``costs``, ``space``, ``thresholds``, ``ends``.

Pure. Source: P3 (register, notice newly activated access); docs/formats/messages.md.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, NamedTuple

from pmdaemon.errors import MalformedFrame
from pmdaemon.runtime.excerpt import excerpt, printable
from pmdaemon.wire import cut, names
from pmdaemon.wire.frame_template import encode_poll
from pmdaemon.wire.kinds import PROTO_MAX, PROTO_MIN, Kind
from pmdaemon.wire.labels import why_no_labels
from pmdaemon.wire.messages.base import (
    MAX_TEXT,
    FoldedMessage,
    Header,
    Key,
    WireMessage,
    count,
    maps,
    name,
    rows,
    text,
    whole,
)
from pmdaemon.wire.messages.client_caps import except_of
from pmdaemon.wire.messages.costs import FITTED_COSTS

MAX_EXPORTS: Final = 512  # bounds the GATEWAY announcement, which must fit a 64 KiB header
MAX_REFUSED: Final = 4096  # volumes of a set of caps, which fits a 64 KiB header
MAX_SPOOL_EPOCHS: Final = 256  # agent starts whose cuts are all still unacknowledged
SOURCES: Final = ("nbd", "host", "cgroup", "qemu", "simulated")
RATES: Final = ("ops_per_s", "bytes_per_s", "cost_per_s")
BURST: Final = "burst_s"
PEAK: Final = "peak_ops_per_s"
MAX_FEATURES: Final = 32
CLIENT_CAPS: Final = "client-caps"
"""Feature of an agent: it applies the caps of clients in CAPS."""
LARGE_CAPS: Final = "large-caps"
"""Feature of an agent: it takes CAPS that are longer than a header, in folded form."""
GROUP_CAPS: Final = "group-caps"
"""Feature of an agent: it applies the caps of groups in CAPS, and the burst of any cap."""
OTHER_CLIENT_CAPS: Final = "other-client-caps"
"""Feature of an agent: it applies one cap to all clients of a volume that no agreement names."""
BURST_CAPS: Final = "burst-caps"
"""Feature of an agent: it holds the bursts of caps in CAPS to their peak."""
WHOLE_CLIENT_CAPS: Final = "whole-client-caps"
"""Feature of an agent: it applies caps of clients over all their volumes in CAPS."""
PLANE_FEATURES: Final = (CLIENT_CAPS, GROUP_CAPS, OTHER_CLIENT_CAPS, BURST_CAPS, WHOLE_CLIENT_CAPS)
"""Those that its data planes must be able to do: an upgrade may leave a plane of before for a while."""
MAX_GROUP_VOLUMES: Final = 512  # of a group; an agent has no more exports
END_OF_GENERATIONS: Final = 1 << 63  # an agent takes no generation of caps from here on
_MAX_WORD: Final = (1 << 64) - 1

EXPORT_FORM: Final = (
    "{volume, backend: str, size_bytes: int, read_only: bool, "
    'source: "nbd" | "host" | "cgroup" | "qemu" | "simulated", labels?: {key: value}}'
)
STREAM_FORM: Final = "{id: int, volume, client, backend: str}"
CAPS_FORM: Final = (
    "[{volume: str, ops_per_s, bytes_per_s, cost_per_s: float | nil, burst_s?, peak_ops_per_s?: float}]"
)
CLIENT_CAPS_FORM: Final = "[{volume, client: str, except?: [str (glob)], and the rates as in caps}]"
GROUP_CAPS_FORM: Final = "[{group: str, volumes: {volume: weight}, and the rates as in caps}]"
WHOLE_CLIENTS_FORM: Final = "[{client: str, and the rates as in caps}]"


# -- who is there


@dataclass(frozen=True, slots=True)
class Hello(WireMessage):
    """First frame of an agent: which gateway it serves, under which name, and in which epoch.

    An epoch is a random number that each start of the agent draws. Of ``features`` the server uses
    ``client-caps``, ``other-client-caps``, ``whole-client-caps``, ``group-caps`` and ``large-caps`` (see
    CAPS), and ``fitted-costs`` (see COSTS); unknown ones are ignored, and an agent of before has none.
    """

    KIND: ClassVar = Kind.HELLO
    proto_min: int
    proto_max: int
    features: tuple[str, ...]
    software: str
    gateway_id: Annotated[str, Key("gw")]
    name: str
    epoch: Annotated[int, Key("ep")]

    @classmethod
    def of(
        cls,
        gateway_id: str,
        name: str,
        epoch: int,
        software: str,
        of_planes: Sequence[str] = PLANE_FEATURES,
    ) -> Hello:
        """The HELLO of this release; ``of_planes``: what all of the agent's data planes can do."""
        features = (*of_planes, LARGE_CAPS, FITTED_COSTS)
        return cls(PROTO_MIN, PROTO_MAX, features, software, gateway_id, name, epoch)

    @classmethod
    def parse(cls, header: Header) -> Hello:
        """Check a header.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
        """
        gateway_id = text(header, "HELLO", "gw")
        try:
            gateway_id = str(uuid.UUID(gateway_id))
        except ValueError as exc:
            raise MalformedFrame(f"HELLO: key 'gw' is {excerpt(gateway_id)}, expected a UUID") from exc
        return cls(
            gateway_id=gateway_id,
            name=name(header, "HELLO", "name"),
            epoch=whole(header, "HELLO", "ep", 1, (1 << 64) - 1),
            proto_min=whole(header, "HELLO", "proto_min", 0, 1 << 31),
            proto_max=whole(header, "HELLO", "proto_max", 0, 1 << 31),
            software=text(header, "HELLO", "software"),
            features=features_of(header, "HELLO"),
        )

    @staticmethod
    def gateway_of(header: Header) -> str | None:
        """The gateway it names, before all of it is checked; None: no UUID, and it will be refused."""
        value = header.get("gw")
        try:
            is_short = isinstance(value, str) and len(value) <= MAX_TEXT
            return str(uuid.UUID(value)) if is_short else None
        except ValueError:
            return None


def features_of(header: Header, frame_name: str) -> tuple[str, ...]:
    """Key ``features`` of HELLO and GATEWAY; none when it is absent.

    Raises:
        MalformedFrame: it is no list of short names.
        FrameTooLarge: it has more than ``MAX_FEATURES``.
    """
    if "features" not in header:
        return ()
    found = rows(header, frame_name, "features", MAX_FEATURES)
    for feature in found:
        if not isinstance(feature, str) or not names.is_name(feature):
            raise MalformedFrame(
                f"{frame_name}: key 'features' has {excerpt(feature)}, expected names (letters, digits and -)"
            )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Welcome(WireMessage):
    """The server accepts the agent. ``interval_us`` says how often it intends to poll.

    Of ``features`` agents use ``space`` (see SPACE); a server of before has none.
    """

    KIND: ClassVar = Kind.WELCOME
    proto: int
    features: tuple[str, ...]
    software: str
    interval_us: int
    server_us: int = 0

    @classmethod
    def parse(cls, header: Header) -> Welcome:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value, or the protocol that we do not speak.
        """
        welcome = cls(
            proto=whole(header, "WELCOME", "proto", 0, _MAX_WORD),
            features=features_of(header, "WELCOME"),
            interval_us=whole(header, "WELCOME", "interval_us", 1, (1 << 40) - 1),
            software=printable(header.get("software", ""), 256),
        )
        if not PROTO_MIN <= welcome.proto <= PROTO_MAX:
            raise MalformedFrame(
                f"WELCOME chose protocol {welcome.proto}, we speak {PROTO_MIN} to {PROTO_MAX}"
            )
        return welcome


@dataclass(frozen=True, slots=True)
class Schema(WireMessage):
    """The columns of the cuts that follow. Sent once a session, before REGISTER."""

    KIND: ClassVar = Kind.SCHEMA
    number: Annotated[int, Key("sch")]
    columns: list[str]
    types: Annotated[Header, Key(form="{counters: str, hist, missed: [[str, str]]}")]
    buckets: int

    @classmethod
    def of(cls) -> Schema:
        """The one schema of this release."""
        ours = cut.schema_header()
        return cls(ours["sch"], ours["columns"], ours["types"], ours["buckets"])

    @classmethod
    def parse(cls, header: Header) -> Schema:
        """Accept the one schema this release knows.

        Raises:
            MalformedFrame: another schema, or other columns under its number.
        """
        ours = cls.of()
        if header.get("sch") != ours.number:
            raise MalformedFrame(
                f"SCHEMA {excerpt(header.get('sch'))} is unknown; this server knows {ours.number}"
            )
        if header.get("columns") != ours.columns or header.get("buckets") != ours.buckets:
            raise MalformedFrame(f"SCHEMA {ours.number} with other columns or buckets than ours")
        return ours


@dataclass(frozen=True, slots=True)
class Registration(WireMessage):
    """What the gateway exports, and what its spool still holds, oldest epoch first.

    Sent again when the exports change. At most 512 exports and 256 epochs. An export without ``labels`` has
    none; an agent of before never names any.
    """

    KIND: ClassVar = Kind.REGISTER
    exports: Annotated[list[Header], Key(form=f"[{EXPORT_FORM}]")]
    spool: Annotated[list[tuple[int, int, int]], Key(form="[[ep, first_seq, last_seq]]")]

    @classmethod
    def parse(cls, header: Header) -> Registration:
        """Check a header.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
            FrameTooLarge: more exports or spooled epochs than allowed.
        """
        exports = [_export(item) for item in rows(header, "REGISTER", "exports", MAX_EXPORTS)]
        volumes = [item["volume"] for item in exports]
        if len(set(volumes)) != len(volumes):
            twice = sorted({volume for volume in volumes if volumes.count(volume) > 1})
            raise MalformedFrame(f"REGISTER: exported twice: {', '.join(twice)}")
        spool = []
        for row in rows(header, "REGISTER", "spool", MAX_SPOOL_EPOCHS):
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
        return cls(exports, spool)


def _export(item: Any) -> Header:
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
    found = {
        "volume": name(item, "REGISTER", "volume"),
        "backend": name(item, "REGISTER", "backend"),
        "size_bytes": whole(item, "REGISTER", "size_bytes", 0, (1 << 63) - 1),
        "read_only": read_only,
        "source": source,
    }
    labels = item.get("labels", {})
    if not isinstance(labels, dict):
        raise MalformedFrame(f"REGISTER: key 'labels' is {excerpt(labels)}, expected a map")
    if problem := why_no_labels(labels):
        raise MalformedFrame(f"REGISTER: key 'labels' of {found['volume']} has {problem}")
    return {**found, "labels": labels} if labels else found


@dataclass(frozen=True, slots=True)
class Registered(WireMessage):
    """The server took the exports of a REGISTER."""

    KIND: ClassVar = Kind.REGISTERED
    ok: bool = True

    @classmethod
    def parse(cls, _header: Header) -> Registered:
        """There is nothing to check."""
        return cls()


class StreamEntry(NamedTuple):
    """One stream of a STREAMS."""

    stream_id: int
    volume: str
    client: str
    backend: str

    def row(self) -> Header:
        """The stream as a map of a header."""
        return {"id": self.stream_id, "volume": self.volume, "client": self.client, "backend": self.backend}


@dataclass(frozen=True, slots=True)
class Streams(WireMessage):
    """The streams of the gateway: all on registration, then each new one before its first cut."""

    KIND: ClassVar = Kind.STREAMS
    streams: Annotated[tuple[StreamEntry, ...], Key(form=f"[{STREAM_FORM}]")]

    def header(self) -> Header:
        """The header as it goes on the wire."""
        return {"streams": [stream.row() for stream in self.streams]}

    @classmethod
    def parse(cls, header: Header, gateway_id: str) -> Streams:
        """Check a header; each id must be the one computed from the three names.

        Raises:
            MalformedFrame: names the key, its value and what is expected.
            FrameTooLarge: more streams than a cut may have rows.
        """
        streams = []
        for item in rows(header, "STREAMS", "streams", cut.MAX_ROWS):
            if not isinstance(item, dict):
                raise MalformedFrame(f"STREAMS: {excerpt(item)} is not a map")
            stream = StreamEntry(
                stream_id=whole(item, "STREAMS", "id", 0, (1 << 63) - 1),
                volume=name(item, "STREAMS", "volume"),
                client=name(item, "STREAMS", "client"),
                backend=name(item, "STREAMS", "backend"),
            )
            if stream.stream_id != names.stream_id(gateway_id, stream.volume, stream.client):
                raise MalformedFrame(
                    f"STREAMS: id {stream.stream_id} is not that of volume {stream.volume!r} "
                    f"and client {stream.client!r} on this gateway"
                )
            streams.append(stream)
        return cls(tuple(streams))


# -- polling


@dataclass(frozen=True, slots=True)
class Poll(WireMessage):
    """The request for cuts: make one now, and answer from ``from``.

    ``ack`` names, for each epoch with something outstanding, the highest *contiguous durable* seq. Only an
    ``ack`` lets the agent forget a cut. ``from`` is where the answer starts: normally one behind the last cut
    received; rewound to ack + 1 when dbmanager's incarnation changes or durability lags by 10 s, and to the
    first cut refused when dbmanager has no room. ``lease`` renews the lease of all caps of the gateway; it is
    true only while services renewed it within 3 s.
    """

    KIND: ClassVar = Kind.POLL
    poll: int
    sent_ns: int
    ack: Annotated[tuple[tuple[int, int], ...], Key(form="[[ep, seq]]")]
    start: Annotated[tuple[int, int] | None, Key("from", "[ep, seq] | nil")]
    lease: bool

    def encode(self) -> bytes:
        """The frame (``wire.frame_template``)."""
        return encode_poll(self.poll, self.sent_ns, self.ack, self.start or (), self.lease)

    @classmethod
    def parse(cls, header: Header) -> Poll:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value.
        """
        acks, start = header.get("ack"), header.get("from")
        if not isinstance(acks, list):
            raise MalformedFrame(f"POLL key 'ack' is {excerpt(acks)}, expected a list of [epoch, seq]")
        return cls(
            poll=whole(header, "POLL", "poll", 0, _MAX_WORD),
            sent_ns=whole(header, "POLL", "sent_ns", 0, _MAX_WORD),
            ack=tuple(_position("POLL", "ack", item) for item in acks),
            start=None if not start else _position("POLL", "from", start),
            lease=header.get("lease") is True,
        )


def _position(frame_name: str, key: str, value: Any) -> tuple[int, int]:
    match value:
        case [int(epoch), int(seq)] if epoch >= 0 and seq >= 0:
            return epoch, seq
    raise MalformedFrame(f"{frame_name} key {key!r} holds {excerpt(value)}, expected [epoch, seq]")


@dataclass(frozen=True, slots=True)
class Reply(WireMessage):
    """The end of the answer to one poll, behind its CUT frames.

    ``sent_ns`` is that of the POLL; ``wall_us`` the agent's clock, below 2^53. ``cuts``, ``first`` and
    ``last`` do not count the LIVE cut. ``dropped`` counts cuts that the spool lost in its life.
    """

    KIND: ClassVar = Kind.REPLY
    poll: int
    sent_ns: int
    wall_us: int
    cuts: int
    first: Annotated[tuple[int, int] | None, Key(form="[ep, seq] | nil")]
    last: Annotated[tuple[int, int] | None, Key(form="[ep, seq] | nil")]
    dropped: int

    @classmethod
    def parse(cls, header: Header) -> Reply:
        """Check what the server uses: the other fields only inform, and stay as they came.

        Raises:
            MalformedFrame: names the key and its value.
        """
        number, dropped = count(header, "poll"), count(header, "dropped")
        return cls(
            poll=number,
            sent_ns=header.get("sent_ns", 0),
            wall_us=count(header, "wall_us", cut.MAX_TIME_US),
            cuts=header.get("cuts", 0),
            first=header.get("first"),
            last=header.get("last"),
            dropped=dropped,
        )


# -- caps


@dataclass(frozen=True, slots=True)
class CapSet(FoldedMessage):
    """The complete set of caps of this gateway: a volume not named has no cap of the server's.

    ``gen`` grows with every set that the server issues. The set holds for ``lease_us`` without a renewal.
    ``clients`` are caps of single clients of a volume, beside that of the volume: both hold. Absent when
    there is none, and sent to agents with the feature ``client-caps`` only; others ignore it.
    A glob is all clients of the volume that match it (``*``: all), but those that match one of ``except``:
    they share the rates, which hold beside those of a single client. A client is of one glob at most. Such an
    entry is sent to agents with ``other-client-caps`` only.
    ``groups`` are caps of several volumes together, beside those: the volumes share the rates by weight.
    Absent when there is none, and sent to agents with the feature ``group-caps`` only. ``burst_s`` is how
    many seconds' worth of the rates may pass at once, 0.02 without it; agents of before ignore it.
    ``peak_ops_per_s`` is how fast operations pass then; it is sent to agents with ``burst-caps`` only, and
    others are sent no burst in its place. A set above 64 KiB is folded (wire.md), and sent to agents with the
    feature ``large-caps`` only. ``whole_clients`` are caps of clients over all volumes that they use here,
    beside those; absent when there is none, and sent to agents with ``whole-client-caps`` only.

    The cost of an I/O is 1 for a read or write (``cost_read``, ``cost_write`` of the export) + bytes / 65,536
    (``cost_bytes`` of the export).
    """

    KIND: ClassVar = Kind.CAPS
    gen: int
    lease_us: int
    caps: Annotated[tuple[Header, ...], Key(form=CAPS_FORM)]
    clients: Annotated[tuple[Header, ...] | None, Key(form=CLIENT_CAPS_FORM, is_optional=True)] = None
    groups: Annotated[tuple[Header, ...] | None, Key(form=GROUP_CAPS_FORM, is_optional=True)] = None
    whole_clients: Annotated[tuple[Header, ...] | None, Key(form=WHOLE_CLIENTS_FORM, is_optional=True)] = None

    @property
    def is_shared(self) -> bool:
        """Whether it has rates that several planes of a gateway share: of groups, of whole clients."""
        return bool(self.groups or self.whole_clients)

    @property
    def volumes(self) -> frozenset[str]:
        """Those with a cap, or with one of a client or of a group."""
        grouped = (volume for entry in self.groups or () for volume in entry["volumes"])
        return frozenset((*(entry["volume"] for entry in (*self.caps, *(self.clients or ()))), *grouped))

    @classmethod
    def parse(cls, header: Header) -> CapSet:
        """Check a header.

        Raises:
            MalformedFrame: names the key, the volume and the value.
        """
        clients = maps("CAPS", header, "clients") if header.get("clients") is not None else ()
        groups = maps("CAPS", header, "groups") if header.get("groups") is not None else ()
        wholes = maps("CAPS", header, "whole_clients") if header.get("whole_clients") is not None else ()
        return cls(
            gen=whole(header, "CAPS", "gen", 0, END_OF_GENERATIONS - 1),
            lease_us=whole(header, "CAPS", "lease_us", 1, (1 << 50) - 1),
            caps=tuple(_cap(entry, "volume") for entry in maps("CAPS", header, "caps")),
            clients=tuple(_cap(each, "volume", "client") | except_of(each) for each in clients) or None,
            groups=tuple(_group_cap(entry) for entry in groups) or None,
            whole_clients=tuple(_cap(entry, "client") for entry in wholes) or None,
        )


def _cap(entry: Header, *named: str) -> Header:
    """One entry of CAPS; ``named``: the keys that say whose it is."""
    for key in named:
        if not isinstance(entry.get(key), str):
            raise MalformedFrame(f"CAPS entry {excerpt(entry)} names no {key}")
    for key in (*RATES, BURST, PEAK):
        if entry.get(key) is not None and not _is_positive(entry[key]):
            raise MalformedFrame(
                f"CAPS key {key!r} of {excerpt(entry[named[0]])} is {excerpt(entry[key])}, "
                "expected a positive number"
            )
    burst = {key: entry[key] for key in (BURST, PEAK) if entry.get(key) is not None}
    return {key: entry.get(key) for key in (*named, *RATES)} | burst


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _group_cap(entry: Header) -> Header:
    """One entry of a group."""
    volumes = entry.get("volumes")
    if not isinstance(volumes, dict) or not 0 < len(volumes) <= MAX_GROUP_VOLUMES:
        problem = f"names no volumes, or more than {MAX_GROUP_VOLUMES}"
        raise MalformedFrame(f"CAPS entry {excerpt(entry)} {problem}")
    for volume, weight in volumes.items():
        if not isinstance(volume, str) or not _is_positive(weight):
            raise MalformedFrame(
                f"CAPS entry of group {excerpt(entry.get('group'))}: weight of {excerpt(volume)} is "
                f"{excerpt(weight)}, expected a positive number"
            )
    return _cap(entry, "group") | {"volumes": dict(volumes)}


@dataclass(frozen=True, slots=True)
class CapsAck(WireMessage):
    """What became of a CAPS. Sent when a cut made behind it shows the generation.

    ``refused`` names volumes of the set that this gateway cannot cap, nor their clients, as none of its
    planes serves them; the caps of the others hold if ``ok``. Absent when there is none; an agent of before
    this key never says it.
    """

    KIND: ClassVar = Kind.CAPS_ACK
    gen: int
    ok: bool
    reason: str
    refused: Annotated[tuple[str, ...] | None, Key(form="[volume]", is_optional=True)] = None

    @classmethod
    def parse(cls, header: Header) -> CapsAck:
        """Check a header.

        Raises:
            MalformedFrame: names the key and its value.
        """
        return cls(
            count(header, "gen"),
            header.get("ok") is True,
            printable(header.get("reason", ""), 500),
            refused_volumes(header, "CAPS_ACK"),
        )


def refused_volumes(header: Header, frame_name: str) -> tuple[str, ...] | None:
    """Key ``refused`` of CAPS_ACK and CAPS_STATE; None when it is absent.

    Raises:
        MalformedFrame: it is no list of names.
        FrameTooLarge: it has more entries than a set of caps can have.
    """
    if "refused" not in header:
        return None
    found = rows(header, frame_name, "refused", MAX_REFUSED)
    for volume in found:
        if not isinstance(volume, str) or not names.is_name(volume):
            raise MalformedFrame(f"{frame_name}: key 'refused' has {excerpt(volume)}, which names no volume")
    return tuple(found)

"""Messages between the daemon's parent and its pairs, on the channel of each (``poller.channel``).

A message is JSON, the fields of a class here and a key ``op`` that names it, with 0 to 2 descriptors: a
socket, and *bytes*, an unlinked memory file (memfd), so their size has no limit. Both sides are of one
release, except while an upgrade restarts them: unknown keys are ignored by the reader. A message that lacks a
key, or has a value of another type, is ``Unreadable``. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, Final, get_args, get_origin, get_type_hints

from pmdaemon.runtime.excerpt import excerpt
from pmdaemon.wire.messages.base import form_of


@dataclass(frozen=True, slots=True)
class NewConnection:
    """Parent to pair, with a socket: an accepted or dialled connection, nothing read yet."""

    address: str
    dialled: bool


@dataclass(frozen=True, slots=True)
class ShardMap:
    """Parent to pair: which pair has which shard, all of them."""

    owners: Sequence[int]


@dataclass(frozen=True, slots=True)
class MovedConnection:
    """Pair to parent to pair, with a socket and bytes: a new connection of a shard that is at the other pair.

    The bytes are what was read of it. ``hops`` counts how often it was passed on (``poller.migration``).
    """

    shard: int
    gw: str
    hops: int
    address: str
    dialled: bool
    opened_ns: int


@dataclass(frozen=True, slots=True)
class Mail:
    """Pair to parent to pair, with bytes: a message of the mailbox for a shard that has moved."""

    shard: int
    sender: str


@dataclass(frozen=True, slots=True)
class RegisteredElsewhere:
    """Parent to pair: the same gateway has registered with another pair."""

    gw: str
    address: str


@dataclass(frozen=True, slots=True)
class PairReport:
    """Pair to parent, once a second: what it does.

    ``connections`` are the open ones, registered or not; ``gateways`` have a session; for ``t_ptmax_us`` see
    ``poller.balance``; ``busy_ratio`` is CPU time of the process by wall time since the report before;
    ``shards`` are pairs of a shard and its gateways with a session, if there are any; ``steps`` the rounds
    each thread has made, by its name; ``metrics`` counters and gauges for ``/metrics``, by name.
    """

    connections: int = 0
    gateways: int = 0
    t_ptmax_us: float = 0.0
    busy_ratio: float = 0.0
    shards: Sequence[Sequence[int]] = ()
    steps: dict[str, int] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GatewayRegistered:
    """Pair to parent: a gateway has registered here."""

    gw: str
    address: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Pair to parent: why a connection that the parent has dialled ends, or has ended (``is_over``)."""

    address: str
    reason: str
    is_over: bool


@dataclass(frozen=True, slots=True)
class Unreadable:
    """What a reader makes of a message that is none of the above; never sent."""

    op: str
    problem: str


Sent = (
    NewConnection
    | ShardMap
    | MovedConnection
    | Mail
    | RegisteredElsewhere
    | PairReport
    | GatewayRegistered
    | Refused
)
Body = Sent | Unreadable

OPS: Final[dict[str, type[Sent]]] = {
    "new": NewConnection,
    "map": ShardMap,
    "moved": MovedConnection,
    "mail": Mail,
    "elsewhere": RegisteredElsewhere,
    "report": PairReport,
    "up": GatewayRegistered,
    "refused": Refused,
}
_OP_OF: Final = {kind: op for op, kind in OPS.items()}


def op_of(body: Body) -> str:
    """What a message is about, as on the channel."""
    return body.op if isinstance(body, Unreadable) else _OP_OF[type(body)]


def encode(body: Sent) -> bytes:
    """The JSON text of a message."""
    said = {item.name: getattr(body, item.name) for item in fields(body)}
    return json.dumps({"op": op_of(body), **said}, separators=(",", ":")).encode()


def decode(data: bytes) -> Body:
    """The message of a JSON text; ``Unreadable`` if it is none of ``OPS``, or a key is missing or wrong."""
    try:
        header: dict[str, Any] = dict(json.loads(data))
    except (TypeError, ValueError) as exc:
        return Unreadable("", str(exc))
    op = str(header.get("op"))
    kind = OPS.get(op)
    if kind is None:
        return Unreadable(op, f"{op!r} is no message of this release")
    types = _types(kind)  # type: ignore[arg-type]  # a class has a hash
    missing = [key for key in _required(kind) if key not in header]  # type: ignore[arg-type]  # as above
    if missing:
        return Unreadable(op, f"it lacks {', '.join(missing)}")
    said = {key: header[key] for key in types if key in header}
    for key, hint in types.items():
        if key in said and not _is_of(said[key], hint):
            return Unreadable(op, f"its {key} is {excerpt(said[key])}, expected {form_of(hint)}")
    return kind(**said)


@lru_cache(maxsize=len(OPS))
def _types(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


@lru_cache(maxsize=len(OPS))
def _required(kind: Any) -> tuple[str, ...]:
    return tuple(
        item.name for item in fields(kind) if item.default is MISSING and item.default_factory is MISSING
    )


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of the type of a field."""
    if get_origin(hint) is Sequence:
        return isinstance(value, list) and all(_is_of(each, get_args(hint)[0]) for each in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(_is_of(each, get_args(hint)[1]) for each in value.values())
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint

"""Messages between the daemon's parent and its pairs, on the channel of each (``poller.channel``).

A message is JSON, the fields of a class here and a key ``op`` that names it, with 0 to 2 descriptors: a
socket, and *bytes*, an unlinked memory file (memfd), so their size has no limit. Both sides are of one
release, except while an upgrade restarts them: unknown keys are ignored by the reader. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final, NamedTuple


class NewConnection(NamedTuple):
    """Parent to pair, with a socket: an accepted or dialled connection, nothing read yet."""

    address: str
    dialled: bool


class ShardMap(NamedTuple):
    """Parent to pair: which pair has which shard, all of them."""

    owners: Sequence[int]


class MovedConnection(NamedTuple):
    """Pair to parent to pair, with a socket and bytes: a new connection of a shard that is at the other pair.

    The bytes are what was read of it. ``hops`` counts how often it was passed on (``poller.migration``).
    """

    shard: int
    gw: str
    hops: int
    address: str
    dialled: bool
    opened_ns: int


class Mail(NamedTuple):
    """Pair to parent to pair, with bytes: a message of the mailbox for a shard that has moved."""

    shard: int
    sender: str


class RegisteredElsewhere(NamedTuple):
    """Parent to pair: the same gateway has registered with another pair."""

    gw: str
    address: str


class PairReport(NamedTuple):
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
    steps: dict[str, int] = {}  # noqa: RUF012  # never changed; a default for the parent's first check
    metrics: dict[str, float] = {}  # noqa: RUF012  # as above


class GatewayRegistered(NamedTuple):
    """Pair to parent: a gateway has registered here."""

    gw: str
    address: str


class Refused(NamedTuple):
    """Pair to parent: why a connection that the parent has dialled ends, or has ended (``is_over``)."""

    address: str
    reason: str
    is_over: bool


class Unreadable(NamedTuple):
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
    return json.dumps({"op": op_of(body), **body._asdict()}, separators=(",", ":")).encode()


def decode(data: bytes) -> Body:
    """The message of a JSON text; ``Unreadable`` if it is none of ``OPS``, or lacks a key."""
    try:
        header: dict[str, Any] = dict(json.loads(data))
    except (TypeError, ValueError) as exc:
        return Unreadable("", str(exc))
    op = str(header.get("op"))
    kind = OPS.get(op)
    if kind is None:
        return Unreadable(op, f"{op!r} is no message of this release")
    missing = [key for key in kind._fields if key not in header and key not in kind._field_defaults]
    if missing:
        return Unreadable(op, f"it lacks {', '.join(missing)}")
    return kind(**{key: header[key] for key in kind._fields if key in header})

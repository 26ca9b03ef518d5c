"""Which caps go into the message that brings a gateway its complete set.

A set is one message, so its length has a limit: what agents of before take, or a folded header
(``wire.frame``) for those that say ``large-caps``. Names are 128 characters at most, so that an entry alone
always fits. Where a set would be longer, volumes come before clients, and of each those with the largest
rates, which are those that use the most. What a gateway holds keeps its place until another has more than
``HELD_FACTOR`` times its rate: use is noisy, and a cap that comes and goes with it holds nothing.

Pure functions. What is said of caps is worded here, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

from pmdaemon.wire.frame import MAX_FOLDED_BYTES, MAX_HEADER_BYTES
from pmdaemon.wire.messages.client_caps import EXCEPT
from pmdaemon.wire.rates import COST_BYTES, Rates
from sla_server.services.control.decisions import RaiseEvent
from sla_server.services.control.targets import (
    client_of,
    group_of,
    is_glob,
    named,
    volume_of,
    whole_client_of,
)
from sla_server.services.control.throttle import Throttle
from sla_server.services.control.usage import GatewayTable

HEAD_BYTES: Final = 512
"""Of the header: generation, lease, the gateway's id, the names of the lists, and keys that may be added."""
ENTRY_BYTES: Final = 138
"""Of an entry, its names aside: keys, four rates and a burst of 9 bytes, lengths."""
MEMBER_BYTES: Final = 12
"""Of a volume of a group, its name aside: its weight, and lengths."""


def entry_bytes(target: str, volumes: Iterable[str] = ()) -> int:
    """Most that the entry of a target needs, with the volumes of a group or those that a glob is not for."""
    return ENTRY_BYTES + len(target) + sum(MEMBER_BYTES + len(volume) for volume in volumes)


HELD_FACTOR: Final = 2.0
NO_MEMBERS: Final[Mapping[str, Mapping[str, float]]] = {}


def fitting(
    shares: Mapping[str, Rates],
    is_large: bool,
    held: Collection[str] = (),
    members: Mapping[str, Mapping[str, float]] = NO_MEMBERS,
) -> dict[str, Rates]:
    """Those of a gateway's caps that fit into one message; all of them as a rule.

    Args:
        shares: rates by target.
        is_large: whether its agent takes a folded set.
        held: targets that it has caps of now.
        members: volumes of each group among the targets, and their weights; whom a glob is not for.
    """
    left = (MAX_FOLDED_BYTES if is_large else MAX_HEADER_BYTES) - HEAD_BYTES
    sizes = {target: entry_bytes(target, members.get(target, ())) for target in shares}
    if sum(sizes.values()) <= left:
        return dict(shares)
    found: dict[str, Rates] = {}
    weight = {t: _strength(r) * (HELD_FACTOR if t in held else 1.0) for t, r in shares.items()}
    for target in sorted(shares, key=lambda t: (bool(client_of(t)), -weight[t], t)):
        left -= sizes[target]
        if left < 0:
            break
        found[target] = shares[target]
    return found


def left_out_event(table: GatewayTable, names: Collection[str]) -> RaiseEvent:
    """What to say of caps that do not fit into the message for a gateway."""
    where, fix = table.name or table.gateway_id, "use shorter names, or throttle fewer clients"
    if table.caps_large is False:
        fix = f"upgrade its agent, which takes 64 KiB of caps, or {fix}"
    text = f"gateway {where}: {len(names)} caps do not fit into one message ({named(names)}): {fix}"
    details = {"gateway_id": table.gateway_id, "left_out": len(names)}
    return RaiseEvent("throttle-not-effective", "critical", "gateway", table.gateway_id, text, details)


def throttle_event(kind: str, throttle: Throttle, text: str) -> RaiseEvent:
    """What to say of a throttle that begins, ends or has no effect."""
    severity = {"throttle-not-effective": "critical", "throttle-set": "warning"}.get(kind, "info")
    if throttle.client and throttle.volume:
        text = f"client {throttle.client}: {text}"
    return RaiseEvent(kind, severity, *throttle.element, text, throttle.row())


def _strength(rates: Rates) -> float:
    """The least of its rates, in cost units a second for I/Os of 4 KiB."""
    size = rates.bytes_per_s
    known = (
        rates.cost_per_s,
        rates.ops_per_s,
        None if size is None else size / 4096 * (1 + 4096 / COST_BYTES),
    )
    return min((rate for rate in known if rate is not None), default=0.0)


class Entries(NamedTuple):
    """Entries of message CAPS, in the order of ``SetCaps``."""

    volumes: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    groups: list[dict[str, Any]]
    whole_clients: list[dict[str, Any]]


def entries(shares: Mapping[str, Rates], members: Mapping[str, Mapping[str, float]] = NO_MEMBERS) -> Entries:
    """Entries for message CAPS; ``members``: volumes of a group that are there; whom a glob is not for."""
    found = Entries([], [], [], [])
    for target, rates in sorted(shares.items()):
        client = client_of(target)
        if whole := whole_client_of(target):
            found.whole_clients.append({"client": whole, **rates.limits()})
        elif group := group_of(target):
            found.groups.append({"group": group, "volumes": dict(members[target]), **rates.limits()})
        else:
            more = {EXCEPT: sorted(members.get(target, ()))} if is_glob(target) else {}
            (found.clients if client else found.volumes).append(rates.entry(volume_of(target), client) | more)
    return found

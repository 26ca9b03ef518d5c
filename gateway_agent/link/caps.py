"""What the server has put in force here: caps with their lease, the threshold set, and what I/Os cost.

The planes hold the caps and count the lease themselves; the link keeps the newest set so that a plane that
comes back gets it at once, *if its lease still runs* and only for what is left of it; with the next renewal
it gets the set for the whole lease, as it renews for as long as it was ordered last. Control groups and QEMU
know no lease: their limits are what the link says. So the set outlives the link (``KeptCaps``): the next one
puts it in force again for what is left of the lease, also while the server is away. CAPS_ACK is due when
every reachable enforcer has proved that it took the set (see ``enforcers.base``). Caps of volumes that no
enforcer has, or of their clients, are refused by the volume's name: nothing here can slow them.

The threshold set is kept in ``state_dir/thresholds.json``, the costs in ``costs.json``: planes that come up
before the server is reached again count against them. A file that cannot be written or read costs little: the
server sends both on registration anyway.

Thread: the link's loop only; time comes as an argument.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import structlog

from gateway_agent.enforcers.base import Enforcer
from gateway_agent.errors import StateFileBroken
from gateway_agent.link import state_files
from gateway_agent.link.group_shares import GroupShares, Parts, caps_of_plane
from gateway_agent.sources.sample import Sample
from pmdaemon.errors import MalformedFrame, WireError
from pmdaemon.runtime.clock import boot_id, boot_ns
from pmdaemon.wire.messages.agent import MAX_REFUSED, CapsAck, CapSet
from pmdaemon.wire.messages.costs import Costs
from pmdaemon.wire.messages.thresholds import Thresholds

ONLY_OBSERVES: Final = (
    "this gateway only observes: it has no data plane, control group or QEMU process that it could slow down"
)
log = structlog.get_logger("caps")
ANSWER_BYTES: Final = 60_000
"""Of the names in an answer, whose header holds 64 KiB; a set of caps may name more."""
KEPT_WITHIN_NS: Final = 500_000_000
"""How far the end of a lease in the file may be behind the true one, so that frequent polls write seldom. A
set may end so much early behind a restart, never late."""


class KeptSet(NamedTuple):
    """A set of caps, and what is left of its lease."""

    caps: CapSet
    left_ns: int


class KeptCaps:
    """The set in force and the end of its lease, in ``state_dir/caps.json``, for the link that comes next.

    The end is a time since boot, beside the id of the boot: a wall clock that is set makes no lease longer or
    shorter, and a machine that was asleep has slept through it. What another boot has left is forgotten: its
    control groups and QEMU processes are gone, and the server sends a set with the first session.

    Durability: content and name survive the death of the process; a power cut is another boot.

    Args:
        path: None keeps nothing.
        boot_ns: time since boot.
        boot_id: of this boot; without one nothing is kept.
    """

    def __init__(
        self, path: Path | None, boot_ns: Callable[[], int] = boot_ns, boot_id: Callable[[], str] = boot_id
    ) -> None:
        self._boot_ns = boot_ns
        self._boot_id = boot_id() if path is not None else ""
        self._path = path if self._boot_id else None
        self._end_ns: int | None = None
        self._problem = ""

    def load(self) -> KeptSet | None:
        """What the link before has left; None if its lease has ended, or there is none."""
        if self._path is None:
            return None
        try:
            value = state_files.read_json(self._path, "A new one is begun")
            if not isinstance(value, dict) or value.get("boot_id") != self._boot_id:
                return None
            header, end_ns = value.get("caps"), value.get("end_boot_ns")
            caps = CapSet.parse(header if isinstance(header, dict) else {})
        except (StateFileBroken, MalformedFrame) as exc:
            log.error("caps-forgotten", problem=str(exc))
            return None
        left_ns = end_ns - self._boot_ns() if type(end_ns) is int else 0
        if not 0 < left_ns <= caps.lease_us * 1000:
            return None
        self._end_ns = end_ns
        return KeptSet(caps, left_ns)

    def store(self, caps: CapSet, left_ns: int) -> None:
        """Keep a set, or the later end of its lease. One that cannot be written is kept in no older form."""
        if self._path is None:
            return
        end_ns = self._boot_ns() + left_ns
        value = {"boot_id": self._boot_id, "end_boot_ns": end_ns, "caps": caps.header()}
        try:
            state_files.write_json(self._path, value, synced=False)
            problem = ""
        except OSError as exc:
            problem = str(exc)
            self.forget()
        self._end_ns = end_ns if not problem else None
        if problem and problem != self._problem:
            log.warning("caps-not-kept", problem=problem)
        self._problem = problem

    def renewed(self, caps: CapSet, left_ns: int) -> None:
        """The lease of the set that is stored ends later."""
        if self._end_ns is None or self._boot_ns() + left_ns - self._end_ns >= KEPT_WITHIN_NS:
            self.store(caps, left_ns)

    def forget(self) -> None:
        """No set is in force."""
        self._end_ns = None
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


class LeasedCaps:
    """State: the set in force, the end of its lease (monotonic ns), whether its acknowledgement is due.

    ``_is_cut_short``: whether an enforcer was given less than the whole lease.
    """

    def __init__(self, enforcers: Sequence[Enforcer], kept: KeptCaps | None = None) -> None:
        self._enforcers = enforcers
        self._kept = kept or KeptCaps(None)
        self._caps: CapSet | None = None
        self._lease_end_ns = 0
        self._ack_due = False
        self._is_cut_short = False
        self._shares = GroupShares()

    def resume(self, now_ns: int) -> None:
        """At the start: put in force what the link before has left, for the rest of its lease."""
        found = self._kept.load()
        if found is None:
            self._kept.forget()
            return
        self._caps, self._lease_end_ns = found.caps, now_ns + found.left_ns
        log.info("caps-resumed", gen=found.caps.gen, lease_left_s=round(found.left_ns / 1e9, 1))
        self._hand_over(found.caps, found.left_ns // 1000)

    def replace(self, caps: CapSet, now_ns: int) -> None:
        """The server sent a set: hand it to every enforcer that is reachable."""
        self._caps = caps
        self._lease_end_ns = now_ns + caps.lease_us * 1000
        self._ack_due = True
        self._kept.store(caps, caps.lease_us * 1000)  # before it holds: no older one comes back
        self._hand_over(caps, caps.lease_us)

    def _hand_over(self, caps: CapSet, lease_us: int) -> None:
        self._is_cut_short = lease_us < caps.lease_us
        parts = self._parts(caps)
        self._shares.sent(parts)
        for enforcer in self._enforcers:
            if enforcer.reachable:
                enforcer.apply(caps_of_plane(caps, parts.get(enforcer.name, {})), lease_us)

    def _parts(self, caps: CapSet) -> Parts:
        reachable = [enforcer for enforcer in self._enforcers if enforcer.reachable]
        planes = {enforcer.name: enforcer.volumes for enforcer in reachable}
        return self._shares.parts(caps, planes, [each.name for each in reachable if each.tells_clients])

    def used(self, samples: Iterable[Sample], now_ns: int) -> None:
        """Samples were collected: what several planes share is divided by use."""
        self._shares.count(self._caps, samples)
        caps, left_us = self._caps, (self._lease_end_ns - now_ns) // 1000
        if caps is None or not caps.is_shared or left_us <= 0 or self._ack_due:
            return
        if self._shares.have_moved(self._parts(caps)):
            self._hand_over(caps, left_us)

    def enforcer_connected(self, enforcer: Enforcer, now_ns: int) -> bool:
        """An enforcer became reachable: give it what still holds; whether there is any."""
        left_us = (self._lease_end_ns - now_ns) // 1000
        if self._caps is None or left_us <= 0:
            return False
        if self._caps.is_shared:  # the parts of groups at the other planes are smaller now
            self._hand_over(self._caps, left_us)
        else:
            self._is_cut_short |= left_us < self._caps.lease_us
            enforcer.apply(self._caps, left_us)
        return True

    def renew(self, now_ns: int) -> None:
        """The server renewed the lease of all caps; one that has ended is left for ``expire`` to end."""
        end_ns = self.lease_end_ns
        if end_ns is not None and now_ns >= end_ns:  # as in a link that was stopped
            return
        if self._caps is not None:
            self._lease_end_ns = now_ns + self._caps.lease_us * 1000
            self._kept.renewed(self._caps, self._caps.lease_us * 1000)
            if self._is_cut_short:
                self._hand_over(self._caps, self._caps.lease_us)
        for enforcer in self._enforcers:
            enforcer.renew_lease()

    def server_gone(self) -> None:
        """The session ended: no acknowledgement is due; the caps hold until their lease ends."""
        self._ack_due = False

    @property
    def lease_end_ns(self) -> int | None:
        """When the caps in force end without renewal; None when nothing is in force."""
        is_empty = self._caps is None or not (self._caps.volumes or self._caps.whole_clients)
        return None if is_empty else self._lease_end_ns

    @property
    def generation(self) -> int | None:
        """Of the newest set; None without one."""
        return self._caps.gen if self._caps is not None else None

    def expire(self, now_ns: int) -> CapSet | None:
        """Forget a set whose lease has ended; returns it, once."""
        end_ns = self.lease_end_ns
        if end_ns is None or now_ns < end_ns:
            return None
        lapsed, self._caps, self._ack_due = self._caps, None, False
        self._kept.forget()
        for enforcer in self._enforcers:
            enforcer.lapsed()
        return lapsed

    def due_ack(self) -> CapsAck | None:
        """The CAPS_ACK that is due now, once; None while proof is missing."""
        if not self._ack_due or self._caps is None:
            return None
        gen, volumes = self._caps.gen, self._caps.volumes
        served = frozenset[str]().union(*(enforcer.volumes for enforcer in self._enforcers))
        foreign = _that_fit(sorted(volumes - served))
        reachable = [enforcer for enforcer in self._enforcers if enforcer.reachable]
        refusing = [enforcer.name for enforcer in reachable if enforcer.refused == gen]
        if not self._enforcers or refusing:
            self._ack_due = False
            refused = f"refused by {', '.join(refusing)}, whose log says why; the former caps hold there"
            reason = refused if refusing else ONLY_OBSERVES
            return CapsAck(gen, ok=False, reason=reason, refused=foreign or None)
        if not reachable or any(enforcer.took != gen for enforcer in reachable):
            return None
        self._ack_due = False
        reason = f"nothing of this gateway serves {_some(foreign)}" if foreign else ""
        holds_some = len(foreign) < len(volumes) or not volumes or bool(self._caps.whole_clients)
        return CapsAck(gen, ok=holds_some, reason=reason, refused=foreign or None)


def _that_fit(volumes: Sequence[str]) -> tuple[str, ...]:
    """The first of them that an answer holds; the server sends no caps of these, and hears of more then."""
    found, left = list[str](), ANSWER_BYTES
    for volume in volumes:
        left -= len(volume) + 3
        if left < 0 or len(found) == MAX_REFUSED:
            break
        found.append(volume)
    return tuple(found)


def _some(volumes: Sequence[str]) -> str:
    """Volumes by name, the first three of them."""
    named = ", ".join(volumes[:3])
    return f"{named} and {len(volumes) - 3} more" if len(volumes) > 3 else named


Kept = TypeVar("Kept", Thresholds, Costs)


class MessageStore(Generic[Kept]):
    """The newest message of a kind. ``path`` None keeps it in memory only."""

    def __init__(self, path: Path | None, kind: type[Kept]) -> None:
        self._path = path
        self._kind: type[Kept] = kind
        self.current: Kept | None = self._load()

    def _load(self) -> Kept | None:
        if self._path is None:
            return None
        try:
            value = state_files.read_json(self._path, "A new one is begun")
            return self._kind.parse(value) if isinstance(value, dict) else None
        except (StateFileBroken, WireError) as exc:
            log.error(f"{self._path.stem}-forgotten", problem=str(exc))
            return None

    def replace(self, received: Kept) -> None:
        """Keep another one.

        Raises:
            OSError: it is in force but could not be written.
        """
        self.current = received
        if self._path is not None:
            state_files.write_json(self._path, received.header(), synced=True)


class ThresholdStore(MessageStore[Thresholds]):
    """The newest threshold set."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, Thresholds)


class CostStore(MessageStore[Costs]):
    """What an I/O costs, as the server said last."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path, Costs)

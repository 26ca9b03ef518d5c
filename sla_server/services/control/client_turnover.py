"""Clients of divided volumes that come, go, or take their volume's place while a loop is at work.

What a loop allows a divided volume is the volume's, whatever the names of its clients are. Three things
follow:

    join     a client that was not there when its volume was slowed down shares what the volume has, at once.
             It brings nothing into C: else a client that comes under a new name would be free until the
             promise is broken again, and would then be let in with all that it uses
    leave    a client that uses nothing for the idle time leaves its part of C to the others. The last of a
             volume stays: what it has waits for the client that comes next, until the loop has ended
    carry    when a volume is divided, or whole again, its caps go over to its clients, or to it: C changes
             by what those use that are slowed down in one of the two forms only. When clients of a volume are
             taken together, or no longer so (``newcomers``), C stays

Each change makes the loop wait for evidence under other caps, so clients join and leave once in
``resplit_min_s``.

Pure functions but for ``turned_ns`` of the loop. ADR 21.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from sla_server.agreements.promise import Priority
from sla_server.services.control.backend_loop import BackendControl
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import Neighbour, cost_of, gives_way, largest, part_of
from sla_server.services.control.targets import client_of, is_glob, named, volume_of
from sla_server.services.control.usage import RECENT_CUTS
from sla_server.services.control.victims import Victim


class Turnover(NamedTuple):
    """Managed targets that go, neighbours that come, and how much C changes by."""

    leave: list[str]
    join: list[Neighbour]
    more: float = 0.0


def priority_of(control: BackendControl) -> Priority:
    """Of the promise that decides; of a loop that was taken over from SQL it may be any."""
    return control.lead.priority if control.lead is not None else max(Priority)


def turn_over(
    control: BackendControl, victims: Iterable[Victim], neighbours: Mapping[str, Neighbour], now_ns: int
) -> tuple[Turnover, str] | None:
    """Clients that join and leave the managed ones of a loop now, and why, in words; None for none."""
    s, turned_ns = control.settings, control.turned_ns
    if not control.active or (turned_ns is not None and now_ns - turned_ns < s.resplit_min_s * 1e9):
        return None
    # Its use is a mean over the last cuts: it is 0 that much later.
    idle_ns = max(s.idle_release_s - RECENT_CUTS * s.poll_interval_s, 0.0) * 1e9
    unused = {
        target
        for target, from_ns in control.unused_from_ns.items()
        if target in control.managed and now_ns - from_ns >= idle_ns
    }
    spared, priority = _spared(control, victims), priority_of(control)
    found = come_and_gone(control.managed, neighbours, spared, unused, priority, s)
    if not (found.join or found.leave):
        return None
    control.turned_ns = now_ns
    joined, left = named(n.volume for n in found.join), named(found.leave)
    words = [f"{joined}: shares what its volume has"] if joined else []
    words += [f"{left}: not used any more"] if left else []
    return found, "; ".join(words)


def carry_over(
    control: BackendControl,
    others: Collection[str],
    victims: Iterable[Victim],
    neighbours: Mapping[str, Neighbour],
    together: Collection[str] = (),
) -> Turnover:
    """What takes the place of managed targets, ``others``, whose volumes are divided now, or no longer so.

    ``together``: globs that some of them are taken together by now.
    """
    spared, priority = _spared(control, victims), priority_of(control)
    return carried_over(control.managed, others, neighbours, spared, priority, control.settings, together)


def _spared(control: BackendControl, victims: Iterable[Victim]) -> set[str]:
    """Targets of the promises that are being helped."""
    return {target for v in victims if v.key in control.victims for target in v.volumes}


def come_and_gone(
    managed: Mapping[str, Neighbour],
    neighbours: Mapping[str, Neighbour],
    spared: Collection[str],
    unused: Collection[str],
    victim: Priority,
    settings: ControlSettings,
) -> Turnover:
    """Clients that join the managed ones of their volume, and those that leave.

    Args:
        managed: by target.
        neighbours: of the backend.
        spared: targets of the promises that are being helped.
        unused: managed clients that used nothing for the idle time.
        victim: priority of the promise that decides.
        settings: what is too small to count.
    """
    parts = {part_of(n) for n in managed.values() if client_of(n.volume)}
    if not parts:
        return Turnover([], [])
    new = [
        n
        for target, n in neighbours.items()
        if client_of(target)
        and target not in managed
        and target not in spared
        and part_of(n) in parts
        and n.cost_per_s > 0
        and gives_way(victim, n)
    ]
    ratio = settings.small_share_ratio
    counts = new and sum(n.cost_per_s for n in new) >= ratio * cost_of(neighbours)
    join = largest(new, ratio) if counts else []
    staying = [*(n for n in managed.values() if n.volume not in unused), *join]
    kept = {part_of(n) for n in staying}
    leave = list[str]()
    for target in sorted(unused):
        part = part_of(managed[target])
        if part in kept:
            leave.append(target)
        kept.add(part)
    return Turnover(leave, join)


def carried_over(
    managed: Mapping[str, Neighbour],
    others: Collection[str],
    neighbours: Mapping[str, Neighbour],
    spared: Collection[str],
    victim: Priority,
    settings: ControlSettings,
    together: Collection[str] = (),
) -> Turnover:
    """What takes the place of managed targets whose volumes are divided now, or no longer so.

    Args:
        managed: by target; ``others``: those of the form that is not used any more.
        others: see there.
        neighbours: of the backend, in the form of now.
        spared: targets of the promises that are being helped.
        victim: priority of the promise that decides.
        settings: what is too small to count.
        together: globs that some of ``others`` are taken together by now.

    Returns:
        Nothing for a volume of which no target of now may be slowed down.
    """
    leave, join, more = list[str](), list[Neighbour](), 0.0
    for volume in dict.fromkeys(map(volume_of, others)):
        old = [managed[target] for target in others if volume_of(target) == volume]
        now = [n for target, n in neighbours.items() if volume_of(target) == volume and target not in managed]
        if any(volume_of(target) == volume for target in together):
            found = [n for n in now if n.volume in together]
            found = [n for n in found if n.volume not in spared and gives_way(victim, n)]
            is_same = True
        else:
            found = largest(_able(now, spared, victim), settings.small_share_ratio)
            is_same = any(is_glob(n.volume) for n in old) and all(client_of(n.volume) for n in now)
        if not found:
            continue
        leave += [n.volume for n in old]
        join += found
        if is_same:
            continue  # the same clients, under one name or each under its own
        if client_of(old[0].volume):
            more += max(_used(found) - _used(old), 0.0)
        else:
            more -= _used(now) - _used(found)
    return Turnover(leave, join, more)


def _able(found: Iterable[Neighbour], spared: Collection[str], victim: Priority) -> list[Neighbour]:
    """Those of them that use something and may be slowed down."""
    return [n for n in found if n.cost_per_s > 0 and n.volume not in spared and gives_way(victim, n)]


def _used(found: Iterable[Neighbour]) -> float:
    return sum(n.cost_per_s for n in found)

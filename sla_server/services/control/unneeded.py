"""Managed volumes that are to be let go, while the loop of their backend goes on.

A volume that has not felt its cap for ``hold_up_s`` is, when its demand is inside its own curve again or the
classes below it have more than their floors; and one that none of the victims that are left may slow down,
whether it feels its cap or not.

Pure: no clock, no I/O; ``now_ns`` is monotonic. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sla_server.services.control.backend_loop import PLENTY_RATIO, BackendControl
from sla_server.services.control.sharing import class_of, floor_for, gives_way
from sla_server.services.control.victims import ASKS_NOTHING, Victim


def unneeded(
    control: BackendControl,
    shares: Callable[[], Mapping[str, float]],
    victims: Sequence[Victim],
    now_ns: int,
) -> list[str]:
    """Of the managed volumes of a loop; see the module.

    Args:
        control: the loop.
        shares: what each managed volume has of C; asked only if there may be such a volume.
        victims: of this step.
        now_ns: monotonic.
    """
    asking = [v.priority for v in victims if v.key in control.victims and v.need not in ASKS_NOTHING]
    if control.settling or not asking:
        return []
    highest, managed, ends = max(asking), control.managed, control.ends
    ranks = {v: class_of(highest, n) for v, n in managed.items()}
    spared = {v for v, n in managed.items() if v not in ends and not gives_way(highest, n)}
    if len(set(ranks.values())) < 2 and not spared and not ends:
        return []
    has, s = shares(), control.settings
    settled = now_ns - control.changed_ns >= s.settled_s * 1e9
    fits = {v for v, from_ns in control.fits_from_ns.items() if now_ns - from_ns >= s.hold_up_s * 1e9}
    lowest_above = min(
        (ranks[v] for v, n in managed.items() if has.get(v, 0.0) > PLENTY_RATIO * floor_for(highest, n)),
        default=max(ranks.values()),
    )
    return [
        v
        for v in managed
        if (settled and v in spared) or (v in fits and (v in ends or ranks[v] > lowest_above))
    ]

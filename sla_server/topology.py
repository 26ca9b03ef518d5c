"""Parts of the server, senders and recipients: the static route tables of the two mailbox segments.

The main segment joins the parts that handle statistics. The application server, the part that faces the
web, shares only a small segment of its own (DESIGN.md 3, "Trust boundary"). Sizes are bytes of ring a
route, of which only the first part is reserved until it is needed; ``sla-server start --show-config`` prints
what the segments take at first and at most.

``sla-server status`` reads the names of the parts here: the supervisor, which starts them, imports numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pmdaemon.mailbox import Layout, Route

if TYPE_CHECKING:
    from sla_server.config import ResolvedConfig

PARTS: Final = ("delivery", "dbmanager", "services", "pmdaemon", "appserver")
CLUSTER: Final = "cluster"
ACTING: Final = ("dbmanager", "services", "pmdaemon")
"""Parts that run on one of several servers at a time."""
STANDBY: Final = "standby"
"""Part that runs in their place on the others."""
MIB: Final = 1 << 20
SLOTS_PER_SENDER: Final = 4096  # at 20 ms a batch, a recipient may be away 40 s before slots run out
SLOTS_A_ROUTE: Final = 512  # of services and dbmanager, which post to every pair: seconds of orders for each


def parts_of(config: ResolvedConfig, *, is_acting: bool = True) -> tuple[str, ...]:
    """The parts that this configuration has, in the order of their start.

    A node of a cluster carries other servers' messages, too: it comes first and goes last.
    """
    parts = tuple(name for name in PARTS if is_acting or name not in ACTING)
    parts += () if is_acting else (STANDBY,)
    return parts if config.cluster is None else (CLUSTER, *parts)


def takes_over(config: ResolvedConfig) -> bool:
    """Whether this server is one of several over one database."""
    return config.cluster is not None and config.cluster.takeover.enabled


def pair_names(pairs: int) -> tuple[str, ...]:
    """Names of so many pair processes."""
    return tuple(f"pair-{index}" for index in range(pairs))


def later_pairs(pairs: int) -> tuple[str, ...]:
    """Those whose room is reserved when they are started: all but the first, which always runs."""
    return pair_names(pairs)[1:]


def main_layout(pairs: int) -> Layout:
    """Layout of ``main.mbx`` for up to ``pairs`` pair processes."""
    names = pair_names(pairs)
    routes = [
        Route("services", "dbmanager", 8 * MIB),
        Route("dbmanager", "services", MIB),
        Route("supervisor", "dbmanager", MIB // 4),
        Route("supervisor", "services", MIB // 4),
        Route("dbmanager", "supervisor", MIB // 4),
        Route("pmdaemon", "dbmanager", MIB // 4),
        Route("delivery", "dbmanager", MIB // 4),
        Route("dbmanager", "delivery", MIB // 8),
    ]
    for name in names:
        routes += [
            # 26 MB/s at the largest fleet. services answers for control and shares one interpreter with its
            # judge: more than a second of backlog. dbmanager: two thirds of one; what it has no room for
            # the agents keep and send again.
            Route(name, "services", 32 * MIB),
            Route(name, "dbmanager", 16 * MIB),
            Route("services", name, MIB),
            Route("dbmanager", name, MIB),
        ]
    participants = ("supervisor", "pmdaemon", "services", "dbmanager", "delivery", *names)
    slots = max(SLOTS_PER_SENDER, SLOTS_A_ROUTE * (pairs + 3))
    return Layout(participants=participants, routes=tuple(routes), slots_per_sender=slots)


def app_layout() -> Layout:
    """Layout of ``app.mbx``."""
    return Layout(
        participants=("appserver", "services", "dbmanager", "supervisor"),
        routes=(
            Route("appserver", "services", 4 * MIB),
            Route("services", "appserver", 8 * MIB),
            Route("dbmanager", "appserver", MIB // 4),
            Route("supervisor", "appserver", MIB // 4),
        ),
        slots_per_sender=1024,
    )

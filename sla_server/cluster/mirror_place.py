"""Where a mirror goes: for people who name no node, or a site (C2)."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Sequence

import nats.errors

from sla_server.cluster.admin import Admin, NodeRow
from sla_server.cluster.errors import ClusterRefused
from sla_server.cluster.messages.catalogue import BUCKET, Catalogue
from sla_server.cluster.messages.errors import MirrorRefused
from sla_server.cluster.messages.link import BorrowedLink
from sla_server.cluster.messages.mirror_streams import LIMIT_S, refuse_mirror, stream_names


@contextlib.asynccontextmanager
async def opened(admin: Admin, copies: int) -> AsyncIterator[tuple[BorrowedLink, Catalogue]]:
    """What the message system asks by, over the connection of the product's account, and its destinations.

    ``copies`` are of what has to be made for the cluster.

    Raises:
        ClusterRefused: there are no destinations; or of what is asked within, the engine refuses it.
    """
    link = BorrowedLink(await admin.client(), "sla-mirror")
    catalogue = Catalogue(link, copies)
    catalogue.find_abilities()
    try:
        if f"KV_{BUCKET}" not in await link.retry(lambda: stream_names(link), "names of streams", LIMIT_S):
            raise ClusterRefused("the cluster has no destinations yet: the first session makes them")
        yield link, catalogue
    except (OSError, TimeoutError, nats.errors.Error) as exc:
        raise ClusterRefused(f"the cluster refuses it: {str(exc) or type(exc).__name__}") from exc


async def find(admin: Admin, catalogue: Catalogue, name: str, site: str = "") -> str:
    """A node for a mirror of the destination ``name``.

    At ``site`` alone; "": rather at another site than the primary's.

    Raises:
        MirrorRefused: there is none.
        ClusterRefused: the primary does not answer.
    """
    refuse_mirror(name)
    destination = await catalogue.get(name)
    primary = next((row for row in await admin.streams() if row.name == destination.stream), None)
    if primary is None or not primary.leader:
        raise ClusterRefused(f"the primary of {name} does not answer; see 'sla cluster status'")
    holders = {primary.leader, *primary.current, *primary.behind}
    if chosen := choose(await admin.nodes(), holders, site):
        return chosen
    where = f"at {site} " if site else ""
    raise MirrorRefused(
        f"no node {where}is without a copy of {name}: {', '.join(sorted(holders))} have the primary and its "
        "backups, and a mirror beside one of them would be lost with it"
    )


def choose(rows: Sequence[NodeRow], holders: Collection[str], site: str) -> str:
    """The node that has stored the least, of those that may have it; "": there is none. Pure."""
    sites = {row.site for row in rows if row.name in holders}
    fit = [row for row in rows if row.is_storing and row.name not in holders]
    fit = [row for row in fit if not site or row.site == site.lower()]
    return min(fit, key=lambda row: (row.site in sites, row.stored_bytes, row.name)).name if fit else ""

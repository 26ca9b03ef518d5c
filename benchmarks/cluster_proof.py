"""The end of a run with two servers (``cluster_servers.Site``): all stored, all stopped, and proved.

The proof is that of one server (``chaos_proof``), over the database and the archive that both servers have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.chaos_proof import Gateway, Proof, has_stored, newest_made, prove
from benchmarks.cluster_servers import GATEWAYS, SPOOL_BYTES, Site
from tests.support.servers import SERVERS

STEPPED: Final = "b"
"""The gateway whose clock may be stepped."""
SETTLE_S: Final = 300.0


def prove_site(site: Site, before_stop: Callable[[], None] = lambda: None) -> Proof:
    """Wait until what the clients did is stored, stop everything in order, and prove.

    ``before_stop`` is called when all is stored.

    Raises:
        StageError: it is not stored within ``SETTLE_S``.
    """
    gateways = _gateways(site)
    made = newest_made(gateways)  # the last I/Os are in the cut that is open now
    site.wait(
        lambda: all(newest_made(gateways).get(key, 0) >= seq + 2 for key, seq in made.items()), "newer cuts"
    )
    newest = newest_made(gateways)
    site.wait(lambda: has_stored(site.database, site.folder, newest), "the gateways' cuts in SQL", SETTLE_S)
    before_stop()
    _stop_in_order(site)
    proof = prove(site.database, site.folder, gateways)
    proof.problems += site.losses()
    for name in GATEWAYS:
        volume = f"vol-{name}"
        proof.compare(volume, site.clients.done(volume))
    return proof


def _gateways(site: Site) -> list[Gateway]:
    folder = site.stage.folder
    return [
        Gateway(
            (folder / name / "gateway_id").read_text().strip(),
            folder / f"{name}.log",
            folder / name / "spool",
            SPOOL_BYTES,
            stepped=name == STEPPED,
        )
        for name in GATEWAYS
    ]


def _stop_in_order(site: Site) -> None:
    """Gateways, then each server after it has acted: what its queue has kept for files goes into one."""
    for agent in site.agents:
        for process in site.stage.running(agent.name):
            site.stage.stop(agent.name, process)
    for _ in SERVERS:
        name = site.wait(site.servers.acting, "a server that acts", SETTLE_S)
        site.servers.stop(name)

"""``make chaos-cluster``: two servers and a third node, killed, stopped and cut off; every count is proved.

Two gateways are under load, and messages go through the cluster all the time. From a seed, one after the
other and each third time two at once, for up to 20 s, the faults of ``FAULTS``; a table at the end says how
often each was done. Processes and disks are real, links are proxies (``node_links``), steps of a wall clock
are read from a file by the server's and the gateways' own processes: the engine's clock is not stepped.

Then all is healed, and left alone until it is in order. Proved are: each cut that a gateway made is stored
once, in SQL and in files, and sums agree (``chaos_proof``); SQL has each I/O that a client counted; no event
says that cuts were lost; each message that was confirmed came once (``cluster_faults``). Exit status 1 if
not.
"""

from __future__ import annotations

import contextlib
import json
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import structlog

from benchmarks.chaos_proof import Proof
from benchmarks.cluster_faults import receive_counted, send_counted
from benchmarks.cluster_proof import SETTLE_S, STEPPED, prove_site
from benchmarks.cluster_servers import Site
from sla_server.cluster import account_file
from sla_server.cluster.messages import Destination, MessageSession
from tests.support.servers import NODES, SERVERS, send
from tests.support.stage import scratch

Heal = Callable[[], None]
FAULTS: Final = {
    "power": (4, "all processes of a server, its node and parts, killed at once"),
    "restart": (2, "a server stopped in order and started again, as for an upgrade to the same release"),
    "pause": (4, "all of a server stopped (SIGSTOP), also for longer than the lease, then it goes on"),
    "cut-off": (2, "the engine of a server's node stopped: it polls and writes, and cannot renew its lease"),
    "leader": (2, "the engine that leads a stream killed; its node starts it again"),
    "node": (1, "the third node killed"),
    "all": (1, "all servers and nodes killed at once, then started"),
    "one-way": (3, "a link between two nodes held up in one direction"),
    "isolated": (2, "all links of a node held up; its server reaches gateways and database"),
    "slow": (1, "each 64 KiB at most of all that a node says or hears takes 50 to 300 ms"),
    "disk": (1, "the data directory of a node is full: its queue, its streams; then it is restarted"),
    "clock": (2, "the wall clock of a server, or of gateway b, stepped by up to 30 s"),
    "links": (2, "what gateways and a server say to each other held up, or their connections cut"),
    "database": (1, "PostgreSQL stopped, or killed, and started again"),
}
"""Weight, and what it is."""
DATA_BYTES: Final = 256 << 20
STEP_US: Final = 30_000_000
LONGEST_S: Final = 20.0
TWO_EVERY: Final = 3
DESTINATION: Final = "chaos"


class Messages:
    """A producer and a consumer of the cluster, and what was confirmed and what came."""

    def __init__(self, site: Site, ends: contextlib.ExitStack) -> None:
        path = site.folder / "chaos.json"
        site.stage.sla("cluster", "account", "add", "chaos", str(path), "--role", "admin")
        connection = account_file.connection(path)
        self.sent, self.received = Counter[str](), Counter[str]()
        self._stop = threading.Event()
        sessions = [
            ends.enter_context(
                MessageSession(
                    connection.urls, "chaos", node=90 + place, directory=site.folder / f"chaos-{place}"
                )
            )
            for place in range(2)
        ]
        sessions[0].create(Destination(DESTINATION, max_bytes=64 << 20))
        consumer = sessions[1].consumer(DESTINATION, "reader", max_deliveries=10_000)
        self._threads = [
            threading.Thread(target=send_counted, args=(sessions[0], DESTINATION, self._stop, self.sent)),
            threading.Thread(target=receive_counted, args=(consumer, self._stop, self.received)),
        ]
        for thread in self._threads:
            thread.start()

    def finish(self) -> None:
        """Send no more, and take what is left."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def problems(self) -> list[str]:
        """What was lost or came twice."""
        lost = [identity for identity in self.sent if identity not in self.received]
        doubled = [identity for identity, count in self.received.items() if count > 1]
        return [f"message {each} was confirmed, and is lost" for each in lost] + [
            f"message {each} came {self.received[each]} times" for each in doubled
        ]


class ClusterChaos:
    """One run. Attributes: ``faults``, what was done how often."""

    def __init__(self, site: Site, seed: int, only: Sequence[str] = ()) -> None:
        self._names = list(only or FAULTS)
        self._site = site
        self._rng = random.Random(seed)
        self.faults: Counter[str] = Counter()

    def run(self, duration_s: float, most_faults: int) -> None:
        """Faults until then; all of them are healed."""
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s and self.faults.total() < most_faults:
            heals, done = [], []
            for _ in range(2 if self._rng.randrange(TWO_EVERY) == 0 else 1):
                [name] = self._rng.choices(self._names, [FAULTS[each][0] for each in self._names])
                if (heal := getattr(self, f"_{name.replace('-', '_')}")()) is not None:
                    self.faults[name] += 1
                    heals.append(heal)
                    done.append(name)
            if not done:  # what was chosen cannot be done now
                continue
            time.sleep(self._rng.uniform(0.5, LONGEST_S))
            for heal in heals:
                heal()
            click.echo(
                f"  {' and '.join(done)}: {self.faults.total()} faults, {end_s - time.monotonic():.0f} s left"
            )
            time.sleep(self._rng.uniform(0.0, LONGEST_S))

    def _victim(self) -> str | None:
        """A server that runs, more often the one that acts."""
        servers = self._site.servers
        acting = servers.acting()
        name = acting if acting is not None and self._rng.random() < 0.7 else self._rng.choice(SERVERS)
        return name if servers.runs(name) else None

    def _power(self) -> Heal | None:
        if (name := self._victim()) is None:
            return None
        self._site.servers.power_off(name)
        return lambda: self._site.servers.start(name)

    def _restart(self) -> Heal | None:
        if (name := self._victim()) is None:
            return None
        self._site.servers.stop(name)
        return lambda: self._site.servers.start(name)

    def _pause(self) -> Heal | None:
        if (name := self._victim()) is None:
            return None
        pids = self._site.servers.freeze(name)
        return lambda: self._site.servers.thaw(pids)

    def _cut_off(self) -> Heal | None:
        if (name := self._victim()) is None:
            return None
        engines = self._site.servers.engines(name)
        send(engines, signal.SIGSTOP)
        return lambda: send(engines, signal.SIGCONT)

    def _leader(self) -> Heal | None:
        """Of a stream of any kind: the lease's bucket, the catalogue, the destination, the cluster's own."""
        said = self._site.stage.sla("cluster", "status", "-o", "json", check=False).stdout
        with contextlib.suppress(ValueError, KeyError, TypeError):
            streams = [row for row in json.loads(said)["streams"] if row["leader"]]
            name = self._rng.choice(streams)["leader"] if streams else ""
            if self._site.servers.runs(name):
                send(self._site.servers.engines(name), signal.SIGKILL)
                return lambda: None
        return None  # there is no majority to ask

    def _all(self) -> Heal | None:
        servers = self._site.servers
        names = [name for name in NODES if servers.runs(name)]
        for name in names:
            servers.power_off(name)

        def heal() -> None:
            for name in names:
                servers.start(name)

        return heal

    def _one_way(self) -> Heal:
        links = self._site.servers.links
        way = self._rng.choice(links.ways)
        links.hold([way])
        return lambda: links.let_go([way])

    def _isolated(self) -> Heal:
        links, ways = self._site.servers.links, self._ways_of(self._rng.choice(NODES))
        links.hold(ways)
        return lambda: links.let_go(ways)

    def _slow(self) -> Heal:
        links, ways = self._site.servers.links, self._ways_of(self._rng.choice(NODES))
        links.delay(ways, self._rng.uniform(0.05, 0.3))
        return lambda: links.delay(ways, 0.0)

    def _ways_of(self, name: str) -> list[tuple[str, str]]:
        return [way for way in self._site.servers.links.ways if name in way]

    def _disk(self) -> Heal | None:
        servers, name = self._site.servers, self._rng.choice(NODES)
        if not servers.has_disks or not servers.runs(name):
            return None
        ballast = servers.fill_disk(name)

        def heal() -> None:
            ballast.unlink(missing_ok=True)
            if servers.runs(name):  # its engine stores nothing before
                servers.stop(name)
                servers.start(name)

        return heal

    def _clock(self) -> Heal:
        name = self._rng.choice((*SERVERS, STEPPED))
        path = self._site.step_file(name)
        path.write_text(str(self._rng.randrange(-STEP_US, STEP_US)))

        def heal() -> None:
            path.write_text("0")

        return heal

    def _node(self) -> Heal | None:
        servers = self._site.servers
        if not servers.runs("n3"):
            return None
        servers.power_off("n3")
        return lambda: servers.start("n3")

    def _links(self) -> Heal:
        proxy = self._site.proxies[self._rng.choice(SERVERS)]
        if self._rng.random() < 0.5:
            proxy.cut()
            return lambda: None
        proxy.stall(True)
        return lambda: proxy.stall(False)

    def _database(self) -> Heal | None:
        postgres = self._site.postgres
        if postgres.process is None:
            return None
        postgres.stop(self._rng.choice((signal.SIGINT, signal.SIGQUIT)))
        return postgres.start


def run(
    folder: Path, seed: int, duration_s: float, most_faults: int, only: Sequence[str] = ()
) -> tuple[Proof, Counter[str], Messages]:
    """One run in ``folder``."""
    with contextlib.ExitStack() as ends:
        site = Site(folder, ends, has_links=True, data_bytes=DATA_BYTES)
        if not site.servers.has_disks:
            click.echo("no tmpfs can be mounted here: no disk is full in this run")
        site.start()
        messages = Messages(site, ends)
        chaos = ClusterChaos(site, seed, only)
        try:
            chaos.run(duration_s, most_faults)
            site.wait(site.is_settled, "two servers and three nodes in order", SETTLE_S)
        finally:
            site.clients.finish()
            messages.finish()
        proof = prove_site(site)
        proof.problems += messages.problems()
        return proof, chaos.faults, messages


@click.command()
@click.option("--seed", type=int, default=1, show_default=True, help="Fixes the sequence of faults.")
@click.option("--for", "duration_s", type=float, default=900.0, show_default=True, help="Seconds of faults.")
@click.option("--faults", type=int, default=100, show_default=True, help="End after so many.")
@click.option("--only", multiple=True, type=click.Choice([*FAULTS]), help="These faults alone.")
@click.option("--keep", is_flag=True, help="Keep the folder with data and logs.")
def main(seed: int, duration_s: float, faults: int, only: tuple[str, ...], keep: bool) -> None:
    """Break two servers and their nodes for a while, and prove that nothing was lost or doubled."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began_s = time.monotonic()
    with scratch("sla-chaos-cluster-", keep) as base:
        proof, done, messages = run(base / "run", seed, duration_s, faults, only)
    click.echo(f"seed {seed}, {time.monotonic() - began_s:.0f} s, {done.total()} faults")
    for name, (_, words) in FAULTS.items():
        click.echo(f"  {name:<9} {done[name]:>3}  {words}")
    click.echo(f"messages: {len(messages.sent)} confirmed, {len(messages.received)} received")
    proof.report()


if __name__ == "__main__":
    main()

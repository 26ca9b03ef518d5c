"""``python -m benchmarks.cluster_growth``: cost of a destination, a connection and a node, and a model of it.

Clusters of one, three and five nodes on loopback, one after the other. Of each: memory of all engines when
they are ready, with so many destinations more, and with so many connections more; and processor time of all
engines for messages to them, one after the other. Copies are three, or one on a single node.

The model is fitted to one and three nodes, and compared with five:

    memory = nodes x (base + (nodes - 1) x route) + copies of destinations x copy + connections x connection

Differences of memory are of the kernel's count of resident pages, so small counts drown in what an engine
takes by itself: the defaults make each figure some megabytes.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
import nats
import nats.errors
from nats.aio.client import Client
from nats.js.api import RetentionPolicy, StreamConfig

from pmdaemon.runtime.clock import Deadline
from tests.support.cluster import LocalCluster

SIZES: Final = (1, 3, 5)
READY_S: Final = 240.0
SETTLE_S: Final = 3.0
KIB: Final = 1024
MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one cluster.

    Attributes:
        base_bytes: of all engines, with nothing stored.
        copy_bytes: of one copy of a destination.
        connection_bytes: of one connection.
        message_s: processor time of all engines for one message, stored by all its copies.
    """

    nodes: int
    copies: int
    base_bytes: float
    copy_bytes: float
    connection_bytes: float
    message_s: float
    links: int


@dataclass(frozen=True, slots=True)
class Model:
    """Of the memory of a cluster without destinations, by its nodes."""

    base_bytes: float
    route_bytes: float

    def predict(self, nodes: int) -> float:
        """Of all its engines."""
        return nodes * (self.base_bytes + (nodes - 1) * self.route_bytes)


def fit(one: Cost, three: Cost) -> Model:
    """Base from the node that has no other, the cost of a route from three."""
    return Model(one.base_bytes, (three.base_bytes / three.nodes - one.base_bytes) / (three.nodes - 1))


def _pids(cluster: LocalCluster) -> list[int]:
    return [pid for node in cluster.nodes if (pid := node.child.pid) is not None]


def _resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) * KIB


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _links(cluster: LocalCluster) -> int:
    """Connections between nodes, each once: sockets of the engines at each other's ports of routes."""
    ports = {int(node.config.routes.rpartition(":")[2]) for node in cluster.nodes}
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    established = [row.split() for row in rows if row.split()[3] == "01"]
    return sum(int(row[1].rpartition(":")[2], 16) in ports for row in established)


async def _settled(cluster: LocalCluster) -> float:
    await asyncio.sleep(SETTLE_S)
    return float(sum(_resident_bytes(pid) for pid in _pids(cluster)))


async def _measure(cluster: LocalCluster, destinations: int, connections: int, messages: int) -> Cost:
    size = len(cluster.nodes)
    copies = min(3, size)
    client = await nats.connect(cluster.urls)
    stream = client.jetstream(timeout=30)
    base = await _settled(cluster)
    for number in range(destinations):
        name = f"growth{number}"
        config = StreamConfig(
            name=name,
            subjects=[name],
            num_replicas=copies,
            retention=RetentionPolicy.WORK_QUEUE,
            max_bytes=1 << 20,
        )
        deadline = Deadline(READY_S)
        while True:
            try:
                await stream.add_stream(config)
                break
            except (TimeoutError, nats.errors.Error):
                if deadline.passed:
                    raise
                await asyncio.sleep(0.1)
    with_destinations = await _settled(cluster)
    clients: list[Client] = []
    for number in range(connections):
        clients.append(await nats.connect(cluster.urls[number % size]))
    with_connections = await _settled(cluster)
    begin_s = sum(_processor_s(pid) for pid in _pids(cluster))
    for number in range(messages):
        await stream.publish(f"growth{number % destinations}", b"x" * 200)
    spent_s = sum(_processor_s(pid) for pid in _pids(cluster)) - begin_s
    links = _links(cluster)
    for one in (*clients, client):
        await one.close()
    return Cost(
        nodes=size,
        copies=copies,
        base_bytes=base,
        copy_bytes=(with_destinations - base) / (destinations * copies),
        connection_bytes=(with_connections - with_destinations) / connections,
        message_s=spent_s / messages,
        links=links,
    )


@click.command()
@click.option("--destinations", default=100, show_default=True, type=click.IntRange(1))
@click.option("--connections", default=200, show_default=True, type=click.IntRange(1))
@click.option("--messages", default=2000, show_default=True, type=click.IntRange(1))
def main(destinations: int, connections: int, messages: int) -> None:
    """Measure one, three and five nodes, and compare five with what one and three predict.

    What the engines write goes to standard error.
    """
    costs = []
    for size in SIZES:
        with LocalCluster(size) as cluster:
            cluster.wait_ready()
            cost = asyncio.run(_measure(cluster, destinations, connections, messages))
        costs.append(cost)
    click.echo("nodes copies  base MiB  KiB a copy  KiB a connection  us a message  links between nodes")
    for cost in costs:
        click.echo(
            f"{cost.nodes:5} {cost.copies:6} {cost.base_bytes / MIB:9.1f} {cost.copy_bytes / KIB:11.1f} "
            f"{cost.connection_bytes / KIB:17.1f} {cost.message_s * 1e6:13.1f} {cost.links:20}"
        )
    model, five = fit(costs[0], costs[1]), costs[2]
    predicted = model.predict(five.nodes)
    click.echo(
        f"base of a node {model.base_bytes / MIB:.1f} MiB, of a route {model.route_bytes / MIB:.2f} MiB; "
        f"five nodes: predicted {predicted / MIB:.1f} MiB, measured {five.base_bytes / MIB:.1f} MiB "
        f"({five.base_bytes / predicted - 1:+.0%})"
    )


if __name__ == "__main__":
    main()

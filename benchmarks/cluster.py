"""``make bench-cluster``: the message system on three nodes of this machine, one run of about an hour.

Every node syncs each message. Small messages, replicas 3, 64 in flight, beside bare nats-py; a large one
beside the engine's object store; a stopped subscriber among ten; the gap at a producer when the primary is
killed or hands over; messages lost or doubled while single nodes and pairs are killed; transactions over
three destinations that die at each step; clients whose node is killed; and, with two servers of the product,
their gateways' cuts when the acting one loses its power.

``make bench-cluster ARGS="--only small --only takeover"`` is two rows of it, and stores these alone: the
hour may be had in pieces. ``--only kills --kills 20`` is one row, smaller, and is not stored. Rows: small,
stopped, large, failover, kills, transactions, connections, takeover. The node that is killed, its clients and
the benchmark share the machine: rates are worth as ratios, gaps as they are.
"""

from __future__ import annotations

import argparse
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks import cluster_faults, cluster_rates, cluster_servers, harness
from tests.support.cluster import LocalCluster

Found = tuple[dict[str, float], dict[str, Any]]
Row = Callable[[LocalCluster, Path, argparse.Namespace], Found]
ROWS: Final[dict[str, Row]] = {
    "small": lambda cluster, path, asked: cluster_rates.small(cluster, path, asked.messages),
    "stopped": lambda cluster, path, asked: cluster_rates.stopped(cluster, path, asked.topic_messages),
    "large": lambda cluster, path, asked: cluster_rates.large(cluster, path, asked.large_bytes),
    "failover": lambda cluster, path, asked: cluster_faults.failover(cluster, path, asked.failovers),
    "transactions": lambda cluster, path, asked: cluster_faults.transactions(
        cluster, path, asked.transactions
    ),
    "connections": lambda cluster, path, asked: cluster_faults.connections(cluster, path, asked.clients),
    "kills": lambda cluster, path, asked: cluster_faults.kills(cluster, path, asked.kills, asked.seed),
}

TAKEOVER: Final = "takeover"
"""The row that has servers around its nodes."""
GOALS: Final = {
    "small": ("produce_ratio", "consume_ratio"),
    "stopped": ("stopped_ratio",),
    "large": ("large_memory", "large_ratio"),
    "failover": ("unplanned_p50_s", "unplanned_worst_s", "planned_worst_s"),
    "transactions": ("transactions", "half_done"),
    "connections": ("clients_back_s", "attempts"),
    "kills": ("kills", "lost", "doubled"),
    TAKEOVER: ("takeover_p50_s", "takeover_worst_s", "takeover_ours_s"),
}
"""What each row measures (``targets.toml``)."""


def parser() -> argparse.ArgumentParser:
    """Its options."""
    made = argparse.ArgumentParser(prog="make bench-cluster ARGS=...")
    rows = [*sorted(ROWS), TAKEOVER]
    made.add_argument("--only", action="append", choices=rows, help="this row; may be repeated")
    made.add_argument("--messages", type=int, default=20_000, help="small ones, of each sample")
    made.add_argument("--topic-messages", type=int, default=3000, help="to ten subscribers, of each sample")
    made.add_argument("--large-bytes", type=int, default=10**9, help="of the large message")
    made.add_argument("--failovers", type=int, default=20, help="kills of the primary, and hand-overs")
    made.add_argument("--kills", type=int, default=200, help="of nodes")
    made.add_argument("--transactions", type=int, default=500, help="messages that are moved by them")
    made.add_argument("--clients", type=int, default=1000, help="connections")
    made.add_argument("--takeovers", type=int, default=10, help="of the acting server's gateways")
    made.add_argument("--seed", type=int, default=1, help="of the kills")
    return made


def measure(asked: argparse.Namespace) -> harness.Sample:
    """Each row on a cluster of its own: none waits for what another one has left."""
    sample = harness.Sample({})
    for name, row in ROWS.items():
        if asked.only and name not in asked.only:
            continue
        store_bytes = 3 * asked.large_bytes + (1 << 30) if name == "large" else 2 << 30

        def on_cluster(row: Row = row, store_bytes: int = store_bytes) -> Found:
            with (
                tempfile.TemporaryDirectory(prefix="sla-bench-") as directory,
                LocalCluster(store_bytes=store_bytes) as cluster,
            ):
                cluster.wait_ready()
                sample.peers["nats-server"] = cluster.engine.text
                return row(cluster, Path(directory), asked)

        _add(sample, name, on_cluster)
    if not asked.only or TAKEOVER in asked.only:

        def on_servers() -> Found:
            with tempfile.TemporaryDirectory(prefix="sla-bench-") as directory:
                return cluster_servers.takeover(Path(directory), asked.takeovers)

        _add(sample, TAKEOVER, on_servers)
    return sample


def _add(sample: harness.Sample, name: str, measure_row: Callable[[], Found]) -> None:
    """Measure a row. One that fails lacks its values in the end; the others are not measured for nothing."""
    print(f"{name} ...", flush=True)
    try:
        values, raw = measure_row()
    except Exception:  # noqa: BLE001  # whatever it is, an hour of other rows is not lost
        traceback.print_exc()
        print(f"  {name} has failed", flush=True)
        return
    print("  " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()), flush=True)
    sample.values |= values
    sample.raw |= raw


if __name__ == "__main__":
    chosen = parser().parse_args()
    options = harness.Options.of(parser(), chosen, part_option="only")
    harness.main("cluster", lambda: measure(chosen), 1, options, parts=GOALS)

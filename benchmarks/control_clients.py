"""CPU of a poll cycle on a backend whose volumes are all divided, while one promise on it is at risk.

Ten gateways with 250 volumes each, two clients a volume, all busy; only one client of each volume was
promised a latency. The same is measured of volumes that are not divided. Either may take 1 ms for 1,000
streams. A cycle is the cuts of all gateways and a tick; the first two, in which caps are set, are left out.
Printed by ``make bench-control``.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from typing import Final

import numpy as np

from pmdaemon.wire.cut import COL, COLUMNS, HIST_DTYPE, IO_ANY, MISSED_DTYPE, Cut
from pmdaemon.wire.histogram import bucket_of_ns
from pmdaemon.wire.messages.agent import CLIENT_CAPS
from pmdaemon.wire.names import stream_id
from sla_server.agreements.promise import CurveStep, Priority, Promise, VolumeClass
from sla_server.services.control.controller import Controller
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US

GATEWAYS, VOLUMES, CLIENTS = 10, 250, ("db", "job")
STREAMS: Final = GATEWAYS * VOLUMES * len(CLIENTS)
CYCLES, LEFT_OUT = 8, 2
S: Final = 1_000_000_000
LIMIT_US: Final = 12_000


def _volume(gateway: int, number: int) -> str:
    return f"v{gateway}-{number}"


def _controller(clients: tuple[str, ...]) -> Controller:
    promise = Promise(
        sla="",
        version=1,
        objective="latency",
        priority=Priority.SILVER,
        volumes=(),
        clients=clients,
        io="any",
        percentile=95.0,
        curve=(CurveStep(float("inf"), LIMIT_US),),
        target_ratio=0.995,
        slice_s=60,
        floor_iops=50.0,
        floor_bytes_per_s=0.0,
    )
    names = [_volume(gateway, number) for gateway in range(GATEWAYS) for number in range(VOLUMES)]
    made = Controller(ControlSettings())
    made.set_agreements(
        [replace(promise, sla=name, volumes=(name,)) for name in names],
        [VolumeClass(name, Priority.SILVER, (name,), clients=clients) for name in names],
    )
    made.set_mode("enforce")
    return made


def _cut(gateway_id: str, gateway: int, seq: int) -> Cut:
    """25 I/Os of each stream; those of the first volume of the first gateway are slow."""
    rows = VOLUMES * len(CLIENTS)
    counters = np.zeros((len(COLUMNS), rows), dtype=np.int64)
    users = [(_volume(gateway, number), client) for number in range(VOLUMES) for client in CLIENTS]
    counters[COL["stream_id"]] = [stream_id(gateway_id, *user) for user in users]
    counters[COL["arrived"]] = counters[COL["reads"]] = 25
    counters[COL["read_bytes"]] = 25 * 4096
    counters[COL["cost_milli"]] = round(25 * 1062.5)
    slow = [gateway == 0 and row < len(CLIENTS) for row in range(rows)]
    hist = [(row, bucket_of_ns(30_000_000 if slow[row] else 3_000_000), 25) for row in range(rows)]
    missed = [(row, IO_ANY, LIMIT_US, 25, 25 if slow[row] else 0) for row in range(rows)]
    start_us = UNIX_0_US + (seq - 1) * 1_000_000
    return Cut(
        gateway_id,
        1,
        seq,
        start_us,
        1_000_000,
        0,
        1,
        counters,
        np.array(hist, dtype=HIST_DTYPE),
        np.array(missed, dtype=MISSED_DTYPE),
    )


def cycle_cpu_us(clients: tuple[str, ...]) -> float:
    """CPU microseconds of a cycle for 1,000 streams; ``clients``: whom the agreements name."""
    made = _controller(clients)
    ids = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f"g{gateway}")) for gateway in range(GATEWAYS)]
    for gateway, gateway_id in enumerate(ids):
        names = [_volume(gateway, number) for number in range(VOLUMES)]
        made.set_features(gateway_id, (CLIENT_CAPS,))
        made.gateway_up(gateway_id, f"g{gateway}", [{"volume": v, "backend": "disk"} for v in names], S)
        streams = [
            {
                "id": stream_id(gateway_id, volume, client),
                "volume": volume,
                "client": client,
                "backend": "disk",
            }
            for volume in names
            for client in CLIENTS
        ]
        made.add_streams(gateway_id, streams)
    spent_ns = 0
    for seq in range(1, CYCLES + 1):
        cuts = [_cut(gateway_id, gateway, seq) for gateway, gateway_id in enumerate(ids)]
        now_ns, unix_us = (1 + seq) * S, UNIX_0_US + seq * 1_000_000
        began_ns = time.process_time_ns()
        for cut in cuts:
            made.add_cut(cut, unix_us, 0, False, now_ns)
        made.tick(now_ns, unix_us)
        spent_ns += (time.process_time_ns() - began_ns) * (seq > LEFT_OUT)
    return spent_ns / (CYCLES - LEFT_OUT) / 1e3 / (STREAMS / 1000)


def figures() -> dict[str, float]:
    """For ``control``: divided volumes, and the same undivided."""
    return {"divided_cycle_cpu_us": cycle_cpu_us(("db",)), "undivided_cycle_cpu_us": cycle_cpu_us(("*",))}


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name}: {value:.0f} us for 1,000 streams")

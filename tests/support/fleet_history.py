"""A small fleet's statistics, in SQL and in files, for whole runs of the policy job."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from sqlalchemy import insert

from pmdaemon.runtime.clock import FakeClock
from sla_server.db import schema
from sla_server.db.engine import begin
from sla_server.db.schema import HOUR_US
from tests.support.agreements import in_force, simple
from tests.support.archive import FilesRig
from tests.support.cut_files import SECOND_US, cut_row, store_cuts

SLOT_US = 60_000_000
HOURS = 5
IN_FILES = 3
CROWDS = 13
BACKENDS = ("array-1", "array-2")
CLIENTS = 2
SLAS = {"gold": "erp-*", "silver": "web-1"}


def fill(database: Any, now_us: int) -> None:
    """Hours before ``now_us``, the first three of them in files; the same figures for every database."""
    chance = Random(17)
    first_us = (now_us // HOUR_US - HOURS - 1) * HOUR_US
    streams = [
        {
            "stream_id": number,
            "gateway_id": "g",
            "volume": volume,
            "client": f"host-{client}",
            "backend": backend,
        }
        for number, (backend, volume, client) in enumerate(
            (backend, f"{name}-{place}", client)
            for place, backend in enumerate(BACKENDS, 1)
            for name in ("erp", "web", "batch")
            for client in range(CLIENTS)
        )
    ]
    volumes = {row["volume"]: row["backend"] for row in streams}
    slots: list[dict[str, Any]] = []
    missed: list[dict[str, Any]] = []
    hours: list[dict[str, Any]] = []
    for hour in range(HOURS + 1):
        for row in streams:
            if hour == HOURS:  # of long ago: only hours are left
                sums = _sums(chance, 9, row["stream_id"], 60)
                kept = {name: value for name, value in sums.items() if name not in schema.PLACED}
                hours.append({**kept, "hour_us": first_us - 48 * HOUR_US})
                continue
            for minute in range(60):
                at_us = first_us + hour * HOUR_US + minute * SLOT_US
                crowd = (minute * 7 + hour) % CROWDS
                sums = _sums(chance, crowd, row["stream_id"], 1)
                slots.append({**sums, "slot_us": at_us})
                for threshold in (5_000, 12_000):
                    late = sums["reads"] // 3 if crowd > 9 else sums["reads"] // 50
                    missed.append(
                        {
                            "slot_us": at_us,
                            "stream_id": row["stream_id"],
                            "io": 0,
                            "threshold_us": threshold,
                            "counted": sums["reads"] + sums["writes"],
                            "missed": late,
                        }
                    )
    rig = FilesRig(database, clock=FakeClock(unix_us=now_us), rollups_after_h=HOURS + 1 - IN_FILES)
    with begin(rig.engine) as connection:
        connection.execute(insert(schema.streams), streams)
        connection.execute(
            insert(schema.volumes),
            [{"volume": name, "backend": backend} for name, backend in volumes.items()],
        )
        connection.execute(insert(schema.agreements), [_agreement(name) for name in SLAS])
        for table, rows in (
            (schema.rollups, slots),
            (schema.rollup_missed, missed),
            (schema.rollup_hours, hours),
        ):
            connection.execute(insert(table), rows)
    assert rig.step().hours_moved >= IN_FILES
    store_cuts(rig.engine, rig.files, _cuts(slots, missed, first_us + HOURS // 2 * HOUR_US))
    with begin(rig.engine) as connection:  # of an hour that has moved, something comes late
        late_row = {**_sums(chance, 3, 0, 1), "slot_us": first_us, "covered_us": 0}
        connection.execute(insert(schema.rollups), [late_row])
    rig.close()


def _cuts(slots: list[dict[str, Any]], missed: list[dict[str, Any]], from_us: int) -> list[dict[str, Any]]:
    """Of minutes of each crowd: what they have, in even seconds.

    Promises are kept in some and broken in others, so what is learnt of them hangs on no run before.
    """
    found = []
    for row in slots:
        if not from_us <= row["slot_us"] < from_us + CROWDS * SLOT_US:
            continue
        at, stream = row["slot_us"], row["stream_id"]
        entries = [each for each in missed if each["slot_us"] == at and each["stream_id"] == stream]
        late = [(0, each["threshold_us"], each["counted"] // 60, each["missed"] // 60) for each in entries]
        for second in range(60):
            cut = cut_row(at + second * SECOND_US, stream, row["reads"] // 60, 90, late)
            found.append({**cut, "cost_milli": row["cost_milli"] // 60})
    return found


def _sums(chance: Random, crowd: int, stream_id: int, slots: int) -> dict[str, Any]:
    reads = slots * (200 + 100 * crowd * (stream_id // CLIENTS % 3) + chance.randrange(100))
    writes = slots * (100 + chance.randrange(50))
    # Sizes differ from minute to minute, or nothing could be said of what a byte costs.
    sequential = (reads + writes) * (crowd % 3) // 3
    read_bytes, write_bytes = (ios * 4096 * (1 + crowd * 5 % 13) for ios in (reads, writes))
    return {
        "stream_id": stream_id,
        "arrived": reads + writes + crowd,
        "reads": reads,
        "writes": writes,
        "read_bytes": read_bytes,
        "write_bytes": write_bytes,
        "sequential": sequential,
        "placed": reads + writes + crowd,
        "svc_sum_us": reads * 90
        + writes * 150
        + 40 * (reads + writes - sequential)
        + (read_bytes + write_bytes) // 700,
        "cost_milli": (reads + writes) * 1000 + (read_bytes + write_bytes) * 1000 // 65_536,
        "covered_us": slots * SLOT_US - chance.randrange(1000),
        "hist": b"",
    }


def _agreement(name: str) -> dict[str, Any]:
    document = simple(name, volumes=SLAS[name], clients="host-*" if name == "gold" else '"*"')
    return {
        "name": name,
        "version": 1,
        "document": document,
        "spec": json.dumps(in_force(document).agreement.spec_json()),
        "priority": "gold",
        "applied_us": 1,
        "applied_by": "test",
    }

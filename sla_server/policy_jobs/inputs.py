"""What the job reads, once, before Spark starts: rollups, misses, streams and the promises in force.

What is in SQL comes as Arrow through ``sla_server.db.policies`` (SQLite and PostgreSQL alike, no JDBC): two
days of rollups and weeks of hours, some million rows of a fleet, which fit the driver. Older rollups are in
Parquet files: here come their paths, from the manifest as of the same moment, and Spark reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
from pydantic import ValidationError

from pmdaemon.runtime.config import describe
from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.document import Agreement
from sla_server.agreements.promise import InForce, Priority, Promise, VolumeClass, classes, promises
from sla_server.db.policies import PolicyStore
from sla_server.policy_jobs.errors import NothingToLearn, UnreadableAgreement
from sla_server.policy_jobs.transforms import (
    HOUR_COLUMNS,
    MISSED_COLUMNS,
    SLOT_COLUMNS,
    STREAM_COLUMNS,
    US_A_SECOND,
)

DEFAULT_CLASS: Final = VolumeClass("", Priority.BEST_EFFORT, ("*",))


@dataclass(frozen=True)
class JobInputs:
    """The job's whole input.

    Attributes:
        slots, hours, missed, streams: Arrow tables with the columns of ``schema``.
        slot_files, missed_files: paths of files with further rows of slots and missed.
        rollups: rows of slots, in SQL and in files.
        former_capacity: backend -> the newest valid capacity of an earlier policy, cost units a second.
    """

    slots: pa.Table
    hours: pa.Table
    missed: pa.Table
    streams: pa.Table
    promises: Sequence[Promise]
    classes: Sequence[VolumeClass]
    former_capacity: dict[str, float]
    slot_files: Sequence[str] = ()
    missed_files: Sequence[str] = ()
    rollups: int = 0

    def promise_rows(self) -> list[tuple[int, str, str, int, int, float]]:
        """Rows of ``schema.PROMISE_DDL``: each stream in scope of each promise, at its first threshold.

        A promise is studied at the first step of its demand curve: that is the demand it was made for.
        """
        streams = self.streams.select(["stream_id", "volume", "client"]).to_pylist()
        return [
            (
                row["stream_id"],
                promise.sla,
                promise.objective,
                IO_KINDS[promise.io],
                promise.curve[0].threshold_us,
                promise.allowed_miss_ratio,
            )
            for promise in self.promises
            for row in streams
            if promise.covers(row["volume"], row["client"])
        ]

    @cached_property
    def protected(self) -> frozenset[str]:
        """Volumes that some promise covers; a policy never caps them."""
        rows = self.streams.select(["volume", "client"]).to_pylist()
        return frozenset(
            row["volume"]
            for row in rows
            if any(promise.covers(row["volume"], row["client"]) for promise in self.promises)
        )

    def class_of(self, volume: str) -> VolumeClass:
        """The volume's class: of its agreement with the highest priority, else best-effort."""
        found = [item for item in self.classes if any(fnmatchcase(volume, name) for name in item.volumes)]
        return max(found, key=lambda item: item.priority, default=DEFAULT_CLASS)


def read(store: PolicyStore, now_unix_us: int, window_days: int) -> JobInputs:
    """Read everything of the last ``window_days``.

    Raises:
        NothingToLearn: there are no rollups in the window.
        UnreadableAgreement: one in force does not fit this release.
        DatabaseUnavailable: retryable.
    """
    from_us = now_unix_us - window_days * 86_400 * US_A_SECOND
    columns = {"rollups": SLOT_COLUMNS, "rollup_missed": MISSED_COLUMNS, "rollup_hours": HOUR_COLUMNS}
    found = store.statistics(from_us, now_unix_us, columns)
    if found.slots.num_rows == 0 and found.hours.num_rows == 0 and not found.slot_files:
        raise NothingToLearn(window_days)
    in_force = [_in_force(row) for row in store.reader.agreements(in_force=True)]
    return JobInputs(
        slots=found.slots,
        hours=found.hours,
        missed=found.missed,
        streams=on_one_backend(store.streams_table(), store.volumes_table()),
        promises=promises(in_force),
        classes=classes(in_force),
        former_capacity=_former_capacity(store.reader.policies(limit=1)),
        slot_files=found.slot_files,
        missed_files=found.missed_files,
        rollups=found.slots.num_rows + found.rows_in_files,
    )


def on_one_backend(streams: pa.Table, volumes: pa.Table) -> pa.Table:
    """The streams with the backend their volume lies on now.

    A stream of a client that left before its volume was moved still names the former backend; counted there,
    the volume would have two caps for one hour.
    """
    now = dict(zip(volumes["volume"].to_pylist(), volumes["backend"].to_pylist(), strict=True))
    names, former = streams["volume"].to_pylist(), streams["backend"].to_pylist()
    backends = [now.get(name, backend) for name, backend in zip(names, former, strict=True)]
    index = streams.schema.get_field_index("backend")
    moved = streams.set_column(index, streams.schema.field(index), pa.array(backends, pa.string()))
    return moved.select(list(STREAM_COLUMNS))


def _in_force(row: dict[str, Any]) -> InForce:
    try:
        agreement = Agreement.from_spec(row["spec"])
    except ValidationError as exc:
        raise UnreadableAgreement(row["name"], row["version"], describe(exc)) from exc
    return InForce(agreement, row["version"], row["applied_us"], row["ended_us"])


def _former_capacity(policies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Last valid values: a day without contention must not forget what an earlier one showed."""
    found: dict[str, float] = {}
    for policy in policies:
        for item in policy["report"].get("capacity", []):
            if item["cost_per_s"] is not None:
                found[item["backend"]] = min(item["cost_per_s"], found.get(item["backend"], float("inf")))
    return found

"""What the job reads, once, before Spark starts: rollups, misses, streams and the promises in force.

Everything comes as Arrow through ``sla_server.db.policies`` (one consistent look at a time; SQLite and
PostgreSQL alike, no JDBC). Rollups of a fleet over weeks are some million rows: they fit the driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

import pyarrow as pa

from pmdaemon.wire.cut import IO_KINDS
from sla_server.agreements.compile import InForce, classes, promises
from sla_server.agreements.model import Agreement
from sla_server.agreements.promise import Priority, Promise, VolumeClass
from sla_server.db.policies import PolicyStore
from sla_server.policy_jobs.errors import NothingToLearn
from sla_server.policy_jobs.schema import (
    HOUR_COLUMNS,
    MISSED_COLUMNS,
    SLOT_COLUMNS,
    STREAM_COLUMNS,
    US_A_SECOND,
)

DEFAULT_CLASS: Final = VolumeClass("", Priority.BEST_EFFORT, ("*",))


@dataclass(frozen=True, slots=True)
class Inputs:
    """The job's whole input.

    Attributes:
        slots, hours, missed, streams: Arrow tables with the columns of ``schema``.
        former_capacity: backend -> the newest valid capacity of an earlier policy, cost units a second.
    """

    slots: pa.Table
    hours: pa.Table
    missed: pa.Table
    streams: pa.Table
    promises: Sequence[Promise]
    classes: Sequence[VolumeClass]
    former_capacity: dict[str, float]

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

    def is_protected(self, volume: str) -> bool:
        """Whether some promise covers the volume; then it is never capped by a policy."""
        return any(
            promise.covers(volume, client) for promise in self.promises for client in self._clients(volume)
        )

    def class_of(self, volume: str) -> VolumeClass:
        """The volume's class: of its agreement with the highest priority, else best-effort."""
        found = [item for item in self.classes if any(fnmatchcase(volume, name) for name in item.volumes)]
        return max(found, key=lambda item: item.priority, default=DEFAULT_CLASS)

    def _clients(self, volume: str) -> set[str]:
        rows = self.streams.select(["volume", "client"]).to_pylist()
        return {row["client"] for row in rows if row["volume"] == volume}


def read(store: PolicyStore, now_unix_us: int, window_days: int) -> Inputs:
    """Read everything of the last ``window_days``.

    Raises:
        NothingToLearn: there are no rollups in the window.
        DatabaseUnavailable: retryable.
    """
    from_us = now_unix_us - window_days * 86_400 * US_A_SECOND
    slots = store.rollups_table(from_us, now_unix_us).select(list(SLOT_COLUMNS))
    hours = store.hours_table(from_us, now_unix_us).select(list(HOUR_COLUMNS))
    if slots.num_rows == 0 and hours.num_rows == 0:
        raise NothingToLearn(window_days)
    in_force = [_in_force(row) for row in store.reader.agreements(in_force=True)]
    return Inputs(
        slots=slots,
        hours=hours,
        missed=store.missed_table(from_us, now_unix_us).select(list(MISSED_COLUMNS)),
        streams=store.streams_table().select(list(STREAM_COLUMNS)),
        promises=promises(in_force),
        classes=classes(in_force),
        former_capacity=_former_capacity(store.reader.policies(limit=1)),
    )


def _in_force(row: dict[str, Any]) -> InForce:
    return InForce(Agreement.from_spec(row["spec"]), row["version"], row["applied_us"], row["ended_us"])


def _former_capacity(policies: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Last valid values: a day without contention must not forget what an earlier one showed."""
    found: dict[str, float] = {}
    for policy in policies:
        for item in policy["report"].get("capacity", []):
            if item["cost_per_s"] is not None:
                found[item["backend"]] = min(item["cost_per_s"], found.get(item["backend"], float("inf")))
    return found

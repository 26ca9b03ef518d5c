"""The space job: ``python -m sla_server.policy_jobs.space_job --config FILE``. A command without Spark.

When each pool of storage will be full, from its use by day: the forecasts that the server makes once an hour
(``storage_resources.worker``), of all pools at once and also while no server runs. What it finds is stored
(``job_results``), and the server's next pass takes it instead of computing it again in the process that
judges and controls; events and actions are the server's. A crash leaves what was stored before.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import closing
from itertools import groupby
from typing import Any, Final

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import open_policies
from sla_server.jobs import JobAnswer, as_process, job_command, noted, only_one
from sla_server.storage_resources.forecast import DAY_US, MOST_DAYS
from sla_server.storage_resources.pools import SPACE_JOB, PoolKey
from sla_server.storage_resources.worker import as_stored, forecast_of, usable_days

KIND: Final = SPACE_JOB


def run(config: configuration.ResolvedConfig, who: str, now_us: int | None = None) -> dict[str, Any]:
    """One whole run; ``pools``: what the history of each says, the first to be full first.

    Raises:
        JobRunning, NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: what was stored before stays.
    """
    end_us = now_us or time.time_ns() // 1000
    check_made(config.database, config.data_dir)
    with (
        only_one(config.data_dir / "space-job" / "lock", KIND),
        closing(open_policies(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_store()
        with noted(store, KIND, who) as noted_run:
            names = {(row["owner"], row["pool"]): row["owner_name"] for row in store.reader.space.pools()}
            days = store.reader.space.pool_days(end_us - (MOST_DAYS + 1) * DAY_US)
            found, read = list[dict[str, Any]](), 0
            for key, rows in groupby(days, lambda row: (row["owner"], row["pool"])):
                if usable := usable_days(rows, end_us):
                    read += len(usable)
                    row = as_stored(forecast_of(PoolKey(*key), usable, end_us), end_us)
                    found.append({**row, "owner_name": names.get(key, "")})
            found.sort(
                key=lambda row: (row["full_us"] is None, row["full_us"] or 0, row["owner"], row["pool"])
            )
            store.results.replace(KIND, end_us, "", [(json.dumps(found).encode(), len(found))])
            soon = sum(row["full_us"] is not None for row in found)
            noted_run.note(f"{len(found)} pools, of which {soon} will be full on a known day", rows=read)
    return {"days": read, "pools": found}


def describe(found: Mapping[str, Any]) -> str:
    """The result for people."""
    lines = [f"{len(found['pools'])} pools, {found['days']} days"]
    for row in found["pools"]:
        name = f"  {row['owner_name'] or row['owner']}/{row['pool']}"
        if row["full_us"] is None:
            lines.append(f"{name}: no day is named, {row['reason']}")
            continue
        days = [
            f"{(row[key] - row['at_us']) / DAY_US:.0f}" if row[key] else "?"
            for key in ("earliest_us", "latest_us")
        ]
        left = (row["full_us"] - row["at_us"]) / DAY_US
        lines.append(f"{name}: full in {left:.0f} days ({days[0]} to {days[1]}), by {row['days']} days")
    return "\n".join(lines)


@job_command("space-job")
def main(config: configuration.ResolvedConfig, who: str) -> JobAnswer:
    """Forecast when each pool of storage will be full, and store that."""
    found = run(config, who)
    return JobAnswer(found, describe(found))


if __name__ == "__main__":
    as_process(main)

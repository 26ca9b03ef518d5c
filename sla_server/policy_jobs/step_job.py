"""Jobs of single steps: ``python -m sla_server.policy_jobs.step_job --config FILE NAME...``.

    cost-model    what an I/O costs each backend
    capacity      what each backend can take for each promise on it
    demand        what each volume asks for in each hour of the week
    attribution   who hurt which promise

Each is a step of the policy job (``compute.STEPS``) and has a lock, a row of ``jobs`` and a stored result of
its own, which the policy job takes while it is fresh (``stored_results``). Several names are computed one
after the other with one start of Spark, from one snapshot, and share what they read: start and reading are
most of what a step takes (ADR 41). A crash leaves what was stored before, and a row ``running``, which the
next run corrects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import click

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import PolicyStore, open_policies
from sla_server.jobs import JobAnswer, JobRun, as_process, job_command, noted, only_one
from sla_server.policy_jobs import attribution, cost_model, stored_results
from sla_server.policy_jobs.compute import COSTS, DEMAND, HARMS, STEPS, Frames, split_curves
from sla_server.policy_jobs.inputs import CAPACITY
from sla_server.policy_jobs.session import check_files, end_java
from sla_server.policy_jobs.spark_run import on_statistics

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from sla_server.policy_jobs.inputs import JobInputs, Statistics

MOST_LINES: Final = 20


def run(
    config: configuration.ResolvedConfig, who: str, names: Sequence[str], now_us: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Run these steps, in the order of ``STEPS``; name to the rows found (capacity without its curves).

    Raises:
        JobRunning: of one of them another run goes on; none was begun.
        NothingToLearn, UnreadableAgreement, NoSuchCalendar, FilesNotForSpark, NoJava, SparkFailed,
            NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: those before are stored.
    """
    end_us = now_us or time.time_ns() // 1000
    wanted = [name for name in STEPS if name in names]
    check_made(config.database, config.data_dir)
    check_files(config.database.files.url)
    dirs = [config.data_dir / f"{name}-job" for name in wanted]
    with ExitStack() as held:
        for name, job_dir in zip(wanted, dirs, strict=True):
            held.enter_context(only_one(job_dir / "lock", name))
        store = held.enter_context(
            closing(open_policies(config.database, config.data_dir, acting_fence(config)))
        )
        store.check_may_store()
        for name in wanted:
            held.enter_context(store.alone(name))
        turns = held.enter_context(Turns(store, who))
        turns.begin(wanted[0])

        def action(spark: SparkSession, rows: Statistics, read: JobInputs) -> dict[str, list[dict[str, Any]]]:
            return stored_steps(spark, rows, read, turns, wanted, config, end_us)

        found, _ = on_statistics(config, store, dirs[0], end_us, turns.reading, action)
    return found


class Turns:
    """The row of ``jobs`` of whichever step is at work: the next begins where the one before ends.

    The first has Spark's start in its time. An error is noted of the step that it ended.
    """

    def __init__(self, store: PolicyStore, who: str) -> None:
        self.store = store
        self._who = who
        self._open = ExitStack()
        self._run: JobRun | None = None
        self._rows = 0

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def begin(self, name: str) -> None:
        """The step of this name begins, and the one before has ended."""
        self._open.close()
        self._run = self._open.enter_context(noted(self.store, name, self._who))
        self.report("Spark computes")

    def reading(self, rows: int) -> None:
        """So many rows are read, by each of them."""
        self._rows = rows
        self.report("Spark computes")

    def report(self, text: str) -> None:
        """Say how far it is."""
        if self._run is not None:
            self._run.note(text, rows=self._rows)


def stored_steps(
    spark: SparkSession,
    rows: Statistics,
    read: JobInputs,
    turns: Turns,
    names: Sequence[str],
    config: configuration.ResolvedConfig,
    end_us: int,
) -> dict[str, list[dict[str, Any]]]:
    """Compute and store each step; the turn of the first has begun."""
    frames = Frames(spark, rows, read)
    basis = stored_results.basis_of(read, config.policy)
    found: dict[str, list[dict[str, Any]]] = {}
    try:
        for number, name in enumerate(names):
            if number:
                turns.begin(name)
            table: pa.Table = STEPS[name](frames)
            turns.store.results.replace(name, end_us, basis, stored_results.encoded(table))
            turns.report(summary(name, table.num_rows))
            found[name] = shown(name, table)
    finally:
        frames.release()
    return found


def shown(name: str, table: pa.Table) -> list[dict[str, Any]]:
    """The rows for the answer: of a demand, which has one for each hour, only the largest of each volume."""
    if name == DEMAND:
        largest = table.group_by(["backend", "volume"]).aggregate([("p50", "max"), ("p95", "max")])
        largest = largest.rename_columns(["backend", "volume", "p50", "p95"])
        rows = largest.sort_by([("p95", "descending"), ("volume", "ascending")]).to_pylist()
        return list(rows)
    return split_curves(table.to_pylist())[0] if name == CAPACITY else list(table.to_pylist())


def summary(name: str, rows: int) -> str:
    """One line for people."""
    return f"{rows:,} {WORDS[name]} stored"


WORDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        COSTS: "backends' costs of an I/O",
        CAPACITY: "capacities for promises",
        DEMAND: "hours of volumes' demand",
        HARMS: "causes of broken promises",
    }
)


def describe_capacity(row: Mapping[str, Any]) -> list[str]:
    """A capacity for people."""
    value = "unknown" if row["cost_per_s"] is None else f"{row['cost_per_s']:.0f} weighted IOPS"
    step = f" step {row['step'] + 1}" if row["step"] else ""
    return [
        f"  capacity of {row['backend']} for {row['sla']}/{row['objective']}{step}: {value}",
        f"    {row['reason']}, {row['points']} intervals",
    ]


def describe_demand(row: Mapping[str, Any]) -> list[str]:
    """The largest demand of a volume for people."""
    return [
        f"  demand of {row['volume']} on {row['backend']}: up to {row['p95']:.0f} weighted IOPS (p95), "
        f"{row['p50']:.0f} (p50)"
    ]


DESCRIBE: Final[Mapping[str, Callable[[Mapping[str, Any]], list[str]]]] = MappingProxyType(
    {
        COSTS: cost_model.describe,
        CAPACITY: describe_capacity,
        DEMAND: describe_demand,
        HARMS: attribution.describe,
    }
)


def describe(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The result for people."""
    lines = []
    for name, rows in found.items():
        lines.append(f"{name}: {len(rows)} rows")
        for row in rows[:MOST_LINES]:
            lines += DESCRIBE[name](row)
        if len(rows) > MOST_LINES:
            lines.append(f"  and {len(rows) - MOST_LINES:,} more: -o json")
    return "\n".join(lines)


@job_command("step-job", end_java)  # else what waits for a result goes on to wait
@click.argument("names", nargs=-1, required=True, type=click.Choice(list(STEPS)))
@click.option("--as-of", type=int, help="End of the window (us UTC); default: now. For runs to be compared.")
def main(
    config: configuration.ResolvedConfig, who: str, names: Sequence[str], as_of: int | None
) -> JobAnswer:
    """Compute single steps of a policy, all NAMES with one start of Spark, and store what they find."""
    found = run(config, who, names, as_of)
    return JobAnswer(found, describe(found))


if __name__ == "__main__":
    as_process(main)

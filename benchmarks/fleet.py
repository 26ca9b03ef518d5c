"""``make bench-fleet``: the whole server under 4,000 gateways of 16 streams, a poll a second, ten minutes.

Everything is the product: the supervisor with its parts, mailboxes, dbmanager on a PostgreSQL of its own
(fsync on) and Parquet, services with an agreement for every stream. The gateways are *simulated*
(``fleet_swarm``, in C, one process on the same machine); its CPU is shown apart. Agreements are put into
SQL before the server starts.

Reported over the measured time, after ``WARM_S``: CPU and memory of each process, late replies, and how
long after its sending a cut may be forgotten (a POLL a second says so: a second is the least). Then no more
cuts are made, and cuts sent are compared with cuts in SQL and in Parquet. A slice is due to be judged 45 s
after its end.

``make bench-fleet ARGS="--gateways 400 --for 30"`` is shorter; the goals are for 4,000. With
``--stop-dbmanager 30`` dbmanager is stopped for so long after the measured time, and what that does to the
PMDaemon is said (ADR 14), meanwhile and until everything is in SQL again (ADR 17).
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Engine, func, select

from benchmarks import fleet_load, fleet_watch, harness
from benchmarks.fleet_watch import Simulator
from sla_server.db import migrate, schema
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.queries.reader import open_reader
from tests.support.postgres import PostgresServer
from tests.support.stage import Stage

STREAMS: Final = 16
WARM_S: Final = 30.0
PROGRESS_S: Final = 10.0
START_LIMIT_S: Final = 120.0
STORE_LIMIT_S: Final = (
    900.0  # a machine that is too slow has most in the disk queue; how long it took is shown
)
SETTLE_S: Final = 5.0  # after an outage, within which replies may be late
CAUGHT_UP: Final = 5  # cuts a gateway that are on their way at any time
CATCH_UP_LIMIT_S: Final = 900.0
QUEUE_BYTES: Final = 2 << 30  # 80 s of the fleet
SLICE_S: Final = 60
JUDGED_AFTER_S: Final = 45
LATE: Final = "late_replies_total"  # a figure appears when it is first counted
POSTGRES: Final = {"shared_buffers": "256MB", "max_wal_size": "4GB"}


@dataclass
class Run:
    """The parts of one run."""

    stage: Stage
    postgres: PostgresServer
    engine: Engine
    simulator: Simulator
    gateways: int
    server_pid: int

    def usage(self) -> dict[str, fleet_watch.Usage]:
        """CPU and memory of all processes."""
        assert self.postgres.process is not None
        return fleet_watch.usage(self.server_pid, self.postgres.process.pid, self.simulator.pid)

    def figures(self) -> dict[str, float]:
        """The daemon's figures."""
        return fleet_watch.daemon_figures(self.stage.sockets / "run" / "metrics" / "pmdaemon.prom")

    def stored_cuts(self) -> int:
        """Cuts in SQL: numbers count up without holes, so the highest are the sum."""
        with self.engine.connect() as connection:
            return int(connection.execute(select(func.sum(schema.ingest_watermark.c.seq))).scalar() or 0)

    def slices(self, from_us: int, to_us: int) -> int:
        """Slices judged that start in this time."""
        table = schema.slices
        between = table.c.start_us >= from_us, table.c.start_us < to_us, table.c.revision == 0
        with self.engine.connect() as connection:
            return int(connection.execute(select(func.count()).where(*between)).scalar() or 0)


def _say(text: str) -> None:
    print(text[:80], flush=True)


def _program(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise SystemExit("bench-fleet: no C compiler; install one (apt-get install gcc libc6-dev)")
    source, program = Path(__file__).with_name("fleet_swarm.c"), folder / "fleet_swarm"
    subprocess.run([compiler, "-O2", "-o", str(program), str(source)], check=True)
    return program


def _wait(ready: Callable[[], bool], what: str, limit_s: float) -> float:
    """Seconds until ``ready()``.

    Raises:
        RuntimeError: not within the limit.
    """
    waited_s = _seconds_until(ready, limit_s)
    if waited_s is None:
        raise RuntimeError(f"{what}: not within {limit_s:.0f} s")
    return waited_s


def _seconds_until(ready: Callable[[], bool], limit_s: float) -> float | None:
    """Seconds until ``ready()``; None: not within the limit."""
    started_s = time.monotonic()
    while not ready():
        if time.monotonic() - started_s > limit_s:
            return None
        time.sleep(0.25)
    return time.monotonic() - started_s


def _promises(stage: Stage) -> int:
    """How many agreements the live view counts."""
    return sum(stage.live().get("totals", {}).get("slas", {}).values())


def _watch(run: Run, for_s: float) -> tuple[dict[str, Any], list[tuple[str, float, float, float]]]:
    """Let it run; a line of progress every ten seconds. Returns counts, and a row a process."""
    began, began_us, figures = run.usage(), time.time_ns() // 1000, run.figures()
    run.simulator.ask("mark")
    started_s = time.monotonic()
    last, last_s, last_figures = began, started_s, figures
    while (left_s := started_s + for_s - time.monotonic()) > 0:
        time.sleep(min(PROGRESS_S, left_s))
        now, now_s, now_figures = run.usage(), time.monotonic(), run.figures()
        cores = {name: cores for name, cores, _, _ in fleet_watch.rows(last, now, now_s - last_s)}
        pm = sum(used for name, used in cores.items() if name.startswith(("pm", "pair-")))
        polls = (now_figures["polls_total"] - last_figures["polls_total"]) / (now_s - last_s)
        late = now_figures.get(LATE, 0.0) - figures.get(LATE, 0.0)
        _say(
            f"{now_s - started_s:4.0f} s: {polls:.0f} polls/s, {late:.0f} late, cores: pm {pm:.2f} "
            f"sv {cores['services']:.2f} db {cores['dbmanager']:.2f} pg {cores['postgresql']:.2f} "
            f"sim {cores['simulator']:.2f}"
        )
        last, last_s, last_figures = now, now_s, now_figures
    elapsed_s, counts = last_s - started_s, run.simulator.ask("mark")
    counts |= {name: value - figures.get(name, 0.0) for name, value in last_figures.items()}
    counts |= {"elapsed_s": elapsed_s, "began_us": began_us, "ended_us": time.time_ns() // 1000}
    return counts, list(fleet_watch.rows(began, last, elapsed_s))


def _outage(run: Run, for_s: float) -> dict[str, float | None]:
    """Stop dbmanager for so long: replies and late ones meanwhile and while it catches up.

    ``caught_up_s`` is None when it does not within the limit: the fleet makes as much as the machine stores.
    """
    stopped = fleet_watch.part(run.server_pid, "dbmanager")
    began, figures = run.usage(), run.figures()
    stopped.suspend()
    try:
        time.sleep(for_s)
        ended, counts = run.usage(), run.figures()
    finally:
        stopped.resume()  # it could not be stopped in order otherwise
    cores = {name: cores for name, cores, _, _ in fleet_watch.rows(began, ended, for_s)}
    counts = {name: value - figures.get(name, 0.0) for name, value in counts.items()}
    resumed_s = time.monotonic()
    time.sleep(SETTLE_S)
    settled = run.figures()
    behind = CAUGHT_UP * run.gateways
    is_behind = (
        _seconds_until(lambda: run.stored_cuts() >= run.simulator.ask()["cuts"] - behind, CATCH_UP_LIMIT_S)
        is None
    )
    took_s, last = time.monotonic() - resumed_s, run.figures()
    found = {
        "replies_catching_up": last["replies_total"] - settled["replies_total"],
        "late_catching_up": last.get(LATE, 0.0) - settled.get(LATE, 0.0),
        "replies": counts["replies_total"],
        "late": counts.get(LATE, 0.0),
        "pmdaemon_cores": sum(used for name, used in cores.items() if name.startswith(("pm", "pair-"))),
    }
    _say(
        "dbmanager stopped: {replies:.0f} replies, {late:.0f} late, pm {pmdaemon_cores:.2f} cores".format(
            **found
        )
    )
    _say(
        f"{'NOT caught up' if is_behind else 'caught up'} after {took_s:.0f} s; "
        "{late_catching_up:.0f} of {replies_catching_up:.0f} replies late after 5 s".format(**found)
    )
    return {"caught_up_s": None if is_behind else took_s, **found}


def _judged_ratio(run: Run, began_us: int, ended_us: int) -> float | None:
    """Slices judged of those that began in the measured time and are due; None if there are none."""
    length_us = SLICE_S * 1_000_000
    first = -(-began_us // length_us) * length_us
    end = (ended_us - JUDGED_AFTER_S * 1_000_000) // length_us * length_us
    due = max(0, (end - first) // length_us) * run.gateways * STREAMS
    return run.slices(first, end) / due if due else None


def _table(rows: list[tuple[str, float, float, float]]) -> None:
    _say(f"{'process':<12} {'cores':>7} {'RSS MB':>9} {'PSS MB':>9}")
    for name, cores, rss, pss in rows:
        _say(f"{name:<12} {cores:7.3f} {rss:9.1f} {pss:9.1f}")


def _compare(folder: Path, url: str, sent: int) -> dict[str, int]:
    """Cuts sent against what is stored, after the server has stopped in order."""
    reader = open_reader(DatabaseConfig(url=url), folder / "data")
    rows_in_sql = sum(row["cuts"] for row in reader.streams())
    files = reader.manifest("cuts")
    in_files = sum(row["cuts"] for row in files)
    rows_in_files = sum(row["rows"] for row in files)
    reader.close()
    found = {"sent": sent, "in_files": in_files, "rows_sql": rows_in_sql, "rows_files": rows_in_files}
    found["dropped"] = abs(sent - in_files) + abs(sent * STREAMS - rows_in_sql) // STREAMS
    return found


def _run(
    folder: Path, postgres: PostgresServer, gateways: int, for_s: float, outage_s: float
) -> harness.Sample:
    url = postgres.create("fleet")
    engine = make_engine(DatabaseConfig(url=url), folder)
    migrate.upgrade(engine)
    _say(f"fleet: {gateways * STREAMS} agreements into SQL")
    fleet_load.store_agreements(engine, gateways, STREAMS, time.time_ns() // 1000)
    spec = folder / "spec"
    cut_bytes = fleet_load.write_spec(spec, gateways, STREAMS)
    stage = Stage(folder, database_url=url, mode="enforce", slice_s=SLICE_S, queue_bytes=QUEUE_BYTES)
    with stage:
        started_s = time.monotonic()
        stage.start_server()
        promised = gateways * STREAMS
        _wait(lambda: _promises(stage) == promised, "services with all agreements", START_LIMIT_S)
        times = {"start_s": time.monotonic() - started_s}
        _say(f"fleet: the server is up after {times['start_s']:.1f} s; dialling")
        interval_us = round(stage.interval_s * 1e6)
        simulator = Simulator(_program(folder), stage.pm_port, spec, interval_us, folder / "simulator.log")
        (server,) = stage.running("server")
        run = Run(stage, postgres, engine, simulator, gateways, server.pid)
        try:
            times["polled_s"] = _wait(
                lambda: simulator.ask()["running"] == gateways, "all gateways polled", START_LIMIT_S
            )
            times["told_s"] = _wait(
                lambda: simulator.ask()["thresholds"] >= gateways,
                "all gateways told thresholds",
                START_LIMIT_S,
            )
            _say(f"fleet: all polled after {times['polled_s']:.1f} s; warming up for {WARM_S:.0f} s")
            time.sleep(WARM_S)
            counts, rows = _watch(run, for_s)
            judged = _judged_ratio(run, counts["began_us"], counts["ended_us"])
            live = stage.live()["totals"]
            outage = _outage(run, outage_s) if outage_s else None
            time.sleep(2 * stage.interval_s)
            sent = simulator.ask("freeze")["cuts"]
            times["stored_s"] = _wait(lambda: run.stored_cuts() >= sent, "all cuts in SQL", STORE_LIMIT_S)
        except RuntimeError as exc:
            raise RuntimeError(f"{exc}\n{stage.tail()}") from exc
        finally:
            simulator.stop()
    engine.dispose()
    found = _compare(folder, url, sent)
    _table(rows)
    sample = _sample(counts, rows, found, times | {"cut_bytes": cut_bytes}, live, judged)
    if outage is not None:
        sample.raw["outage"] = outage
    return sample


def _sample(
    counts: dict[str, Any],
    rows: list[tuple[str, float, float, float]],
    found: dict[str, int],
    times: dict[str, float],
    live: dict[str, Any],
    judged: float | None,
) -> harness.Sample:
    cores = {name: used for name, used, _, _ in rows}
    values = {
        "late_ratio": counts.get(LATE, 0.0) / max(counts["replies_total"], 1.0),
        "dropped": float(found["dropped"]),
        "pmdaemon_cores": sum(used for name, used in cores.items() if name.startswith(("pm", "pair-"))),
        "durable_p99_s": counts["lag_p99_ms"] / 1000,
        "passed_over_ratio": counts.get("dropped_live_cuts_total", 0.0) / max(counts["cuts_total"], 1.0),
        "server_cores": sum(used for name, used in cores.items() if name != "simulator"),
        "server_mb": sum(pss for name, _, _, pss in rows if name != "simulator"),
        "simulator_cores": cores["simulator"],
    }
    if judged is not None:
        values["judged_ratio"] = judged
    raw = {"counts": counts, "stored": found, "times": times, "live": live}
    raw["processes"] = {name: {"cores": used, "rss_mb": rss, "pss_mb": pss} for name, used, rss, pss in rows}
    peers = {"postgresql": harness.version_of("psql"), "cc": harness.version_of("cc")}
    return harness.Sample(values, raw, peers)


def measure(gateways: int, for_s: float, outage_s: float) -> harness.Sample:
    """One whole run."""
    fleet_watch.require_open_files(gateways)
    folder = Path(tempfile.mkdtemp(prefix="sla-fleet-"))
    try:
        with PostgresServer(POSTGRES) as postgres:
            return _run(folder, postgres, gateways, for_s, outage_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="The whole server under a simulated fleet.")
    parser.add_argument("--gateways", type=int, default=4000)
    parser.add_argument("--for", type=float, default=600.0, dest="for_s", metavar="SECONDS")
    parser.add_argument("--stop-dbmanager", type=float, default=0.0, dest="outage_s", metavar="SECONDS")
    chosen = parser.parse_args()
    if chosen.gateways < 1 or chosen.for_s < 2 * PROGRESS_S:
        parser.error(f"--gateways is at least 1, --for at least {2 * PROGRESS_S:.0f}")
    if chosen.outage_s < 0:
        parser.error(f"--stop-dbmanager is {chosen.outage_s:g}, must be seconds, 0 or more")
    options = harness.Options.of(parser, chosen)
    harness.main("fleet", lambda: measure(chosen.gateways, chosen.for_s, chosen.outage_s), 1, options)


if __name__ == "__main__":
    main()

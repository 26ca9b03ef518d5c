"""The proof behind the chaos run: what agents say they made against what SQL and Parquet hold.

    made       lines ``cut-spooled`` in the agents' logs (debug level): the spool has confirmed the cut
    dropped    lines ``dropping-cuts``: written before the drop, so they name at least what was dropped
    held       cuts that still stand in the spools after everything was stopped
    delivered  (gateway, epoch, seq) in the Parquet files of the manifest

lost = made - delivered - held - dropped must be empty. Doubled: a cut in two files or twice in one; and every
sum that SQL keeps (coverage, streams, rollups) must equal the sum over the Parquet rows. Cumulative counters:
going through a stream's rows in order, each counter either continues the one before (or follows a gap that
says so), or begins a new life of its plane at what this row counts.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import click
import pyarrow as pa
import pyarrow.parquet as pq
from sqlalchemy import text

from benchmarks.chaos_events import EventsProof
from gateway_agent.link.spool import Spool
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.errors import DbError
from sla_server.db.queries.reader import open_reader

Key = tuple[str, int, int]
_SPOOLED = re.compile(r"event=cut-spooled epoch=(\d+) seq=(\d+)")
_DROPPING = re.compile(r"event=dropping-cuts cuts=\"?([\d:,-]+)")
_COLUMNS = ["gateway_id", "epoch", "seq", "raw_start_us", "gap", "stream_id"]
_SUMS = ("reads", "writes", "read_bytes", "write_bytes")
_CUMULATIVE = tuple(f"cum_{name}" for name in _SUMS)


@dataclass
class Gateway:
    """One agent: its identity, its logs and its spool."""

    gateway_id: str
    log: Path
    spool: Path
    spool_bytes: int
    stepped: bool = False


@dataclass
class Proof:
    """What was found; ``problems`` is empty if nothing was lost, doubled or miscounted."""

    made: int = 0
    delivered: int = 0
    held: int = 0
    dropped: int = 0
    lost: list[Key] = field(default_factory=list)
    doubled: list[Key] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    volumes: dict[str, int] = field(default_factory=dict)
    events: EventsProof = field(default_factory=EventsProof)

    def compare(self, volume: str, counted: int, errors: int = 0) -> None:
        """SQL must have what the clients of a volume counted."""
        stored = self.volumes.get(volume, 0)
        if stored != counted or errors:
            self.problems.append(
                f"clients of {volume} counted {counted} I/Os ({errors} errors), SQL has {stored}"
            )

    def report(self) -> NoReturn:
        """Say what was found, the first problems too, and end the program: status 1 if there are any."""
        click.echo(
            f"cuts: {self.made} made, {self.delivered} stored, {self.held} still in spools, "
            f"{self.dropped} counted as dropped; lost {len(self.lost)}, doubled {len(self.doubled)}"
        )
        for problem in self.problems[:20]:
            click.echo(f"  {problem}")
        sys.exit(1 if self.problems else 0)


def ledger(log: Path, gateway_id: str) -> tuple[set[Key], set[Key]]:
    """(made, dropped or about to be) as the log says."""
    made, dropped = set(), set()
    for line in log.read_text(errors="replace").splitlines():
        if found := _SPOOLED.search(line):
            made.add((gateway_id, int(found[1]), int(found[2])))
        elif found := _DROPPING.search(line):
            for part in found[1].split(","):
                epoch, first, last = (int(number) for number in re.split("[:-]", part))
                dropped |= {(gateway_id, epoch, seq) for seq in range(first, last + 1)}
    return made, dropped


def newest_made(gateways: list[Gateway]) -> dict[tuple[str, int], int]:
    """The newest cut of each epoch that was not dropped: (gateway, epoch) -> seq."""
    newest: dict[tuple[str, int], int] = {}
    for gateway in gateways:
        made, dropped = ledger(gateway.log, gateway.gateway_id)
        for gateway_id, epoch, seq in made - dropped:
            newest[gateway_id, epoch] = max(seq, newest.get((gateway_id, epoch), 0))
    return newest


def has_stored(config: DatabaseConfig, data_dir: Path, newest: dict[tuple[str, int], int]) -> bool:
    """Whether SQL has these cuts, as ``newest_made`` names them; no, while it is away."""
    try:
        with closing(open_reader(config, data_dir)) as reader:
            found = {(gateway_id, epoch): seq for gateway_id, epoch, seq in reader.watermarks()}
    except DbError:
        return False
    return all(found.get(key, 0) >= seq for key, seq in newest.items())


def prove(config: DatabaseConfig, data_dir: Path, gateways: list[Gateway]) -> Proof:
    """Read everything and compare. Call when agents and server are stopped."""
    proof = Proof()
    engine = make_engine(config, data_dir)
    try:
        with engine.connect() as connection:
            sql = _Sql(connection)
            rows = _parquet_rows(sql.paths, config.resolved_parquet_dir(data_dir))
    finally:
        engine.dispose()
    times = Counter(_cuts_of(rows))
    proof.doubled = sorted(key for key, count in times.items() if count > 1)
    proof.delivered = len(times)
    for gateway in gateways:
        _account(proof, gateway, set(times), sql)
    _compare_sums(proof, rows, times, sql)
    for gateway in gateways:
        if not gateway.stepped:
            mine = [row for row in rows if row["gateway_id"] == gateway.gateway_id]
            proof.problems += _broken_counters(mine)
    proof.problems += [f"lost: {key}" for key in proof.lost] + [f"doubled: {key}" for key in proof.doubled]
    return proof


class _Sql:
    """What the database holds, in plain Python."""

    def __init__(self, connection: Any) -> None:
        def rows(statement: str) -> list[Any]:
            return list(connection.execute(text(statement)))

        self.paths = [row[0] for row in rows("select path from manifest where replaced_us is null")]
        self.file_cuts = int(
            rows("select coalesce(sum(cuts), 0) from manifest where replaced_us is null")[0][0]
        )
        self.coverage = {
            row[0]: (int(row[1]), int(row[2]))
            for row in rows("select gateway_id, sum(cuts), sum(gap_cuts) from coverage group by gateway_id")
        }
        self.watermarks = {
            (row[0], int(row[1])): int(row[2])
            for row in rows("select gateway_id, epoch, seq from ingest_watermark")
        }
        self.dropped = {row[0]: int(row[1]) for row in rows("select gateway_id, dropped_cuts from gateways")}
        names = ", ".join(f"coalesce(sum({name}), 0)" for name in _SUMS)
        self.streams = {
            int(row[0]): tuple(int(value) for value in row[1:])
            for row in rows(f"select stream_id, {names} from streams group by stream_id")  # noqa: S608 - our names
        }
        self.rollups = {
            int(row[0]): tuple(int(value) for value in row[1:])
            for row in rows(f"select stream_id, {names} from rollups group by stream_id")  # noqa: S608 - our names
        }
        self.volumes = {int(row[0]): row[1] for row in rows("select stream_id, volume from streams")}


def _parquet_rows(paths: list[str], directory: Path) -> list[dict[str, Any]]:
    tables = [pq.read_table(directory / path, columns=[*_COLUMNS, *_SUMS, *_CUMULATIVE]) for path in paths]
    return list(pa.concat_tables(tables).to_pylist()) if tables else []


def _cuts_of(rows: list[dict[str, Any]]) -> Iterator[Key]:
    """One key a stored cut: a cut's rows stand one behind another, and no stream twice in one."""
    seen: set[Any] = set()
    last: Key | None = None
    for row in rows:
        key = (row["gateway_id"], int(row["epoch"]), row["seq"])
        if key != last or row["stream_id"] in seen:
            yield key
            last, seen = key, set()
        seen.add(row["stream_id"])


def _account(proof: Proof, gateway: Gateway, delivered: set[Key], sql: _Sql) -> None:
    made, dropping = ledger(gateway.log, gateway.gateway_id)
    spool = Spool(gateway.spool, gateway.spool_bytes)
    held = {(gateway.gateway_id, item.epoch, item.seq) for item in spool.read_from(None)}
    counted = spool.dropped
    spool.close()
    missing = made - delivered - held
    proof.lost += sorted(missing - dropping)
    if len(missing) > counted:
        proof.problems.append(
            f"{gateway.gateway_id}: {len(missing)} cuts are missing, {counted} were counted"
        )
    mine = {key for key in delivered if key[0] == gateway.gateway_id}
    high: dict[int, int] = defaultdict(int)
    for _, epoch, seq in mine:
        high[epoch] = max(high[epoch], seq)
    for epoch, seq in high.items():
        if sql.watermarks.get((gateway.gateway_id, epoch), 0) < seq:
            proof.problems.append(f"{gateway.gateway_id}: epoch {epoch}, files go beyond SQL's watermark")
    if sql.dropped.get(gateway.gateway_id, 0) > counted:
        proof.problems.append(f"{gateway.gateway_id}: SQL knows of more dropped cuts than the spool")
    proof.made += len(made)
    proof.held += len(held - delivered)
    proof.dropped += counted


def _compare_sums(proof: Proof, rows: list[dict[str, Any]], times: Counter[Key], sql: _Sql) -> None:
    cuts = Counter(key[0] for key in times)
    for gateway_id, count in cuts.items():
        covered = sql.coverage.get(gateway_id, (0, 0))[0]
        if covered != count:
            proof.problems.append(f"{gateway_id}: {covered} cuts in SQL, {count} in files")
    if sql.file_cuts != sum(times.values()):
        proof.problems.append(f"the manifest says {sql.file_cuts} cuts, files hold {sum(times.values())}")
    sums: dict[int, list[int]] = defaultdict(lambda: [0] * len(_SUMS))
    for row in rows:
        if row["stream_id"] is not None:
            for index, name in enumerate(_SUMS):
                sums[row["stream_id"]][index] += row[name]
    nothing = (0,) * len(_SUMS)
    for stream_id in sums.keys() | sql.streams.keys() | sql.rollups.keys():
        found = tuple(sums.get(stream_id, nothing))
        for table, held in (("streams", sql.streams), ("rollups", sql.rollups)):
            if held.get(stream_id, nothing) != found:
                proof.problems.append(
                    f"stream {stream_id}: {table} has {held.get(stream_id)}, files have {found}"
                )
        volume = sql.volumes.get(stream_id, "?")
        proof.volumes[volume] = proof.volumes.get(volume, 0) + found[0] + found[1]


def _broken_counters(rows: list[dict[str, Any]]) -> list[str]:
    """Places where a cumulative counter neither goes on nor starts again at zero."""
    problems = []
    last: dict[int, dict[str, Any]] = {}
    rows = sorted(rows, key=lambda row: (row["raw_start_us"], row["seq"]))
    gap_at: dict[int, int] = {}
    for number, row in enumerate(rows):
        gap_at[number] = gap_at.get(number - 1, 0) + row["gap"]
        stream_id = row["stream_id"]
        if stream_id is None:
            continue
        before = last.get(stream_id)
        last[stream_id] = {**row, "number": number}
        for name, total in zip(_SUMS, _CUMULATIVE, strict=True):
            begins = row[total] == row[name]
            goes_on = before is not None and row[total] == before[total] + row[name]
            explained = before is not None and gap_at[number] > gap_at[before["number"]]
            if not (begins or goes_on or explained):
                was = before[total] if before is not None else None
                problems.append(
                    f"stream {stream_id}, cut {row['epoch']}/{row['seq']}: {total} is {row[total]} "
                    f"after {was} and {row[name]} more"
                )
    return problems

"""``sla top``: the live view in a terminal, refreshed each second; q or Ctrl-C ends it.

``frame`` is pure (snapshot in, renderable out); the rest is a loop around it: read /api/v1/live, draw, wait
for a key. A server that does not answer is reported in the frame and asked again; the last values stay.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import CliError, LiveValuesMissing
from sla_server.cli.formatting import Column, FiniteRange, build, console, pass_client
from sla_server.cli.tables import hold_of, now_of, objective_of, promise, state_of, what_of
from sla_server.rows import Row

SLAS: Final = (
    Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
    Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
    Column("NOW", lambda row, _now_us: now_of(row), number=True),
    Column("PROMISED", lambda row, _now_us: promise(row), number=True),
    Column("KEPT", lambda row, _now_us: formatting.percent(row.get("compliance"), 2), number=True),
    Column("BUDGET", lambda row, _now_us: formatting.percent(row.get("budget_remaining"), 0), number=True),
)
VOLUMES: Final = (
    Column("VOLUME", lambda row, _now_us: str(row.get("volume"))),
    Column("IOPS", lambda row, _now_us: formatting.count(row.get("iops")), number=True),
    Column("RATE", lambda row, _now_us: formatting.rate(row.get("bytes_per_s")), number=True),
    Column("P50", lambda row, _now_us: formatting.latency(row.get("p50_us")), number=True),
    Column("P95", lambda row, _now_us: formatting.latency(row.get("p95_us")), number=True),
    Column("P99", lambda row, _now_us: formatting.latency(row.get("p99_us")), number=True),
    Column("HELD", lambda row, _now_us: formatting.count(row.get("held")), number=True),
    Column("CAP", lambda row, _now_us: formatting.volume_cap(row), number=True),
)
THROTTLES: Final = (
    Column("THROTTLED", lambda row, _now_us: formatting.throttled(row)),
    Column("AT MOST", lambda row, _now_us: formatting.enforced(row)),
    Column("STATE", lambda row, _now_us: str(row.get("state"))),
    Column("HELD", lambda row, _now_us: hold_of({"live": row})),
    Column("FOR", lambda row, now_us: formatting.ago(row.get("since_us"), now_us), number=True),
    Column("WHY", lambda row, _now_us: formatting.why_enforced(row)),
)
EVENTS: Final = (
    Column("TIME", lambda row, _now_us: formatting.when(row.get("at_us"))),
    Column("EVENT", lambda row, _now_us: what_of(row) if row.get("text") else str(row.get("kind"))),
)
EVENTS_SHOWN: Final = 5
NEEDS_A_LOOK: Final = ("violating", "at-risk", "no-data")
NO_SLAS: Final = "No promise is in force: sla apply -f agreement.yaml"
NO_VOLUMES: Final = "No volume seen: gateway-agent run --config FILE"
_QUIT: Final = frozenset(b"qQ\x04")


def frame(snapshot: Row, trouble: str = "") -> RenderableType:
    """One picture of the live view; ``trouble`` is shown above it."""
    now_us = int(snapshot.get("at_us") or 0)
    parts: list[RenderableType] = [_headline(snapshot, trouble)]
    if trouble:
        parts.append(Text(printable_lines(trouble), formatting.BAD))
    known = bool(snapshot.get("at_us"))  # before the first live view an empty list says nothing
    sections: tuple[tuple[tuple[Column, ...], list[Row], str], ...] = (
        (
            SLAS,
            sorted(snapshot.get("slas", []), key=_rank),
            NO_SLAS if known else "Agreements are not known yet.",
        ),
        (VOLUMES, snapshot.get("volumes", []), NO_VOLUMES if known else "Volumes are not known yet."),
        (THROTTLES, snapshot.get("throttles", []), "Nobody is throttled." if known else ""),
        (EVENTS, snapshot.get("events", [])[:EVENTS_SHOWN], "No events yet." if known else ""),
    )
    for columns, rows, empty in sections:
        if not rows and not empty:
            continue
        parts.append(Text())
        parts.append(build(columns, rows, now_us) if rows else Text(empty, "dim"))
        if columns is SLAS and (more := _promises(snapshot) - len(rows)) > 0:
            parts.append(Text(f"and {more:,} more: sla get slas", "dim"))
    return Group(*parts)


def _rank(row: Row) -> int:
    """Promises that need a look come first, the others as they came: by name."""
    state = row.get("state")
    return NEEDS_A_LOOK.index(state) if state in NEEDS_A_LOOK else len(NEEDS_A_LOOK)


def _promises(snapshot: Row) -> int:
    """How many there are; of a large installation the snapshot lists those that need a look."""
    return sum(((snapshot.get("totals") or {}).get("slas") or {}).values())


def _headline(snapshot: Row, trouble: str) -> Table:
    line = Table.grid(expand=True)
    line.add_column()
    line.add_column(justify="right", no_wrap=True)
    gateways = (snapshot.get("totals") or {}).get("gateways") or Counter(
        row.get("state") for row in snapshot.get("gateways", [])
    )
    restarts = sum(int(row.get("restarts") or 0) for row in snapshot.get("processes", []))
    facts = [
        f"mode {snapshot.get('mode') or 'unknown'}",
        f"{gateways.get('up', 0) + gateways.get('recovered', 0)} of {sum(gateways.values())} gateways up",
        f"{restarts} process restart{'' if restarts == 1 else 's'}",
    ]
    policy = snapshot.get("policy") or {}
    if policy.get("version"):
        facts.append(f"policy {policy['version']}")
    stamp = "" if trouble else formatting.when(snapshot.get("at_us"))
    line.add_row(Text(printable_lines(" · ".join(facts)), "bold"), Text(stamp, "dim"))
    return line


@click.command()
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--interval", type=FiniteRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@pass_client
def top(client: Client, once: bool, interval: float) -> None:
    """Watch agreements, volumes and throttles live; q ends it."""
    snapshot: dict[str, Any] = client.get("/live")
    if once or not sys.stdout.isatty():
        if silence := formatting.silence_of(snapshot.get("server") or {}):
            raise LiveValuesMissing(silence)
        console().print(frame(snapshot, trouble_of(snapshot)))
        return
    trouble = trouble_of(snapshot)
    with _keys(), Live(frame(snapshot, trouble), console=console(), screen=True, auto_refresh=False) as live:
        while not _quit_pressed(interval):
            try:
                snapshot = client.get("/live")
                trouble = trouble_of(snapshot)
            except CliError as exc:
                trouble = str(exc).splitlines()[0] + " Trying again."
            live.update(frame(snapshot, trouble), refresh=True)


def trouble_of(snapshot: Row) -> str:
    """What is wrong with the view itself or with the server, in words; empty when nothing is."""
    server = snapshot.get("server") or {}
    database = formatting.sentence(server.get("database"))
    if not server.get("stale"):
        troubles = (
            [f"{database} Live values go on; compliance and events are those last read."] if database else []
        )
        troubles += [
            f"{row['process']}, since {formatting.when(row['since_us'])}: "
            f"{formatting.sentence(row['reason'])}"
            for row in snapshot.get("problems", [])
            if not (database and row["what"] == "database")
        ]
        return "\n".join(troubles)
    return formatting.silence_of(server)


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Read keys one by one; restore the terminal afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _quit_pressed(wait_s: float) -> bool:
    """Wait; whether q was pressed meanwhile."""
    end_s = time.monotonic() + wait_s
    while (left_s := end_s - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left_s)
        elif select.select([sys.stdin], [], [], left_s)[0]:
            keys = os.read(sys.stdin.fileno(), 64)  # past Python's buffer, which select cannot see
            if not keys or set(keys) & _QUIT:
                return True
    return False

"""``sla top``: the live view in a terminal, refreshed each second; q or Ctrl-C ends it.

``frame`` is pure (snapshot in, renderable out); the rest is a loop around it: read /api/v1/live, draw, wait
for a key. A server that does not answer is reported in the frame and asked again; the last values stay.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.agreements.selectors import matches
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import CliError, LiveValuesMissing
from sla_server.cli.formatting import Column, FiniteRange, build, console, pass_client
from sla_server.cli.labels import check_labels
from sla_server.cli.output import NAME, OUTPUT, TABLE, form, print_json
from sla_server.cli.tables import (
    OF_PERIOD,
    burn_of,
    hold_of,
    now_of,
    objective_of,
    promise,
    state_of,
    what_of,
)
from sla_server.cli.watch import ended_by_sigterm
from sla_server.rows import Row

_WHICH: Final = (
    Column("AGREEMENT", lambda row, _now_us: objective_of(row)),
    Column("STATE", lambda row, _now_us: state_of(row.get("state"))),
)
SLAS: Final = (
    *_WHICH,
    Column("NOW", lambda row, _now_us: now_of(row), number=True),
    Column("PROMISED", lambda row, _now_us: promise(row), number=True),
)
PERIOD: Final = (
    *_WHICH,
    Column("PROMISED", lambda row, _now_us: promise(row), number=True),
    Column("COMPLIANCE", lambda row, _now_us: formatting.percent(row.get("compliance"), 2), number=True),
    Column("BUDGET", lambda row, _now_us: formatting.percent(row.get("budget_remaining"), 0), number=True),
    Column("BURN 1H", lambda row, _now_us: burn_of(row), number=True),
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


SECTIONS: Final = ("slas", "volumes", "throttles", "events")
SORTS: Final[dict[str, tuple[tuple[str, str, bool], ...]]] = {
    "state": (),
    "name": (("slas", "name", False), ("volumes", "volume", False)),
    "latency": (("slas", "latency_us", True), ("volumes", "p95_us", True)),
    "budget": (("slas", "budget_remaining", False),),
    "compliance": (("slas", "compliance", False),),
    "burn": (("slas", "burn_1h", True),),
    "iops": (("volumes", "iops", True),),
    "rate": (("volumes", "bytes_per_s", True),),
    "held": (("volumes", "held", True),),
    "delay": (("volumes", "delay_us", True),),
}
"""What to sort by -> (section, key, whether the largest comes first); by state, as services order them."""
LABELS_S: Final = 30.0
"""Which agreements have the labels is asked again after this."""


@dataclass(frozen=True, slots=True)
class TopView:
    """What is shown of a snapshot, and in which order.

    Attributes:
        names: patterns of agreements, volumes or backends; none: all.
        states: of agreements, as the API calls them; none: all.
        agreements: those with the labels that were asked for; None: all.
        rows: at most so many of each section; None: all.
    """

    sort: str = "state"
    is_reversed: bool = False
    names: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    agreements: frozenset[str] | None = None
    sections: tuple[str, ...] = SECTIONS
    rows: int | None = None

    def of(self, section: str, rows: Sequence[Row]) -> list[Row]:
        """The rows of a section that are wanted, in order."""
        found = [row for row in rows if self._is_wanted(section, row)]
        if section == "slas":
            found.sort(key=_rank)
        for name, key, is_descending in SORTS[self.sort]:
            if name == section:
                known = [row for row in found if row.get(key) is not None]
                known.sort(key=lambda row: row[key], reverse=is_descending != self.is_reversed)
                found = known + [row for row in found if row.get(key) is None]
        return found

    def _is_wanted(self, section: str, row: Row) -> bool:
        names = [str(row.get(key) or "") for key in _NAMED[section]]
        if self.names and not any(matches(name, self.names) for name in names if name):
            return False
        if section == "slas" and self.states and row.get("state") not in self.states:
            return False
        if self.agreements is None or section in ("volumes", "events"):
            return True
        agreement = row.get("name") if section == "slas" else str(row.get("victim") or "").partition("/")[0]
        return agreement in self.agreements


_NAMED: Final = {
    "slas": ("name",),
    "volumes": ("volume", "backend"),
    "throttles": ("volume", "client", "backend", "group_name"),
    "events": ("subject",),
}


def frame(snapshot: Row, trouble: str = "", view: TopView | None = None) -> RenderableType:
    """One picture of the live view; ``trouble`` is shown above it."""
    view = view or TopView()
    now_us = int(snapshot.get("at_us") or 0)
    parts: list[RenderableType] = [_headline(snapshot, trouble)]
    if trouble:
        parts.append(Text(printable_lines(trouble), formatting.BAD))
    known = bool(snapshot.get("at_us"))  # before the first live view an empty list says nothing
    is_of_period = view.sort in OF_PERIOD
    sections: dict[str, tuple[tuple[Column, ...], str]] = {
        "slas": (PERIOD if is_of_period else SLAS, NO_SLAS if known else "Agreements are not known yet."),
        "volumes": (VOLUMES, NO_VOLUMES if known else "Volumes are not known yet."),
        "throttles": (THROTTLES, "Nobody is throttled." if known else ""),
        "events": (EVENTS, "No events yet." if known else ""),
    }
    for name in view.sections:
        columns, empty = sections[name]
        listed = snapshot.get(name, [])
        rows = view.of(name, listed)
        shown = rows[: EVENTS_SHOWN if name == "events" else view.rows]
        if not shown and not empty:
            continue
        parts.append(Text())
        if shown and (when := _of_when(name, is_of_period=is_of_period)):
            parts.append(Text(when, "dim"))
        parts.append(build(columns, shown, now_us) if shown else Text(_none(listed, empty), "dim"))
        total = _total(snapshot, name)
        is_all = len(rows) == len(listed)
        left_out = 0 if name == "events" else (max(total, len(rows)) if is_all else len(rows)) - len(shown)
        if left_out > 0:
            parts.append(Text(f"and {left_out:,} more: sla get {name}", "dim"))
        if total > len(listed) and not (is_all and view.sort == "state"):
            text = (
                f"Looked at were the {len(listed):,} of {total:,} that are live here: sla get {name} has all"
            )
            parts.append(Text(text, "dim"))
    return Group(*parts)


def _of_when(section: str, *, is_of_period: bool) -> str:
    """The time that the figures of a table are of; of throttles and events each row says it."""
    if section == "slas" and is_of_period:
        return "This period so far:"
    return "Now, over the last seconds:" if section in ("slas", "volumes") else ""


def _none(listed: Sequence[Row], empty: str) -> str:
    return "None of them fits what was asked for." if listed else empty


def _rank(row: Row) -> int:
    """Promises that need a look come first, the others as they came: by name."""
    state = row.get("state")
    return NEEDS_A_LOOK.index(state) if state in NEEDS_A_LOOK else len(NEEDS_A_LOOK)


def _total(snapshot: Row, section: str) -> int:
    """How many there are; of many the snapshot has some: promises that need a look, busy volumes."""
    total = (snapshot.get("totals") or {}).get(section) or 0
    return sum(total.values()) if isinstance(total, dict) else int(total)


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


class StateType(click.Choice[str]):
    """A state of agreements, by its code or as tables show it: ok and kept, no-data and "no data"."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``click.ParamType``."""
        return super().convert(formatting.state_code(str(value)), param, ctx)


@click.command()
@click.argument("names", nargs=-1, metavar="[PATTERN]...")
@click.option("--once", is_flag=True, help="Print one picture and end.")
@click.option("--interval", type=FiniteRange(0.2, 60), default=1.0, show_default=True, help="Seconds.")
@click.option(
    "--sort",
    type=click.Choice(list(SORTS)),
    default="state",
    show_default=True,
    help="What comes first: trouble, the longest latency, the least budget, the most I/O ...",
)
@click.option("--reverse", "is_reversed", is_flag=True, help="The other way round.")
@click.option("-l", "--selector", "labels", metavar="LABELS", help="Agreements with these labels.")
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="STATE",
    type=StateType(list(formatting.STATES)),
    help="Agreements in it: violated, at-risk, no-data, kept, idle ...",
)
@click.option("--only", "sections", multiple=True, type=click.Choice(SECTIONS), help="Only this table.")
@click.option("--rows", type=click.IntRange(1, 1000), help="Of each table [as many as there is room for].")
@OUTPUT
@pass_client
def top(
    client: Client,
    /,
    names: tuple[str, ...],
    once: bool,
    interval: float,
    labels: str | None,
    output: str,
    **given: Any,
) -> None:
    """Watch agreements, volumes and throttles live; q or Ctrl-C ends it.

    Figures are of the last seconds; with --sort compliance, budget or burn those of agreements are of the
    period so far.

    PATTERN (erp-*) shows only agreements, volumes and backends of such names. Options that may be repeated:
    --state, --only. With -o json, yaml or name it prints one picture, with all rows unless --rows is given.
    """
    if labels is not None:
        check_labels(labels)
    given["sections"] = given["sections"] or SECTIONS
    view = TopView(names=names, **given)
    snapshot: dict[str, Any] = client.get("/live")
    chosen = _Labelled(client, labels)
    if once or output != TABLE or not sys.stdout.isatty():
        if silence := formatting.silence_of(snapshot.get("server") or {}):
            raise LiveValuesMissing(silence)
        if output != TABLE:
            _print_rows(snapshot, chosen.narrowed(view))
            return
        console().print(frame(snapshot, trouble_of(snapshot), chosen.narrowed(view)))
        return
    trouble = trouble_of(snapshot)
    shown = frame(snapshot, trouble, chosen.narrowed(_fitting(view)))
    with (
        contextlib.suppress(KeyboardInterrupt),
        ended_by_sigterm(),
        _keys(),
        Live(shown, console=console(), screen=True, auto_refresh=False) as live,
    ):
        while not _quit_pressed(interval):
            try:
                snapshot = client.get("/live")
                trouble = trouble_of(snapshot)
                shown = frame(snapshot, trouble, chosen.narrowed(_fitting(view)))
            except CliError as exc:
                trouble = str(exc).splitlines()[0] + " Trying again."
                shown = frame(snapshot, trouble, _fitting(view))
            live.update(shown, refresh=True)


def _print_rows(snapshot: Row, view: TopView) -> None:
    """The same rows in the same order, for programs."""
    found = {name: view.of(name, snapshot.get(name, []))[: view.rows] for name in view.sections}
    if form() == NAME:
        of_kind = [{"name": f"{kind}/{row[key]}"} for kind, key, rows in _named(found) for row in rows]
        print_json(of_kind)
        return
    print_json({**{key: snapshot.get(key) for key in ("at_us", "mode", "policy", "server")}, **found})


def _named(found: dict[str, list[Row]]) -> Iterator[tuple[str, str, list[Row]]]:
    """Kind, the key that names a row, and rows."""
    keys = {
        "slas": ("sla", "name"),
        "volumes": ("volume", "volume"),
        "throttles": ("throttle", "throttle_id"),
    }
    keys["events"] = ("event", "event_id")
    for section, rows in found.items():
        kind, key = keys[section]
        yield kind, key, [row for row in rows if row.get(key)]


class _Labelled:
    """The agreements with the labels that were asked for, looked up now and then."""

    def __init__(self, client: Client, labels: str | None) -> None:
        self._client = client
        self._labels = labels
        self._names: frozenset[str] | None = None
        self._until_s = 0.0

    def narrowed(self, view: TopView) -> TopView:
        """The view of these agreements only."""
        if self._labels is not None and time.monotonic() >= self._until_s:
            rows = self._client.get("/slas", labels=self._labels)["items"]
            self._names = frozenset(str(row["name"]) for row in rows)
            self._until_s = time.monotonic() + LABELS_S
        return replace(view, agreements=self._names)


def _fitting(view: TopView) -> TopView:
    """As many rows as the terminal has room for, all tables together, unless a number was given."""
    if view.rows is not None:
        return view
    tables = [name for name in view.sections if name != "events"]
    around = 3 + 5 * len(tables) + (EVENTS_SHOWN + 3 if "events" in view.sections else 0)
    room = shutil.get_terminal_size().lines - around
    return replace(view, rows=max(2, room // max(1, len(tables))))


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

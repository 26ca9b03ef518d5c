"""Shared by the commands: options, durations, values as text, tables, printing.

A value that is missing is a dash, never a 0. A table is rows in (as the API gives them) and a rich table out:
a column is a heading, a function of the row, and how it may shrink. Numbers are never shortened; names fold
over lines. Every table fits 80 columns; in a wider terminal it takes the room. Without a terminal it is 80
wide.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo

import click
import structlog
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.space.words import shown_bytes
from sla_server.agreements.numbers import number_and_unit, plain
from sla_server.agreements.zones import is_zone
from sla_server.cli.errors import BadUsage
from sla_server.cli.output import DATA_OUTPUT as DATA_OUTPUT
from sla_server.cli.output import OUTPUT as OUTPUT
from sla_server.cli.output import is_wide
from sla_server.cli.output import print_json as print_json
from sla_server.rows import Row

CONFIG = click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's configuration (also SLA_CONFIG).",
)
UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
DURATION_MAX_S: Final = 100 * 366 * 86_400.0
WIDTH: Final = 80
UNFOLDED: Final = 1000
"""Columns of a table that is not folded."""
FAR_DAYS: Final = 180
"""Beyond this a date without its year is ambiguous."""
pass_client = click.pass_obj
DASH: Final = "-"
GOOD, WARN, BAD = "green", "yellow", "bold red"
STATES: Final = {
    "ok": ("kept", GOOD),
    "at-risk": ("AT RISK", WARN),
    "violating": ("VIOLATED", BAD),
    "no-data": ("no data", WARN),
    "idle": ("idle", "dim"),
    "out-of-curve": ("above demand", "dim"),
    "not-applicable": ("does not apply", "dim"),
    "excluded": ("excluded", "dim"),
    "no-objective": ("no objective", "dim"),
}
SLICE_STATES: Final = {
    "good": ("good", GOOD),
    "bad": ("BAD", BAD),
    "no_data": ("no data", WARN),
    "not_applicable": ("not applicable", "dim"),
    "excluded": ("excluded", "dim"),
}
SEVERITIES: Final = {"critical": BAD, "error": BAD, "warning": WARN}


CAP_WIDTH: Final = 10
"""Characters of a volume's cap in a narrow terminal: 9,999 IOPS."""
SHORT_ID: Final = 8
"""Characters of an id in tables: of 1,000 random ones, two begin alike once in 8,600 tables."""
NARROW: Final = 110
"""A terminal with fewer columns has no room for names, times and a text side by side."""


def state_code(word: str) -> str:
    """Code of a state, of the word by which tables show it, too: kept is ok, "no data" no-data."""
    said = word.strip().lower().replace(" ", "-")
    shown = {text.lower().replace(" ", "-"): code for code, (text, _style) in STATES.items()}
    return shown.get(said, said)


def count(value: Any) -> str:
    """A whole number with separators."""
    return DASH if value is None else f"{value:,.0f}"


def latency(us: Any) -> str:
    """Microseconds in the unit a person would use."""
    if us is None:
        return DASH
    if us < 995:
        return f"{us:.0f}us"
    if us < 999_500:
        return f"{us / 1000:.{2 if us < 9_995 else 1 if us < 99_950 else 0}f}ms"
    return f"{us / 1e6:.1f}s"


def skew(offset_us: Any) -> str:
    """How far a gateway's clock is ahead (+) or behind (-); ``offset_us`` is what corrects it."""
    if offset_us is None:
        return DASH
    if abs(offset_us) < 1000:
        return "<1ms"
    ahead_s = -offset_us / 1e6
    return f"{ahead_s:+.1f}s" if abs(ahead_s) >= 0.9995 else f"{ahead_s * 1000:+.0f}ms"


def rate(bytes_per_s: Any) -> str:
    """Bytes a second."""
    return DASH if bytes_per_s is None else f"{bytes_per_s / 1e6:.1f}MB/s"


def size(value: Any) -> str:
    """Bytes as people read them: 512 B, 20.0 GiB."""
    return DASH if value is None else shown_bytes(value)


def indicator(metric: Any, value: Any) -> str:
    """A value measured or promised, in the unit of its indicator."""
    if value is None:
        return DASH
    if metric == "iops":
        return f"{count(value)} IOPS"
    return rate(value) if metric == "throughput" else latency(value)


def percent(ratio: Any, digits: int = 1) -> str:
    """A ratio in percent, rounded down: 99.996 % must not read as 100 %, nor -0.4 % as 0 %."""
    if ratio is None:
        return DASH
    scale = 10**digits
    return f"{math.floor(ratio * 100 * scale + 1e-9) / scale:.{digits}f}%"


def span(seconds: float) -> str:
    """A duration, in one unit."""
    seconds_rounded = max(0, round(seconds))
    for limit, unit, name in ((90, 1, "s"), (5400, 60, "m"), (172_800, 3600, "h")):
        if seconds_rounded < limit:
            return f"{round(seconds_rounded / unit)}{name}"
    return f"{round(seconds_rounded / 86_400)}d"


def due_of(row: dict[str, Any]) -> str:
    """What a compliance rests on: bad slices of those that count; of several lengths, their time."""
    lengths = row.get("slice_lengths_s") or []
    if len(lengths) < 2:
        return f"{count(row['bad'])} of {count(row['good'] + row['bad'])} slices bad"
    sizes = " and ".join(_exact(length) for length in lengths)
    return f"bad {span(row['bad_s'])} of {span(row['due_s'])} due, by time, in slices of {sizes}"


def _exact(seconds: int) -> str:
    """A whole number of one unit, as people write it in a document."""
    unit = next((name for name in ("d", "h", "m") if seconds % UNITS_S[name] == 0), "s")
    return f"{seconds / UNITS_S[unit]:.0f}{unit}"


def ago(at_us: Any, now_us: int) -> str:
    """How long since a time."""
    return DASH if not at_us else span((now_us - at_us) / 1e6)


LOCAL: Final = "local"
"""The name of this machine's zone on a command line."""


def zone_of(name: str) -> ZoneInfo | None:
    """The zone of a command line; None is this machine's.

    Raises:
        BadUsage: there is no such zone.
    """
    if name == LOCAL:
        return None
    if not is_zone(name):
        fix = f"Use an IANA name such as UTC or Europe/Berlin, or {LOCAL}"
        raise BadUsage(f"--tz {name[:40]!r} is not a time zone. {fix}")
    return ZoneInfo(name)


def _wall_clock(at_us: float, zone: ZoneInfo | None) -> datetime:
    return datetime.fromtimestamp(at_us / 1e6, zone)


def when(at_us: Any, zone: ZoneInfo | None = None) -> str:
    """A time in a zone, None for this machine's; with the date when it is not today, or the year if far."""
    if not at_us:
        return DASH
    at, now = _wall_clock(at_us, zone), _wall_clock(time.time_ns() / 1e3, zone)
    if at.date() == now.date():
        return f"{at:%H:%M:%S}"
    return f"{at:%Y-%m-%d %H:%M}" if abs((at - now).days) > FAR_DAYS else f"{at:%m-%d %H:%M:%S}"


def with_year(at_us: float) -> str:
    """A time in this machine's zone with its year: versions are old."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_us / 1e6))


def day(at_us: Any, zone: ZoneInfo | None = None) -> str:
    """The date of a time, in a zone; None for this machine's."""
    return f"{_wall_clock(at_us, zone):%Y-%m-%d}" if at_us else DASH


def cap(row: dict[str, Any]) -> str:
    """What a throttle allows."""
    parts = []
    if row.get("cost_per_s") is not None:
        parts.append(f"{count(row['cost_per_s'])} weighted IOPS")
    if row.get("ops_per_s") is not None:
        parts.append(f"{count(row['ops_per_s'])} IOPS")
    if row.get("bytes_per_s") is not None:
        parts.append(rate(row["bytes_per_s"]))
    if row.get("peak_ops_per_s") is not None:
        parts.append(f"bursts of {count(row['peak_ops_per_s'])} IOPS")
    elif row.get("burst_s") is not None:
        parts.append(f"burst {row['burst_s']:g}s")
    return ", ".join(parts) or DASH


def enforced(row: dict[str, Any]) -> str:
    """What holds of a throttle, and what was asked for where a floor lies above it.

    The rates that hold are known of one that is live.
    """
    live = row.get("live") or row
    lifted = live.get("lifted_to")
    return f"{cap(lifted)} (asked: {cap(row)})" if lifted else cap(row)


def why_enforced(row: dict[str, Any]) -> str:
    """Why a throttle was set, and which floor holds in its place."""
    text = str(row.get("text") or row.get("reason") or "")
    floor = (row.get("live") or row).get("floor")
    return f"{text} ({floor} holds)" if floor else text


def volume_cap(live: dict[str, Any]) -> str:
    """Every rate that a volume may have, one a line, and the group whose rate it shares.

    In a narrow terminal the words of a long unit are below the number: numbers are never cut.
    """
    rates = {name: live.get(f"cap_{name}") for name in ("cost_per_s", "ops_per_s", "bytes_per_s")}
    lines = [cap({name: rate}) for name, rate in rates.items() if rate is not None]
    if live.get("cap_group"):
        lines.append(f"group {live['cap_group']}")
    if console().width < NARROW:
        lines = [line if len(line) <= CAP_WIDTH else line.replace(" ", "\n") for line in lines]
    return "\n".join(lines) or DASH


def throttled(row: dict[str, Any]) -> str:
    """What a throttle is about: a volume, VOLUME/CLIENT, a whole client, or a group."""
    if row.get("group_name"):
        return f"group {row['group_name']}"
    if row.get("client") and not row.get("volume"):
        return f"client {row['client']}"
    return "/".join(str(row[key]) for key in ("volume", "client") if row.get(key)) or DASH


def short_id(value: Any) -> str:
    """The beginning of an id, which commands take instead of all of it as long as no other id has it."""
    return str(value)[:SHORT_ID] if value else DASH


def sentence(text: Any) -> str:
    """An error's text as a sentence; "" for none."""
    words = str(text or "").strip().rstrip(".")
    return f"{words[0].upper()}{words[1:]}." if words else ""


def silence_of(server: dict[str, Any]) -> str:
    """Why there are no live values, from the ``server`` of an answer; "" while there are."""
    if not server.get("stale"):
        return ""
    if stands_by := sentence(server.get("stands_by")):
        return f"{stands_by} Live values are there: sla --server URL, or 'sla get nodes'."
    if database := sentence(server.get("database")):
        return f"{database} The services part waits for it; agreements come back with it."
    if server.get("age_s") is None:
        return "The services part has not sent a live view yet; 'sla-server status' says more."
    silent = span(server["age_s"])
    return f"No live data for {silent}: the services part is silent (sla-server status)."


@dataclass(frozen=True, slots=True)
class Column:
    """One column."""

    title: str
    value: Callable[[Row, int], str | Text]
    """(row, now in us) -> cell."""
    number: bool = False
    optional: bool = False
    """Left out where no row has a value: what is beside it needs the room."""
    wide: bool = False
    """Shown with ``-o wide`` only."""
    most: int = 0
    """Characters of its width in a narrow terminal, where a text beside it would be folded at every word."""


@dataclass(frozen=True, slots=True)
class TableKind:
    """One kind of thing that can be listed."""

    path: str
    columns: tuple[Column, ...]
    empty: str
    """What to do next when there is nothing to list."""
    of: str = ""
    """What it is of, and has to be named (``AGREEMENT``, ``VOLUME``): its name belongs into the path."""
    key: str = "name"
    """Key of the name by which commands take one of them."""
    time: str = ""
    """Key of the time at which it began, for ``--since``."""
    is_paged: bool = False
    """Whether there may be very many, so that only some come unless asked for."""
    rows: str = "items"
    """Key of the rows in the answer."""
    sorted_columns: Mapping[str, tuple[Column, ...]] = field(default_factory=dict)
    """Columns in place of those, by order: where that is by figures of another time."""

    @property
    def needs_name(self) -> bool:
        """Whether a name has to be given."""
        return bool(self.of)


def build(columns: Sequence[Column], rows: Sequence[Row], now_us: int) -> Table:
    """The table; fits whatever width it is printed at by folding names and texts."""
    columns = columns if is_wide() else [column for column in columns if not column.wide]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, show_edge=False)
    cells = [[_cell(column.value(row, now_us)) for column in columns] for row in rows]
    shown = [i for i, column in enumerate(columns) if not column.optional or _has_value(cells, i)]
    is_narrow = console().width < NARROW
    for column in (columns[i] for i in shown):
        table.add_column(
            column.title,
            justify="right" if column.number else "left",
            min_width=len(column.title),  # a folded heading is unreadable
            max_width=column.most if column.most and is_narrow else None,
            no_wrap=column.number,
            overflow="fold",
        )
    for row_cells in cells:
        table.add_row(*(row_cells[i] for i in shown))
    # Numbers are never folded: one space between columns in place of two, before one is cut.
    least = [_least_width(columns[i], [row_cells[i] for row_cells in cells]) for i in shown]
    if sum(least) + 2 * (len(least) - 1) > console().width:
        table.padding = 0
    return table


def _least_width(column: Column, cells: Iterable[str | Text]) -> int:
    lines = (line for cell in cells for line in str(cell).splitlines()) if column.number else ()
    return max(map(len, (column.title, *lines)))


def _has_value(cells: Sequence[Sequence[str | Text]], place: int) -> bool:
    return any(str(row[place]) != DASH for row in cells)


def _cell(value: str | Text) -> str | Text:
    """A cell without control characters: gateways and people wrote the text, and a terminal shows it."""
    text = printable_lines(value if isinstance(value, str) else value.plain)
    return text if isinstance(value, str) else Text(text, value.style)


def keep_logs_apart() -> None:
    """Send log lines of code that runs inside a command to stderr, warnings and worse only.

    structlog would print all of them to stdout, where they break ``-o json``.
    """
    processors = structlog.get_config()["processors"]
    if _drop_info not in processors:
        processors = [_drop_info, *processors]
    structlog.configure(processors=processors, logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def _drop_info(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    if method in ("debug", "info"):  # the command reports itself what it did
        raise structlog.DropEvent
    return event


def console() -> Console:
    """The console for tables: as wide as the terminal, 80 columns without one; ``-o wide``: as they are."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    width = max(width, UNFOLDED) if is_wide() else width
    return Console(width=max(WIDTH, width), highlight=False, soft_wrap=False, emoji=False, markup=False)


def duration_s(text: str, option: str = "", most_s: float = DURATION_MAX_S) -> float:
    """Seconds of ``90s``, ``10m``, ``2h`` or ``1d``; a number without a unit is refused, as in documents.

    Args:
        text: as it was written.
        option: of the command line, for the message.
        most_s: the longest that is possible.

    Raises:
        BadUsage: anything else, nothing at all, or too long.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * UNITS_S[match[2] or "s"] if match else 0.0
    of = f"{option} " if option else ""
    if match and not match[2] and seconds > 0:
        number = match[1][:40]
        raise BadUsage(f"{of}{number!r} has no unit; write {number}s, {number}m, {number}h or {number}d")
    if not seconds > 0:
        raise BadUsage(f"{of}{text[:40]!r} is not a duration; write for example 90s, 10m, 2h or 1d")
    if seconds > most_s:
        raise BadUsage(f"{of}{text[:40]!r} is too long; give at most {most_s / 86_400:g}d")
    return seconds


class FiniteRange(click.FloatRange):
    """A number between two limits; nan and infinity are none, and the message says what is possible."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See ``click.ParamType``."""
        hint = ""
        try:
            number = float(value)
        except ValueError:
            number, meant = math.nan, number_and_unit(str(value))
            hint = f"; write {plain(meant[0])}" if meant and not meant[1] else ""
        above = self.min is None or (number > self.min if self.min_open else number >= self.min)
        below = self.max is None or (number < self.max if self.max_open else number <= self.max)
        if not (math.isfinite(number) and above and below):
            self.fail(f"{str(value)[:40]!r} is not a number {self._limits()}{hint}", param, ctx)
        return number

    def _limits(self) -> str:
        low = "" if self.min is None else f"{'above' if self.min_open else 'from'} {_plain_number(self.min)}"
        high = "" if self.max is None else f"{'below' if self.max_open else 'to'} {_plain_number(self.max)}"
        return (
            " and ".join(filter(None, (low, high))) if self.max_open else " ".join(filter(None, (low, high)))
        )


def _plain_number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:g}"

"""``sla describe``: everything about one thing, in words.

Agreements, events and pools have answers of their own. Documents of other kinds are shown with what became of
them as comments, so that the output can be applied again. Of all other things every value that the server has
is a line, in the unit that the end of its key names, and the newest events about it follow.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Any, Final
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.completion import names as names_in_shell
from sla_server.cli.describe_agreement import describe_event, describe_sla
from sla_server.cli.errors import LiveValuesMissing
from sla_server.cli.formatting import DATA_OUTPUT, pass_client, print_json
from sla_server.cli.get import DOCUMENTS, of_names
from sla_server.cli.kinds import KindGroup, bare_name, singular_of
from sla_server.cli.pools import describe_pool
from sla_server.cli.tables import KINDS, severity_of, what_of
from sla_server.cli.watch import watchable
from sla_server.rows import Row

TITLE: Final = 20
"""Columns of the titles."""
EVENTS_SHOWN: Final = 5
STREAMS_SHOWN: Final = 20
FIRST_TIME_US: Final = 100_000_000_000_000
"""1973: microseconds above it are a time, below it a duration."""
_HIDDEN: Final = ("cursor", "server", "document", "spec", "by_stream", "report", "job", "curves")
_RATIOS: Final = ("compliance", "coverage", "budget_remaining", "target")
_UNITS: Final = ("_us", "_bytes", "_bytes_per_s", "_ratio")
_NAMES: Final = ("pid", "gen")  # numbers that name something: without commas, so that they can be copied
_WORDS: Final = {"iops": "IOPS", "pid": "PID", "cuts": "cuts of statistics"}


@click.group(cls=KindGroup)
def describe() -> None:
    """Show everything about an agreement, a volume, an event and more."""


describe.add_command(describe_sla)
describe.add_command(describe_event)
describe.add_command(describe_pool)


def _command(kind: str) -> click.Command:
    """``sla describe KIND`` of a kind that has no answer of its own."""

    def run(client: Client, name: str, output: str) -> None:
        row, silence = _find(client, kind, bare_name(kind, name))
        if output == "json":
            print_json(row)
        else:
            lines = _document_lines(row) if kind in DOCUMENTS else _lines(client, kind, row)
            click.echo(printable_lines("\n".join(lines)))
        if silence:
            raise LiveValuesMissing(silence)

    one = singular_of(kind)
    article = "an" if one[0] in "aeiou" else "a"
    run.__doc__ = f"Show everything about {article} {one}: every value, and the newest events about it."
    if kind in DOCUMENTS:
        run.__doc__ = f"Show a {one}'s document and what became of it; the output can be applied again."
    name = click.argument("name", shell_complete=names_in_shell(kind))
    return click.command(one)(name(DATA_OUTPUT(pass_client(watchable(run)))))


for _kind, _listed in KINDS.items():
    if not _listed.of and _kind not in ("slas", "events", "pools", "trend", "decisions", "promises"):
        describe.add_command(_command(_kind))


def _find(client: Client, kind: str, name: str) -> tuple[Row, str]:
    """The thing, and why its live values are missing."""
    listed = KINDS[kind]
    if kind in ("volumes", "backends"):
        row = client.get(f"/{kind}/{quote(name, safe='')}")
        return row, formatting.silence_of(row.get("server") or {})
    if kind == "policies" and name.isdecimal():
        return client.get(f"/policies/{name}"), ""
    query = {"limit": 1000} if listed.is_paged else {}
    answer = client.get(listed.path, **query)
    rows = answer["items"]
    if kind == "episodes":  # as tables show its id
        rows = [{**row, "episode_id": name if _begins(row, name) else row["episode_id"]} for row in rows]
    return of_names(kind, rows, [name])[0], formatting.silence_of(answer.get("server") or {})


def _begins(row: Row, name: str) -> bool:
    return len(name) >= formatting.SHORT_ID and str(row["episode_id"]).startswith(name)


def _document_lines(row: Row) -> Iterator[str]:
    """The document, with what became of it as comments."""
    since = formatting.when(row.get("applied_us"))
    yield f"# {row['name']} version {row.get('version')}, applied {since} by {row.get('applied_by')}"
    for key in ("state", "from_us", "to_us", "scope", "match", "delivery"):
        for line in value_lines(key, row.get(key)):
            yield f"# {line}"
    yield str(row.get("document") or "").rstrip()


def _lines(client: Client, kind: str, row: Row) -> Iterator[str]:
    live = row.get("live") or {}
    if kind == "volumes" and not row.get("size_bytes"):
        row = {**row, "size_bytes": "not known: its gateway has not read it from the storage"}
    yield from row_lines(
        {**row, "live": {key: value for key, value in live.items() if row.get(key) != value}}
    )
    if streams := row.get("by_stream"):
        yield "clients:"
        for one in streams[:STREAMS_SHOWN]:
            counts = (
                f"{formatting.count(one.get('reads'))} reads, {formatting.count(one.get('writes'))} writes"
            )
            yield f"  {one.get('client')}: {counts}, last {formatting.when(one.get('last_us'))}"
        if len(streams) > STREAMS_SHOWN:
            yield f"  and {len(streams) - STREAMS_SHOWN:,} more: sla get streams {row['volume']}"
    name = str(row.get("volume") or row.get("name") or row.get("backend") or "")
    if kind in ("volumes", "throttles") and name:
        yield f"Why it is as it is: sla why {name}"
    if kind == "policies":
        yield f"Its report: sla policy show {row['version']}"
    if kind == "episodes":
        yield f"Its slices: sla get slices {name} --episode {formatting.short_id(row['episode_id'])}"
    events = client.get("/inbox", subject=name, limit=EVENTS_SHOWN)["items"] if name else []
    if events:
        yield "newest events:"
    for event in events:
        words = f"{formatting.when(event['at_us'])} {severity_of(event).plain}: {what_of(event)}"
        yield from wrap(words, formatting.WIDTH, initial_indent="  ", subsequent_indent="    ")


def row_lines(row: Row, indent: str = "") -> Iterator[str]:
    """A line for every value, and an indented group of lines for what has values of its own."""
    for key, value in row.items():
        if key not in _HIDDEN:
            yield from (f"{indent}{line}" for line in value_lines(key, value))


def value_lines(key: str, value: Any) -> Iterator[str]:
    """The lines of one value; none if there is no value."""
    title = title_of(key)
    if value is None or value in ("", [], {}):
        return
    if isinstance(value, dict):
        yield f"{'now' if key == 'live' else title}:"
        yield from row_lines(value, "  ")
    elif isinstance(value, list) and isinstance(value[0], dict):
        yield f"{title}:"
        for one in value:
            inside = list(row_lines(one, "  "))
            yield from (f"- {line[2:]}" if not place else line for place, line in enumerate(inside))
    else:
        text = ", ".join(map(str, value)) if isinstance(value, list) else value_text(key, value)
        yield from wrap(
            text,
            formatting.WIDTH - 4,
            initial_indent=f"{title}:".ljust(TITLE),
            subsequent_indent=" " * TITLE,
            break_on_hyphens=False,
        )


def title_of(key: str) -> str:
    """The words for a key: without its unit, which the value has."""
    for unit in _UNITS:
        if key.endswith(unit) and key != unit:
            key = key.removesuffix(unit)
            break
    return _WORDS.get(key, key.replace("_", " "))


def value_text(key: str, value: Any) -> str:
    """A value in the unit that the end of its key names."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float) or key in _NAMES:
        return str(value)
    if key.endswith("_us"):
        return formatting.when(value) if value >= FIRST_TIME_US else formatting.latency(abs(value))
    if key.endswith("_bytes_per_s"):
        return formatting.rate(value)
    if key.endswith("_bytes"):
        return formatting.size(value)
    if key.endswith("_ratio") or key in _RATIOS:
        return formatting.percent(value, 2)
    return formatting.count(value) if abs(value) >= 100 or value == int(value) else f"{value:g}"

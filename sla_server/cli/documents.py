"""The commands about documents: diff, history, validate, schema.

``validate`` and ``schema`` need no server: they use the models that the server itself uses, so what is wrong
with a file is said in the same words as by ``sla apply``. What needs other documents (a calendar that is
named, how many latency values a volume has) only the server knows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from textwrap import wrap
from typing import Final
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.toml_file import read_toml
from sla_server.agreements.difference import FieldChange, differences, unified, value_text
from sla_server.agreements.document import Agreement
from sla_server.agreements.errors import AgreementsRefused
from sla_server.agreements.load import KINDS, Loaded, load_documents
from sla_server.agreements.schema import document_schema
from sla_server.cli import formatting
from sla_server.cli.change import DocumentChunk, DocumentFile, check_chunks, read_documents, split_documents
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused
from sla_server.cli.formatting import DATA_OUTPUT, OUTPUT, pass_client, print_json, with_year
from sla_server.cli.kinds import plural_of
from sla_server.cli.moments import moment_us
from sla_server.rows import Row

FILE = click.option(
    "-f", "--file", "path", required=True, type=DocumentFile(), help="Documents in YAML; - reads stdin."
)
ROLLUP_S: Final = 60  # of a database as it is made; slices are whole multiples of it
LISTS: Final = {
    "Maintenance": ("/maintenance", True),
    "Calendar": ("/calendars", False),
    "VolumeLabels": ("/volume-labels", False),
    "Recipient": ("/recipients", False),
    "Route": ("/routes", False),
    "Silence": ("/silences", True),
}
"""Kind -> path of what is in force, and whether what is past is asked for."""
MOST_SHOWN: Final = 12
"""Fields of one version in ``sla history``; -o json has all."""


def load_file(path: str, rollup_s: int) -> list[Loaded]:
    """Every document of a file, as the server would read it, whatever its size.

    Raises:
        BadUsage: the file cannot be read.
        RequestRefused: with every problem found, in the words of ``sla apply``.
    """
    loaded: list[Loaded] = []

    def read(chunk: DocumentChunk) -> list[Row]:
        try:
            found = load_documents(chunk.text.decode(), rollup_s)
        except AgreementsRefused as exc:
            raise RequestRefused(422, {"errors": [item.as_dict() for item in exc.problems]}) from exc
        loaded.extend(found)
        return [{"kind": item.document.kind, "name": item.document.name, "line": item.line} for item in found]

    check_chunks(split_documents(read_documents(path)), read)
    return loaded


@click.command()
@FILE
@click.option(
    "--rollup-s",
    type=click.IntRange(1, 60),
    help="The server's database.rollup_s [that of the configuration, else 60]; slices are multiples of it.",
)
@OUTPUT
@pass_client
def validate(client: Client, path: str, rollup_s: int | None, output: str) -> None:
    """Check documents without a server, in the words of apply."""
    loaded = load_file(path, rollup_s or _rollup_s(client))
    if output == "json":
        print_json(
            [{"kind": one.document.kind, "name": one.document.name, "line": one.line} for one in loaded]
        )
        return
    calendars = {item.document.name for item in loaded if item.document.kind == "Calendar"}
    for item in loaded:
        click.echo(f"{item.document.name}: valid {item.document.kind}")
        if isinstance(item.document, Agreement) and not item.document.spec.objectives:
            text = "it has no objectives: nothing is promised, it only says how its volumes are treated"
            click.echo(f"note: {item.document.name}: {text}", err=True)
        hours = item.document.spec.service_hours if isinstance(item.document, Agreement) else None
        if hours is not None and hours.is_named and hours.calendar not in calendars:
            text = f"calendar {hours.calendar} is not in this file; the server has to know it"
            click.echo(f"note: {item.document.name}: {text}", err=True)
    click.echo("Whether they fit what is in force, the server says: sla apply --dry-run", err=True)


def _rollup_s(client: Client) -> int:
    """Of the configuration that --config or SLA_CONFIG names.

    Raises:
        BadUsage: it has none that a server would take.
    """
    table = read_toml(client.config).get("database")
    named = table.get("rollup_s", ROLLUP_S) if isinstance(table, dict) else ROLLUP_S
    if not isinstance(named, int) or not 1 <= named <= ROLLUP_S:
        raise BadUsage(f"{client.config}: database.rollup_s is {named!r}; give 1 to {ROLLUP_S}")
    return named


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)), required=False)
def schema(kind: str | None) -> None:
    """Print the JSON Schema of all kinds of documents, or of one."""
    print_json(document_schema(kind))


@click.command()
@FILE
@click.option("--exit-code", is_flag=True, help="End with status 1 if something differs.")
@OUTPUT
@pass_client
def diff(client: Client, path: str, exit_code: bool, output: str) -> None:
    """Compare documents with what is in force, field by field."""
    in_force = _in_force(client)
    found: list[Row] = []
    for item in load_file(path, 1):
        document = item.document
        row = in_force(document.kind, document.name)
        changes = differences(row["spec"] if row else None, document.spec_json())
        version = row["version"] if row else None
        entry = {"kind": document.kind, "name": document.name, "version": version}
        found.append({**entry, "changes": [change.as_dict() for change in changes]})
        if output != "json":
            _show_diff(found[-1], changes)
    if output == "json":
        print_json(found)
    if exit_code and any(entry["changes"] for entry in found):
        raise SystemExit(1)


def _show_diff(entry: Row, changes: Sequence[FieldChange]) -> None:
    name = entry["name"] if entry["kind"] == "SLA" else f"{entry['kind']} {entry['name']}"
    if entry["version"] is None:
        click.echo(f"{name}: new; nothing of this name is in force")
    elif not changes:
        click.echo(f"{name}: no difference to version {entry['version']}, which is in force")
    else:
        titles = f"{name} version {entry['version']}, in force", f"{name} in the file"
        click.echo(printable_lines("\n".join(unified(changes, *titles))))


def _in_force(client: Client) -> Callable[[str, str], Row | None]:
    """Looks up what is in force by kind and name; lists that are short are read once."""
    lists: dict[str, dict[str, Row]] = {}

    def find(kind: str, name: str) -> Row | None:
        if kind == "SLA":
            try:
                row: Row = client.get(f"/slas/{quote(name, safe='')}")
            except RequestRefused as exc:
                if exc.status == 404:
                    return None
                raise
            return row if row.get("ended_us") is None else None
        if kind not in lists:
            path, has_past = LISTS[kind]
            rows = client.get(path, **({"past": "1"} if has_past else {}))["items"]
            lists[kind] = {row["name"]: row for row in rows}
        return lists[kind].get(name)

    return find


@click.command()
@FILE
@DATA_OUTPUT
@pass_client
def admit(client: Client, path: str, output: str) -> None:
    """Say whether agreements could be kept beside those in force.

    The answer is yes, no or unknown. It rests on the capacity that the policy job has found, and on
    all that is promised on the same backends. Changes nothing. Status 0 for yes, 1 otherwise.
    """
    headers = {"Content-Type": "application/yaml"}
    answer = client.change("POST", "/admission", content=read_documents(path), headers=headers)
    if output == "json":
        print_json(answer)
    else:
        click.echo(printable_lines("\n".join(_admission_lines(answer))))
    if answer["answer"] != "yes":
        raise SystemExit(1)


def _admission_lines(answer: Row) -> Iterator[str]:
    yield str(answer["answer"])
    for row in answer["backends"]:
        used = row["promised"] + row["unpromised_floors"]
        yield f"{row['backend']}: {row['answer']}"
        capacity = row["capacity"]
        of = f" (policy {answer['policy_version']}, {row['capacity_of']})" if capacity is not None else ""
        yield f"  capacity {formatting.count(capacity)} weighted IOPS{of}"
        yield f"  promised {formatting.count(used)}, these would add {formatting.count(row['added'])}"
        if capacity is not None:
            left = capacity - used - row["added"]
            word = "left" if left >= 0 else "too much"
            yield f"  {formatting.count(abs(left))} {word}"
        yield from (f"  {line}" for reason in row["reasons"] for line in wrap(reason, 78))
    yield from (line for reason in answer["reasons"] for line in wrap(reason, 80))


@click.command()
@click.argument("words", nargs=-1, required=True, metavar="[KIND] NAME")
@click.option(
    "--kind", type=click.Choice(list(KINDS)), help="Of document: also before the name. [default: SLA]"
)
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Versions shown.")
@click.option("--since", metavar="TIME", help="Only versions applied since then: 2h, '2026-11-22 14:03'.")
@DATA_OUTPUT
@pass_client
def history(
    client: Client, words: Sequence[str], kind: str | None, limit: int, since: str | None, output: str
) -> None:
    """List a document's versions: since when, by whom, what changed."""
    kind, name = _of_kind(words, kind)
    path = "/slas" if kind == "SLA" else f"/documents/{kind}"
    since_us = 0 if since is None else moment_us(since, time.time_ns() // 1000, "--since")
    rows = client.get(f"{path}/{quote(name, safe='')}/versions")["items"]
    rows = [row for row in rows if row["applied_us"] >= since_us]
    if output == "json":
        print_json(rows[:limit])
        return
    later: Row | None = None
    for row in rows[:limit]:
        click.echo(printable_lines("\n".join(_version_lines(row, later))))
        later = row
    if len(rows) > limit:
        click.echo(f"and {len(rows) - limit} older: give a higher --limit")


def _of_kind(words: Sequence[str], option: str | None) -> tuple[str, str]:
    """(kind, name) of NAME, KIND NAME or KIND/NAME; an agreement's, if no kind is given.

    Raises:
        BadUsage: there is no such kind, two are given, or more than one name.
    """
    known = {plural_of(kind): kind for kind in KINDS}
    first, slash, rest = words[0].partition("/")
    given = [first, rest] if len(words) == 1 and slash and plural_of(first) in known else list(words)
    if len(given) == 1:
        return option or "SLA", given[0]
    kind = known.get(plural_of(given[0]))
    if len(given) > 2 or kind is None:
        listed = ", ".join(KINDS).lower()
        raise BadUsage(f"sla history is of one document: [KIND] NAME. Kinds are {listed}; without one: sla")
    if option not in (None, kind):
        raise BadUsage(f"{given[0]} {given[1]} is no {option}: give the kind once")
    return kind, given[1]


def _version_lines(row: Row, later: Row | None) -> Iterator[str]:
    ended_us = row.get("ended_us")
    until = "in force" if ended_us is None else f"until {with_year(ended_us)}"
    yield f"version {row['version']} from {with_year(row['applied_us'])} by {row['applied_by']}, {until}"
    changes = [FieldChange(**change) for change in row.get("changes") or []]
    if row["version"] == 1:
        yield "  the first version"
    elif not changes:
        yield "  applied again without a change"
    for change in changes[:MOST_SHOWN]:
        yield f"  {change.line()}" if len(change.line()) <= 78 else _folded(change)
    if len(changes) > MOST_SHOWN:
        yield f"  and {len(changes) - MOST_SHOWN} more fields: -o json"
    if ended_us is not None and (later is None or later["applied_us"] != ended_us):
        yield "  then it was deleted"


def _folded(change: FieldChange) -> str:
    return f"  {change.field}:\n    {value_text(change.before)}\n    -> {value_text(change.after)}"


def join_documents(texts: Iterable[str]) -> str:
    """Documents as one text that can be applied again."""
    joined = ""
    for text in texts:
        # A directive belongs to the document behind it, and needs the one before it to end.
        separator = "...\n" if joined and text.startswith("%") else "" if text.startswith("---") else "---\n"
        joined += separator + text.rstrip() + "\n"
    return joined

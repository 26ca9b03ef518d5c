"""The commands that change something: apply, throttle, gateways, mode, login; all audited.

A file of agreements that is too long for one call is split between its documents. One call carries
``CALL_BYTES`` of text and ``MAX_DOCUMENTS`` documents. A line that begins with ``---`` and a blank or nothing
more begins a document in any place (YAML 1.2, 9.1.2: not even a block scalar may hold one), so the text is
split there without being parsed. A text with directives (``%``) stays in one piece: they belong to the
document behind them.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

import click
from rich.text import Text

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from sla_server.agreements.errors import double_named
from sla_server.agreements.limits import CALL_BYTES, MAX_DOCUMENTS
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused
from sla_server.cli.formatting import (
    DATA_OUTPUT,
    OUTPUT,
    Column,
    FiniteRange,
    build,
    console,
    duration_s,
    pass_client,
    print_json,
)
from sla_server.explanation import words
from sla_server.rows import Row

_BEGIN: Final = re.compile(rb"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)
_DIRECTIVE: Final = re.compile(rb"^%", re.MULTILINE)


class DocumentChunk(NamedTuple):
    """The documents of one call.

    Attributes:
        lines_before: lines of the file before it.
        documents: markers in it, at most one more than documents.
    """

    text: bytes
    lines_before: int
    documents: int


def split_documents(text: bytes) -> list[DocumentChunk]:
    """Split the text into as few chunks as the limits of a call allow; one document is never divided."""
    starts = [0, *(found.start() for found in _BEGIN.finditer(text) if found.start())]
    if _DIRECTIVE.search(text) or (len(text) <= CALL_BYTES and len(starts) <= MAX_DOCUMENTS):
        return [DocumentChunk(text, 0, len(starts))]
    chunks: list[DocumentChunk] = []
    begin = lines = count = 0
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        if count and (end - begin > CALL_BYTES or count == MAX_DOCUMENTS):
            chunks.append(DocumentChunk(text[begin:start], lines, count))
            lines += text.count(b"\n", begin, start)
            begin, count = start, 0
        count += 1
    return [*chunks, DocumentChunk(text[begin:], lines, count)]


def with_lines_of_file(problem: dict[str, Any], chunk: DocumentChunk) -> dict[str, Any]:
    """A refusal of one chunk, its lines counted from the beginning of the file."""
    errors = [
        {**item, "line": item["line"] + chunk.lines_before} if item.get("line") else item
        for item in problem.get("errors") or []
    ]
    return {**problem, "errors": errors}


class DocumentFile(click.types.StringParamType):
    """A file of documents; a call without -f says how to name it."""

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """See ``click.ParamType``."""
        return f"Write it before the file: sla {ctx.info_name if ctx else 'apply'} -f FILE"


@click.command()
@click.option(
    "-f",
    "--file",
    "path",
    required=True,
    type=DocumentFile(),
    help="Agreement documents in YAML; - reads stdin.",
)
@click.option("--dry-run", is_flag=True, help="Check and compare only; change nothing.")
@OUTPUT
@pass_client
def apply(client: Client, path: str, dry_run: bool, output: str) -> None:
    """Put agreements in force, or new versions of them."""
    chunks = split_documents(read_documents(path))
    try:
        if len(chunks) > 1:
            answer = _apply_chunks(client, chunks, dry_run=dry_run)
        else:
            answer = _apply(client, chunks[0].text, dry_run=dry_run)
    except RequestRefused as exc:
        if not exc.problem.get("errors") or exc.problem.get("fix"):
            raise
        where = "standard input" if path == "-" else path
        problem = {**exc.problem, "fix": f"Nothing of {where} was applied: it is all of it or none"}
        raise RequestRefused(exc.status, problem) from exc
    if output == "json":
        print_json(answer)
        return
    for item in answer.get("applied", []):
        word = "would be in force as" if dry_run else "in force as"
        if not item.get("changed"):
            word = "no change, stays in force as" if dry_run else "no change, in force as"
        name = f"{item['kind']} {item['name']}" if item.get("kind") else item["name"]
        reach = f"; agreements in its scope: {item['agreements']}" if "agreements" in item else ""
        click.echo(f"{name}: {word} version {item.get('version')}{reach}")
    for warning in answer.get("warnings", []):
        click.echo(f"note: {printable_lines(str(warning))}", err=True)
    if dry_run:
        click.echo("The documents are valid. Nothing was changed (--dry-run).")


def _apply(client: Client, documents: bytes, *, dry_run: bool) -> dict[str, Any]:
    query = {"dry_run": "1"} if dry_run else {}
    headers = {"Content-Type": "application/yaml"}
    answer: dict[str, Any] = client.change("POST", "/slas", content=documents, params=query, headers=headers)
    return answer


def _apply_chunks(client: Client, chunks: list[DocumentChunk], *, dry_run: bool) -> Row:
    """Check all chunks before the first is applied; progress goes to standard error.

    Raises:
        RequestRefused: with the problems of all chunks; or, while they are applied, with those of one and how
            many documents before it are in force nevertheless.
    """
    checked: list[Row] = []

    def check(chunk: DocumentChunk) -> list[Row]:
        try:
            checked.append(_apply(client, chunk.text, dry_run=True))
        except RequestRefused as exc:
            checked.append(_but_for_calendars(exc, checked))
        _progress("checked", checked)
        rows: list[Row] = checked[-1].get("applied", [])
        return rows

    check_chunks(chunks, check)
    return _joined(checked) if dry_run else _apply_each(client, chunks)


def _but_for_calendars(refused: RequestRefused, checked: list[Row]) -> Row:
    """An answer in place of a refusal that only misses calendars which an earlier part of the file brings.

    Raises:
        RequestRefused: for any other reason.
    """
    known = {row["name"] for row in _joined(checked)["applied"] if row.get("kind") == "Calendar"}
    missing = {f"there is no calendar {name!r}" for name in known}
    errors = refused.problem.get("errors") or []
    left = [item for item in errors if item.get("problem") not in missing]
    if left or not errors:
        raise RequestRefused(refused.status, {**refused.problem, "errors": left}) from refused
    what = f"{len(errors)} agreement{'s' if len(errors) > 1 else ''} with a calendar of this file"
    return {"applied": [], "warnings": [f"{what}: the rest of their part is checked when it is in force"]}


def _apply_each(client: Client, chunks: list[DocumentChunk]) -> Row:
    answers: list[Row] = []
    for chunk in chunks:
        try:
            answers.append(_apply(client, chunk.text, dry_run=False))
        except RequestRefused as exc:
            problem = with_lines_of_file(exc.problem, chunk)
            if done := len(_joined(answers)["applied"]):
                problem["fix"] = (
                    f"{done} documents before line {chunk.lines_before + 1} are in force. "
                    "Correct the file and apply all of it again: those change nothing then"
                )
            raise RequestRefused(exc.status, problem) from exc
        _progress("applied", answers)
    return _joined(answers)


def _joined(answers: list[Row]) -> Row:
    """The answers of several calls as one."""
    return {key: [item for each in answers for item in each.get(key, [])] for key in ("applied", "warnings")}


def _progress(word: str, answers: list[Row]) -> None:
    click.echo(f"{word} {len(_joined(answers)['applied']):,} documents", err=True)


def check_chunks(chunks: list[DocumentChunk], check: Callable[[DocumentChunk], list[Row]]) -> None:
    """Have each chunk of a file checked, and see that no two documents of a kind have one name.

    ``sla apply`` lets the server check a chunk, ``sla validate`` does it itself; both say the same.

    Args:
        chunks: of one file, in order.
        check: answers with the chunk's documents, ``{kind, name, line}``; an agreement may go without kind,
            and servers of before give no line. Raises RequestRefused with what is wrong with the chunk.

    Raises:
        RequestRefused: with every problem of all chunks, at its line of the file; or the server's own refusal
            if it is not about a document.
    """
    errors: list[Row] = []
    first: dict[tuple[str, str], int] = {}
    for chunk in chunks:
        try:
            rows = check(chunk)
        except RequestRefused as exc:
            if exc.status != 422 or not exc.problem.get("errors"):
                raise
            errors += with_lines_of_file(exc.problem, chunk)["errors"]
            continue
        for row in rows:
            key = str(row.get("kind") or "SLA"), str(row["name"])
            line = int(row.get("line") or 1) + chunk.lines_before
            if key in first:
                errors.append(double_named(*key, line, first[key]).as_dict())
            first.setdefault(key, line)
    if errors:
        raise _refusal(errors)


def _refusal(errors: list[Row]) -> RequestRefused:
    only = errors[0] if len(errors) == 1 and not errors[0].get("line") else None
    if only is not None:
        return RequestRefused(422, {"detail": only["problem"], "fix": only.get("fix", "")})
    count = f"{len(errors)} problem{'s' if len(errors) > 1 else ''} in the documents"
    return RequestRefused(422, {"detail": count, "errors": errors})


def read_documents(path: str) -> bytes:
    """The file's bytes, or standard input's.

    Raises:
        BadUsage: cannot be read, is empty, or is no text.
    """
    where = "standard input" if path == "-" else path
    try:
        documents = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        documents.decode()
    except OSError as exc:
        raise BadUsage(
            f"{where} cannot be read: {exc.strerror}. Give -f an existing file, or - for stdin"
        ) from exc
    except UnicodeDecodeError as exc:
        raise BadUsage(f"{where} is not UTF-8 text; save it as UTF-8") from exc
    if b"\0" in documents:  # UTF-8 allows it, YAML does not
        raise BadUsage(f"{where} is no text: it holds zero bytes. Give -f a file of YAML documents")
    if not documents.strip():
        raise BadUsage(f"{where} is empty; an agreement was expected")
    return documents


@click.group(cls=Commands)
def throttle() -> None:
    """Set and release throttles by hand."""


MOST_RATE: Final = 1e12
LEAST_MBPS: Final = 0.004096
MOST_THROTTLED_S: Final = 366 * 86_400.0
LEAST_BURST_S: Final = 0.001
MOST_BURST_S: Final = 300.0
MOST_WEIGHT: Final = 1000.0
"""Limits of the API (``sla_server.requests.ThrottleSet``); a test compares them."""


def _named(volume: str, client: str | None, group: str | None = None) -> str:
    """What is throttled, as in the answers to ``throttle``."""
    if group is not None:
        return f"group {group}"
    if not volume:
        return f"client {client}"
    return volume if client is None else f"client {client} of {volume}"


def _subject(volumes: tuple[str, ...], client: str | None, group: str | None) -> dict[str, Any]:
    """Members of the request that say what is throttled.

    Raises:
        BadUsage: a volume and a group do not go together so.
    """
    if group is None and not volumes and client is not None:
        return {"client": client}
    if group is None:
        if len(volumes) != 1:
            problem = "several volumes share a rate as a group" if volumes else "nothing to throttle is named"
            raise BadUsage(f"{problem}: give one VOLUME, or --group NAME and its volumes, or --client NAME")
        return {"volume": volumes[0]} | ({} if client is None else {"client": client})
    if client is not None:
        raise BadUsage("--client is of one volume: leave out --group, or --client")
    weights: dict[str, float] = {}
    for each in volumes:
        volume, equals, weight = each.partition("=")
        try:
            weights[volume] = float(weight) if equals else 1.0
        except ValueError:
            raise BadUsage(f"weight of {volume} is {weight!r}; write VOLUME=NUMBER, as {volume}=2") from None
        if not 0 < weights[volume] <= MOST_WEIGHT:
            raise BadUsage(f"weight of {volume} is {weight}; a weight is above 0, {MOST_WEIGHT:g} at most")
    if not weights or len(weights) < len(volumes):
        problem = "names a volume twice" if weights else "needs its volumes"
        raise BadUsage(f"--group {group} {problem}: sla throttle set --group {group} VOLUME VOLUME=2 ...")
    return {"group": group, "volumes": weights}


@throttle.command("set")
@click.argument("volumes", nargs=-1, metavar="[VOLUME]...")
@click.option("--client", "of_client", help="Only this client of VOLUME; without VOLUME of all that it uses.")
@click.option("--group", help="A name for several volumes, which share the rate.")
@click.option("--iops", type=FiniteRange(1, MOST_RATE, max_open=True), help="I/Os a second.")
@click.option(
    "--mbps",
    type=FiniteRange(LEAST_MBPS, MOST_RATE / 1e3, max_open=True),
    help="MB (10^6 bytes) a second.",
)
@click.option(
    "--cost",
    type=FiniteRange(1, MOST_RATE, max_open=True),
    help="Cost a second: 1 an I/O, 1 per 64 KiB.",
)
@click.option(
    "--burst",
    type=FiniteRange(LEAST_BURST_S, MOST_BURST_S),
    help="Seconds' worth that may pass at once after a pause [0.02].",
)
@click.option("--for", "lasting", help="How long: 90s, 10m, 2h. Default: until released.")
@click.option("--reason", required=True, help="Why; others will read it.")
@click.option("--force", is_flag=True, help="Also if it breaks a promise of the volume itself.")
@OUTPUT
@pass_client
def throttle_set(
    client: Client,
    volumes: tuple[str, ...],
    of_client: str | None,
    group: str | None,
    iops: float | None,
    mbps: float | None,
    cost: float | None,
    burst: float | None,
    lasting: str | None,
    reason: str,
    force: bool,
    output: str,
) -> None:
    """Let VOLUME have no more than the given rate (exactly one of --iops, --mbps, --cost).

    With --client only this client of it, beside what holds for the whole volume. With --client and no VOLUME
    the client has the rate over all volumes that it uses, whichever they are, beside all that.

    With --group the volumes share the rate: while all of them wait, equally, or by weight (VOLUME=2). A group
    of that name is replaced.
    """
    rates = {"iops": iops, "bytes_per_s": None if mbps is None else mbps * 1e6, "cost_per_s": cost}
    given = {name: value for name, value in rates.items() if value is not None}
    if len(given) != 1:
        raise BadUsage("give exactly one of --iops, --mbps and --cost")

    subject = _subject(volumes, of_client, group)
    body: dict[str, Any] = {**subject, **given, "reason": reason}
    if burst is not None:
        body["burst_s"] = burst
    body["duration_s"] = duration_s(lasting, "--for", MOST_THROTTLED_S) if lasting else None
    if force:
        body["force"] = True
    answer = client.change("POST", "/throttles", json=body)
    if output == "json":
        print_json(answer)
        return
    volume = str(subject.get("volume", ""))
    release = words.release_command(volume, of_client or "", group or "")
    until = f"for {lasting}{'s' if lasting.isdecimal() else ''}" if lasting else f"until '{release}'"
    asked = words.rates({**given, "ops_per_s": iops})
    throttle_id = formatting.short_id(answer.get("throttle_id"))
    named = _named(volume, of_client, group)
    click.echo(f"{named}: at most {answer.get('holds') or asked} {until} (throttle {throttle_id})")
    if answer.get("holds"):
        click.echo(f"note: that is the floor of its agreement; {asked} is below it", err=True)
    for promise in answer.get("breaks") or []:
        click.echo(f"note: this breaks {printable_lines(str(promise))}", err=True)


@throttle.command("release")
@click.argument("volume", required=False)
@click.option("--client", "of_client", help="Only those of this client of VOLUME; without: of all it uses.")
@click.option("--group", help="Instead of VOLUME: that of this group.")
@OUTPUT
@pass_client
def throttle_release(
    client: Client, volume: str | None, of_client: str | None, group: str | None, output: str
) -> None:
    """Release VOLUME's throttles set by hand, those of its clients among them.

    The throttle of a group that VOLUME is in stays: release that with --group. So does that of a client over
    all volumes that it uses: release that with --client alone.
    """
    if (group is not None) + (volume is not None or of_client is not None) != 1:
        raise BadUsage("give either VOLUME or --group, or --client alone")
    given = {"volume": volume, "client": of_client, "group": group}
    params = {name: value for name, value in given.items() if value is not None}
    answer = client.change("DELETE", "/throttles", params=params)
    if output == "json":
        print_json(answer)
        return
    released = answer.get("released", [])
    plural = "" if len(released) == 1 else "s"
    click.echo(f"{_named(volume or '', of_client, group)}: released {len(released)} throttle{plural}")


_GATEWAY_STYLES = {
    "connected": formatting.GOOD,
    "waiting": formatting.BAD,
    "not-dialled": formatting.BAD,
    "unknown": formatting.WARN,
}


def _gateway_state(row: Row) -> Text:
    """Whether it is connected."""
    return Text(str(row["state"]), _GATEWAY_STYLES.get(str(row["state"]), ""))


def _gateway_remark(row: Row) -> str:
    """What is wrong, if anything is."""
    answers_as = row.get("answers_as")
    if answers_as and answers_as != row["name"]:
        return f"the gateway there calls itself {answers_as}"
    if row["source"] == "configuration" and not row["reason"]:
        return "listed in the server's file"
    return str(row["reason"])


GATEWAY_COLUMNS: Final = (
    Column("ADDRESS", lambda row, _now_us: str(row["address"])),
    Column("NAME", lambda row, _now_us: str(row["name"] or formatting.DASH)),
    Column("STATE", lambda row, _now_us: _gateway_state(row)),
    Column("REMARK", lambda row, _now_us: _gateway_remark(row)),
)


@click.group(cls=Commands)
def gateways() -> None:
    """Gateways that the server dials, because their hosts may not dial out.

    A gateway that dials in by itself needs no entry: see 'sla get gateways'.
    """


@gateways.command("add")
@click.argument("address")
@click.option("--name", required=True, help="The gateway's name, as in its own file.")
@OUTPUT
@pass_client
def add_gateway(client: Client, address: str, name: str, output: str) -> None:
    """Dial the gateway whose agent listens at ADDRESS (IP:PORT, its `listen`)."""
    answer = client.change("PUT", f"/gateway-list/{quote(address, safe='')}", json={"name": name})
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{address}: dialled as {name} within some seconds; 'sla gateways list' shows how it goes")
    if not address.startswith(("127.", "[::1]", "localhost:")):
        click.echo(
            "note: another machine is dialled only if the server has enabled = true in [pmdaemon.tls]",
            err=True,
        )


@gateways.command("remove")
@click.argument("address")
@OUTPUT
@pass_client
def remove_gateway(client: Client, address: str, output: str) -> None:
    """Dial ADDRESS no more; a session that was dialled ends."""
    answer = client.change("DELETE", f"/gateway-list/{quote(address, safe='')}")
    if output == "json":
        print_json(answer)
        return
    click.echo(f"{address}: not dialled any more")


@gateways.command("list")
@OUTPUT
@pass_client
def list_gateways(client: Client, output: str) -> None:
    """List them with their state, and why one is not connected."""
    rows = client.get("/gateway-list")["items"]
    if output == "json":
        print_json(rows)
        return
    if not rows:
        click.echo(
            "No gateway is dialled. Agents dial in by themselves; where they may not:\n"
            "sla gateways add IP:PORT --name NAME"
        )
        return
    console().print(build(GATEWAY_COLUMNS, rows, time.time_ns() // 1000))


@click.command()
@click.argument(
    "wanted",
    metavar="[observe|enforce|inherit]",
    required=False,
    type=click.Choice(["observe", "enforce", "inherit"]),
)
@click.option("--backend", help="Only on this backend; inherit: as the server again.")
@click.option("--policy", "of_policy", is_flag=True, help="Of the caps that policies compute.")
@DATA_OUTPUT
@pass_client
def mode(client: Client, wanted: str | None, backend: str | None, of_policy: bool, output: str) -> None:
    """Show or switch the mode: observe (decide and log only) or enforce.

    A backend may have a mode of its own, and so may an agreement (spec.control in its document): the
    agreement's holds before that of the backend, and this before that of the server.

    Caps of policies have a mode beside it: they hold where both say enforce. sla policy would-hold shows what
    those that are only observed would hold back.
    """
    if wanted is None:
        current = client.get("/mode")
        if output == "json":
            print_json(current)
            return
        click.echo(current["mode"] or "unknown: the services part has not spoken yet (sla-server status)")
        for name, own in sorted((current.get("backends") or {}).items()):
            click.echo(f"{own} on backend {name}")
        stage = current.get("policy") or {}
        if stage.get("mode"):
            click.echo(f"caps of policies: {stage['mode']}")
        for name, own in sorted((stage.get("backends") or {}).items()):
            click.echo(f"caps of policies: {own} on backend {name}")
        if current.get("stale") and current["mode"]:
            click.echo("note: last known; the services part is silent (sla-server status)", err=True)
        return
    if wanted == "inherit" and backend is None:
        raise click.UsageError("inherit is for one backend: add --backend NAME, or give observe or enforce")
    body = {"mode": wanted} if backend is None else {"mode": wanted, "backend": backend}
    if of_policy:
        body["of"] = "policy"
    answer = client.change("PUT", "/mode", json=body)
    if output == "json":
        print_json(answer)
        return
    said = answer.get("mode", wanted) if backend is None else f"{wanted} on backend {backend}"
    click.echo(f"caps of policies: {said}" if of_policy else said)


@click.command()
@DATA_OUTPUT
@pass_client
def login(client: Client, output: str) -> None:
    """Print an address that signs one browser in; good once, for 15 minutes."""
    answer = client.change("POST", "/logins")
    if output == "json":
        print_json(answer)
        return
    click.echo(answer["address"])

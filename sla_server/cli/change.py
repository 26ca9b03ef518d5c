"""The commands that change something: apply, delete, throttle, mode, login. Each is in the audit log."""

from __future__ import annotations

import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli.chunks import DocumentChunk, cut, in_file
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, RequestRefused
from sla_server.cli.shared import OUTPUT, duration_s, pass_client, print_json


@click.command()
@click.option("-f", "--file", "path", required=True, help="Agreement documents in YAML; - reads stdin.")
@click.option("--dry-run", is_flag=True, help="Check and compare only; change nothing.")
@OUTPUT
@pass_client
def apply(client: Client, path: str, dry_run: bool, output: str) -> None:
    """Put agreements in force, or new versions of them."""
    parts = cut(read_documents(path))
    try:
        if len(parts) > 1:
            answer = _apply_parts(client, parts, dry_run=dry_run)
        else:
            answer = _apply(client, parts[0].text, dry_run=dry_run)
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
        click.echo(f"{item['name']}: {word} version {item.get('version')}")
    for warning in answer.get("warnings", []):
        click.echo(f"note: {printable_lines(str(warning))}", err=True)
    if dry_run:
        click.echo("The documents are valid. Nothing was changed (--dry-run).")


def _apply(client: Client, documents: bytes, *, dry_run: bool) -> dict[str, Any]:
    query = {"dry_run": "1"} if dry_run else {}
    headers = {"Content-Type": "application/yaml"}
    answer: dict[str, Any] = client.change("POST", "/slas", content=documents, params=query, headers=headers)
    return answer


def _apply_parts(client: Client, parts: list[DocumentChunk], *, dry_run: bool) -> dict[str, Any]:
    """All parts are checked before the first is applied; progress goes to standard error.

    Raises:
        Refused: a part was refused; says how many documents before it are in force all the same.
        BadUsage: two documents have one name.
    """
    checked = _each_part(client, parts, dry_run=True)
    names = Counter(item["name"] for item in checked["applied"])
    if doubled := sorted(name for name, count in names.items() if count > 1):
        raise BadUsage(
            f"agreement {doubled[0]} stands in the file {names[doubled[0]]} times. Keep one of them"
        )
    return checked if dry_run else _each_part(client, parts, dry_run=False)


def _each_part(client: Client, parts: list[DocumentChunk], *, dry_run: bool) -> dict[str, Any]:
    applied: list[dict[str, Any]] = []
    warnings: list[str] = []
    for part in parts:
        try:
            answer = _apply(client, part.text, dry_run=dry_run)
        except RequestRefused as exc:
            problem = in_file(exc.problem, part)
            if applied and not dry_run:
                kept = (
                    f"{len(applied)} documents before line {part.lines_before + 1} are in force. Correct the "
                )
                problem["fix"] = f"{kept}file and apply all of it again: those change nothing then"
            raise RequestRefused(exc.status, problem) from exc
        applied += answer.get("applied", [])
        warnings += answer.get("warnings", [])
        click.echo(f"{'checked' if dry_run else 'applied'} {len(applied):,} documents", err=True)
    return {"applied": applied, "warnings": warnings}


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


@click.group()
def delete() -> None:
    """End something."""


@delete.command("sla")
@click.argument("name")
@pass_client
def delete_sla(client: Client, name: str) -> None:
    """End an agreement; what was judged stays stored."""
    client.change("DELETE", f"/slas/{quote(name, safe='')}")
    click.echo(f"{name}: ended")


@click.group()
def throttle() -> None:
    """Set and release throttles by hand."""


@throttle.command("set")
@click.argument("volume")
@click.option("--iops", type=click.FloatRange(0, min_open=True), help="I/Os a second.")
@click.option("--mbps", type=click.FloatRange(0, min_open=True), help="MB (10^6 bytes) a second.")
@click.option(
    "--cost", type=click.FloatRange(0, min_open=True), help="Cost a second: 1 an I/O, 1 per 64 KiB."
)
@click.option("--for", "lasting", help="How long: 90s, 10m, 2h. Default: until released.")
@click.option("--reason", required=True, help="Why; others will read it.")
@OUTPUT
@pass_client
def throttle_set(
    client: Client,
    volume: str,
    iops: float | None,
    mbps: float | None,
    cost: float | None,
    lasting: str | None,
    reason: str,
    output: str,
) -> None:
    """Let VOLUME have no more than the given rate (exactly one of --iops, --mbps, --cost)."""
    rates = {"iops": iops, "bytes_per_s": None if mbps is None else mbps * 1e6, "cost_per_s": cost}
    given = {name: value for name, value in rates.items() if value is not None}
    if len(given) != 1:
        raise BadUsage("give exactly one of --iops, --mbps and --cost")
    if not all(map(math.isfinite, given.values())):
        raise BadUsage("the rate is not a number; to let a volume have all it wants: sla throttle release")
    body: dict[str, Any] = {"volume": volume, **given, "reason": reason}
    body["duration_s"] = duration_s(lasting) if lasting else None
    answer = client.change("POST", "/throttles", json=body)
    if output == "json":
        print_json(answer)
        return
    until = (
        f"for {lasting}{'s' if lasting.isdecimal() else ''}"
        if lasting
        else f"until 'sla throttle release {volume}'"
    )
    click.echo(f"{volume}: throttled {until} (throttle {answer.get('throttle_id')})")


@throttle.command("release")
@click.argument("volume")
@OUTPUT
@pass_client
def throttle_release(client: Client, volume: str, output: str) -> None:
    """Release VOLUME's throttles set by hand."""
    answer = client.change("DELETE", "/throttles", params={"volume": volume})
    if output == "json":
        print_json(answer)
        return
    released = answer.get("released", [])
    click.echo(f"{volume}: released {len(released)} throttle{'' if len(released) == 1 else 's'}")


@click.command()
@click.argument(
    "wanted", metavar="[observe|enforce]", required=False, type=click.Choice(["observe", "enforce"])
)
@pass_client
def mode(client: Client, wanted: str | None) -> None:
    """Show or switch the mode: observe (decide and log only) or enforce."""
    if wanted is None:
        told = client.get("/mode")
        click.echo(told["mode"] or "unknown: the services part has not spoken yet (sla-server status)")
        return
    click.echo(client.change("PUT", "/mode", json={"mode": wanted}).get("mode", wanted))


@click.command()
@pass_client
def login(client: Client) -> None:
    """Print an address that signs one browser in; good once, for 15 minutes."""
    click.echo(client.change("POST", "/logins")["address"])

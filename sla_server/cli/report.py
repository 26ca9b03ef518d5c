"""``sla report``: what a period of an agreement says, as text or as a document; issued reports, their check.

The server sends the figures; text, CSV, HTML and PDF are made from them here, so that PDF needs its library
on the machine of the person who wants one, and nowhere else.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
from pydantic import ValidationError
from rich.text import Text

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.config import describe
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.files import write_whole
from pmdaemon.runtime.stop import end_with_parent
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError, RequestRefused
from sla_server.cli.formatting import (
    BAD,
    CONFIG,
    DASH,
    GOOD,
    WARN,
    Column,
    build,
    console,
    pass_client,
    percent,
    print_json,
    when,
)
from sla_server.cli.output import OUTPUT as LIST_OUTPUT
from sla_server.cli.output import set_naming
from sla_server.reports import text
from sla_server.reports.customer import report_for_customer
from sla_server.reports.document import IssuedReport, ReportContent, digest_of, plain
from sla_server.reports.html import as_html
from sla_server.reports.verify import canonical_text
from sla_server.rows import Row

FORMS: Final = ("text", "json", "csv", "html", "pdf")
OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Choice(FORMS),
    default="text",
    show_default=True,
    help="Form of the report.",
)
TO = click.option(
    "--to",
    type=click.Path(path_type=Path),
    help="Write to this file, or, of several reports, into this directory.",
)
PAGE: Final = 500


@dataclass(frozen=True)
class LoadedReport:
    """One report in hand. ``issued`` and ``digest`` of an issued one; ``plain`` is what was sent."""

    plain: Row
    content: ReportContent
    issued: IssuedReport | None = None
    digest: str = ""
    is_copy: bool = False
    """Without names of others: what an account with labels gets."""

    @property
    def name(self) -> str:
        """Of a file."""
        if self.issued is not None:
            return self.issued.report_id
        return f"{self.content.agreement.name}-{self.content.period.text}"


class ReportGroup(Commands):
    """A first word that is no subcommand is an agreement."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See ``click.Group``."""
        if not args or args[0] not in self.commands:
            args = ["of", *args]
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """See ``click.Group``: without arguments, or with options first, it is the report itself."""
        wants_help = any(each in ("-h", "--help") for each in args[:1])
        if not wants_help and (not args or args[0].startswith("-")):
            args = ["of", *args]
        return super().parse_args(ctx, args)


@click.group(cls=ReportGroup, subcommand_metavar="[AGREEMENT | COMMAND] [ARGS]...")
def report() -> None:
    """What a period of an agreement says: compliance, budget, violations, credits, cost to others.

    sla report erp-gold --period 2026-10 is short for sla report of erp-gold --period 2026-10.
    """


@report.command("of")
@click.argument("agreement", required=False)
@click.option(
    "--period",
    default="last",
    show_default=True,
    metavar="PERIOD",
    help="2026-10, 2026-W40, 2026-10-03, 2026-Q4, 2026, last or this; in the agreement's own zone.",
)
@OUTPUT
@TO
@pass_client
def of_agreement(client: Client, agreement: str | None, period: str, output: str, to: Path | None) -> None:
    """Compute the report of AGREEMENT, or of all in force, for a period, as it is known now."""
    if agreement is not None:
        _write([_computed(client, agreement, period)], output, to, is_one=True)
        return
    found, refused = [], []
    for name in _agreements(client):
        try:
            found.append(_computed(client, name, period))
        except RequestRefused as exc:
            refused.append(f"{name}: {exc}")
    for line in refused:
        click.echo(printable_lines(f"sla: {line}"), err=True)
    if not found:
        raise CliError(f"no agreement has a report of {period}")
    _write(found, output, to)


def _agreements(client: Client) -> list[str]:
    names: list[str] = []
    after: str | None = None
    while True:
        page = client.get("/slas", limit=PAGE, **({"after": after} if after else {}))
        names += [row["name"] for row in page["items"]]
        after = page["next"]
        if after is None:
            return names


def _computed(client: Client, agreement: str, period: str) -> LoadedReport:
    plain = client.get(f"/slas/{quote(agreement, safe='')}/report", period=period)
    return LoadedReport(plain, _parsed(ReportContent, plain))


def _parsed(model: type[Any], plain: Any) -> Any:
    try:
        return model.model_validate(plain)
    except ValidationError as exc:
        raise CliError(
            f"the server's report is of another release ({describe(exc)}). "
            "Use -o json, or the sla of its release"
        ) from exc


# -- Writing


def _write(reports: Sequence[LoadedReport], output: str, to: Path | None, *, is_one: bool = False) -> None:
    if output == "pdf" and to is None and sys.stdout.isatty():
        raise BadUsage("-o pdf: a terminal shows no PDF. Give --to FILE")
    if not is_one and output in ("html", "pdf"):
        if to is None:
            raise BadUsage(f"-o {output}: several reports are several files. Give --to DIRECTORY")
        to.mkdir(parents=True, exist_ok=True)
        for each in reports:
            _store(to / f"{each.name}.{output}", _made(each, output))
        click.echo(f"{len(reports)} reports are in {to}", err=True)
        return
    data = _all_of(reports, output, is_one=is_one)
    if to is not None:
        _store(to, data)
    elif output == "pdf":
        sys.stdout.buffer.write(data)
    else:
        click.echo(printable_lines(data.decode()) if output == "text" else data.decode(), nl=False)


def _all_of(reports: Sequence[LoadedReport], output: str, *, is_one: bool) -> bytes:
    if is_one:
        return _made(reports[0], output)
    if output == "json":
        return _json([each.plain for each in reports])
    parts = [_made(each, output).decode() for each in reports]
    if output == "csv":  # one heading
        parts = [part if number == 0 else part.partition("\r\n")[2] for number, part in enumerate(parts)]
        return "".join(parts).encode()
    return "\n".join(parts).encode()


def _made(one: LoadedReport, output: str) -> bytes:
    makers: dict[str, Callable[[], str]] = {
        "text": lambda: text.as_text(one.content, one.issued, one.digest, is_copy=one.is_copy),
        "csv": lambda: text.as_csv(one.content),
        "html": lambda: as_html(one.content, one.issued, one.digest, is_copy=one.is_copy),
    }
    if output == "pdf":
        from sla_server.reports.pdf import as_pdf

        return as_pdf(makers["html"]())
    if output == "json":
        return _json(one.plain)
    return makers[output]().encode()


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def _store(path: Path, data: bytes) -> None:
    try:
        write_whole(path, data)
    except OSError as exc:
        raise CliError(f"--to {path}: cannot be written ({exc.strerror})") from exc


# -- Issued reports


def _credit_of(row: Row) -> str:
    credit = (row["summary"] or {}).get("credit")
    return DASH if credit is None else percent(credit, 0)


def _kept_of(row: Row) -> Text:
    """The objectives of a report, those that were not kept first."""
    objectives = (row["summary"] or {}).get("objectives") or []
    missed = [str(each["name"]) for each in objectives if each["is_kept"] is False]
    if missed:
        return Text(f"NOT KEPT: {', '.join(missed)}", BAD)
    is_judged = any(each["is_kept"] for each in objectives)
    return Text("kept", GOOD) if is_judged else Text("nothing to judge", WARN)


ISSUED_COLUMNS: Final = (
    Column("NUMBER", lambda row, _now: str(row["number"]), number=True),
    Column("REPORT", lambda row, _now: row["report_id"]),
    Column("ISSUED", lambda row, _now: when(row["issued_us"])),
    Column("PROMISES", lambda row, _now: _kept_of(row)),
    Column("CREDIT", lambda row, _now: _credit_of(row), number=True),
    Column("STATE", lambda row, _now: "preliminary" if row["is_preliminary"] else "final"),
)


@report.command("list")
@click.argument("agreement", required=False)
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="At most so many.")
@click.option(
    "--period", metavar="PERIOD", help="Only of this one, or of those that begin so: 2026-10, 2026."
)
@LIST_OUTPUT
@pass_client
def list_reports(client: Client, agreement: str | None, limit: int, period: str | None, output: str) -> None:
    """List issued reports, newest first: all, or those of AGREEMENT."""
    set_naming("", lambda row: str(row["report_id"]))
    wanted = {key: value for key, value in (("name", agreement), ("period", period)) if value}
    found = client.get("/reports", limit=limit, **wanted)["items"]
    if output == "json":
        print_json(found)
    elif not found and period:
        click.echo("no issued report is like that: 'sla report list' lists all", err=True)
    elif not found:
        click.echo("no report was issued yet: 'sla report issue' issues those that are due", err=True)
    else:
        console().print(build(ISSUED_COLUMNS, found, 0))


@report.command("show")
@click.argument("report_id", metavar="REPORT")
@OUTPUT
@TO
@pass_client
def show(client: Client, report_id: str, output: str, to: Path | None) -> None:
    """Show an issued report, by its id or number, as it was issued."""
    plain = client.get(f"/reports/{quote(report_id, safe='')}")
    issued = _parsed(IssuedReport, plain["report"])
    is_copy = bool(plain.get("is_copy"))
    _write([LoadedReport(plain, issued.content, issued, plain["digest"], is_copy)], output, to, is_one=True)


@report.command("verify")
@click.argument("reports", metavar="[REPORT | FILE]...", nargs=-1)
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form.")
@pass_client
def verify(client: Client, reports: Sequence[str], output: str) -> None:
    """Check issued reports: is each what was issued, does it add up, is it what the server's data give?

    Without an argument the chain of all reports is checked. A FILE is a report as 'sla report show -o json'
    writes it: it is also compared with the server's. Ends with status 1 if something is wrong.
    """
    if not reports:
        chain = _chain(client)
        if output == "json":
            print_json(chain)
        else:
            for each in chain["items"]:
                _print_findings(each)
            state = (
                "each names the digest of the one before it" if chain["is_good"] else "the chain is broken"
            )
            none = "no report was issued yet: there is nothing to check"
            click.echo(f"{chain['count']} reports: {state}" if chain["count"] else none)
        if not chain["is_good"]:
            raise SystemExit(1)
        return
    found = [_verified(client, each) for each in reports]
    if output == "json":
        print_json(found)
    else:
        for each in found:
            _print_findings(each)
    if not all(each["is_good"] for each in found):
        raise SystemExit(1)


def _chain(client: Client) -> Row:
    """The check of all reports, a page after the other."""
    items: list[Row] = []
    count, is_good, after = 0, True, "0"
    while after is not None:
        page = client.get("/report-chain", after=after)
        items += page["items"]
        count, is_good, after = count + page["count"], is_good and page["is_good"], page["next"]
    return {"items": items, "count": count, "is_good": is_good}


def _verified(client: Client, given: str) -> Row:
    path = Path(given)
    if not path.is_file():
        answer: Row = client.get(f"/reports/{quote(given, safe='')}/verification")
        return answer
    try:
        held = json.loads(path.read_bytes())
        digest, body = str(held["digest"]), held["report"]
        report_id = str(body["report_id"])
    except (OSError, ValueError, TypeError, KeyError) as exc:
        problem = f"{given} is no report. Write one with: sla report show REPORT -o json --to {given}"
        raise BadUsage(problem) from exc
    answer = client.get(f"/reports/{quote(report_id, safe='')}/verification")
    server = client.get(f"/reports/{quote(report_id, safe='')}")
    checks = [(server["digest"], "the server's report of this id has another digest")]
    if held.get("is_copy"):  # its digest is the whole report's, of which a copy can be made again
        copy = server["report"]
        if not server.get("is_copy"):
            copy = plain(report_for_customer(_parsed(IssuedReport, copy)))
        if canonical_text(copy) != canonical_text(body):
            checks.append(("", "a copy of the server's report says something else: it was changed"))
        answer["checked"].append("this copy, and the digest of the whole report that it names")
    else:
        changed = "the file's digest is not that of its report: it was changed"
        checks.insert(0, (digest_of(canonical_text(body)), changed))
    for mine, problem in checks:
        if mine != digest:
            answer["findings"].insert(0, {"meaning": "broken", "where": given, "text": problem})
            answer["is_good"] = False
    return answer


def _print_findings(found: Row) -> None:
    click.echo(printable_lines(f"{found['report_id']}: {'good' if found['is_good'] else 'NOT GOOD'}"))
    for each in found["findings"]:
        click.echo(printable_lines(f"  {each['meaning']}: {each['where']}: {each['text']}"))
    if found["left_out"]:
        click.echo(f"  and {found['left_out']} more")
    for each in found["checked"]:
        click.echo(printable_lines(f"  checked: {each}"))


@report.command("issue")
@click.argument("agreement", required=False)
@click.option("--period", default="last", show_default=True, metavar="PERIOD", help="With AGREEMENT: which.")
@click.option("--preliminary", is_flag=True, help="With AGREEMENT: also while figures may still change.")
@CONFIG
@pass_client
def issue(client: Client, agreement: str | None, period: str, preliminary: bool, config: Path | None) -> None:
    """Issue reports, on the server's own machine: all that are due, or that of AGREEMENT.

    An issued report never changes. Where one of the period is there and figures differ, a revision is issued,
    which says what it changes.
    """
    if agreement is None and (preliminary or period != "last"):
        raise BadUsage("--period and --preliminary are of one agreement: name it")
    command = [sys.executable, "-m", "sla_server.reports.job"]
    path = config or client.config
    command += ["--config", str(path)] if path else []
    command += ["--agreement", agreement, "--period", period] if agreement is not None else []
    command += ["--preliminary"] if preliminary else []
    status = subprocess.run(command, check=False, preexec_fn=end_with_parent).returncode
    if status:
        raise SystemExit(status if status > 0 else 1)
    try:
        client.change("POST", "/policies/announce")  # the same look finds what is to be announced
    except CliError as exc:
        click.echo(f"the server will announce it within a minute by itself ({exc})", err=True)

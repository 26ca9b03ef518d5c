"""``sla report``: what a period of an agreement says, as text or as a document; issued reports and their check.

The server sends the figures; text, CSV, HTML and PDF are made from them here, so that PDF needs its library on
the machine of who wants one only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import click
from pydantic import ValidationError

from pmdaemon.runtime.config import describe
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.files import write_whole
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage, CliError, RequestRefused
from sla_server.cli.formatting import pass_client
from sla_server.reports import text
from sla_server.reports.document import IssuedReport, ReportContent
from sla_server.reports.html import as_html
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
class Report:
    """One report in hand. ``issued`` and ``digest`` of an issued one; ``plain`` is what was sent."""

    plain: Row
    content: ReportContent
    issued: IssuedReport | None = None
    digest: str = ""

    @property
    def name(self) -> str:
        """Of a file."""
        if self.issued is not None:
            return self.issued.report_id
        return f"{self.content.agreement.name}-{self.content.period.text}"


class ReportGroup(click.Group):
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


def _computed(client: Client, agreement: str, period: str) -> Report:
    plain = client.get(f"/slas/{quote(agreement, safe='')}/report", period=period)
    return Report(plain, _parsed(ReportContent, plain))


def _parsed(model: type[Any], plain: Any) -> Any:
    try:
        return model.model_validate(plain)
    except ValidationError as exc:
        raise CliError(
            f"the server's report is of another release ({describe(exc)}). Use -o json, or the sla of its release"
        ) from exc


# -- Writing


def _write(reports: Sequence[Report], output: str, to: Path | None, *, is_one: bool = False) -> None:
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
        click.get_binary_stream("stdout").write(data)
    else:
        click.echo(printable_lines(data.decode()) if output == "text" else data.decode(), nl=False)


def _all_of(reports: Sequence[Report], output: str, *, is_one: bool) -> bytes:
    if is_one:
        return _made(reports[0], output)
    if output == "json":
        return _json([each.plain for each in reports])
    parts = [_made(each, output).decode() for each in reports]
    if output == "csv":  # one heading
        parts = [part if number == 0 else part.partition("\r\n")[2] for number, part in enumerate(parts)]
        return "".join(parts).encode()
    return "\n".join(parts).encode()


def _made(one: Report, output: str) -> bytes:
    makers: dict[str, Callable[[], str]] = {
        "text": lambda: text.as_text(one.content, one.issued, one.digest),
        "csv": lambda: text.as_csv(one.content),
        "html": lambda: as_html(one.content, one.issued, one.digest),
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

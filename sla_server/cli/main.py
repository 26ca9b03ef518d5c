"""``sla``: the command line of people who make agreements and watch them.

A command's module is imported when the command is run, not before: ``sla get`` needs neither the database nor
cryptography, and completion and ``--help`` need no command at all. Hence the table with one line for each.
``sla-server`` shares ``CommandGroup``, so nothing here imports client or tables before a command runs.
"""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from textwrap import wrap
from typing import Any, ClassVar, Final

import click
from click.shell_completion import CompletionItem

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.excerpt import printable_lines
from pmdaemon.runtime.failures import outermost

COMMANDS: Final = {
    "apply": ("change", "Put agreements in force, or new versions of them."),
    "diff": ("documents", "Compare documents with what is in force, field by field."),
    "validate": ("documents", "Check documents without a server, in the words of apply."),
    "admit": ("documents", "Say whether agreements could be kept beside those in force."),
    "get": ("get", "List gateways, volumes, slas, maintenance, throttles, events and more."),
    "describe": ("describe", "Show everything about an agreement, a volume, an event and more."),
    "explain": (
        "explain",
        "Explain a kind of document or one of its fields: type, default, limits, meaning.",
    ),
    "history": ("documents", "List a document's versions: since when, by whom, what changed."),
    "maintenance": (
        "maintenance",
        "Begin maintenance now, or end it early; list it with sla get maintenance.",
    ),
    "notify": ("notify", "Try recipients and routes: who is notified of an event, and does it arrive."),
    "silence": ("notify", "Hold events back for a time; list silences with sla get silences."),
    "ack": ("notify", "Acknowledge an event: you take care of it, and reminders end."),
    "events": ("events", "Event delivery: the partner server."),
    "why": ("why", "Say why a volume is throttled or an agreement at risk, now or at a time."),
    "delete": ("delete", "End agreements, calendars, maintenance, throttles and more."),
    "throttle": ("change", "Set and release throttles by hand."),
    "mode": ("change", "Show or switch the mode: observe (decide and log only) or enforce."),
    "gateways": ("change", "Gateways that the server dials, because their hosts may not dial out."),
    "volumes": (
        "volumes",
        "Labels of volumes, and which gateway one belongs to: approve, revoke, label.",
    ),
    "policy": ("policy", "Compute policies from what was stored, and list them."),
    "report": (
        "report",
        "What a period of an agreement says: compliance, budget, violations, credits, cost to others.",
    ),
    "simulate": ("simulate", "Simulate what control does with recorded, generated or stored load."),
    "queue": ("inspect", "Look into a disk queue: its figures, its records, what recovery would do."),
    "storage": ("storage", "Look after the Parquet files: what there is, merge now, is all of it there."),
    "mailbox": ("inspect", "Look into the mailboxes between the server's processes."),
    "user": ("users", "Accounts of people: list, add, change, passwd, disable, delete, and their sessions."),
    "token": ("users", "API tokens of programs: list, create, revoke."),
    "approvals": ("approvals", "Changes that wait for a second person: list, approve, refuse."),
    "audit": ("audit", "The log of who changed what: list it, verify that it is whole, and export it."),
    "ca": ("ca", "Certificates for gateways: make the authority, enrol, revoke, list."),
    "cluster": ("cluster", "Nodes that carry messages between servers: make, join, look, move, drain."),
    "support": ("support", "Gather what those who help need to see."),
    "top": ("top", "Watch agreements, volumes and throttles live; q or Ctrl-C ends it."),
    "schema": ("documents", "Print the JSON Schema of all kinds of documents, or of one."),
    "export": ("openslo:export_agreement", "Print agreement NAME as OpenSLO."),
    "import": (
        "openslo:import_documents",
        "Print the agreements that an OpenSLO FILE describes; change nothing.",
    ),
    "completion": ("completion", "Print the script that lets a shell complete commands and names."),
    "login": ("change", "Print an address that signs one browser in; good once, for 15 minutes."),
}
"""Command -> (module in this package, its line in the help); ``module:function`` where the names differ."""

ASK_NO_SERVER: Final = ("explain", "completion")
"""Commands that need no client, whose packages are a third of what such a call takes."""


def folded(text: str, width: int) -> str:
    """Lines of a message as wide as a terminal, between words; what is left is indented under the first."""
    lines = []
    for line in text.splitlines():
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrap(
            line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


class CommandGroup(Commands):
    """Reports errors in one line on stderr, after the program's name, and ends with their exit status."""

    program: ClassVar[str] = "sla"

    def invoke(self, ctx: click.Context) -> Any:
        """See ``click.Group``."""
        with outermost(self.program, self._report):
            try:
                return super().invoke(ctx)
            except BrokenPipeError as exc:  # the reader of the output has seen enough
                ended = exc
        raise ended  # click handles it

    def _report(self, text: str) -> None:
        said = printable_lines(f"{self.program}: {text}")
        if sys.stderr.isatty():
            said = folded(said, shutil.get_terminal_size().columns)
        click.echo(said, err=True)


class SlaCommands(CommandGroup):
    """Imports commands when they are run, and closes the client whatever happens."""

    def list_commands(self, _ctx: click.Context) -> list[str]:
        """See ``click.Group``."""
        return list(COMMANDS)

    def get_command(self, _ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See ``click.Group``."""
        if cmd_name not in COMMANDS:
            return None
        from pmdaemon.runtime import lean_structlog  # noqa: F401 - before a command brings rich: see there

        module, _, function = COMMANDS[cmd_name][0].partition(":")
        found = importlib.import_module(f"sla_server.cli.{module}")
        command: click.Command = getattr(found, function or cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See ``click.Group``; a word that is no command is answered with the one that was meant."""
        word = args[0]
        if word not in COMMANDS and not word.startswith("-") and not ctx.resilient_parsing:
            from sla_server.cli.kinds import meant

            raise click.UsageError(f"{word[:40]!r} is no command. {meant(word, COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """See ``click.Group``."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, about) for name, (_module, about) in COMMANDS.items()])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """See ``click.Group``."""
        found = [
            CompletionItem(name, help=about)
            for name, (_module, about) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def invoke(self, ctx: click.Context) -> Any:
        """See ``click.Group``."""
        try:
            return super().invoke(ctx)
        finally:
            if ctx.obj is not None:
                ctx.obj.close()


@click.group(cls=SlaCommands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--server", envvar="SLA_SERVER", metavar="URL", help="The SLA server [the local one]; several: URL,URL."
)
@click.option("--token-file", type=click.Path(path_type=Path), help="Token for changes [DATA_DIR/api.token].")
@click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's configuration: where its token and address are found.",
)
@click.option(
    "--ca-file",
    type=click.Path(path_type=Path),
    envvar="SLA_CA_FILE",
    help="Authority or certificate that an https server must have.",
)
@click.version_option(package_name="storage-sla-server")
@click.pass_context
def cli(
    context: click.Context,
    server: str | None,
    token_file: Path | None,
    config: Path | None,
    ca_file: Path | None,
) -> None:
    """Keep latency promises on shared block storage.

    First steps: sla top (watch), sla apply -f agreement.yaml (promise), sla mode enforce (keep it).
    """
    from sla_server.cli.formatting import keep_logs_apart

    keep_logs_apart()
    if context.invoked_subcommand not in ASK_NO_SERVER:
        from sla_server.cli.client import Client

        context.obj = context.obj or Client.find(server, token_file, config, ca_file)

"""Writes docs/man and docs/operations/commands.md from the commands' own help: ``make docs``.

One manual page each for ``sla``, ``sla-server`` and every command of ``sla`` (``man sla-get``), in the macros
of man(7). The package installs them to share/man/man1. The words are click's: what ``--help`` prints, the
manual says.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Final

import click

from sla_server.cli.main import COMMANDS, cli
from sla_server.cli.server import cli as server
from sla_server.cli.statuses import EXIT_STATUSES

FOLDER: Final = Path(__file__).parent / "man"
PAGE: Final = Path(__file__).parent / "operations" / "commands.md"
HEAD: Final = """\
# Commands

Generated from the commands' own help by `make docs`; do not edit. The same text is in the manual pages
(`man sla`, `man sla-get`). What a task needs is in [cli.md](cli.md).

"""
ENVIRONMENT: Final = {
    "SLA_SERVER": "The server's address, as --server.",
    "SLA_CONFIG": "The server's configuration, as --config: where its token, socket and address are found.",
    "SLA_TOKEN": "The token for changes, before the file of --token-file.",
    "NO_COLOR": "If set, nothing is coloured. Without a terminal nothing is coloured anyway.",
}


def roff(text: str) -> str:
    """A text as roff prints it: no word of it is a request."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE)


def paragraphs(command: click.Command) -> list[str]:
    """The help of a command, a line each paragraph."""
    text = (command.help or "").replace("\b", "")
    return [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]


def option_words(option: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    """How an option is written, and its help; None for arguments, which the usage shows."""
    record = None if isinstance(option, click.Argument) else option.get_help_record(context)
    return None if record is None else (record[0], " ".join(record[1].split()))


def all_options(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    """Options with their help, ``--help`` last."""
    for parameter in command.get_params(context):
        if words := option_words(parameter, context):
            yield words


def contexts(
    command: click.Command, name: str, parent: click.Context | None = None
) -> Iterator[click.Context]:
    """A command and all below it, each with the words before it."""
    context = click.Context(command, info_name=name, parent=parent, **command.context_settings)
    yield context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from contexts(found, each, context)


def synopsis(context: click.Context) -> str:
    """How the command is called."""
    return " ".join([context.command_path, *context.command.collect_usage_pieces(context)])


def manual(context: click.Context) -> str:
    """The manual page of a command with all below it."""
    title = context.command_path.replace(" ", "-")
    about = paragraphs(context.command)
    lines = [
        f'.TH "{roff(title.upper())}" "1" "" "storage\\-sla\\-server" "Storage SLA"',
        ".SH NAME",
        f"{roff(title)} \\- {roff(about[0].rstrip('.'))}",
        ".SH SYNOPSIS",
    ]
    below = list(contexts(context.command, context.info_name or "", context.parent))
    for each in below:
        if each is below[0] or not isinstance(each.command, click.Group):
            lines += [".B " + roff(synopsis(each)), ".br"]
    lines += [".SH DESCRIPTION", *_text(about)]
    lines += _options(context)
    subcommands = [] if context.parent is None and context.command is cli else below[1:]
    if subcommands:
        lines.append(".SH COMMANDS")
    for each in subcommands:
        lines += [".SS " + roff(synopsis(each)), *_text(paragraphs(each.command))]
        for words, said in all_options(each.command, each):
            lines += _tagged(words, said)
    return "\n".join([*lines, *_rest(context, title)]) + "\n"


def _text(about: list[str]) -> list[str]:
    lines: list[str] = []
    for part in about:
        lines += [roff(part), ".PP"]
    return lines[:-1]


def _options(context: click.Context) -> list[str]:
    lines = [".SH OPTIONS"]
    for words, said in all_options(context.command, context):
        lines += _tagged(words, said)
    return lines


def _tagged(words: str, said: str) -> list[str]:
    return [".TP", f".B {roff(words)}", roff(said) or "\\&"]


def _rest(context: click.Context, title: str) -> list[str]:
    lines: list[str] = []
    if context.command is cli:
        lines.append(".SH COMMANDS")
        for name, (_module, about) in COMMANDS.items():
            lines += _tagged(f"sla {name}", f"{about} See sla-{name}(1).")
        lines.append(".SH ENVIRONMENT")
        for name, about in ENVIRONMENT.items():
            lines += _tagged(name, about)
    if context.command in (cli, server):
        lines.append(".SH EXIT STATUS")
        for status, said in EXIT_STATUSES.items():
            lines += _tagged(str(status), f"{said.meaning} {said.remedy}".strip())
    others = ["sla", "sla-server"] if context.command is not cli else ["sla-server", "sla-get"]
    seen = [f".BR {roff(name)} (1)" for name in others if name != title]
    return [*lines, ".SH SEE ALSO", " ,\n".join(seen)]


def manuals() -> dict[str, str]:
    """Every page by the name of its file."""
    root = click.Context(cli, info_name="sla", **cli.context_settings)
    pages = {"sla.1": manual(root)}
    for name in COMMANDS:
        found = cli.get_command(root, name)
        assert found is not None
        context = click.Context(found, info_name=name, parent=root)
        pages[f"sla-{name}.1"] = manual(context)
    pages["sla-server.1"] = manual(click.Context(server, info_name="sla-server", **server.context_settings))
    return pages


def render() -> str:
    """docs/operations/commands.md."""
    lines = [HEAD]
    for program, name in ((cli, "sla"), (server, "sla-server")):
        for context in contexts(program, name):
            level = "##" if context.parent is None or context.parent.parent is None else "###"
            lines.append(f"{level} {context.command_path}\n")
            lines += [f"    {synopsis(context)}\n"]
            lines += [f"{_wrapped(part)}\n" for part in paragraphs(context.command)]
            rows = [
                f"| `{_cell(words)}` | {_cell(said)} |"
                for words, said in all_options(context.command, context)
                if not words.startswith("-h, --help") and words != "--help"
            ]
            if rows:
                lines.append("\n".join(["| option | meaning |", "|---|---|", *rows, ""]))
    lines.append("## Exit statuses\n")
    for status, said in EXIT_STATUSES.items():
        text = f"{status}: {said.meaning} {said.remedy}".strip()
        lines.append(fill(text, 120, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    return fill(text, 120, break_on_hyphens=False, break_long_words=False)


def write() -> None:
    """Write all; pages of commands that are gone are removed."""
    FOLDER.mkdir(exist_ok=True)
    pages = manuals()
    for path in FOLDER.glob("*.1"):
        if path.name not in pages:
            path.unlink()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)
    PAGE.write_text(render())


if __name__ == "__main__":
    write()

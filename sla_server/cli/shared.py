"""What the commands share: options, durations, printing.

Every table fits 80 columns; in a wider terminal it takes the room. Without a terminal it is 80 wide.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final

import click
import structlog
from rich.console import Console

from sla_server.cli.errors import BadUsage

CONFIG = click.option(
    "--config",
    "config",
    type=click.Path(path_type=Path),
    envvar="SLA_CONFIG",
    help="The server's configuration (also SLA_CONFIG).",
)
OUTPUT = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Form of the answer.",
)
UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)([smhd]?)")
MOST_S: Final = 100 * 366 * 86_400.0
WIDTH: Final = 80
pass_client = click.pass_obj


def keep_logs_apart() -> None:
    """Let log lines of what runs inside a command, warnings and worse, go to stderr.

    structlog would print all of them to stdout, where they break ``-o json``.
    """
    processors = structlog.get_config()["processors"]
    if _drop_chatter not in processors:
        processors = [_drop_chatter, *processors]
    structlog.configure(processors=processors, logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))


def _drop_chatter(
    _logger: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    if method in ("debug", "info"):  # the command says itself what it did
        raise structlog.DropEvent
    return event


def console() -> Console:
    """Where tables go: as wide as the terminal, 80 columns without one."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns if sys.stdout.isatty() else WIDTH
    return Console(width=max(WIDTH, width), highlight=False, soft_wrap=False, emoji=False, markup=False)


def print_json(value: Any) -> None:
    """For programs."""
    click.echo(json.dumps(value, indent=2))


def duration_s(text: str) -> float:
    """Seconds of ``90``, ``90s``, ``10m``, ``2h`` or ``1d``.

    Raises:
        BadUsage: anything else, or nothing at all.
    """
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * UNITS_S[match[2] or "s"] if match else 0.0
    if not 0 < seconds <= MOST_S:
        raise BadUsage(f"{text[:40]!r} is not a duration; write for example 90s, 10m, 2h or 1d")
    return seconds

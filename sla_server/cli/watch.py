"""``--watch``: a command's answer again and again, of which only what changed is drawn, until Ctrl-C.

A picture is what the command prints once, as lines. On a terminal pictures are drawn over each other on a
screen of their own, and the last one stays when that is left. Elsewhere the first picture is printed whole,
of the next ones the lines that are new; of JSON and YAML a whole answer, if it is another one. A server that
goes away is reported and asked again, and the last values stay.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TextIO

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime.excerpt import printable_lines
from sla_server.cli.errors import RequestRefused
from sla_server.cli.formatting import FiniteRange
from sla_server.cli.output import JSON, NAME, YAML, form

INTERVAL_S: Final = 2.0
ENTER: Final = "\x1b[?1049h\x1b[2J\x1b[?25l"
"""The other screen, empty, without a cursor."""
LEAVE: Final = "\x1b[?25h\x1b[?1049l"
CLEAR: Final = "\x1b[2J"

Picture = Sequence[str]


def watchable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--watch`` and ``--interval``."""

    @functools.wraps(function)
    def run(*args: Any, watch: bool = False, interval: float = INTERVAL_S, **given: Any) -> None:
        if watch:
            follow(functools.partial(function, *args, **given), interval)
        else:
            function(*args, **given)

    every = click.option(
        "--interval",
        type=FiniteRange(0.2, 3600),
        default=INTERVAL_S,
        show_default=True,
        help="Seconds between two looks of --watch.",
    )
    option = click.option("-w", "--watch", is_flag=True, help="Look again and again; Ctrl-C ends it.")
    return option(every(run))


def follow(draw: Callable[[], Any], interval_s: float, wait: Callable[[float], None] | None = None) -> None:
    """Print what ``draw`` prints, and later what has changed of it, until it is interrupted.

    Raises:
        SlaError: the first picture cannot be had, or a later one never will.
    """
    wait = wait or time.sleep
    is_screen = sys.stdout.isatty() and form() not in (JSON, YAML, NAME)
    show = _on_screen if is_screen else _as_stream
    last: list[str] = []
    with contextlib.suppress(KeyboardInterrupt), ended_by_sigterm(), show(sys.stdout) as shown:
        while True:
            lines, trouble = _picture(draw, has_last=bool(last))
            last = lines or last
            shown(last, trouble)
            wait(interval_s)
    if is_screen:
        click.echo("\n".join(last))


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends it as Ctrl-C does, with the screen as it was before; the status says which it was."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Capture(io.StringIO):
    """Standard output for one picture: a terminal if the real one is, so that colours are as there."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._is_terminal = stream.isatty()

    def isatty(self) -> bool:
        """See ``io.TextIOBase``."""
        return self._is_terminal


def _picture(draw: Callable[[], Any], *, has_last: bool) -> tuple[list[str], str]:
    """The lines, and what went wrong; no lines if nothing came."""
    captured, trouble = _Capture(sys.stdout), ""
    try:
        with contextlib.redirect_stdout(captured):
            draw()
    except SlaError as exc:
        is_fault = isinstance(exc, RequestRefused) and exc.status >= 500
        if not (exc.retryable or is_fault) or not (has_last or captured.getvalue()):
            raise
        trouble = f"{printable_lines(str(exc).splitlines()[0])} Trying again."
    return captured.getvalue().splitlines(), trouble


def redraw(before: Picture, after: Picture) -> str:
    """What makes one picture of the other on a screen: the lines that differ, each at its place."""
    parts = []
    for place in range(max(len(before), len(after))):
        line = after[place] if place < len(after) else ""
        if place >= len(before) or before[place] != line:
            parts.append(f"\x1b[{place + 1};1H{line}\x1b[0m\x1b[K")
    return "".join(parts)


def fit(lines: Picture, height: int) -> list[str]:
    """The lines that a screen has room for, and how many it has not."""
    if len(lines) <= height:
        return list(lines)
    return [*lines[: height - 1], f"and {len(lines) - height + 1:,} more lines; a longer window shows them"]


@contextlib.contextmanager
def _on_screen(stream: TextIO) -> Iterator[Callable[[Picture, str], None]]:
    known: list[str] = []
    room = (0, 0)

    def show(lines: Picture, trouble: str) -> None:
        nonlocal known, room
        size = shutil.get_terminal_size()
        if size != room:
            known, room = [], size
            stream.write(CLEAR)
        said = [click.style(trouble[: size.columns], fg="red", bold=True)] if trouble else []
        picture = fit([*said, *lines], size.lines)
        stream.write(redraw(known, picture))
        stream.flush()
        known = picture

    stream.write(ENTER)
    try:
        yield show
    finally:
        stream.write(LEAVE)
        stream.flush()


@contextlib.contextmanager
def _as_stream(stream: TextIO) -> Iterator[Callable[[Picture, str], None]]:
    known: list[str] = []
    said = ""

    def show(lines: Picture, trouble: str) -> None:
        nonlocal known, said
        if trouble and trouble != said:
            click.echo(f"note: {trouble}", err=True)
        said = trouble
        is_whole = form() in (JSON, YAML)
        new = list(lines) if is_whole and lines != known else [] if is_whole else added(known, lines)
        if is_whole and new and known and form() == YAML:
            new = ["---", *new]
        known = list(lines)
        for line in new:
            click.echo(line, file=stream)
        stream.flush()

    yield show


def added(before: Picture, after: Picture) -> list[str]:
    """Lines that were not there before, in order."""
    left = Counter(before)
    found = []
    for line in after:
        if left[line]:
            left[line] -= 1
        else:
            found.append(line)
    return found

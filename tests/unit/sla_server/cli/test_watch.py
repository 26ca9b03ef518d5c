"""``--watch``: only what changed is drawn, a server that goes away is reported, Ctrl-C ends it well."""

from __future__ import annotations

import io
import re
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click
import pytest

from sla_server.cli import watch
from sla_server.cli.errors import BadUsage, LiveValuesMissing, RequestRefused, ServerDown
from sla_server.cli.watch import added, fit, follow, redraw
from tests.support.cli import Terminal

Picture = str | Exception


def pictures(shown: Sequence[Picture]) -> tuple[Callable[[], None], Callable[[float], None]]:
    """Draws one picture after the other, then is interrupted."""
    left = list(shown)

    def draw() -> None:
        picture = left.pop(0)
        if isinstance(picture, Exception):
            raise picture
        click.echo(picture, nl=False)

    def wait(_seconds: float) -> None:
        if not left:
            raise KeyboardInterrupt

    return draw, wait


def followed(capsys: pytest.CaptureFixture[str], *shown: Picture) -> tuple[str, str]:
    draw, wait = pictures(shown)
    follow(draw, 1.0, wait)
    return capsys.readouterr()


def test_without_a_terminal_new_lines_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = followed(capsys, "HEAD\na 1\nb 2\n", "HEAD\na 1\nb 3\n", "HEAD\na 1\nb 3\n")
    assert (out, err) == ("HEAD\na 1\nb 2\nb 3\n", "")


def test_a_server_that_goes_away_is_reported_once_and_asked_again(
    capsys: pytest.CaptureFixture[str],
) -> None:
    away = ServerDown("http://x", "refused")
    out, err = followed(capsys, "a\n", away, away, RequestRefused(503, {"detail": "later"}), "a\nb\n")
    assert out == "a\nb\n"
    assert [line[:40] for line in err.splitlines()] == [
        "note: no SLA server answers at http://x ",
        "note: later Trying again.",
    ]


@pytest.mark.parametrize("error", [ServerDown("http://x", "refused"), BadUsage("no")])
def test_what_fails_at_once_is_an_error(error: Exception) -> None:
    draw, wait = pictures([error])
    with pytest.raises(type(error)):
        follow(draw, 1.0, wait)


def test_what_will_never_come_ends_it() -> None:
    draw, wait = pictures(["a\n", RequestRefused(404, {"detail": "gone"})])
    with pytest.raises(RequestRefused):
        follow(draw, 1.0, wait)


class Screen(io.StringIO):
    """A terminal that understands what is written to it."""

    def isatty(self) -> bool:
        return True

    def lines(self, text: str) -> list[str]:
        cells: dict[int, str] = {}
        for found in re.finditer(r"\x1b\[(\d+);1H([^\x1b]*)((?:\x1b\[[0-9;]*[mK])*)", text):
            cells[int(found[1])] = found[2]
        return [cells.get(place, "") for place in range(1, max(cells, default=0) + 1)]


def test_a_screen_is_changed_where_the_picture_has(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: shutil.os.terminal_size((80, 24)))
    draw, wait = pictures(["HEAD\na 1\nb 2\nc 3\n", "HEAD\na 1\nb 9\n"])
    follow(draw, 1.0, wait)
    written = screen.getvalue()
    before, _, rest = written.partition("\x1b[3;1Hb 9")
    assert screen.lines(before) == ["HEAD", "a 1", "b 2", "c 3"]
    assert "HEAD" not in rest.partition(watch.LEAVE)[0], "what stays is not drawn again"
    assert written.startswith(watch.ENTER)
    assert rest.endswith(f"{watch.LEAVE}HEAD\na 1\nb 9\n"), "the last picture stays"


def test_live_values_that_are_missing_are_said_above_what_is_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)

    def draw() -> None:
        click.echo("HEAD")
        raise LiveValuesMissing("silent")

    def wait(_seconds: float) -> None:
        raise KeyboardInterrupt

    follow(draw, 1.0, wait)
    assert re.search(r"\x1b\[1;1H\S*silent Trying again", screen.getvalue())
    assert "\x1b[2;1HHEAD" in screen.getvalue()


def test_redraw_and_fit_and_added() -> None:
    assert redraw(["a", "b"], ["a", "b"]) == ""
    assert redraw(["a"], ["a", "b"]) == "\x1b[2;1Hb\x1b[0m\x1b[K"
    assert redraw(["a", "b"], ["a"]) == "\x1b[2;1H\x1b[0m\x1b[K"
    assert fit(["1", "2", "3"], 2) == ["1", "and 2 more lines; a longer window shows them"]
    assert fit(["1", "2"], 2) == ["1", "2"]
    assert added(["a", "a"], ["a", "b", "a", "a"]) == ["b", "a"]


def interrupted(monkeypatch: pytest.MonkeyPatch, looks: int) -> None:
    left = [None] * looks

    def wait(_seconds: float) -> None:
        left.pop()
        if not left:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", wait)


@pytest.mark.parametrize(
    "words",
    [("get", "slas"), ("get", "volumes", "-o", "json"), ("describe", "volume", "batch"), ("why", "batch")],
)
def test_commands_watch_and_end_with_status_0(
    sla: Terminal, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    once: Any = sla(*words)
    interrupted(monkeypatch, 3)
    done = sla(*words, "--watch", "--interval", "0.2")
    assert (done.exit_code, done.stdout) == (0, once.stdout)


def test_sigterm_ends_it_with_the_screen_as_it_was_and_its_own_status(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, before = Screen(), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "stdout", screen)

    def wait(_seconds: float) -> None:
        handler: Any = signal.getsignal(signal.SIGTERM)
        handler(signal.SIGTERM, None)  # as Python calls it, between two steps

    with pytest.raises(SystemExit) as ended:
        follow(lambda: click.echo("a"), 1.0, wait)
    assert ended.value.code == 143
    assert screen.getvalue().endswith(watch.LEAVE)
    assert signal.getsignal(signal.SIGTERM) is before

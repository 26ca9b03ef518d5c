"""A report as one HTML page: self-contained, no script, readable on a phone, printed on A4.

The page has one inline style and no style attributes, so a Content-Security-Policy can name the style by its
digest (``STYLE_SOURCE``).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from sla_server.reports import words
from sla_server.reports.document import IssuedReport, ReportContent, ReportedObjective

WIDTH: Final = 720
HEIGHT: Final = 72
TOP: Final = 4
LEAST_BAD: Final = 2.0
"""Pixels of a day with any bad time: one bad minute must be seen."""
MOST_VALUE: Final = 200
_CSS: Final = files("sla_server.reports").joinpath("templates/report.css").read_text(encoding="utf-8")
STYLE_SOURCE: Final = f"'sha256-{base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode('ascii')}'"


@dataclass(frozen=True, slots=True)
class Bar:
    """One day in the figure; ``top`` and ``good`` are the green part, ``bad`` the height of the red one."""

    x: float
    width: float
    top: float
    good: float
    bad: float
    is_empty: bool
    label: str
    title: str


@cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("sla_server.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )
    made.globals.update(
        percent=words.percent,
        duration=words.duration,
        count=words.count,
        edited=words.edited,
        overspent=words.overspent,
        value=_value,
    )
    return made


def as_html(
    content: ReportContent,
    issued: IssuedReport | None = None,
    digest: str = "",
    *,
    is_copy: bool = False,
    is_on_page: bool = False,
) -> str:
    """The page; ``is_copy``: names of others are left out, so it has another digest than the document.

    ``is_on_page``: the server shows it, with a way back that is not printed; a file refers to nothing.
    """
    tz = content.period.tz
    return (
        _environment()
        .get_template("report.html")
        .render(
            content=content,
            issued=issued,
            digest=digest,
            is_copy=is_copy,
            is_on_page=is_on_page,
            css=Markup(_CSS),  # noqa: S704 - our own file
            span=partial(_span, tz),
            moment=partial(_moment, tz),
            bars=bars,
        )
    )


def _span(tz: str, from_us: int, to_us: int | None) -> str:
    return words.span(from_us, to_us, tz)


def _moment(tz: str, at_us: int | None) -> str:
    return words.moment(at_us, tz)


def _value(value: Any) -> str:
    """A value of a document, shortened."""
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 3]}..."


def bars(one: ReportedObjective) -> Iterator[Bar]:
    """A bar for each day, all of one width."""
    step = WIDTH / max(len(one.days), 1)
    every = max(1, -(-len(one.days) * 24 // WIDTH))  # a label needs some 20 pixels
    for number, day in enumerate(one.days):
        compliance = day.compliance
        bad = 0.0
        if compliance is not None and day.bad_s:
            bad = max((1.0 - compliance) * HEIGHT, LEAST_BAD)
        title = f"{day.day}: {words.percent(compliance)}, bad {words.duration(day.bad_s)}"
        is_labelled = number % every == 0
        label = day.day[8:].lstrip("0") if len(one.days) <= 31 else day.day[5:]
        yield Bar(
            x=round(number * step, 2),
            width=round(max(step - 1.5, 0.5), 2),
            top=round(TOP + bad, 2),
            good=round(HEIGHT - bad, 2),
            bad=round(bad, 2),
            is_empty=compliance is None,
            label=label if is_labelled else "",
            title=title,
        )

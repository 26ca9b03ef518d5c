"""Forms of an answer, ``-o``: a table for people, and JSON, YAML or names for programs.

A command knows two of them: its parameter ``output`` is ``table`` or ``json``, and what it has for programs
it hands to ``print_json``. Which form was asked for is kept in the context of click: ``wide`` is a table with
more columns, as wide as they are; ``yaml`` and ``name`` are other forms of what JSON would say. So a new
command has all forms without a line for any of them. One whose answer has no names takes ``DATA_OUTPUT``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Final

import click
from click.decorators import FC

TABLE, WIDE, JSON, YAML, NAME = "table", "wide", "json", "yaml", "name"
_FORM: Final = "sla.form"
_NAMING: Final = "sla.naming"
_LISTS: Final = ("items", "applied", "approved", "revoked", "released", "ended", "certificates")
"""Keys under which an answer has its rows."""
_NAMED_BY: Final = (
    ("throttle_id", "throttle"),
    ("event_id", "event"),
    ("episode_id", "episode"),
    ("volume", "volume"),
    ("name", ""),
    ("address", "gateway"),
    ("backend", "backend"),
    ("version", "policy"),
)
"""Key -> the kind of thing that it names; "": the kind is in the row."""


Naming = tuple[str, Callable[[dict[str, Any]], str]]
"""Kind of the rows ("": their commands take the name alone), and the name of one."""


class OutputForm(click.Choice[str]):
    """Takes every form; its value is what the command has to make, ``table`` or ``json``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``click.ParamType``."""
        form = super().convert(value, param, ctx)
        if ctx is not None:
            ctx.meta[_FORM] = form
        return TABLE if form in (TABLE, WIDE) else JSON


def _option(*forms: str) -> Callable[[FC], FC]:
    return click.option(
        "-o", "--output", type=OutputForm(forms), default=TABLE, show_default=True, help="Form of the answer."
    )


OUTPUT: Final = _option(TABLE, WIDE, JSON, YAML, NAME)
DATA_OUTPUT: Final = _option(TABLE, WIDE, JSON, YAML)
"""Of commands whose answer is about one thing, so that there is no name to print."""


def form() -> str:
    """The form that was asked for."""
    context = click.get_current_context(silent=True)
    return str(context.meta.get(_FORM, TABLE)) if context is not None else TABLE


def is_wide() -> bool:
    """Whether a table may be as wide as it is."""
    return form() == WIDE


def set_naming(kind: str, name: Callable[[dict[str, Any]], str]) -> None:
    """Say of what kind rows are that do not say it themselves, and how commands call one, for ``-o name``."""
    click.get_current_context().meta[_NAMING] = kind, name


def print_json(value: Any) -> None:
    """Print for programs: JSON, or the form that ``-o`` names instead of it."""
    asked = form()
    if asked == NAME:
        for name in names_of(value, click.get_current_context().meta.get(_NAMING)):
            click.echo(name)
    else:
        click.echo(as_yaml(value) if asked == YAML else json.dumps(value, indent=2), nl=asked != YAML)


def as_yaml(value: Any) -> str:
    """The value as YAML, keys in their order."""
    from io import StringIO

    from ruamel.yaml import YAML as Writer  # slow to import, and only this form needs it

    text = StringIO()
    writer = Writer(typ="rt", pure=True)
    writer.width = 1 << 16
    # Plain data: what is there twice is written twice, not as anchor and alias.
    writer.representer.ignore_aliases = lambda _data: True
    writer.representer.add_representer(type(None), _null)
    writer.dump(value, text)
    return text.getvalue().removesuffix("...\n")


def _null(representer: Any, _value: None) -> Any:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")


def print_record(row: dict[str, Any]) -> None:
    """Print one of many rows as it comes: a line of JSON, or an entry of a YAML list."""
    click.echo(as_yaml([row]) if form() == YAML else json.dumps(row), nl=form() != YAML)


def names_of(value: Any, naming: Naming | None = None) -> Iterator[str]:
    """``kind/name`` of each thing in an answer, once; what has no name is left out."""
    rows = value if isinstance(value, list) else next((value[key] for key in _LISTS if key in value), [value])
    known = set[str]()
    for row in rows:
        found = _name_of(row, naming) if isinstance(row, dict) else str(row)
        if found and found not in known:
            known.add(found)
            yield found


def _name_of(row: dict[str, Any], naming: Naming | None) -> str:
    if naming is not None:
        kind, name = naming
        return f"{kind}/{name(row)}" if kind and name(row) else name(row)
    for key, named in _NAMED_BY:
        if (value := row.get(key)) not in (None, ""):
            kind = named or str(row.get("kind") or "").lower()
            return f"{kind}/{value}" if kind else str(value)
    return ""

"""Kinds of things as people type them: in the singular or the plural, as with kubectl.

A kind that is not there is answered with those whose names are near it; one that is looked after by another
command is answered with that command.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, Final, NoReturn

import click

from pmdaemon.runtime.command_group import Commands
from sla_server.cli.errors import BadUsage

PLURALS: Final = {
    "agreement": "slas",
    "agreements": "slas",
    "maintenances": "maintenance",
    "policy": "policies",
    "process": "processes",
    "trends": "trend",
}
"""Words whose plural, as it is listed, is not the word and an s."""
INSTEAD: Final = {
    ("delete", "volumes"): "sla volumes revoke VOLUME",
    ("delete", "policies"): "sla policy rollback",
    ("delete", "events"): "sla ack EVENT --note TEXT",
    ("describe", "slices"): "sla get slices AGREEMENT",
    ("describe", "periods"): "sla get periods AGREEMENT",
    ("describe", "streams"): "sla get streams VOLUME",
    ("describe", "clients"): "sla get clients VOLUME",
    ("describe", "decisions"): "sla why VOLUME --at TIME",
    ("describe", "hours"): "sla get hours AGREEMENT",
    ("describe", "promises"): "sla describe sla AGREEMENT",
    ("describe", "rates"): "sla get rates VOLUME",
    ("describe", "loads"): "sla get loads BACKEND",
    ("describe", "trend"): "sla get trend AGREEMENT",
}
"""(group, kind) -> the command that does it."""


def plural_of(word: str) -> str:
    """The name under which a kind is listed, of its singular, its plural or another word for it."""
    word = word.lower()
    return PLURALS.get(word) or (word if word.endswith("s") or word in PLURALS.values() else f"{word}s")


def singular_of(kind: str) -> str:
    """One of a kind that is listed under its plural."""
    return {"policies": "policy", "processes": "process"}.get(kind, kind.removesuffix("s"))


SHORTEST_PART: Final = 2  # letters; one is in nearly every name


def near(word: str, names: Iterable[str]) -> str:
    """Names like this one as a sentence; "" for none."""
    known = list(names)
    found = difflib.get_close_matches(word, known, 3)
    if not found and len(word) >= SHORTEST_PART:  # a part of a name is what somebody remembers of it
        found = sorted((name for name in known if word in name), key=lambda name: (name.find(word), name))[:3]
    return f"Near it: {', '.join(found)}" if found else ""


_NAMED: Final = "sla.named"


def named_with_kind() -> tuple[str, ...]:
    """The name in KIND/NAME, if it was written so."""
    found: tuple[str, ...] = click.get_current_context().meta.get(_NAMED, ())
    return found


def bare_name(kind: str, name: str) -> str:
    """A name without its kind before it, as ``-o name`` prints it."""
    word, slash, rest = name.partition("/")
    return rest if slash and rest and plural_of(word) == kind else name


OTHER_WORDS: Final = {
    "list": "get",
    "ls": "get",
    "show": "describe",
    "info": "describe",
    "create": "apply",
    "add": "apply",
    "edit": "apply",
    "set": "apply",
    "remove": "delete",
    "rm": "delete",
    "docs": "explain",
    "watch": "top",
    "limit": "throttle",
    "versions": "history",
    "acknowledge": "ack",
}
"""Words of other programs for our commands."""
OF_THE_SERVER: Final = ("start", "stop", "status", "restart")


def meant(word: str, commands: Iterable[str]) -> str:
    """What to write in place of a word that is no command, as a sentence."""
    if word in OF_THE_SERVER:
        return f"The server has it: sla-server {'stop, then start' if word == 'restart' else word}"
    if plural_of(word) in ("slas", "events", "episodes", "pools", "jobs", "backends", "processes", "nodes"):
        return f"To list them: sla get {plural_of(word)}"
    commands = list(commands)
    known = OTHER_WORDS.get(word)
    if known in commands:
        return f"Write: sla {known}"
    return near(word, commands) or "sla --help lists them"


class KindType(click.Choice[str]):
    """A kind of thing, in the singular or the plural; its value is the plural."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """See ``click.ParamType``; of KIND/NAME the name is kept for ``named_with_kind``."""
        word, _, name = str(value).partition("/")
        if ctx is not None:
            ctx.meta[_NAMED] = (name,) if name else ()
        kind = plural_of(word)
        if kind not in self.choices:
            listed = ", ".join(self.choices)
            said = near(kind, self.choices)
            self.fail(f"{word[:40]!r} is no kind. {said or f'There are {listed}'}.", param, ctx)
        return kind

    def get_missing_message(self, param: click.Parameter, ctx: click.Context | None) -> str:
        """See ``click.Choice``."""
        return f"There are {', '.join(self.choices)}."


class KindGroup(Commands):
    """Commands named after one of a kind (``sla delete route``), which take the plural, too."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """See ``click.Group``."""
        found = super().get_command(ctx, cmd_name)
        return found or super().get_command(ctx, singular_of(plural_of(cmd_name)))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """See ``click.Group``.

        Raises:
            BadUsage: another command does this for such a kind.
        """
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            word, slash, name = args[0].partition("/")
            if not (slash and name and self.get_command(ctx, word)):
                self._refuse(word)
            args = [word, name, *args[1:]]  # KIND/NAME
        return super().resolve_command(ctx, args)

    def _refuse(self, word: str) -> NoReturn:
        kind, group = plural_of(word), str(self.name)
        listed = ", ".join(sorted(self.commands))
        if instead := INSTEAD.get((group, kind)):
            raise BadUsage(f"sla {group} is for {listed}; of {kind} use: {instead}")
        said = near(singular_of(kind), self.commands) or f"Write the kind first: sla {group} KIND {word[:40]}"
        raise BadUsage(f"sla {group} is for {listed}, not {word[:40]!r}{f'. {said}' if said else ''}")

"""Completion in a shell: scripts, and the names of things from the server.

The shell waits for every answer, so the server has a second for it, and whatever goes wrong means that there
is nothing to offer. The token is not needed: names are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import click
from click.shell_completion import CompletionItem, get_completion_class

from pmdaemon.errors import SlaError

TIMEOUT_S: Final = 1.0
MOST: Final = 1000
SHELLS: Final = {
    "bash": 'eval "$(sla completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(sla completion zsh)" in ~/.zshrc, after compinit',
    "fish": "sla completion fish > ~/.config/fish/completions/sla.fish",
}
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def names(kind: str) -> Completer:
    """Completes names of one kind, as it is listed."""

    def complete(
        context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return _items(known_names(context, kind, incomplete))

    return complete


def kind_or_name(kinds: Sequence[str]) -> Completer:
    """Completes kinds, and behind KIND/ the names of that kind."""

    def complete(
        context: click.Context, _parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from sla_server.cli.kinds import plural_of

        word, slash, beginning = incomplete.partition("/")
        if slash:
            found = known_names(context, plural_of(word), beginning)
            return _items(f"{word}/{name}" for name in found)
        return _items(kind for kind in kinds if kind.startswith(incomplete))

    return complete


def names_of_kind(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes names of the kind that stands before them."""
    return _items(known_names(context, str(context.params.get("kind") or ""), incomplete))


def volumes_and_agreements(
    context: click.Context, _parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Completes names of both, for ``sla why``."""
    return _items(name for kind in ("volumes", "slas") for name in known_names(context, kind, incomplete))


def known_names(context: click.Context, kind: str, beginning: str) -> list[str]:
    """Names that begin so; none if the server does not answer in time."""
    from sla_server.cli.client import Client
    from sla_server.cli.formatting import throttled
    from sla_server.cli.tables import KINDS

    root = context.find_root()
    listed = KINDS.get(kind)
    if listed is None:
        return []
    if listed.of:  # what is of an agreement or a volume has no name of its own
        return known_names(
            context, {"VOLUME": "volumes", "BACKEND": "backends"}.get(listed.of, "slas"), beginning
        )
    query: dict[str, Any] = {"limit": MOST} if listed.is_paged else {}
    if kind == "slas":
        query = {"limit": MOST} | ({"match": beginning} if beginning else {})
    try:
        given = (root.params.get(name) for name in ("server", "token_file", "config", "ca_file"))
        client = root.obj or Client.find(*given)
        client.timeout_s = TIMEOUT_S
        rows = client.get(listed.path, **query)[listed.rows]
    except (SlaError, OSError, ValueError, KeyError):
        return []
    found = (throttled(row) if kind == "throttles" else str(row.get(listed.key) or "") for row in rows)
    return [name for name in dict.fromkeys(found) if name and name.startswith(beginning)]


def _items(found: Iterable[str]) -> list[CompletionItem]:
    return [CompletionItem(name) for name in found]


@click.command()
@click.argument("shell", type=click.Choice(list(SHELLS)))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the script that lets a shell complete commands and names.

    bash: eval "$(sla completion bash)" in ~/.bashrc. zsh: eval "$(sla completion zsh)" in ~/.zshrc, after
    compinit. fish: sla completion fish > ~/.config/fish/completions/sla.fish

    Names come from the server that SLA_SERVER, SLA_CONFIG or the options before the command name, if it
    answers within a second.
    """
    found = get_completion_class(shell)
    assert found is not None  # a shell of the choice above
    click.echo(found(context.find_root().command, {}, "sla", "_SLA_COMPLETE").source())

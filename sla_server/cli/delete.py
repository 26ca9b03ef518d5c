"""``sla delete``: end what is in force, by name, by label, or as a file of documents names it.

Each thing is ended by a call of its own. What was ended is reported at once; what could not be ended, or has
no answer yet, does not keep the others, and is said at the end with status 1 or 75.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

import click

from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.completion import names as names_in_shell
from sla_server.cli.errors import BadUsage, Pending, RequestRefused
from sla_server.cli.formatting import OUTPUT, pass_client, print_json
from sla_server.cli.kinds import KindGroup, bare_name, near, singular_of
from sla_server.cli.labels import check_labels
from sla_server.rows import Row


@dataclass(frozen=True, slots=True)
class Ending:
    """How one kind of thing is ended.

    Attributes:
        listing: where those in force are listed.
        path: of one of them; ``{}`` is its name.
        about: for the help.
        key: of its name in the list.
    """

    listing: str
    path: str
    about: str
    key: str = "name"


ENDINGS: Final = {
    "slas": Ending("/slas", "/slas/{}", "End agreements; what was judged stays stored."),
    "calendars": Ending("/calendars", "/calendars/{}", "End calendars that no agreement in force names."),
    "volumelabels": Ending(
        "/volume-labels",
        "/volume-labels/{}",
        "End documents that label volumes: agents' labels hold again.",
    ),
    "recipients": Ending("/recipients", "/recipients/{}", "End recipients that no route or silence names."),
    "routes": Ending("/routes", "/routes/{}", "End routes: their events go to their recipients no more."),
    "maintenance": Ending(
        "/maintenance",
        "/maintenance/{}",
        "End maintenance now; of work that repeats, every occurrence to come, too.",
    ),
    "silences": Ending(
        "/silences", "/silences/{}", "End silences now; of those that repeat, every occurrence to come, too."
    ),
    "throttles": Ending(
        "/throttles",
        "/throttles",
        "Release throttles set by hand: NAME is a volume, 'group NAME', 'client NAME', or a throttle's id.",
        "volume",
    ),
    "gateways": Ending(
        "/gateway-list",
        "/gateway-list/{}",
        "Dial gateways no more: NAME is the address (IP:PORT) or the name of one that is dialled.",
        "address",
    ),
}
ORDER: Final = ("SLA", "Maintenance", "Silence", "Route", "Recipient", "Calendar", "VolumeLabels")
"""Kinds of documents, those that name others first."""
_PLURALS: Final = {
    "SLA": "slas",
    "Maintenance": "maintenance",
    "Silence": "silences",
    "Route": "routes",
    "Recipient": "recipients",
    "Calendar": "calendars",
    "VolumeLabels": "volumelabels",
}
PAGE: Final = 1000
DRY_RUN: Final = click.option("--dry-run", is_flag=True, help="Say what would be ended; change nothing.")


@click.group(cls=KindGroup, invoke_without_command=True)
@click.option("-f", "--file", "path", help="End every document that this file of YAML names; - reads stdin.")
@DRY_RUN
@OUTPUT
@click.pass_context
def delete(context: click.Context, path: str | None, dry_run: bool, output: str) -> None:
    """End agreements, calendars, maintenance, throttles and more.

    By name (sla delete sla A B), by label (sla delete sla -l tier=test), or as a file names them (-f FILE).
    """
    if context.invoked_subcommand is not None:
        if path is not None:
            raise BadUsage("give either -f FILE or a kind and names")
        return
    if path is None:
        raise BadUsage(f"say what to end: sla delete KIND NAME, or -f FILE. Kinds: {', '.join(ENDINGS)}")
    from sla_server.cli.documents import load_file  # the models of documents, for this form only

    documents = [(item.document.kind, item.document.name) for item in load_file(path, 1)]
    documents.sort(key=lambda each: ORDER.index(each[0]))
    things = [(_PLURALS[kind], name) for kind, name in documents]
    _end_all(context.obj, things, dry_run=dry_run, output=output)


def _command(kind: str, ending: Ending) -> click.Command:
    """``sla delete KIND``."""

    def run(client: Client, /, names: tuple[str, ...], dry_run: bool, output: str, **given: Any) -> None:
        labels = given.get("labels")
        if (labels is None) == (not names):
            also = ", or -l LABELS" if kind == "slas" else ""
            raise BadUsage(f"say which {kind} to end: sla delete {singular_of(kind)} NAME...{also}")
        chosen: Iterable[str] = (bare_name(kind, name) for name in names)
        if labels is not None:
            check_labels(labels)
            chosen = [str(row["name"]) for row in client.get("/slas", labels=labels)["items"]]
            if not chosen:
                raise RequestRefused(404, {"detail": f"no agreement in force has the labels {labels}"})
        _end_all(client, [(kind, name) for name in chosen], dry_run=dry_run, output=output)

    run.__doc__ = ending.about
    command: Any = DRY_RUN(OUTPUT(pass_client(run)))
    if kind == "slas":
        labels = click.option(
            "-l",
            "--selector",
            "labels",
            metavar="LABELS",
            help="Those with these labels: tier in (test,old).",
        )
        command = labels(command)
    names = click.argument("names", nargs=-1, metavar="NAME...", shell_complete=names_in_shell(kind))
    return click.command(singular_of(kind))(names(command))


for _kind, _ending in ENDINGS.items():
    delete.add_command(_command(_kind, _ending))


def _end_all(client: Client, things: Sequence[tuple[str, str]], *, dry_run: bool, output: str) -> None:
    """End each thing, and say so.

    Raises:
        RequestRefused: some could not be ended, and why.
        Pending: the server has taken them all, and has not answered yet for some; the list says which.
    """
    ended: list[Row] = []
    refused: list[RequestRefused] = []
    pending: list[Pending] = []
    things_in_force = _InForce(client)
    try:
        for kind, name in things:
            state = "would be ended" if dry_run else "ended"
            try:
                found = name
                if dry_run or kind in ("throttles", "gateways"):
                    found = things_in_force.find(kind, name)
                if not dry_run:
                    _end(client, kind, found, things_in_force)
            except RequestRefused as exc:
                refused.append(exc)
                continue
            except Pending as exc:
                pending.append(exc)
                state = "pending"
                client.awaits_pending = False  # services that are away answer none of the others sooner
            ended.append({"kind": singular_of(kind), "name": name, "state": state})
            if output != "json":
                click.echo(f"{name}: {state}")
    finally:  # also where the server went away: what was ended is ended
        if output == "json":
            print_json(ended)
    if len(refused) == 1:
        raise refused[0]
    if refused:
        said = "\n  ".join(str(one) for one in refused)
        problem = f"{len(refused)} of {len(things)} were not ended:\n  {said}"
        raise RequestRefused(refused[0].status, {"detail": problem})
    if pending:
        raise pending[0]


class _InForce:
    """What is in force, of kinds whose names must be looked up; each list is read once, to its end."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._rows: dict[str, list[Row]] = {}

    def rows(self, kind: str) -> list[Row]:
        """All of a kind; throttles come a page after the other."""
        if kind not in self._rows:
            listing, rows = ENDINGS[kind].listing, list[Row]()
            query: dict[str, Any] = {"in_force": "1", "limit": PAGE} if kind == "throttles" else {}
            before: str | None = None
            while True:
                page = self._client.get(listing, **query, **({"before": before} if before else {}))
                rows += page["items"]
                before = page.get("next") if kind == "throttles" else None
                if before is None:
                    break
            self._rows[kind] = rows
        return self._rows[kind]

    def find(self, kind: str, name: str) -> str:
        """What the call that ends it has to name.

        Raises:
            RequestRefused: there is none of this name.
        """
        ending, rows = ENDINGS[kind], self.rows(kind)
        for row in rows:
            called = {str(row.get(key)) for key in (ending.key, "name", "throttle_id") if row.get(key)}
            if kind == "throttles":
                called.add(formatting.throttled(row))
            if name in called:
                return str(row[ending.key]) if kind == "gateways" else name
        fix = near(name, (str(row[ending.key]) for row in rows if row.get(ending.key)))
        problem = f"no {singular_of(kind)} {name[:200]!r} is in force"
        raise RequestRefused(404, {"detail": problem, "fix": fix or f"'sla get {kind}' lists what there is"})


def _end(client: Client, kind: str, name: str, in_force: _InForce) -> None:
    if kind != "throttles":
        client.change("DELETE", ENDINGS[kind].path.format(quote(name, safe="")))
        return
    if any(row.get("throttle_id") == name for row in in_force.rows(kind)):
        client.change("DELETE", f"/throttles/{quote(name, safe='')}")
        return
    what, _, of_what = name.partition(" ")  # of a group or a whole client: no name of a volume has a space
    volume, _, of_client = name.partition("/")
    params = {what: of_what} if of_what else {"volume": volume}
    client.change("DELETE", "/throttles", params=params | ({"client": of_client} if of_client else {}))

"""``sla cluster account``: named users of the message system, and what their roles let them do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pmdaemon.pki.authority import Authority
from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.files import write_whole
from sla_server.cli.cluster_node import ask, copies, print_answers, resolved
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import Column, build, console
from sla_server.cli.output import DATA_OUTPUT, print_json

if TYPE_CHECKING:
    from sla_server.cluster.admin import Admin
    from sla_server.cluster.commands import Answers
    from sla_server.cluster.shared import SharedDocument

ACCOUNTS: Final = (
    Column("ACCOUNT", lambda row, _now_us: str(row["name"])),
    Column("ROLES", lambda row, _now_us: ", ".join(row["roles"])),
)
ROLE = click.option("--role", "roles", multiple=True, metavar="ROLE", help="May be given more than once.")


@click.group(cls=Commands)
def account() -> None:
    """Accounts: who may connect, and what each may do.

    Roles are admin, monitor, producer:SELECTOR and consumer:SELECTOR; a selector is a destination, or a
    pattern of destinations: orders.*, orders.>, glob:orders.?u, regex:orders.(eu|us).
    """


@account.command()
@click.argument("name")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@ROLE
def add(name: str, file: Path, roles: tuple[str, ...]) -> None:
    """Make the account NAME, and write FILE with all that its program needs. FILE is a secret."""
    from sla_server.cluster import account_file, accounts, membership

    config, own, directory = resolved()
    accounts.check_name(name)
    accounts.check_roles(name, roles)
    if file.exists():
        raise BadUsage(f"{file} exists; choose another name, or delete it first")
    member, secret = membership.load(own, directory), accounts.new_secret()
    authority = Authority(config.ca_dir, config.pmdaemon.tls.lifetime_s)
    text = account_file.text(own, name, secret, authority)
    made = accounts.Account(name, roles, accounts.seal(secret, member.secrets))

    def added(body: Mapping[str, Any]) -> Mapping[str, Any]:
        if name in body:
            raise BadUsage(f"there is an account {name}; 'sla cluster account role' changes its roles")
        return {**body, name: accounts.entry_of(made)}

    write_whole(file, text)
    try:
        is_done = _change(added)
    except (
        BadUsage
    ):  # nothing was changed; after any other failure the account may exist, and this be its only secret
        file.unlink(missing_ok=True)
        raise
    click.echo(f"{file} written, mode 0600; carry it to the program that is {name}, then delete it here")
    if not is_done:
        raise SystemExit(1)


@account.command("list")
@DATA_OUTPUT
def list_(output: str) -> None:
    """List accounts with their roles."""
    from sla_server.cluster import accounts, documents

    async def read(admin: Admin) -> SharedDocument:
        return (await documents.newest(await admin.client(), accounts.DOCUMENT))[0]

    document = ask(read)
    rows = [
        {"name": found.name, "roles": list(found.roles)}
        for found in sorted(accounts.accounts_of(document.body).values(), key=lambda found: found.name)
    ]
    if output == "json":
        print_json({"revision": document.revision, "accounts": rows})
    else:
        console().print(build(ACCOUNTS, rows, 0))


@account.command()
@click.argument("name")
def remove(name: str) -> None:
    """Remove the account NAME; its connections end at once."""

    def removed(body: Mapping[str, Any]) -> Mapping[str, Any]:
        _check_known(name, body)
        return {key: value for key, value in body.items() if key != name}

    if not _change(removed):
        raise SystemExit(1)


@account.command()
@click.argument("name")
@ROLE
@click.option("--add", "added", multiple=True, metavar="ROLE", help="Keep the others.")
def role(name: str, roles: tuple[str, ...], added: tuple[str, ...]) -> None:
    """Give the account NAME these roles, at once and without a restart."""
    from sla_server.cluster import accounts

    if bool(roles) == bool(added):
        raise BadUsage("give either all roles with --role, or further ones with --add")

    def changed(body: Mapping[str, Any]) -> Mapping[str, Any]:
        _check_known(name, body)
        wanted = roles or tuple(dict.fromkeys((*body[name]["roles"], *added)))
        accounts.check_roles(name, wanted)
        return {**body, name: {**body[name], "roles": list(wanted)}}

    if not _change(changed):
        raise SystemExit(1)


def _check_known(name: str, body: Mapping[str, Any]) -> None:
    if name not in body:
        raise BadUsage(f"there is no account {name}; there are {', '.join(sorted(body)) or 'none'}")


def _change(changed: Any) -> bool:
    """Change the accounts on all nodes, say how many have them in force; returns whether all have."""
    from sla_server.cluster import accounts, documents

    _, own, _ = resolved()

    async def change(admin: Admin) -> tuple[SharedDocument, Answers]:
        return await documents.change(await admin.client(), accounts.DOCUMENT, changed, copies(own))

    document, answers = ask(change)
    print_answers(answers, lambda answer: f"revision {answer.result.get('revision')}")
    click.echo(f"revision {document.revision} of the accounts holds in the cluster")
    return answers.is_done

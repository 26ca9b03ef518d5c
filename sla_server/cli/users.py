"""``sla user`` and ``sla token``: who may come in, and which programs."""

from __future__ import annotations

import sys
import time
from typing import Any, Final
from urllib.parse import quote

import click

from pmdaemon.runtime.command_group import Commands
from sla_server.cli import formatting
from sla_server.cli.client import Client
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import OUTPUT, Column, FiniteRange, build, console, pass_client, print_json
from sla_server.cli.output import set_naming
from sla_server.rows import Row

ROLES: Final = click.Choice(["viewer", "operator", "admin"])
ROLE: Final = click.option(
    "--role", type=ROLES, required=True, help="viewer reads, operator changes, admin decides who may."
)
LABELS: Final = click.option(
    "--labels", metavar="KEY=VALUE,...", help="Only agreements with these labels are seen; for viewers."
)
PASSWORD: Final = click.option("--password-stdin", is_flag=True, help="Read the password from the input.")
DASH: Final = formatting.DASH
USER_COLUMNS: Final = (
    Column("NAME", lambda row, _now_us: str(row["name"])),
    Column("ROLE", lambda row, _now_us: str(row["role"])),
    Column("LABELS", lambda row, _now_us: str(row.get("labels") or DASH)),
    Column("STATE", lambda row, _now_us: str(row["state"])),
    Column("SINCE", lambda row, _now_us: formatting.when(row.get("created_us"))),
)
SESSION_COLUMNS: Final = (
    Column("SESSION", lambda row, _now_us: str(row["session_id"])[:12]),
    Column("ACCOUNT", lambda row, _now_us: str(row.get("account") or row.get("made_by") or DASH)),
    Column("FROM", lambda row, _now_us: str(row.get("address") or DASH)),
    Column("SINCE", lambda row, _now_us: formatting.when(row.get("created_us"))),
    Column("ENDS", lambda row, _now_us: formatting.when(row.get("expires_us"))),
)
TOKEN_COLUMNS: Final = (
    Column("TOKEN", lambda row, _now_us: str(row["token_id"])),
    Column("NAME", lambda row, _now_us: str(row["name"])),
    Column("ROLE", lambda row, _now_us: str(row["role"])),
    Column("LABELS", lambda row, _now_us: str(row.get("labels") or DASH)),
    Column("BY", lambda row, _now_us: str(row.get("created_by") or DASH)),
    Column("ENDS", lambda row, _now_us: formatting.when(row.get("ends_us") or row.get("expires_us"))),
)


def _path(name: str) -> str:
    return quote(name, safe="")


def _password(*, from_stdin: bool, prompt: str = "Password") -> str:
    """A password, typed twice or piped in; it is in no command line and in no environment."""
    if from_stdin:
        return sys.stdin.readline().rstrip("\r\n")
    if not sys.stdin.isatty():
        raise BadUsage("there is no terminal to ask for a password; pipe it in with --password-stdin")
    typed: str = click.prompt(prompt, hide_input=True, confirmation_prompt=True)
    return typed


def _show(rows: list[Row], columns: tuple[Column, ...], output: str, empty: str) -> None:
    if output == "json":
        print_json(rows)
    elif rows:
        console().print(build(columns, rows, time.time_ns() // 1000))
    else:
        click.echo(empty)


@click.group(cls=Commands)
def user() -> None:
    """Accounts of people: list, add, change, passwd, disable, delete, and their sessions."""


@user.command("list")
@OUTPUT
@pass_client
def list_(client: Client, output: str) -> None:
    """List the accounts."""
    rows = client.ask("/users")["items"]
    _show(rows, USER_COLUMNS, output, "There is no account. Make one: sla user add NAME --role viewer")


@user.command()
@click.argument("name")
@ROLE
@LABELS
@PASSWORD
@pass_client
def add(client: Client, name: str, role: str, labels: str | None, password_stdin: bool) -> None:
    """Make the account NAME; asks for its password, of 12 characters at least."""
    body: dict[str, Any] = {"name": name, "role": role, "password": _password(from_stdin=password_stdin)}
    if labels:
        body["labels"] = labels
    client.change("POST", "/users", json=body)
    click.echo(f"{name}: {role}" + (f", sees agreements with {labels}" if labels else ""))


@user.command("change")
@click.argument("name")
@click.option("--role", type=ROLES, help="viewer reads, operator changes, admin decides who may.")
@LABELS
@pass_client
def change_(client: Client, name: str, role: str | None, labels: str | None) -> None:
    """Give NAME another role, or other labels ('' for none); its sessions end."""
    body = {key: value for key, value in (("role", role), ("labels", labels)) if value is not None}
    if not body:
        raise BadUsage("give --role or --labels")
    answer = client.change("PUT", f"/users/{_path(name)}", json=body)
    click.echo(f"{name}: {answer.get('role', role)}; its sessions have ended")


@user.command()
@click.argument("name")
@PASSWORD
@pass_client
def passwd(client: Client, name: str, password_stdin: bool) -> None:
    """Set the password of NAME; its sessions end."""
    password = _password(from_stdin=password_stdin, prompt="New password")
    client.change("PUT", f"/users/{_path(name)}/password", json={"password": password})
    click.echo(f"{name}: the password was changed; its sessions have ended")


@user.command()
@click.argument("name")
@pass_client
def disable(client: Client, name: str) -> None:
    """Let NAME sign in no more, until it is enabled again; its sessions end."""
    client.change("PUT", f"/users/{_path(name)}", json={"enabled": False})
    click.echo(f"{name}: disabled; its sessions have ended. Undo it: sla user enable {name}")


@user.command()
@click.argument("name")
@pass_client
def enable(client: Client, name: str) -> None:
    """Let a disabled NAME sign in again."""
    client.change("PUT", f"/users/{_path(name)}", json={"enabled": True})
    click.echo(f"{name}: enabled")


@user.command()
@click.argument("name")
@pass_client
def delete(client: Client, name: str) -> None:
    """End the account NAME and its sessions; the audit log keeps the name."""
    client.change("DELETE", f"/users/{_path(name)}")
    click.echo(f"{name}: deleted")


@user.command()
@click.option("--account", metavar="NAME", help="Only those of this account.")
@OUTPUT
@pass_client
def sessions(client: Client, account: str | None, output: str) -> None:
    """List the browsers that are signed in."""
    set_naming("", lambda row: str(row["session_id"]))
    rows = client.ask("/sessions", **({"account": account} if account else {}))["items"]
    _show(rows, SESSION_COLUMNS, output, "No browser is signed in.")


@user.command("sign-out")
@click.argument("who", metavar="NAME|SESSION")
@click.option("--session", "is_session", is_flag=True, help="It is a session (sla user sessions).")
@pass_client
def sign_out(client: Client, who: str, is_session: bool) -> None:
    """Sign the account NAME out everywhere, or end one SESSION."""
    if is_session:
        client.change("DELETE", f"/sessions/{_path(who)}")
        click.echo(f"session {who}: ended")
        return
    ended = client.change("DELETE", "/sessions", params={"account": who}).get("ended")
    click.echo(f"{who}: signed out everywhere ({ended} sessions)")


@click.group(cls=Commands)
def token() -> None:
    """API tokens of programs: list, create, revoke."""


@token.command("list")
@OUTPUT
@pass_client
def list_tokens(client: Client, output: str) -> None:
    """List the tokens that can be used; their secrets are stored nowhere."""
    rows = client.ask("/tokens")["items"]
    _show(rows, TOKEN_COLUMNS, output, "There is no API token. Make one: sla token create NAME --role viewer")


@token.command()
@click.argument("name")
@ROLE
@LABELS
@click.option("--days", type=FiniteRange(0.01, 3650), default=90.0, show_default=True, help="Its life.")
@click.option("-q", "--quiet", is_flag=True, help="Print the token alone.")
@pass_client
def create(client: Client, name: str, role: str, labels: str | None, days: float, quiet: bool) -> None:
    """Make a token for the program NAME, and print it: this once."""
    body: dict[str, Any] = {"name": name, "role": role, "days": days}
    if labels:
        body["labels"] = labels
    answer = client.change("POST", "/tokens", json=body)
    click.echo(answer["token"])
    if not quiet:
        ends_us = answer.get("ends_us") or answer["expires_us"]
        until = formatting.when(ends_us)
        if ends_us < answer["expires_us"]:  # who made it signs in through a provider
            until = (
                f"{formatting.when(answer['expires_us'])}, but no longer than {until} unless "
                f"{answer['created_by']} signs in again before"
            )
        click.echo(
            f"token {answer['token_id']} of {name}, {role}, good until {until}. It is shown this once: "
            "give it to the program as SLA_TOKEN, or as 'Authorization: Bearer TOKEN'",
            err=True,
        )


@token.command()
@click.argument("which", metavar="NAME|TOKEN_ID")
@pass_client
def revoke(client: Client, which: str) -> None:
    """End a token at once."""
    answer = client.change("DELETE", f"/tokens/{_path(which)}")
    click.echo(f"token {answer.get('token_id', which)} of {answer.get('name', which)}: revoked")

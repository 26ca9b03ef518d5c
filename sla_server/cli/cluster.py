"""``sla cluster``: the nodes that carry messages between servers.

Membership (``init``, ``invite``, ``join``, ``leave``) is about this machine's files. The rest asks the nodes
themselves, with the secrets of this machine's node: it works on any member, also while no server runs here.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.config import parse_address
from pmdaemon.runtime.files import write_whole
from sla_server import directories
from sla_server.cli import formatting
from sla_server.cli.ca import authority_of
from sla_server.cli.cluster_account import account
from sla_server.cli.cluster_dmq import dmq
from sla_server.cli.cluster_log import log
from sla_server.cli.cluster_mirror import MIRRORS, mirror, mirror_json
from sla_server.cli.cluster_node import ask, copies, print_answers, resolved
from sla_server.cli.cluster_subscriber import subscriber
from sla_server.cli.errors import BadUsage
from sla_server.cli.formatting import Column, build, console
from sla_server.cli.output import DATA_OUTPUT, print_json
from sla_server.cluster import essentials, membership, parameters
from sla_server.cluster.shared import SharedDocument

if TYPE_CHECKING:  # nats and asyncio's client, for the commands that ask nodes
    from sla_server.cluster.admin import Admin, ClusterState, NodeRow
    from sla_server.cluster.commands import Answers, NodeAnswer

NODES: Final = (
    Column("NODE", lambda row, _now_us: str(row["name"])),
    Column("SITE", lambda row, _now_us: str(row["site"])),
    Column("STATE", lambda row, _now_us: str(row["state"])),
    Column("ENGINE", lambda row, _now_us: str(row["version"])),
    Column("CLIENTS", lambda row, _now_us: str(row["connections"]), number=True),
    Column("STORED", lambda row, _now_us: formatting.size(row["stored_bytes"]), number=True),
    Column("DIGEST", lambda row, _now_us: str(row["digest"])),
)
STREAMS: Final = (
    Column("STREAM", lambda row, _now_us: str(row["name"])),
    Column("LEADER", lambda row, _now_us: str(row["leader"] or "none")),
    Column("COMPLETE", lambda row, _now_us: ", ".join(row["current"])),
    Column("BEHIND", lambda row, _now_us: ", ".join(row["behind"])),
    Column("MESSAGES", lambda row, _now_us: f"{row['messages']:,}", number=True),
    Column("STORED", lambda row, _now_us: formatting.size(row["stored_bytes"]), number=True),
)
PARAMETERS: Final = (
    Column("PARAMETER", lambda row, _now_us: str(row["parameter"])),
    Column("HERE", lambda row, _now_us: str(row["here"])),
    Column("DIFFERS ON", lambda row, _now_us: str(row["differs"])),
)
ACQUIRABLE: Final = (
    Column("ACQUIRABLE", lambda row, _now_us: str(row["name"])),
    Column("VALUE", lambda row, _now_us: str(row["value"])),
    Column("DEFAULT", lambda row, _now_us: str(row["default"])),
    Column("MEANING", lambda row, _now_us: str(row["meaning"])),
)


@click.group(cls=Commands)
def cluster() -> None:
    """Nodes that carry messages between servers: make, join, look, move, drain.

    docs/operations/cluster.md begins with three nodes in five minutes.
    """


cluster.add_command(account)
cluster.add_command(dmq)
cluster.add_command(log)
cluster.add_command(mirror)
cluster.add_command(subscriber)


@cluster.command()
def init() -> None:
    """Make a new cluster with this machine's node as its first member."""
    config, own, directory = resolved()
    membership.init(own, directory, authority_of(config))
    click.echo(f"cluster {own.name} made; its secrets are in {directory}, mode 0700")
    for peer in own.peers:
        click.echo(f"for {peer.name}: sla cluster invite {peer.name} {peer.name}.invitation")
    click.echo("then: sla-server start, or sla-server node on a machine without a server")


@cluster.command()
@click.argument("node")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def invite(node: str, file: Path) -> None:
    """Write FILE, with which NODE becomes a member. It is a secret: carry it safely, then delete it.

    For a node that is one, this one too, it has a new certificate: 'sla cluster join --again' there.
    """
    config, own, directory = resolved()
    text = membership.invitation(own, directory, authority_of(config), node)
    if file.exists():
        raise BadUsage(f"{file} exists; choose another name, or delete it first")
    write_whole(file, text)
    if node == own.node:
        click.echo(f"{file} written, mode 0600. Here: sla cluster join --again {file}; then restart the node")
        return
    click.echo(f"{file} written, mode 0600. On {node}: sla cluster join {file.name}")
    click.echo(f"The table of {node} must list this node:\n")
    host = parse_address(own.listen)[0]
    click.echo(
        f'  [[cluster.peers]]\n  name = "{own.node}"\n  listen = "{own.listen}"\n  routes = "{own.routes}"'
    )
    if host == "127.0.0.1":
        click.echo("\nThese are addresses of this machine alone; nodes elsewhere cannot reach them", err=True)


@cluster.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--again", is_flag=True, help="Replace the credentials that are here, for a new certificate.")
def join(file: Path, again: bool) -> None:
    """Become a member with FILE, which 'sla cluster invite' has made."""
    _, own, directory = resolved()
    membership.join(own, directory, file, again=again)
    click.echo(f"{own.node} is a member of {own.name}. Delete {file}; then: sla-server start")


@cluster.command()
@click.argument("node", required=False)
@click.option("--yes", is_flag=True, help="Do not ask before what is stored here is removed.")
@click.option("--lose", is_flag=True, help="Also if it may have the only copy of a stream.")
def leave(node: str | None, yes: bool, lose: bool) -> None:
    """Have the cluster forget NODE, which does not run; without NODE: this machine's.

    This machine's credentials and what its engine stored are removed. The copies of streams that NODE had are
    made again on other nodes, where there are enough.
    """
    _, own, directory = resolved()
    name = node or own.node
    if name == own.node:
        if (pid := directories.running_pid(directory)) is not None:
            raise BadUsage(
                f"{name} runs here, process {pid}. Drain and stop it first: sla cluster drain {name}"
            )
        if not yes:
            click.confirm(f"Remove {directory}'s credentials and all that is stored there?", abort=True)
    if own.peers:
        ask(lambda admin: admin.forget(name, lose=lose))
    if name == own.node:
        membership.leave(directory)
    click.echo(f"{name} has left the cluster {own.name}")


@cluster.command()
@DATA_OUTPUT
def status(output: str) -> None:
    """List nodes and streams, and what is in trouble.

    Ends with status 0 if all is well, 1 if something is in trouble, 69 if no node answers.
    """
    state: ClusterState = ask(lambda admin: admin.state())
    if output == "json":
        print_json(_as_json(state))
    else:
        _print(state)
    if not state.is_well:
        raise SystemExit(1)


@cluster.command()
@click.argument("node", required=False)
def drain(node: str | None) -> None:
    """Have NODE (default: this machine's) hand over all that it leads, before it is stopped."""
    _, own, _ = resolved()
    name = node or own.node
    moved = ask(lambda admin: admin.drain(name))
    for subject in moved:
        click.echo(f"  handed over: {_what(subject)}")
    if alone := ask(lambda admin: admin.only_on(name)):
        click.echo(f"{name} has the only copy of {', '.join(alone)}, which stops while {name} does")
    else:
        click.echo(f"{name} leads nothing; it may be stopped")


@cluster.command()
@click.argument("stream")
@click.option("--to", default="", metavar="NODE", help="The node that should lead it.")
def stepdown(stream: str, to: str) -> None:
    """Have the leader of STREAM hand over to another node."""
    after = ask(lambda admin: admin.stepdown(stream, to))
    click.echo(f"stream {stream} is led by {after.leader}")


@cluster.group(invoke_without_command=True)
@DATA_OUTPUT
@click.pass_context
def config(context: click.Context, output: str) -> None:
    """Show parameters: the essential ones with nodes that differ, and the acquirable ones.

    Ends with status 1 if a node differs.
    """
    if context.invoked_subcommand is not None:
        return
    _, own, _ = resolved()
    here = essentials.of(own)
    rows, answers = ask(_nodes_and_documents)
    others = {row.name: essentials.differences(here, row.parameters) for row in rows if row.name != own.node}
    held = {answer.node: _parameters(answer) for answer in answers.rows}
    newest = max(held.values(), key=lambda document: document.revision, default=SharedDocument())
    behind = sorted(node for node, document in held.items() if document.revision < newest.revision)
    acquired = parameters.values(newest.body)
    if output == "json":
        print_json(
            {
                "parameters": here,
                "digest": essentials.digest(here),
                "differences": others,
                "acquirable": acquired,
                "revision": newest.revision,
                "behind": behind,
            }
        )
    else:
        table = [
            {
                "parameter": key,
                "here": value,
                "differs": ", ".join(
                    f"{name} ({found[key][1] or 'not set'})" for name, found in others.items() if key in found
                ),
            }
            for key, value in sorted(here.items())
        ]
        console().print(build(PARAMETERS, table, 0))
        click.echo(f"digest {essentials.digest(here)}; {len(rows)} nodes answered\n")
        rows_of_values = [
            {
                "name": name,
                "value": acquired[name],
                "default": parameter.default,
                "meaning": parameter.meaning,
            }
            for name, parameter in parameters.PARAMETERS.items()
        ]
        console().print(build(ACQUIRABLE, rows_of_values, 0))
        click.echo(f"revision {newest.revision}; change one: sla cluster config set NAME=VALUE")
        if behind:
            click.echo(f"an earlier revision holds on {', '.join(behind)}")
    if any(others.values()) or behind:
        raise SystemExit(1)


@config.command("set")
@click.argument("assignments", metavar="NAME=VALUE...", nargs=-1, required=True)
def set_(assignments: tuple[str, ...]) -> None:
    """Change acquirable parameters on all nodes at once, while they run.

    Each node keeps them in a file of its own, so they outlive a restart of all; one that is away takes them
    when it starts. Ends with status 1 if a node that runs has not taken them.
    """
    from sla_server.cluster import documents

    changes = parameters.parse(assignments)
    _, own, _ = resolved()

    async def change(admin: Admin) -> tuple[SharedDocument, Answers]:
        return await documents.change(
            await admin.client(), parameters.DOCUMENT, lambda body: {**body, **changes}, copies(own)
        )

    document, answers = ask(change)
    print_answers(answers, lambda answer: f"revision {answer.result.get('revision')}")
    click.echo(f"revision {document.revision} holds in the cluster")
    if not answers.is_done:
        raise SystemExit(1)


@cluster.command()
@click.argument("name", default="ping")
@click.option("--node", "nodes", multiple=True, metavar="NODE", help="Only these; default: all that run.")
@DATA_OUTPUT
def command(name: str, nodes: tuple[str, ...], output: str) -> None:
    """Have nodes carry out the command NAME (default: ping), and say how many answered of how many.

    Ends with status 1 if one has not.
    """
    from sla_server.cluster import commands

    async def carried_out(admin: Admin) -> Answers:
        return await commands.ask(await admin.client(), name, {}, nodes=nodes)

    answers = ask(carried_out)
    if output == "json":
        print_json({"expected": answers.expected, "answers": [asdict(answer) for answer in answers.rows]})
    else:
        print_answers(answers, lambda answer: json.dumps(answer.result, sort_keys=True))
    if not answers.is_done:
        raise SystemExit(1)


async def _nodes_and_documents(admin: Admin) -> tuple[tuple[NodeRow, ...], Answers]:
    from sla_server.cluster import commands, documents

    return await admin.nodes(), await commands.ask(await admin.client(), documents.GET, {})


def _parameters(answer: NodeAnswer) -> SharedDocument:
    try:
        return SharedDocument.parse(answer.result[parameters.DOCUMENT])
    except (KeyError, ValueError):  # of another release
        return SharedDocument()


def _as_json(state: ClusterState) -> dict[str, Any]:
    return {
        "is_well": state.is_well,
        "leader": state.leader,
        "missing": list(state.missing),
        "trouble": state.trouble,
        "nodes": [{**asdict(node), "digest": node.digest} for node in state.nodes],
        "streams": [asdict(stream) for stream in state.streams],
        "mirrors": [mirror_json(row) for row in state.mirrors],
    }


def _print(state: ClusterState) -> None:
    rows: list[dict[str, Any]] = [
        {**asdict(node), "digest": node.digest, "state": _state_of(node, state.leader)}
        for node in state.nodes
    ]
    rows += [
        {
            "name": name,
            "site": "",
            "state": "does not run",
            "version": "",
            "connections": "",
            "stored_bytes": None,
            "digest": "",
        }
        for name in state.missing
    ]
    console().print(build(NODES, rows, 0))
    if state.streams:
        console().print(build(STREAMS, [asdict(stream) for stream in state.streams], 0))
    if state.mirrors:
        console().print(build(MIRRORS, [mirror_json(row) for row in state.mirrors], 0))
    for text in troubles(state):
        click.echo(f"in trouble: {text}")


def _state_of(node: NodeRow, leader: str) -> str:
    if not node.is_storing:
        return "stores nothing"
    return "leads" if node.name == leader else "runs"


def troubles(state: ClusterState) -> list[str]:
    """What is wrong, a line each."""
    lines = [f"{name} does not run" for name in state.missing]
    lines += [
        f"{name} stores nothing: its engine has turned storage off, as it does when its disk is full. Make "
        "room there, then restart the node"
        for name in state.not_storing
    ]
    if not state.leader:
        lines.append("no node leads the cluster: a majority of its nodes is missing")
    if state.trouble:
        lines.append(state.trouble)
    if state.mixed:
        lines.append("essential parameters differ between nodes: 'sla cluster config' names them")
    for stream in state.streams:
        if not stream.leader:
            lines.append(f"stream {stream.name} has no leader and takes no messages")
        elif stream.behind:
            lines.append(f"copies of stream {stream.name} are behind on {', '.join(stream.behind)}")
    return lines


def _what(subject: str) -> str:
    if ".META." in subject:
        return "the lead of the cluster"
    kind, _, name = subject.removeprefix("$JS.API.").partition(".LEADER.STEPDOWN.")
    return f"{kind.lower()} {name.replace('.', ' / ')}"

"""``gateway-agent``: the command."""

from __future__ import annotations

from pmdaemon.runtime import lean_structlog  # noqa: F401 - before structlog: see there

# isort: split
import json
import time
from pathlib import Path

import click

from gateway_agent import agent, cgroups, upgrade
from gateway_agent.config import load_agent, parse_server
from gateway_agent.errors import GroupUnusable, ReloadFailed, UpgradeFailed
from gateway_agent.link import state_files
from gateway_agent.reload import check_files, files_in_use
from pmdaemon.errors import ConfigError
from pmdaemon.runtime import logs
from pmdaemon.runtime.command_group import Commands
from pmdaemon.runtime.config import show
from pmdaemon.runtime.failures import outermost

CONFIG = click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="storage-sla-server")
def cli() -> None:
    """Serve block volumes to applications and keep count of every I/O for the SLA server."""


@cli.command()
@CONFIG
@click.option("--show-config", is_flag=True, help="Print the values in force and exit.")
@click.option("--check-config", is_flag=True, help="Say whether the configuration is valid and exit.")
@click.option(upgrade.PROBE, "is_probe", is_flag=True, hidden=True)  # see there
def run(path: Path, show_config: bool, check_config: bool, is_probe: bool) -> None:
    """Run the agent in the foreground: its data planes and its link to the SLA server."""
    with outermost("gateway-agent"):
        left = upgrade.left_by_former()
        config = load_agent(path if left is None else Path(left.running))
        if show_config:
            click.echo(show(config), nl=False)
        elif check_config:
            config.check_certificates()
            check_files(config.export)
            for problem in files_in_use(config.export):
                click.echo(f"warning: {problem}", err=True)
            planes, volumes = len(config.plane), len(config.export)
            click.echo(f"{path}: valid; {_counted(planes, 'data plane')}, {_counted(volumes, 'volume')}")
        else:
            logs.configure("gateway-agent")
            agent.run(config, path, left)


@cli.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
def release(path: Path) -> None:
    """Take away the limits of control groups and of QEMU that an agent left which was killed."""
    with outermost("gateway-agent"):
        config = load_agent(path)
        problems = cgroups.release((each.group, each.device) for each in config.cgroup)
        places = [place for entry in config.qemu for place in entry.places()]
        if places:
            from gateway_agent import qmp  # asyncio, which the other commands need not have

            problems += qmp.release(places)
        if problems:
            raise GroupUnusable("release", "; ".join(problems))
        found = [_counted(len(config.cgroup), "control group")] if config.cgroup or not places else []
        found += [_counted(len(places), "QEMU volume")] if places else []
        click.echo(f"no limits are left on {' and '.join(found)}")


@cli.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), help="The agent's TOML file; gives state_dir."
)
@click.option("--state-dir", type=click.Path(path_type=Path), help="state_dir, where there is no file yet.")
@click.option("--server", required=True, metavar="HOST:PORT", help="The SLA server's pmdaemon.listen.")
@click.option(
    "--token",
    required=True,
    envvar="SLA_ENROL_TOKEN",
    help="What `sla ca token` printed; good once. Or SLA_ENROL_TOKEN, which ps does not show.",
)
@click.option("--fingerprint", required=True, help="Of the server's CA, as `sla ca token` printed it.")
def enrol(path: Path | None, state_dir: Path | None, server: str, token: str, fingerprint: str) -> None:
    """Obtain this gateway's certificate with a one-time token. Renewal is automatic from then on."""
    from gateway_agent import enrol as enrolment  # cryptography and numpy, which run does not need

    with outermost("gateway-agent"):
        if path is not None:
            config = load_agent(path)
            state_dir = state_dir or config.state_dir
        if state_dir is None:
            raise ConfigError(
                "enrol", "where to keep the certificate is unknown", "Give --config or --state-dir"
            )
        try:
            where, pin = parse_server(server), enrolment.normal_fingerprint(fingerprint)
        except ValueError as exc:
            raise ConfigError("enrol", str(exc)) from exc
        state_files.make_private_directory(state_dir)
        credential = enrolment.enrol(state_dir, state_files.gateway_id(state_dir), where, token, pin)
        days = (credential.not_after_us - credential.not_before_us) / 86_400e6
        click.echo(
            f"enrolled as {credential.name} ({credential.gateway_id}); "
            f"certificate for {days:.0f} days, renewed by itself"
        )
        click.echo(f'In the agent\'s file: name = "{credential.name}", server = "{server}", tls = true')


@cli.command(name="reload")
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
def reload_file(path: Path) -> None:
    """Let the agent on this host read its file again. Clients of exports that stay see nothing of it.

    The agent checks the whole file first; one with a mistake changes nothing. It also reads the file by
    itself when it has changed, and at SIGHUP.
    """
    from gateway_agent import status  # numpy, which run does not need

    with outermost("gateway-agent"), status.as_one_line():
        record = status.reload(status.runtime_dir_of(path))
        for line in status.reload_lines(record, time.time_ns() // 1000):
            click.echo(line)
        if record["state"] not in ("applied", "unchanged"):
            raise SystemExit(ReloadFailed.exit_status)


@cli.command(name="upgrade")
@CONFIG
def upgrade_agent(path: Path) -> None:
    """Let the release that is installed now take the place of the agent that runs. No connection is refused.

    The new release checks the configuration first. Then it takes over the sockets, and clients that are
    connected may stay with the former processes for drain_s; then they are asked to connect again.
    """
    from gateway_agent import status  # see above

    with outermost("gateway-agent"), status.as_one_line():
        found = status.upgrade(status.runtime_dir_of(path))
        for line in status.upgrade_lines(found, time.time_ns() // 1000):
            click.echo(line)
        if found["upgrade"]["state"] != "done":
            raise SystemExit(UpgradeFailed.exit_status)


@cli.command(name="status")
@click.option(
    "--config", "path", type=click.Path(path_type=Path), required=True, help="The agent's TOML file."
)
@click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Form of the answer.",
)
def show_status(path: Path, output: str) -> None:
    """What the agent on this host does: volumes, clients, caps, the link to the server. Needs no server."""
    from gateway_agent import status  # see above

    with outermost("gateway-agent"), status.as_one_line():
        found = status.gather(status.runtime_dir_of(path))
        if output == "json":
            planes = {name: each.document() for name, each in found["planes"].items()}
            click.echo(json.dumps(found | {"planes": planes}, indent=2))
        else:
            for line in status.lines(found, time.time_ns() // 1000):
                click.echo(line)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"

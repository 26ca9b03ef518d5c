"""``sla policy``: run the Spark job here and now, and list what was published.

The job is a command of its own, as under a timer; this one starts it, shows its output as it comes, and asks
the server afterwards to load the new version at once (it does so by itself within ten seconds).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from pmdaemon.runtime.stop import end_with_parent
from sla_server.cli.client import Client
from sla_server.cli.errors import CliError, JobFailed
from sla_server.cli.formatting import CONFIG, OUTPUT, pass_client
from sla_server.cli.get import get


@click.group()
def policy() -> None:
    """Compute policies from what was stored, and list them."""


def job_command(config: Path | None) -> list[str]:
    """The job's command line."""
    command = [sys.executable, "-m", "sla_server.policy_jobs.job"]
    return [*command, "--config", str(config)] if config else command


@policy.command("run")
@CONFIG
@pass_client
def run(client: Client, config: Path | None) -> None:
    """Run the policy job and have its result put in force."""
    click.echo("policy job: starting Spark; this takes a minute at most on small data", err=True)
    # A session of its own: Ctrl-C reaches this command alone, and the job ends with it, however it ends.
    try:
        status = subprocess.run(
            job_command(config or client.config),
            check=False,
            start_new_session=True,
            preexec_fn=end_with_parent,
        ).returncode
    except KeyboardInterrupt:
        click.echo("interrupted; the policy in force stays", err=True)
        raise SystemExit(130) from None
    if status:
        raise JobFailed(status)
    try:
        answer = client.change("POST", "/policies/announce")
    except CliError as exc:
        # The job has ended well: the version is stored, and the server finds it by itself.
        click.echo(
            f"the policy is stored; the server will look for it within 10 s by itself ({exc})", err=True
        )
        return
    version = (answer or {}).get("version")
    click.echo(f"policy version {version} announced" if version else "no new policy version to put in force")


@policy.command("list")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Versions shown.")
@OUTPUT
@click.pass_context
def list_policies(context: click.Context, limit: int, output: str) -> None:
    """List policy versions, newest first."""
    context.invoke(get, kind="policies", limit=limit, output=output)

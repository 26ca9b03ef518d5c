"""The back-test job: ``python -m sla_server.policy_jobs.back_test_job --config FILE``. A plain command.

It replays the last days (``back_test``) with the policy in force and without any, and notes in ``jobs`` what
came of it: agreements and loads change after a policy is published. Nothing is published or withdrawn, and
Spark is not started. A crash leaves the row ``running``, which the next run corrects.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import click

from pmdaemon.errors import SlaError
from pmdaemon.runtime import logs
from pmdaemon.runtime.stop import end_with_parent
from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import open_policies
from sla_server.policy_jobs import back_test, publishing
from sla_server.policy_jobs.job import NICER, only_one, status_of, stopped_in_order

KIND: Final = "back-test"


def run(config: configuration.ResolvedConfig, who: str, now_us: int | None = None) -> dict[str, Any]:
    """One whole run: ``version`` (None: no policy is in force), and the fields of ``back_test.made``.

    Raises:
        JobRunning, UnreadableAgreement, NoRightToPublish, DatabaseUnavailable, NoDatabaseYet: nothing was
            tested.
    """
    now_us = now_us or time.time_ns() // 1000
    check_made(config.database, config.data_dir)
    with (
        only_one(config.data_dir / "back-test-job" / "lock", KIND),
        closing(open_policies(config.database, config.data_dir, acting_fence(config))) as store,
    ):
        store.check_may_publish()
        with publishing.noted(store, who, status_of, KIND) as noted:
            in_force = store.reader.policy_in_force()
            if in_force is None:
                found: dict[str, Any] = {"version": None, "reason": "no policy is in force"}
            else:
                caps = store.reader.policy_caps(in_force["version"])
                noted.version = in_force["version"]
                tested = back_test.made(store, config, caps, now_us, against_in_force=False)
                found = {"version": in_force["version"], **tested}
            noted.note(found["reason"], rows=found.get("new", {}).get("ios", 0))
    return found


def describe(found: dict[str, Any]) -> str:
    """The result for people."""
    if found["version"] is None:
        return "no policy is in force: there is nothing to test"
    return "\n".join([f"policy version {found['version']}, in force:", *back_test.describe(found)])


@click.command()
@click.option(
    "--config", "path", type=click.Path(path_type=Path), envvar="SLA_CONFIG", help="The server's TOML file."
)
@click.option(
    "-o", "output", type=click.Choice(["table", "json"]), default="table", help="Form of the answer."
)
@click.option("--scheduled", is_flag=True, hidden=True, help="Started by the server.")
def main(path: Path | None, output: str, scheduled: bool) -> None:
    """Replay the last days with the policy in force and without it."""
    logs.configure("back-test-job")
    try:
        config = configuration.load(path)
        if scheduled:
            end_with_parent()
            os.nice(NICER)
        who = "schedule" if scheduled else os.environ.get("USER", "back-test-job")
        with stopped_in_order():
            found = run(config, who)
    except SlaError as exc:
        click.echo(f"back-test job: {exc}", err=True)
        raise SystemExit(status_of(exc)) from exc
    click.echo(json.dumps(found) if output == "json" else describe(found))


if __name__ == "__main__":
    main()

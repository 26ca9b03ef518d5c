"""The back-test job: ``python -m sla_server.policy_jobs.back_test_job --config FILE``. A plain command.

It replays the last days (``back_test``) with the policy in force and without any, and notes in ``jobs`` what
came of it: agreements and loads change after a policy is published. Nothing is published or withdrawn, and
Spark is not started. A crash leaves the row ``running``, which the next run corrects.
"""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any, Final

from sla_server import config as configuration
from sla_server.db.engine import check_made
from sla_server.db.fence import acting_fence
from sla_server.db.policies import open_policies
from sla_server.jobs import JobAnswer, as_process, job_command, noted, only_one
from sla_server.policy_jobs import back_test

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
        with noted(store, KIND, who) as noted_run:
            in_force = store.reader.policy_in_force()
            if in_force is None:
                found: dict[str, Any] = {"version": None, "reason": "no policy is in force"}
            else:
                noted_run.version = in_force["version"]
                caps = partial(store.reader.capped_hours, in_force["version"])
                tested = back_test.made(store, config, caps, now_us, against_in_force=False)
                found = {"version": in_force["version"], **tested}
            noted_run.note(found["reason"], rows=found.get("new", {}).get("ios", 0))
    return found


def describe(found: dict[str, Any]) -> str:
    """The result for people."""
    if found["version"] is None:
        return "no policy is in force: there is nothing to test"
    return "\n".join([f"policy version {found['version']}, in force:", *back_test.describe(found)])


@job_command("back-test-job")
def main(config: configuration.ResolvedConfig, who: str) -> JobAnswer:
    """Replay the last days with the policy in force and without it."""
    found = run(config, who)
    return JobAnswer(found, describe(found))


if __name__ == "__main__":
    as_process(main)

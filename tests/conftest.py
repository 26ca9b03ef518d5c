"""Settings of all tests: property tests judge results, not the speed of a shared machine."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import socket
from collections.abc import Generator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from sla_server.policy_jobs import class_archive

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared-machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("shared-machine")  # the same examples in every run; `make fuzz` searches for others

# Spark on a few rows spends most CPU on compiling its code well, on collectors for all processors, and on
# reading and verifying the classes of its own jars (half of what each of some thirty starts takes).
os.environ.setdefault(
    "JAVA_TOOL_OPTIONS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote "
    + class_archive.java_options(),
)

# A shell without job control starts its background jobs with SIGINT ignored; children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse the basetemp of a run that goes on: pytest would empty it under that one's feet."""
    given = config.option.basetemp
    if given is None or hasattr(config, "workerinput"):
        return
    name = hashlib.sha256(os.path.abspath(given).encode()).hexdigest()
    held = socket.socket(socket.AF_UNIX)
    config.add_cleanup(held.close)
    try:
        held.bind(f"\0sla-tests-{name}")  # it is free again when this process ends, however that is
    except OSError as exc:
        raise pytest.UsageError(f"--basetemp {given} is used by another run; name another one") from exc


# Each of these is a minute or more of one worker: begun last, it would be alone in the end.
SPARK = "tests/integration/sla_server/policy_jobs"
LONGEST = (
    f"{SPARK}/test_topologies.py",
    f"{SPARK}/test_job.py",
    f"{SPARK}/test_rollup_job.py",
    f"{SPARK}/test_transforms.py",
    "tests/e2e/test_policy.py",
    "tests/e2e/test_tls.py",
    "tests/e2e/test_dashboard.py",
    "tests/e2e/test_cycle.py",
    "tests/e2e/test_views.py",
    "tests/crash/test_relay_kills.py",
    "tests/e2e/test_hung_parts.py",
    "tests/e2e/test_first_steps.py",
    "tests/e2e/test_storage_faults.py",
    "tests/e2e/test_recovery.py",
    "tests/integration/gateway_agent/test_upgrade.py",
    "tests/integration/sla_server/db/test_backup.py",
    "tests/integration/sla_server/db/queries/test_plans.py",
    "tests/integration/sla_server/db/test_full_disk.py",
    "tests/e2e/test_delivery.py",
    "tests/integration/sla_server/relay/test_relay.py",
    "tests/integration/sla_server/events/test_pair.py",
    "tests/integration/sla_server/cluster/test_administration.py",
    "tests/integration/sla_server/cluster/test_local_cluster.py",
    "tests/integration/sla_server/cluster/messages/test_messages.py",
)
ONE_SESSION = {f"{SPARK}/test_rollup_job.py": LONGEST[1], f"{SPARK}/test_transforms.py": LONGEST[1]}
"""Files that one worker runs with another: the Spark session that each worker would start is started once."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: workers take files in this order."""
    place = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one worker, and files of ``ONE_SESSION`` to the same."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:  # each of xdist's own schedulers overrides it, too
            path = super()._split_scope(nodeid)
            return ONE_SESSION.get(path, path)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and items only ever grow: to walk through them again and again for garbage finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from what was imported and collected: it would walk that again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _logging_as_at_the_start() -> None:
    """What a test before set up, or only looked at with ``capture_logs``, makes commands keep it."""
    structlog.reset_defaults()

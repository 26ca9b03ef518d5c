"""Settings of all tests: property tests judge results, not the speed of a shared machine."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import socket
from collections.abc import Generator

import pytest
import structlog
from hypothesis import HealthCheck, settings

settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared-machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("shared-machine")  # the same examples in every run; `make fuzz` searches for others

# Spark on a few rows spends most CPU on compiling its code well, and on collectors for all processors.
os.environ.setdefault("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

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
LONGEST = (
    "tests/integration/sla_server/policy_jobs/test_topologies.py",
    "tests/e2e/test_cycle.py",
    "tests/e2e/test_policy.py",
    "tests/integration/sla_server/policy_jobs/test_job.py",
    "tests/crash/test_relay_kills.py",
    "tests/integration/sla_server/db/queries/test_plans.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: workers take files in this order."""
    place = {path: number for number, path in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(LONGEST)))


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

"""Whether what a run of the policy job found is published.

What was found is published if the back-test says that it helps, or if nothing is capped by it. Else it is
stored as ``rejected`` with the same report, which says why: it can be looked at, and put in force by a pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sla_server.db.policies import PUBLISHED, REJECTED, PolicyStore
from sla_server.jobs import JobRun

KIND: Final = "policy"
NOT_PUBLISHED: Final = 81
"""Exit status of a run that found a policy which does not help."""


def publish(
    store: PolicyStore,
    run: JobRun,
    caps: Iterable[dict[str, Any]],
    back_test: Mapping[str, Any],
    **columns: Any,
) -> int:
    """Store what was found under the next version, published or rejected as the back-test says.

    Args:
        store: where to.
        run: gets the version and the exit status.
        caps: as ``PolicyStore.publish`` takes them.
        back_test: what it found; ``publish`` says whether, ``reason`` why.
        columns: job, report and published_by of ``PolicyStore.publish``.
    """
    is_good = bool(back_test["publish"])
    report = {**columns.pop("report"), "back_test": dict(back_test)}
    state = PUBLISHED if is_good else REJECTED
    run.version = store.publish(caps, report=report, state=state, **columns)
    run.exit_status = 0 if is_good else NOT_PUBLISHED
    run.note(str(back_test["reason"]))
    return run.version

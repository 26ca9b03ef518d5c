"""What the job makes of the tables before Spark sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sla_server.agreements.promise import classes, promises
from sla_server.db.policies import StoredStatistics
from sla_server.policy_jobs.errors import UnreadableAgreement
from sla_server.policy_jobs.inputs import JobInputs, on_one_backend, read
from sla_server.policy_jobs.job import status_of
from sla_server.policy_jobs.transforms import STREAM_COLUMNS
from tests.support.agreements import in_force, simple

STREAMS = pa.table(
    {
        "stream_id": [1, 2, 3],
        "gateway_id": ["g", "g", "g"],
        "volume": ["vol-1", "vol-1", "vol-2"],
        "client": ["left-long-ago", "host-a", "host-a"],
        "backend": ["old-array", "new-array", "old-array"],
    }
)


def test_a_volume_that_was_moved_lies_on_one_backend() -> None:
    volumes = pa.table({"volume": ["vol-1"], "backend": ["new-array"]})
    moved = on_one_backend(STREAMS, volumes)
    assert moved.column_names == list(STREAM_COLUMNS)
    assert moved["backend"].to_pylist() == ["new-array", "new-array", "old-array"]


def test_a_volume_is_protected_if_a_client_of_it_is_covered() -> None:
    items = [in_force(simple(volumes="vol-*", clients="left-*"))]
    empty = STREAMS.slice(0, 0)
    read = JobInputs(empty, empty, empty, STREAMS, promises(items), classes(items), {})
    assert read.protected == {"vol-1"}
    assert JobInputs(empty, empty, empty, STREAMS, [], [], {}).protected == frozenset()


class OldStore:
    """A database whose agreement in force is of another release."""

    reader: Any

    def __init__(self, spec: dict[str, Any]) -> None:
        row = {"name": "gold", "version": 3, "spec": spec, "applied_us": 1, "ended_us": None}
        self.reader = SimpleNamespace(agreements=lambda in_force: [row] if in_force else [])

    def statistics(self, *_: Any) -> StoredStatistics:
        table = pa.table({"slot_us": [1]})
        return StoredStatistics(table, table, table, [], [], 0)


def test_an_agreement_of_another_release_is_named_with_the_way_out() -> None:
    store: Any = OldStore({**in_force(simple()).agreement.spec_json(), "of_old": 1})
    with pytest.raises(UnreadableAgreement, match=r"gold version 3 .*of_old.*`sla apply") as caught:
        read(store, 1, 7)
    assert status_of(caught.value) == 65

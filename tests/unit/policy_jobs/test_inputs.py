"""What the job makes of the tables before Spark sees them."""

from __future__ import annotations

import pyarrow as pa

from sla_server.agreements.compile import classes, promises
from sla_server.policy_jobs.inputs import Inputs, on_one_backend
from sla_server.policy_jobs.schema import STREAM_COLUMNS
from tests.unit.agreements.documents import in_force, simple

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
    read = Inputs(empty, empty, empty, STREAMS, promises(items), classes(items), {})
    assert read.protected == {"vol-1"}
    assert Inputs(empty, empty, empty, STREAMS, [], [], {}).protected == frozenset()

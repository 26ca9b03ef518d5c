"""What the driver makes of agreements and streams before Spark sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sla_server.db.statistics import Files
from sla_server.policy_jobs.errors import NothingToLearn, UnreadableAgreement
from sla_server.policy_jobs.inputs import read
from sla_server.policy_jobs.job import status_of
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


def snapshot(rows: int = 1) -> Any:
    return SimpleNamespace(
        rows=lambda _table: rows,
        slot_files=Files(),
        streams=STREAMS,
        volumes=pa.table({"volume": ["vol-1"], "backend": ["new-array"], "size_bytes": [1]}),
    )


class OldStore:
    """A database whose agreement in force is of another release."""

    reader: Any

    def __init__(self, spec: dict[str, Any]) -> None:
        row = {"name": "gold", "version": 3, "spec": spec, "applied_us": 1, "ended_us": None}
        self.reader = SimpleNamespace(
            agreements=lambda in_force: [row] if in_force else [], policies=lambda limit: []
        )


def test_names_are_matched_once_each() -> None:
    spec = in_force(simple(volumes="vol-*", clients="left-*")).agreement.spec_json()
    found = read(OldStore(spec), snapshot(), 7)  # type: ignore[arg-type]
    assert found.scope.volumes.to_pylist() == [
        {"promise": 0, "volume": "vol-1"},
        {"promise": 0, "volume": "vol-2"},
    ]
    assert found.scope.clients.to_pylist() == [{"promise": 0, "client": "left-long-ago"}]
    assert found.streams.column_names == ["stream_id", "volume", "client", "backend"]
    assert found.former_capacity == {}


def test_an_empty_window_teaches_nothing() -> None:
    with pytest.raises(NothingToLearn):
        read(OldStore({}), snapshot(rows=0), 7)  # type: ignore[arg-type]


def test_an_agreement_of_another_release_is_named_with_the_way_out() -> None:
    store: Any = OldStore({**in_force(simple()).agreement.spec_json(), "of_old": 1})
    with pytest.raises(UnreadableAgreement, match=r"gold version 3 .*of_old.*`sla apply") as caught:
        read(store, snapshot(), 7)
    assert status_of(caught.value) == 65

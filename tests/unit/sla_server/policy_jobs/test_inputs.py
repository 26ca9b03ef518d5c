"""What the driver makes of agreements and streams before Spark sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sla_server.config import PolicyJobConfig
from sla_server.db.statistics import Files
from sla_server.jobs import status_of
from sla_server.policy_jobs import inputs
from sla_server.policy_jobs.errors import NoSuchCalendar, NothingToLearn, UnreadableAgreement
from sla_server.policy_jobs.inputs import read
from tests.support.agreements import in_force, simple
from tests.support.job_results import ResultsInMemory

STREAMS = pa.table(
    {
        "stream_id": [1, 2, 3],
        "gateway_id": ["g", "g", "g"],
        "volume": ["vol-1", "vol-1", "vol-2"],
        "client": ["left-long-ago", "host-a", "host-a"],
        "backend": ["old-array", "new-array", "old-array"],
    }
)


SETTINGS = PolicyJobConfig(time_zone="Asia/Tokyo")
DAY_US = 86_400_000_000
CHRISTMAS_US = 20_812 * DAY_US
WINDOW_US = (CHRISTMAS_US - 3 * DAY_US, CHRISTMAS_US + DAY_US)


def snapshot(rows: int = 1) -> Any:
    return SimpleNamespace(
        rows=lambda _table: rows,
        slot_files=Files(),
        hour_files=Files(),
        window_us=WINDOW_US,
        streams=STREAMS,
        volumes=pa.table({"volume": ["vol-1"], "backend": ["new-array"], "size_bytes": [1]}),
    )


CALENDAR = {
    "name": "office",
    "spec": {
        "apiVersion": "storage-sla/v1",
        "kind": "Calendar",
        "metadata": {"name": "office"},
        "spec": {
            "tz": "Europe/Berlin",
            "hours": [{"days": ["mon"], "from": "08:00", "to": "18:00"}],
            "holidays": ["2026-12-25"],
        },
    },
}


class OldStore:
    """A database whose agreement in force is of another release."""

    reader: Any
    results = ResultsInMemory()

    def __init__(self, spec: dict[str, Any]) -> None:
        row = {"name": "gold", "version": 3, "spec": spec, "applied_us": 1, "ended_us": None}
        self.reader = SimpleNamespace(
            agreements=lambda in_force: [row] if in_force else [],
            policies=lambda limit: [],
            pages=SimpleNamespace(label_rows=lambda: ([], [])),
            documents=lambda kind, in_force: [CALENDAR] if (kind, in_force) == ("Calendar", True) else [],
        )


def test_names_are_matched_once_each() -> None:
    spec = in_force(simple(volumes="vol-*", clients="left-*")).agreement.spec_json()
    found = read(OldStore(spec), snapshot(), SETTINGS)  # type: ignore[arg-type]
    assert found.scope.volumes.to_pylist() == [
        {"promise": 0, "volume": "vol-1"},
        {"promise": 0, "volume": "vol-2"},
    ]
    assert found.scope.clients.to_pylist() == [{"promise": 0, "client": "left-long-ago"}]
    assert found.streams.column_names == ["stream_id", "volume", "client", "backend"]
    assert found.former_capacity == {}


@pytest.mark.parametrize(("created_us", "steps"), [(2, {("array", "gold", "latency", 1): 400.0}), (0, {})])
def test_what_a_step_could_take_is_known_unless_its_agreement_was_changed_since(
    created_us: int, steps: dict[Any, float]
) -> None:
    store = OldStore(in_force(simple("gold", volumes="vol-1")).agreement.spec_json())
    step = {"backend": "array", "objective": "latency"}
    capacity = [
        {**step, "sla": "gold", "step": 0, "cost_per_s": None},
        {**step, "sla": "gold", "step": 1, "cost_per_s": 400.0},
        {**step, "sla": "ended", "step": 0, "cost_per_s": 100.0},
    ]
    store.reader.policies = lambda limit: [{"created_us": created_us, "report": {"capacity": capacity}}]
    found = read(store, snapshot(), SETTINGS)  # type: ignore[arg-type]
    assert found.former_capacity == {"array": 100.0}
    assert found.former_steps == steps


def test_demand_of_the_policy_in_force_is_that_of_its_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"volume": f"v{n}", "hour_of_week": n, "cost_per_s": 1.0, "demand_p95": None if n == 1 else 10.0 * n}
        for n in range(5)
    ]
    monkeypatch.setattr(inputs, "ROWS_AT_A_TIME", 2)
    reader = SimpleNamespace(policy_in_force=lambda: {"version": 7}, capped_hours=lambda version: iter(rows))
    store: Any = SimpleNamespace(reader=reader)
    found = inputs.demand_in_force(store)
    assert found.schema == inputs.WAS
    assert found["volume"].to_pylist() == ["v0", "v2", "v3", "v4"]
    assert found["was_p95"].to_pylist() == [0.0, 20.0, 30.0, 40.0]
    reader.policy_in_force = lambda: None
    assert inputs.demand_in_force(store).num_rows == 0


def test_an_empty_window_teaches_nothing() -> None:
    with pytest.raises(NothingToLearn):
        read(OldStore({}), snapshot(rows=0), SETTINGS)  # type: ignore[arg-type]


def test_an_agreement_of_another_release_is_named_with_the_way_out() -> None:
    store: Any = OldStore({**in_force(simple()).agreement.spec_json(), "of_old": 1})
    with pytest.raises(UnreadableAgreement, match=r"gold version 3 .*of_old.*`sla apply") as caught:
        read(store, snapshot(), SETTINGS)
    assert status_of(caught.value) == 65


def test_hours_are_those_of_the_agreements_on_a_backend_and_holidays_those_of_the_calendar() -> None:
    spec = in_force(simple(volumes="vol-1")).agreement.spec_json()
    spec["spec"]["window"] = {"type": "calendar", "period": "month", "tz": "Europe/Berlin"}
    settings = SETTINGS.model_copy(update={"calendar": "office"})
    found = read(OldStore(spec), snapshot(), settings)  # type: ignore[arg-type]
    zones = {row["backend"]: row["zone"] for row in found.hours.zones.to_pylist()}
    assert zones == {"new-array": "Europe/Berlin", "old-array": "Asia/Tokyo"}
    learned = {(row["zone"], row["begin_us"]): row["hour_of_week"] for row in found.hours.learned.to_pylist()}
    noon_us = CHRISTMAS_US + DAY_US // 2
    assert learned["Europe/Berlin", noon_us] == 6 * 24 + 13, "a holiday is a Sunday"
    assert learned["Europe/Berlin", noon_us - DAY_US] == 3 * 24 + 13


def test_a_calendar_that_is_not_in_force_is_said() -> None:
    spec = in_force(simple(volumes="vol-1")).agreement.spec_json()
    settings = SETTINGS.model_copy(update={"calendar": "feast"})
    with pytest.raises(NoSuchCalendar, match="'feast', and no Calendar document") as caught:
        read(OldStore(spec), snapshot(), settings)  # type: ignore[arg-type]
    assert status_of(caught.value) == 78

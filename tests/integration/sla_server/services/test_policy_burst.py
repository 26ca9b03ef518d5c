"""A burst of a published policy, all the way: SQL, the controller, message CAPS, the plane, and back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from gateway_agent.config import ExportConfig, PlaneConfig
from gateway_agent.nbd.plane import Plane
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.wire.messages.plane_sets import PlaneCaps
from sla_server.db import migrate
from sla_server.db.config import DatabaseConfig
from sla_server.db.engine import make_engine
from sla_server.db.policies import open_policies
from sla_server.services.store import SqlReads
from tests.support.worlds import A, Feeder, caps_of, controller, rows_of

CAP = {"volume": "v", "hour_of_week": 5, "cost_per_s": 100.0, "demand_p50": 1.0, "demand_p95": 2.0}


def admitted(plane: Plane, clock: FakeClock) -> int:
    """I/Os of one cost unit that pass at this moment."""
    rates, count = plane._exports.volumes["v"].rates, 0  # a plane's I/Os would take real time
    while rates.ready_ns() <= clock.monotonic_ns():
        rates.charge(clock.monotonic_ns(), 0, 1.0)
        count += 1
    return count


def test_a_published_burst_passes_and_then_the_rate_holds(tmp_path: Path) -> None:
    config = DatabaseConfig()
    engine = make_engine(config, tmp_path)
    migrate.upgrade(engine)
    engine.dispose()
    with closing(open_policies(config, tmp_path)) as store:
        version = store.publish([{**CAP, "burst_s": 4.0}], job={}, report={}, published_by="test")
        caps, bursts = SqlReads(store.reader).policy_caps(version, 5)
    fed = Feeder(controller((), (), "enforce"), (A, ("v",)))
    fed.controller.set_policy_caps(version, caps, bursts)
    message = caps_of(fed.step((A, {"v": (100, 1)}, 0)), A)

    (tmp_path / "disk").write_bytes(bytes(4096))
    clock = FakeClock()
    export = ExportConfig(volume="v", backend="b", file=str(tmp_path / "disk"))
    plane = Plane(PlaneConfig("nbd-0", [f"unix:{tmp_path}/x"], f"{tmp_path}/c", [export]), clock)
    with closing(plane):
        clock.advance(1)
        keys = {"gen": message.gen, "lease_us": message.lease_us, "caps": message.caps}
        plane.caps(PlaneCaps.parse(keys))
        assert admitted(plane, clock) == 401, "four seconds of the cap at once, and the one that is in debt"
        for _ in range(3):
            clock.advance(1)
            assert admitted(plane, clock) == 100, "then the rate"
        clock.advance(2)
        assert admitted(plane, clock) == 200, "what was not used is saved again"

    (row,) = rows_of(fed.step((A, {"v": (100, 1)}, message.gen)))
    assert (row["state"], row["source"], row["burst_s"]) == ("seen", "policy", 4.0), "confirmed, and kept"

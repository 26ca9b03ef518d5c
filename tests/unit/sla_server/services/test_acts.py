"""When what is asked for is done: with its record, or at once where it takes pressure off the I/O."""

from __future__ import annotations

import pytest

from pmdaemon.wire.kinds import Kind
from sla_server.services.startup import Start
from tests.support.services import GATEWAY, START_US, Bench

EXPORT = {"volume": "vol-1", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}
UP = {
    "gw": GATEWAY, "name": "host-1", "state": "up", "reason": "", "address": "", "software": "", "ep": 5,
    "at_us": START_US, "offset_us": 0, "exports": [EXPORT], "dropped": 0,
}  # fmt: skip


@pytest.mark.parametrize("body", [{"mode": "enforce"}, {"mode": "enforce", "backend": "array-1"}])
def test_nothing_is_enforced_whose_record_cannot_be_written(body: dict[str, str]) -> None:
    """Review, finding 13: it was in force, and in no audit log, while the answer said that it was not."""
    bench = Bench()
    before = bench.core.mode, bench.core.backend_modes
    bench.request("mode", body)
    assert (bench.core.mode, bench.core.backend_modes) == before, "its record is on its way"
    bench.confirm(ok=False, error="no space left on device")
    (answer,) = bench.answers()
    assert (answer["code"], answer["body"]["errors"][0]["problem"]) == (
        503,
        "not recorded: no space left on device",
    )
    assert (bench.core.mode, bench.core.backend_modes) == before
    bench.request("mode", body)
    bench.confirm()
    assert (bench.core.mode, bench.core.backend_modes) != before


def test_observe_is_there_at_once_and_the_answer_says_so_if_it_is_not_recorded() -> None:
    """What ends all throttling must not wait for a disk."""
    bench = Bench(Start(mode="enforce"))
    assert bench.core.mode == "enforce"
    bench.request("mode", {"mode": "observe"})
    assert bench.core.mode == "observe"
    bench.confirm(ok=False, error="no space left on device")
    (answer,) = bench.answers()
    said = answer["body"]["errors"][0]["problem"]
    assert (answer["code"], said) == (503, "it is done, but not recorded: no space left on device")
    assert bench.core.mode == "observe"


def test_enforce_that_observe_has_overtaken_is_not_done() -> None:
    bench = Bench()
    bench.request("mode", {"mode": "enforce"}, "r1")
    bench.request("mode", {"mode": "observe"}, "r2")
    bench.confirm()
    assert {answer["req"]: answer["code"] for answer in bench.answers()} == {"r1": 409, "r2": 200}
    assert bench.core.mode == "observe"


def test_no_throttle_is_set_whose_record_cannot_be_written_and_a_release_says_that_it_is_done() -> None:
    bench = Bench()
    bench.message(Kind.GATEWAY, UP)
    bench.tick()
    bench.confirm()
    bench.request("throttle_set", {"volume": "vol-1", "iops": 100, "reason": "noisy"})
    bench.confirm(ok=False, error="no room")
    (answer,) = bench.answers()
    assert answer["body"]["errors"][0]["problem"] == "not recorded: no room"
    assert "manual_set" not in bench.controller.names()
    bench.controller.released = ["t-1"]
    bench.request("throttle_release", {"volume": "vol-1", "throttle_id": None}, "r2")
    assert "manual_release" in bench.controller.names()
    bench.confirm(ok=False, error="no room")
    (answer,) = bench.answers()
    assert answer["body"]["errors"][0]["problem"] == "it is done, but not recorded: no room"

from __future__ import annotations

import msgpack

from .worlds import A, B, Desk, brain, promise, volume_class


def view():
    made = Desk(brain((promise(),), (volume_class(),)), (A, ("gold",)), (B, ("greedy", "spare")))
    for _ in range(2):
        made.step((A, {"gold": (80, 2)}, 0), (B, {"greedy": (400, 50)}, 0), held=3)
    made.brain.manual_set("t1", "greedy", cost_per_s=200, reason="too loud")
    made.step((A, {"gold": (80, 2)}, 0), (B, {"greedy": (400, 50)}, 0), held=3)
    return made.brain.snapshot(made.unix_us)


def test_volumes_over_the_last_cuts():
    found = {v["volume"]: v for v in view()["volumes"]}
    gold = found["gold"]
    assert (gold["iops"], gold["read_iops"], gold["write_iops"], gold["bytes_per_s"]) == (
        80,
        80,
        0,
        80 * 4096,
    )
    assert gold["p50_us"] == gold["p95_us"] > 2000  # upper edge of the bucket
    assert gold["gateways"] == [A]
    assert found["greedy"]["cap_cost_per_s"] == 200
    assert found["greedy"]["held"] == 3
    spare = found["spare"]
    assert (spare["iops"], spare["p95_us"], spare["cap_cost_per_s"]) == (0, None, None)


def test_agreements_throttles_gateways_and_backends():
    found = view()
    (sla,) = found["slas"]
    assert (sla["name"], sla["objective"], sla["state"], sla["priority"]) == ("gold", "latency", "ok", "gold")
    assert (sla["threshold_us"], sla["percentile"]) == (12_000, 95.0)
    (throttle,) = found["throttles"]
    assert throttle["text"] == "too loud"
    assert throttle["since_us"] == found["at_us"]
    assert {g["gateway_id"]: g["exports"] for g in found["gateways"]} == {A: 1, B: 2}
    (disk,) = found["backends"]
    assert disk["backend"] == "disk"
    assert disk["cost_per_s"] > 350
    assert disk["phase"] == "idle"


def test_it_can_be_sent():
    assert msgpack.unpackb(msgpack.packb(view()))["mode"] == "enforce"


def test_a_lost_gateway_shows_no_rates():
    made = Desk(brain((promise(),)), (A, ("gold",)))
    made.step((A, {"gold": (80, 2)}, 0))
    made.brain.gateway_lost(A, "gone", made.now_ns)
    found = made.brain.snapshot(made.unix_us)
    assert found["gateways"][0]["state"] == "lost"
    assert found["volumes"][0]["iops"] == 0
    assert found["backends"][0]["cost_per_s"] == 0

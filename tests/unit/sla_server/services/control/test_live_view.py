from __future__ import annotations

import msgpack

from tests.support.worlds import A, B, Feeder, controller, promise, volume_class


def view():
    made = Feeder(controller((promise(),), (volume_class(),)), (A, ("gold",)), (B, ("greedy", "spare")))
    for _ in range(2):
        made.step((A, {"gold": (80, 2)}, 0), (B, {"greedy": (400, 50)}, 0), held=3)
    made.controller.manual_set("t1", "greedy", cost_per_s=200, reason="too loud")
    made.step((A, {"gold": (80, 2)}, 0), (B, {"greedy": (400, 50)}, 0), held=3)
    return made.controller.snapshot(made.unix_us)


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
    assert (disk["phase"], disk["victims"]) == ("idle", [])


def test_it_can_be_sent():
    assert msgpack.unpackb(msgpack.packb(view()))["mode"] == "enforce"


def test_a_lost_gateway_shows_no_rates():
    made = Feeder(controller((promise(),)), (A, ("gold",)))
    made.step((A, {"gold": (80, 2)}, 0))
    made.controller.gateway_lost(A, "gone", made.now_ns)
    found = made.controller.snapshot(made.unix_us)
    assert found["gateways"][0]["state"] == "lost"
    assert (found["volumes"][0]["iops"], found["volumes"][0]["p95_us"]) == (None, None)
    assert found["backends"][0]["cost_per_s"] == 0


def test_a_gateway_that_only_sql_calls_up_is_not_shown_as_up():
    made = controller((promise(),))
    made.gateway_up(A, A, [{"volume": "gold", "backend": "disk"}], 1, is_announced=False)
    found = made.snapshot(1)
    assert (found["gateways"][0]["state"], found["totals"]["gateways"]) == ("detached", {"detached": 1})
    made.gateway_up(A, A, [{"volume": "gold", "backend": "disk"}], 2)
    assert made.snapshot(2)["totals"]["gateways"] == {"up": 1}


def test_what_a_silent_gateway_said_last_is_not_shown_as_of_now():
    made = Feeder(controller((promise(),)), (A, ("gold",)), (B, ("gold",)))
    made.step((A, {"gold": (80, 2)}, 0), (B, {"gold": (20, 2)}, 0))

    def shown() -> tuple[float | None, ...]:
        (volume,) = made.controller.snapshot(made.unix_us)["volumes"]
        return tuple(volume[name] for name in ("iops", "bytes_per_s", "p95_us", "held", "inflight"))

    assert shown()[0] == 100
    for _ in range(4):
        made.step((A, {"gold": (80, 2)}, 0))
    assert shown()[0] == 80, "of the one that speaks"
    for _ in range(4):
        made.step()
    assert shown() == (None,) * 5
    made.step((A, {"gold": (0, 2)}, 0))
    assert shown()[0] is not None, "idle is no silence"


def crowd():
    """Six volumes of 10, 20, .. 60 I/O/s, each with a promise; v5 is violated, v0 is capped."""
    names = [f"v{number}" for number in range(6)]
    made = Feeder(controller([promise(name) for name in names]), (A, tuple(names)), (B, ("unused",)))
    for _ in range(4):
        ios = {name: (10 + 10 * number, 90 if number == 4 else 2) for number, name in enumerate(names)}
        made.step((A, ios, 0))
    made.controller.manual_set("t1", "v0", cost_per_s=200, reason="n" * 1000)
    made.step((A, ios, 0))
    made.controller.gateway_lost(B, "gone", made.now_ns)
    return made.controller


def test_a_crowded_view_shows_what_needs_a_look_and_says_how_many_there_are():
    found = crowd().snapshot(1, most=2)
    assert [row["volume"] for row in found["volumes"]] == ["v0", "v5"]  # capped, and busiest
    assert found["volumes"][1]["iops"] == 60
    assert [row["name"] for row in found["slas"]] == ["v0", "v4"]  # the violated one, and another
    assert found["slas"][1]["state"] == "violating"
    assert found["promises"] == [(f"v{number}", "latency") for number in range(6)]
    assert found["states"] == ["ok"] * 4 + ["violating", "ok"]
    assert [row["gateway_id"] for row in found["gateways"]] == [B, A]  # lost ones first
    assert len(found["throttles"][0]["text"]) == 400
    assert found["totals"] == {
        "gateways": {"up": 1, "lost": 1},
        "volumes": 7,
        "slas": {"ok": 5, "violating": 1},
        "throttles": 1,
        "backends": 1,
    }


def test_states_of_some_promises():
    made = crowd()
    found = made.promise_states([("v4", "latency"), ("v1", "latency"), ("gone", "latency")])
    assert {key: row["state"] for key, row in found.items()} == {
        ("v4", "latency"): "violating",
        ("v1", "latency"): "ok",
    }
    assert found["v4", "latency"]["u"] > 1


def test_cost_of_a_backend_leaves_lost_gateways_out_and_follows_exports():
    made = Feeder(controller((promise(),)), (A, ("gold",)), (B, ("greedy",)))
    made.step((A, {"gold": (80, 2)}, 0), (B, {"greedy": (400, 2)}, 0))
    (disk,) = made.controller.snapshot(1)["backends"]
    assert disk["cost_per_s"] == 255.0  # half of 480 I/Os of 1.0625
    made.controller.gateway_up(B, "B", [{"volume": "greedy", "backend": "other"}], made.now_ns)
    found = {row["backend"]: row["cost_per_s"] for row in made.controller.snapshot(1)["backends"]}
    assert found == {"disk": 42.5, "other": 212.5}
    made.controller.gateway_lost(B, "gone", made.now_ns)
    found = {row["backend"]: row["cost_per_s"] for row in made.controller.snapshot(1)["backends"]}
    assert found == {"disk": 42.5, "other": 0.0}


def test_caps_are_shown_in_the_unit_that_they_have():
    made = Feeder(controller((), ()), (B, ("copy", "scan", "mail", "free")), features=("group-caps",))
    made.controller.manual_set("t1", "copy", ops_per_s=200)
    made.controller.manual_set("t2", "scan", bytes_per_s=5e6)
    made.controller.manual_set("t3", "", ops_per_s=100, group="tier", weights={"mail": 1.0})
    made.step((B, {"copy": (10, 2)}, 0))
    rows = made.controller.snapshot(made.unix_us)["volumes"]
    keys = ("cap_cost_per_s", "cap_ops_per_s", "cap_bytes_per_s", "cap_group")
    assert {row["volume"]: tuple(row[key] for key in keys) for row in rows} == {
        "copy": (None, 200, None, ""),
        "scan": (None, None, 5e6, ""),
        "mail": (None, None, None, "tier"),
        "free": (None, None, None, ""),
    }


def test_a_throttle_below_a_floor_shows_what_holds_and_why():
    made = Feeder(controller((promise(),), (volume_class(),)), (A, ("gold",)), (B, ("greedy",)))
    made.controller.manual_set("t1", "gold", ops_per_s=20, who="ann", reason="too loud")
    made.controller.manual_set("t2", "greedy", ops_per_s=20)  # the floor of no agreement is our courtesy
    made.step((A, {"gold": (10, 2)}, 0), (B, {"greedy": (10, 2)}, 0))
    view = made.controller.snapshot(made.unix_us)
    found = {row["volume"]: row for row in view["throttles"]}
    assert (found["gold"]["ops_per_s"], found["gold"]["lifted_to"]) == (20, {"ops_per_s": 50.0})
    assert found["gold"]["floor"] == "the floor of its agreement"
    assert found["gold"]["who"] == "ann"
    assert (found["greedy"]["lifted_to"], found["greedy"]["floor"]) == (None, "")
    caps = {row["volume"]: row["cap_ops_per_s"] for row in view["volumes"]}
    assert caps == {"gold": 50.0, "greedy": 20.0}, "what is enforced"

"""The model must itself be right, or what is tuned on it means nothing."""

from __future__ import annotations

import pytest

from pmdaemon.wire import cut as cuts
from pmdaemon.wire.cut import IO_ANY
from sla_server.services.control.decisions import SetCaps
from sla_server.services.control.simulation import IO_COST, UNIX_0_US, Io, SimClient, Simulation, World
from sla_server.simulate.loads import Application, IoLog, Load
from tests.support.worlds import controller


def sim(seed: int = 1) -> Simulation:
    return Simulation(controller(()), seed)


def test_same_seed_same_world():
    def run(seed):
        made = sim(seed)
        gateway = made.gateway("A", ["v"])
        client = SimClient(gateway, "v", rate=100)
        made.run(5)
        return client.completed

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_one_fifo_server_gives_500_iops_and_its_queue():
    made = sim()
    client = SimClient(made.gateway("A", ["v"]), "v", depth=32)
    made.run(10)
    assert client.rate_between(1, 10) == pytest.approx(500, rel=0.005)
    assert client.percentile_between(1, 10, 50) == pytest.approx(32 * 0.002, rel=0.01)


def test_a_lone_depth_1_client_sees_the_service_time():
    made = sim()
    client = SimClient(made.gateway("A", ["v"]), "v", depth=1)
    made.run(3)
    assert client.percentile_between(1, 3, 99) == pytest.approx(0.002)


@pytest.mark.parametrize("iops", [50, 200, 400])
def test_caps_are_exact_in_the_long_run(iops):
    made = sim()
    gateway = made.gateway("A", ["v"])
    client = SimClient(gateway, "v", depth=32)
    gateway.lost = True  # no polls: the controller would clear caps that it does not know of
    gateway.apply(SetCaps(gateway.gateway_id, 1, 60_000_000, [{"volume": "v", "cost_per_s": iops * IO_COST}]))
    made.run(12)
    assert client.rate_between(2, 12) == pytest.approx(iops, rel=0.01)


def test_cuts_are_real_and_lose_nothing():
    made = sim()
    gateway = made.gateway("A", ["v"], {"v": [12_000]})
    made.gateways.clear()
    client = SimClient(gateway, "v", depth=32)
    made.world.run(0.9)
    cut = cuts.decode(cuts.encode(gateway.cuts()[-1]))
    assert cut.column("reads")[0] == len(client.completed)
    assert cut.column("arrived")[0] == cut.column("reads")[0] + cut.column("inflight")[0]
    assert cut.dense_hist(0, 99).sum() == len(client.completed)
    (missed,) = (entry for entry in cut.missed if entry["io"] == IO_ANY)
    assert missed["missed"] == sum(latency > 0.012 for _, latency in client.completed)
    assert cut.duration_us == 900_000


def test_the_generation_is_reported_for_whole_cuts_only():
    made = sim()
    gateway = made.gateway("A", ["v"])
    made.gateways.clear()
    made.world.run(0.5)
    gateway.apply(SetCaps(gateway.gateway_id, 9, 10**9, []))
    made.world.run(0.6)
    assert [(cut.throttle_gen, cut.duration_us) for cut in gateway.cuts()] == [(-1, 500_000), (9, 100_000)]
    gateway.expire_lease()
    assert [cut.throttle_gen for _ in range(2) for cut in gateway.cuts()] == [-1, 0]


def test_the_event_loop_keeps_order():
    world, seen = World(1), []
    world.at(2, lambda: seen.append("b"))
    world.at(1, lambda: seen.append("a"))
    world.at(2, lambda: seen.append("c"))
    world.run(1.5)
    assert (seen, world.now) == (["a"], 1.5)
    world.run(3)
    assert seen == ["a", "b", "c"]


def test_a_lease_ends_unless_polls_renew_it_while_the_server_lives():
    made = sim()
    gateway = made.gateway("A", ["v"])
    caps = [{"volume": "v", "ops_per_s": 100.0, "bytes_per_s": None, "cost_per_s": None}]
    gateway.apply(SetCaps(gateway.gateway_id, 5, 10_000_000, caps))
    made.controller.tick = lambda *_now: []  # it knows of no caps and would take them back
    made.run(15)
    assert gateway.caps["v"].caps.ops_per_s == 100
    made.kill()
    made.run(27)
    assert gateway.gen == 5, "renewed by the last polls: at 15 s and the two after it"
    made.run(29)
    assert (gateway.caps, gateway.gen) == ({}, 0)


def test_kinds_sizes_clients_and_backends_are_counted_apart():
    made = sim()
    gateway = made.gateway("A", ["v"], clients={"v": ["c", "d"]})
    gateway.thresholds = {"v": [(cuts.IO_READ, 1_000), (cuts.IO_WRITE, 1_000)]}
    made.gateways.clear()
    for client, size, is_write in (("c", 4096, False), ("d", 65_536, True), ("d", 65_536, True)):
        gateway.submit(Io("v", 0.0, lambda _now: None, client=client, size_bytes=size, is_write=is_write))
    made.world.run(0.9)
    cut = cuts.decode(cuts.encode(gateway.cuts()[-1]))
    assert cut.column("reads").tolist() == [1, 0]
    assert cut.column("writes").tolist() == [0, 2]
    assert cut.column("write_bytes").tolist() == [0, 131_072]
    assert cut.column("cost_milli").tolist() == [1062, 4000]
    assert cut.missed[["row", "io", "counted", "missed"]].tolist() == [
        (0, cuts.IO_READ, 1, 1),
        (1, cuts.IO_WRITE, 2, 2),
    ]


def test_a_wall_clock_that_jumps_is_corrected_a_poll_later():
    made, seen = sim(), []
    gateway = made.gateway("A", ["v"], phase_s=0.0)
    made.controller.add_cut = lambda cut, _recv, offset_us, *_rest: seen.append(
        (cut.start_unix_us + offset_us - UNIX_0_US) // 1_000_000
    )
    made.world.at(2.5, lambda: setattr(gateway, "step_us", 100_000_000))
    made.run(5.5)
    assert seen == [0, 1, 102, 3, 4]


def test_a_client_that_is_held_by_its_own_cap_holds_up_no_other_and_both_caps_hold():
    made = sim()
    gateway = made.gateway("A", ["v"], clients={"v": ["slow", "free"]})
    gateway.lost = True  # no polls: the controller would clear caps that it does not know of
    entry = {"volume": "v", "client": "slow", "cost_per_s": 100 * IO_COST}
    gateway.apply(SetCaps(gateway.gateway_id, 1, 60_000_000, [], [entry]))
    logs = {name: IoLog() for name in ("slow", "free")}
    for name, log in logs.items():
        application = Application(gateway, "v", name, log)
        application.hold(Load(volume="v", client=name, depth=8), 20.0, made.world.random)
    made.run(10)

    def rates(since: float) -> dict[str, float]:
        ends = {name: log.arrays()["at"] + log.arrays()["latency"] for name, log in logs.items()}
        return {name: ((end >= since) & (end < since + 5)).sum() / 5 for name, end in ends.items()}

    assert rates(5) == pytest.approx({"slow": 100, "free": 400}, rel=0.02)
    whole = {"volume": "v", "cost_per_s": 300 * IO_COST}
    gateway.apply(SetCaps(gateway.gateway_id, 2, 60_000_000, [whole], [entry]))
    made.run(20)
    assert rates(14) == pytest.approx({"slow": 100, "free": 200}, rel=0.02)

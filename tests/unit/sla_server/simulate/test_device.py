"""The modelled storage: service times by size and kind, parallel servers, order."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from sla_server.services.control.simulation import Io, World
from sla_server.simulate.device import CostPoint, DeviceModel, Fault, QueueingDevice

CURVE = [CostPoint(kib=4, ms=1), CostPoint(kib=64, ms=4)]


def served(model: DeviceModel, *ios: tuple[int, bool], seed: int = 1) -> list[float]:
    """When each of requests that come at 0 is done."""
    world, done = World(1), dict[int, float]()
    device = QueueingDevice(world, model, seed)
    for number, (size, is_write) in enumerate(ios):
        io = Io("v", 0.0, lambda _now: None, size_bytes=size, is_write=is_write)
        device.submit(io, lambda n=number: done.setdefault(n, world.now))
    world.run(1000)
    return [done[number] for number in range(len(ios))]


def test_cost_follows_the_curve_and_is_level_beyond_it():
    model = DeviceModel(read=CURVE, write=[CostPoint(kib=4, ms=10)])
    assert [model.mean_s(kib * 1024, False) for kib in (1, 4, 34, 64, 900)] == pytest.approx(
        [0.001, 0.001, 0.0025, 0.004, 0.004]
    )
    assert model.mean_s(4096, True) == pytest.approx(0.010)
    assert model.text == "1 server, read 1 ms at 4 KiB - 4 ms at 64 KiB, write 10 ms at 4 KiB"


def test_one_server_queues_and_two_work_at_the_same_time():
    model = DeviceModel(spread=0, read=[CostPoint(kib=4, ms=2)])
    assert served(model, *[(4096, False)] * 3) == pytest.approx([0.002, 0.004, 0.006])
    two = model.model_copy(update={"servers": 2})
    assert served(two, *[(4096, False)] * 3) == pytest.approx([0.002, 0.002, 0.004])


def test_with_client_depth_a_client_waits_for_the_first_ones_of_another_alone():
    model = DeviceModel(spread=0, read=[CostPoint(kib=4, ms=2)], client_depth=2)
    assert model.text.endswith("2 of each client at a time")
    world, done = World(1), list[tuple[str, float]]()
    device = QueueingDevice(world, model, 1)

    def submit(volume: str, client: str = "client") -> None:
        io = Io(volume, world.now, lambda _now: None, client=client)
        device.submit(io, lambda: done.append((volume + client[6:], round(world.now, 6))))

    for _ in range(4):
        submit("deep")
    submit("victim")
    submit("deep", "client-2")
    world.run(0.0065)
    assert done == [("deep", 0.002), ("deep", 0.004), ("victim", 0.006)]
    world.run(1.0)
    assert [name for name, _ in done[3:]] == ["deep-2", "deep", "deep"]
    submit("deep")
    world.run(2.0)
    assert done[-1] == ("deep", 1.002), "nothing is owed afterwards"


def test_spread_keeps_the_mean_and_the_seed_decides():
    model = DeviceModel(spread=0.5, read=[CostPoint(kib=4, ms=2)])
    many = served(model, *[(4096, False)] * 4000)
    assert many[-1] / 4000 == pytest.approx(0.002, rel=0.05)
    assert many == served(model, *[(4096, False)] * 4000)
    assert many != served(model, *[(4096, False)] * 4000, seed=2)


def test_a_curve_must_rise_in_size():
    with pytest.raises(ValidationError, match="must rise"):
        DeviceModel(read=list(reversed(CURVE)))


def faulty(*faults: Fault) -> dict[float, tuple[float, bool]]:
    """Requests of 2 ms that come each second from 0.5 on: when each is done, and whether it failed."""
    world, done = World(1), dict[float, tuple[float, bool]]()
    device = QueueingDevice(world, DeviceModel(spread=0, read=[CostPoint(kib=4, ms=2)]), 1, faults)
    for second in range(4):
        io = Io("v", second + 0.5, lambda _now: None)
        world.at(
            io.arrived,
            lambda io=io: device.submit(io, lambda: done.setdefault(io.arrived, (world.now, io.failed))),
        )
    world.run(1000)
    return done


def test_a_device_that_hangs_goes_on_where_it_stopped_or_never():
    held = faulty(Fault(kind="hangs", from_s=1.501, until_s=3))
    ends = {0.5: 0.502, 1.5: 3.001, 2.5: 3.003, 3.5: 3.502}
    assert {at: end for at, (end, _) in held.items()} == pytest.approx(ends)
    assert not any(failed for _, failed in held.values())
    assert list(faulty(Fault(kind="hangs", from_s=1))) == [0.5]


def test_a_device_that_fails_answers_with_errors_as_long_as_it_does():
    found = faulty(Fault(kind="fails", from_s=1, until_s=3))
    assert [failed for _, failed in found.values()] == [False, True, True, False]

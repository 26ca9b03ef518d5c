"""A floor is a volume's: its clients share it."""

from __future__ import annotations

import pytest

from sla_server.agreements.promise import Priority, VolumeClass
from sla_server.services.control.client_floors import ClientFloors
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.sharing import terms
from tests.support.worlds import A, Feeder, controller, promise, volume_class

SETTINGS = ControlSettings()
ALL = VolumeClass("all", Priority.BEST_EFFORT, ("erp",), floor_iops=300.0)
GOLD = volume_class("erp", clients=("db-1",), floor_iops=400.0, floor_bytes_per_s=1e6)


def floors(use: dict[str, float], *classes: VolumeClass) -> dict[str, float]:
    """Floors in IOPS of every client, shared by this use."""
    made = ClientFloors(SETTINGS)
    made.follow("erp", classes, use)
    return {
        client: terms("erp", classes, SETTINGS, client, made.of("erp", client, classes)).floor_iops
        for client in use
    }


def test_clients_together_have_the_floor_of_their_volume_by_use():
    found = floors({"a": 300.0, "b": 100.0}, ALL)
    assert found == pytest.approx({"a": 300 * (0.8 * 0.75 + 0.1), "b": 300 * (0.8 * 0.25 + 0.1)})
    assert sum(found.values()) == pytest.approx(300)


def test_an_agreement_that_names_clients_promises_its_floor_to_them_alone():
    found = floors({"db-1": 100.0, "a": 100.0}, ALL, GOLD)
    assert found == pytest.approx({"db-1": 400, "a": 150})


def test_what_no_agreement_covers_shares_the_floor_of_a_volume_without_one():
    found = floors({"db-1": 100.0, "a": 50.0, "b": 50.0}, GOLD)
    assert found == pytest.approx({"db-1": 400, "a": 25, "b": 25})


def test_one_that_uses_nothing_has_what_a_newcomer_would_have():
    found = floors({"a": 100.0, "gone": 0.0}, ALL)
    assert found == pytest.approx({"a": 300, "gone": 30})
    assert floors({"a": 0.0}, ALL) == {"a": 300}, "nothing is known yet"


def test_parts_are_kept_until_use_has_moved():
    made = ClientFloors(SETTINGS)
    assert not made.of("erp", "a", (ALL,))
    assert made.follow("erp", (ALL,), {"a": 100.0, "b": 100.0})
    assert not made.follow("erp", (ALL,), {"a": 110.0, "b": 100.0}), "noise"
    assert made.of("erp", "a", (ALL,)) == {ALL: 0.5}
    assert made.follow("erp", (ALL,), {"a": 300.0, "b": 100.0})
    assert made.of("erp", "a", (ALL,)) == {ALL: pytest.approx(0.7)}
    assert made.follow("erp", (ALL,), {"b": 100.0}), "one is gone"
    made.clear()
    assert not made.of("erp", "a", (ALL,))


def test_the_loop_may_take_a_divided_volume_down_to_its_floor_and_no_further():
    """Six clients of a volume with a floor of 300 IOPS; each of them had all of it."""
    classes = (volume_class("erp", clients=("db-1",)), ALL)
    made = controller((promise("erp", clients=("db-1",)),), classes)
    others = [f"erp/c{number}" for number in range(5)]
    fed = Feeder(made, (A, ("erp/db-1", *others)), features=("client-caps",))
    fed.step((A, {"erp/db-1": (80, 1), **dict.fromkeys(others, (400, 1))}, 0))
    found = made.inventory.neighbours("disk", (), {})
    assert sum(found[name].floor for name in others) <= 300 * 1.0625
    assert found["erp/db-1"].floor == pytest.approx(50 * 1.0625), "its own agreement's"
    assert made.inventory.terms_of("erp").floor_iops == 300

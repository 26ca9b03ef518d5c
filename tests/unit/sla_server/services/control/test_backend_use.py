"""What looking at a large backend costs, in operations."""

from __future__ import annotations

import pytest

from sla_server.services.control.backend_use import MOST_COUNTED, MOST_LISTED
from sla_server.services.control.sharing import cost_of, count_of
from tests.support.worlds import A, B, Feeder, controller, promise, volume_class

VOLUMES = [f"v{number:03}" for number in range(300)]


def world(clients: tuple[str, ...], names: list[str], *more: tuple[str, tuple[str, ...]]) -> Feeder:
    made = controller((promise("v000"),), [volume_class(name, clients=clients) for name in VOLUMES])
    return Feeder(made, (A, tuple(names)), *more, features=("client-caps",))


@pytest.mark.parametrize("clients", [("db",), ("*",)])
def test_a_large_backend_is_summed_once_a_cut_and_few_of_it_are_looked_at(clients):
    names = [f"{volume}/{client}" for volume in VOLUMES for client in ("db", "job")]
    fed = world(clients, names)
    inventory, uses = fed.controller.inventory, fed.controller.inventory.uses
    use = dict.fromkeys(names, (10, 1.0))
    fed.step((A, {**use, "v299/job": (500, 1.0)}, 0))
    sums, rows = uses.sums, uses.summed_rows
    found = inventory.neighbours("disk", (), {"v100/db" if clients == ("db",) else "v100": 5.0})
    divided = clients == ("db",)
    assert count_of(found) == (600 if divided else 300)
    assert cost_of(found) == pytest.approx((599 * 10 + 500) * 1.0625)
    assert len(found) <= MOST_LISTED + 2, "the largest, what counts, and what has a cap"
    assert found["v299/job" if divided else "v299"].cost_per_s >= 500
    assert list(found) == sorted(found)
    assert (uses.sums - sums, uses.summed_rows - rows) == ((1, 600) if divided else (0, 0))
    inventory.neighbours("disk", (), {})
    assert uses.sums - sums <= 1, "the same cuts are not summed again"
    fed.step((A, {"v000/db": (10, 1.0)}, 0))
    rows = uses.summed_rows
    inventory.neighbours("disk", (), {})
    assert uses.summed_rows - rows == (1 if divided else 0), "rows of the newest cut, not of all streams"


def test_many_small_clients_of_a_volume_count_together_up_to_a_limit():
    names = [f"v000/c{number}" for number in range(400)]
    fed = world(("db",), [*names, "v001/db"])
    fed.step((A, {**dict.fromkeys(names, (2, 1.0)), "v001/db": (200, 1.0)}, 0))
    found = fed.controller.inventory.neighbours("disk", (), {})
    assert MOST_COUNTED <= len(found) <= MOST_COUNTED + MOST_LISTED
    assert cost_of(found) == pytest.approx(1000 * 1.0625)


def test_what_changes_on_a_backend_is_seen():
    fed = world(("db",), ["v000/db", "v000/job"], (B, ("v001/job",)))
    inventory = fed.controller.inventory

    def names() -> list[str]:
        return list(inventory.neighbours("disk", (), {}))

    assert names() == ["v000/db", "v000/job", "v001/job"]
    fed.controller.set_features(A, ())
    assert names() == ["v000", "v001/job"]
    fed.controller.gateway_lost(B, "gone", fed.now_ns)
    assert names() == ["v000", "v001"]
    fed.controller.set_agreements((), ())
    assert names() == ["v000", "v001"]
    fed.controller.gateway_up(A, "A", [{"volume": "v000", "backend": "other"}], fed.now_ns)
    assert names() == ["v001"]
    assert list(inventory.neighbours("other", (), {})) == ["v000"]

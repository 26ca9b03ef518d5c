"""Which gateways are sent which fitted costs, and when."""

from __future__ import annotations

from typing import Any

import pytest

from pmdaemon.wire.messages.costs import FITTED_COSTS, Costs
from sla_server.services.costs import FittedCosts, NewestFits, fits_of


def policy(version: int, **fits: tuple[float | None, float | None]) -> dict[str, Any]:
    rows = [entry(name, write, size) for name, (write, size) in fits.items()]
    return {"version": version, "state": "in-force", "report": {"cost_model": rows}}


def exports(*backends: str) -> list[dict[str, Any]]:
    return [{"volume": f"v{number}", "backend": name} for number, name in enumerate(backends)]


def entry(backend: str, write: float | None, size: float | None) -> dict[str, Any]:
    return {"backend": backend, "cost_write": write, "cost_bytes": size}


def test_of_each_backend_the_newest_fit_up_to_the_version_in_force_holds() -> None:
    rows = [
        policy(9, disk=(9.0, 9000.0)),
        policy(4, disk=(None, None), tape=(None, 4000.0)),
        {"version": 3, "report": None},
        {"version": 2},
        policy(1, disk=(1e9, 1000.0), tape=(1.0, 1000.0)),
    ]
    assert fits_of(rows, 4) == {"tape": (None, 4000.0), "disk": (1e3, 1000.0)}
    assert fits_of(rows, 0) == {}


@pytest.mark.parametrize(
    "report",
    [
        "{broken",
        ["x"],
        {"cost_model": 5},
        {"cost_model": ["x", {"cost_bytes": 4000}, {"backend": 1, "cost_bytes": 4000}]},
        {"cost_model": [{"backend": "disk"}, entry("disk", None, None)]},
        {"cost_model": [{"backend": "disk", "cost_bytes": "4000"}, {"backend": "disk", "cost_bytes": True}]},
        {"cost_model": [{"backend": "disk", "cost_write": [], "cost_bytes": 4000}]},
    ],
)
def test_a_report_by_another_hand_stops_nobody(report: Any) -> None:
    """Who may insert policies could else end the services, again at each start."""
    rows = [{"version": 2, "report": report}, policy(1, disk=(2.0, 4000.0))]
    assert fits_of(rows, 2) == {"disk": (2.0, 4000.0)}


def test_numbers_of_a_report_are_such_as_gateways_take() -> None:
    assert fits_of([policy(1, a=(-1.0, 10**400), b=(1e999, -5.0))], 1) == {
        "a": (0.001, 1e9),
        "b": (1e3, 512.0),
    }


def test_the_newest_fit_is_found_however_old_it_is_and_read_once() -> None:
    rows = [policy(version) for version in range(60, 1, -1)] + [policy(1, disk=(2.0, 4000.0))]
    asked, fits = list[int | None](), NewestFits()

    def read(before: int | None) -> list[dict[str, Any]]:
        asked.append(before)
        return [row for row in rows if before is None or row["version"] < before][:20]

    assert fits.up_to(59, read) == {"disk": (2.0, 4000.0)}
    assert asked == [None, 41, 21]
    assert fits.up_to(59, read) == {"disk": (2.0, 4000.0)}
    assert len(asked) == 3, "a look at a version that is known reads no report"
    rows[:0] = [policy(61, tape=(1.0, 1000.0))]
    assert fits.up_to(61, read) == {"disk": (2.0, 4000.0), "tape": (1.0, 1000.0)}
    assert asked[3:] == [None], "the newest page reaches what is known"
    rows[:0] = [policy(62, disk=(3.0, 5000.0))]
    assert fits.up_to(62, read)["disk"] == (3.0, 5000.0)
    del rows[:60]
    assert fits.up_to(3, read) == {"disk": (2.0, 4000.0)}, "the database was restored"


def test_a_gateway_none_of_whose_backends_has_a_fit_is_sent_an_empty_list() -> None:
    costs = FittedCosts()
    costs.announced("a", (FITTED_COSTS,), exports("disk"))
    assert list(costs.take()) == [], "whether there is a policy is not known yet"
    costs.learned(4, {"tape": (2.0, 4000.0)})
    assert list(costs.take()) == [("a", Costs(4, ()))], "it may have kept some"
    costs.learned(5, {"disk": (2.0, 4000.0)})
    assert [gateway for gateway, _ in costs.take()] == ["a"]
    costs.learned(6, {})
    assert list(costs.take()) == [("a", Costs(6, ()))]
    costs.learned(7, {})
    assert list(costs.take()) == []


def test_a_gateway_is_sent_the_costs_of_its_backends_when_it_comes_and_when_they_change() -> None:
    costs = FittedCosts()
    costs.announced("a", (FITTED_COSTS,), exports("disk", "disk"))
    costs.announced("b", (FITTED_COSTS,), exports("tape"))
    costs.announced("old", (), exports("disk"))
    assert list(costs.take()) == []
    costs.learned(4, {"disk": (2.0, 4000.0)})
    assert list(costs.take()) == [("a", Costs(4, (entry("disk", 2.0, 4000.0),))), ("b", Costs(4, ()))]
    costs.learned(5, {"disk": (2.0, 4000.0)})
    assert list(costs.take()) == [], "nothing has changed"
    costs.learned(6, {"disk": (2.0, 4000.0), "tape": (None, 5000.0)})
    assert list(costs.take()) == [("b", Costs(6, (entry("tape", None, 5000.0),)))]
    costs.announced("a", (FITTED_COSTS,), exports("disk", "tape"))
    both = (entry("disk", 2.0, 4000.0), entry("tape", None, 5000.0))
    assert list(costs.take()) == [("a", Costs(6, both))], "its pair keeps none"
    costs.learned(5, {"disk": (2.0, 4000.0)})
    assert list(costs.take()) == [("a", Costs(5, (entry("disk", 2.0, 4000.0),))), ("b", Costs(5, ()))]
    costs.learned(0, {})
    assert list(costs.take()) == [("a", Costs(5, ()))], "the only policy was rolled back"


def test_one_that_is_gone_or_of_a_release_of_before_is_sent_nothing() -> None:
    costs = FittedCosts()
    costs.announced("a", (FITTED_COSTS,), exports("disk"))
    costs.announced("b", (FITTED_COSTS,), exports("disk"))
    costs.lost("a")
    costs.announced("b", (), exports("disk"))
    costs.learned(4, {"disk": (2.0, 4000.0)})
    assert list(costs.take()) == []

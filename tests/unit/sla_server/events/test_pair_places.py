"""Which connection to the pair's listener makes room for the newest."""

from __future__ import annotations

import pytest

from sla_server.events.pair_link import MOST_CANDIDATES, makes_room

PARTNER = "10.0.0.2"


def left(*hosts: str) -> list[str]:
    """Connections that stay when these come one after the other; each is named HOST#NUMBER."""
    places: list[str] = []
    for number, host in enumerate(hosts):
        places.append(f"{host}#{number}")
        if (place := makes_room([each.partition("#")[0] for each in places], PARTNER)) is not None:
            del places[place]
        assert len(places) <= MOST_CANDIDATES
    return places


@pytest.mark.parametrize("stranger", ["10.0.0.9", "fe80::9", "::ffff:10.0.0.9"])
def test_a_stranger_has_half_of_the_places(stranger: str) -> None:
    found = left(PARTNER, *[stranger] * 20)
    assert found == [f"{PARTNER}#0", *(f"{stranger}#{number}" for number in range(17, 21))]


def test_the_host_with_the_most_makes_room_first() -> None:
    found = left("10.0.0.7", *["10.0.0.9"] * 20)  # the partner comes from an address that is not configured
    assert found == ["10.0.0.7#0", *(f"10.0.0.9#{number}" for number in range(18, 21))]


def test_many_strangers_leave_the_partners_places_alone() -> None:
    strangers = [f"10.0.1.{number}" for number in range(20)]
    assert left(*strangers, PARTNER, *strangers)[:1] == [f"{PARTNER}#20"]


def test_the_partners_host_has_all_places_that_are_free() -> None:
    assert len(left(*[PARTNER] * 20)) == MOST_CANDIDATES
    assert left(*[PARTNER] * 9)[0] == f"{PARTNER}#1"
    found = left(*[PARTNER] * 8, *["10.0.0.9"] * 20)
    assert [each.partition("#")[0] for each in found] == [PARTNER] * 4 + ["10.0.0.9"] * 4


def test_an_address_of_ipv4_is_the_same_at_a_listener_of_ipv6() -> None:
    assert left(f"::ffff:{PARTNER}", *["10.0.0.9"] * 20)[0] == f"::ffff:{PARTNER}#0"

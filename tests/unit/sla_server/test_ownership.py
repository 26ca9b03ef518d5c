"""The rule of which gateways a volume belongs to, and what is said of those that wait."""

from __future__ import annotations

import pytest

from sla_server.ownership import (
    APPROVED,
    MOST_PENDING,
    PATTERN_RE,
    PENDING,
    Ownership,
    VolumeClaim,
    VolumeOwners,
    is_listed,
    pending_text,
)

NOW_US = 1_800_000_000_000_000


def owners(mode: Ownership = "first") -> VolumeOwners:
    return VolumeOwners(mode)


def states(made: VolumeOwners, volume: str) -> dict[str, str]:
    return {gateway_id: claim.state for gateway_id, claim in made.of(volume).items()}


def test_the_first_gateway_that_shows_a_volume_owns_it_and_a_second_one_waits() -> None:
    made = owners()
    [first] = made.show("g-1", "host-1", {"vol-17": "pool-1"}, NOW_US)
    assert (first.state, first.backend, first.decided_by) == (APPROVED, "pool-1", "first sight")
    [second] = made.show("g-2", "evil-gw", {"vol-17": "pool-1"}, NOW_US)
    assert (second.state, second.backend, second.shown_backend) == (PENDING, "", "pool-1")
    assert made.admitted("g-1", "vol-17", "pool-1") == "pool-1"
    assert made.admitted("g-2", "vol-17", "pool-1") is None
    assert made.admitted("g-3", "vol-17", "pool-1") is None
    assert made.owners("vol-17") == ["host-1"]
    assert made.asking() == [second]
    assert pending_text(made, [second]) == (
        "gateway evil-gw shows volume vol-17, which belongs to host-1. It does not count, until: "
        "sla volumes approve vol-17 --gateway evil-gw"
    )


def test_beyond_its_number_at_first_sight_a_gateway_waits() -> None:
    """Who makes names up must not own what other gateways will show."""
    made = VolumeOwners("first", first_sight_volumes=3)
    shown = made.show("g-1", "evil-gw", {f"vol-{number}": "b" for number in range(6)}, NOW_US)
    assert [claim.state for claim in shown] == [APPROVED] * 3 + [PENDING] * 3
    assert pending_text(made, shown[3:4]) == (
        "gateway evil-gw shows volume vol-3, which no gateway owns, and it has 3 that it showed first "
        "(first_sight_volumes). It does not count, until: sla volumes approve vol-3 --gateway evil-gw"
    )
    assert pending_text(made, shown[3:]).startswith(
        "gateway evil-gw shows 3 volumes that need approval: vol-3, vol-4, vol-5 "
        "(it has 3 that it showed first: first_sight_volumes). They do not count"
    )
    [other] = made.show("g-2", "host-2", {"vol-9": "b"}, NOW_US)
    assert other.state == APPROVED, "each gateway has its own number"
    made.put(made.of("vol-3")["g-1"].approved("ann", NOW_US))
    made.put(made.of("vol-0")["g-1"].revoked("ann", NOW_US))
    [one, two] = made.copy().show("g-1", "evil-gw", {"vol-7": "b", "vol-8": "b"}, NOW_US)
    assert (one.state, two.state) == (APPROVED, PENDING), "what people gave it is not counted"
    again = made.with_claims(claim for volume in made.volumes() for claim in made.of(volume).values())
    [one, two] = again.show("g-1", "evil-gw", {"vol-7": "b", "vol-8": "b"}, NOW_US)
    assert (one.state, two.state) == (APPROVED, PENDING), "as it is after a restart"


def test_what_a_certificate_lists_is_not_counted() -> None:
    made = VolumeOwners("first", first_sight_volumes=1)
    made.set_list("g-1", ["vol-*"], NOW_US)
    shown = made.show("g-1", "host-1", {f"vol-{number}": "b" for number in range(4)}, NOW_US)
    assert {claim.state for claim in shown} == {APPROVED}
    [claim] = made.show("g-1", "host-1", {"other": "b"}, NOW_US)
    assert "which its certificate does not list" in pending_text(made, [claim])


def test_shown_again_nothing_changes() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    made.show("g-2", "host-2", {"vol-1": "b"}, NOW_US)
    for _ in range(2):
        assert made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US + 1) == []
        assert made.show("g-2", "host-2", {"vol-1": "b"}, NOW_US + 1) == []


def test_with_approve_every_volume_waits() -> None:
    made = owners("approve")
    [claim] = made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    assert claim.state == PENDING
    assert "which no gateway owns" in pending_text(made, [claim])
    made.put(claim.approved("ann", NOW_US + 5))
    assert made.admitted("g-1", "vol-1", "b") == "b"
    assert made.asking() == []


def test_open_lets_everything_count_and_notes_nothing() -> None:
    made = owners("open")
    assert made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US) == []
    assert made.admitted("g-2", "vol-1", "other") == "other"
    assert list(made.volumes()) == []


def test_a_volume_that_was_revoked_is_not_for_the_first_that_shows_it() -> None:
    made = owners()
    [claim] = made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    made.put(claim.revoked("ann", NOW_US))
    assert made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US + 1) == []
    made.show("g-2", "host-2", {"vol-1": "b"}, NOW_US + 1)
    assert states(made, "vol-1") == {"g-1": "revoked", "g-2": "pending"}


def test_another_backend_counts_on_the_one_before_until_it_is_approved() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "pool-1"}, NOW_US)
    [moved] = made.show("g-1", "host-1", {"vol-1": "pool-2"}, NOW_US + 1)
    assert (moved.state, moved.has_moved, moved.needs_approval) == (APPROVED, True, True)
    assert made.admitted("g-1", "vol-1", "pool-2") == "pool-1"
    assert "which is its own on backend pool-1, on backend pool-2. It counts on pool-1 only" in (
        pending_text(made, made.asking())
    )
    made.put(moved.approved("ann", NOW_US + 2))
    assert made.admitted("g-1", "vol-1", "pool-2") == "pool-2"
    assert made.asking() == []
    [back] = made.show("g-1", "host-1", {"vol-1": "pool-1"}, NOW_US + 3)
    assert back.has_moved


def test_streams_make_claims_and_do_not_move_a_volume() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "pool-2"}, NOW_US)
    assert made.show("g-1", "", {"vol-1": "pool-1"}, NOW_US, exports=False) == []
    made.set_list("g-1", None, NOW_US)
    [claim] = made.show("g-1", "", {"vol-2": "pool-1"}, NOW_US, exports=False)
    assert (claim.state, claim.name) == (APPROVED, "g-1")
    [named] = made.show("g-1", "host-1", {"vol-2": "pool-1"}, NOW_US)
    assert named.name == "host-1"


def test_a_stream_is_no_first_sight_before_the_list_is_known() -> None:
    made = owners()
    assert made.show("g-1", "", {"vol-1": "b"}, NOW_US, exports=False) == []
    assert made.admitted("g-1", "vol-1", "b") is None
    assert list(made.volumes()) == [], "nor is it somebody's"
    made.set_list("g-1", ["vol-2"], NOW_US)
    [claim] = made.show("g-1", "", {"vol-1": "b"}, NOW_US, exports=False)
    assert claim.state == PENDING


def test_a_list_in_the_certificate_approves_what_is_in_it_and_nothing_else() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    made.set_list("g-2", ["vol-1*"], NOW_US)
    shown = made.show("g-2", "host-2", {"vol-1": "b", "vol-10": "b", "new": "b"}, NOW_US)
    assert [(claim.volume, claim.state, claim.decided_by) for claim in shown] == [
        ("vol-1", "approved", "certificate"),
        ("vol-10", "approved", "certificate"),
        ("new", "pending", ""),
    ]
    assert made.owners("vol-1") == ["host-1", "host-2"]
    assert "which its certificate does not list" in pending_text(made, [shown[2]])
    [moved] = made.show("g-2", "host-2", {"vol-10": "other"}, NOW_US)
    assert (moved.backend, moved.has_moved) == ("other", False)


@pytest.mark.parametrize(
    ("pattern", "volume", "backend", "fits"),
    [
        ("vol-1*", "vol-17", "pool-1", True),
        ("vol-1*", "vol-2", "pool-1", False),
        ("vol-?", "vol-2", "pool-1", True),
        ("pool-1/vol-*", "vol-2", "pool-1", True),
        ("pool-1/vol-*", "vol-2", "pool-2", False),
        ("pool-?/*", "any", "pool-2", True),
        ("Vol-1", "vol-1", "b", False),
    ],
)
def test_patterns(pattern: str, volume: str, backend: str, fits: bool) -> None:
    assert PATTERN_RE.fullmatch(pattern)
    assert is_listed([pattern], volume, backend) is fits


def test_an_enrolment_with_a_list_approves_what_waited_but_not_what_was_revoked() -> None:
    made = owners("approve")
    [first, second] = made.show("g-1", "host-1", {"vol-1": "b", "vol-2": "b"}, NOW_US)
    made.put(second.revoked("ann", NOW_US))
    made.set_list("g-1", ["vol-*"], NOW_US)
    made.show("g-1", "host-1", {"vol-1": "b", "vol-2": "b"}, NOW_US)
    assert first.state == PENDING
    assert (states(made, "vol-1"), states(made, "vol-2")) == ({"g-1": "approved"}, {"g-1": "revoked"})


def test_a_narrower_list_takes_back_what_no_person_approved() -> None:
    made = owners()
    made.show("g-1", "host-1", {"seen": "b"}, NOW_US)
    made.set_list("g-1", ["vol-*"], NOW_US)
    made.show("g-1", "host-1", {"vol-1": "b", "vol-2": "b", "vol-3": "b"}, NOW_US)
    made.put(made.of("vol-3")["g-1"].approved("ann", NOW_US))
    changed = made.set_list("g-1", ["vol-1"], NOW_US + 1)
    assert [claim.volume for claim in changed] == ["vol-2"]
    assert states(made, "seen") == {"g-1": "pending"}, "by the first list"
    assert made.show("g-1", "host-1", {"seen": "b", "vol-1": "b", "vol-2": "b"}, NOW_US + 1) == []
    assert made.admitted("g-1", "vol-2", "b") is None
    assert made.admitted("g-1", "vol-1", "b") == made.admitted("g-1", "vol-3", "b") == "b"
    assert "which its certificate does not list" in pending_text(made, changed)
    assert made.set_list("g-1", ["vol-1"], NOW_US + 2) == []
    assert made.set_list("g-1", ["vol-*"], NOW_US + 2) == []
    [again] = made.show("g-1", "host-1", {"vol-2": "b"}, NOW_US + 3)
    assert (again.state, again.decided_by, again.backend) == (APPROVED, "certificate", "b")


def test_a_volume_approved_before_it_is_shown_is_bound_to_where_it_is_shown_first() -> None:
    made = owners("approve")
    made.put(VolumeClaim("vol-1", "g-1", "host-1", APPROVED, "", ""))
    assert made.admitted("g-1", "vol-1", "pool-3") == "pool-3"
    made.show("g-1", "host-1", {"vol-1": "pool-3"}, NOW_US)
    assert made.admitted("g-1", "vol-1", "pool-9") == "pool-3"


def test_a_gateway_that_names_volumes_without_end_is_bounded() -> None:
    made = owners("approve")
    shown = {f"v-{number}": "b" for number in range(MOST_PENDING + 7)}
    assert len(made.show("g-1", "host-1", shown, NOW_US)) == MOST_PENDING
    assert made.admitted("g-1", f"v-{MOST_PENDING + 1}", "b") is None
    made.put(made.asking()[0].approved("ann", NOW_US))
    assert len(made.show("g-1", "host-1", shown, NOW_US)) == 1, "room for another one"


def test_a_copy_is_apart() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    copy = made.copy()
    copy.show("g-2", "host-2", {"vol-1": "b", "vol-2": "b"}, NOW_US)
    assert states(made, "vol-1") == {"g-1": "approved"}
    assert list(made.volumes()) == ["vol-1"]
    assert made.asking() == []
    assert states(copy, "vol-1") == {"g-1": "approved", "g-2": "pending"}


def test_many_are_said_in_one_sentence() -> None:
    made = owners("approve")
    claims = made.show("g-1", "host-1", {f"vol-{number}": "b" for number in range(7)}, NOW_US)
    assert pending_text(made, claims) == (
        "gateway host-1 shows 7 volumes that need approval: vol-0, vol-1, vol-2, vol-3, vol-4 and 2 more. "
        "They do not count, or not on that backend, until: sla volumes approve VOLUME --gateway host-1 "
        "(sla volumes pending lists them)"
    )


def test_a_namesake_is_said_to_be_one() -> None:
    made = owners()
    made.show("g-1", "host-1", {"vol-1": "b"}, NOW_US)
    [again] = made.show("g-2", "host-1", {"vol-1": "b"}, NOW_US)
    assert "which belongs to another gateway of that name" in pending_text(made, [again])


def test_a_row_and_back() -> None:
    claim = VolumeClaim("v", "g", "n", APPROVED, "b", "b", "ann", 1, 2, 3)
    assert VolumeClaim.of_row({**claim.row(), "left_out": 9}) == claim

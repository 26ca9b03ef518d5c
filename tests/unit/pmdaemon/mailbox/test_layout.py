import pytest

from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import LayoutInvalid
from pmdaemon.mailbox.layout import Layout, Route
from tests.support.mailbox import mesh

ROUTE = Route("a", "b", 1024)


def test_parts_follow_each_other_without_overlap_and_aligned() -> None:
    layout = Layout(("a", "b", "c"), (ROUTE, Route("c", "a", 4096)), 7)
    assert layout.routes_at_bytes == 128 + 3 * 64
    assert layout.control_at_bytes >= layout.routes_at_bytes + 2 * 16
    assert layout.list_at_bytes == layout.control_at_bytes + 3 * 320
    assert layout.slots_at_bytes == layout.list_at_bytes + 128
    assert layout.list_word * 8 == layout.list_at_bytes
    assert layout.rings_at_bytes == layout.slots_at_bytes + 3 * 7 * 64
    assert layout.total_bytes == layout.rings_at_bytes + 1024 + 4096
    for at_bytes in (
        layout.control_at_bytes,
        layout.list_at_bytes,
        layout.slots_at_bytes,
        layout.rings_at_bytes,
    ):
        assert at_bytes % 64 == 0
    assert layout.ring_at_bytes("a", "b") == (layout.rings_at_bytes, 1024)
    assert layout.ring_at_bytes("c", "a") == (layout.rings_at_bytes + 1024, 4096)
    assert layout.control_word(2) * 8 == layout.control_at_bytes + 2 * 320
    assert layout.slots_word(1) * 8 == layout.slots_at_bytes + 7 * 64


def test_there_is_no_ring_without_a_route() -> None:
    with pytest.raises(KeyError):
        mesh("a", "b").ring_at_bytes("a", "a")


def test_tables_are_read_back() -> None:
    layout = mesh("pmdaemon", "pair-0", "services", slots=9)
    tables = layout.tables()
    assert len(tables) == lay.tables_bytes(3, 6)
    assert lay.layout_from_tables(tables, 3, 9) == layout
    shared = Layout(layout.participants, layout.routes, 9, "shared")
    assert lay.layout_from_tables(shared.tables(), 3, 9, 1) == shared


def test_quotas_of_a_lane_leave_one_slot_spare() -> None:
    layout = mesh("a", "b", "c", "d", slots=32)
    assert layout.quota("a") == 10
    assert sum(layout.quota("a") for _ in layout.routes_of("a")) < 32


@pytest.mark.parametrize(
    ("participants", "routes", "slots", "named"),
    [
        ((), (), 8, "0 participants"),
        (("a", "a"), (), 8, "twice"),
        (("a", "B"), (), 8, "'B'"),
        (("a", "x" * 64), (), 8, "1 to 63"),
        (("a", "../b"), (), 8, "'../b'"),
        (("a",), (ROUTE,), 8, "'b' is no participant"),
        (("a", "b"), (ROUTE, ROUTE), 8, "given twice"),
        (("a", "b"), (Route("a", "b", 1000),), 8, "multiple of 64"),
        (("a", "b"), (Route("a", "b", 0),), 8, "multiple of 64"),
        (("a", "b"), (ROUTE,), 1, "must be 2"),
        (("a", "b", "c"), (ROUTE, Route("a", "c", 64)), 2, "use at least 3"),
    ],
)
def test_a_wrong_layout_is_named(
    participants: tuple[str, ...], routes: tuple[Route, ...], slots: int, named: str
) -> None:
    with pytest.raises(LayoutInvalid, match=named):
        Layout(participants, routes, slots)


def test_tables_that_name_a_stranger_are_refused() -> None:
    tables = mesh("a", "b").tables()
    with pytest.raises(LayoutInvalid, match="decode"):
        lay.layout_from_tables(tables[:128] + lay.ROUTE.pack(0, 7, 64), 2, 8)


def test_a_form_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LayoutInvalid, match="'queue', must be one of lanes, shared"):
        Layout(("a", "b"), (ROUTE,), 8, "queue")
    with pytest.raises(LayoutInvalid):
        lay.layout_from_tables(mesh("a", "b").tables(), 2, 8, 7)

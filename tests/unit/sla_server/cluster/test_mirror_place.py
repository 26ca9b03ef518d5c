"""The node that is chosen for a mirror."""

from __future__ import annotations

from sla_server.cluster.admin import NodeRow
from sla_server.cluster.mirror_place import choose


def _row(name: str, site: str, stored_bytes: int = 0, *, is_storing: bool = True) -> NodeRow:
    return NodeRow(name, site, "2.15.1", 0, 4, "n1", (), stored_bytes, 0, {}, is_storing)


ROWS = [_row("n1", "hall-a"), _row("n2", "hall-a"), _row("n3", "hall-b", 500), _row("n4", "hall-b", 100)]


def test_another_site_comes_first_then_the_node_that_has_stored_the_least() -> None:
    assert choose(ROWS, ["n1"], "") == "n4"
    assert choose(ROWS, ["n1", "n4"], "") == "n2"  # both sites have a copy: the emptier node
    assert choose(ROWS, ["n1"], "Hall-A") == "n2"


def test_no_node_with_a_copy_or_without_storage_is_chosen() -> None:
    assert choose(ROWS, ["n1", "n2"], "hall-a") == ""
    assert choose([_row("n1", "a"), _row("n2", "b", is_storing=False)], ["n1"], "") == ""
    assert choose([], [], "") == ""

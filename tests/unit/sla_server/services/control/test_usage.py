from __future__ import annotations

import dataclasses

import pytest

from sla_server.services.control.cut_batch import CutBatch, Taken
from sla_server.services.control.scopes import PromiseScopes
from sla_server.services.control.settings import ControlSettings
from sla_server.services.control.simulation import UNIX_0_US
from sla_server.services.control.usage import RECENT, GatewayTable, KnownStream
from tests.support.worlds import A, cut, streams

STALE_US = 3e6


@pytest.fixture
def table() -> GatewayTable:
    made = GatewayTable(A)
    made.add_streams(
        [KnownStream(s["id"], s["volume"], s["client"], s["backend"]) for s in streams(A, "v", "w")]
    )
    return made


def take(table, made, recv_s=None, offset_us=0):
    end_s = (made.start_unix_us - UNIX_0_US + made.duration_us) / 1e6
    recv_us = UNIX_0_US + round((end_s if recv_s is None else recv_s) * 1e6)
    if not table.accept(made, recv_us, offset_us, STALE_US, 0):
        return None
    plan = PromiseScopes(ControlSettings()).plan(table, made.column("stream_id"))
    taken = Taken(made, table, plan, 0)
    CutBatch([taken]).measure(table.usage_table)
    table.keep(made, plan.rows)
    return taken


def test_a_cut_counts_once(table):
    assert take(table, cut(A, 1, {"v": (10, 1)})) is not None
    assert take(table, cut(A, 1, {"v": (10, 1)})) is None
    assert [each.scalars[RECENT["reads"]].tolist() for each in table.recent] == [[10]]
    assert table.ignored == 1


def test_out_of_order_and_old_cuts_are_ignored(table):
    assert take(table, cut(A, 5, {"v": (10, 1)})) is not None
    assert take(table, cut(A, 4, {"v": (10, 1)})) is None
    assert take(table, cut(A, 6, {"v": (10, 1)}), recv_s=9.5) is None
    assert take(table, cut(A, 7, {"v": (10, 1)}), recv_s=9.5) is not None


def test_the_clock_offset_decides_what_is_old(table):
    assert take(table, cut(A, 1, {"v": (1, 1)}), recv_s=100, offset_us=99_000_000) is not None


def test_a_new_epoch_replaces_the_old_one_and_its_backlog(table):
    assert take(table, cut(A, 5, {"v": (10, 1)}, epoch=1)) is not None
    assert take(table, cut(A, 1, {"v": (10, 1)}, epoch=2, end_s=6)) is not None
    assert take(table, cut(A, 6, {"v": (10, 1)}, epoch=1, end_s=5.5)) is None
    assert take(table, cut(A, 2, {"v": (10, 1)}, epoch=2, end_s=7)) is not None


def test_streams_are_added_once_and_unknown_ones_are_nobody(table):
    first = list(table.row_of)
    assert table.add_streams([dataclasses.replace(table.streams[0])]) == []
    taken = take(table, cut(A, 1, {"v": (10, 1), "stranger": (5, 1)}))
    assert taken is not None
    assert taken.plan.rows.tolist() == [0, -1]
    assert list(table.row_of) == first
    assert table.recent[0].rows.tolist() == [0, -1]
    assert table.use["v"].last_ops_per_s == 10


def test_rates_are_smoothed_and_the_last_is_kept(table):
    take(table, cut(A, 1, {"v": (100, 1)}))
    take(table, cut(A, 2, {"v": (200, 1)}))
    use = table.use["v"]
    assert use.last_ops_per_s == 200
    assert use.ops_per_s == pytest.approx(125)
    assert use.last_cost_per_s == pytest.approx(212.5)
    take(table, cut(A, 3, {}))
    assert table.use["v"].last_ops_per_s == 0
    assert table.use["v"].peak_cost_per_s == pytest.approx(212.5 * 0.9)


def test_a_cut_that_caps_have_ended_at_once_is_no_peak_in_full(table):
    """Five I/Os in 5 ms are a thousand a second, and no demand."""
    take(table, cut(A, 1, {"v": (100, 1)}))
    take(table, cut(A, 2, {"v": (5, 1)}, end_s=1.005, duration_s=0.005))
    use = table.use["v"]
    assert use.last_ops_per_s == 1000
    assert use.peak_cost_per_s == pytest.approx(106.25 * 0.9)
    take(table, cut(A, 3, {"v": (60, 1)}, end_s=1.305, duration_s=0.3))
    assert table.use["v"].peak_cost_per_s == pytest.approx(212.5)


def test_a_volume_that_was_exported_once_and_never_used_has_no_backend_any_more() -> None:
    made = GatewayTable(A)
    assert made.backend_of("gone") == ""


def test_two_cuts_say_how_long_their_host_waited_for_io(table):
    found = []
    for seq, said in enumerate(
        [{"psi": 500_000}, {"psi": 515_000}, {}, {"psi": 9}, {"psi": "x"}, {"psi": 3}], 1
    ):
        take(table, dataclasses.replace(cut(A, seq, {"v": (1, 1)}, end_s=seq), extra=said))
        found.append(table.io_waited_ratio)
    assert found == [None, 0.015, None, None, None, None]
    for seq, psi in ((7, 9_000_000), (8, 1)):
        take(table, dataclasses.replace(cut(A, seq, {"v": (1, 1)}, end_s=seq), extra={"psi": psi}))
        found.append(table.io_waited_ratio)
    assert found[6:] == [1.0, None], "all of it; a host that was started again"

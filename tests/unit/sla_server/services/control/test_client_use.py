"""Use of clients: taken up cut by cut, it is what summing the last cuts again gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pmdaemon.wire.names import stream_id
from sla_server.services.control.client_use import ClientUses
from sla_server.services.control.usage import GatewayTable, KnownStream, UsageTable
from tests.support.worlds import cut

GATEWAYS = ("g0", "g1", "g2")
CLIENTS = tuple(f"c{number}" for number in range(40))


def announced(table: GatewayTable, clients: tuple[str, ...]) -> None:
    table.add_streams(
        [KnownStream(stream_id(table.gateway_id, "v", name), "v", name, "disk") for name in clients]
    )


@pytest.mark.parametrize("seed", range(8))
def test_use_that_is_taken_up_cut_by_cut_is_that_of_the_last_cuts(seed: int) -> None:
    """Cuts that are missed, planes that are apart, clients that come, and volumes that go, among them."""
    rng = random.Random(seed)
    usage_table = UsageTable()
    tables = [GatewayTable(gateway, usage_table) for gateway in GATEWAYS]
    for table in tables:
        announced(table, CLIENTS[:30])
    followed = ClientUses()
    for second in range(1, 30):
        for table in tables:
            if rng.random() < 0.15:
                continue
            names = rng.sample(CLIENTS, rng.randrange(41))
            parts = [names[:20], names[20:]] if rng.random() < 0.1 else [names]
            for part in parts:
                ios = {f"v/{name}": (rng.randrange(1, 90), 1.0) for name in part}
                held, span_s = rng.choice((0, 3)), rng.choice((1.0, 1.0, 0.7))
                made = cut(table.gateway_id, second, ios, held=held, duration_s=span_s)
                table.keep(made, table.rows_of(made.counters[0]))
        if second == 12:
            announced(tables[1], CLIENTS)
        if second == 20:
            tables[2].forget({"v"})
        if rng.random() < 0.8:
            followed.refresh(tables)
            again = ClientUses()
            again.refresh(tables)
            for table in tables:
                found, wanted = (uses.values[:, table.numbers] for uses in (followed, again))
                assert np.array_equal(found, wanted)


def test_cuts_that_are_only_of_streams_not_announced_count_nowhere() -> None:
    usage_table = UsageTable()
    tables = [GatewayTable(gateway, usage_table) for gateway in GATEWAYS[:2]]
    announced(tables[0], CLIENTS[:1])
    uses = ClientUses()
    for second in range(1, 5):
        for table in tables:
            made = cut(table.gateway_id, second, {"v/c0": (10, 1.0)})
            table.keep(made, table.rows_of(made.counters[0]))
        uses.refresh(tables)
    before = uses.values.sum()
    assert before > 0
    announced(tables[1], CLIENTS[:1])
    uses.refresh(tables)
    assert uses.values.sum() == before


def test_a_time_that_caps_have_ended_at_once_is_no_peak_in_full() -> None:
    table, uses = GatewayTable("g0", UsageTable()), ClientUses()
    announced(table, CLIENTS[:1])
    for end_s, ios, span_s in ((1.0, 100, 1.0), (1.005, 5, 0.005)):
        made = cut("g0", round(end_s * 1000), {"v/c0": (ios, 1.0)}, end_s=end_s, duration_s=span_s)
        table.accept(made, made.start_unix_us + made.duration_us, 0, 3e6, 0)
        table.keep(made, table.rows_of(made.counters[0]))
    found = uses.of(table, "v/c0")
    assert found is not None
    assert found.last_ops_per_s == 1000
    assert found.peak_cost_per_s == pytest.approx(106.25)

import errno
import os
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from gateway_agent.errors import ExportRefused, UpstreamError
from gateway_agent.nbd import exports
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import ExportTable, FittedCost, client_of
from pmdaemon.wire.rates import Rates
from tests.support.nbd import MIB, FakeSocket, Rig, plane_config

SECOND = 10**9

VOLUMES = {"vol-1", "vol-2", "odd@name"}


@pytest.mark.parametrize(
    ("name", "rule", "expected"),
    [
        ("vol-1", "address", ("vol-1", "10.0.0.7")),
        ("vol-1", "export-suffix", ("vol-1", "10.0.0.7")),
        ("vol-1@host-a", "export-suffix", ("vol-1", "host-a")),
        ("odd@name", "export-suffix", ("odd@name", "10.0.0.7")),
        ("odd@name@host-a", "export-suffix", ("odd@name", "host-a")),
    ],
)
def test_the_export_name_means_a_volume_and_a_client(name, rule, expected):
    assert client_of(name, "10.0.0.7", VOLUMES, rule) == expected


@pytest.mark.parametrize(
    ("name", "rule", "code"),
    [
        ("", "address", p.Rep.ERR_UNKNOWN),
        ("nope", "export-suffix", p.Rep.ERR_UNKNOWN),
        ("vol-1@host-a", "address", p.Rep.ERR_UNKNOWN),
        ("nope@host-a", "export-suffix", p.Rep.ERR_UNKNOWN),
        ("vol-1@", "export-suffix", p.Rep.ERR_INVALID),
        ("vol-1@a b", "export-suffix", p.Rep.ERR_INVALID),
    ],
)
def test_names_that_mean_nothing_are_refused(name, rule, code):
    with pytest.raises(ExportRefused) as caught:
        client_of(name, "10.0.0.7", VOLUMES, rule)
    assert caught.value.code == code


def test_the_empty_name_is_the_only_volume():
    assert client_of("", "uid-0", {"vol-1"}, "address") == ("vol-1", "uid-0")


def test_the_longest_name_that_can_be_is_shown_in_full():
    name = "v" * 128 + "@" + "c" * 128
    with pytest.raises(ExportRefused, match=f"no volume '{name}' here"):
        client_of(name, "10.0.0.7", VOLUMES, "export-suffix")


def test_an_export_that_is_read_only_offers_no_change_whatever_its_upstream_can():
    entry = {"volume": "up", "backend": "b", "upstream": "nbd://127.0.0.1/far", "read_only": True}
    table = ExportTable(plane_config(entry), Rig().context, lambda: None)
    seen = table.learn(table.volumes["up"], p.ExportFacts(MIB, p.TX_PASSED_ON & ~p.TX_READ_ONLY | 1 << 9))
    assert seen.flags == p.TX_PASSED_ON & ~p.TX_CHANGES
    table.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_behind_a_flush_that_failed_a_client_has_no_new_opening_beside_its_other_connections(
    tmp_path, monkeypatch, workers
):
    """A flush there would succeed for what came by the others, and is lost."""
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(MIB))
    rig = Rig()
    entry = {"volume": "vol-1", "backend": "b", "file": str(path), "workers": workers}
    table = ExportTable(plane_config(entry), rig.context, lambda: None)

    def fails(_fd):
        raise OSError(errno.EIO, "what was written is lost")

    def connect(client):
        volume = table.volumes["vol-1"]
        facts, stream = table.file_facts(volume), table.stream(volume, client)
        return table.session(FakeSocket(), volume, stream, facts, None)

    first, other = connect("host-a"), connect("host-b")
    with monkeypatch.context() as disk:
        disk.setattr(os, "fdatasync", fails)
        assert other.storage.flush()
    again = connect("host-a")
    assert again.storage is first.storage
    assert again.storage.flush() != 0
    elsewhere = connect("host-c")
    assert elsewhere.storage.flush() == 0
    for each in (first, again):
        each.close("the client is gone")
    later = connect("host-a")
    assert later.storage is elsewhere.storage
    other_file = tmp_path / "other.img"
    other_file.write_bytes(bytes(MIB))
    table.apply(plane_config(entry | {"file": str(other_file)}))
    assert connect("host-b").storage.flush() == 0, "another file has lost nothing"
    for stream in rig.cuts.table.streams:
        for each in tuple(stream.sessions):
            each.close("test is over")
    rig.loop.fire(1)
    table.close()


def fitted(volume, backend="b", **keys):
    return {"volume": volume, "backend": backend, "upstream": "nbd://127.0.0.1/x", "cost": "fitted", **keys}


def costs_of(table):
    return {
        name: (each.export.cost_read, each.export.cost_write, each.export.cost_bytes)
        for name, each in table.volumes.items()
    }


def test_fitted_costs_hold_at_once_for_exports_that_want_them_and_over_a_reload():
    rig = Rig()
    constant = fitted("c") | {"cost": "constants"}
    config = plane_config(fitted("a", cost_read=3.0, cost_write=4.0), fitted("d", "other"), constant)
    table = ExportTable(config, rig.context, lambda: None)
    stream = table.stream(table.volumes["a"], "host-a")
    constants = (1.0, 1.0, 65_536.0)
    assert costs_of(table) == {"a": (3.0, 4.0, 65_536.0), "d": constants, "c": constants}
    table.set_costs({"b": FittedCost(2.5, 4096.0)})
    assert costs_of(table) == {"a": (1.0, 2.5, 4096.0), "d": constants, "c": constants}
    assert table.stream(table.volumes["a"], "host-a") is stream
    volume = table.volumes["a"]
    table.apply(plane_config(fitted("a"), fitted("e"), constant))
    assert table.volumes["a"] is volume
    assert costs_of(table) == {"a": (1.0, 2.5, 4096.0), "e": (1.0, 2.5, 4096.0), "c": constants}
    table.set_costs({"b": FittedCost(None, 8192.0)})
    assert costs_of(table)["a"] == (1.0, 1.0, 8192.0)
    table.set_costs({})
    assert costs_of(table) == {"a": constants, "e": constants, "c": constants}
    table.close()


def test_a_volume_whose_cost_the_server_limits_keeps_its_costs_until_it_does_no_more():
    config = plane_config(fitted("a"), fitted("d"))
    table = ExportTable(config, Rig().context, lambda: None)
    former, new = (1.0, 2.5, 4096.0), (1.0, 5.0, 8192.0)
    table.set_costs({"b": FittedCost(2.5, 4096.0)})
    table.set_cost_capped(frozenset({"a"}))
    table.set_costs({"b": FittedCost(5.0, 8192.0)})
    assert costs_of(table) == {"a": former, "d": new}
    table.set_cost_capped(frozenset({"a", "d"}))
    table.apply(config)
    assert costs_of(table) == {"a": former, "d": new}, "nor by a reload"
    table.set_costs({})
    table.set_cost_capped(frozenset({"d"}))
    assert costs_of(table) == {"a": (1.0, 1.0, 65_536.0), "d": new}
    table.close()


def test_a_fit_that_saw_no_writes_keeps_what_the_file_says_of_them_against_reads():
    table = ExportTable(
        plane_config(fitted("a", cost_read=4.0, cost_write=12.0)), Rig().context, lambda: None
    )
    for _ in range(2):
        table.set_costs({"b": FittedCost(None, 8192.0)})
        assert costs_of(table) == {"a": (1.0, 3.0, 8192.0)}
    table.set_costs({})
    assert costs_of(table) == {"a": (4.0, 12.0, 65_536.0)}
    table.close()


def test_what_was_charged_stays_charged_when_costs_change():
    rig = Rig()
    table = ExportTable(plane_config(fitted("vol-1", "disk")), rig.context, lambda: None)
    stream = table.stream(table.volumes["vol-1"], "host-a")
    stream.record([0, 4096 << 4, 1, 2, 3], 3)
    stream.fold()
    before = stream._cost()
    table.set_costs({"disk": FittedCost(2.0, 4096.0)})
    assert stream._cost() == before == 1 + 4096 / 65_536
    stream.record([0, 4096 << 4, 1, 2, 3], 3)
    stream.fold()
    assert stream._cost() == before + 2
    table.close()


def test_a_process_that_takes_over_gives_no_second_burst():
    rig = Rig()
    context = replace(rig.context, bursts_since_ns=rig.clock.monotonic_ns())
    table = ExportTable(plane_config(fitted("vol-1", "disk")), context, lambda: None)
    volume = table.volumes["vol-1"]
    long = Rates(ops_per_s=10, burst_s=10.0)
    volume.set_caps(long, rig.clock.monotonic_ns(), {"host-a": long})
    rig.clock.advance(1)
    now_ns = rig.clock.monotonic_ns()
    for rates in (volume.rates, volume.clients.held_of("host-a").own):
        assert rates.ready_ns() == now_ns - SECOND, "what a second has brought"
    table.close()


@pytest.mark.parametrize("flags", [0, p.TX_CAN_MULTI_CONN])
def test_that_an_upstream_allows_one_connection_is_said_once(flags):
    settings = {"volume": "up", "backend": "b", "upstream": "nbd://127.0.0.1/x", "upstream_connections": 4}
    table = ExportTable(plane_config(settings), Rig().context, lambda: None)
    with capture_logs() as logs:
        for _ in range(3):
            table.learn(table.volumes["up"], p.ExportFacts(MIB, p.TX_HAS_FLAGS | flags))
    said = [entry["event"] for entry in logs if entry["log_level"] == "warning"]
    assert said == ([] if flags else ["one-upstream-connection"])
    table.close()


def test_an_upstream_that_has_never_answered_is_asked_again_until_it_does(monkeypatch):
    """Only the next client asked it, so an agent that was started before its storage did not know of it."""
    asked = []

    class Opening:
        def __init__(self, _loop, _uri, on_ready, on_failed, **_settings):
            self.agreed = p.ReplyMode()
            asked.append((on_ready, on_failed))

    monkeypatch.setattr(exports, "UpstreamOpening", Opening)
    rig, entry = Rig(), {"volume": "up", "backend": "b", "upstream": "nbd://127.0.0.1/x"}
    table = ExportTable(plane_config(entry), rig.context, lambda: None)
    volume, waits = table.volumes["up"], []
    table.ask(volume)
    refused = UpstreamError("nbd://127.0.0.1/x", "connection refused")
    for _ in range(8):
        asked[-1][1](refused)
        due_ns, ask = rig.loop.timers.pop(("ask", volume))
        waits.append((due_ns - rig.clock.monotonic_ns()) / SECOND)
        ask(due_ns)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    assert len(asked) == 9
    asked[-1][0](None, p.ExportFacts(MIB, p.TX_HAS_FLAGS))
    assert [each["size_bytes"] for each in table.describe()] == [MIB]
    asked[-1][1](refused)
    assert ("ask", volume) not in rig.loop.timers, "what is known is asked by clients"
    table.close()


def test_an_upstream_that_is_removed_is_not_asked_again(monkeypatch):
    failed = []
    monkeypatch.setattr(exports, "UpstreamOpening", lambda *given, **_settings: failed.append(given[3]))
    rig = Rig()
    table = ExportTable(
        plane_config({"volume": "up", "backend": "b", "upstream": "nbd://127.0.0.1/x"}),
        rig.context,
        lambda: None,
    )
    volume = table.volumes["up"]
    table.ask(volume)
    table.apply(plane_config())
    failed[0](UpstreamError("nbd://127.0.0.1/x", "connection refused"))
    assert ("ask", volume) not in rig.loop.timers
    table.close()

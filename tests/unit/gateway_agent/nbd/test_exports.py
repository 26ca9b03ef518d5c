import pytest

from gateway_agent.errors import ExportRefused
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import ExportTable, client_of
from tests.support.nbd import MIB, Rig, plane_config

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

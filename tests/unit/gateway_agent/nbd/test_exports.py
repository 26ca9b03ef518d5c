import pytest

from gateway_agent.errors import ExportRefused
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import client_of

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

import json

import pytest
from pydantic import ValidationError

from gateway_agent.errors import ExportRefused
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.config import Address, PlaneConfig, load_plane, parse_listen, parse_upstream
from gateway_agent.nbd.exports import client_of
from pmdaemon.errors import ConfigError


def config(**changes):
    values = {
        "plane": "nbd-0",
        "listen": ["tcp:127.0.0.1:0"],
        "control_socket": "nbd-0.sock",
        "exports": [{"volume": "vol-1", "backend": "disk", "upstream": "nbd+unix:///?socket=up.sock"}],
    }
    return values | changes


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/a/b.sock", Address(path="/a/b.sock")),
        ("tcp:127.0.0.1:0", Address(host="127.0.0.1")),
        ("tcp:[::1]:99", Address(host="::1", port=99)),
    ],
)
def test_listen(text, address):
    assert parse_listen(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "unix:", "tcp:1", "tcp::1", "tcp:h:70000", "http:h:1"])
def test_bad_listen(text):
    with pytest.raises(ValueError, match="unix:PATH"):
        parse_listen(text)


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        ("nbd+unix:///a%20b?socket=/x/y.sock", (Address(path="/x/y.sock"), "a b")),
        ("nbd+unix:///?socket=up.sock", (Address(path="up.sock"), "")),
        ("nbd://127.0.0.1/v", (Address(host="127.0.0.1", port=10809), "v")),
        ("nbd://[::1]:5/v/w", (Address(host="::1", port=5), "v/w")),
        ("nbd://localhost", (Address(host="127.0.0.1", port=10809), "")),
    ],
)
def test_upstream(uri, expected):
    assert parse_upstream(uri) == expected


@pytest.mark.parametrize("uri", ["", "nbd+unix:///x", "nbds://h/x", "nbd:///x", "nbd://storage.example/x"])
def test_bad_upstream(uri):
    with pytest.raises(ValueError, match="nbd"):
        parse_upstream(uri)


EXPORT = {"volume": "v", "backend": "b"}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"exports": []}, "at least 1"),
        ({"exports": [EXPORT]}, "exactly one of upstream and file"),
        ({"exports": [EXPORT | {"file": "f", "upstream": "nbd://127.0.0.1/x"}]}, "exactly one"),
        ({"exports": [EXPORT | {"upstream": "nbd://127.0.0.1/x", "workers": 2}]}, "workers"),
        ({"exports": [EXPORT | {"file": "f"}, EXPORT | {"file": "g"}]}, "twice"),
        ({"exports": [EXPORT | {"file": "f", "volume": "a/b"}]}, "letters"),
        ({"exports": [EXPORT | {"file": "f", "cost_read": 0}]}, "greater than or equal to 0.001"),
        ({"static_caps": {"other": {"ops_per_s": 1}}}, "not exported"),
        ({"static_caps": {"vol-1": {"ops_per_s": -1}}}, "greater than or equal to 0.001"),
        ({"listen": ["tcp:0.0.0.0:1"]}, "without TLS"),
        ({"client_rule": "magic"}, "export-suffix"),
        ({"speed": 9}, "no such key"),
    ],
)
def test_wrong_configuration_says_what_is_wrong(tmp_path, changes, problem):
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(config(**changes)))
    with pytest.raises(ConfigError, match=problem):
        load_plane(file, "nbd-0")


def test_remote_clients_are_let_in_on_request():
    PlaneConfig.model_validate(config(listen=["tcp:0.0.0.0:1"], allow_remote_plaintext=True))
    with pytest.raises(ValidationError):
        PlaneConfig.model_validate(config(listen=["tcp:storage.example:1"]))


def test_the_file_of_another_plane_or_no_file(tmp_path):
    file = tmp_path / "plane.json"
    file.write_text(json.dumps(config()))
    assert load_plane(file, "nbd-0").client_rule == "address"
    with pytest.raises(ConfigError, match="nbd-0, not nbd-1"):
        load_plane(file, "nbd-1")
    with pytest.raises(ConfigError, match="existing file"):
        load_plane(tmp_path / "nope", "nbd-0")


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

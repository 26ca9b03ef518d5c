import errno
import socket

import pytest

from gateway_agent.errors import UpstreamError
from gateway_agent.nbd import sockets
from gateway_agent.nbd.sockets import Address, parse_listen, parse_upstream, uses_tls
from pmdaemon.errors import ConfigError


@pytest.fixture
def address(tmp_path):
    return Address(path=str(tmp_path / "gw.sock"))


def test_a_file_that_is_no_socket_is_left_alone(address, tmp_path):
    (tmp_path / "gw.sock").write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        sockets.listen_at(address, 0o600)
    assert (tmp_path / "gw.sock").read_text() == "precious"


def test_an_impossible_path_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="Choose another"):
        sockets.listen_at(Address(path=str(tmp_path / "no" / "gw.sock")), 0o600)


def test_connecting_to_nobody_is_an_upstream_error(address):
    with pytest.raises(UpstreamError, match="No such file"):
        sockets.begin_connect(address)


def test_without_a_descriptor_left_the_client_is_told_at_once(address, monkeypatch):
    def no_socket(*_args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(sockets.socket, "socket", no_socket)
    with pytest.raises(UpstreamError, match="Too many open files"):
        sockets.begin_connect(address)


def test_a_unix_client_is_called_by_its_uid():
    one, two = socket.socketpair()
    with one, two:
        assert sockets.client_name(one).startswith("uid-")


class Peer:
    family = socket.AF_INET6

    def __init__(self, host):
        self._host = host

    def getpeername(self):
        return (self._host, 1, 0, 0)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("::ffff:10.0.0.7", "10.0.0.7"),
        ("fe80::1%eth0", "fe80::1-eth0"),
        ("::1", "ip::1"),
        ("2001:db8::7", "2001:db8::7"),
    ],
)
def test_an_address_becomes_a_name(host, name):
    assert sockets.client_name(Peer(host)) == name


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
        ("nbds://10.0.0.5/v", (Address(host="10.0.0.5", port=10809), "v")),
    ],
)
def test_upstream(uri, expected):
    assert parse_upstream(uri) == expected
    assert uses_tls(uri) == uri.startswith("nbds")


@pytest.mark.parametrize("uri", ["", "nbd+unix:///x", "nbds://h/x", "nbd:///x", "nbd://storage.example/x"])
def test_bad_upstream(uri):
    with pytest.raises(ValueError, match="nbd"):
        parse_upstream(uri)

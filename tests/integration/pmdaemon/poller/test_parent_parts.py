"""Small parts of the parent, and the checks of what agents say of themselves."""

from __future__ import annotations

import errno
import resource
import selectors
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pmdaemon.errors import ConfigError, FrameTooLarge, MalformedFrame, WireError
from pmdaemon.poller import config as configuration
from pmdaemon.poller import parent as daemon
from pmdaemon.poller.parent import Daemon
from pmdaemon.runtime import open_files
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import cut, frame, names
from pmdaemon.wire.messages import agent
from tests.support import gateways
from tests.support.gateways import GATEWAY


def header_of(data: bytes) -> dict[str, Any]:
    return frame.decode(data).header


def test_port_file_is_whole(tmp_path: Path) -> None:
    daemon.write_port(tmp_path / "made" / "pmdaemon.port", 4711)
    assert (tmp_path / "made" / "pmdaemon.port").read_text() == "4711\n"
    assert [item.name for item in (tmp_path / "made").iterdir()] == ["pmdaemon.port"]


def test_listening_on_a_taken_port_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="in use"):
        daemon.listen(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize(
    ("limits", "wanted", "result"),
    [
        ((1024, 4096), 65536, 4096),
        ((1024, 4096), 2048, 2048),
        ((1024, -1), 65536, 65536),
        ((4096, 4096), 512, 4096),
    ],
)
def test_open_files_are_raised_as_far_as_allowed(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int, result: int
) -> None:
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _what: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _what, value: set_to.append(value))
    assert open_files.raise_open_files(wanted) == result
    assert set_to == [(result, limits[1])]


def test_a_hard_limit_too_low_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _what: (64, 128))
    with pytest.raises(ConfigError, match="LimitNOFILE"):
        open_files.raise_open_files(65536)


def test_hello() -> None:
    got = agent.Hello.parse(header_of(gateways.hello(GATEWAY.upper(), later=1)))
    assert (got.gateway_id, got.epoch, got.proto_min, got.proto_max) == (GATEWAY, 7, 1, 1)


@pytest.mark.parametrize(
    "over",
    [
        {"gw": "x"},
        {"gw": b"0" * 16},
        {"name": ""},
        {"name": "a b"},
        {"name": "../x"},
        {"ep": 0},
        {"ep": 1 << 64},
        {"ep": "7"},
        {"proto_min": True},
        {"proto_max": None},
        {"software": "x" * 300},
        {"software": "line\nbreak"},
    ],
)
def test_bad_hello(over: dict[str, Any]) -> None:
    header = header_of(gateways.hello()) | over
    with pytest.raises(MalformedFrame, match=next(iter(over))):
        agent.Hello.parse(header)


def test_register() -> None:
    got = agent.Registration.parse(header_of(gateways.register([[3, 5, 9], [7, 1, 0]], ("a", "b"))))
    assert [item["volume"] for item in got.exports] == ["a", "b"]
    assert got.spool == [(3, 5, 9), (7, 1, 0)]


EXPORT = {"volume": "v", "backend": "b", "size_bytes": 1, "read_only": False, "source": "nbd"}


@pytest.mark.parametrize(
    "header",
    [
        {},
        {"exports": [], "spool": None},
        {"exports": [5], "spool": []},
        {"exports": [EXPORT | {"source": "tape"}], "spool": []},
        {"exports": [EXPORT | {"read_only": 1}], "spool": []},
        {"exports": [EXPORT | {"size_bytes": -1}], "spool": []},
        {"exports": [EXPORT | {"volume": "a/b"}], "spool": []},
        {"exports": [EXPORT, EXPORT], "spool": []},
        {"exports": [], "spool": [[1, 2]]},
        {"exports": [], "spool": [[1, 5, 3]]},
        {"exports": [], "spool": [[0, 1, 1]]},
    ],
)
def test_bad_register(header: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrame, match="REGISTER"):
        agent.Registration.parse(header)


def test_lists_are_limited() -> None:
    with pytest.raises(FrameTooLarge):
        agent.Registration.parse({"exports": [EXPORT] * (agent.MAX_EXPORTS + 1), "spool": []})
    with pytest.raises(FrameTooLarge):
        agent.Streams.parse({"streams": [{}] * (cut.MAX_ROWS + 1)}, GATEWAY)


def test_stream_ids_are_checked() -> None:
    row = {"id": names.stream_id(GATEWAY, "v", "c"), "volume": "v", "client": "c", "backend": "b"}
    assert agent.Streams.parse({"streams": [row]}, GATEWAY).streams[0].stream_id == row["id"]
    with pytest.raises(MalformedFrame, match="is not that of volume"):
        agent.Streams.parse({"streams": [row | {"client": "d"}]}, GATEWAY)


def test_schema() -> None:
    header = header_of(gateways.schema())
    agent.Schema.parse(header)
    for over in ({"sch": 2}, {"columns": ["a"]}, {"buckets": 5}):
        with pytest.raises(MalformedFrame, match="SCHEMA"):
            agent.Schema.parse(header | over)


JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=17),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["gw", "name", "ep", "proto_min", "proto_max", "software", "exports", "spool", "streams", "id", "sch"]


@given(st.dictionaries(st.sampled_from(KEYS), JUNK))
def test_any_header_is_accepted_or_a_wire_error(header: dict[str, Any]) -> None:
    for parse in (
        agent.Hello.parse,
        agent.Registration.parse,
        agent.Schema.parse,
        lambda junk: agent.Streams.parse(junk, GATEWAY),
    ):
        try:
            parse(header)
        except WireError:
            continue


def test_without_descriptors_nothing_is_accepted_for_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    config = configuration.PmFile(runtime_dir=tmp_path, data_dir=tmp_path)
    config.pmdaemon.listen = "127.0.0.1:0"
    parent = Daemon(config, None, Stop(), clock)
    tries: list[int] = []

    class Listener:
        def accept(self) -> object:
            tries.append(1)
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return real.fileno()

    real = parent._listener
    monkeypatch.setattr(parent, "_listener", Listener())
    parent._selector.register(parent._listener, selectors.EVENT_READ)
    parent._accept(parent._listener)
    assert (len(tries), list(parent._selector.get_map())) == (1, [])
    parent._review_at_ns = clock.monotonic_ns() + 60 * 10**9
    assert parent._timeout_s() == 1.0
    parent._accept_again()
    assert not parent._selector.get_map()
    clock.advance(1.0)
    parent._accept_again()
    assert len(parent._selector.get_map()) == 1
    real.close()


def test_while_no_pair_has_room_a_connection_waits_and_the_others_keep_their_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    config = configuration.PmFile(runtime_dir=tmp_path, data_dir=tmp_path)
    config.pmdaemon.listen = "127.0.0.1:0"
    parent = Daemon(config, None, Stop(), clock)
    parent._selector.register(parent._listener, selectors.EVENT_READ)
    room, given = [False], []

    class Manager:
        any_takes = True

        def new(self, _sock: socket.socket, address: str) -> object | None:
            if not room[0]:
                return None
            given.append(address)
            return self

    monkeypatch.setattr(parent, "pair_manager", Manager())
    peers = [socket.create_connection(("127.0.0.1", parent.port)) for _ in range(3)]
    names = ["{}:{}".format(*peer.getsockname()) for peer in peers]
    parent._accept(parent._listener)
    assert (given, parent.refused_connections, list(parent._selector.get_map())) == ([], 0, [])
    parent._accept_again()  # the pause is not over
    assert not parent._selector.get_map()
    clock.advance(0.1)
    parent._accept_again()  # still no room: the same one waits on
    assert (given, list(parent._selector.get_map())) == ([], [])
    room[0] = True
    clock.advance(0.1)
    parent._accept_again()
    parent._accept(parent._listener)
    assert (given, parent.refused_connections) == (names, 0)
    for peer in peers:
        peer.close()
    parent._selector.close()
    parent._listener.close()

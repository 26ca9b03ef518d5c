"""Syslog against real sockets: TCP with counted frames, TLS, Unix datagrams and streams."""

from __future__ import annotations

import re
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.runtime.clock import Deadline
from sla_server.events.documents import SyslogSpec
from sla_server.events.recipients.base import CONFIRMED, Answer, Outcome
from sla_server.events.recipients.network import Resolver
from sla_server.events.recipients.syslog import Syslog
from tests.support.nbd_certificates import NbdAuthority
from tests.support.notices import notice
from tests.support.receivers import stream_listener


class Frames:
    """Reads counted messages of one connection in a thread."""

    def __init__(self, listener: socket.socket, count: int, context: ssl.SSLContext | None = None) -> None:
        self.messages: list[bytes] = []
        self._listener = listener
        self._count = count
        self._context = context
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        sock, _ = self._listener.accept()
        if self._context is not None:
            sock = self._context.wrap_socket(sock, server_side=True)
        with sock, sock.makefile("rb") as stream:
            for _ in range(self._count):
                digits = b""
                while (byte := stream.read(1)) not in (b" ", b""):
                    digits += byte
                self.messages.append(stream.read(int(digits)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made: list[Syslog] = []

    def build(**fields: Any) -> Syslog:
        spec = SyslogSpec.model_validate(fields)
        made.append(Syslog("log", spec, tmp_path, Resolver(), timeout_s=10, most_notices=100, process=7))
        return made[-1]

    yield build
    for target in made:
        target.close()


def _deliver(target: Syslog, *numbers: int, limit_s: float = 60) -> Answer:
    return target.deliver([notice(number) for number in numbers], Deadline(limit_s))


def _ids(messages: list[bytes]) -> list[bytes]:
    return [found[1] for each in messages if (found := re.search(rb'id="([^"]+)"', each))]


def test_counted_frames_over_one_connection(make: Any) -> None:
    with stream_listener() as listener:
        frames = Frames(listener, 3)
        target = make(server="127.0.0.1", port=listener.getsockname()[1])
        assert _deliver(target, 1, 2) == CONFIRMED
        assert _deliver(target, 3) == CONFIRMED
        frames.thread.join(60)
    assert _ids(frames.messages) == [b"event-1", b"event-2", b"event-3"]


def test_a_server_that_closed_is_connected_to_again(make: Any) -> None:
    with stream_listener() as listener:
        target = make(server="127.0.0.1", port=listener.getsockname()[1])
        first = Frames(listener, 1)
        assert _deliver(target, 1) == CONFIRMED
        first.thread.join(60)  # it has closed its connection
        second = Frames(listener, 1)
        assert _deliver(target, 2) == CONFIRMED
        second.thread.join(60)
    assert _ids(first.messages + second.messages) == [b"event-1", b"event-2"]


def test_bytes_that_nobody_takes_are_not_confirmed(make: Any) -> None:
    with stream_listener() as listener:
        target = make(server="127.0.0.1", port=listener.getsockname()[1])
        answers = [_deliver(target, *range(1, 101), limit_s=1.0) for _ in range(1)]
        while answers[-1] == CONFIRMED:  # until the buffers of the kernel are full
            answers.append(_deliver(target, *range(1, 101), limit_s=1.0))
    assert answers[-1].outcome is Outcome.RETRY


def test_tls_and_a_wrong_certificate(make: Any, tmp_path: Path) -> None:
    authority = NbdAuthority(tmp_path / "ca")
    (tmp_path / "ca.pem").write_bytes(authority.file.read_bytes())
    folder = authority.issue("server", "log", "127.0.0.1")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server-cert.pem", folder / "server-key.pem")
    with stream_listener() as listener:
        where = {"server": "127.0.0.1", "port": listener.getsockname()[1], "tls": True}
        frames = Frames(listener, 1, context)
        assert _deliver(make(**where, ca_file="ca.pem"), 1) == CONFIRMED
        frames.thread.join(60)
        assert _ids(frames.messages) == [b"event-1"]

        def refused() -> None:
            sock, _ = listener.accept()
            with (
                pytest.raises((ssl.SSLError, OSError)),
                context.wrap_socket(sock, server_side=True) as stream,
            ):
                stream.recv(1)
            sock.close()

        thread = threading.Thread(target=refused, daemon=True)
        thread.start()
        answer = _deliver(make(**where), 1)
        thread.join(60)
    assert answer.outcome is Outcome.RETRY
    assert answer.reason.startswith("its certificate is not accepted: ")


def test_unix_datagrams(make: Any, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        server.bind(str(tmp_path / "log"))
        server.settimeout(60)
        assert _deliver(make(unix=str(tmp_path / "log")), 1, 2) == CONFIRMED
        messages = [server.recv(65_536) for _ in range(2)]
    assert _ids(messages) == [b"event-1", b"event-2"]
    assert messages[0].startswith(b"<130>1 ")


def test_a_unix_stream(make: Any, tmp_path: Path) -> None:
    with stream_listener(socket.AF_UNIX, str(tmp_path / "log")) as listener:
        frames = Frames(listener, 2)
        assert _deliver(make(unix=str(tmp_path / "log")), 1, 2) == CONFIRMED
        frames.thread.join(60)
    assert _ids(frames.messages) == [b"event-1", b"event-2"]


def test_a_socket_that_is_not_there_is_named(make: Any, tmp_path: Path) -> None:
    answer = _deliver(make(unix=str(tmp_path / "log")), 1)
    assert answer == Answer(Outcome.RETRY, f"{tmp_path / 'log'}: No such file or directory")

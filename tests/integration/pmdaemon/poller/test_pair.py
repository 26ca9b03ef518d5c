"""A pair's process with a real mailbox: what it leaves behind."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from pmdaemon.mailbox import Layout, Route, attach, create_segment, ensure_private_dir
from pmdaemon.poller import pair
from pmdaemon.poller.config import PmFile
from pmdaemon.poller.outbound import Outbound
from pmdaemon.runtime.stop import Stop
from pmdaemon.wire import frame
from pmdaemon.wire.kinds import Kind

MIB = 1 << 20
ROUTES = (
    Route("services", "pair-0", MIB),
    Route("pair-0", "services", MIB),
    Route("pair-0", "dbmanager", MIB),
)


def test_what_was_taken_and_not_carried_out_is_left_to_the_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = PmFile(runtime_dir=tmp_path / "run", data_dir=tmp_path)
    ensure_private_dir(config.runtime_dir)
    create_segment(config.segment_path, Layout(("services", "dbmanager", "pair-0"), ROUTES, 256))
    lease = frame.encode(Kind.LEASE, {"until_unix_us": 1})
    monkeypatch.setattr(threading, "excepthook", lambda _told: None)

    def fail(_outbound: Outbound, _sender: str, _payload: object) -> None:
        raise ValueError("by the test")

    monkeypatch.setattr(Outbound, "_carry_out", fail)  # no message makes it fail
    parents, own = socket.socketpair()
    with parents, attach(config.segment_path, "services") as services:
        services.post("pair-0", lease)
        assert pair.run(config, 0, own.detach(), Stop()) == pair.EX_SOFTWARE
    with attach(config.segment_path, "pair-0") as successor:
        assert [bytes(message.payload) for message in successor.take()] == [lease]

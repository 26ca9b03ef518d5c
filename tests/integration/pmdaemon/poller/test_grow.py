"""The sizing decision carried out: a pair process is added and one retired, under load, and no cut is lost.

The parent runs in a thread of the test, so that its patience (5 s to grow, 60 s to shrink) can be shortened
and the need changed; pairs, mailbox and connections are real.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pmdaemon.poller import balance
from pmdaemon.poller import config as configuration
from pmdaemon.poller.parent import Daemon
from pmdaemon.runtime.stop import Stop
from tests.support.two_pairs import GATEWAYS, Fleet, TwoPairs, any_names, until

SECOND = 10**9


class InProcess(TwoPairs):
    """Room for two pairs; the parent is ``daemon``."""

    def start(self, **settings: Any) -> int:
        path = self.configure(**settings)
        self.config = configuration.load(path)
        self.stopping = Stop()
        self.daemon = Daemon(self.config, path, self.stopping)
        self.parent = threading.Thread(target=self.daemon.run)
        self.parent.start()
        return self.daemon.port

    def close(self) -> None:
        self.stopping.set()
        self.parent.join()
        super().close()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcess]:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})  # also on a machine with one processor
    for name in ("GROW_NS", "SETTLE_NS", "HOLD_NS", "SHRINK_NS"):
        monkeypatch.setattr(balance, name, SECOND)
    made = InProcess(tmp_path)
    yield made
    made.close()


def test_a_pair_is_added_and_retired_under_load(server: InProcess) -> None:
    port = server.start(max_pairs=2, thread_quantum_ms=1000)
    children = server.daemon.pair_manager.children
    fleet = Fleet.plain(port, any_names())
    try:
        until(server, lambda: len(server.stored) == GATEWAYS)
        assert len(children) == 1, "24 gateways of at most 2 ms each are done within 1000 ms"
        # Now they must be done within 0.1 ms: 24 * T_ptmax (20 us at least) / 100 us is 5 or more pairs.
        server.config.pmdaemon.thread_quantum_ms = 0.1
        until(server, lambda: "pair-1" in server.served_by.values())
        assert server.daemon.pair_manager.needed == 2, "by the formula more, by the processors two"
        added = children[1].process
        before = dict(server.stored)
        until(server, lambda: all(server.stored[name] > before[name] + 3 for name in before))
        server.config.pmdaemon.thread_quantum_ms = 1000
        until(server, lambda: len(children) == 1)
        assert added is not None
        until(server, lambda: added.returncode is not None)
        assert added.returncode == 0, "it ended by itself, asked to"
        until(server, lambda: set(server.served_by.values()) == {"pair-0"})
        assert set(server.daemon.pair_manager.owners) == {0}
        before = dict(server.stored)
        until(server, lambda: all(server.stored[name] > before[name] + 3 for name in before))
        assert fleet.ended == {}, "no session was refused by any of it"
        assert server.holes == []
        judged = server.judged()
        assert len(judged) == len(set(judged)), "no pair judged one twice"
    finally:
        fleet.close()

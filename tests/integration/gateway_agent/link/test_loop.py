"""The link's loop counts its turns: a clock that moves only by what the loop means to sleep, real sockets."""

from __future__ import annotations

import random
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gateway_agent.link import loop as module
from gateway_agent.link.loop import PLANES_GRACE_NS, LinkLoop
from pmdaemon.runtime.backoff import Backoff
from pmdaemon.runtime.clock import FakeClock
from pmdaemon.runtime.stop import Stop
from tests.support.link import Bench, FakePlane

MOST_TURNS = 200  # some 30 are needed; a loop that spins makes as many as it is let


class CountedSelector(selectors.EpollSelector):
    """Does not wait: the clock moves instead."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.turns = 0
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See ``selectors``."""
        assert timeout is not None
        self.turns += 1
        found = super().select(0)
        if not found:
            self._clock.advance(timeout)
        return found


@pytest.fixture
def unanswering() -> Iterator[list[tuple[str, int]]]:
    """Addresses of two servers whose dials get no answer: the kernel's line before each is full."""
    kept, addresses = [], []
    for _ in range(2):
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        kept += [listener, socket.create_connection(listener.getsockname())]
        addresses.append(("127.0.0.1", int(listener.getsockname()[1])))
    yield addresses
    for sock in kept:
        sock.close()


@pytest.mark.parametrize(
    "lost_after_s", [0.0, 0.7], ids=["before others are tried", "while others are tried"]
)
def test_a_plane_that_is_lost_while_servers_do_not_answer_makes_no_turns(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unanswering: list[tuple[str, int]],
    lost_after_s: float,
) -> None:
    bench = Bench(tmp_path)
    bench.core.replan({"nbd-0": ["vol-1"]}, {})
    clock, stop, path = bench.clock, Stop(), tmp_path / "nbd-0.sock"
    counted = CountedSelector(clock)
    # The loop makes its selector itself; nothing else of the link names one.
    names = SimpleNamespace(DefaultSelector=lambda: counted, EVENT_READ=selectors.EVENT_READ)
    monkeypatch.setattr(module, "selectors", names)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    backoff = Backoff(1.0, 5.0, 0.0, random.Random(1))
    loop = LinkLoop(bench.core, unanswering, {"nbd-0": str(path)}, backoff, stop, clock)
    began_ns, plane = clock.monotonic_ns(), FakePlane(clock=clock)
    accepted: list[socket.socket] = []
    introduced_ns: list[int] = []

    def on_turn() -> None:
        assert counted.turns < MOST_TURNS, f"it spins, {(clock.monotonic_ns() - began_ns) / 1e9:.2f} s on"
        now_ns = clock.monotonic_ns()
        if not accepted:
            try:
                accepted.append(listener.accept()[0])
            except BlockingIOError:
                return
            accepted[0].sendall(plane.hello())
        elif bench.core.planes["nbd-0"].source.can_be_asked and not introduced_ns:
            introduced_ns.append(now_ns)
        if introduced_ns and now_ns >= introduced_ns[0] + lost_after_s * 1e9 and listener.fileno() >= 0:
            listener.close()
            path.unlink()
            accepted[0].close()
        if now_ns >= began_ns + 2 * PLANES_GRACE_NS:
            stop.set("the test has seen enough")

    loop.on_turn = on_turn
    loop.run()
    assert listener.fileno() == -1, "the plane was there, and was lost"
    assert not bench.core.planes["nbd-0"].source.can_be_asked

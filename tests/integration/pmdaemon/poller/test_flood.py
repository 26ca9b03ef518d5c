"""Ten thousand connection attempts on the real daemon: counted, bounded, and felt by nobody else."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pmdaemon.runtime.clock import Deadline
from pmdaemon.wire.kinds import Kind
from tests.support.daemon import Server
from tests.support.gateways import DEADLINE_S, Agent, hello

ATTEMPTS = 10_000
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close at once, by a reset
SAID = (b"", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", hello()[:-3], hello(), b"\x00" * 64)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    tmp_path.chmod(0o700)
    made = Server(tmp_path)
    yield made
    made.close()


def resident_mb(pid: int) -> float:
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in line]
    return int(line.split()[1]) / 1024


def attempt(port: int, number: int) -> None:
    """One stranger: says something or nothing, and ends well or by a reset."""
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as sock:
        if said := SAID[number % len(SAID)]:
            sock.sendall(said)
        if number % 2:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


class Figures:
    """The daemon's own figures, as Prometheus reads them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def total(self, name: str) -> float:
        found = text_string_to_metric_families(self._path.read_text())
        return sum(sample.value for family in found for sample in family.samples if sample.name == name)

    def refused(self) -> float:
        """Attempts that did not get anywhere, for whatever reason."""
        names = ("refusals_total", "strangers_turned_away_total", "refused_connections_total")
        return sum(self.total(f"sla_pmdaemon_{name}") for name in names)


def test_ten_thousand_attempts(server: Server) -> None:
    port = server.start(
        agent_users=["*"]
    )  # else those that are gone already are of nobody, and go no further
    server.watermarks()
    good = Agent.dial(port)
    good.register()
    good.answer(good.expect(Kind.POLL))
    figures, pair = Figures(server.directory / "metrics" / "pmdaemon.prom"), server.pair_pid()
    before_mb, log_bytes = resident_mb(pair), server.log.stat().st_size
    answered = 1
    for number in range(ATTEMPTS):
        attempt(port, number)
        if number % 200 == 0:
            good.answer(good.expect(Kind.POLL))
            answered += 1
    deadline = Deadline(2 * DEADLINE_S)
    while figures.refused() < ATTEMPTS:
        assert not deadline.passed, f"{figures.refused():.0f} of {ATTEMPTS} are accounted for"
        good.answer(good.expect(Kind.POLL))
        answered += 1
    assert figures.refused() == ATTEMPTS, "each is counted once"
    text = (server.directory / "metrics" / "pmdaemon.prom").read_text()
    for code in ("closed", "cut-short", "too-large", "malformed"):
        assert f'code="{code}"' in text
    # The last of them drain for a second; then nobody but the gateway is there.
    while figures.total("sla_pmdaemon_connections_open") > 1:
        assert not deadline.passed
        good.answer(good.expect(Kind.POLL))
        answered += 1
    assert len(os.listdir(f"/proc/{pair}/fd")) < 100
    assert resident_mb(pair) - before_mb < 50
    assert server.log.stat().st_size - log_bytes < 200_000, "the log is limited, the counting is not"
    assert "peer-refused" in server.log.read_text()
    assert "log-suppressed" in server.log.read_text()
    assert server.pair_pid() == pair, "the pair was not started again"
    server.until_seq(good.gateway_id, answered)
    # Nobody says durable here, so after 10 s they are asked for again: first occurrences count.
    assert list(dict.fromkeys(server.seqs(good.gateway_id))) == list(range(1, answered + 1))
    good.close()
    assert server.stop() == 0

"""A cap of one client over two volumes of a real plane: counts of two clients over NBD, by the plane's cuts.

What is counted has one direction only: no more than the rate allows for the time that passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway_agent.nbd import protocol as p
from pmdaemon.wire.kinds import Kind
from tests.support.planes import SIZE, Client, Link, Processes, wait_for

pytestmark = pytest.mark.e2e
DEPTH = 4
VOLUMES = ("vol-1", "vol-2")
OPEN_LEASE_US = 600_000_000


@contextmanager
def reading(run: Processes, *exports: str) -> Iterator[None]:
    """A connection to each export that reads at ``DEPTH`` until the end."""
    done = threading.Event()

    def work(client: Client) -> None:
        for _ in range(DEPTH):
            client.sock.sendall(p.request(p.Cmd.READ, 1, 0, 4096))
        while not done.is_set():
            assert len(client.exactly(16 + 4096)) == 16 + 4096
            client.sock.sendall(p.request(p.Cmd.READ, 1, 0, 4096))

    threads = [threading.Thread(target=work, args=(run.client(export),)) for export in exports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def cap(link: Link, gen: int, lease_us: int = OPEN_LEASE_US, **rates: float) -> None:
    clients = [{"client": "greedy", **rates}] if rates else None
    link.send(Kind.DP_CAPS, gen=gen, lease_us=lease_us, caps=[], whole_clients=clients)
    wait_for(f"caps {gen} in force", lambda: link.collect().header["tg"] == gen)


class Reads:
    """Completed reads by stream since it was made; ``rest`` adds what was completed meanwhile."""

    def __init__(self, link: Link) -> None:
        link.totals()
        self._link, self._since_s = link, time.monotonic()
        self.by: dict[tuple[str, str], int] = {}

    def rest(self) -> dict[tuple[str, str], int]:
        for stream, found in self._link.totals().items():
            self.by[stream] = self.by.get(stream, 0) + found["reads"]
        return self.by

    def least(self, client: str) -> int:
        """Of the volume that has the fewest."""
        return min(self.rest().get((volume, client), 0) for volume in VOLUMES)

    def of(self, client: str) -> int:
        return sum(count for (_, name), count in self.rest().items() if name == client)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._since_s


@pytest.fixture
def volumes(run: Processes, tmp_path: Path) -> Processes:
    exports: list[dict[str, object]] = []
    for name in VOLUMES:
        with open(tmp_path / name, "wb") as file:
            file.truncate(SIZE)
        exports.append({"volume": name, "backend": "disk", "file": f"{tmp_path}/{name}"})
    run.plane(exports=exports)
    return run


def test_a_client_has_one_rate_over_both_volumes_and_the_other_client_goes_on(volumes: Processes) -> None:
    link = volumes.link()
    assert "whole-client-caps" in link.hello.header["features"]
    rate, burst_s = 50.0, 2.0
    cap(link, 1, ops_per_s=rate, burst_s=burst_s)
    reads = Reads(link)
    with reading(volumes, "vol-1@greedy", "vol-2@greedy", "vol-2@other"):
        wait_for("the burst and some reads behind it", lambda: reads.of("greedy") >= (burst_s + 1) * rate)
        wait_for("the other client's reads", lambda: reads.of("other") >= 20 * rate)
        found = reads.of("greedy")
        assert found <= rate * (reads.elapsed_s() + burst_s) + 2
        assert min(reads.by["vol-1", "greedy"], reads.by["vol-2", "greedy"]) > 0

        # Another rate holds at once for what is held, and nothing stalls; so does the end of the cap.
        cap(link, 2, ops_per_s=2000.0)
        faster = Reads(link)
        wait_for("reads at the new rate", lambda: faster.least("greedy") > 500)
        cap(link, 3)
        free = Reads(link)
        wait_for("reads without a cap", lambda: free.least("greedy") > 500)

        # The cap of a server that is gone ends with its lease.
        link.send(
            Kind.DP_CAPS,
            gen=4,
            lease_us=300_000,
            caps=[],
            whole_clients=[{"client": "greedy", "ops_per_s": 1.0}],
        )
        wait_for("the lease has ended", lambda: link.collect().header["tg"] == 0)
        after = Reads(link)
        wait_for("reads after the lease", lambda: after.least("greedy") > 500)


def test_of_a_cap_on_one_volume_and_one_over_both_the_tighter_holds(volumes: Processes) -> None:
    link = volumes.link()
    link.send(
        Kind.DP_CAPS,
        gen=1,
        lease_us=OPEN_LEASE_US,
        caps=[],
        clients=[{"volume": "vol-1", "client": "greedy", "ops_per_s": 10.0}],
        groups=[{"group": "g", "volumes": {"vol-1": 1, "vol-2": 1}, "ops_per_s": 400.0}],
        whole_clients=[{"client": "greedy", "ops_per_s": 100.0}],
    )
    wait_for("the caps in force", lambda: link.collect().header["tg"] == 1)
    reads = Reads(link)
    with reading(volumes, "vol-1@greedy", "vol-2@greedy", "vol-2@other"):
        wait_for("reads of both", lambda: reads.of("greedy") >= 300 and reads.of("other") >= 300)
        reads.rest()
        elapsed_s = reads.elapsed_s()
        assert reads.by["vol-1", "greedy"] <= 10 * elapsed_s + 3
        assert reads.by["vol-1", "greedy"] + reads.by["vol-2", "greedy"] <= 100 * elapsed_s + 5
        assert sum(reads.by.values()) <= 400 * elapsed_s + 15

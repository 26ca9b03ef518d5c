"""What the cuts of a real plane say of storage that is killed, hangs, fails or is slow.

Every wait is for an event, with a deadline; nothing here asserts how fast something is.
"""

from __future__ import annotations

import signal
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from gateway_agent.errors import GatewayError
from gateway_agent.nbd import protocol as p
from pmdaemon.wire.cut import FAILED, IO_ANY, IO_READ, IO_WRITE, OUTSTANDING, OVERDUE
from pmdaemon.wire.kinds import Kind
from tests.support.nbd import as_cut
from tests.support.planes import SIZE, Client, Link, Processes, upstream, wait_for

pytestmark = pytest.mark.e2e
LIMIT_US = 5000
IOS = 32
STEADY_CUTS = 64  # in a row without a change; in each, an age that runs grows by some milliseconds


class Watch:
    """Collects cuts of one stream and sums their entries."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.sums: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
        self.newest: dict[tuple[int, int], tuple[int, int]] = {}
        entry = {"volume": "vol-1", "client": "*", "io": "any", "threshold_us": LIMIT_US}
        link.send(Kind.DP_THRESHOLDS, version=1, entries=[entry])
        self.collect()

    def collect(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Entries of the newest cut by (io, threshold)."""
        has_more = True
        while has_more:
            found = self.link.collect()
            has_more = found.header["more"]
            entries = as_cut(bytes(found.raw)).missed.tolist()
            self.newest = {(io, limit): (counted, missed) for _, io, limit, counted, missed in entries}
            for key, (counted, missed) in self.newest.items():
                self.sums[key][0] += counted
                self.sums[key][1] += missed
        return self.newest

    @property
    def beyond(self) -> int:
        """I/Os that took, or have taken, longer than the limit."""
        overdue, settled = self.sums[OVERDUE, LIMIT_US]
        return self.sums[IO_ANY, LIMIT_US][1] + overdue - settled

    def until(self, what: str, key: tuple[int, int], least: int) -> None:
        """Collect until the sum of an entry reaches ``least``."""

        def is_there() -> bool:
            self.collect()
            return self.sums[key][0] >= least

        wait_for(what, is_there)


def halt(server: subprocess.Popen[bytes]) -> None:
    """Stop a server, until all of its threads stand still: one that runs would answer some more."""
    server.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{server.pid}/task")
    wait_for(
        "it is stopped",
        lambda: all(
            (each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in threads.iterdir()
        ),
    )


def ask(client: Client, number: int = IOS) -> None:
    client.sock.sendall(b"".join(p.request(p.Cmd.READ, cookie, 0, 4096) for cookie in range(number)))


def answers(client: Client, number: int = IOS) -> set[int]:
    """Error numbers of the replies to ``number`` reads."""
    errors = set()
    for _ in range(number):
        _, error, _ = p.SIMPLE_REPLY.unpack(client.exactly(16))
        errors.add(error)
        if not error:
            assert len(client.exactly(4096)) == 4096
    return errors


def test_storage_that_hangs_is_in_every_cut_and_each_io_counts_once(run: Processes, tmp_path: Path) -> None:
    server = run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    ask(client)
    assert answers(client) == {0}
    watch.collect()
    before, overdue = watch.beyond, watch.sums[OVERDUE, LIMIT_US][0]
    halt(server)
    ask(client)
    watch.until("all are overdue", (OVERDUE, LIMIT_US), overdue + IOS)
    ages = [watch.newest[OUTSTANDING, 0]]
    while ages[-1][1] < 1500:
        ages.append(watch.collect()[OUTSTANDING, 0])
    assert ages == sorted(ages), "it grows older, and nothing completes"
    assert all(stalled_ms <= oldest_ms + 1 for oldest_ms, stalled_ms in ages)
    assert watch.beyond == before + IOS
    server.send_signal(signal.SIGCONT)
    assert answers(client) == {0}
    watch.until("all are complete", (IO_ANY, LIMIT_US), 2 * IOS)
    assert watch.newest[OVERDUE, LIMIT_US] == (0, IOS), "settled"
    assert watch.newest[OUTSTANDING, 0][0] == 0
    assert watch.newest[OUTSTANDING, 0][1] >= 1500, "the stall that has ended"
    assert watch.beyond == before + IOS
    assert watch.collect() == {}


def test_a_client_that_gives_up_on_hanging_storage_leaves_its_stall(run: Processes, tmp_path: Path) -> None:
    server = run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    halt(server)
    ask(client)
    watch.until("all are overdue", (OVERDUE, LIMIT_US), IOS)
    client.sock.close()
    watch.until("its I/Os are abandoned", (OVERDUE, 0), IOS)
    server.send_signal(signal.SIGCONT)
    assert watch.collect() == {}
    assert (watch.beyond, watch.sums[OVERDUE, LIMIT_US]) == (IOS, [IOS, 0])
    abandoned, ages_ms = watch.sums[OVERDUE + IO_READ, 0]
    assert (abandoned, ages_ms >= IOS * LIMIT_US // 1000) == (IOS, True)


def test_clients_that_give_up_one_after_another_leave_one_stall(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "--filter=delay", "memory", str(SIZE), "rdelay=60")
    run.plane(exports=[upstream(tmp_path)])
    watch, waited_ms = Watch(run.link()), 0

    def figures() -> tuple[int, int]:
        watch.collect()
        return watch.newest.get((OUTSTANDING + IO_READ, 0), (0, 0))

    for turn in range(1, 4):
        client = run.client("vol-1@host-a")
        ask(client, 1)
        wait_for("it has waited", lambda: figures()[0] >= 600)
        waited_ms += watch.newest[OUTSTANDING + IO_READ, 0][0]
        client.sock.close()
        watch.until("its I/O is abandoned", (OVERDUE, 0), turn)
    assert watch.sums[OVERDUE, 0][1] >= waited_ms
    ask(run.client("vol-1@host-a"), 1)
    wait_for("the stall goes on", lambda: figures()[0] >= 1000)
    age_ms, stalled_ms = watch.newest[OUTSTANDING + IO_READ, 0]
    assert stalled_ms >= age_ms + waited_ms


def test_storage_that_is_killed_fails_what_was_under_way_and_the_clients_that_come(
    run: Processes, tmp_path: Path
) -> None:
    server = run.nbdkit(tmp_path / "up.sock", "--filter=delay", "memory", str(SIZE), "rdelay=60")
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    ask(client)
    watch.until("all are overdue", (OVERDUE, LIMIT_US), IOS)
    server.send_signal(signal.SIGKILL)
    assert answers(client) == {p.EIO}
    watch.until("all have failed", (FAILED, 0), IOS)
    assert watch.sums[FAILED, LIMIT_US] == [IOS, IOS], "all of them beyond the limit, too"
    assert watch.sums[FAILED + IO_READ, 0] == [IOS, 0]
    assert watch.sums[OVERDUE, LIMIT_US] == [IOS, IOS]
    assert watch.beyond == IOS
    with pytest.raises(GatewayError, match="not available"):
        run.client("vol-1@host-a")
    assert watch.collect()[FAILED, 0] == (1, 0)

    def stall_ms(io: int) -> int:
        return watch.newest.get((OUTSTANDING + io, 0), (0, 0))[1]

    wait_for("the refusal is a stall", lambda: bool(watch.collect()) and stall_ms(IO_WRITE) >= 1500)
    assert stall_ms(IO_READ) == stall_ms(IO_ANY) == stall_ms(IO_WRITE)
    assert watch.newest[OUTSTANDING, 0][0] == 0, "nothing is outstanding"


def test_storage_that_answers_with_errors_only(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(
        tmp_path / "up.sock", "--filter=error", "memory", str(SIZE), "error=EIO", "error-pread-rate=100%"
    )
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    ask(client)
    assert answers(client) == {p.EIO}
    watch.until("all have failed", (FAILED, LIMIT_US), IOS)
    assert watch.sums[IO_ANY, LIMIT_US][0] == IOS
    assert watch.sums[FAILED, 0] == watch.sums[FAILED + IO_READ, 0] == [IOS, 0]


def test_a_client_that_takes_no_answers_makes_no_stall_and_grows_nothing_older(
    run: Processes, tmp_path: Path
) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    many = 1024  # their replies fit no socket buffer
    ask(client, many)

    seen: list[tuple[tuple[int, int] | None, int]] = []

    def is_steady() -> bool:
        watch.collect()
        figures = watch.newest.get((OUTSTANDING, 0)), watch.sums[IO_ANY, LIMIT_US][0]
        seen.append(figures)
        return figures[1] > 0 and len(seen) >= STEADY_CUTS and len(set(seen[-STEADY_CUTS:])) == 1

    wait_for("nothing completes, and nothing grows older", is_steady)
    assert watch.sums[IO_ANY, LIMIT_US][0] < many
    assert answers(client, many) == {0}
    watch.until("all are complete", (IO_ANY, LIMIT_US), many)
    assert watch.sums[IO_ANY, LIMIT_US][0] == many


def test_what_the_gateway_refuses_is_no_failure_of_the_storage(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "memory", str(SIZE))
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    client.sock.sendall(p.request(p.Cmd.READ, 1, SIZE, 4096))
    assert answers(client, 1) == {p.EINVAL}
    watch.until("it is counted", (IO_ANY, LIMIT_US), 1)
    assert [io for io, _ in watch.sums if io >= FAILED and watch.sums[io, 0] != [0, 0]] == []


def test_slow_storage_counts_each_io_once_wherever_the_cuts_fall(run: Processes, tmp_path: Path) -> None:
    run.nbdkit(tmp_path / "up.sock", "--filter=delay", "memory", str(SIZE), "rdelay=300ms")
    run.plane(exports=[upstream(tmp_path)])
    watch, client = Watch(run.link()), run.client("vol-1@host-a")
    few = 8  # their replies fit the socket: they complete unread
    for turn in range(1, 4):
        ask(client, few)
        watch.until("all are complete", (IO_ANY, LIMIT_US), turn * few)
        assert answers(client, few) == {0}
        overdue, settled = watch.sums[OVERDUE, LIMIT_US]
        assert watch.sums[IO_ANY, LIMIT_US] == [turn * few, turn * few]
        assert overdue == settled
        assert watch.beyond == turn * few


@pytest.mark.parametrize("mode", [p.SIMPLE_REPLIES, p.ReplyMode(structured=True)], ids=["simple", "chunks"])
def test_clients_that_leave_without_their_answers_are_no_error_of_the_upstream(
    run: Processes, tmp_path: Path, mode: p.ReplyMode
) -> None:
    """nbdkit 1.32 reports each reply that it cannot write, and of some fifty such clients one ends it."""
    record, clients = tmp_path / "record", 60
    server = run.nbdkit(tmp_path / "up.sock", "--filter=log", "memory", str(SIZE), f"logfile={record}")
    run.plane(exports=[upstream(tmp_path)])
    for _ in range(clients):
        leaving = run.client("vol-1@host-a", mode)
        ask(leaving, 64)
        leaving.sock.close()

    def have_left() -> bool:
        assert server.poll() is None, "it has ended"
        said = record.read_text()
        return said.count(" Disconnect ") >= clients and said.count(" Connect ") == said.count(" Disconnect ")

    wait_for("all connections have ended", have_left)
    assert "write reply" not in (tmp_path / "0.log").read_text()
    staying = run.client("vol-1@host-a")
    ask(staying)
    assert answers(staying) == {0}

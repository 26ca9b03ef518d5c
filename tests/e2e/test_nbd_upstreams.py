"""Several connections to an upstream that misbehaves: nbdkit with its filters, and a relay before it.

Errors reach the client as errors; no answer is wrong, is given twice or is missing without the end of the
connection; and what was acknowledged is never lost behind a FLUSH that succeeds. Each test is one client of
one connection, which has ``CONNECTIONS`` to its upstream.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway_agent.errors import GatewayError
from gateway_agent.nbd import protocol as p
from tests.e2e.test_nbd_faults import halt
from tests.e2e.test_nbd_model import is_listening
from tests.support.nbd_relay import Passage, Relay
from tests.support.planes import SIZE, Processes, upstream, wait_for

pytestmark = pytest.mark.e2e
MIB = 1 << 20
CONNECTIONS = 3
BLOCK = 4096
BLOCKS = 256  # that traffic uses
READ_BYTES = p.REQUEST.size  # of a request that has no payload


def serve(run: Processes, folder: Path, *command: str) -> subprocess.Popen[bytes]:
    """An nbdkit behind the relay; a thread for each connection (1.32 may end when one of several leaves)."""
    sock = folder / "real.sock"
    sock.unlink(missing_ok=True)
    server = run.start("nbdkit", "-f", "-U", str(sock), "--threads=1", *command)
    wait_for("nbdkit listens", lambda: is_listening(sock) or server.poll() is not None)
    assert server.poll() is None
    return server


def serve_file(
    run: Processes, folder: Path, filters: tuple[str, ...] = (), *settings: str
) -> subprocess.Popen[bytes]:
    names = [f"--filter={each}" for each in filters]
    return serve(run, folder, *names, "file", str(folder / "disk.img"), *settings)


def content_of(path: Path, size: int = SIZE) -> bytes:
    data = random.Random(path.name).randbytes(size)
    path.write_bytes(data)
    return data


@pytest.fixture
def relay(tmp_path: Path) -> Iterator[Relay]:
    with Relay(tmp_path / "up.sock", tmp_path / "real.sock") as made:
        yield made


class Volume:
    """A plane with one volume behind the relay, its client, and the connections that it uses."""

    def __init__(
        self,
        run: Processes,
        folder: Path,
        relay: Relay,
        mode: p.ReplyMode = p.SIMPLE_REPLIES,
        reconnect_s: float = 0,
        connections: int = CONNECTIONS,
    ) -> None:
        settings = {"upstream_connections": connections, "reconnect_s": reconnect_s}
        run.plane(exports=[upstream(folder) | settings])
        self.relay, self.connections, self.mode = relay, connections, mode
        self.link = run.link()
        self.client = run.client("vol-1@host-a", mode)
        self.cookie = 0
        # One that was made in order to learn the size leaves, and those beside the first one come.
        while len(used := relay.open()) != connections or min(each.answered for each in used) <= BLOCK:
            self.cookie += 1
            self.client.sock.sendall(p.request(p.Cmd.READ, self.cookie, 0, BLOCK))
            self.skip_answer(BLOCK)
        self.used = used

    def skip_answer(self, length: int) -> None:
        """An answer that is a success, in the client's form."""
        head = self.client.exactly(p.SIMPLE_REPLY_BYTES)
        if head.startswith(p.SIMPLE_REPLY_MAGIC.to_bytes(4, "big")):
            assert head[4:8] == bytes(4)
            assert len(self.client.exactly(length)) == length
        else:
            size = int.from_bytes(self.client.exactly(4), "big")
            assert head[6:8] != p.Chunk.ERROR.to_bytes(2, "big")
            assert len(self.client.exactly(size)) == size

    def ask(self, command: int, offset: int = 0, length: int = 0, data: bytes = b"") -> int:
        """Send one request, until the upstream has it: so that the next one is the next connection's."""
        self.cookie += 1
        before = sum(each.asked for each in self.relay.passages)
        self.client.sock.sendall(p.request(command, self.cookie, offset, length or len(data)) + data)
        wanted = before + READ_BYTES + len(data)
        wait_for("it was sent on", lambda: sum(each.asked for each in self.relay.passages) >= wanted)
        return self.cookie

    def answer(self, lengths: dict[int, int]) -> tuple[int, int, bytes]:
        """The next answer: cookie, error, data."""
        head = self.client.exactly(p.SIMPLE_REPLY_BYTES)
        assert len(head) == p.SIMPLE_REPLY_BYTES, "the connection has ended"
        magic, error, cookie = p.SIMPLE_REPLY.unpack(head)
        assert magic == p.SIMPLE_REPLY_MAGIC
        length = 0 if error else lengths.get(cookie, 0)
        data = self.client.exactly(length)
        assert len(data) == length, "the connection has ended within an answer"
        return cookie, error, data

    def read(self, offset: int, length: int) -> tuple[int, bytes]:
        cookie = self.ask(p.Cmd.READ, offset, length)
        found, error, data = self.answer({cookie: length})
        assert found == cookie
        return error, data

    def do(self, command: int, offset: int = 0, data: bytes = b"") -> int:
        """A request without data in its answer; its error."""
        cookie = self.ask(command, offset, data=data)
        found, error, _ = self.answer({})
        assert found == cookie
        return error

    def until_end(self) -> list[tuple[int, int]]:
        """Answers without data, (cookie, error), until the connection ends."""
        found = []
        while head := self.client.exactly(p.SIMPLE_REPLY_BYTES):
            assert len(head) == p.SIMPLE_REPLY_BYTES, "an answer is whole"
            _, error, cookie = p.SIMPLE_REPLY.unpack(head)
            found.append((cookie, error))
            assert error, "what follows an answer with data could not be told from another answer"
        return found

    def counts(self) -> dict[str, int]:
        return self.link.totals().get(("vol-1", "host-a"), {})


@pytest.fixture
def disk(tmp_path: Path) -> bytes:
    return content_of(tmp_path / "disk.img")


# -- errors, and answers in any order


class Traffic:
    """Random reads and writes of blocks, none of which is under way twice, against an array."""

    def __init__(self, volume: Volume, content: bytes, seed: int) -> None:
        self.volume, self.expected = volume, bytearray(content)
        self.rng = random.Random(seed)
        self.under_way: dict[int, tuple[int, bytes | None]] = {}  # cookie -> block, what is written
        self.unsure: dict[int, bytes] = {}  # block -> what a write that failed may have left there
        self.outcomes: Counter[tuple[str, int]] = Counter()
        self.cookie = 1000

    def ask(self) -> int:
        """One request; its bytes."""
        busy = {block for block, _ in self.under_way.values()}
        block = self.rng.choice([each for each in range(BLOCKS) if each not in busy])
        self.cookie += 1
        data = self.rng.randbytes(BLOCK) if self.rng.random() < 0.5 else None
        self.under_way[self.cookie] = block, data
        command = p.Cmd.READ if data is None else p.Cmd.WRITE
        head = p.request(command, self.cookie, block * BLOCK, BLOCK)
        self.volume.client.sock.sendall(head + (data or b""))
        return len(head) + len(data or b"")

    def take(self) -> bool:
        """One answer; False at the end of the connection."""
        head = self.volume.client.exactly(p.SIMPLE_REPLY_BYTES)
        if not head:
            return False
        _, error, cookie = p.SIMPLE_REPLY.unpack(head)
        block, data = self.under_way.pop(cookie)  # each is answered once
        place = slice(block * BLOCK, (block + 1) * BLOCK)
        self.outcomes["read" if data is None else "write", error] += 1
        if data is None and not error:
            found = self.volume.client.exactly(BLOCK)
            assert found in (bytes(self.expected[place]), self.unsure.get(block)), f"block {block}"
        elif data is not None and not error:
            self.expected[place] = data
            self.unsure.pop(block, None)
        elif data is not None:
            self.unsure[block] = data
        return True

    def run(self, requests: int, depth: int = 32) -> None:
        asked = 0
        while asked < requests or self.under_way:
            while asked < requests and len(self.under_way) < depth:
                self.ask()
                asked += 1
            assert self.take(), "the connection has ended"


def test_errors_of_single_requests_are_errors_and_the_others_are_right(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes
) -> None:
    flag = tmp_path / "fails"
    serve_file(
        run, tmp_path, ("error", "delay"), "error=ENOSPC", f"error-file={flag}",
        "error-pread-rate=20%", "error-pwrite-rate=20%", "rdelay=1ms", "wdelay=2ms",
    )  # fmt: skip
    volume = Volume(run, tmp_path, relay)
    before = volume.counts()
    assert before["errors"] == 0
    traffic = Traffic(volume, disk, 1)
    flag.touch()
    traffic.run(600)
    flag.unlink()
    outcomes = traffic.outcomes
    assert outcomes.keys() == {(kind, error) for kind in ("read", "write") for error in (0, p.ENOSPC)}
    assert sum(outcomes.values()) == 600
    errors = sum(count for (_, error), count in outcomes.items() if error)
    counts = volume.counts()
    assert (counts["errors"], counts["reads"] + counts["writes"], counts["inflight"]) == (errors, 600, 0)
    traffic.run(100)
    assert sum(outcomes.values()) == 700
    assert volume.used == relay.open(), "an error is no loss of a connection"
    assert volume.do(p.Cmd.FLUSH) == 0


def test_a_slow_upstream_that_is_killed_fails_each_request_once_and_loses_no_answer(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes
) -> None:
    server = serve_file(run, tmp_path, ("delay",), "rdelay=20ms", "wdelay=10ms")
    volume = Volume(run, tmp_path, relay)
    traffic = Traffic(volume, disk, 2)
    traffic.run(60)
    halt(server)
    wanted = sum(each.asked for each in volume.used)
    while len(traffic.under_way) < 32:
        wanted += traffic.ask()
    wait_for("all were sent on", lambda: sum(each.asked for each in volume.used) >= wanted)
    server.kill()
    server.wait()
    while traffic.take():
        pass
    assert traffic.under_way == {}, "each has an answer"
    failed = sum(count for (_, error), count in traffic.outcomes.items() if error == p.EIO)
    assert (failed, sum(traffic.outcomes.values())) == (32, 92)
    counts = volume.counts()
    assert (counts["errors"], counts["inflight"]) == (32, 0)
    with pytest.raises(GatewayError, match="not available"):
        run.client("vol-1@host-a")
    serve_file(run, tmp_path)
    again = run.client("vol-1@host-b")
    for block in range(BLOCKS):
        again.sock.sendall(p.request(p.Cmd.READ, block, block * BLOCK, BLOCK))
        assert again.exactly(p.SIMPLE_REPLY_BYTES) == p.simple_reply(block)
        found = again.exactly(BLOCK)
        wanted_data = bytes(traffic.expected[block * BLOCK : (block + 1) * BLOCK])
        assert found in (wanted_data, traffic.unsure.get(block)), f"block {block}: an acknowledged write"


# -- one connection of several


def ask_each(volume: Volume, held: Passage, rounds: int) -> tuple[dict[int, int], set[int]]:
    """Reads on every connection in turn; cookie -> offset, and those of the connection that is held."""
    offsets, lost = {}, set()
    for number in range(rounds * volume.connections):
        before, offset = held.asked, (number + 1) * BLOCK
        cookie = volume.ask(p.Cmd.READ, offset, BLOCK)
        offsets[cookie] = offset
        if held.asked > before:
            lost.add(cookie)
    return offsets, lost


@pytest.mark.parametrize("how", ["answers at last", "dies", "dies, and the upstream may return"])
def test_while_one_connection_hangs_the_others_are_served_and_what_hangs_is_shown(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes, how: str
) -> None:
    serve_file(run, tmp_path)
    volume = Volume(run, tmp_path, relay, reconnect_s=60 if "return" in how else 0)
    assert volume.do(p.Cmd.FLUSH) == 0  # all that was acknowledged is stable
    volume.counts()
    held = volume.used[1]
    relay.hold(held)
    offsets, lost = ask_each(volume, held, 4)
    assert len(lost) == 4
    for _ in range(len(offsets) - len(lost)):
        cookie, error, data = volume.answer(dict.fromkeys(offsets, BLOCK))
        assert cookie not in lost
        assert not error
        assert data == disk[offsets[cookie] :][:BLOCK]
        del offsets[cookie]
    assert offsets.keys() == lost
    counts = volume.counts()
    assert (counts["inflight"], counts["errors"]) == (4, 0)
    if how == "dies":
        relay.cut(held)
        assert sorted(volume.until_end()) == [(cookie, p.EIO) for cookie in sorted(lost)]
        assert volume.counts()["errors"] == 4
        assert_a_new_client_is_served(run, disk)
        return
    if "return" in how:
        relay.cut(held)
    else:
        relay.release(held)
    for _ in range(4):
        cookie, error, data = volume.answer(dict.fromkeys(offsets, BLOCK))
        assert (error, data) == (0, disk[offsets.pop(cookie) :][:BLOCK])
    assert not offsets
    counts = volume.counts()
    assert (counts["inflight"], counts["errors"]) == (0, 0)


def test_a_connection_that_hangs_gets_no_more_and_the_rest_goes_on(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes
) -> None:
    serve_file(run, tmp_path)
    volume = Volume(run, tmp_path, relay)
    held = volume.used[1]
    relay.hold(held)
    lost: dict[int, int] = {}
    served = 0

    def others_serve_all() -> bool:
        nonlocal served
        before, offset = held.asked, served % BLOCKS * BLOCK
        cookie = volume.ask(p.Cmd.READ, offset, BLOCK)
        if held.asked > before:
            lost[cookie], served = offset, 0
            return False
        assert volume.answer({cookie: BLOCK}) == (cookie, 0, disk[offset : offset + BLOCK])
        served += 1
        return served >= 10 * CONNECTIONS

    wait_for("it is left alone", others_serve_all)
    assert lost
    relay.release(held)
    while lost:
        cookie, error, data = volume.answer(dict.fromkeys(lost, BLOCK))
        offset = lost.pop(cookie)
        assert (error, data) == (0, disk[offset : offset + BLOCK])
    before = held.asked

    def is_used() -> bool:
        assert volume.read(0, BLOCK) == (0, disk[:BLOCK])
        return held.asked > before

    wait_for("it has turns again", is_used)


def assert_a_new_client_is_served(run: Processes, disk: bytes) -> None:
    client = run.client("vol-1@host-b")
    client.sock.sendall(p.request(p.Cmd.READ, 1, 0, BLOCK))
    assert client.exactly(p.SIMPLE_REPLY_BYTES + BLOCK) == p.simple_reply(1) + disk[:BLOCK]


@pytest.mark.parametrize("size", [64 << 10, MIB], ids=["64 KiB", "1 MiB by a pipe"])
@pytest.mark.parametrize("reconnect_s", [0, 60])
@pytest.mark.parametrize("mode", [p.SIMPLE_REPLIES, p.ReplyMode(structured=True)], ids=["simple", "chunks"])
def test_a_connection_that_dies_within_an_answer_ends_the_client_there_and_nothing_is_wrong(
    run: Processes,
    tmp_path: Path,
    relay: Relay,
    disk: bytes,
    size: int,
    reconnect_s: float,
    mode: p.ReplyMode,
) -> None:
    serve_file(run, tmp_path)
    volume = Volume(run, tmp_path, relay, mode, reconnect_s)
    volume.ask(p.Cmd.FLUSH)
    volume.skip_answer(0)
    volume.counts()
    relay.hold(*volume.used)
    before = [each.asked for each in volume.used]
    for number in range(CONNECTIONS):
        volume.ask(p.Cmd.READ, number * size, size)
    asked = [each for each, sent in zip(volume.used, before, strict=True) if each.asked > sent]
    torn = asked[-1]
    for each in asked:
        wait_for("its answer is on its way", lambda each=each: len(each.to_near) >= size)
    head = p.DATA_HEAD_BYTES if mode.structured else p.SIMPLE_REPLY_BYTES
    relay.cut(torn, head + size // 2)
    whole = volume.client.exactly(head + size)
    assert len(whole) == head + size // 2, "and then the end"
    cookie = int.from_bytes(whole[8:16], "big")
    offset = (cookie - (volume.cookie - CONNECTIONS + 1)) * size
    assert whole[head:] == disk[offset : offset + size // 2]
    counts = volume.counts()
    assert (counts["errors"], counts["inflight"]) == (CONNECTIONS, 0)
    assert_a_new_client_is_served(run, disk)


def test_a_connection_that_ends_idle_costs_the_client_nothing_and_is_made_again(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes
) -> None:
    serve_file(run, tmp_path)
    volume = Volume(run, tmp_path, relay)
    traffic = Traffic(volume, disk, 3)
    for _ in range(2):
        traffic.run(60)
        ended = volume.used[-1]
        relay.cut(ended)
        wait_for("it has ended", lambda ended=ended: not ended.is_open)
        traffic.run(60)
        relay.wait_open(CONNECTIONS)
        volume.used = relay.open()
        newest = volume.used[-1]
        before = newest.asked

        def is_used(newest: Passage = newest, before: int = before) -> bool:
            traffic.run(20)
            return newest.asked > before + 10 * READ_BYTES

        wait_for("the new one is used", is_used)
    assert {error for _, error in traffic.outcomes} == {0}
    assert volume.do(p.Cmd.FLUSH) == 0
    assert (tmp_path / "disk.img").read_bytes()[: BLOCKS * BLOCK] == bytes(traffic.expected[: BLOCKS * BLOCK])


# -- a restart between writes and their flush


def write_some(volume: Volume, count: int = 6) -> dict[int, bytes]:
    """Acknowledged writes, on every connection; offset -> data."""
    written = {}
    for number in range(count):
        data = bytes([number + 1]) * BLOCK
        assert volume.do(p.Cmd.WRITE, number * BLOCK, data) == 0
        written[number * BLOCK] = data
    return written


def send_flush(volume: Volume) -> None:
    volume.cookie += 1
    volume.client.sock.sendall(p.request(p.Cmd.FLUSH, volume.cookie, 0, 0))


def fails_or_ends(volume: Volume) -> None:
    """The flush that was sent last, or all that is, has no success."""
    assert set(volume.until_end()) <= {(volume.cookie, p.EIO)}


@pytest.mark.parametrize("reconnect_s", [0, 60])
@pytest.mark.parametrize("when", ["while it is away", "when it is back"])
def test_a_flush_behind_a_restart_that_lost_the_writes_never_succeeds(
    run: Processes, tmp_path: Path, relay: Relay, reconnect_s: float, when: str
) -> None:
    server = serve(run, tmp_path, "memory", str(SIZE))  # which keeps nothing
    volume = Volume(run, tmp_path, relay, reconnect_s=reconnect_s)
    assert volume.do(p.Cmd.FLUSH) == 0
    write_some(volume)
    if when == "when it is back":
        relay.hold(*volume.used)  # its host went down: no connection says so
    server.kill()
    server.wait()
    if when == "when it is back":
        serve(run, tmp_path, "memory", str(SIZE))
        send_flush(volume)
        for each in volume.used:
            relay.cut(each)
    else:
        wait_for("each has ended", lambda: not relay.open())
        try:
            send_flush(volume)
        except OSError:
            return  # its connection has ended already
        serve(run, tmp_path, "memory", str(SIZE))
    with contextlib.suppress(ConnectionResetError):
        fails_or_ends(volume)


@pytest.mark.parametrize("is_stable", ["flushed", "each with FUA"])
def test_behind_a_flush_or_with_fua_the_client_stays_over_a_restart_and_finds_its_writes(
    run: Processes, tmp_path: Path, relay: Relay, disk: bytes, is_stable: str
) -> None:
    server = serve_file(run, tmp_path)
    volume = Volume(run, tmp_path, relay, reconnect_s=60)
    assert volume.do(p.Cmd.FLUSH) == 0
    written = {}
    if is_stable == "flushed":
        written = write_some(volume)
        assert volume.do(p.Cmd.FLUSH) == 0
    else:
        for number in range(6):
            written[number * BLOCK] = data = bytes([number + 1]) * BLOCK
            volume.cookie += 1
            head = p.request(p.Cmd.WRITE, volume.cookie, number * BLOCK, BLOCK, p.CMD_FLAG_FUA)
            volume.client.sock.sendall(head + data)
            assert volume.answer({}) == (volume.cookie, 0, b"")
    server.kill()
    server.wait()
    wait_for("each has ended", lambda: not relay.open())
    asked = {}
    for offset in written:
        volume.cookie += 1
        asked[volume.cookie] = offset
        volume.client.sock.sendall(p.request(p.Cmd.READ, volume.cookie, offset, BLOCK))
    serve_file(run, tmp_path)
    for _ in range(len(asked)):
        cookie, error, data = volume.answer(dict.fromkeys(asked, BLOCK))
        assert (error, data) == (0, written[asked.pop(cookie)])
    relay.wait_open(CONNECTIONS)
    write_some(volume)
    assert volume.do(p.Cmd.FLUSH) == 0


def test_a_flush_that_failed_covers_nothing(run: Processes, tmp_path: Path, relay: Relay) -> None:
    image, flag = tmp_path / "disk.img", tmp_path / "fails"
    content_of(image)
    eval_plugin = (
        "eval", f"get_size=echo {SIZE}", "can_multi_conn=exit 0", "can_write=exit 0", "can_flush=exit 0",
        f'pread=dd if="{image}" skip=$4 count=$3 iflag=count_bytes,skip_bytes status=none',
        f'pwrite=dd of="{image}" seek=$4 oflag=seek_bytes conv=notrunc status=none',
        f'flush=if [ -e "{flag}" ]; then echo EIO it fails >&2; exit 1; fi',
    )  # fmt: skip
    server = serve(run, tmp_path, *eval_plugin)
    volume = Volume(run, tmp_path, relay, reconnect_s=60)
    assert volume.do(p.Cmd.FLUSH) == 0
    write_some(volume)
    flag.touch()
    assert volume.do(p.Cmd.FLUSH) == p.EIO
    assert not volume.read(0, BLOCK)[0], "an error ends nothing"
    server.kill()
    server.wait()
    assert volume.until_end() == []


def test_a_flush_never_goes_by_a_new_connection_to_a_restarted_upstream(
    run: Processes, tmp_path: Path, relay: Relay
) -> None:
    """An answer of before the restart is on its way, while a connection is made to what runs behind it."""
    server = serve(run, tmp_path, "memory", str(SIZE))
    volume = Volume(run, tmp_path, relay, connections=2)
    assert volume.do(p.Cmd.FLUSH) == 0
    write_some(volume)
    old, idle = volume.used
    relay.hold(old)
    cookie = 0
    while not cookie:  # until a read is with the one that stays
        before = old.asked
        sent = volume.ask(p.Cmd.READ, 0, BLOCK)
        if old.asked > before:
            cookie = sent
        else:
            assert volume.answer({sent: BLOCK})[:2] == (sent, 0)
    wait_for("its answer is on its way", lambda: len(old.to_near) >= BLOCK)
    relay.cut(idle)
    server.kill()
    server.wait()
    serve(run, tmp_path, "memory", str(SIZE))  # empty
    wait_for("a new connection", lambda: len(relay.passages) > 2 and relay.open()[-1] is not old)
    new = relay.open()[-1]
    seen = [0]

    def is_steady() -> bool:
        """No byte of its negotiation has come for a while: it is in transmission."""
        seen.append(new.answered)
        return seen[-1] > 0 and len(seen) > 50 and len(set(seen[-50:])) == 1

    wait_for("it is in transmission", is_steady)
    relay.release(old)
    found, error, data = volume.answer({cookie: BLOCK})
    assert (found, error, data) == (cookie, 0, b"\1" * BLOCK), "it was there"
    send_flush(volume)
    fails_or_ends(volume)


def test_a_later_clients_flush_at_a_restarted_upstream_keeps_no_client_whose_writes_are_gone(
    run: Processes, tmp_path: Path, relay: Relay
) -> None:
    """Its host went down and came back: a client that comes then is first to know."""
    server = serve(run, tmp_path, "memory", str(SIZE))
    volume = Volume(run, tmp_path, relay, reconnect_s=60, connections=1)
    assert volume.do(p.Cmd.FLUSH) == 0
    write_some(volume)
    relay.hold(*volume.used)
    server.kill()
    server.wait()
    serve(run, tmp_path, "memory", str(SIZE))  # empty
    later = run.client("vol-1@host-b")
    later.sock.sendall(p.request(p.Cmd.FLUSH, 1, 0, 0))
    assert later.exactly(p.SIMPLE_REPLY_BYTES) == p.simple_reply(1)
    for each in volume.used:
        relay.cut(each)
    with contextlib.suppress(OSError):  # its connection has ended already
        send_flush(volume)
        fails_or_ends(volume)
    later.sock.sendall(p.request(p.Cmd.READ, 2, 0, BLOCK))
    assert later.exactly(p.SIMPLE_REPLY_BYTES + BLOCK) == p.simple_reply(2) + bytes(BLOCK)

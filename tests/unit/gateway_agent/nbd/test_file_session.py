import contextlib
import os
import random
from types import SimpleNamespace

import pytest

from gateway_agent.errors import BackingFileError, ExportRefused
from gateway_agent.nbd import exports, storage_jobs
from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.exports import ExportTable
from gateway_agent.nbd.file_session import FileSession
from gateway_agent.nbd.groups import GroupTable
from gateway_agent.nbd.limits import KIND_READ, KIND_WRITE
from gateway_agent.nbd.loop import IN
from gateway_agent.nbd.storage import VolumeStorage
from gateway_agent.nbd.storage_jobs import MAX_JOBS, LoopRunner
from pmdaemon.wire.cut import COL, IO_READ, OUTSTANDING
from pmdaemon.wire.messages.plane_sets import VolumeGroupCap
from pmdaemon.wire.rates import Rates
from tests.support.nbd import MIB, FakeSocket, Rig, plane_config, replies


class Pool:
    """Runs each job when the test says so."""

    most_jobs, is_loop = MAX_JOBS, False

    def __init__(self):
        self.jobs = []

    def submit(self, job):
        self.jobs.append(job)

    def run(self):
        jobs, self.jobs = self.jobs, []
        for job in reversed(jobs):  # workers finish in any order
            job.run()
            job.done([job])


class Client:
    def __init__(self, path, kind, read_only=False, mode=p.SIMPLE_REPLIES):
        self.mode = mode
        self.storage = VolumeStorage("vol-1", str(path), read_only=read_only)
        self.rig, self.sock = Rig(size_bytes=self.storage.facts.size_bytes), FakeSocket()
        self.stream = self.rig.stream()
        self.pool = None if kind == "loop" else Pool()
        self.storage.tells_cached = kind == "cached"  # whatever the file system of the test knows
        self.session = self.another(self.sock)

    def another(self, sock):
        """A second connection to the same volume, done by the same runner."""
        parts = (self.rig.context, sock, self.rig.volume, self.stream, self.storage, self.storage.facts)
        if not self.pool:
            self.turns = getattr(self, "turns", None) or LoopRunner(self.rig.loop)
        return FileSession(*parts, self.pool or self.turns, self.mode)

    def say(self, *data):
        if joined := b"".join(data):
            self.sock.incoming.append(joined)
        while True:
            before = len(self.sock.incoming), sum(map(len, self.sock.incoming))
            if self.sock.incoming and self.rig.loop.masks.get(self.sock.fileno(), 0) & IN:
                self.rig.loop.handlers[self.sock.fileno()](IN)
            jobs = bool(self.pool and self.pool.jobs)
            if self.pool:
                self.pool.run()
            jobs |= self.rig.loop.turn()
            if not jobs and before == (len(self.sock.incoming), sum(map(len, self.sock.incoming))):
                return

    def row(self):
        return dict(zip(COL, self.stream.take(self.rig.clock.monotonic_ns()).row, strict=True))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(range(256)) * 4096)
    return path


@pytest.fixture(params=["loop", "workers", "cached"])
def client(request, path):
    client = Client(path, request.param)
    yield client
    client.session.close("test is over")
    client.storage.release()


def read(cookie, offset, length):
    return p.request(p.Cmd.READ, cookie, offset, length)


def write(cookie, offset, payload, flags=0):
    return p.request(p.Cmd.WRITE, cookie, offset, len(payload), flags) + payload


def test_what_is_written_is_read_and_is_in_the_file(client, path):
    payload = os.urandom(10_000)
    client.say(write(1, 777, payload, p.CMD_FLAG_FUA))
    client.say(read(2, 777, 10_000), read(3, 0, 4), p.request(p.Cmd.FLUSH, 4, 0, 0))
    found = {cookie: (error, data) for cookie, error, data in replies(client.sock.sent, {2: 10_000, 3: 4})}
    assert found == {1: (0, b""), 2: (0, payload), 3: (0, bytes(range(4))), 4: (0, b"")}
    assert path.read_bytes()[777:10_777] == payload
    row = client.row()
    assert (row["reads"], row["writes"], row["others"], row["read_bytes"]) == (2, 1, 1, 10_004)
    assert row["inflight"] == 0


def test_small_requests_are_held_by_the_cap_of_a_group_alone(path):
    client = Client(path, "loop")
    table = GroupTable(client.rig.loop, 20_000_000)
    volume, now_ns = client.rig.volume, client.rig.clock.monotonic_ns()
    cap = VolumeGroupCap(Rates(ops_per_s=1), {volume.name: 1.0})
    assert volume.rates.is_open
    table.apply({"night": cap}, {volume.name: volume}, now_ns)
    client.say(read(1, 0, 4), read(2, 4, 4), read(3, 8, 4))
    assert [item[0] for item in replies(client.sock.sent, dict.fromkeys((1, 2, 3), 4))] == [1]
    table.apply({}, {volume.name: volume}, now_ns)
    client.say()
    assert [item[0] for item in replies(client.sock.sent, dict.fromkeys((1, 2, 3), 4))] == [1, 2, 3]


def test_writes_larger_than_the_buffer_arrive_whole(client, path):
    payload = os.urandom(MIB - 1)
    with open(path, "ab") as file:
        file.truncate(8 * MIB)
    client.session._facts = p.ExportFacts(8 * MIB, client.storage.facts.flags)
    big = payload * 3
    client.say(write(1, 5, big), read(2, 5, len(big)))
    found = {item[0]: item for item in replies(client.sock.sent, {2: len(big)})}
    assert found[1][1] == 0
    assert path.read_bytes()[5 : 5 + len(big)] == big


def test_trim_and_write_zeroes_make_zeroes(client, path):
    client.say(p.request(p.Cmd.WRITE_ZEROES, 1, 100, 300_000))
    client.say(p.request(p.Cmd.WRITE_ZEROES, 2, 400_000, 10_000, p.CMD_FLAG_NO_HOLE | p.CMD_FLAG_FUA))
    client.say(p.request(p.Cmd.TRIM, 3, 500_000, 4096))
    assert sorted(item[:2] for item in replies(client.sock.sent)) == [(1, 0), (2, 0), (3, 0)]
    content = path.read_bytes()
    assert len(content) == MIB
    assert content[100:300_100] == bytes(300_000)
    assert content[400_000:410_000] == bytes(10_000)
    assert content[99] == 99
    assert content[300_100] == 300_100 % 256


def test_a_file_that_became_shorter_is_an_error_and_not_zeroes(client, path):
    os.truncate(path, 4096)
    client.say(read(1, 4000, 512), read(2, 0, 512))
    assert sorted((item[0], item[1]) for item in replies(client.sock.sent, {2: 512})) == [(1, p.EIO), (2, 0)]
    assert client.row()["errors"] == 1


def test_disc_closes(client):
    client.say(read(1, 0, 512), p.request(p.Cmd.DISC, 0, 0, 0))
    assert len(client.sock.sent) == 528
    assert client.session.is_closed


def test_a_client_that_does_not_read_is_served_no_further(client):
    client.sock.window = 600
    client.say(*(read(n, 0, 512) for n in range(300)))
    assert len(client.sock.sent) == 600
    while len(client.sock.sent) < 300 * 528:
        before = len(client.sock.sent)
        client.rig.open_window(client.sock, 5000)
        client.say()
        assert len(client.sock.sent) > before
    assert sorted(item[0] for item in replies(client.sock.sent, dict.fromkeys(range(300), 512))) == list(
        range(300)
    )


@pytest.mark.parametrize("kind", ["loop", "workers"])
def test_an_io_ends_when_its_answer_is_ready_and_ages_no_more_while_the_client_takes_none(path, kind):
    client = Client(path, kind)
    clock = client.rig.clock
    client.sock.window = 100
    client.say(read(1, 0, 512), p.request(p.Cmd.TRIM, 2, 0, 512))
    assert client.session.outstanding(clock.monotonic_ns()) == [], "answered; the client takes its time"
    clock.advance(5)
    client.say(read(3, 0, 512))
    for reads in (1, 0):
        clock.advance(60)
        now_ns = clock.monotonic_ns()
        ((arrived_ns, kind, _),) = client.session.outstanding(now_ns)
        assert (now_ns - arrived_ns, kind) == (0, KIND_READ)
        taken = client.stream.take(now_ns)
        row = dict(zip(COL, taken.row, strict=True))
        assert (row["reads"], row["inflight"], row["lat_sum_us"]) == (reads, 0, 0)
        assert taken.missed == [(OUTSTANDING + IO_READ, 0, 0, 0)], "no read or write waits"
    client.say(write(4, 0, b"x" * 512))
    assert 4 not in client.session.inflight, "what does not wait for the client is done"
    client.rig.open_window(client.sock)
    client.say()
    assert len(client.sock.sent) == 2 * 528 + 2 * 16
    assert client.session.outstanding(clock.monotonic_ns()) == []
    row = client.row()
    assert (row["reads"], row["writes"], row["lat_sum_us"]) == (1, 1, 0)


def test_a_write_that_the_storage_delays_ages_though_the_client_takes_no_answers(path):
    client = Client(path, "workers")
    client.sock.window = 0
    client.say(read(1, 0, 512))
    client.rig.deliver(client.sock, write(2, 0, b"x" * 512) + read(3, 0, 512))
    client.rig.clock.advance(8)
    now_ns = client.rig.clock.monotonic_ns()
    found = {kind: now_ns - arrived_ns for arrived_ns, kind, _ in client.session.outstanding(now_ns)}
    assert found == {KIND_READ: 0, KIND_WRITE: 8 * 10**9}
    assert client.session.gauges() == (1, 0), "the read waits for its client"
    client.pool.run()
    assert client.row()["lat_sum_us"] == 8_000_000


def test_a_session_has_a_bounded_number_of_jobs(path):
    client = Client(path, "workers")
    client.rig.deliver(client.sock, b"".join(read(n, 0, 512) for n in range(500)))
    assert len(client.pool.jobs) == MAX_JOBS
    assert client.session.gauges() == (500, 0)
    now_ns = client.rig.clock.monotonic_ns()
    assert [kind for _, kind, _ in client.session.outstanding(now_ns)] == [KIND_READ] * 500
    while client.pool.jobs:
        client.pool.run()
    assert len(client.sock.sent) == 500 * 528


class FakeThread(Pool):
    """Instead of the thread of an export; ``stop`` ends it."""

    made = 0

    def __init__(self, _loop, _name, workers):
        super().__init__()
        assert workers == 1
        FakeThread.made += 1

    def stop(self):
        self.run()


SYNCS = [p.request(p.Cmd.FLUSH, 1, 0, 0), p.request(p.Cmd.WRITE, 1, 0, 3, p.CMD_FLAG_FUA) + b"abc"]
SYNCS.append(p.request(p.Cmd.WRITE_ZEROES, 1, 0, 512, p.CMD_FLAG_FUA))


@pytest.mark.parametrize("sync", SYNCS, ids=["flush", "write", "zeroes"])
def test_what_waits_for_a_disk_holds_up_its_own_connection_and_no_other(tmp_path, monkeypatch, sync):
    monkeypatch.setattr(storage_jobs, "WorkerPool", FakeThread)
    rig, table, _ = plane_of(tmp_path)
    made = FakeThread.made
    (_, sock), (_, other) = connect(rig, table), connect(rig, table)
    rig.deliver(other, read(7, 0, 512) + write(8, 0, b"x"))
    assert FakeThread.made == made, "no thread before it is needed"
    rig.deliver(sock, sync + read(2, 0, 512))
    rig.deliver(other, read(9, 0, 512))
    assert (len(sock.sent), len(other.sent)) == (0, 2 * 528 + 16)
    table._runners["here"]._thread.run()
    assert [item[0] for item in replies(sock.sent, {2: 512})] == [1, 2]
    assert FakeThread.made == made + 1
    table.close()


def test_results_for_a_session_that_is_closed_are_dropped(path):
    client = Client(path, "workers")
    client.rig.deliver(client.sock, read(1, 0, 512))
    client.session.close("gone")
    client.pool.run()
    assert not client.sock.sent


def test_read_only_files_are_announced_and_kept_so(path):
    client = Client(path, "loop", read_only=True)
    assert client.storage.facts.flags & p.TX_READ_ONLY
    assert not client.storage.facts.flags & p.TX_SEND_TRIM
    client.say(write(1, 0, b"abc"), p.request(p.Cmd.TRIM, 2, 0, 512))
    assert [item[:2] for item in replies(client.sock.sent)] == [(1, p.EPERM), (2, p.EPERM)]
    assert path.read_bytes()[:3] == bytes(range(3))


def test_a_file_that_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(BackingFileError, match="Correct `file`"):
        VolumeStorage("vol-1", str(tmp_path / "nope"), read_only=False)


@pytest.mark.parametrize("size_bytes", [0, 511, 1000])
def test_a_size_that_clients_cannot_use_is_told(tmp_path, size_bytes):
    odd = tmp_path / "odd.img"
    odd.write_bytes(bytes(size_bytes))
    with pytest.raises(BackingFileError, match=f"{size_bytes} bytes is not a multiple of 512"):
        VolumeStorage("vol-1", str(odd), read_only=True)


def test_a_directory_is_no_volume(tmp_path):
    with pytest.raises(BackingFileError, match="neither a regular file nor a block device"):
        VolumeStorage("vol-1", str(tmp_path), read_only=True)


def plane_of(tmp_path, **more):
    rig, learned = Rig(), []
    entries = [
        {"volume": "here", "backend": "b", "file": str(tmp_path / "here.img")},
        {"volume": "gone", "backend": "b", "file": str(tmp_path / "gone.img"), **more},
    ]
    (tmp_path / "here.img").write_bytes(bytes(4096))
    table = ExportTable(plane_config(*entries), rig.context, lambda: learned.append(1))
    return rig, table, learned


def test_a_missing_file_costs_its_own_export_only(tmp_path, monkeypatch):
    said = []
    log = SimpleNamespace(error=lambda event, **_: said.append(event), info=lambda *_, **__: None)
    monkeypatch.setattr(exports, "log", log)
    rig, table, learned = plane_of(tmp_path)
    assert table.file_facts(table.volumes["here"]).size_bytes == 4096
    for _ in range(2):
        with pytest.raises(ExportRefused, match=r"gone.img cannot be used: No such file"):
            table.file_facts(table.volumes["gone"])
    assert [row["size_bytes"] for row in table.describe()] == [4096, 0]
    rig.loop.fire(3.5)  # tries after 1 and 3 s; asking clients are no tries
    assert said == ["export-refused"] * 3
    (tmp_path / "gone.img").write_bytes(bytes(512))
    assert not learned
    rig.loop.fire(4)
    assert learned == [1]  # the link is told the size
    assert table.file_facts(table.volumes["gone"]).size_bytes == 512
    assert not rig.loop.timers
    table.close()


def test_a_client_need_not_wait_for_the_next_try(tmp_path):
    rig, table, learned = plane_of(tmp_path, workers=1)
    rig.loop.fire(100)
    (tmp_path / "gone.img").write_bytes(bytes(512))
    assert table.file_facts(table.volumes["gone"]).size_bytes == 512
    assert learned == [1]
    rig.loop.fire(100)
    assert (learned, rig.loop.timers) == ([1], {})
    table.close()


def connect(rig, table, name="here"):
    """A client as ``Negotiation`` lets it in: its size, its socket."""
    volume, sock = table.volumes[name], FakeSocket()
    facts = table.file_facts(volume)
    table.session(sock, volume, table.stream(volume, "host-a"), facts, None)
    return facts.size_bytes, sock


def test_new_clients_find_the_file_that_is_there_now(tmp_path):
    rig, table, learned = plane_of(tmp_path)
    path = tmp_path / "here.img"
    path.write_bytes(b"a" * 4096)
    _, former = connect(rig, table)
    (tmp_path / "new.img").write_bytes(b"b" * 8192)
    os.rename(tmp_path / "new.img", path)
    size_bytes, latter = connect(rig, table)
    assert (size_bytes, learned) == (8192, [1])
    for sock in (former, latter):
        rig.deliver(sock, read(1, 0, 1))
    assert bytes(former.sent[16:]) == b"a", "a client keeps what it has opened"
    assert bytes(latter.sent[16:]) == b"b"
    rig.deliver(latter, write(2, 0, b"c"))
    assert path.read_bytes()[:1] == b"c"


@pytest.mark.parametrize("size_bytes", [1024, 8192])
def test_new_clients_see_a_file_that_became_longer_or_shorter(tmp_path, size_bytes):
    rig, table, learned = plane_of(tmp_path)
    _, former = connect(rig, table)
    os.truncate(tmp_path / "here.img", size_bytes)
    seen, latter = connect(rig, table)
    assert (seen, learned) == (size_bytes, [1])
    assert [row["size_bytes"] for row in table.describe()] == [size_bytes, 0]
    rig.deliver(former, read(1, 4095, 1))
    assert replies(former.sent, {1: 1})[0][1] == (p.EIO if size_bytes < 4096 else 0)
    rig.deliver(latter, read(1, size_bytes - 1, 1))
    assert replies(latter.sent, {1: 1})[0][1] == 0


def open_files():
    """Names behind this process's descriptors; a replaced file says so."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


def test_a_replaced_file_is_closed_with_its_last_client_and_not_before(tmp_path):
    rig, table, _ = plane_of(tmp_path)
    path, former = tmp_path / "here.img", [connect(rig, table)[1] for _ in range(2)]
    (tmp_path / "new.img").write_bytes(bytes(4096))
    os.rename(tmp_path / "new.img", path)
    connect(rig, table)
    for sock in former:
        assert f"{path} (deleted)" in open_files()
        sock.is_ended = True
        rig.loop.handlers[sock.fileno()](IN)
    assert f"{path} (deleted)" not in open_files()
    assert str(path) in open_files()


def test_a_file_that_is_gone_refuses_new_clients_and_keeps_the_others(tmp_path):
    rig, table, _ = plane_of(tmp_path)
    _, former = connect(rig, table)
    (tmp_path / "here.img").unlink()
    with pytest.raises(ExportRefused, match="No such file"):
        connect(rig, table)
    rig.deliver(former, read(1, 0, 1))
    assert replies(former.sent, {1: 1})[0][1] == 0


def played(path, kind, caps, seed, one_by_one):
    """What a client has got after each step of a random history under caps, and what was counted of it."""
    rng, client, found = random.Random(seed), Client(path, kind), []
    client.rig.volume.set_caps(caps, client.rig.clock.monotonic_ns())
    if one_by_one:
        client.rig.volume._admit_batch = lambda *_: False  # the way of connections that wait beside others
    said = bytearray()
    for cookie in range(1, 61):
        offset, length = rng.randrange(128) * 512, rng.choice((512, 4096, 100_000))
        said += rng.choice(
            (
                read(cookie, offset, length),
                read(cookie, offset, 4096),
                write(cookie, offset, rng.randbytes(length)),
                p.request(p.Cmd.FLUSH, cookie, 0, 0),
                read(cookie, 1 << 40, 512),
                read(cookie - 1, offset, 512),
            )
        )
    while said:
        size = rng.choice((28, 100, 1000, 50_000))
        client.say(bytes(said[:size]))
        del said[:size]
        client.rig.loop.fire(rng.choice((0.0, 0.001, 0.03)))
        client.say()
        found.append(len(client.sock.sent))
    for _ in range(60):
        client.rig.loop.fire(1)
        client.say()
    row = client.row()
    client.session.close("test is over")
    client.storage.release()
    return found, bytes(client.sock.sent), row


@pytest.mark.parametrize("kind", ["loop", "workers"])
@pytest.mark.parametrize(
    "caps", [Rates(ops_per_s=100), Rates(bytes_per_s=1e6), Rates(ops_per_s=1000, cost_per_s=500, burst_s=0.1)]
)
def test_what_caps_admit_in_batches_is_what_they_admit_one_by_one(path, kind, caps):
    for seed in range(3):
        before = path.read_bytes()
        one_by_one = played(path, kind, caps, seed, one_by_one=True)
        path.write_bytes(before)
        assert played(path, kind, caps, seed, one_by_one=False) == one_by_one
        assert one_by_one[2]["inflight"] == one_by_one[2]["held"] == 0


@pytest.mark.parametrize("held", [False, True], ids=["alone", "that waited"])
def test_a_client_that_is_gone_within_a_batch_is_forgotten_by_its_volume(path, held):
    client = Client(path, "loop")
    rig, volume = client.rig, client.rig.volume
    volume.set_caps(Rates(ops_per_s=100), rig.clock.monotonic_ns())
    if held:
        client.say(*(read(cookie, 0, 512) for cookie in range(9)))
    client.sock.is_closed = True  # its answers cannot be sent
    client.say(read(10, 0, 512), read(11, 0, 512))
    rig.loop.fire(1)
    assert client.session.is_closed
    assert not volume._used_ns  # nothing else shows that the session is not kept for ever
    assert rig.loop.timers == {}
    client.storage.release()


def no_memory(*_what, **_how):
    raise MemoryError


@pytest.mark.parametrize("step", ["_reply_of", "_serve_on"])
def test_done_jobs_that_cannot_be_answered_end_the_connection_and_give_back_what_they_hold(
    path, monkeypatch, step
):
    client = Client(path, "workers")
    client.sock.incoming.append(read(1, 0, 300_000) + read(2, 0, 400_000) + p.request(p.Cmd.FLUSH, 3, 0, 0))
    client.rig.loop.handlers[client.sock.fileno()](IN)
    jobs, client.pool.jobs = client.pool.jobs, []
    assert len(jobs) == 3
    for job in jobs:
        job.run()
    monkeypatch.setattr(client.session, step, no_memory)
    jobs[0].done(jobs)
    assert client.session.is_closed, "its client would wait for ever"
    assert client.rig.context.reply_memory.used_bytes == 0
    assert client.session._jobs == 0
    client.storage.release()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(client.storage._fd)


@pytest.mark.parametrize("entry", ["turn", "memory"])
def test_a_later_turn_that_fails_ends_the_connection(path, monkeypatch, entry):
    client = Client(path, "loop")
    client.session._go_on_later()
    monkeypatch.setattr(client.session, "push", no_memory)
    if entry == "turn":
        client.rig.loop.turn()
    else:
        client.session.on_memory_free()
    assert client.session.is_closed
    client.storage.release()

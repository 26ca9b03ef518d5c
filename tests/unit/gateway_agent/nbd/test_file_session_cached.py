"""Files with workers whose file system says what is in memory: the loop reads that, and workers the rest."""

import errno
import os

import pytest

from gateway_agent.nbd import protocol as p
from gateway_agent.nbd.storage import VolumeStorage
from pmdaemon.wire.rates import Rates
from tests.support.nbd import MIB, FakeSocket, replies
from tests.unit.gateway_agent.nbd.test_file_session import Client, read, write

IN_MEMORY = 512 << 10  # of the file, from its beginning on
DATA = bytes(range(256)) * 4096


class Cached(Client):
    """A client whose file has so much in memory; ``tried`` are the offsets that the loop asked for."""

    def __init__(self, path):
        super().__init__(path, "cached")
        self.tried = []
        self.storage.preadv = self._preadv

    def _preadv(self, buffers, offset, flags):
        assert flags == os.RWF_NOWAIT
        self.tried.append(offset)
        if offset >= IN_MEMORY:
            raise BlockingIOError(errno.EAGAIN, "it would wait")
        (into,) = buffers
        size = min(len(into), IN_MEMORY - offset)
        into[:size] = DATA[offset : offset + size]
        return size

    def arrive(self, *data):
        """Without the workers."""
        self.rig.deliver(self.sock, b"".join(data))

    def answers(self):
        lengths = dict.fromkeys(range(100), 4096)
        found = {cookie: (error, data) for cookie, error, data in replies(bytes(self.sock.sent), lengths)}
        self.sock.sent.clear()
        return found


@pytest.fixture
def cached(tmp_path):
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    client = Cached(path)
    yield client
    client.session.close("test is over")
    client.storage.release()


def test_what_is_in_memory_needs_no_worker(cached):
    cached.arrive(*(read(n, n * 4096, 4096) for n in range(8)))
    assert cached.answers() == dict.fromkeys(range(8), (0, DATA[:4096]))
    assert cached.pool.jobs == []
    assert cached.row()["reads"] == 8


def test_what_is_not_or_only_in_part_is_a_workers_and_what_is_behind_it_waits_for_none(cached):
    cached.arrive(read(1, 0, 4096), read(2, IN_MEMORY - 512, 4096), read(3, 4096, 4096))
    assert list(cached.answers()) == [1]
    assert [job.request[1] for job in cached.pool.jobs] == [2, 3]
    cached.say()
    found = cached.answers()
    assert found == dict.fromkeys((2, 3), (0, DATA[:4096])) | {2: (0, (DATA * 2)[IN_MEMORY - 512 :][:4096])}
    cached.arrive(read(4, 0, 4096))
    assert list(cached.answers()) == [4], "and the loop reads again"


@pytest.mark.parametrize(
    ("first", "asked"), [(read(1, MIB - 4096, 4096), [MIB - 4096]), (write(1, 0, DATA[:4096]), [])]
)
def test_while_a_worker_has_a_request_the_loop_tries_nothing_of_this_file(cached, first, asked):
    sock = FakeSocket()
    other = cached.another(sock)
    cached.arrive(first)
    before = list(cached.tried)
    cached.rig.deliver(sock, read(1, 0, 4096))
    assert len(cached.pool.jobs) == 2
    assert cached.tried == before == asked, "a device that hangs is asked once"
    cached.pool.run()
    cached.rig.deliver(sock, read(2, 0, 4096))
    assert cached.tried == [*before, 0]
    other.close("test is over")


def test_a_write_is_a_workers_and_a_read_behind_it_sees_it(cached):
    cached.arrive(write(1, 0, b"N" * 4096))
    assert [job.request[1] for job in cached.pool.jobs] == [1]
    cached.say()
    assert cached.answers() == {1: (0, b"")}
    cached.arrive(read(2, 0, 4096))
    assert cached.tried == [0]


def test_what_goes_to_a_worker_is_charged_once(cached):
    cached.rig.volume.set_caps(Rates(ops_per_s=100, burst_s=0.05), cached.rig.clock.monotonic_ns())
    for n in range(4):
        cached.arrive(read(n, MIB - 4096 if n % 2 else 0, 4096))
        cached.say()
    assert len(cached.answers()) == 4
    ready_s = (cached.rig.rates.ready_ns() - cached.rig.clock.monotonic_ns()) / 1e9
    assert ready_s == pytest.approx(4 / 100 - 0.05, abs=0.011)


def test_a_file_system_says_whether_it_can_say(tmp_path, monkeypatch):
    path = tmp_path / "disk.img"
    path.write_bytes(DATA)
    for error, can in ((errno.EAGAIN, True), (errno.EOPNOTSUPP, False), (errno.EIO, False), (0, True)):

        def preadv(_fd, _buffers, _offset, _flags=0, error=error):
            if error:
                raise OSError(error, "as asked")
            return 1

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            storage = VolumeStorage("vol-1", str(path), read_only=True)
        assert storage.tells_cached is can
        storage.release()


def test_errors_of_a_try_are_a_workers_to_report(cached, monkeypatch):
    def broken(_buffers, _offset, _flags):
        raise OSError(errno.EIO, "a bad sector")

    cached.storage.preadv = broken
    monkeypatch.setattr(cached.storage, "read", lambda _into, _offset: p.EIO)
    cached.say(read(1, 0, 4096))
    assert cached.answers() == {1: (p.EIO, b"")}

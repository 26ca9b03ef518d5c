"""Real files and processes: eight producers killed with -9 in full flight, a full disk, a slow disk."""

from __future__ import annotations

import hashlib
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueueNoSpace
from pmdaemon.diskqueue.storage import FileStorage
from pmdaemon.runtime.clock import Deadline

KILLS = int(os.environ.get("DISKQUEUE_KILLS", "12"))
PRODUCERS = 8
# The child adds records that prove themselves (digest of producer and number), tells each confirmation on its
# pipe *after* put returned, and deletes every third, telling so *before*.
CHILD = """
import hashlib, os, sys, threading
from pathlib import Path
from pmdaemon.diskqueue import DiskQueue, QueueSettings
from pmdaemon.diskqueue.errors import QueueFull
out = sys.stdout.fileno()
settings = QueueSettings(data_path=Path(sys.argv[1]), data_bytes=1 << 20, entries=2048, index_sync_s=0.02)
queue = DiskQueue(settings)
def produce(producer, number=0):
    while True:
        number += 1
        name = b"%d %d %d" % (int(sys.argv[2]), producer, number)
        body = name + b" " + hashlib.sha256(name).hexdigest().encode() * (1 + number % 9)
        try:
            seq = queue.put(body)
        except QueueFull:
            consume(200)
            continue
        os.write(out, b"+ %d %s\\n" % (seq, name))
        if number % 3 == 0:
            consume(3)
def consume(count):
    held = queue.lock(count)
    if held:
        os.write(out, b"".join(b"- %d\\n" % message.seq for message in held))
        queue.delete([message.seq for message in held])
for producer in range(8):
    threading.Thread(target=produce, args=(producer,), daemon=True).start()
threading.Event().wait()
"""


def settings(path: Path) -> QueueSettings:
    return QueueSettings(data_path=path, data_bytes=1 << 20, entries=2048)


def one_life(path: Path, life: int, words: int) -> list[bytes]:
    """Run the child, kill it with -9 in full flight once it said ``words`` lines; all whole lines it said."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(life)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdout is not None
    text = b""
    while text.count(b"\n") < words:
        some = os.read(child.stdout.fileno(), 1 << 16)
        assert some, f"the child ended by itself; it said {text[-300:]!r}"
        text += some
    child.send_signal(signal.SIGKILL)
    text += child.stdout.read()
    child.wait()
    child.stdout.close()
    lines = text[: text.rfind(b"\n") + 1].splitlines()
    return [line for line in lines if line.startswith((b"+ ", b"- "))]  # the log is on the same pipe


def test_kill_9_with_eight_producers(tmp_path: Path) -> None:
    rng, path = random.Random(4), tmp_path / "q"
    live: dict[int, bytes] = {}
    deleted: set[int] = set()
    confirmed = 0
    for life in range(KILLS):
        for line in one_life(path, life, rng.randrange(1, 600)):
            word, seq, *name = line.split(b" ")
            if word == b"+":
                live[int(seq)] = b" ".join(name)
                confirmed += 1
            else:
                deleted.add(int(seq))
        for seq in deleted:
            live.pop(seq, None)
        queue = DiskQueue(settings(path), helper=False)
        found = {message.seq: message.data for message in queue.peek(0, 1 << 30)}
        assert live.keys() <= found.keys(), f"lost in life {life}: {sorted(live.keys() - found.keys())[:5]}"
        names = set()
        for seq, data in found.items():
            name, _space, digest = data.rpartition(b" ")
            assert digest == hashlib.sha256(name).hexdigest().encode() * (1 + int(name.split()[2]) % 9)
            assert live.get(seq, name) == name
            names.add(name)
        assert len(names) == len(found), "doubled"
        live = {seq: data.rpartition(b" ")[0] for seq, data in found.items()}
        deleted.clear()
        queue.close()
    assert confirmed > KILLS * 50


def test_disk_full_when_it_is_made_is_said_and_nothing_is_left(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        with pytest.raises(QueueNoSpace, match="Free space"):
            DiskQueue(settings(tmp_path / "q"), helper=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    queue = DiskQueue(settings(tmp_path / "q"), helper=False)
    assert queue.put(b"works when there is room") == 1
    queue.close()


def test_a_file_system_that_fills_up_later_does_not_matter(tmp_path: Path) -> None:
    """Everything is reserved: with no byte to be had, a queue goes on, wraps, syncs its index, reopens."""
    queue = DiskQueue(settings(tmp_path / "q"), helper=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 8192, hard))
    try:
        for _ in range(40):
            queue.put_many([b"x" * 900] * 64)
            held = queue.lock(64, most_bytes=1 << 30)
            queue.delete([message.seq for message in held])
            queue.sync_index()
        queue.put(b"last")
        queue.close()
        again = DiskQueue(settings(tmp_path / "q"), helper=False)
        assert [message.data for message in again.lock(10)] == [b"last"]
        again.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


class SlowStorage(FileStorage):
    """A disk so slow that each sync ends only when every producer waits for one."""

    syncs = 0
    everybody_waits: Callable[[], bool] = staticmethod(lambda: True)

    def sync(self) -> None:
        deadline = Deadline(60)
        while not self.everybody_waits():
            assert not deadline.passed, "a producer neither waits nor has ended"
            time.sleep(0.001)
        self.syncs += 1
        super().sync()


def test_slow_disk_shares_each_sync_between_all_producers(tmp_path: Path) -> None:
    slow = SlowStorage(tmp_path / "q")
    queue = DiskQueue(QueueSettings(data_path=tmp_path / "q", data_bytes=4 << 20, entries=8192), data=slow)
    before, producers, each = slow.syncs, 64, 20
    ended: list[int] = []

    def everybody_waits() -> bool:
        figures = queue.stat()
        return bool(figures["next_seq"] - 1 - figures["durable_seq"] == producers - len(ended))

    def produce(producer: int) -> None:
        for _ in range(each):
            queue.put(b"x" * 200)
        ended.append(producer)

    slow.everybody_waits = everybody_waits
    threads = [threading.Thread(target=produce, args=(producer,)) for producer in range(producers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slow.everybody_waits = lambda: True
    assert queue.stat()["records"] == producers * each
    # Who does not share one sync shares the next: two syncs in a row confirm at least one record of each.
    assert slow.syncs - before <= 2 * each + 2
    queue.close()

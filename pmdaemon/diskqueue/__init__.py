"""Durable queue on disk: sequential records, batched syncs, deletion by touching a small index.

``DiskQueue`` (queue.py) over ``Core`` (core.py: files, threads) over ``State`` (state.py: the records in
memory): ``ring`` says where records go, ``commit`` makes them durable in groups, ``index`` keeps what is
live, ``opening`` and ``recovery`` bring it back after a crash.
``storage`` is the file system in five operations.
Formats: ``record``, ``entry``. Design: docs/design/3-disk-queue.md; formats: docs/formats/diskqueue.md.
"""

from pmdaemon.diskqueue.commit import Request
from pmdaemon.diskqueue.owner import LockOwner, myself
from pmdaemon.diskqueue.queue import DiskQueue, QueueMessage
from pmdaemon.diskqueue.settings import QueueSettings

__all__ = ["DiskQueue", "LockOwner", "QueueMessage", "QueueSettings", "Request", "myself"]

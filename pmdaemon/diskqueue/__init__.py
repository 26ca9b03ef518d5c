"""Durable queue on disk: sequential records, batched syncs, deletion by touching a small index.

``queue.DiskQueue`` has a ``state`` (the records in memory), a ``commit`` (makes them durable in groups) and
two files. ``ring`` says where records go, ``index`` keeps what is live, ``consumer`` what may be taken next;
``opening``, ``recovery`` and ``resize`` bring a queue back. ``storage`` is the file system in five
operations, ``format`` what is in the files.

Design: docs/design/3-disk-queue.md; formats: docs/formats/diskqueue.md.
"""

from pmdaemon.diskqueue.commit import Request
from pmdaemon.diskqueue.consumer import LockOwner, QueueMessage, myself
from pmdaemon.diskqueue.queue import DiskQueue
from pmdaemon.diskqueue.settings import QueueSettings

__all__ = ["DiskQueue", "LockOwner", "QueueMessage", "QueueSettings", "Request", "myself"]

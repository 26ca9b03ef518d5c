"""Shared-memory mailboxes between the processes of one server (P8, M1-M9).

Two steps, neither of which waits: a sender posts, a recipient takes later. Read in this order: ``layout``
(the byte map), ``segment`` (the file, and which process has a name), ``ring`` (payloads and bundles),
``writer`` (posting, and the list of one sender), ``shared_writer`` (the one list of all, and its mutex),
``reader`` (the recipient's search and its batch), ``doorbell`` (sleep), ``mailbox`` (what others use),
``sender`` (messages kept until a recipient has room), ``inspect`` (figures and an outsider's view) and
``errors``.

Imports of this project: ``pmdaemon.errors`` and ``pmdaemon.runtime`` only. Payloads are opaque bytes here.
"""

from pmdaemon.mailbox.doorbell import BACKSTOP_S
from pmdaemon.mailbox.inspect import describe, probe
from pmdaemon.mailbox.layout import Layout, Route
from pmdaemon.mailbox.mailbox import Mailbox, attach, wait_any
from pmdaemon.mailbox.message import LookAhead, Message, View
from pmdaemon.mailbox.segment import (
    Segment,
    create_segment,
    default_runtime_dir,
    ensure_private_dir,
    reserve_room,
    sweep_stale,
    take_ownership,
)
from pmdaemon.mailbox.sender import OTHERS, MailboxSender, Resend

__all__ = [
    "BACKSTOP_S",
    "OTHERS",
    "Layout",
    "LookAhead",
    "Mailbox",
    "MailboxSender",
    "Message",
    "Resend",
    "Route",
    "Segment",
    "View",
    "attach",
    "create_segment",
    "default_runtime_dir",
    "describe",
    "ensure_private_dir",
    "probe",
    "reserve_room",
    "sweep_stale",
    "take_ownership",
    "wait_any",
]

"""Errors of the mailbox. A class of its own has what a caller distinguishes; the rest differs in its message.

MailboxError
├── LayoutInvalid        the table of participants and routes is wrong; fix the configuration
├── SegmentError         the shared file cannot be created or used
│   ├── SegmentMissing   no such file yet; its creator may still be starting (retryable)
│   ├── SegmentUnsafe    owner, mode or type of the file or directory would let others in
│   ├── SegmentNoSpace   the file system cannot reserve it
│   ├── LayoutMismatch   not a segment, or made by another version of this program
│   └── MachineUnsupported  memory order of this CPU is not the one the mailbox relies on
├── RoomMissing          the participant's room in the segment is not reserved (retryable)
├── ParticipantBusy      another living process is attached under this name
├── MessageTooLarge      it can never fit that ring
├── MailboxFull          some recipients had no room just now (retryable); the others have the message
│   └── MailboxBusy      a stopped process holds the lock of the list (retryable); nothing was posted
├── PayloadInUse         a view of a taken payload is still in use where its batch would be released
└── MailboxCorrupt       shared memory holds what cannot be true
    └── MessageDamaged   one message, which was discarded; the list is in order
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pmdaemon.errors import MailboxError

__all__ = [
    "LayoutInvalid",
    "LayoutMismatch",
    "MachineUnsupported",
    "MailboxBusy",
    "MailboxCorrupt",
    "MailboxError",
    "MailboxFull",
    "MessageDamaged",
    "MessageTooLarge",
    "ParticipantBusy",
    "PayloadInUse",
    "RoomMissing",
    "SegmentError",
    "SegmentMissing",
    "SegmentNoSpace",
    "SegmentUnsafe",
]


class LayoutInvalid(MailboxError):
    """Participants, routes and sizes do not make a layout."""

    exit_status = 78  # EX_CONFIG: sizes come from the configuration

    def __init__(self, problem: str) -> None:
        self.problem = problem
        super().__init__(f"mailbox layout: {problem}")


class SegmentError(MailboxError):
    """The shared file cannot be created or used. ``path`` says which."""

    exit_status = 71  # EX_OSERR

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        super().__init__(f"{path}: {text}")


class SegmentMissing(SegmentError):
    """The file does not exist (yet)."""

    retryable = True

    def __init__(self, path: Path) -> None:
        super().__init__(
            path, "no such mailbox segment. Start sla-server, which creates it, or correct the path"
        )


class SegmentUnsafe(SegmentError):
    """Another user could reach or replace the file."""

    exit_status = 77  # EX_NOPERM

    def __init__(self, path: Path, problem: str, fix: str) -> None:
        self.problem = problem
        super().__init__(path, f"{problem}. {fix}")


class SegmentNoSpace(SegmentError):
    """The file system cannot reserve the whole segment now; writing to it later would kill the process."""

    def __init__(self, path: Path, needed_bytes: int, free_bytes: int) -> None:
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        super().__init__(
            path,
            f"needs {needed_bytes:,} bytes, its file system has {free_bytes:,} free. Enlarge it "
            "(mount -o remount,size=... for a tmpfs), remove old files there, or configure smaller rings",
        )


class LayoutMismatch(SegmentError):
    """Not a segment of this version of the program."""

    exit_status = 70  # EX_SOFTWARE

    def __init__(self, path: Path, what: str, found: object, expected: object) -> None:
        self.what = what
        self.found = found
        self.expected = expected
        super().__init__(
            path,
            f"{what} is {found!r}, this program expects {expected!r}. All processes of one server must run "
            "the same version: stop the server, then start it again (it recreates its segments)",
        )


class MachineUnsupported(SegmentError):
    """The CPU's memory order is not that of x86-64."""

    exit_status = 70

    def __init__(self, path: Path, machine: str) -> None:
        self.machine = machine
        super().__init__(
            path, f"the mailbox relies on the memory order of x86-64 with 64-bit Linux; this is {machine}"
        )


class RoomMissing(MailboxError):
    """Nothing may be stored for this participant yet: its room was left out when the segment was made."""

    retryable = True

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"no room is reserved for participant {name!r}. The parent of its process reserves it first "
            "(pmdaemon does for its pairs, and says in its log why it could not)"
        )


class ParticipantBusy(MailboxError):
    """Another living process holds this name; two writers would destroy the lane."""

    retryable = True

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        super().__init__(
            f"participant {name!r} is attached already by process {pid}; stop that process first"
        )


class MessageTooLarge(MailboxError):
    """A payload that can never fit the ring. Nothing was posted."""

    def __init__(self, sender: str, recipient: str, size_bytes: int, ring_bytes: int) -> None:
        self.recipient = recipient
        self.size_bytes = size_bytes
        self.ring_bytes = ring_bytes
        super().__init__(
            f"message of {size_bytes:,} bytes from {sender!r} to {recipient!r} must be smaller than its ring "
            f"of {ring_bytes:,} bytes; split it, or enlarge that route"
        )


class MailboxFull(MailboxError):
    """``recipients`` had no room; every other recipient of this post has the message.

    ``posted``: of a ``post_many``, how many of its payloads, from the first on, were posted.
    """

    retryable = True

    def __init__(self, sender: str, recipients: tuple[str, ...], text: str = "", posted: int = 0) -> None:
        self.sender = sender
        self.recipients = recipients
        self.posted = posted
        super().__init__(
            text
            or f"no room from {sender!r} to {', '.join(recipients)}: not taken fast enough, or not running. "
            "Post again later to these only"
        )


class MailboxBusy(MailboxFull):
    """A process that is stopped holds the lock of the list (form `shared`). Nothing was posted."""

    def __init__(self, sender: str, recipients: tuple[str, ...]) -> None:
        super().__init__(
            sender,
            recipients,
            f"post from {sender!r} to {', '.join(recipients)}: another sender has locked the list and does "
            "not go on. Look for a stopped process (state T in ps), continue or kill it, and post again",
        )


class PayloadInUse(MailboxError):
    """A view handed out by ``take_views`` is still exported, by an array made of it for example."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"mailbox of {name!r}: something still uses a payload view of the last batch, whose memory "
            "would be written again. Drop arrays and slices made of it, or copy them, before the next take"
        )


class MailboxCorrupt(MailboxError):
    """Shared memory holds something that no sequence of the mailbox's stores can produce."""

    exit_status = 70

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        self.problem = problem
        super().__init__(
            f"{where} is damaged: {problem}. sla-server makes a new segment and restarts the parts that "
            "use it, at once or at its next start; gateways send again what was not acknowledged"
        )


class MessageDamaged(MailboxCorrupt):
    """A payload does not have its checksum. The message is discarded, everything else goes on."""

    def __init__(self, where: str, sequence: int) -> None:
        self.where = where
        self.problem = f"message {sequence} has a wrong checksum and was discarded"
        MailboxError.__init__(
            self, f"{where}: {self.problem}. The list goes on; what was not acknowledged is sent again"
        )


def segment_exists(path: Path) -> SegmentError:
    """A segment of this name exists already."""
    text = "exists already. Attach to it; if its server is gone, the next server start removes it"
    return SegmentError(path, text)


def segment_unusable(path: Path, action: str, cause: OSError) -> SegmentError:
    """An operating-system call on the file failed; the cause is chained."""
    return SegmentError(path, f"cannot {action}: {cause.strerror or cause}")


def unknown_participant(name: str, known: Sequence[str]) -> MailboxError:
    """The name is not in the segment's table."""
    return MailboxError(f"no participant {name!r} in this mailbox segment; it has {', '.join(known)}")


def no_route(sender: str, recipient: str, known: Sequence[str]) -> MailboxError:
    """The layout has no ring for this pair."""
    routes = ", ".join(known) or "none"
    return MailboxError(f"no route from {sender!r} to {recipient!r}; its routes: {routes}")


def not_taken(sender: str, sequence: int) -> MailboxError:
    """Only messages of the newest batch can be given back, once."""
    text = "is not in hand: give messages back before the next take, once"
    return MailboxError(f"message {sequence} of {sender!r} {text}")


def mailbox_closed(name: str) -> MailboxError:
    """The mailbox was closed in this process."""
    return MailboxError(f"mailbox of {name!r} is closed; attach again")

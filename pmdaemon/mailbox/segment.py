"""The shared file: made aside, given its name when complete, checked before use, swept with its owner.

A segment is an ordinary file in a directory that only its user may enter (a tmpfs: systemd's
RuntimeDirectory, or a private one under /dev/shm), mapped by every participant. Its bytes are reserved when
it is made: on a full tmpfs a later store would kill the process with SIGBUS, so a lack of room must be an
error here. Two things are left out. The *rooms* of participants that may never come (``later``) are reserved
by ``reserve_room`` before their processes are started: until its ROOM word says so no process loads or stores
there (even a load would take a page of the tmpfs). Of a ring above FIRST_BYTES only that much is reserved;
its sender reserves the rest when it needs it, before it stores there (``ring``), and is full where it cannot.

Neither POSIX shared memory nor multiprocessing's classes are used: their resource tracker unlinks the
segment when any attached process ends.

Invariants: a file that carries the segment's name is complete; a name is never given to a second segment
while the first exists; only ``sweep_stale`` and the owner remove one. ROOM is stored after its bytes are
reserved, so a death in between leaves bytes that are reserved in vain until the next try, and nothing worse.

A name in a segment belongs to one living process at a time: PID and START of the control block say which
(``claim``). A process is named by its number *and* its start time (clock ticks since boot), because numbers
are reused: a process of that PID that started at another time is another process, and the name is free again.
A zombie executes nothing any more and counts as gone. Reads /proc; all processes of one server live in one
PID namespace (a limit stated in docs/design/2-mailbox.md).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import stat
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import structlog
from isal.isal_zlib import crc32

from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox.errors import (
    LayoutInvalid,
    LayoutMismatch,
    MachineUnsupported,
    MailboxCorrupt,
    ParticipantBusy,
    SegmentError,
    SegmentMissing,
    SegmentNoSpace,
    SegmentUnsafe,
    segment_exists,
    segment_unusable,
    unknown_participant,
)
from pmdaemon.mailbox.layout import Layout
from pmdaemon.mailbox.shared_writer import make_mutex

log = structlog.get_logger("mailbox")
_NEW_SUFFIX = ".new-"
GROWTH_PAUSE_NS: Final = 1_000_000_000
"""Until a full file system is asked again."""
# Linux 5.14, asm-generic/mman-common.h; the mmap module does not name them yet.
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23


def default_runtime_dir() -> Path:
    """Where segments lie unless configured: ``$RUNTIME_DIRECTORY`` (systemd), else ``/dev/shm/sla-UID``."""
    given = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    # /dev/shm is shared by all users; the directory made in it is private and its owner is checked.
    return Path(given) if given else Path("/dev/shm") / f"sla-{os.geteuid()}"  # noqa: S108


def ensure_private_dir(directory: Path) -> None:
    """Make ``directory`` (mode 0700) if it is missing, and check that no other user can enter it.

    Raises:
        SegmentUnsafe: a link, owned by another user, or open to group or others.
        SegmentError: it cannot be made.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(directory)
    except OSError as exc:
        raise segment_unusable(directory, "make the directory", exc) from exc
    if not stat.S_ISDIR(status.st_mode):
        raise SegmentUnsafe(directory, "is a link or no directory", "Give a real directory")
    _check_private(directory, status, "RuntimeDirectoryMode=0700 in a systemd unit, or chmod 0700")


def create_segment(path: Path, layout: Layout, later: Collection[str] = ()) -> None:
    """Make a segment of this layout, owned by the calling process, all zero but for its header and tables.

    The rooms of the participants ``later`` are not reserved yet.

    Durability: none; the file lives as long as its tmpfs.

    Raises:
        SegmentError: the name is taken.
        SegmentNoSpace: it cannot be reserved in full.
        SegmentUnsafe, SegmentError, MachineUnsupported: see the classes.
    """
    _check_machine(path)
    ensure_private_dir(path.parent)
    aside = path.with_name(f"{path.name}{_NEW_SUFFIX}{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        aside.unlink()  # left by a process that died while it made a segment and had this number
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(aside, flags, 0o600)
    except OSError as exc:
        raise segment_unusable(aside, "make the segment", exc) from exc
    try:
        _reserve(fd, path, layout, layout.reserved(later))
        _write_static(fd, layout)
        _mark_rooms(fd, layout, later)
        # link, not rename: it refuses to replace a segment that others may have mapped.
        os.link(aside, path)
    except FileExistsError as exc:
        raise segment_exists(path) from exc
    except OSError as exc:
        raise segment_unusable(path, "make the segment", exc) from exc
    finally:
        os.close(fd)
        aside.unlink()


def _reserve(fd: int, path: Path, layout: Layout, extents: Sequence[tuple[int, int]]) -> None:
    try:
        os.ftruncate(fd, layout.total_bytes)
        for at_bytes, size in extents:
            os.posix_fallocate(fd, at_bytes, size)
    except OSError as exc:
        if exc.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.statvfs(path.parent)
        needed = sum(size for _, size in extents)
        raise SegmentNoSpace(path, needed, free.f_bavail * free.f_frsize) from exc


def _mark_rooms(fd: int, layout: Layout, later: Collection[str]) -> None:
    for index, name in enumerate(layout.participants):
        if name not in later:
            os.pwrite(fd, (1).to_bytes(8, "little"), (layout.control_word(index) + lay.C_ROOM) * 8)


def reserve_room(path: Path, name: str) -> None:
    """Reserve the room of participant ``name``, unless that was done before; call it before it is started.

    Crash: see the module. Its slots come first: what is in vain when there is no room for the rings is small.

    Raises:
        SegmentNoSpace: the file system has no room for it now; whatever was reserved before goes on.
        MailboxError: the segment has no such participant.
        SegmentError: there is no such segment, or it cannot be used.
    """
    segment = Segment(path)
    try:
        layout = segment.layout
        if name not in layout.participants:
            raise unknown_participant(name, layout.participants)
        room_word = layout.control_word(layout.index(name)) + lay.C_ROOM
        if not segment.words[room_word]:
            _reserve(segment.fd, path, layout, layout.room(name))
            segment.words[room_word] = 1
    except OSError as exc:
        raise segment_unusable(path, f"reserve the room of {name}", exc) from exc
    finally:
        segment.close()


def take_ownership(path: Path) -> None:
    """Become the owner of a segment whose former owner has ended.

    Raises:
        SegmentError: there is no such segment, or it cannot be used.
    """
    segment = Segment(path)
    segment.words[lay.H_OWNER_START] = start_ticks(os.getpid()) or 0
    segment.words[lay.H_OWNER_PID] = os.getpid()
    segment.close()


def _write_static(fd: int, layout: Layout) -> None:
    tables = layout.tables()
    header = [0] * (lay.HEADER_BYTES // 8)
    header[lay.H_MAGIC] = lay.MAGIC
    header[lay.H_VERSION] = lay.LAYOUT_VERSION
    header[lay.H_MACHINE] = lay.MACHINE_X86_64
    header[lay.H_TOTAL_BYTES] = layout.total_bytes
    header[lay.H_PARTICIPANTS] = len(layout.participants)
    header[lay.H_ROUTES] = len(layout.routes)
    header[lay.H_SLOTS] = layout.slots_per_sender
    header[lay.H_TABLES_CRC] = crc32(tables)
    header[lay.H_OWNER_PID] = os.getpid()
    header[lay.H_OWNER_START] = start_ticks(os.getpid()) or 0
    header[lay.H_CREATED_US] = time.time_ns() // 1000
    header[lay.H_FORM] = lay.FORMS.index(layout.form)
    header[lay.H_CHECKSUM] = lay.CHECKSUM_FULL
    header[lay.H_FIRST_BYTES] = layout.first_bytes
    data = b"".join(word.to_bytes(8, "little") for word in header) + tables
    if os.pwrite(fd, data, 0) != len(data):
        raise OSError(errno.EIO, "short write")
    if layout.form == "shared":
        with mmap.mmap(fd, layout.total_bytes) as memory:
            make_mutex(memory, layout.list_at_bytes)


class Segment:
    """A mapped segment that passed all checks.

    Attributes:
        memory: the mapping; slices of it are copies. bytes: the same as a view, slices of which are not.
        words: the same as native 8-byte words.
        Shared words are loaded and stored only through ``words``: such a store is one instruction, while
        ``struct.pack_into`` writes byte by byte.

    Raises:
        SegmentMissing, SegmentUnsafe, SegmentError, LayoutMismatch, MachineUnsupported: see the classes.
    """

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        _check_machine(path)
        self.path = path
        # Not to wait for the other end of a FIFO, should a doorbell be named instead of a segment.
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            self.fd = os.open(path, flags)
        except FileNotFoundError as exc:
            raise SegmentMissing(path) from exc
        except OSError as exc:
            raise segment_unusable(path, "open the segment", exc) from exc
        try:
            self._map(writable)
        except BaseException:
            os.close(self.fd)
            raise
        try:
            self.layout = self._read_layout()
        except BaseException:
            self.close()
            raise

    def _map(self, writable: bool) -> None:
        status = os.fstat(self.fd)
        if not stat.S_ISREG(status.st_mode):
            raise SegmentUnsafe(self.path, "is no regular file", "Give the path of a segment")
        _check_private(self.path, status, "Let the server make a new one")
        if status.st_size < lay.HEADER_BYTES or status.st_size % 8:
            raise LayoutMismatch(self.path, "file size", status.st_size, "that of a mailbox segment")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        try:
            self.memory = mmap.mmap(self.fd, status.st_size, access=access)
        except OSError as exc:
            raise segment_unusable(self.path, "map the segment", exc) from exc
        self.bytes = memoryview(self.memory)
        self.words = self.bytes.cast("Q")

    def _read_layout(self) -> Layout:
        words = self.words
        for word, what, expected in (
            (lay.H_MAGIC, "magic number", lay.MAGIC),
            (lay.H_VERSION, "layout version", lay.LAYOUT_VERSION),
            (lay.H_MACHINE, "machine", lay.MACHINE_X86_64),
            (lay.H_TOTAL_BYTES, "size", len(self.memory)),
            (lay.H_CHECKSUM, "kind of payload checksums", lay.CHECKSUM_FULL),
        ):
            if words[word] != expected:
                raise LayoutMismatch(self.path, what, words[word], expected)
        participants, routes = words[lay.H_PARTICIPANTS], words[lay.H_ROUTES]
        end = lay.HEADER_BYTES + lay.tables_bytes(participants, routes)
        if not 1 <= participants <= lay.MAX_PARTICIPANTS or end > len(self.memory):
            raise LayoutMismatch(self.path, "number of participants", participants, "what fits the file")
        tables = self.memory[lay.HEADER_BYTES : end]
        if crc32(tables) != words[lay.H_TABLES_CRC]:
            raise LayoutMismatch(self.path, "checksum of the tables", crc32(tables), words[lay.H_TABLES_CRC])
        try:
            layout = lay.layout_from_tables(
                tables, participants, words[lay.H_SLOTS], words[lay.H_FORM], words[lay.H_FIRST_BYTES]
            )
        except LayoutInvalid as exc:
            raise LayoutMismatch(self.path, "table of routes", exc.problem, "a valid layout") from exc
        if layout.total_bytes != len(self.memory):
            raise LayoutMismatch(self.path, "size", len(self.memory), layout.total_bytes)
        return layout

    @property
    def is_damaged(self) -> bool:
        """Whether a participant has met damage; ``mark_damaged``."""
        return bool(self.words[lay.H_DAMAGED])

    @property
    def damaged_by(self) -> str:
        """The participant that has met the damage first; empty without damage."""
        number = self.words[lay.H_DAMAGED]
        names = self.layout.participants
        return names[number - 1] if 0 < number <= len(names) else "a stray store" if number else ""

    def mark_damaged(self, name: str, error: MailboxCorrupt) -> None:
        """Let the server see that the segment must be replaced, and say in the log what ``name`` has met.

        The log has one line for a segment, that of the first. Thread: any, of any participant.
        """
        if not self.words[lay.H_DAMAGED]:
            self.words[lay.H_DAMAGED] = 1 + self.layout.index(name)
            log.error("mailbox-damage-met", participant=name, path=str(self.path), problem=str(error))

    def has_room(self, index: int) -> bool:
        """Whether the room of participant ``index`` is reserved."""
        return bool(self.words[self.layout.control_word(index) + lay.C_ROOM])

    def prefault(self, at_bytes: int, size_bytes: int, *, to_write: bool) -> None:
        """Map these pages now: each would cost a fault in the first lap round a ring, more than to fill it.

        A kernel that does not know how leaves them to be mapped when they are touched.
        """
        start = at_bytes - at_bytes % mmap.PAGESIZE
        advice = _MADV_POPULATE_WRITE if to_write else _MADV_POPULATE_READ
        with contextlib.suppress(OSError):
            self.memory.madvise(advice, start, at_bytes + size_bytes - start)

    def close(self) -> None:
        """Unmap. The views go first; one that a user still holds keeps the mapping until it is gone."""
        self.words.release()
        with contextlib.suppress(BufferError):  # a view of a payload, or of this very view, is still in use
            self.bytes.release()
            self.memory.close()
        os.close(self.fd)


class RingGrowth:
    """Reserves more of a ring for its sender.

    Where the file system has no room it asks again only after a pause: the sender may call for each message.
    """

    def __init__(self, segment: Segment, recipient: str) -> None:
        self._segment = segment
        self._recipient = recipient
        self._refused_until_ns = 0

    def reserve(self, at_bytes: int, size_bytes: int) -> bool:
        """Reserve and map these bytes; whether there was room."""
        if time.monotonic_ns() < self._refused_until_ns:
            return False
        try:
            os.posix_fallocate(self._segment.fd, at_bytes, size_bytes)
        except OSError as exc:
            self._refused_until_ns = time.monotonic_ns() + GROWTH_PAUSE_NS
            log.warning(
                "ring-not-enlarged",
                path=str(self._segment.path),
                recipient=self._recipient,
                needed_bytes=size_bytes,
                problem=exc.strerror,
                effect="its senders find it full; free memory, or make the file system of runtime_dir larger",
            )
            return False
        self._segment.prefault(at_bytes, size_bytes, to_write=True)
        return True


def _check_private(path: Path, status: os.stat_result, fix: str) -> None:
    if status.st_uid != os.geteuid():
        raise SegmentUnsafe(
            path, f"belongs to user {status.st_uid}, not to {os.geteuid()}", "Run as its owner"
        )
    if status.st_mode & 0o077:
        raise SegmentUnsafe(path, f"is open to others (mode {status.st_mode & 0o777:04o})", fix)


def _check_machine(path: Path) -> None:
    if platform.machine() not in ("x86_64", "AMD64") or sys.maxsize < 1 << 32 or sys.platform != "linux":
        raise MachineUnsupported(path, f"{platform.machine()} {sys.platform}")


def sweep_stale(directory: Path) -> list[Path]:
    """Remove segments whose owner and participants are gone, their doorbells, and unfinished ones.

    Returns what was removed. Other files stay.

    Raises:
        SegmentUnsafe, SegmentError: as ``ensure_private_dir``; nothing was removed.
    """
    if not directory.exists():
        return []
    ensure_private_dir(directory)
    removed = []
    for path in sorted(directory.iterdir()):
        if _is_stale(path):
            bells = sorted(directory.glob(f"{path.name}.*.bell"))
            for doomed in (path, *bells):
                with contextlib.suppress(FileNotFoundError):
                    doomed.unlink()
                    removed.append(doomed)
    return removed


def _is_stale(path: Path) -> bool:
    unfinished_pid = path.name.rpartition(_NEW_SUFFIX)[2] if _NEW_SUFFIX in path.name else ""
    if unfinished_pid.isdigit():
        return start_ticks(int(unfinished_pid)) is None
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, a link, a socket: not a segment
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return False
        header = os.pread(fd, lay.HEADER_BYTES, 0)
    finally:
        os.close(fd)
    if len(header) < lay.HEADER_BYTES:
        return False
    words = memoryview(header).cast("Q")
    if words[lay.H_MAGIC] != lay.MAGIC or is_alive(words[lay.H_OWNER_PID], words[lay.H_OWNER_START]):
        return False
    try:
        segment = Segment(path, writable=False)
    except SegmentError:  # of another version, or cut off: of no use any more
        return True
    try:
        controls = [segment.layout.control_word(index) for index in range(len(segment.layout.participants))]
        words = segment.words
        return not any(is_alive(words[word + lay.C_PID], words[word + lay.C_START]) for word in controls)
    finally:
        segment.close()


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot, or None if it is gone or a zombie.

    Source: proc(5), /proc/PID/stat, fields 3 (state) and 22 (starttime). The command name before them may
    hold blanks and brackets, so fields are counted behind its last bracket.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZXx" else int(fields[19])


def is_alive(pid: int, started_ticks: int) -> bool:
    """Whether the process that had this number and start time still runs."""
    return pid > 0 and start_ticks(pid) == started_ticks


def claim(segment: Segment, index: int, name: str) -> None:
    """Write this process into the participant's control block, unless another living one is in it.

    Raises:
        ParticipantBusy: it does.
    """
    words, control = segment.words, segment.layout.control_word(index)
    # Race: two processes of one name starting at once. The kernel drops this lock if this process dies here.
    fcntl.flock(segment.fd, fcntl.LOCK_EX)
    try:
        pid = words[control + lay.C_PID]
        if pid != os.getpid() and is_alive(pid, words[control + lay.C_START]):
            raise ParticipantBusy(name, pid)
        words[control + lay.C_START] = start_ticks(os.getpid()) or 0
        words[control + lay.C_PID] = os.getpid()
        words[control + lay.C_INCARNATION] = (words[control + lay.C_INCARNATION] + 1) % lay.COUNT_LIMIT
        words[control + lay.C_SLEEP] = 0
    finally:
        fcntl.flock(segment.fd, fcntl.LOCK_UN)

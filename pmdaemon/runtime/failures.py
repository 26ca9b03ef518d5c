"""How programs end by themselves: one line for people, and why for those who ask later.

``outermost`` is around everything a program does: whatever comes out of it becomes one line and an exit
status. The traceback of a fault of ours goes to a file that the line names (``traceback_file`` says which are
kept). So does that of an error which a program logs and survives: ``logs`` calls ``traceback_file``, too.

State: ``_written``, the files of this process's faults. A thread that misses an entry looks on the disk.

RUNTIME_DIR/NAME.failed says why a part of the server ended, from its end until its next start. While a part
cannot start, ``sla-server status`` finds the reason nowhere else. A note that cannot be written or read is no
trouble of its own: the log has it, too.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pmdaemon.errors import SlaError
from pmdaemon.runtime.files import write_whole

EX_SOFTWARE: Final = 70  # of sysexits
EX_IOERR: Final = 74
SCARCE: Final = {
    errno.ENOMEM: "Free memory on this host, or raise the limit of this service (MemoryMax, ulimit -v)",
    errno.EMFILE: "Raise the limit of open files of this service (LimitNOFILE, ulimit -n)",
    errno.ENFILE: "This host has no open file left: raise fs.file-max, or look which program holds them",
}
"""What is short has nothing to do with a path: what to do about it."""
NO_THREAD: Final = "can't start new thread"  # CPython's words: it raises no class of its own
NO_THREAD_ADVICE: Final = (
    "No thread can be started. Free memory on this host, or raise the limits of this service "
    "(MemoryMax and TasksMax, ulimit -v and -u)"
)
MOST_FAULTS: Final = 10  # files a program: one that fails again and again must not fill the disk
_written: Final[dict[str, Path]] = {}  # beginning of its path -> file of this process's faults


@contextlib.contextmanager
def outermost(program: str, say: Callable[[str], object] | None = None) -> Iterator[None]:
    """Run a program: errors become one line on stderr and an exit status.

    Errors of the command line (click's own, which bring their words along) pass.

    Args:
        program: begins the line.
        say: takes the line without its beginning, in place of stderr.
    """
    try:
        yield
    except (SlaError, OSError, MemoryError, KeyboardInterrupt) as exc:
        text, status = in_words(exc)
        if text:
            (say or _on_stderr(program))(text)
        raise SystemExit(status) from None
    except Exception as exc:
        if type(exc).__module__.partition(".")[0] == "click":
            raise
        if _is_no_thread(exc):
            (say or _on_stderr(program))(NO_THREAD_ADVICE)
            raise SystemExit(EX_IOERR) from None
        (say or _on_stderr(program))(of_a_fault(program, exc))
        raise SystemExit(EX_SOFTWARE) from None


def _is_no_thread(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and str(error) == NO_THREAD


def in_words(error: BaseException) -> tuple[str, int]:
    """One line about an error that is no fault of the program, and the exit status."""
    if isinstance(error, SlaError):
        return str(error), error.exit_status
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in SCARCE):
        code = error.errno if isinstance(error, OSError) and error.errno else errno.ENOMEM
        return f"{os.strerror(code)}. {SCARCE[code]}", EX_IOERR
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        what = f"{where}{error.strerror or error}"
        return f"{what}. Check the path, the room on its disk, and that this user may use it", EX_IOERR
    return "", 130  # 128 + SIGINT, as shells say it


def of_a_fault(program: str, error: BaseException) -> str:
    """One line about a mistake in the program; its traceback is in a file that the line names."""
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        path = traceback_file(program, error)
    except OSError as exc:
        return f"{text}. This is a fault of the program; its traceback cannot be written ({exc.strerror})"
    return f"{text}. This is a fault of the program; please report it with {path}"


def traceback_file(program: str, error: BaseException) -> Path:
    """The file with the traceback of an error.

    An error that comes again at the same place has its file already. Of the others the newest ``MOST_FAULTS``
    are kept, so that a new one always has a file; other users' files are left alone.

    Raises:
        OSError: it cannot be written.
    """
    prefix = f"{program.replace(' ', '-')}-fault-"
    places = [f"{line.tb_frame.f_code.co_filename}:{number}" for line, number in _lines(error)]
    place = hashlib.blake2b("\n".join([type(error).__name__, *places]).encode(), digest_size=4).hexdigest()
    name = f"{prefix}{place}-"
    beginning = os.path.join(tempfile.gettempdir(), name)
    if (path := _written.get(beginning)) is not None:  # a fault that peers cause comes by the thousand
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)
            return path
    path = _fault_file(prefix, name, error)
    if len(_written) >= MOST_FAULTS:
        _written.clear()
    _written[beginning] = path
    return path


def _lines(error: BaseException) -> Iterator[tuple[types.TracebackType, int]]:
    """The frames of its traceback and the line in each; their source is not read."""
    line = error.__traceback__
    while line is not None:
        yield line, line.tb_lineno
        line = line.tb_next


def _fault_file(prefix: str, beginning: str, error: BaseException) -> Path:
    known = [path for _, path in sorted(_own_files(prefix))]
    for path in known:
        if path.name.startswith(beginning):
            os.utime(path)
            return path
    for path in known[: max(0, len(known) - MOST_FAULTS + 1)]:
        path.unlink(missing_ok=True)
    fd, name = tempfile.mkstemp(prefix=beginning, suffix=".txt")
    with os.fdopen(fd, "w", errors="backslashreplace") as file:
        file.writelines(traceback.format_exception(error))
    return Path(name)


def _own_files(prefix: str) -> Iterator[tuple[int, Path]]:
    """(time of the last change, file)."""
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(FileNotFoundError):  # another process removes old ones, too
            status = path.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                yield status.st_mtime_ns, path


def _on_stderr(program: str) -> Callable[[str], object]:
    def say(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # a dead pipe, a closed stream
            print(f"{program}: {text}", file=sys.stderr, flush=True)

    return say


@contextlib.contextmanager
def failure_recorded(runtime_dir: Path, name: str) -> Iterator[None]:
    """Run the part ``name``: forget how it ended before, and note the error it ends by."""
    path = runtime_dir / f"{name}.failed"
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
    try:
        yield
    except (SlaError, OSError, MemoryError) as exc:
        record_failure(runtime_dir, name, in_words(exc)[0])
        raise
    except RuntimeError as exc:
        if _is_no_thread(exc):
            record_failure(runtime_dir, name, NO_THREAD_ADVICE)
        raise


def record_failure(runtime_dir: Path, name: str, text: str) -> None:
    """Keep why the part ``name`` ends until its next start."""
    with contextlib.suppress(OSError):
        write_whole(runtime_dir / f"{name}.failed", f"{text}\n")


def failures(runtime_dir: Path) -> dict[str, str]:
    """Parts that ended by an error and have not started since, and what they said."""
    found = {}
    for path in sorted(runtime_dir.glob("*.failed")):
        with contextlib.suppress(OSError):
            found[path.stem] = path.read_text(errors="replace").strip()
    return found

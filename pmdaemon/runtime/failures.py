"""How programs end by themselves: one line for people, and why for those who ask later.

``outermost`` is around everything a program does: whatever comes out of it becomes one line and an exit
status. The traceback of a fault of ours goes to a file that the line names (``of_a_fault`` says which are
kept).

RUNTIME_DIR/NAME.failed says why a part of the server ended, from its end until its next start. While a part
cannot start, ``sla-server status`` finds the reason nowhere else. A note that cannot be written or read is no
trouble of its own: the log has it, too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from pmdaemon.errors import SlaError
from pmdaemon.runtime.files import write_whole

EX_SOFTWARE: Final = 70  # of sysexits
EX_IOERR: Final = 74
MOST_FAULTS: Final = 10  # files a program: one that fails again and again must not fill the disk


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
    except (SlaError, OSError, KeyboardInterrupt) as exc:
        text, status = in_words(exc)
        if text:
            (say or _on_stderr(program))(text)
        raise SystemExit(status) from None
    except Exception as exc:
        if type(exc).__module__.partition(".")[0] == "click":
            raise
        (say or _on_stderr(program))(of_a_fault(program, exc))
        raise SystemExit(EX_SOFTWARE) from None


def in_words(error: BaseException) -> tuple[str, int]:
    """One line about an error that is no fault of the program, and the exit status."""
    if isinstance(error, SlaError):
        return str(error), error.exit_status
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename is not None else ""
        what = f"{where}{error.strerror or error}"
        return f"{what}. Check the path, the room on its disk, and that this user may use it", EX_IOERR
    return "", 130  # 128 + SIGINT, as shells say it


def of_a_fault(program: str, error: BaseException) -> str:
    """One line about a mistake in the program; its traceback is in a file that the line names.

    A fault that comes again at the same place has its file already. Of the others the newest ``MOST_FAULTS``
    are kept, so that a new fault always has one.
    """
    text = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        path = _fault_file(f"{program.replace(' ', '-')}-fault-", error)
    except OSError as exc:
        return f"{text}. This is a fault of the program; its traceback cannot be written ({exc.strerror})"
    return f"{text}. This is a fault of the program; please report it with {path}"


def _fault_file(prefix: str, error: BaseException) -> Path:
    """Write the traceback, unless there is one of the same place; other users' files are left alone."""
    places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    place = hashlib.blake2b("\n".join([type(error).__name__, *places]).encode(), digest_size=4).hexdigest()
    known = [path for _, path in sorted(_own_files(prefix))]
    for path in known:
        if path.name.startswith(f"{prefix}{place}-"):
            os.utime(path)
            return path
    for path in known[: max(0, len(known) - MOST_FAULTS + 1)]:
        path.unlink(missing_ok=True)
    fd, name = tempfile.mkstemp(prefix=f"{prefix}{place}-", suffix=".txt")
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
    except (SlaError, OSError) as exc:
        record_failure(runtime_dir, name, in_words(exc)[0])
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

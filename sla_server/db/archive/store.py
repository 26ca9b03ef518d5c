"""Where Parquet files lie: a local directory, or an fsspec URL. Names are relative and never change contents.

Six operations, a contract each:

    aside       a local path to write a file that does not count yet; its name begins with ``_``
    publish     afterwards the whole file is durably there under its name, or nothing changed
    open        random access for reading
    listing     every file that has a name, with size and age
    remove      afterwards the file is not there; it need not have been
    sweep_asides  removes what crashes left half-written

Local: written beside its place, synced, renamed, directories synced. URL: written in ``aside_dir`` and
uploaded under its final name; object stores show an upload only when it is whole, and so must the driver.

Thread: any; two threads never publish the same name.
"""

from __future__ import annotations

import contextlib
import io
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol

import structlog

from pmdaemon.runtime.config import masked
from pmdaemon.runtime.files import make_directory, sync_directory, sync_file
from sla_server.db.config import DatabaseConfig
from sla_server.db.errors import FilesUnavailable

log = structlog.get_logger("files")
PATTERNS: Final = "*/*/*.parquet"  # KIND/DAY/NAME.parquet


@dataclass(frozen=True, slots=True)
class FoundFile:
    """One file of a listing.

    Attributes:
        bytes: its size.
        changed_s: seconds since 1970, None where the store does not say.
    """

    bytes: int
    changed_s: float | None


class FileStore(Protocol):
    """See the module. Every method may raise OSError or FilesUnavailable."""

    @property
    def address(self) -> str:
        """The root, for people."""

    @property
    def lock_dir(self) -> Path:
        """Directory of the lock that keeps upkeep to one process at a time; exists."""

    def aside(self, name: str) -> Path:
        """A local path for the file that will be ``name``; its directory exists."""

    def publish(self, aside: Path, name: str) -> None:
        """Give the file its name. Durability: name and contents are safe on return."""

    def open(self, name: str) -> BinaryIO:
        """Read a file; FileNotFoundError if it is not there."""

    def listing(self) -> dict[str, FoundFile]:
        """All named files."""

    def remove(self, name: str) -> None:
        """Remove a file if it is there."""

    def sweep_asides(self, mark: str) -> list[str]:
        """Remove half-written files whose name holds ``mark``."""

    def path_for_readers(self, name: str) -> str:
        """What Spark or DuckDB opens."""


class LocalFiles:
    """A directory.

    Args:
        root: its path.
        group_readable: whether members of this process's group may read the files that are published.
    """

    def __init__(self, root: Path, *, group_readable: bool = False) -> None:
        self._root = root
        self._group_readable = group_readable

    @property
    def address(self) -> str:
        """See ``FileStore``."""
        return str(self._root)

    @property
    def lock_dir(self) -> Path:
        """See ``FileStore``; shared by all servers that share the directory."""
        make_directory(self._root)
        return self._root

    def aside(self, name: str) -> Path:
        """See ``FileStore``; in the same directory, so that a rename is enough."""
        path = self._root / name
        if not path.parent.is_dir():  # ``publish`` syncs those that exist
            make_directory(path.parent)
        return path.with_name("_" + path.name)

    def publish(self, aside: Path, name: str) -> None:
        """See ``FileStore``."""
        final = self._root / name
        directories = (final.parent, final.parent.parent, self._root)
        if self._group_readable:
            aside.chmod(0o640)
            for directory in directories:
                _let_group_in(directory)
        sync_file(aside)
        aside.rename(final)
        # The process that made the directories may have died before their names were on disk.
        for directory in directories:
            sync_directory(directory)

    def open(self, name: str) -> BinaryIO:
        """See ``FileStore``."""
        return (self._root / name).open("rb")

    def listing(self) -> dict[str, FoundFile]:
        """See ``FileStore``."""
        found = {}
        for path in self._root.glob(PATTERNS):
            if not path.name.startswith("_"):
                with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                    status = path.stat()
                    found[path.relative_to(self._root).as_posix()] = FoundFile(
                        status.st_size, status.st_mtime
                    )
        return found

    def remove(self, name: str) -> None:
        """See ``FileStore``."""
        (self._root / name).unlink(missing_ok=True)

    def sweep_asides(self, mark: str) -> list[str]:
        """See ``FileStore``."""
        return _remove_all([path for path in self._root.glob(PATTERNS) if _is_aside(path, mark)])

    def path_for_readers(self, name: str) -> str:
        """See ``FileStore``."""
        return str(self._root / name)


class UrlFiles:
    """A folder of an fsspec file system.

    Args:
        url: for example ``s3://bucket/prefix`` or ``memory://cuts``.
        aside_dir: local directory for files under way.

    Raises:
        FilesUnavailable: fsspec or the driver for this protocol is missing.
    """

    def __init__(self, url: str, aside_dir: Path) -> None:
        self._url = url.rstrip("/")
        self._aside_dir = aside_dir
        self._fs, self._root = self._call(lambda: _file_system(self._url))

    def _call(self, action: Callable[[], Any]) -> Any:
        """Drivers raise what they like; only OSError is part of the contract."""
        try:
            return action()
        except OSError:
            raise
        except Exception as exc:  # a door: every driver has exceptions of its own
            raise FilesUnavailable(self._url, f"{type(exc).__name__}: {exc}") from exc

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @property
    def address(self) -> str:
        """See ``FileStore``."""
        return masked(self._url)

    @property
    def lock_dir(self) -> Path:
        """See ``FileStore``."""
        self._aside_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._aside_dir

    def aside(self, name: str) -> Path:
        """See ``FileStore``."""
        self._aside_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._aside_dir / ("_" + Path(name).name)

    def publish(self, aside: Path, name: str) -> None:
        """See ``FileStore``."""
        path = self._path(name)
        self._call(lambda: self._fs.makedirs(path.rpartition("/")[0], exist_ok=True))
        self._call(lambda: self._fs.put_file(str(aside), path))
        size = int(self._call(lambda: self._fs.info(path))["size"])
        if size != aside.stat().st_size:
            raise FilesUnavailable(self._url, f"{name} has {size} bytes there, {aside.stat().st_size} here")
        aside.unlink()

    def open(self, name: str) -> BinaryIO:
        """See ``FileStore``."""
        # Whole, in one request: 64 MB at most, and no driver raises something of its own while it is read.
        return io.BytesIO(self._call(lambda: self._fs.cat_file(self._path(name))))

    def listing(self) -> dict[str, FoundFile]:
        """See ``FileStore``."""
        entries = self._call(lambda: self._fs.find(self._root, detail=True))
        found = {}
        for path, info in entries.items():
            name = path[len(self._root) :].lstrip("/")
            if name.endswith(".parquet"):
                changed = info.get("mtime", info.get("LastModified", info.get("created")))
                changed_s = changed.timestamp() if hasattr(changed, "timestamp") else changed
                found[name] = FoundFile(int(info["size"]), changed_s)
        return found

    def remove(self, name: str) -> None:
        """See ``FileStore``."""
        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: self._fs.rm_file(self._path(name)))

    def sweep_asides(self, mark: str) -> list[str]:
        """See ``FileStore``."""
        return _remove_all([path for path in self._aside_dir.glob("*.parquet") if _is_aside(path, mark)])

    def path_for_readers(self, name: str) -> str:
        """See ``FileStore``."""
        return f"{self._url}/{name}"


def _let_group_in(directory: Path) -> None:
    """What else the directory allows stays as it is; one that the group may enter need not be ours."""
    mode = stat.S_IMODE(directory.stat().st_mode)
    if mode & 0o050 != 0o050:
        directory.chmod(mode | 0o050)


def open_files(config: DatabaseConfig, data_dir: Path) -> FileStore:
    """The store that the configuration names.

    Raises:
        FilesUnavailable: the URL's driver is missing.
    """
    if config.files.url:
        return UrlFiles(config.files.url, data_dir / "parquet-aside")
    return LocalFiles(config.resolved_parquet_dir(data_dir), group_readable=config.files.group_readable)


def sweep(files: FileStore, owner: str, kept: set[str], old_before_s: float) -> Sequence[str]:
    """At the start, before any thread writes: remove half-written files and files without a row.

    Args:
        files: the store.
        owner: this server's queue id: its orphans go at once.
        kept: names in the manifest.
        old_before_s: orphans of others go when older than this (seconds since 1970): their server may be
            about to commit them.
    """
    removed = files.sweep_asides(owner)
    for name, found in files.listing().items():
        is_own_file = name.rpartition("/")[2].partition("-")[0] == owner
        is_old = found.changed_s is not None and found.changed_s < old_before_s
        if name not in kept and (is_own_file or is_old):
            files.remove(name)
            removed.append(name)
    if removed:
        log.info("orphans-swept", files=len(removed))
    return removed


def _file_system(url: str) -> tuple[Any, str]:
    import fsspec  # only a URL needs it

    system, root = fsspec.core.url_to_fs(url)
    return system, str(root).rstrip("/")


def _is_aside(path: Path, mark: str) -> bool:
    return path.name.startswith("_") and mark in path.name


def _remove_all(paths: list[Path]) -> list[str]:
    for path in paths:
        path.unlink(missing_ok=True)
    return [path.name for path in paths]

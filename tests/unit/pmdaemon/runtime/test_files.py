"""Files replaced whole."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from pmdaemon.runtime.files import write_whole


@pytest.mark.parametrize("content", ["8411\n", b"8411\n"])
@pytest.mark.parametrize("synced", [False, True])
def test_a_file_is_replaced_whole_and_private(tmp_path: Path, content: str | bytes, synced: bool) -> None:
    path = tmp_path / "api.port"
    path.write_text("old and longer")
    path.chmod(0o644)
    write_whole(path, content, synced=synced)
    assert path.read_text() == "8411\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["api.port"]


def test_what_a_dead_process_of_our_number_left_is_not_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "port"
    victim.write_text("safe")
    (tmp_path / f".port.{os.getpid()}").symlink_to(victim)
    write_whole(path, "new")
    assert (path.read_text(), victim.read_text()) == ("new", "safe")
    assert not path.is_symlink()


def test_a_full_disk_leaves_the_old_content_and_nothing_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text("old")

    def full(_fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_whole(path, "new", synced=True)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["token"]


def test_with_synced_the_name_is_on_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The content before the rename, the directory after it."""
    path, steps = tmp_path / "token", []
    sync = os.fsync

    def watched(fd: int) -> None:
        is_directory = stat.S_ISDIR(os.fstat(fd).st_mode)
        steps.append(("directory" if is_directory else "content", path.exists()))
        sync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    write_whole(path, "new", synced=True)
    assert steps == [("content", False), ("directory", True)]
    write_whole(path, "newer")
    assert len(steps) == 2

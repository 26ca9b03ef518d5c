import errno
import os
import signal
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from pmdaemon.mailbox import (
    attach,
    create_segment,
    default_runtime_dir,
    describe,
    sweep_stale,
    take_ownership,
)
from pmdaemon.mailbox import layout as lay
from pmdaemon.mailbox import segment as segment_module
from pmdaemon.mailbox.errors import (
    LayoutMismatch,
    MachineUnsupported,
    SegmentError,
    SegmentMissing,
    SegmentNoSpace,
    SegmentUnsafe,
)
from pmdaemon.mailbox.layout import Layout, Route
from pmdaemon.mailbox.segment import Segment, ensure_private_dir
from tests.support.mailbox import drain, exit_status, forked, make_mesh, mesh


def poke(path: Path, word: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(word * 8)
        file.write(value.to_bytes(8, "little"))


def test_a_new_segment_is_private_reserved_and_zero_behind_its_tables(path: Path) -> None:
    layout = mesh("a", "b")
    create_segment(path, layout)
    status = path.stat()
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == layout.total_bytes
    assert status.st_blocks * 512 >= layout.total_bytes  # no hole that a store would have to fill
    words = memoryview(path.read_bytes()).cast("Q")
    stored = [word for word in range(layout.control_at_bytes // 8, len(words)) if words[word]]
    assert stored == [layout.control_word(index) + lay.C_ROOM for index in range(2)]
    assert [entry.name for entry in path.parent.iterdir()] == ["main"]


def test_the_layout_is_read_from_the_file(path: Path) -> None:
    make_mesh(path, "a", "b")
    segment = Segment(path)
    assert segment.layout == mesh("a", "b")
    segment.close()


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    make_mesh(tmp_path / "run" / "main", "a", "b")
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_directory_open_to_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run").chmod(0o750)
    with pytest.raises(SegmentUnsafe, match=r"0750.*RuntimeDirectoryMode"):
        make_mesh(tmp_path / "run" / "main", "a", "b")
    assert not any((tmp_path / "run").iterdir())


def test_a_linked_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(SegmentUnsafe, match="link"):
        ensure_private_dir(tmp_path / "link")


def test_a_foreign_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(SegmentUnsafe, match=f"belongs to user {owner}"):
        ensure_private_dir(tmp_path)


def test_an_existing_segment_is_not_replaced(path: Path) -> None:
    make_mesh(path, "a", "b")
    before = path.stat().st_ino
    with pytest.raises(SegmentError, match="exists already"):
        make_mesh(path, "a", "b")
    assert path.stat().st_ino == before
    assert len(list(path.parent.iterdir())) == 1


def test_a_full_file_system_is_an_error_at_creation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _offset: int, _length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SegmentNoSpace, match="smaller rings") as caught:
        make_mesh(path, "a", "b")
    assert caught.value.needed_bytes == mesh("a", "b").total_bytes
    assert not any(path.parent.iterdir())


def test_a_real_file_size_limit_is_an_error_at_creation(path: Path) -> None:
    def child() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        with pytest.raises(SegmentNoSpace):
            create_segment(path, Layout(("a", "b"), (Route("a", "b", 8 << 20),), 8))
        assert not any(path.parent.iterdir())

    with forked(child) as pid:
        assert exit_status(pid) == 0


def test_missing_and_unsafe_files_are_refused(path: Path) -> None:
    with pytest.raises(SegmentMissing) as caught:
        Segment(path)
    assert caught.value.retryable
    make_mesh(path, "a", "b")
    path.chmod(0o640)
    with pytest.raises(SegmentUnsafe, match="0640"):
        Segment(path)
    path.chmod(0o600)
    path.rename(path.with_name("real"))
    path.symlink_to("real")
    with pytest.raises(SegmentError, match="cannot "):
        Segment(path)


@pytest.mark.parametrize(
    ("word", "what"),
    [
        (lay.H_MAGIC, "magic"),
        (lay.H_VERSION, "layout version"),
        (lay.H_MACHINE, "machine"),
        (lay.H_TOTAL_BYTES, "size"),
        (lay.H_PARTICIPANTS, "participants"),
        (lay.H_ROUTES, "participants"),
        (lay.H_SLOTS, "size|table"),
        (lay.H_TABLES_CRC, "checksum"),
        (lay.H_FORM, "table"),
        (lay.H_CHECKSUM, "kind of payload checksums"),
        (lay.HEADER_BYTES // 8, "checksum"),
    ],
)
def test_every_header_word_is_checked(path: Path, word: int, what: str) -> None:
    make_mesh(path, "a", "b")
    poke(path, word, 999_999)
    with pytest.raises(LayoutMismatch, match=what):
        Segment(path)


@pytest.mark.parametrize("size", [0, 64, 128, 1000])
def test_a_truncated_file_is_refused(path: Path, size: int) -> None:
    make_mesh(path, "a", "b")
    os.truncate(path, size)
    with pytest.raises(LayoutMismatch, match="size"):
        Segment(path)


def test_another_machine_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_module.platform, "machine", lambda: "aarch64")
    with pytest.raises(MachineUnsupported, match="aarch64"):
        make_mesh(path, "a", "b")
    with pytest.raises(MachineUnsupported):
        Segment(path)


def test_default_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/sla:/run/other")
    assert default_runtime_dir() == Path("/run/sla")
    monkeypatch.delenv("RUNTIME_DIRECTORY")
    assert default_runtime_dir() == Path(f"/dev/shm/sla-{os.geteuid()}")


def child_creates(path: Path) -> Callable[[], None]:
    def child() -> None:
        make_mesh(path, "a", "b")
        attach(path, "a").post("b", b"left behind")  # and ends without closing it

    return child


def test_sweep_removes_what_a_dead_owner_left_and_nothing_else(tmp_path: Path) -> None:
    stale, kept = tmp_path / "stale", tmp_path / "kept"
    with forked(child_creates(stale)) as pid:
        assert exit_status(pid) == 0
    make_mesh(kept, "a", "b")
    attach(kept, "a").close()
    (tmp_path / f"half.new-{pid}").write_bytes(b"")
    (tmp_path / f"half.new-{os.getpid()}").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("x" * 500)
    (tmp_path / "folder").mkdir()
    removed = sweep_stale(tmp_path)
    assert {entry.name for entry in removed} == {"stale", "stale.a.bell", f"half.new-{pid}"}
    assert {entry.name for entry in tmp_path.iterdir()} == {
        "kept",
        "kept.a.bell",
        f"half.new-{os.getpid()}",
        "notes.txt",
        "folder",
    }


def test_sweep_of_a_missing_directory_is_nothing(tmp_path: Path) -> None:
    assert sweep_stale(tmp_path / "none") == []


def test_a_segment_in_use_is_not_swept_though_its_owner_is_gone(path: Path) -> None:
    with forked(child_creates(path)) as pid:
        assert exit_status(pid) == 0
    with attach(path, "b") as box:
        assert sweep_stale(path.parent) == []
        assert drain(box) == [b"left behind"]
    assert path in sweep_stale(path.parent)


def test_a_segment_that_a_new_server_keeps_is_its_own(path: Path) -> None:
    with forked(child_creates(path)) as pid:
        assert exit_status(pid) == 0
    take_ownership(path)
    assert sweep_stale(path.parent) == []
    assert describe(path)["owner"] == {"pid": os.getpid(), "alive": True}

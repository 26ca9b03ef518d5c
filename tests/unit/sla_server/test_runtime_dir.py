"""The runtime directory belongs to the server's user alone, and so does what it lies in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pmdaemon.mailbox.errors import SegmentUnsafe
from sla_server import runtime_dir
from sla_server.runtime_dir import close_home, prepare_runtime_dir


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(runtime_dir, "default_runtime_dir", lambda: tmp_path / "sla-7")
    return tmp_path / "sla-7"


def test_both_directories_are_private(home: Path) -> None:
    before = os.umask(0)
    try:
        prepare_runtime_dir(home / "server-1")
    finally:
        os.umask(before)
    assert (_mode(home), _mode(home / "server-1")) == (0o700, 0o700)


def test_one_that_an_earlier_release_left_open_is_closed(home: Path) -> None:
    home.mkdir(mode=0o755)
    prepare_runtime_dir(home / "server-1")
    assert _mode(home) == 0o700


def test_one_of_another_user_is_refused_with_the_way_out(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    with pytest.raises(SegmentUnsafe, match=r"not this user's.*root remove it.*runtime_dir") as caught:
        prepare_runtime_dir(home / "server-1")
    assert caught.value.exit_status == 77
    assert not (home / "server-1").exists()


def test_a_link_is_refused_and_what_it_names_left_alone(home: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    home.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SegmentUnsafe, match="no directory"):
        close_home(home)
    assert _mode(tmp_path / "elsewhere") == 0o755


def test_the_parent_of_a_configured_one_is_not_ours_to_change(home: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir(mode=0o755)
    prepare_runtime_dir(tmp_path / "mine" / "run")
    assert _mode(tmp_path / "mine") == 0o755
    assert not home.exists()

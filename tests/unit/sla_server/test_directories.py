"""The lock of the data directory; the privacy of the runtime directory; the mailbox segments in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from click.testing import CliRunner

from pmdaemon.mailbox import attach, describe
from pmdaemon.mailbox import segment as segment_module
from pmdaemon.mailbox.errors import MailboxCorrupt, RoomMissing, SegmentUnsafe
from sla_server import config as configuration
from sla_server import directories
from sla_server.cli.server import cli, mailbox_sizes
from sla_server.directories import (
    APP,
    MAIN,
    Segments,
    close_home,
    data_identity,
    lock_data_dir,
    prepare_notify_dirs,
    prepare_runtime_dir,
    running_pid,
    wait_stopped,
)
from sla_server.errors import ServerRunning
from sla_server.events.recipients.config import NotifyConfig, NotifyDirectories
from sla_server.topology import SLOTS_A_ROUTE, app_layout, later_pairs, main_layout

MIB = 1 << 20
NOBODY = (1 << 22) + 1  # above the largest process number of Linux


def test_a_second_server_is_refused_and_told_who_holds_the_directory(tmp_path: Path) -> None:
    held = lock_data_dir(tmp_path)
    assert running_pid(tmp_path) == os.getpid()
    with pytest.raises(ServerRunning, match=f"process {os.getpid()}"):
        lock_data_dir(tmp_path)
    os.close(held)
    assert running_pid(tmp_path) is None


def test_directories_for_secrets_and_programs_are_made_closed_to_others(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    config = NotifyConfig(commands_dir=tmp_path / "elsewhere")
    for _ in range(2):
        prepare_notify_dirs(NotifyDirectories.of(config, data_dir), data_dir)
    assert [path.name for path in data_dir.iterdir()] == ["secrets"]
    assert (data_dir / "secrets").stat().st_mode & 0o777 == 0o700
    assert not (tmp_path / "elsewhere").exists(), "its operator makes it"
    (data_dir / "commands").write_text("in the way")
    prepare_notify_dirs(
        NotifyDirectories.of(NotifyConfig(), data_dir), data_dir
    )  # the server starts all the same
    assert (data_dir / "commands").is_file()


def test_no_directory_no_server(tmp_path: Path) -> None:
    assert running_pid(tmp_path / "never") is None


def test_a_lock_without_a_readable_pid(tmp_path: Path) -> None:
    held = lock_data_dir(tmp_path)
    (tmp_path / "lock").write_text("\u00b2\n")
    assert running_pid(tmp_path) == 0
    assert not wait_stopped(tmp_path, 0.0)
    with pytest.raises(ServerRunning, match="another process"):
        lock_data_dir(tmp_path)
    os.close(held)


def test_a_server_of_another_user_is_not_stopped_but_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int, _signal: int) -> None:
        raise PermissionError

    held = lock_data_dir(tmp_path / "data")
    monkeypatch.setattr(os, "kill", refuse)
    path = tmp_path / "server.toml"
    path.write_text(f'data_dir = "{tmp_path}/data"\nruntime_dir = "{tmp_path}/run"\n')
    told = CliRunner().invoke(cli, ["stop", "--config", str(path)])
    os.close(held)
    assert told.exit_code == 78
    assert f"process {os.getpid()}, belongs to another user" in told.output


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    monkeypatch.setattr(directories, "default_runtime_dir", lambda: tmp_path / "sla-7")
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


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Segments]:
    tmp_path.chmod(0o700)
    made = Segments(tmp_path, 2)
    yield made
    made.close()


def damage(path: Path) -> None:
    """A stray store: the head of a lane with a message in it."""
    with attach(path, "dbmanager") as box:
        box.post(next(iter(box.expected)), b"x")
        box._words[box._writer._head_word] = 777  # a stray store, which has no public way in


def test_a_segment_in_order_is_kept_with_its_messages(made: Segments) -> None:
    assert made.prepare() == {}
    with attach(made.path(APP), "dbmanager") as box:
        box.post("appserver", b"wanted")
    made.close()
    assert made.prepare() == {}
    with attach(made.path(APP), "appserver") as box:
        assert [message.payload for message in box.take()] == [b"wanted"]


def posted(made: Segments) -> list[bytes]:
    with attach(made.path(APP), "appserver") as box:
        return [message.payload for message in box.take()]


def killed_with_mail(data_dir: Path, runtime_dir: Path) -> Segments:
    """A server that died with a message on its way to the data directory."""
    made = Segments(runtime_dir, 2)
    identity, is_empty = data_identity(data_dir)
    made.bind(identity, is_empty=is_empty)
    (data_dir / "queue").mkdir()
    made.prepare()
    with attach(made.path(APP), "dbmanager") as box:
        box.post("appserver", b"an agreement")
    made.close()
    return made


def test_messages_reach_the_data_directory_that_they_were_posted_for(tmp_path: Path) -> None:
    data, runtime = tmp_path / "data", tmp_path / "run"
    for path in (data, runtime):
        path.mkdir(mode=0o700)
    made = killed_with_mail(data, runtime)
    identity, is_empty = data_identity(data)
    assert (is_empty, made.bind(identity, is_empty=is_empty)) == (False, False)
    made.prepare()
    assert posted(made) == [b"an agreement"]
    made.close()


def test_a_data_directory_that_is_new_gets_no_message_of_the_one_before(tmp_path: Path) -> None:
    data, runtime = tmp_path / "data", tmp_path / "run"
    for path in (data, runtime):
        path.mkdir(mode=0o700)
    made = killed_with_mail(data, runtime)
    shutil.rmtree(data)
    data.mkdir(mode=0o700)
    identity, is_empty = data_identity(data)
    assert made.bind(identity, is_empty=is_empty)
    made.prepare()
    assert posted(made) == []
    made.close()


@pytest.mark.parametrize("was_used", [True, False])
def test_segments_of_an_earlier_release_are_kept_for_data_that_were_there(
    tmp_path: Path, was_used: bool
) -> None:
    data, runtime = tmp_path / "data", tmp_path / "run"
    for path in (data, runtime):
        path.mkdir(mode=0o700)
    made = killed_with_mail(data, runtime)
    (data / "identity").unlink()
    (runtime / "data.id").unlink()
    if not was_used:
        (data / "queue").rmdir()
    identity, is_empty = data_identity(data)
    assert made.bind(identity, is_empty=is_empty) == (not was_used)
    made.prepare()
    assert posted(made) == ([b"an agreement"] if was_used else [])
    made.close()


@pytest.mark.parametrize("name", [MAIN, APP])
def test_a_damaged_segment_does_not_survive_a_start(made: Segments, name: str) -> None:
    made.prepare()
    damage(made.path(name))
    made.close()
    found = made.prepare()
    assert list(found) == [name]
    assert "slot 776 is linked" in found[name]
    attach(made.path(name), "dbmanager").close()
    made.close()
    assert made.prepare() == {}


def test_damage_met_by_a_part_is_seen_and_cured(made: Segments) -> None:
    made.prepare()
    damage(made.path(MAIN))
    assert made.damaged() == {}
    with pytest.raises(MailboxCorrupt):
        attach(made.path(MAIN), "dbmanager")
    assert list(made.damaged()) == [MAIN]
    made.renew(MAIN)
    assert made.damaged() == {}
    attach(made.path(MAIN), "dbmanager").close()


def test_a_segment_of_another_layout_is_made_anew(made: Segments, tmp_path: Path) -> None:
    made.prepare()
    made.close()
    more = Segments(tmp_path, 3)
    assert more.prepare() == {}
    assert "pair-2" in {person["name"] for person in describe(more.path(MAIN))["participants"]}
    more.close()


def test_pairs_that_are_not_there_cost_nothing(tmp_path: Path) -> None:
    taken = {}
    for pairs in (1, 8):
        folder = tmp_path / f"{pairs}"
        folder.mkdir(mode=0o700)
        made = Segments(folder, pairs)
        made.prepare()
        taken[pairs] = made.path(MAIN).stat().st_blocks * 512
        with pytest.raises(RoomMissing if pairs > 1 else Exception):
            attach(made.path(MAIN), f"pair-{max(1, pairs - 1)}")
        made.remove()
    assert taken[8] < taken[1] + 2 * MIB
    assert main_layout(8).total_bytes > taken[8] + 7 * 50 * MIB


def test_each_pair_has_slots_enough_however_many_there_are() -> None:
    for pairs in (1, 2, 8, 64, 256):
        layout = main_layout(pairs)
        for name in ("services", "dbmanager", "pair-0"):
            assert layout.quota(name) >= SLOTS_A_ROUTE - 1
        assert layout.reserved_bytes(later_pairs(pairs)) < (61 + pairs) * MIB


def test_nothing_is_left_after_the_end(made: Segments, tmp_path: Path) -> None:
    made.prepare()
    for name in ("supervisor", "dbmanager"):
        attach(made.path(MAIN), name).close()
    assert len(list(tmp_path.iterdir())) == 4
    made.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_server_left_is_swept_and_a_living_ones_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(directories, "default_runtime_dir", lambda: tmp_path)
    folders = {name: tmp_path / f"server-{name}" for name in ("killed", "living", "own")}
    for name in ("killed", "living"):
        folders[name].mkdir(mode=0o700)
        with monkeypatch.context() as patch:
            if name == "killed":
                patch.setattr(segment_module.os, "getpid", lambda: NOBODY)
            segment_module.create_segment(folders[name] / APP, app_layout())
    (folders["killed"] / f"{APP}.services.bell").touch()
    folders["own"].mkdir(mode=0o700)
    made = Segments(folders["own"], 1)
    made.prepare()
    made.close()
    assert not folders["killed"].exists()
    assert (folders["living"] / APP).exists()
    assert made.path(MAIN).exists()


def test_a_kept_segment_belongs_to_the_new_server(made: Segments, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(segment_module.os, "getpid", lambda: NOBODY)
        made.prepare()
        made.close()
    made.prepare()
    assert describe(made.path(MAIN))["owner"] == {"pid": os.getpid(), "alive": True}


def test_the_configuration_is_shown_with_what_the_segments_take_now_and_at_most(tmp_path: Path) -> None:
    settings = configuration.ServerConfig.model_validate({"data_dir": tmp_path, "pmdaemon": {"max_pairs": 8}})
    line = mailbox_sizes(configuration.resolve(settings))
    assert "with one pair" in line
    assert "with 8, the most" in line
    now, most = (int(word) for word, unit in pairwise(line.split()) if unit == "MiB")
    assert now < 80 < 7 * 50 < most

"""Identity, lock and JSON files of state_dir."""

import stat

import pytest

from gateway_agent.errors import AlreadyRunning, StateFileBroken
from gateway_agent.link import state_files


def test_identity_is_made_once_and_private(tmp_path):
    first = state_files.gateway_id(tmp_path)
    assert state_files.gateway_id(tmp_path) == first
    assert stat.S_IMODE((tmp_path / "gateway_id").stat().st_mode) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gateway_id"]


def test_a_broken_identity_is_not_replaced_silently(tmp_path):
    (tmp_path / "gateway_id").write_text("nonsense")
    with pytest.raises(StateFileBroken, match="backup"):
        state_files.gateway_id(tmp_path)


@pytest.mark.parametrize("text", ["nonsense", "[" * 50_000])
def test_a_file_that_is_not_json_is_named(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(StateFileBroken, match=r"a\.json.*cannot be read.*restore it"):
        state_files.read_json(path, "restore it")


@pytest.mark.parametrize(
    ("name", "use"), [("gateway_id", state_files.gateway_id), ("agent.lock", state_files.lock_directory)]
)
def test_files_that_cannot_be_used_are_told_with_the_way_out(tmp_path, name, use):
    (tmp_path / name).mkdir()
    with pytest.raises(StateFileBroken, match=rf"{name}: cannot be used \(Is a directory\).*agent's user"):
        use(tmp_path)


def test_an_identity_that_is_no_text_is_told(tmp_path):
    (tmp_path / "gateway_id").write_bytes(b"\xff\xfe")
    with pytest.raises(StateFileBroken, match="is not a UUID"):
        state_files.gateway_id(tmp_path)


def test_a_second_agent_is_refused(tmp_path):
    held = state_files.lock_directory(tmp_path)
    with pytest.raises(AlreadyRunning, match="state_dir"):
        state_files.lock_directory(tmp_path)
    state_files.os.close(held)
    state_files.os.close(state_files.lock_directory(tmp_path))

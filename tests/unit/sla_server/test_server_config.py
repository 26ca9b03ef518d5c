"""The server's configuration as a whole."""

from __future__ import annotations

from pathlib import Path

from sla_server.config import ServerConfig, load, resolve


def test_the_control_loop_counts_in_the_intervals_of_the_poller() -> None:
    config = ServerConfig.model_validate({"pmdaemon": {"interval_s": 0.5}})
    assert resolve(config).services.control.poll_interval_s == 0.5


def test_an_interval_set_on_purpose_is_kept() -> None:
    raw = {"pmdaemon": {"interval_s": 0.5}, "services": {"control": {"poll_interval_s": 1.0}}}
    assert resolve(ServerConfig.model_validate(raw)).services.control.poll_interval_s == 1.0


def test_directories_become_absolute_and_a_runtime_directory_belongs_to_its_data(tmp_path: Path) -> None:
    first = resolve(ServerConfig(data_dir=tmp_path / "a"))
    second = resolve(ServerConfig(data_dir=tmp_path / "b"))
    assert first.data_dir.is_absolute()
    assert first.runtime_dir != second.runtime_dir


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "server.toml"
    path.write_text('data_dir = "x"\n[services]\nmode = "enforce"\n')
    assert load(path).services.mode == "enforce"

"""The engine: its version, and what is refused for want of a feature."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.cluster.engine import Engine, candidates, choose, parse_version
from sla_server.cluster.errors import EngineMissing, EngineTooOld


def _engine(*version: int, can_sync: bool = True) -> Engine:
    major, minor, patch = version
    return Engine(
        Path("/e/nats-server"), (major, minor, patch), f"{major}.{minor}.{patch}", can_sync_always=can_sync
    )


@pytest.mark.parametrize(
    ("text", "version", "shown"),
    [
        ("nats-server: v2.15.1\n", (2, 15, 1), "2.15.1"),
        ("nats-server: 2.9.10\n", (2, 9, 10), "2.9.10"),
        ("nats-server: v2.12.0-RC.3", (2, 12, 0), "2.12.0-RC.3"),
    ],
)
def test_versions_are_read(text: str, version: tuple[int, int, int], shown: str) -> None:
    assert parse_version(text) == (version, shown)


@pytest.mark.parametrize("text", ["", "nats-server", "version two"])
def test_what_names_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no version"):
        parse_version(text)


def test_an_engine_without_sync_is_refused_unless_that_is_accepted() -> None:
    old = _engine(2, 9, 10, can_sync=False)
    with pytest.raises(EngineTooOld, match=r"nats-server 2\.9\.10, which cannot write each message to disk"):
        old.check("always")
    old.check("if-possible")
    assert "power cut" in old.reduced
    _engine(2, 10, 27).check("always")
    assert not _engine(2, 15, 1).reduced


def test_what_is_older_than_all_that_were_tried_is_refused() -> None:
    with pytest.raises(EngineTooOld, match=r"older than 2\.9"):
        _engine(2, 8, 4, can_sync=False).check("if-possible")


def test_batches_come_with_2_12() -> None:
    assert [_engine(2, minor, 0).has_atomic_batch for minor in (9, 11, 12, 15)] == [False, False, True, True]


def test_programs_on_the_path_come_first(tmp_path: Path) -> None:
    program = tmp_path / "nats-server"
    program.touch(0o755)
    assert candidates(str(tmp_path))[0] == program


def test_a_configured_engine_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineMissing, match=r"\[cluster\] engine: .*missing is not a program"):
        choose(tmp_path / "missing", "always")

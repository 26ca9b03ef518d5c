"""A source of space that fails, and is read again by another process of services, or never again."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest

from pmdaemon.space.watcher import SourceBack, SourceFailed, SpaceOutcome
from pmdaemon.wire.messages.space import Space
from sla_server.rows import Row
from sla_server.storage_resources import failed_sources
from sla_server.storage_resources.config import StorageConfig
from sla_server.storage_resources.failed_sources import FILE, FailedSources
from sla_server.storage_resources.manager import MINUTE_US, StorageManager
from sla_server.storage_resources.pools import DAY_US, STALE_US, StoredPools

NOW_US = 20_000 * 86_400_000_000
FAILED = SourceFailed("nfs", "it hangs")
READING = Space("nfs", "path", "", 100, 5, None, 0, 0, (), NOW_US)


class Process:
    """One process of services after the other on one directory and one database."""

    def __init__(self, folder: Path, sources: Collection[str] = ("nfs",)) -> None:
        self.folder, self.sources = folder, sources
        self.pools: dict[tuple[str, str], Row] = {}
        self.found: list[SpaceOutcome] = []
        self.now_us = NOW_US
        self.restart()

    def restart(self) -> None:
        stored = StoredPools(list(self.pools.values()))
        failed = FailedSources(self.folder / FILE)
        self.manager = StorageManager(
            StorageConfig(), stored, self._take, failed=failed, sources=self.sources
        )

    def _take(self) -> list[SpaceOutcome]:
        found, self.found = self.found, []
        return found

    def tick(self, *found: SpaceOutcome) -> list[str]:
        """Kinds of the events."""
        self.now_us += 1_000_000
        self.found += found
        rows = self.manager.tick(self.now_us)
        self.pools |= {(row["owner"], row["pool"]): row for table, row in rows if table == "pools"}
        return [row["kind"] for table, row in rows if table == "events"]


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process(tmp_path)


def test_one_that_the_next_process_reads_is_back(process: Process) -> None:
    assert process.tick(FAILED) == ["space-source-failed"]
    process.restart()
    assert process.tick(READING) == ["space-source-back"]
    assert process.tick(READING) == []
    process.restart()
    assert process.tick(READING) == []


def test_one_that_still_fails_is_open_until_it_does_not(process: Process) -> None:
    process.tick(FAILED)
    process.restart()
    process.tick(FAILED)
    process.restart()
    assert process.tick(SourceBack("nfs"), READING) == ["space-source-back"]


def test_one_that_was_taken_out_of_the_file_has_ended(process: Process) -> None:
    process.tick(FAILED)
    process.sources = ("other",)
    process.restart()
    assert process.tick() == ["space-source-back"]
    assert process.tick() == []


def test_a_process_that_dies_before_the_end_is_raised_leaves_it_to_the_next(process: Process) -> None:
    process.tick(FAILED)
    assert process.tick(READING) == ["space-source-back"]
    process.restart()  # before it had raised that
    assert process.tick(READING) == ["space-source-back"]


def test_one_that_fails_again_before_its_end_was_forgotten_is_known_to_fail(process: Process) -> None:
    process.tick(FAILED)
    assert process.tick(READING, FAILED) == ["space-source-back", "space-source-failed"]
    process.tick()
    process.restart()
    assert process.tick(READING) == ["space-source-back"]


def test_a_pool_of_which_the_source_was_taken_out_has_no_condition_left(process: Process) -> None:
    full = Space("nfs", "path", "", 100, 95, None, 0, 0, (), NOW_US)
    assert process.tick(full) == ["space-low"]
    process.sources = ()
    process.restart()
    assert process.tick() == ["space-enough"]
    process.now_us += MINUTE_US
    assert process.tick() == []


@pytest.mark.parametrize("restarts", [True, False])
def test_a_pool_is_not_unread_because_the_server_was_away(process: Process, restarts: bool) -> None:
    assert process.tick(replace(READING, used_bytes=95)) == ["space-low"]
    process.now_us += 8 * DAY_US  # stopped, or its machine was paused, or its clock was set
    if restarts:
        process.restart()
    assert process.tick() == [], "it is still full, as its next reading says"
    kinds: list[str] = []
    for _ in range(STALE_US // MINUTE_US + 2):  # and none comes
        process.now_us += MINUTE_US
        kinds += process.tick()
    assert kinds == ["space-enough"]


def test_a_full_disk_is_tried_again(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:

        def is_full(*_args: object, **_more: object) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr(failed_sources, "write_whole", is_full)  # a full disk
        assert process.tick(FAILED) == ["space-source-failed"]
    process.tick()
    process.restart()
    assert process.tick(READING) == ["space-source-back"]


@pytest.mark.parametrize("content", [b"{", b"7", b"[7]", b"\xff"])
def test_a_file_of_another_form_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    assert not FailedSources(tmp_path / FILE).names

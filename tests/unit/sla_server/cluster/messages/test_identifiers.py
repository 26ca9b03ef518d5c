"""Identifiers: unique over restarts, a lost directory and a clock set back; they sort as they were made."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.runtime.clock import FakeClock
from sla_server.cluster.messages.errors import BadSettings, StateInUse
from sla_server.cluster.messages.identifiers import EPOCH_FILE, Identifier, IdentifierSource, next_epoch


def test_text_and_order() -> None:
    made = [Identifier(7, 2, 255), Identifier(7, 2, 256), Identifier(7, 3, 1)]
    texts = [str(identifier) for identifier in made]
    assert sorted(texts) == texts
    assert [Identifier.parse(text) for text in texts] == made
    for bad in ("", "x" * 32, texts[0].upper() + "A", texts[0][:-1]):
        with pytest.raises(ValueError, match="32 hexadecimal digits"):
            Identifier.parse(bad)


def test_each_run_has_an_epoch_of_its_own_that_is_on_disk_first(tmp_path: Path) -> None:
    clock = FakeClock()
    first = IdentifierSource(tmp_path, 7, clock)
    assert int((tmp_path / EPOCH_FILE).read_text()) == first.epoch
    made = [first.make() for _ in range(3)]
    first.close()
    clock.step_wall(-3600)
    second = IdentifierSource(tmp_path, 7, clock)
    assert second.epoch == first.epoch + 1
    assert second.make() > made[-1] > made[0]
    second.close()


def test_a_lost_directory_costs_no_uniqueness(tmp_path: Path) -> None:
    clock = FakeClock()
    first = IdentifierSource(tmp_path / "a", 7, clock)
    clock.advance(0.001)
    second = IdentifierSource(tmp_path / "b", 7, clock)
    assert second.epoch > first.epoch
    first.close()
    second.close()
    assert next_epoch(stored=10, unix_ms=5) == 11


def test_an_epoch_in_common_costs_no_uniqueness(tmp_path: Path) -> None:
    """Two sessions of one program in one millisecond; a copied machine is the same."""
    clock = FakeClock()
    sources = [IdentifierSource(tmp_path / name, 7, clock) for name in ("a", "b")]
    assert sources[0].epoch == sources[1].epoch
    made = [source.make() for source in sources for _ in range(3)]
    assert len(set(made)) == 6
    assert made[:3] == sorted(made[:3])
    for source in sources:
        source.close()


def test_one_process_a_directory(tmp_path: Path) -> None:
    source = IdentifierSource(tmp_path, 7)
    with pytest.raises(StateInUse, match="in use"):
        IdentifierSource(tmp_path, 7)
    source.close()
    IdentifierSource(tmp_path, 7).close()


def test_mistakes(tmp_path: Path) -> None:
    with pytest.raises(BadSettings, match="65535"):
        IdentifierSource(tmp_path, 1 << 16)
    (tmp_path / EPOCH_FILE).write_text("soon")
    with pytest.raises(BadSettings, match="'soon'"):
        IdentifierSource(tmp_path, 1)

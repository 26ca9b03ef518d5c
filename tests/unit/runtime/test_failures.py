"""Notes of why parts ended."""

from __future__ import annotations

from pathlib import Path

import pytest

from pmdaemon.errors import SlaError
from pmdaemon.runtime.failures import failures, noted


def test_a_note_stands_from_the_end_by_an_error_until_the_next_start(tmp_path: Path) -> None:
    for name in ("services", "dbmanager"):
        with pytest.raises(SlaError), noted(tmp_path, name):
            raise SlaError(f"no room for {name}")
    assert failures(tmp_path) == {"dbmanager": "no room for dbmanager", "services": "no room for services"}
    with noted(tmp_path, "services"):
        assert list(failures(tmp_path)) == ["dbmanager"]
    assert list(failures(tmp_path)) == ["dbmanager"]


def test_the_error_comes_through_where_no_note_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(SlaError, match="the reason"), noted(tmp_path / "missing", "services"):
        raise SlaError("the reason")
    assert failures(tmp_path / "missing") == {}

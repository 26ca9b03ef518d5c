from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest
import structlog

from pmdaemon.errors import ConfigError
from pmdaemon.runtime import logs


class Pieces(io.StringIO):
    """Notes each write, as several processes on one stderr would interleave them."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def test_a_line_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = Pieces()
    monkeypatch.setattr(sys, "stderr", stderr)
    logs.configure("pair-0")
    structlog.get_logger("x").info("gateway-up", gateway="a")
    assert len(stderr.pieces) == 1
    line = stderr.pieces[0]
    assert line.endswith("event=gateway-up gateway=a\n")
    assert "level=info process=pair-0" in line


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLA_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="debug, info, warning, error"):
        logs.configure("x")

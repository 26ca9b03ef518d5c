"""Values as text; log lines of what runs inside a command stay out of its answer."""

from __future__ import annotations

import pytest
import structlog

from sla_server.cli import formatting
from sla_server.cli.formatting import keep_logs_apart


def test_log_lines_never_reach_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    with structlog.testing.capture_logs():
        pass
    for _ in range(2):
        keep_logs_apart()
    structlog.get_logger("x").info("files-merged", files=2)
    structlog.get_logger("x").warning("file-damaged", path="p")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("file-damaged") == 1
    assert "files-merged" not in printed.err


@pytest.mark.parametrize(
    ("ratio", "digits", "text"),
    [
        (None, 1, "-"),
        (0.99996, 2, "99.99%"),
        (0.29, 0, "29%"),
        (0.0, 0, "0%"),
        (-0.004, 0, "-1%"),
        (-0.9999, 0, "-100%"),
        (-1.5, 1, "-150.0%"),
        (-0.29, 0, "-29%"),
        (-0.0, 0, "0%"),
    ],
)
def test_a_ratio_is_rounded_down_also_below_zero(ratio: float | None, digits: int, text: str) -> None:
    assert formatting.percent(ratio, digits) == text

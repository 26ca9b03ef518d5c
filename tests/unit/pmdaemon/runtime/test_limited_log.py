"""A flood of like lines is a few lines."""

import structlog

from pmdaemon.runtime.limited_log import LINES_A_SECOND, LimitedLog


def test_ten_thousand_refusals_are_a_few_lines_and_none_is_uncounted() -> None:
    limited = LimitedLog("test")
    with structlog.testing.capture_logs() as lines:
        for index in range(10_000):
            limited.warning(5 * 10**9 + index, "refused", n=index)
        limited.warning(6 * 10**9, "refused", n=10_000)
    assert len(lines) == LINES_A_SECOND + 2
    assert [line["left_out"] for line in lines if "left_out" in line] == [10_000 - LINES_A_SECOND]

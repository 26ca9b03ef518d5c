"""How a process ends, said by itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from pmdaemon.runtime import exit_status


@pytest.fixture
def told() -> Iterator[int]:
    """Where this process says how it ends."""
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    exit_status.report_to(writes)
    yield reads
    exit_status.report(0)
    os.close(reads)
    os.close(writes)


@pytest.mark.parametrize(("ends", "status"), [(None, 0), (0, 0), (7, 7), ("a text", 1), (256 + 78, 78)])
def test_a_status_as_the_system_has_it(told: int, ends: int | str | None, status: int) -> None:
    with pytest.raises(SystemExit), exit_status.reported():
        sys.exit(ends)
    assert exit_status.read(told, 255) == status


def test_other_ends(told: int) -> None:
    assert exit_status.read(told, 255) == 255, "killed, it says nothing"
    with pytest.raises(ZeroDivisionError), exit_status.reported():
        _ = 1 // 0
    assert exit_status.read(told, 255) == 1


def test_it_is_said_once(told: int) -> None:
    with exit_status.reported():
        exit_status.report(3)  # and ``os._exit`` would follow
    assert [exit_status.read(told, 255) for _ in range(2)] == [3, 255]

"""Records of all nodes in the order of their times; late ones where they can still have their place."""

from __future__ import annotations

import pytest

from sla_server.cluster.log_spool import LogRecord
from sla_server.cluster.log_stream import LogMerger, decode, encode


def record(at: int, node: str = "n1", counter: int = 0) -> LogRecord:
    return LogRecord(at, node, counter, "info", f"{node}:{at}:{counter}")


def lines(found: list[tuple[LogRecord, bool]]) -> list[str]:
    return [("late " if is_late else "") + row.line for row, is_late in found]


def test_records_are_in_the_order_of_time_then_node_then_counter() -> None:
    merger = LogMerger()
    merger.add([record(2, "n2", 1), record(2, "n2", 2), record(9, "n2", 3)])
    merger.add([record(1, "n1", 5), record(2, "n1", 6)])
    assert lines(merger.ready(5)) == ["n1:1:5", "n1:2:6", "n2:2:1", "n2:2:2"]
    assert lines(merger.ready(9)) == ["n2:9:3"]


def test_one_that_comes_within_the_window_has_its_place() -> None:
    merger = LogMerger()
    merger.add([record(10, "n1")])
    assert merger.ready(8) == []
    merger.add([record(9, "n2")])
    assert lines(merger.ready(10)) == ["n2:9:0", "n1:10:0"]


def test_one_that_comes_later_is_given_out_at_once_and_marked() -> None:
    merger = LogMerger()
    merger.add([record(10, "n1")])
    merger.ready(10)
    merger.add([record(3, "n3"), record(11, "n1")])
    assert lines(merger.ready(11)) == ["late n3:3:0", "n1:11:0"]
    merger.add([record(4, "n3")])
    assert lines(merger.ready(11)) == ["late n3:4:0"]


def test_records_come_back_from_their_message() -> None:
    rows = [record(1), record(2, "n1", 1 << 50), LogRecord(3, "n1", 4, "error", "é\n\udc80")]
    assert decode("n1", encode(rows)) == rows


@pytest.mark.parametrize("data", [b"", b"{", b"5", b"[[1, 2]]", b'[["x", 1, "info", "a"]]'])
def test_a_message_that_is_none_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        decode("n1", data)

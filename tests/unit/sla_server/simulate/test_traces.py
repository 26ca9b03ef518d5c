"""Recorded I/O: both formats, and each mistake at its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from sla_server.simulate.errors import SimulationError
from sla_server.simulate.traces import TracedIo, parse_trace, read_trace

HEADER = "time,volume,client,kind,bytes"


def parsed(*lines: str, stretch: float = 1.0, most: int = 100) -> list[TracedIo]:
    return parse_trace(lines, "io.csv", stretch, most)


def test_own_format_begins_at_zero_and_keeps_order():
    found = parsed("# recorded", HEADER, "", "10.5,v1,host-a,read,4096", "11,v2,host-b,WRITE,512")
    assert found == [TracedIo(0.0, "v1", "host-a", False, 4096), TracedIo(0.5, "v2", "host-b", True, 512)]


def test_block_trace_of_sectors_is_stretched():
    found = parsed("938513000 4 264719034 16 0", "938828000 3 197570570 8 1", stretch=100)
    assert found[0] == TracedIo(0.0, "dev-4", "trace", True, 8192)
    assert (found[1].volume, found[1].is_write, found[1].size_bytes) == ("dev-3", False, 4096)
    assert found[1].at_s == pytest.approx(0.0315)


def test_a_file_is_read(tmp_path: Path):
    path = tmp_path / "a.trace"
    path.write_text("0 1 2 3 1\n")
    assert len(read_trace(path, 1.0, 1)) == 1


@pytest.mark.parametrize(
    ("lines", "line", "problem"),
    [
        ((HEADER, "1,v,c,read,1", "2,v,c,reed,1"), 3, "kind 'reed'"),
        ((HEADER, "1,v,c,read"), 2, "4 values, 5 are needed"),
        ((HEADER, "x,v,c,read,1"), 2, "time 'x' is not a number"),
        ((HEADER, "-1,v,c,read,1"), 2, "time '-1' is not from 0 to 1e+19"),
        ((HEADER, "nan,v,c,read,1"), 2, "time 'nan' is not from 0 to 1e+19"),
        ((HEADER, "0,v,c,read,1", "1e18,v,c,read,1"), 3, "time 1e18 is 1e+18 s after the first request"),
        (("0 1 2 3 1", "1000000000000000001 1 2 3 1"), 2, "is 1e+09 s after the first request"),
        (("1 \u00b2 3 4 1",), 1, "is not a whole number of at most 18 digits"),
        ((f"1 {'9' * 5000} 3 4 1",), 1, "is not a whole number of at most 18 digits"),
        (("1 2 3 \u00b2 1",), 1, "is not a size"),
        ((HEADER, "1,v v,c,read,1"), 2, "volume 'v v' is not a name"),
        ((HEADER, "1,v,c,read,0"), 2, "bytes '0' is not a size"),
        ((HEADER, "2,v,c,read,1", "1,v,c,read,1"), 3, "before that of the line before"),
        (("time,volume", "1,v"), 1, "is not the header"),
        (("1 2 3 4 1", "1 2 3 4"), 2, "has 4 values, not 5"),
        (("1 2 3 4 2",), 1, "type '2' is neither"),
        (("1 a 3 4 1",), 1, "device 'a' is not a whole number"),
        (("1 2 3 99999999999 1",), 1, "is not a size"),
        (("# nothing",), 1, "no request"),
    ],
)
def test_a_bad_line_is_named(lines, line, problem):
    with pytest.raises(SimulationError) as caught:
        parsed(*lines)
    assert problem in str(caught.value)
    assert str(caught.value).startswith(f"io.csv: line {line}: ")


def test_too_long_a_trace_is_refused():
    with pytest.raises(SimulationError, match="--most-ios: 2 I/Os are more than 1"):
        parsed("0 1 2 3 1", "1 1 2 3 1", most=1)


def test_a_week_is_simulated_at_most_also_of_a_trace_slowed_down():
    lines = (HEADER, "5,v,c,read,1", "604805,v,c,read,1")
    assert parsed(*lines)[-1].at_s == 604_800
    with pytest.raises(SimulationError, match=r"line 3: .* lasts 604,800 s \(7 days\) at most"):
        parsed(*lines, stretch=1.001)
    assert parsed(HEADER, "1e18,v,c,read,1")[0].at_s == 0, "times may begin anywhere"


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path):
    path = tmp_path / "io.csv"
    path.write_text(f"{HEADER}\n1,v,c,read,1\n", encoding="utf-8-sig")
    assert [io.volume for io in read_trace(path, 1.0, 10)] == ["v"]


def test_a_file_that_is_no_text_is_refused_at_its_first_line(tmp_path: Path):
    path = tmp_path / "image"
    path.write_bytes(bytes(range(256)) * 4)
    with pytest.raises(SimulationError, match="line 1: "):
        read_trace(path, 1.0, 10)

"""Pressure of I/O, as the kernel writes it."""

from __future__ import annotations

from pathlib import Path

from gateway_agent.pressure import IoPressure, read_pressure

SOME = "some avg10=1.50 avg60=0.14 avg300=0.36 total=1508938616\n"
FULL = "full avg10=0.75 avg60=0.09 avg300=0.22 total=359592245\n"


def test_what_the_kernel_says(tmp_path: Path) -> None:
    path = tmp_path / "io"
    path.write_text(SOME + FULL)
    assert read_pressure(path) == IoPressure(1.5, 0.14, 0.75, 0.09, 1_508_938_616)
    path.write_text(SOME)
    found = read_pressure(path)
    assert found is not None
    assert found.record()["full_10s"] == 0.0


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert read_pressure(tmp_path / "none") is None
    for text in ("", "some avg10=x\n", "full avg10=1 avg60=1 total=1\n"):
        (tmp_path / "io").write_text(text)
        assert read_pressure(tmp_path / "io") is None

"""What people write for a number, and what is proposed instead."""

from __future__ import annotations

import pytest

from sla_server.agreements import numbers

WIDE = "\uff13\uff10\uff10\uff10"
"""3000 in full-width digits."""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3,000", (3000, "")),
        ("3.000.000", (3_000_000, "")),
        ("3'000", (3000, "")),
        ("3\u2019000", (3000, "")),
        ("3 000", (3000, "")),
        ("3\u202f000", (3000, "")),  # a narrow space that does not break
        ("1_000", (1000, "")),
        (WIDE, (3000, "")),
        ("1,234.5", (1234.5, "")),
        ("1.234,5", (1234.5, "")),
        ("1,234,567", (1_234_567, "")),
        ("3,5", (3.5, "")),
        ("0,995", (0.995, "")),
        ("5 MS", (5, "ms")),
        ("5\u00b5s", (5, "\u03bcs")),
        ("20 MB/s", (20, "mb/s")),
        ("99.5 %", (99.5, "%")),
        ("1,23,456", None),
        ("1.5.2", None),
        ("nan", None),
        ("inf", None),
        ("many", None),
        ("", None),
        ("1" * 61, None),
    ],
)
def test_the_number_that_was_meant_and_its_unit(text: str, found: tuple[float, str] | None) -> None:
    assert numbers.number_and_unit(text) == found


def test_a_ratio_has_no_thousands() -> None:
    assert numbers.number_and_unit("99,995", is_share=True) == (99.995, "")
    assert numbers.number_and_unit("99,995") == (99_995, "")


@pytest.mark.parametrize(
    ("key", "unit", "meant"),
    [
        ("value_ms", "", 5),
        ("value_ms", "s", 5000),
        ("value_ms", "us", 0.005),
        ("burst_s", "min", 300),
        ("floor_mbps", "gb/s", 5000),
        ("max_mean_io_kib", "mib", 5120),
        ("up_to_iops", "k", 5000),
        ("up_to_iops", "ms", None),
        ("target", "ms", None),
    ],
)
def test_a_unit_is_brought_to_that_of_the_key(key: str, unit: str, meant: float | None) -> None:
    assert numbers.scaled(5, unit, key) == (None if meant is None else pytest.approx(meant))


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("10 min", "10m"),
        ("7 days", "7d"),
        ("1.5h", "90m"),
        ("0.5d", "12h"),
        ("1,000s", "1000s"),
        ("\uff11\uff10m", "10m"),
        ("0.5s", ""),
        ("0m", ""),
        ("90", ""),
        ("2 months", ""),
        ("soon", ""),
    ],
)
def test_the_duration_that_was_meant(text: str, meant: str) -> None:
    assert numbers.meant_duration(text) == meant


def test_a_number_is_written_without_separators_and_exponent() -> None:
    assert [numbers.plain(value) for value in (3000.0, 12_345_678.0, 99.9 / 100)] == [
        "3000",
        "12345678",
        "0.999",
    ]

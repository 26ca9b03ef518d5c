"""The byte map in docs/formats/mailbox.md says what the code says."""

import re

import pytest

from pmdaemon.mailbox import layout as lay
from tests.support.paths import ROOT

TEXT = (ROOT / "docs" / "formats" / "mailbox.md").read_text()


def table_behind(heading: str) -> dict[int, str]:
    """Word number -> name, of the first table behind ``heading``; ranges are spread."""
    found: dict[int, str] = {}
    lines = iter(TEXT[TEXT.index(heading) :].splitlines()[1:])
    rows = []
    for line in lines:
        if line.startswith("|"):
            rows.append(line)
        elif rows:
            break
    for row in rows[2:]:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        numbers = [int(number) for number in re.findall(r"\d+", cells[0])]
        if " to " in cells[0]:
            numbers = list(range(numbers[0], numbers[1] + 1))
        names = re.findall(r"\b[A-Z][A-Z_0-9]+\b", cells[1])
        found.update(zip(numbers, names, strict=False))
    return found


@pytest.mark.parametrize(
    ("heading", "prefix"),
    [("Header words", "H_"), ("Control block", "C_"), ("List block", "L_"), ("Slot (one", "S_")],
)
def test_every_word_is_documented_at_its_place(heading: str, prefix: str) -> None:
    words = {value: name[2:] for name, value in vars(lay).items() if re.fullmatch(prefix + "[A-Z_]+", name)}
    assert table_behind(heading) == words


def test_sizes_and_version_are_those_of_the_code() -> None:
    assert f"Layout version {lay.LAYOUT_VERSION}." in TEXT
    assert f"| 1 | VERSION | {lay.LAYOUT_VERSION} |" in TEXT
    assert f"| {lay.HEADER_BYTES} | n * {lay.NAME_BYTES} |" in TEXT
    assert f"n * {lay.CONTROL_BYTES} | control blocks" in TEXT
    assert f"| {lay.LIST_BYTES} | list block" in TEXT
    assert f"n * s * {lay.SLOT_BYTES} | slots" in TEXT
    assert f"r * {lay.ROUTE.size} | routes" in TEXT
    assert f"{lay.MACHINE_X86_64} (EM_X86_64)" in TEXT

"""Filling of the documents' long lines: what is divided, and what is left as it was."""

from __future__ import annotations

import pytest

from docs.reflow import WIDTH, documents, is_generated, reflow

LONG = "word " * 30


def test_a_long_line_is_divided_and_the_lines_before_it_stay() -> None:
    text = f"A short line stays.\n{LONG}end\nand this one follows.\n"
    lines = reflow(text).splitlines()
    assert lines[0] == "A short line stays."
    assert all(len(line) <= WIDTH for line in lines)
    assert " ".join(lines).split() == text.split()


@pytest.mark.parametrize("mark", ["- ", "3. ", "  * "])
def test_items_keep_their_mark_and_hang(mark: str) -> None:
    lines = reflow(f"{mark}{LONG}end\n{mark}next\n").splitlines()
    assert lines[0].startswith(f"{mark}word")
    assert lines[1].startswith(" " * len(mark) + "word")
    assert lines[-1] == f"{mark}next"


def test_code_spans_stay_whole_and_marks_begin_no_line() -> None:
    words = "x" * 115
    text = f"{words} `a b c` and then\n{words} yy\n"
    assert reflow(text).splitlines()[1].startswith("`a b c` and")
    long_span = f"`{LONG}` which `a b` says\n"
    assert all(len(line) <= WIDTH for line in reflow(long_span).splitlines())
    dangerous = "y" * 116 + " aa - b\n" + "z" * 121 + "\n"
    assert all(not line.startswith("- ") for line in reflow(dangerous).splitlines())


@pytest.mark.parametrize(
    "text",
    [
        f"| {LONG} | b |\n",
        f"# {LONG}\n",
        f"```\n{LONG}\n```\n",
        f"text\n\n    {LONG}\n",
        f"{LONG}  \nafter a break\n",
        "short\nlines\nstay\n\n- as\n- they are\n",
    ],
)
def test_tables_headings_code_and_breaks_are_left_alone(text: str) -> None:
    assert reflow(text) == text


def test_generated_documents_are_not_filled() -> None:
    assert not any(is_generated(path) for path in documents())
    assert "docs/architecture.md" in {path.as_posix() for path in documents()}

"""The lint of names and words: what it reads of a module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from docs import house_lint

SOURCE = '''"""Docstring that stands in prose."""

TEXT = "shared anew"


def speak(name: str) -> str:
    """Another one."""
    return f"{name} is over; its time is over"
'''


def test_literals_are_read_without_docstrings_and_without_what_is_allowed() -> None:
    found = list(house_lint.literals(ast.parse(SOURCE)))
    assert sorted(found) == [(3, "shared anew"), (8, " is over; ")]


def test_an_allowance_that_is_not_needed_any_more_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the product itself ``make lint`` says it, which reads all modules anyway."""
    tree = ast.parse('TEXT = "one piece, which is told"\n')
    monkeypatch.setattr(house_lint, "modules", lambda: [(Path("a.py"), tree, "")])
    monkeypatch.setattr(house_lint, "ALLOWED_LITERALS", {"is told": "a reason"})
    assert list(house_lint.unused_allowances()) == []
    monkeypatch.setitem(house_lint.ALLOWED_LITERALS, "no text has this piece", "a reason")
    (said,) = house_lint.unused_allowances()
    assert "'no text has this piece'" in said


def test_a_module_that_is_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, line = ast.parse(""), "pass\n"
    found = [(Path("a.py"), tree, 600 * line), (Path("b.py"), tree, 601 * line)]
    monkeypatch.setattr(house_lint, "modules", lambda: found)
    assert list(house_lint.long_modules()) == ["b.py: 601 lines, a module has at most 600: divide it"]


@pytest.mark.parametrize(
    ("name", "verb"),
    [
        ("look", "look"),
        ("_look_at_lease", "look"),
        ("take_up", "take_up"),
        ("take", None),
        ("settled", None),
        ("notebook", None),
        ("__enter__", None),
    ],
)
def test_a_vague_verb_begins_a_name(name: str, verb: str | None) -> None:
    assert house_lint.vague_verb(name) == verb


def test_functions_with_a_vague_verb_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ast.parse("def look() -> None: ...\ndef _welcome_all() -> None: ...\n")
    monkeypatch.setattr(house_lint, "modules", lambda: [(Path("a.py"), tree, "")])
    assert list(house_lint.vague_verbs()) == [
        "a.py:1: look: say poll, check, find, not look",
        "a.py:2: _welcome_all: say accept, add, not welcome",
    ]


def test_long_prose_and_long_cells_are_named_and_code_is_not() -> None:
    lines = [
        "x " * 70,
        "",
        f"| a | {'y' * 121} |",
        "",
        "```",
        "z" * 200,
        "```",
        f"| {'b' * 70} | {'c' * 70} |",
    ]
    assert [number for number, _ in house_lint.too_long(lines, are_cells_wide=False)] == [1, 3]
    assert [number for number, _ in house_lint.too_long(lines, are_cells_wide=True)] == [1]


def test_a_file_or_link_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "there.py").touch()
    text = "`there.py`, `docs/there.py`, `gone.py`, `agent.toml`\n[one](there.py#part) [two](away.md)\n"
    (tmp_path / "docs" / "page.md").write_text(text)
    monkeypatch.setattr(house_lint, "ROOT", tmp_path)
    monkeypatch.setattr(house_lint, "documents", lambda: [Path("docs/page.md")])
    assert list(house_lint.missing_files()) == [
        "docs/page.md:1: gone.py does not exist",
        "docs/page.md:2: the link away.md leads nowhere",
    ]

"""The lint of names and words: what it reads of a module."""

from __future__ import annotations

import ast

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
    assert list(house_lint.unused_allowances()) == []
    monkeypatch.setitem(house_lint.ALLOWED_LITERALS, "no text has this piece", "a reason")
    (said,) = house_lint.unused_allowances()
    assert "'no text has this piece'" in said

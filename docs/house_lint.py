"""Holds the names and words of the house: ``python -m docs.house_lint``, part of ``make lint``.

Three rules: no two public classes of one name in the product; no banned word in the name of a module, class,
function or parameter (docs/glossary.md has the words to use); no banned phrase in docstrings, comments,
documents and string literals, which are what people read in messages, logs and events. Prints each place and
exits 1 when there is one.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PRODUCT: Final = ("pmdaemon", "sla_server", "gateway_agent", "dashboard")

NAMES: Final = {
    "brain": "controller",
    "looker": "sql_worker",
    "courier": "publisher",
    "luggage": "session state",
    "vigil": "timeouts",
    "clerk": "certificate worker",
    "doorway": "listener",
    "strangers": "unregistered",
    "teller": "reporter",
    "rota": "due queue",
    "surroundings": "inventory",
    "handover": "inbox or migration",
}
"""Banned within identifiers, and what to say instead."""

PHRASES: Final = {
    r"\banew\b": "again",
    r"\bof late\b": "recently",
    r"\banother than\b": "different from",
    r"\bis over\b": "has ended",
    r"\bshall\b": "should",
    r"\b(?:stands|stand) (?:in|on|under|for|beside|behind|within)\b": "is in, is stored in",
}
"""Banned in prose, and what to say instead."""

LITERAL_PHRASES: Final = PHRASES | {
    r"\b(?:nobody|somebody|whoever)\b": "no process, another program, the part that"
}
"""Banned in string literals."""

ALLOWED_LITERALS: Final = {
    "its time is over": "services/control: stored in throttles of every release, and a test has it",
    "Nobody is throttled": "of the page and `sla top`, where it is people who read their volumes' names",
    "nobody to slow down": "services/control: stored in decisions, and searched for by operators",
}
"""Pieces of literals that may stay, and why."""


@functools.cache
def modules() -> list[tuple[Path, ast.Module, str]]:
    """Path, tree and text of each module of the product."""
    paths = [path for package in PRODUCT for path in sorted((ROOT / package).rglob("*.py"))]
    texts = [(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]
    return [(path, ast.parse(text), text) for path, text in texts]


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each definition, parameter and variable."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id if isinstance(node, ast.Name) else node.attr


def prose(tree: ast.Module, text: str) -> Iterator[tuple[int, str]]:
    """Line and text of each comment and docstring line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            for offset, line in enumerate(node.value.value.splitlines()):
                yield node.lineno + offset, line


def literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of each string literal that is no docstring, without what is allowed."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            text = node.value
            for piece in ALLOWED_LITERALS:
                text = text.replace(piece, "")
            yield node.lineno, text


def twice() -> Iterator[str]:
    """Public classes that share a name."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path, tree, _ in modules():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path)
    for name, paths in sorted(places.items()):
        if len(paths) > 1:
            yield f"{name}: two public classes of one name, in {' and '.join(map(str, paths))}"


def banned_names() -> Iterator[str]:
    """Identifiers with a banned word in them."""
    for path, tree, _ in modules():
        for line, name in sorted(set(identifiers(tree)) | {(1, path.stem)}):
            words = re.findall(r"[A-Z]?[a-z]+", name)
            for word in {word.lower() for word in words} & NAMES.keys():
                yield f"{path}:{line}: {name}: say {NAMES[word]}, not {word}"


def banned_phrases() -> Iterator[str]:
    """Prose and literals with a banned phrase in them."""
    lines: list[tuple[Path, int, str]] = []
    spoken: list[tuple[Path, int, str]] = []
    for path, tree, source in modules():
        lines += [(path, line, text) for line, text in prose(tree, source)]
        spoken += [(path, line, text) for line, text in literals(tree)]
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        place = path.relative_to(ROOT)
        if place.parts[:2] not in (
            ("docs", "adr"),
            ("docs", "spec"),
        ):  # records, and a specification as it was given
            lines += [(place, number, text) for number, text in enumerate(path.read_text().splitlines(), 1)]
    for phrases, found_in in ((PHRASES, lines), (LITERAL_PHRASES, spoken)):
        for place, number, text in found_in:
            for pattern, instead in phrases.items():
                if found := re.search(pattern, text, re.IGNORECASE):
                    yield f"{place}:{number}: say {instead}, not {found.group().lower()}"


def unused_allowances() -> Iterator[str]:
    """Allowed pieces that no literal has any more."""
    texts = [
        node.value
        for _, tree, _ in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    for piece in ALLOWED_LITERALS:
        if not any(piece in text for text in texts):
            yield f"docs/house_lint.py: no literal has {piece!r} any more: remove it from ALLOWED_LITERALS"


def main() -> int:
    """Print what breaks a rule; the number of rules' breaches decides the exit status."""
    found = [*twice(), *banned_names(), *banned_phrases(), *unused_allowances()]
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
